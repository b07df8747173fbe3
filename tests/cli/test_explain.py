"""``explain`` says of a script's groups what a real job of that size says of them."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from cli_process import command, decoded

import reloadpg
from reloadpg.cli import main
from reloadpg.cli.explain_policy import Explanation, decide
from reloadpg.groups.selection import Selection
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.timeout(240)

# Every way to create a group that gloo has, so that a real job can run the same script.
SCRIPT = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import reloadpg

assert sys.argv[1:] == ["--tp", "2"], sys.argv
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.new_group(group_desc="before")
reloadpg.install(backends={"gloo"})
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for rank in range(4):
    dist.new_group([rank], group_desc="alone")
local = [0, 2] if dist.get_rank() in (0, 2) else [1, 3]
dist.new_group(local, use_local_synchronization=True, group_desc="local")
dist.new_group(ranks=[3, 1, 0], backend="gloo", group_desc="three")
dist.new_group([0, 3], group_desc="of others")
tensor = torch.ones(2)
dist.all_reduce(tensor, group=mesh.get_group("tp"))
dist.barrier()
GROUPS = [
    (group.desc, list(group.ranks))
    for group in reloadpg.status().groups
    if group.name != dist.group.WORLD.group_name
]
"""


def real_groups(rank, world_size, script):
    """What the job's own status says of its reloadable groups."""
    sys.argv = [script, "--tp", "2"]
    groups = runpy.run_path(script)["GROUPS"]
    reloadpg.uninstall()
    return groups


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def explained(script):
    """What is said of rank 1."""
    options = ["--world-size", 4, "--rank", 1, "--json", "--", "--tp", "2"]
    process = command("explain", script, *options)
    assert process.returncode == 0, process.stdout + process.stderr
    return decoded(process)


def test_reloadable_groups_are_those_of_a_real_job(script, explained):
    """Descriptions and members, in the order of creation; WORLD is reloadable in both."""
    real = run_ranks(real_groups, 4, args=(str(script),), timeout=60)[1]
    fake = [one for one in explained["groups"] if one["reloadable"]]
    assert fake[0]["name"] == "WORLD"
    assert sorted((one["desc"], one["ranks"]) for one in fake[1:]) == sorted(map(tuple, real))
    descriptions = {"mesh_dp", "mesh_tp", "local", "three"}
    assert {one["desc"] for one in fake[1:]} == descriptions


def test_groups_that_bypass_say_why(explained):
    """Single ranks, and what was created before the script called ``install``."""
    why = {one["desc"]: one["reason"] for one in explained["groups"] if not one["reloadable"]}
    assert why == {
        "before": "created before reloadpg.install()",
        "alone": "single rank (smaller than min_size=2)",
    }


def test_groups_of_other_ranks_are_counted(explained):
    """Three ranks' own, one row and one column of the mesh, and one pair."""
    assert explained["groups_of_others"] == 3 + 2 + 1


def test_the_policy_is_what_the_script_gave_install(explained):
    """So gloo is reloadable here, and holds no memory of a GPU."""
    assert explained["policy"] == {"backends": ["gloo"], "min_size": 2, "world": True}
    assert explained["memory"]["communicators"] == 0


NCCL = """
import os
import torch
import torch.distributed as dist

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", local_rank))
dist.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]], group_desc="half")
dist.new_group(backend="gloo", group_desc="control")
dist.new_group([8, 9], backend="nccl", group_desc="pair")
if dist.get_rank() in (8, 9):
    dist.destroy_process_group(dist.new_group([8, 9], group_desc="short"))
else:
    dist.new_group([8, 9])
dist.all_gather(list(torch.ones(16, 1)), torch.ones(1))
raise ValueError("broken on purpose")
"""


@pytest.fixture(scope="module")
def nccl(tmp_path_factory):
    """A script for GPUs that are not here, which then raises; a page, for rank 9 of 16."""
    path = tmp_path_factory.mktemp("nccl") / "train.py"
    path.write_text(NCCL)
    return command("explain", path, "--world-size", 16, "--rank", 9)


def rows(page):
    """The table: the words of each row by its description."""
    lines = page.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("group "))
    end = lines.index("", header)
    return [line.split() for line in lines[header + 2 : end]]


