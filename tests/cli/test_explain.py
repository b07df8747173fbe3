"""``explain`` lists the groups that a real job of that size would have."""

import json
import re
import runpy
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from cli.cli_process import LIMIT, called, command, decoded, environment
from helpers.sampling import sampled

import reloadpg
from reloadpg.cli import main
from reloadpg.testing import run_ranks

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
    """The reloadable groups in the status of a real job."""
    sys.argv = [script, "--tp", "2"]
    groups = runpy.run_path(script)["GROUPS"]
    reloadpg.uninstall()
    return groups


@pytest.mark.slow
def test_the_groups_equal_those_of_a_real_job(tmp_path):
    """With the reasons of the other groups, and the script's policy."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--world-size", 4, "--rank", 1, "--timeout", LIMIT, "--json"]
    process = command("explain", script, *options, "--", "--tp", 2)
    explained = decoded(process)
    assert process.returncode == 0, process.stdout
    real = run_ranks(real_groups, 4, args=(str(script),), timeout=180)[1]
    fake = [one for one in explained["groups"] if one["reloadable"]]
    assert (fake[0]["name"], fake[0]["made_by"]) == ("WORLD", "__main__")
    assert sorted((one["desc"], one["ranks"]) for one in fake[1:]) == sorted(map(tuple, real))
    assert {one["desc"] for one in fake[1:]} == {"mesh_dp", "mesh_tp", "local", "three"}
    why = {one["desc"]: one["reason"] for one in explained["groups"] if not one["reloadable"]}
    assert why == {
        "before": "created before reloadpg.install()",
        "alone": "1 rank, fewer than min_size=2",
    }
    assert explained["memory"]["communicators"] == 0  # gloo holds no memory of a GPU


NCCL = """
import torch.distributed as dist

dist.init_process_group("cpu:gloo,cuda:nccl")
dist.split_group(split_ranks=[[*range(8)], [*range(8, 16)]], group_desc="half")
dist.new_group(backend="gloo", group_desc="control")
dist.new_group([8, 9], backend="nccl", group_desc="pair")
dist.new_group([9], backend="nccl", group_desc="alone")
dist.new_group(range(1, 16, 2), group_desc="odd")
raise ValueError("broken on purpose")
"""


def test_nccl_groups_are_explained_by_the_requested_backend(tmp_path):
    """On the CPU. A script that raises has its traceback on stderr."""
    script = tmp_path / "train.py"
    script.write_text(NCCL)
    process = command("explain", script, "--world-size", 16, "--rank", 9, "--timeout", LIMIT)
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    header = lines.index("group size reloadpg backend created by set ranks desc")
    table = [line.partition(" ")[2] for line in lines[header + 2 : lines.index("", header)]]
    assert table == [
        "16 reloadable cpu:gloo,cuda:nccl __main__ trainer 0-15",
        "8 reloadable cpu:gloo,cuda:nccl __main__ trainer 8-15 half",
        "16 bypassed gloo __main__ trainer 0-15 control",
        "2 reloadable nccl __main__ trainer 8-9 pair",
        "1 bypassed nccl __main__ trainer 9 alone",
        "8 reloadable cpu:gloo,cuda:nccl __main__ trainer 1, 3, ..., 15 odd",
    ]
    page = "\n".join(lines)
    assert "4 of 6 groups of this rank would be reloadable." in page
    assert "3 groups: cpu:gloo stays" in page
    assert "1 group: backend gloo serves no accelerator" in page
    assert "1 group: 1 rank, fewer than min_size=2" in page
    assert "release about 2.0 to 6.4 GB of this rank's GPU: 4 NCCL communicators" in page
    assert "The script failed: ValueError: broken on purpose" in page
    assert "does not call reloadpg.install(); shown as if it did" in page
    assert process.returncode == 1
    assert 'raise ValueError("broken on purpose")' in process.stderr
    assert "Only rank 9 ran" in page
    assert "use --rank 0, which receives least" in page


SLIME = Path(reloadpg.__file__).parents[1] / "examples" / "slime_sequence.py"


@pytest.mark.slow
def test_a_default_group_that_the_script_selects_later_is_reloadable():
    """slime registers it after its creation, and the example destroys it at its end. The groups of
    this process are fake: the library does not say that their backend is not selected.
    """
    process = command("explain", SLIME, "--world-size", 2, "--timeout", LIMIT)
    assert process.returncode == 0, process.stderr
    assert re.search(r"^WORLD +2 +reloadable +gloo ", process.stdout, re.MULTILINE)
    assert "2 of 2 groups of this rank would be reloadable." in process.stdout
    assert "fake" not in process.stderr
    assert "step 1: " in process.stderr


@pytest.fixture
def explained(tmp_path):
    """A function that explains the text of a script: exit code and JSON."""

    def explained(text, *options, until=None):
        path = tmp_path / "script.py"
        path.write_text(text)
        limit = ("--timeout", str(LIMIT))
        code, output = called("explain", path, *limit, *options, "--json", until=until)
        return code, json.loads(output)

    return explained


SETS = """
import sys, types
import torch.distributed as dist
import reloadpg

