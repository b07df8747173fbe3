"""``explain`` lists the groups that a real job of that size would have."""

import json
import runpy
import sys
from contextlib import suppress

import psutil
import pytest
import torch
from helpers.cli_process import LIMIT, called, command, decoded

import reloadpg
from reloadpg.cli import explain as explain_page
from reloadpg.cli import main
from reloadpg.cli.explain import explain
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
    assert fake[0]["name"] == "WORLD"
    assert sorted((one["desc"], one["ranks"]) for one in fake[1:]) == sorted(map(tuple, real))
    assert {one["desc"] for one in fake[1:]} == {"mesh_dp", "mesh_tp", "local", "three"}
    why = {one["desc"]: one["reason"] for one in explained["groups"] if not one["reloadable"]}
    assert why == {
        "before": "created before reloadpg.install()",
        "alone": "1 rank, fewer than min_size=2",
    }
    # Three ranks' own, one row and one column of the mesh, and one pair.
    assert explained["groups_of_others"] == 3 + 2 + 1
    assert explained["policy"] == {"backends": ["gloo"], "min_size": 2, "world": True}
    assert explained["memory"]["communicators"] == 0  # gloo holds no memory of a GPU


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
dist.new_group(range(1, 16, 2), group_desc="odd")
dist.all_gather(list(torch.ones(16, 1)), torch.ones(1))


class Broken(torch.nn.Module):
    def forward(self):
        raise ValueError("broken on purpose")


Broken()()
"""


def test_the_creator_fits_into_eighty_columns():
    """Also with long descriptions, reasons and names, as of Megatron's groups."""
    made_by, long = "megatron.core.parallel_state", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
    group = {"name": "2147483647", "desc": long, "ranks": [0, 2, 4, 6], "set": "trainer"}
    group |= {"backend": "cpu:gloo,cuda:nccl", "made_by": made_by, "destroyed": True}
    group |= {"reloadable": True, "reason": "cpu:gloo stays"}
    head, _, row = (line.text for line in explain_page._table([group]))
    assert "created by" in head[:80]
    assert f"214748...     4  reloadable (1, 2)  cpu:gloo,cuda:nccl  {made_by[:24]}" in row[:80]


def test_nccl_groups_are_explained_without_a_gpu(tmp_path):
    """By the requested backend. The memory estimate leaves out the destroyed group.

    A script that raises gets its traceback, without frames of libraries.
    """
    script = tmp_path / "train.py"
    script.write_text(NCCL)
    options = ["--world-size", 16, "--rank", 9, "--timeout", LIMIT]
    code, page = called("explain", script, *options)
    lines = [" ".join(line.split()) for line in page.splitlines()]
    header = lines.index("group size reloadpg backend created by ranks desc")
    assert lines[header + 2 : lines.index("", header)] == [
        "WORLD 16 reloadable (1) cpu:gloo,cuda:nccl __main__ 0-15",
        "1 16 bypassed (2) gloo __main__ 0-15 control",
        "2 2 reloadable nccl __main__ 8-9 pair",
        "3 2 reloadable (1, 3) cpu:gloo,cuda:nccl __main__ 8-9 short",
        "4 8 reloadable (1) cpu:gloo,cuda:nccl __main__ 1, 3, ..., 15 odd",
    ]
    assert "(1) cpu:gloo stays" in lines
    assert "(2) 1 would not: backend gloo serves no accelerator" in lines
    assert "(3) destroyed later" in lines
    assert "release about 1.5 to 4.8 GB" in page
    assert "(3 NCCL communicators of 2 or more ranks, if each has been used)" in page
    assert "This is an estimate: 0.5 to 1.6 GB per communicator" in page
    assert 'strategy="suspend" would pin about' in page
    assert "The script failed: ValueError: broken on purpose" in page
    assert 'raise ValueError("broken on purpose")' in page
    assert "frames of torch" in page
    assert "module.py" not in page
    assert "explain_rank.py" not in page
    assert "Only this rank ran." in page
    assert "Rank 0 receives less" in page
    assert "does not call reloadpg.install(); shown as if it did" in page
    assert code == 1


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
    made = [(one["made_by"], one["set"], one["reloadable"]) for one in found["groups"]]
    assert made == [
        ("__main__", "trainer", True),
        ("engine.parallel", "engine", True),
        ("__main__", None, False),
    ]
    assert any("in no set" in reason for reason in found["bypassed"])
    assert code == 0


