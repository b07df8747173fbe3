"""``detect_environment``: a table of environments, each with the result or the error."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import pytest

from reloadpg.environment import DistributedEnvironmentError, detect_environment
from reloadpg.environment.launchers import _warn_of_other_numbers, _warn_of_unknown_launcher

TORCHRUN = "RANK=5 LOCAL_RANK=1 WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n0 MASTER_PORT=29500"
STEP = "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=8 SLURM_PROCID=5 SLURM_LOCALID=1"
NODES = (
    "SLURM_JOB_ID=1234 SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[1-2] "
    "SLURM_STEP_TASKS_PER_NODE=4(x2)"
)
SLURM = f"{STEP} {NODES}"
SHELL = "SLURM_JOB_ID=1234 SLURM_NTASKS=8 SLURM_JOB_NODELIST=n[1-2] SLURM_TASKS_PER_NODE=4(x2)"
OMPI1 = (
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=2095316993"
)
OMPI2 = (
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_NAMESPACE=2095316993"
)
MEET = "MASTER_ADDR=n0 MASTER_PORT=29500"

SLURM_PORT = 15000 + (1234 * 211) % 15001
SINGLE = ("single", 0, 0, 1, 1, 0, 1, "127.0.0.1", 0)
TORCHRUN_IS = ("torchrun", 5, 1, 8, 4, 1, 2, "n0", 29500)
SLURM_IS = ("slurm", 5, 1, 8, 4, 1, 2, "n1", SLURM_PORT)


@dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
        name: what it is.
        environ: ``NAME=value`` words; ``<name>`` gives the empty string, ``~NAME`` removes one.
        expected: all fields in order, or the parts of the error's text.
    """

    name: str
    environ: str
    expected: tuple[object, ...] | list[str]

    def variables(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for word in self.environ.split():
            if word.startswith("~"):
                del found[word[1:]]
            else:
                name, _, value = word.partition("=")
                found[name] = "" if value == "<empty>" else value.replace("<blank>", " ")
        return found


ROWS = [
    # -- no variable that identifies the rank
    Row("nothing", "", SINGLE),
    # -- torchrun
    Row("torchrun", TORCHRUN, TORCHRUN_IS),
    Row("torchrun of 1, any port",
        "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=n0 MASTER_PORT=0",
        ("torchrun", 0, 0, 1, 1, 0, 1, "n0", 0)),
    Row("uneven nodes without GROUP_RANK",
        "RANK=4 LOCAL_RANK=1 WORLD_SIZE=5 LOCAL_WORLD_SIZE=2 GROUP_WORLD_SIZE=2 " + MEET,
        ("torchrun", 4, 1, 5, 2, None, 2, "n0", 29500)),
    Row("torchrun under mpirun", f"{OMPI2} {TORCHRUN}", TORCHRUN_IS),
    Row("torchrun only WORLD_SIZE", "WORLD_SIZE=4",
        ["missing RANK, MASTER_ADDR, MASTER_PORT", "WORLD_SIZE='4'"]),
    Row("WORLD_SIZE=1 alone", "WORLD_SIZE=1", ("torchrun", 0, 0, 1, 1, 0, 1, "127.0.0.1", 0)),
    Row("env://", f"RANK=5 WORLD_SIZE=8 {MEET}",
        ("torchrun", 5, None, 8, None, None, None, "n0", 29500)),
    Row("env:// on this host", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29500",
        ("torchrun", 1, 1, 2, 2, 0, 1, "localhost", 29500)),
    Row("env:// with local rank too large", f"RANK=5 LOCAL_RANK=8 WORLD_SIZE=8 {MEET}",
        ["LOCAL_RANK='8' is not below WORLD_SIZE=8"]),
    Row("env:// with one rank a node", f"RANK=5 WORLD_SIZE=8 LOCAL_WORLD_SIZE=1 {MEET}",
        ("torchrun", 5, 0, 8, 1, 5, 8, "n0", 29500)),
    Row("env:// and the same SLURM step", f"RANK=5 WORLD_SIZE=8 {MEET} {SLURM}",
        ("torchrun", 5, None, 8, None, None, None, "n0", 29500)),
    Row("LOCAL_RANK alone under srun", f"{SLURM} LOCAL_RANK=1", ["missing RANK, WORLD_SIZE"]),
    Row("LOCAL_RANK=0 alone under srun", f"{SLURM} LOCAL_RANK=0", SLURM_IS),
    Row("RANK and a SLURM step", f"RANK=0 {SLURM}", ["missing WORLD_SIZE"]),
    Row("LOCAL_RANK=0 alone", "LOCAL_RANK=0", SINGLE),
    Row("rank is world size", TORCHRUN + " RANK=8", ["RANK='8' is not below WORLD_SIZE=8"]),
    Row("negative rank", TORCHRUN + " RANK=-1", ["RANK='-1' is negative"]),
    Row("empty rank", TORCHRUN + " RANK=<empty>", ["RANK='' is empty"]),
    Row("rank with blank", TORCHRUN + " RANK=5<blank>", ["RANK='5 ' is not a whole number"]),
    Row("other digits", TORCHRUN + " RANK=\u0663", ["RANK='\u0663' is not a whole number"]),
    Row("endless number", TORCHRUN + " RANK=" + "9" * 5000, ["is not a whole number"]),
    Row("port 0 of several", TORCHRUN + " MASTER_PORT=0", ["MASTER_PORT='0' is below 1"]),
    Row("address with port", TORCHRUN + " MASTER_ADDR=h:29500", ["MASTER_ADDR='h:29500'"]),
    Row("torchrun, IPv6 of a link", TORCHRUN + " MASTER_ADDR=fe80::2%eth0",
        ("torchrun", 5, 1, 8, 4, 1, 2, "fe80::2%eth0", 29500)),
    Row("IPv6 in brackets", TORCHRUN + " MASTER_ADDR=[fd00::2]",
        ["MASTER_ADDR='[fd00::2]' has brackets", "Set it to fd00::2, without them."]),
    Row("the port variable of a service in Kubernetes",
        TORCHRUN + " MASTER_PORT=tcp://10.3.0.1:29500",
        ["MASTER_PORT='tcp://10.3.0.1:29500'", "service named 'master'", "enableServiceLinks"]),
    Row("node rank out of range", TORCHRUN + " GROUP_RANK=2 GROUP_WORLD_SIZE=2",
        ["GROUP_RANK='2' is not below GROUP_WORLD_SIZE=2"]),
    # -- SLURM
    Row("SLURM step", SLURM, SLURM_IS),
    Row("SLURM step of 1, bare",
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0",
        ("slurm", 0, 0, 1, 1, 0, 1, "127.0.0.1", 0)),
    Row("SLURM uneven nodes",
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=5 SLURM_PROCID=4 SLURM_LOCALID=1 SLURM_JOB_ID=1234 "
        "SLURM_NODEID=1 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[1-2] "
        "SLURM_STEP_TASKS_PER_NODE=3,2",
        ("slurm", 4, 1, 5, None, 1, 2, "n1", SLURM_PORT)),
    Row("SLURM step on part of the job",
        f"{SLURM} SLURM_JOB_NODELIST=n[0-9] SLURM_NTASKS=40 SLURM_TASKS_PER_NODE=4(x10)", SLURM_IS),
    Row("mpirun in an allocation: ranks of its daemon",
        f"{OMPI2} {MEET} SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 "
        "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_JOB_ID=1234 SLURM_NODEID=1 "
        "SLURM_STEP_NODELIST=n[1-2] SLURM_STEP_TASKS_PER_NODE=1(x2)",
        ("openmpi", 5, 1, 8, 4, 1, 2, "n0", 29500)),
    Row("salloc shell", SHELL, SINGLE),
    Row("sbatch shell", SHELL + " SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0", SINGLE),
    Row("a container without the step's variables", "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8",
        ["missing SLURM_STEP_ID, SLURM_STEP_NUM_TASKS; set are SLURM_PROCID='5'"]),
    Row("SLURM without local id", SLURM + " ~SLURM_LOCALID", ["missing SLURM_LOCALID"]),
    Row("SLURM without job id", SLURM + " ~SLURM_JOB_ID",
        ["missing SLURM_JOB_ID and SLURM_STEP_ID or MASTER_PORT"]),
    *(
        Row(f"SLURM nodes {nodes}", f"{SLURM} SLURM_STEP_NODELIST={nodes}",
            (*SLURM_IS[:-2], host, SLURM_PORT))
        for nodes, host in {
            "node1": "node1",
            "node[1-3,7]-ib": "node1-ib",
            "rack[1-2]node[3-4]": "rack1node3",
            "n[08-11]": "n08",
            "login,n[1-2],gpu[3]x": "login",
            "10.0.0.[1-2]": "10.0.0.1",
        }.items()
    ),
    *(
        Row(f"SLURM malformed nodes {nodes}", f"{SLURM} SLURM_STEP_NODELIST={nodes}",
            [f"SLURM_STEP_NODELIST={nodes.replace('<blank>', ' ')!r}"])
        for nodes in (",", "n[1-2", "n[[1]]", "n[]")
    ),
    # -- OpenMPI
    Row("mpirun, one host", OMPI1, ("openmpi", 1, 1, 2, 2, 0, 1, "127.0.0.1", 22315)),
    Row("mpirun, two hosts, address", f"{OMPI2} {MEET}",
        ("openmpi", 5, 1, 8, 4, 1, 2, "n0", 29500)),
    Row("mpirun by node", f"{OMPI2} {MEET} OMPI_COMM_WORLD_LOCAL_RANK=2",
        ("openmpi", 5, 2, 8, 4, None, 2, "n0", 29500)),
    Row("mpirun, uneven hosts", f"{OMPI2} {MEET} OMPI_COMM_WORLD_LOCAL_SIZE=3",
        ("openmpi", 5, 1, 8, 3, None, None, "n0", 29500)),
    Row("mpirun without job", OMPI1 + " ~PMIX_NAMESPACE",
        ["missing PMIX_NAMESPACE or MASTER_PORT"]),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_detection_returns_one_identity_or_names_variable_and_value(row: Row) -> None:
    """Every row gives all nine fields from one source, or an error with these words."""
    variables = row.variables()
    before = dict(variables)
    if isinstance(row.expected, tuple):
        assert astuple(detect_environment(variables)) == row.expected
    else:
        with pytest.raises(DistributedEnvironmentError) as caught:
            detect_environment(variables)
        for part in row.expected:
            assert part in str(caught.value)
        assert "Nothing was opened or written" in str(caught.value)
        assert isinstance(caught.value, (OSError, ValueError))
    assert variables == before


STALE = "RANK=0 WORLD_SIZE=1 MASTER_ADDR=n0 MASTER_PORT=29500"
LARGE = "RANK=5 WORLD_SIZE=16 MASTER_ADDR=n0 MASTER_PORT=29500"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (f"{STALE} {SLURM}", "RANK=0 and WORLD_SIZE=1 are set and used, but slurm"),
        (f"{STALE} {OMPI1}", "openmpi started this process as task 1 of 2"),
        (f"{LARGE} {SLURM}", "WORLD_SIZE=16 are set and used, but slurm started this process"),
        (f"{LARGE} RANK=10 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 {SLURM}", ""),
        (f"{LARGE} {SLURM} TORCHELASTIC_RUN_ID=none", ""),
        (f"{STALE} {SLURM} TORCHELASTIC_RUN_ID=none", ""),
        (STALE, ""),
    ],
)
def test_other_numbers_than_those_of_slurm_or_openmpi_are_a_warning(
    environ: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Variables that an earlier job has left (failure 45). torchrun in each task, and tasks that
    each start several ranks, set them for a reason.

    The warning appears once, since the rank is looked up often.
    """
    _warn_of_other_numbers.cache_clear()
    variables = Row("", environ, ()).variables()
    for _ in range(2):
        found = detect_environment(variables)
    assert found.source == "torchrun"
    assert found.rank == int(variables["RANK"])
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == bool(said)
    assert all(said in text and "unset RANK" in text for text in warned)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=4", "MV2_COMM_WORLD_SIZE=4"),
        ("PMI_RANK=1 PMI_SIZE=4", "PMI_SIZE=4"),
        ("PMIX_RANK=1", "PMIX_RANK=1"),
        ("JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_SIZE=4", "JSM_NAMESPACE_SIZE=4"),
        ("PET_NODE_RANK=1 PET_NNODES=2 PET_NPROC_PER_NODE=1", "PET_NNODES=2"),
        ("JOB_COMPLETION_INDEX=3", "JOB_COMPLETION_INDEX=3"),
        ("PMI_RANK=0 PMI_SIZE=1", ""),
        (f"PMI_RANK=1 PMI_SIZE=4 {SLURM}", ""),
        (f"PET_NODE_RANK=1 PET_NNODES=2 {TORCHRUN}", ""),
    ],
)
def test_a_task_of_an_unknown_launcher_is_a_warning_that_names_the_variables(
    environ: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each task would be rank 0 of 1 without a word (failure 45). The warning appears once."""
    _warn_of_unknown_launcher.cache_clear()
    variables = Row("", environ, ()).variables()
    for _ in range(2):
        found = detect_environment(variables)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == bool(said)
    if said:
        assert astuple(found) == SINGLE
        assert f"has set {said}. " in warned[0]