engine = types.ModuleType("engine.parallel")
exec("import torch.distributed as d\\ndef make(): return d.new_group()", vars(engine))
reloadpg.install(backends={"nccl"}, sets={"engine": "engine.*", None: "nothing"})
dist.init_process_group("nccl")
engine.make()
with reloadpg.region(None):
    dist.new_group()
"""


def test_the_set_and_creator_of_each_group_are_explained(explained):
    code, found = explained(SETS, "--world-size", "4")
    made = [(one["made_by"], one["in_set"], one["reloadable"]) for one in found["groups"]]
    assert made == [
        ("__main__", "trainer", True),
        ("engine.parallel", "engine", True),
        ("__main__", None, False),
    ]
    assert "in no set" in found["groups"][2]["reason"]
    assert code == 0


BACKENDS = """
import torch
import torch.distributed as dist

dist.init_process_group("NCCL")
dist.new_group(backend=dist.get_backend(), group_desc="handed on")
dist.new_group(backend="gloo", group_desc="control")
dist.new_group(backend="cpu:gloo,cuda:nccl")
plan = ["mine"]
dist.broadcast_object_list(plan, src=0)
assert plan == ["mine"], plan
gathered = [None] * 3
dist.all_gather_object(gathered, "mine")
dist.destroy_process_group()
dist.init_process_group()
dist.new_group(group_desc="of the default")
"""


@pytest.mark.matrix
def test_backends_are_as_requested(explained):
    """Also one that the script reads from a group and passes on, and none."""
    _, found = explained(BACKENDS, "--world-size", "3")
    assert found["error"] == ""
    assert {(one["desc"], one["backend"], one["reloadable"]) for one in found["groups"]} >= {
        ("", "cuda:nccl", True),
        ("of the default", "cuda:nccl", True),
    }
    code, found = explained(BACKENDS.partition("dist.destroy")[0], "--world-size", "3")
    assert code == 0
    assert [(one["desc"], one["backend"], one["reloadable"]) for one in found["groups"]] == [
        ("", "nccl", True),
        ("handed on", "nccl", True),
        ("control", "gloo", False),
        ("", "cpu:gloo,cuda:nccl", True),
    ]


SPLITS = """
import torch.distributed as dist

dist.init_process_group("nccl")
parent = dist.new_group([1, 2, 3])
part = dist.split_group(parent, [[2, 0], [1]], group_desc="part")
assert dist.get_process_group_ranks(part) == [1, 3], part
assert dist.split_group(split_ranks=[[0, 1]], group_desc="of others") is None
"""


@pytest.mark.matrix
def test_the_parts_of_a_split_are_explained(explained):
    """Their ranks are those in the parent. Torch splits no group without a device."""
    code, found = explained(SPLITS, "--world-size", "4", "--rank", "3")
    assert (code, found["error"]) == (0, "")
    group = found["groups"][2]
    assert [len(found["groups"]), group["desc"], group["ranks"]] == [3, "part", [1, 3]]
    assert (group["backend"], group["reloadable"]) == ("nccl", True)


TRAINS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=mesh.get_group("dp"))
for _ in range(2):
    model(torch.ones(2, 2)).sum().backward()
assert model.module.weight.grad.sum() != 0
sharded = torch.nn.Linear(8, 8)
fully_shard(sharded, mesh=init_device_mesh("cpu", (8,)))
sharded(torch.ones(2, 8)).sum().backward()
dist.new_subgroups(4, group_desc="node")
"""


@pytest.mark.matrix
def test_ddp_fsdp_and_meshes_run_to_their_end(explained):
    """DDP's reducer fails on torch's fake backend alone. Gloo is reloadable if it is named."""
    options = ("--world-size", "8", "--rank", "5", "--backends", "gloo,nccl")
    code, found = explained(TRAINS, *options)
    assert found["error"] == ""
    assert code == 0
    ranks = {one["desc"]: one["ranks"] for one in found["groups"] if one["reloadable"]}
    assert ranks["mesh_dp"] == [1, 3, 5, 7]
    assert ranks["mesh_tp"] == [4, 5]
    assert ranks["node"] == [4, 5, 6, 7]