def test_groups_of_gpus_are_explained_where_there_are_none(nccl):
    """The decision follows the backend that was asked for; of a mixed group the CPU side stays."""
    assert rows(nccl.stdout) == [
        ["WORLD", "16", "0-15", "cpu:gloo,cuda:nccl", "reloadable", "cpu:gloo", "stays"],
        [
            *["1", "control", "16", "0-15", "gloo", "bypasses"],
            *["gloo", "holds", "no", "memory", "of", "an", "accelerator"],
        ],
        ["2", "pair", "2", "8-9", "nccl", "reloadable"],
        [
            *["3", "short", "2", "8-9", "cpu:gloo,cuda:nccl", "reloadable"],
            *["cpu:gloo", "stays,", "destroyed", "later"],
        ],
    ]


def test_the_memory_is_said_to_be_an_estimate_with_its_source(nccl):
    """WORLD and the pair: what was destroyed is not counted."""
    assert "give back about 1.0 to 3.2 GB" in nccl.stdout
    assert "(2 NCCL communicators, each used before)" in nccl.stdout
    assert "This is an estimate: 0.5 to 1.6 GB a communicator" in nccl.stdout


def test_a_script_that_raises_is_reported_below_the_table(nccl):
    """With its traceback, from the script on; exit code 1."""
    assert nccl.returncode == 1
    assert "The script did not end well: ValueError: broken on purpose" in nccl.stdout
    assert 'raise ValueError("broken on purpose")' in nccl.stdout
    assert "_explain_child.py" not in nccl.stdout
    assert "does not call reloadpg.install()" in nccl.stdout


TALKS = """
import sys
import torch.distributed as dist
from torch.distributed import scatter_object_list

dist.init_process_group("NCCL")
assert dist.get_backend() == dist.Backend.NCCL, dist.get_backend()
if dist.get_backend() == "nccl":
    dist.new_group(group_desc="on nccl")
control = dist.new_group(backend="gloo", group_desc="control")
assert dist.get_backend(control) == dist.Backend.GLOO, dist.get_backend(group=control)
mixed = dist.new_group(backend="cpu:gloo,cuda:nccl")
assert dist.get_backend(mixed) == "cpu:gloo,cuda:nccl", dist.get_backend(mixed)

torchs = {"__name__": "torch.somewhere", "dist": dist}
exec("dist.new_group(backend=dist.get_backend(), group_desc='of torch')", torchs)
exec("backend = dist.get_backend()", torchs)
assert torchs["backend"] == "fake", torchs["backend"]

dist.monitored_barrier(control)
plan = ["mine"]
dist.broadcast_object_list(plan, src=0)
dist.broadcast_object_list(plan, src=1, group=control)
assert dist.recv_object_list(plan, src=0) == 0
assert plan == ["mine"], plan
part = [None]
scatter_object_list(part, None, src=0)
assert part == [None], part
scatter_object_list(part, ["a", "b", "c"], src=1)
assert part == ["b"], part

dist.destroy_process_group()
dist.init_process_group()
assert dist.get_backend() == "undefined", dist.get_backend()
"""


@pytest.mark.matrix
def test_a_script_that_asks_for_its_backend_and_receives_objects(tmp_path):
    """``get_backend`` answers what the script asked for, and torch's own code what is there.

    What would wait for other ranks, or read what they send, returns at once: objects stay as they
    were, and a rank that scatters gets its own part.
    """
    script = tmp_path / "talks.py"
    script.write_text(TALKS)
    options = ["--world-size", 3, "--rank", 1, "--device", "cuda:0", "--json"]
    found = decoded(command("explain", script, *options))
    assert found["error"] == "", found["traceback"]
    assert [(one["desc"], one["backend"]) for one in found["groups"]] == [
        ("", "nccl"),
        ("on nccl", "nccl"),
        ("control", "gloo"),
        ("", "cpu:gloo,cuda:nccl"),
        ("of torch", "nccl"),
        ("", "cuda:nccl"),
    ]


def test_a_script_that_does_not_end_is_ended(tmp_path):
    """At the time limit; what it created until then is shown, and no process is left."""
    script = tmp_path / "hangs.py"
    script.write_text(
        "import os, time, pathlib\n"
        "import torch.distributed as dist\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        "dist.init_process_group('nccl')\n"
        "time.sleep(600)\n"
    )
    process = command("explain", script, "--world-size", 64, "--timeout", "1", "--json")
    found = decoded(process)
    assert found["timed_out"] is True
    assert [one["name"] for one in found["groups"]] == ["WORLD"]
    assert process.returncode == 0
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_reloadpgs_own_bring_up_needs_no_other_rank(tmp_path):
    """``init_distributed`` would wait for the job; it makes the same groups and mesh here."""
    script = tmp_path / "ours.py"
    script.write_text(
        "import reloadpg\n"
        "reloadpg.install()\n"
        "reloadpg.init_distributed(mesh_dims={'pp': 2, 'dp_shard': -1}, seed=1)\n"
    )
    process = command("explain", script, "--world-size", 8, "--rank", 5, "--json")
    found = decoded(process)
    assert found["error"] == "", found["traceback"]
    assert [(one["desc"], one["ranks"]) for one in found["groups"]] == [
        ("", list(range(8))),
        ("mesh_pp", [1, 5]),
        ("mesh_dp_shard", [4, 5, 6, 7]),
    ]
    assert {one["backend"] for one in found["groups"]} == {"nccl"}