BACKENDS = """
import torch.distributed as dist
from torch.distributed import scatter_object_list

dist.init_process_group("NCCL")
assert dist.get_backend() == dist.Backend.NCCL, dist.get_backend()
dist.new_group(backend=dist.get_backend(), group_desc="handed on")
control = dist.new_group(backend="gloo", group_desc="control")
assert dist.get_backend(control) == dist.Backend.GLOO, dist.get_backend(group=control)
mixed = dist.new_group(backend="cpu:gloo,cuda:nccl")
assert dist.get_backend(mixed) == "cpu:gloo,cuda:nccl", dist.get_backend(mixed)
assert dist.get_backend(dist.new_group(backend="fake", group_desc="degree one")) == "fake"

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
gathered = [None] * 3
dist.gather_object("mine", gathered, dst=1)
assert gathered[1] == "mine", gathered
dist.all_gather_object(gathered, "mine")

dist.destroy_process_group()
dist.init_process_group()
assert dist.get_backend() == "undefined", dist.get_backend()
"""


@pytest.mark.matrix
def test_backends_are_as_requested_and_received_objects_are_unchanged(explained):
    """A rank gets only what it sends to itself. ``fake`` is a backend like another."""
    options = ["--world-size", "3", "--rank", "1", "--device", "cuda:0"]
    _, found = explained(BACKENDS, *options)
    assert found["error"] == "", found["traceback"]
    assert [(one["desc"], one["backend"], one["reloadable"]) for one in found["groups"]] == [
        ("", "nccl", True),
        ("handed on", "nccl", True),
        ("control", "gloo", False),
        ("", "cpu:gloo,cuda:nccl", True),
        ("degree one", "fake", False),
        ("", "cuda:nccl", True),
    ]


TRAINS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=mesh.get_group("dp"))
model.register_comm_hook(None, None)
for _ in range(2):
    model(torch.ones(2, 2)).sum().backward()
sharded = torch.nn.Linear(8, 8)
fully_shard(sharded, mesh=init_device_mesh("cpu", (8,)))
sharded(torch.ones(2, 8)).sum().backward()
dist.new_subgroups(4, group_desc="node")
dist.split_group(split_ranks=[[0, 1, 2, 3], [4, 5, 6, 7]], group_desc="half")
"""


@pytest.mark.matrix
def test_ddp_fsdp_meshes_and_splits_run_to_their_end(explained):
    """DDP's backward fails on torch's fake backend."""
    code, found = explained(TRAINS, "--world-size", "8", "--rank", "5")
    assert found["error"] == "", found["traceback"]
    assert code == 0
    ranks = {one["desc"]: one["ranks"] for one in found["groups"] if one["reloadable"]}
    assert ranks["mesh_dp"] == [1, 3, 5, 7]
    assert ranks["mesh_tp"] == [4, 5]
    assert ranks["node"] == ranks["half"] == [4, 5, 6, 7]


ON_GPUS = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
device = torch.device("cuda", torch.cuda.current_device())
dist.init_process_group("nccl", device_id=device)
hosts = dist.get_world_size() // torch.cuda.device_count()
mesh = init_device_mesh("cuda", (hosts, 8), mesh_dim_names=("replicate", "shard"))
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
for part in (model[0], model[2], model):
    fully_shard(part, mesh=mesh)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
plain = torch.nn.Linear(8, 8).to(device)
assert plain.weight.is_cuda and plain.weight.device == device
ddp = DistributedDataParallel(plain, device_ids=[local])
side = torch.cuda.Stream()
for step in range(2):
    inputs = torch.ones(4, 8).pin_memory().to("cuda", non_blocking=True)
    with torch.cuda.stream(side):
        loss = model(ddp(inputs)).square().mean()
    loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
flags = torch.tensor([7, 0], device="cuda")
dist.broadcast(flags, 0)
parts = [torch.ones(2).cuda() for _ in range(dist.get_world_size())]
dist.all_gather(parts, parts[0])
generator = torch.Generator("cuda").manual_seed(1)
torch.randn(4, device=local, generator=generator)
sine = torch.compile(torch.sin, fullgraph=True)
assert sine(torch.ones(2, device="cuda")).is_cuda
dist.new_group(list(range(8, 16)), group_desc="trained")
assert flags.tolist() == [7, 0]  # what a rank sends, it also has
assert isinstance(loss.item(), float)
assert torch.ones(3, device="cuda").cpu().sum() == 3
dist.new_group(list(range(8, 16)), group_desc="values")
"""