# What the examples of pytorch/examples do: multi-GPU training with torchrun and DDP, FSDP2, and
# tensor parallelism.
DDP = """
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

local = int(os.environ["LOCAL_RANK"])
print("workers", torch.cuda.device_count(), torch.cuda.is_available())
torch.cuda.set_device(local)
dist.init_process_group(backend="nccl")
if dist.get_rank() == 0:
    os.makedirs("snapshots", exist_ok=True)
dataset = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, pin_memory=True, shuffle=False, sampler=sampler)
place = torch.device(local)
model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
model.to(local)
assert next(model.parameters()).device == place
model = DistributedDataParallel(model, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    for source, target in loader:
        source, target = source.to(local), target.to(place)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(source), target)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "snapshots/snapshot.pt")
        saved = torch.load("snapshots/snapshot.pt", map_location=f"cuda:{local}")
        print(epoch, loss.item(), sorted(saved)[0])
dist.new_group(group_desc="at the end")
dist.destroy_process_group()
"""

FSDP2 = """
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

if not torch.accelerator.is_available() or torch.accelerator.device_count() < 2:
    print("Unable to locate sufficient 2 gpus to run this example. Exiting.")
    raise SystemExit
local = int(os.environ["LOCAL_RANK"])
kind = torch.accelerator.current_accelerator()
device = torch.device(f"{kind}:{local}")
torch.accelerator.set_device_index(local)
backend = dist.get_default_backend_for_device(device)
dist.init_process_group(backend=backend, device_id=device)
torch.manual_seed(0)
with torch.device("meta"):
    layers = [torch.nn.Linear(16, 16) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
for layer in model:
    fully_shard(layer, **policy)
fully_shard(model, **policy)
model.to_empty(device=kind)
for layer in model:
    layer.reset_parameters()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    loss = model(torch.rand(4, 16, device=device)).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
full = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
dist.barrier()
dist.new_group(group_desc="at the end")
dist.destroy_process_group()
"""

TENSOR_PARALLEL = """
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

if torch.accelerator.device_count() < 2:
    print("Unable to locate sufficient 2 gpus to run this example. Exiting.")
    raise SystemExit
kind = torch.accelerator.current_accelerator().type
mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]) // 4, 4), mesh_dim_names=("dp", "tp"))
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 5))
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
model = parallelize_module(model.to(kind), mesh["tp"], plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for _ in range(3):
    model(torch.rand(20, 10, device=kind)).sum().backward()
    optimizer.step()
dist.new_group(group_desc="at the end")
dist.destroy_process_group()
"""

SHAPES = {
    "DDP": (DDP, {"", "at the end"}),
    "FSDP2": (FSDP2, {"", "at the end"}),
    "tensor parallel": (TENSOR_PARALLEL, {"", "mesh_dp", "mesh_tp", "at the end"}),
}


@pytest.mark.matrix
@pytest.mark.standins
@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
@pytest.mark.parametrize("name", SHAPES)
def test_programs_for_gpus_run_to_their_end_on_the_devices_that_are_there(name, tmp_path):
    """Here those of the stand-ins: the program asks for devices, uses and leaves them."""
    text, descs = SHAPES[name]
    (tmp_path / "train.py").write_text(text)
    explain = ["-m", "reloadpg", "explain", "train.py", "--world-size", 8, "--timeout", LIMIT]
    given = ("standins", "run", "--", sys.executable, *explain, "--json")
    process = command(*given, cwd=tmp_path)
    found = decoded(process)
    assert (process.returncode, found["error"]) == (0, ""), process.stderr
    assert found["devices"] == 8
    assert {one["desc"] for one in found["groups"] if one["reloadable"]} == descs


@pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="for machines without a GPU")
@pytest.mark.parametrize("name", sampled(SHAPES, "tensor parallel"))
def test_a_program_that_needs_a_missing_device_gets_one_sentence(name, tmp_path):
    """Which says where to run it. Also one that checks, and ends without an error."""
    (tmp_path / "train.py").write_text(SHAPES[name][0])
    code, page = called("explain", "train.py", "--world-size", 8, "--timeout", LIMIT, cwd=tmp_path)
    assert code == 1
    (line,) = [line for line in page.splitlines() if "accelerator" in line]
    assert line.startswith("This machine has no accelerator. ")
    assert line.endswith("reloadpg standins run -- reloadpg explain ...")
    assert "Traceback" not in page