def test_a_script_that_creates_no_group(tmp_path):
    """Exit code 1, and its exit code is named."""
    script = tmp_path / "nothing.py"
    script.write_text("import sys\nsys.exit(3)\n")
    process = command("explain", script, "--world-size", 2)
    assert process.returncode == 1
    assert "created no process group" in process.stdout
    assert "Groups of other processes that the script starts are not seen" in process.stdout
    assert "the script called sys.exit(3)" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no_such_file.py", "--world-size", "2"], "there is no file 'no_such_file.py'"),
        ([__file__, "--world-size", "2", "--rank", "2"], "--rank 2 is not in a job of 2 ranks"),
        ([__file__, "--world-size", "2", "--device", "foo"], "torch knows no device 'foo'"),
        ([__file__, "--world-size", "2", "--device", ""], "(cpu, cuda, "),
        ([__file__, "--world-size", "2", "--device", "cuda:x"], "torch knows no device 'cuda:x'"),
    ],
)
def test_what_cannot_be_explained_is_exit_code_2(capsys, arguments, words):
    """Before anything is run."""
    assert main(["explain", *arguments]) == 2
    assert words in capsys.readouterr().err


def noted(devices, size=4, **values):
    """A group as a run notes it."""
    return {
        "name": "5",
        "desc": "undefined",
        "ranks": list(range(size)),
        "backend": ",".join(f"{device}:{name}" for device, name in devices.items()),
        "devices": devices,
        "is_world": False,
        "installed": False,
        **values,
    }


@pytest.mark.parametrize(
    ("policy", "group", "selected", "reason"),
    [
        ({}, noted({"cuda": "nccl"}), ("cuda",), ""),
        ({}, noted({"cpu": "gloo", "cuda": "gloo"}), (), "gloo holds no memory of an accelerator"),
        ({}, noted({"cuda": "fake"}), (), "fake holds no memory of an accelerator"),
        ({}, noted({"cpu": "mpi"}), (), "mpi holds no memory of an accelerator"),
        ({}, noted({"cpu": "other"}), (), "other serves no accelerator here"),
        ({}, noted({"cuda": "nccl"}, 1), (), "single rank (smaller than min_size=2)"),
        ({"min_size": 1}, noted({"cuda": "nccl"}, 1), ("cuda",), ""),
        ({"min_size": 3}, noted({"cuda": "nccl"}, 2), (), "2 ranks: smaller than min_size=3"),
        (
            {"backends": frozenset({"nccl"})},
            noted({"cpu": "gloo"}),
            (),
            "gloo: not in install(backends=['nccl'])",
        ),
        ({"world": False}, noted({"cuda": "nccl"}, is_world=True), (), "install(world=False)"),
        ({}, noted({"cpu": "gloo", "cuda": "nccl"}), ("cuda",), "cpu:gloo stays"),
    ],
)
def test_reasons(policy, group, selected, reason):
    """Each way to bypass, in words."""
    (decision,) = decide([group], Selection(**policy), script_installs=False)
    assert (decision.selected, decision.reason) == (selected, reason)


def test_memory_counts_nccl_communicators_alone():
    """Of the groups that are reloadable and not destroyed again."""
    groups = [
        noted({"cuda": "nccl"}),
        noted({"cuda": "nccl"}, destroyed=True),
        noted({"cuda": "nccl"}, 1),
        noted({"cpu": "gloo", "cuda": "nccl-lazy"}),
        noted({"xpu": "xccl"}),
    ]
    decisions = decide(groups, Selection(), script_installs=False)
    explanation = Explanation(0, 4, Selection(), decisions, 0)
    assert explanation.communicators == 2
    assert explanation.memory_bytes == (1_000_000_000, 3_200_000_000)
    json.dumps(explanation.to_dict())