@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_cuda_trainer_runs_without_a_gpu(tmp_path):
    """Over stand-ins for CUDA; with a CPU build of torch on ``meta``, until it reads a value."""
    script = tmp_path / "train.py"
    script.write_text(ON_GPUS)
    arguments = [script, "--world-size", "64", "--rank", "13", "--timeout", LIMIT]
    code, page = called("explain", *arguments)
    lines = [" ".join(line.split()) for line in page.splitlines()]
    standins = torch.version.cuda is not None
    rows = [
        "64 reloadable nccl __main__ 0-63",
        "8 reloadable nccl __main__ 5, 13, ..., 61 mesh_replicate",
        "8 reloadable nccl __main__ 8-15 mesh_shard",
        "8 reloadable nccl __main__ 8-15 trained",
        *(["8 reloadable nccl __main__ 8-15 values"] if standins else []),
    ]
    header = lines.index("group size reloadpg backend created by ranks desc")
    table = lines[header + 2 : lines.index("", header)]
    assert [line.partition(" ")[2] for line in table] == rows  # names differ between versions
    assert code == (0 if standins else 1)
    assert ("the script ran over stand-ins for CUDA" in page) == standins
    assert ("a build without CUDA" in page) != standins
    assert ("The script failed: " in page) != standins
    assert ("The script read a value of a CUDA tensor" in page) != standins


@pytest.mark.parametrize("options", [[], ["--backends", "gloo"]])
def test_gloo_groups_of_a_script_that_found_no_device(tmp_path, options):
    """As accelerate creates them. The page says which option makes them reloadable."""
    path = tmp_path / "script.py"
    path.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    arguments = [str(path), "--world-size", "2", "--device", "xpu", *options]
    code, page = called("explain", *arguments)
    assert code == 0
    assert ("There is no xpu device here" in page) == (not options)
    assert f"{len(options) // 2} of 1 group of this rank would be reloadable" in page


def test_init_distributed_waits_for_no_rank(explained):
    """It creates the groups and the mesh of the real call."""
    text = """
import reloadpg
reloadpg.install()
with reloadpg.environment.init_distributed(mesh_dims={'pp': 2, 'dp_shard': -1}, seed=1) as context:
    assert context.owned and context.mesh.size() == 8
    with reloadpg.offloaded():
        pass
assert reloadpg.environment.ensure_process_group()
"""
    _, found = explained(text, "--world-size", "8", "--rank", "5")
    assert found["error"] == "", found["traceback"]
    assert [(one["desc"], one["ranks"], one["backend"]) for one in found["groups"]] == [
        ("", list(range(8)), "nccl"),
        ("mesh_pp", [1, 5], "nccl"),
        ("mesh_dp_shard", [4, 5, 6, 7], "nccl"),
        ("", list(range(8)), "gloo"),
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


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import sys\nsys.exit(3)\n", "the script called sys.exit(3)"),
        ("import os\nos._exit(7)\n", "the script ended its process (exit code 7)"),
        ("import os\nos.abort()\n", "the script ended its process (SIGABRT)"),
    ],
)
def test_a_script_that_creates_no_group_is_exit_code_1(tmp_path, text, error):
    """Its exit code is named. Here the script is a module."""
    (tmp_path / "nothing.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        code, page = called("explain", "-m", "nothing", "--world-size", "2")
    assert code == 1
    assert "created no process group" in page
    assert "Groups in other processes that the script starts are not recorded" in page
    assert error in page
    assert (", line 2 in <module>" in page) == ("abort" in text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([__file__, "--world-size", "2", "--rank", "2"], "--rank 2 is not in a job of 2 ranks"),
        ([__file__, "--world-size", "2", "--device", ""], "(cpu, cuda, "),
        ([__file__, "--world-size", "2", "--device", "cuda:x"], "torch knows no device 'cuda:x'"),
    ],
)
def test_invalid_arguments_are_exit_code_2(capsys, arguments, words):
    """Before anything is run."""
    assert main(["explain", *arguments]) == 2
    assert words in capsys.readouterr().err