def test_init_distributed_waits_for_no_rank(explained):
    """It creates the groups and the mesh of the real call."""
    text = """
import reloadpg
reloadpg.install()
with reloadpg.environment.init_distributed(mesh_dims={'pp': 2, 'dp_shard': -1}, seed=1) as context:
    assert context.mesh.size() == 8
    with reloadpg.offloaded():
        pass
"""
    _, found = explained(text, "--world-size", "8", "--rank", "5")
    assert found["error"] == ""
    assert [(one["desc"], one["ranks"], one["backend"]) for one in found["groups"]] == [
        ("", list(range(8)), "cuda:nccl"),
        ("mesh_pp", [1, 5], "cuda:nccl"),
        ("mesh_dp_shard", [4, 5, 6, 7], "cuda:nccl"),
    ]


def test_a_script_is_ended_at_the_time_limit(tmp_path, explained):
    """With its children. The groups that it has created until then are shown."""
    created = tmp_path / "created"
    text = (
        "import os, subprocess, time, pathlib\n"
        "import torch.distributed as dist\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pids').write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "dist.init_process_group('nccl')\n"
        f"pathlib.Path({str(created)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    code, found = explained(text, "--world-size", "64", "--timeout", "1", until=created)
    assert found["timed_out"] is True
    assert [one["name"] for one in found["groups"]] == ["WORLD"]
    assert code == 0
    for pid in (tmp_path / "pids").read_text().split():
        with suppress(psutil.NoSuchProcess):
            assert psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


ENDS = {
    "sys.exit(3)": "the script called sys.exit(3)",
    "os._exit(7)": "the script ended its process (exit code 7)",
    "os.abort()": "the script ended its process (exit code -6)",
}


@pytest.mark.parametrize("end", sampled(ENDS, "os._exit(7)"))
def test_a_script_that_creates_no_group_is_exit_code_1(tmp_path, end):
    """Its exit code is named. Here the script is a module."""
    (tmp_path / "nothing.py").write_text(f"import os, sys\n{end}\n")
    code, page = called("explain", "-m", "nothing", "--world-size", "2", cwd=tmp_path)
    assert code == 1
    assert "created no process group" in page
    assert "Groups in other processes that the script starts are not recorded" in page
    assert ENDS[end] in page
    assert "ran: what it would receive" not in page


ENDS_WITH_ITS_COMMAND = """
import os, pathlib, time
pathlib.Path("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.slow
def test_a_script_ends_with_the_command(tmp_path):
    """Also if that is killed."""
    (tmp_path / "train.py").write_text(ENDS_WITH_ITS_COMMAND)
    arguments = ["-m", "reloadpg", "explain", "train.py", "--world-size", "2", "--timeout", "600"]
    with subprocess.Popen([sys.executable, *arguments], cwd=tmp_path, env=environment()) as run:
        try:
            while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
                assert run.poll() is None
        finally:
            run.kill()
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int((tmp_path / "pid").read_text())).wait(LIMIT)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([__file__, "--world-size", "2", "--rank", "2"], "--rank 2 is not in a job of 2 ranks"),
        ([__file__, "--world-size", "2", "--rank", "-1"], "--rank -1 is not in a job"),
        (["nothing.py", "--world-size", "2"], "there is no file 'nothing.py'"),
    ],
)
def test_invalid_arguments_are_exit_code_2(capsys, arguments, words):
    """Before anything is run."""
    assert main(["explain", *arguments]) == 2
    assert words in capsys.readouterr().err


INSTALLS_LATE = """
import torch.distributed as dist
import reloadpg

dist.init_process_group("nccl")
dist.new_group([0, 1], group_desc="before")
reloadpg.install(world=False, exclude="u*")
dist.new_group([0, 1], group_desc="used")
dist.new_group([0, 1], group_desc="pair")
dist.new_group([0], group_desc="one")
"""


def test_the_options_of_the_script_decide(explained):
    """Also for the default group, which existed. The memory is that of reloadable groups."""
    _, found = explained(INSTALLS_LATE, "--world-size", "2")
    assert found["script_installs"]
    assert {one["desc"]: one["reason"] for one in found["groups"]} == {
        "": "install(world=False)",
        "before": "created before reloadpg.install()",
        "used": "matches exclude 'u*'",
        "pair": "",
        "one": "1 rank, fewer than min_size=2",
    }
    memory = {"communicators": 1, "least_bytes": 500_000_000, "most_bytes": 1_600_000_000}
    assert found["memory"] == memory