def recorded(devices, size=4, **values):
    """The record of a group."""
    return {
        "kind": "group",
        "name": "5",
        "desc": "undefined",
        "ranks": list(range(size)),
        "backend": ",".join(f"{device}:{name}" for device, name in devices.items()),
        "devices": devices,
        "made_by": "__main__",
        "set": "trainer",
        "options": {},
        **values,
    }


@pytest.mark.parametrize(
    ("options", "group", "selected", "reason"),
    [
        ({}, recorded({"cuda": "nccl"}), ["cuda"], ""),
        ({}, recorded({"cpu": "other"}), [], "backend other serves no accelerator"),
        ({"min_size": 1}, recorded({"cuda": "nccl"}, 1), ["cuda"], ""),
        ({"min_size": 3}, recorded({"cuda": "nccl"}, 2), [], "2 ranks, fewer than min_size=3"),
        ({"backends": "nccl"}, recorded({"cpu": "x"}), [], "backend x is not in backends=['nccl']"),
        ({}, recorded({"cpu": "gloo", "cuda": "nccl"}), ["cuda"], "cpu:gloo stays"),
        ({}, recorded({"cuda": "nccl"}, options={"exclude": ["u*"]}), [], "matches exclude 'u*'"),
    ],
)
def test_each_group_has_a_reason(options, group, selected, reason):
    """By the options of the command, or of the script."""
    (one,) = explain([group], **options)["groups"]
    assert (one["selected"], one["reason"]) == (selected, reason)


def test_the_memory_estimate_counts_reloadable_nccl_groups():
    """Not those that are destroyed, too small, or excluded by ``world=False``."""
    installed = {"backends": "accelerators", "min_size": 2, "world": False}
    result = explain(
        [
            recorded({"cuda": "nccl"}, name="WORLD", options=installed),
            recorded({"cuda": "nccl"}, options=installed),
            recorded({"cuda": "nccl"}, name="6", options=installed),
            {"kind": "destroyed", "name": "6"},
            recorded({"cuda": "nccl"}, 1, options=installed),
            recorded({"cpu": "gloo", "cuda": "nccl-lazy"}, options=installed),
            recorded({"xpu": "xccl"}, options=installed),
        ]
    )
    assert result["groups"][0]["reason"] == "install(world=False)"
    assert result["memory"]["communicators"] == 2
    assert result["memory"]["least_bytes"] == 1_000_000_000
    assert result["memory"]["most_bytes"] == 3_200_000_000
    assert result["memory"]["least_pinned_bytes"] == 960 << 20
    assert result["memory"]["most_pinned_bytes"] == 1440 << 20
    json.dumps(result)


def test_a_group_of_one_rank_holds_no_memory_of_connections():
    assert explain([recorded({"cuda": "nccl"}, 2)])["memory"]["communicators"] == 1
    one = explain([recorded({"cuda": "nccl"}, 1)], min_size=1)
    assert one["groups"][0]["reloadable"]
    assert one["memory"]["communicators"] == 0


BORROWS = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
pair = dist.new_group([0, 1])
dist.barrier()
for group in (dist.group.WORLD, pair):
    group._get_backend(torch.device("cuda"))
"""


@pytest.mark.slow
def test_code_that_takes_backends_out_of_groups_is_listed(tmp_path):
    """By module and line, with the groups; torch itself is not."""
    script = tmp_path / "borrows.py"
    script.write_text(BORROWS)
    arguments = ("explain", str(script), "--world-size", "4")
    found = decoded(command(*arguments, "--json"))
    names = [one["name"] for one in found["groups"]]
    (one,) = found["borrowed"]
    assert (one["by"], one["where"], one["groups"]) == ("__main__", "borrows.py:9", names)
    assert "(borrows.py:9) takes backend objects out of 2 groups" in command(*arguments).stdout
