"""A reloadable group keeps its identity: in c10d's tables, by name, copied, pickled, destroyed."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import socket
import threading
import time
import types
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import early_bindings, worlds
from helpers.jobs import TIMEOUT, install, one_cycle, start
from helpers.tables import (
    expected_sum,
    lengths,
    meet_at_rank_0,
    resolves_to,
    summed,
    world_tables,
)
from torch._dynamo import distributed as dynamo_distributed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg import ReloadableProcessGroup
from reloadpg.errors import GroupDestroyedError, GroupPickleError
from reloadpg.extend import managed
from reloadpg.rendezvous import store_client
from reloadpg.testing import run_ranks

_LEAVES = (str, bytes, int, float, bool, type(None), types.ModuleType, types.FunctionType, type)

SPLITS = TorchVersion(torch.__version__) >= "2.15"


# ---------------------------------------------------------------------------------------------
# one program that creates groups in every way, with and without the library


def mentions(target: object) -> list[str]:
    """The places that hold an object: c10d's tables, and containers in the module's globals."""
    found: list[str] = []
    seen: set[int] = set()
    names = {**vars(c10d), **world_tables()}
    todo = [(name, value) for name, value in names.items() if not name.startswith("__")]
    while todo:
        path, value = todo.pop()
        if value is target:
            found.append(path)
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [(f"{path} (key)", key) for key in value]
            todo += [(f"{path}[...]", item) for item in value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            todo += [(f"{path}[...]", item) for item in value]
    return sorted(found)


def holders(target: object) -> list[str]:
    """Types of Python objects that refer to an object, without frames."""
    return sorted(
        type(referrer).__name__
        for referrer in gc.get_referrers(target)
        if not isinstance(referrer, types.FrameType)
    )


def _make_groups(rank):
    """What each creating function returned on this rank, by how it was called.

    Some are called by names that were bound before the patch: a partial, a class, a default
    argument. Torch's compiler does not call ``new_group``.
    """
    made = {"WORLD": dist.group.WORLD}
    made["new_group"] = dist.new_group([0, 2, 3])
    made["new_group, a pair"] = dist.new_group([1, 3])
    made["new_subgroups"], rest = dist.new_subgroups(2)
    made.update({f"new_subgroups[{i}]": group for i, group in enumerate(rest)})
    made["by enumeration"], rest = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    made.update({f"by enumeration[{i}]": group for i, group in enumerate(rest)})
    meshes = {
        1: init_device_mesh("cpu", (4,), mesh_dim_names=("all",)),
        2: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        3: init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp3", "tp3")),
    }
    for dims, mesh in meshes.items():
        for name in mesh.mesh_dim_names:
            made[f"mesh{dims}.{name}"] = mesh.get_group(name)
    made["by partial"] = early_bindings.partial([0, 1])
    made["by class"] = early_bindings.Holder.new_group([0, 1], group_desc="by class")
    made["by default"] = early_bindings.by_default([0, 1])
    everyone = list(range(4))
    made["tagged"] = c10d._new_group_with_tag(everyone, pg_tag="mine")
    assert c10d._new_group_with_tag(everyone, pg_tag="mine") is made["tagged"]
    if hasattr(dynamo_distributed, "get_guard_pg") and dynamo_distributed.get_guard_pg():
        made["of the compiler"] = dynamo_distributed.get_guard_pg()
    made["from_group"] = DeviceMesh.from_group(made["new_subgroups"], "cpu").get_group()
    if SPLITS:
        made["split_group"] = dist.split_group(None, [[0, 1], [3, 2]])
        made["split_group, not of all"] = dist.split_group(None, [[1, 2]])
    # Last: since torch 2.15 it advances the members' counter, which all later names come from.
    # Where torch splits groups from WORLD, it waits indefinitely for ranks that do not call.
    if not worlds.SPLITS_EVERY_GROUP:
        made["local sync"] = dist.new_group([0, 1], use_local_synchronization=True)
    return made, meshes


def _is_group(value):
    return isinstance(value, dist.ProcessGroup)


def _answers(group):
    """What torch says of a group, and of the job."""
    ranks = dist.get_process_group_ranks(group)
    return {
        "ranks": (ranks, dist.get_rank(group), dist.get_world_size(group)),
        "group ranks": [dist.get_group_rank(group, rank) for rank in ranks],
        "global ranks": [dist.get_global_rank(group, i) for i in range(len(ranks))],
        "name": (group.group_name, c10d._get_process_group_name(group), group.group_desc),
        "own": (group.rank(), group.size(), group.name()),
        "backend": (dist.get_backend(group), dist.get_backend_config(group)),
        "devices": sorted(device.type for device in group._device_types),
        "device": (c10d._get_object_coll_device(group), c10d._get_pg_default_device(group)),
        "bound": group.bound_device_id,
        "hooks": group._has_hooks(),
        "store": getattr(group, "get_group_store", int)() is not None,  # since torch 2.9
        "outside": c10d._rank_not_in_group(group),
        "job": (dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_pg_count()),
        "WORLD": dist.group.WORLD is c10d._get_default_group(),
    }


def _layout(mesh):
    """What a mesh says of its dimensions and groups."""
    return {
        "own": (mesh.get_rank(), mesh.get_coordinate(), mesh.device_type, mesh.mesh.tolist()),
        "shape": (mesh.size(), mesh.shape, mesh.ndim, mesh.mesh_dim_names),
        "slices": [
            (mesh[name].mesh.tolist(), mesh.get_local_rank(name), mesh[name].get_group().group_name)
            for name in mesh.mesh_dim_names
        ],
        "groups": [group.group_name for group in mesh.get_all_groups()],
    }


def _snapshot(made, meshes, rank, *, live=True):
    """The groups as they are now."""
    groups = {label: group for label, group in made.items() if _is_group(group)}
    tables = world_tables()
    return {
        "id": {label: (id(group), hash(group)) for label, group in groups.items()},
        "answers": {label: _answers(group) for label, group in groups.items()},
        "meshes": {dims: _layout(mesh) for dims, mesh in meshes.items()},
        "sum": {
            label: summed(group, rank) == expected_sum(dist.get_process_group_ranks(group))
            for label, group in groups.items()
            if live
        },
        "by name": {
            label: resolves_to(group.group_name) is group for label, group in groups.items()
        },
        "in tables": {
            label: [
                table
                for table in (
                    "pg_map",
                    "pg_names",
                    "pg_group_ranks",
                    "pg_backend_config",
                    "pg_to_tag",
                )
                if group not in tables[table]
            ]
            + ([] if any(group is other for other in tables["tags_to_pg"][""]) else ["tags"])
            for label, group in groups.items()
        },
        # Hooks hold communicators, so they are removed while offloaded.
        "lengths": {k: v for k, v in lengths().items() if k != "pg_flight_recorder_hooks"},
    }


def _raised(function, *args, **kwargs):
    """The type and the first line of the error of a call."""
    with pytest.raises(Exception) as caught:
        function(*args, **kwargs)
    return type(caught.value).__name__, str(caught.value).splitlines()[0]


def _besides():
    """What a program can see besides its groups. It ends the job."""
    worlds.barrier()
    facts = {
        "keys": c10d._get_default_store().num_keys(),
        "threads": threading.active_count(),
        "count": c10d._world.group_count,
        "errors": [
            _raised(dist.new_group, [7]),
            _raised(dist.new_group, timeout=5),
            _raised(dist.new_group, backend="nosuch"),
            _raised(dist.new_group, nosuch=1),
            _raised(dist.init_process_group, worlds.BACKEND),
            _raised(dist.split_group, None, None),
        ],
    }
    worlds.barrier()
    dist.destroy_process_group()
    after = dist.is_initialized(), len(c10d._world.pg_map), c10d._world.group_count
    return {**facts, "after": after}


def _everywhere(rank, world_size, library):
    if library == "reloadable":
        install()
    elif library == "bypassing":
        reloadpg.install(**worlds.BYPASSING)
    worlds.init(timeout=TIMEOUT)
    made, meshes = _make_groups(rank)
    facts = {
        "kinds": {label: type(group).__name__ for label, group in made.items()},
        "outside": {label: repr(group) for label, group in made.items() if not _is_group(group)},
        "is NON_GROUP_MEMBER": {
            label: group is dist.GroupMember.NON_GROUP_MEMBER for label, group in made.items()
        },
        "snapshots": [_snapshot(made, meshes, rank)],
    }
    if library != "reloadable":
        return {**facts, **_besides()}
    proxies = {g for g in made.values() if isinstance(g, ReloadableProcessGroup)}
    records = [managed(proxy) for proxy in proxies]
    facts["inner"] = []
    for _ in range(3):
        old = {one.name: weakref.ref(one.communicator) for one in records}
        facts["inner"].append(
            {
                "in tables": sorted({p for one in records for p in mentions(one.communicator)}),
                "held by": sorted({h for one in records for h in holders(one.communicator)}),
                "by own name": [
                    one.communicator.group_name
                    for one in records
                    if resolves_to(one.communicator.group_name) is one.communicator
                ],
            }
        )
        reloadpg.offload()
        facts["inner"][-1]["alive"] = [name for name, ref in old.items() if ref() is not None]
        assert all(" offloaded generation " in repr(proxy) for proxy in proxies)
        facts["snapshots"].append(_snapshot(made, meshes, rank, live=False))
        reloadpg.reload()
        assert all(" live generation " in repr(proxy) for proxy in proxies)
        facts["snapshots"].append(_snapshot(made, meshes, rank))
    facts["generations"] = {proxy.generation for proxy in proxies}
    facts["mesh still finds"] = all(
        mesh.get_group(name) is made[f"mesh{dims}.{name}"]
        for dims, mesh in meshes.items()
        for name in mesh.mesh_dim_names
    )
    return facts


@pytest.fixture(scope="module")
def stock():
    return run_ranks(_everywhere, 4, args=("",), timeout=240)


@pytest.fixture(scope="module")
def job():
    return run_ranks(_everywhere, 4, args=("reloadable",), timeout=240)


@pytest.mark.matrix
def test_a_program_whose_groups_bypass_sees_what_it_sees_without_the_library(stock):
    """Groups, names, tables, error texts, store keys, threads; the groups are torch's own."""
    bypassing = run_ranks(_everywhere, 4, args=("bypassing",), timeout=240)
    for facts, plain in zip(bypassing, stock, strict=True):
        for snapshot in (*facts["snapshots"], *plain["snapshots"]):
            snapshot.pop("id", None)
        assert facts == plain


@pytest.mark.matrix
def test_every_group_of_two_and_more_is_a_proxy(job, stock):
    """Groups of init_device_mesh, new_subgroups, split_group and from_group too (failure 8)."""
    for rank, (facts, plain) in enumerate(zip(job, stock, strict=True)):
        assert facts["kinds"].keys() == plain["kinds"].keys()
        for label, kind in plain["kinds"].items():
            found = plain["snapshots"][0]["answers"].get(label)
            size = found["ranks"][2] if found else 0
            proxied = "ReloadableProcessGroup" if size >= 2 else kind
            assert facts["kinds"][label] == proxied, (rank, label)
    assert {label for label in job[0]["kinds"] if label.startswith("mesh")} == {
        *("mesh1.all", "mesh2.dp", "mesh2.tp", "mesh3.pp", "mesh3.dp3", "mesh3.tp3")
    }


@pytest.mark.matrix
def test_other_ranks_get_what_torch_returns(job, stock):
    """NON_GROUP_MEMBER from new_group, or torch's own value for the other ways (failure 6)."""
    for facts, plain in zip(job, stock, strict=True):
        assert facts["outside"] == plain["outside"]
        assert facts["is NON_GROUP_MEMBER"] == plain["is NON_GROUP_MEMBER"]
    assert job[1]["is NON_GROUP_MEMBER"]["new_group"]
    local = set() if worlds.SPLITS_EVERY_GROUP else {"local sync"}
    assert job[2]["outside"].keys() >= {"new_group, a pair", *local}


@pytest.mark.guarantees
@pytest.mark.matrix
def test_the_proxy_is_the_group_in_every_generation(job, stock):
    """In each table in which torch has the group, which are as long as torch's (failure 1).

    The C++ registry has it under the name that torch gives (failure 8). Object, hash and all that
    torch says of it never change, also while it is offloaded, and a collective never sums over
    WORLD instead (failure 4).
    """
    for facts, plain in zip(job, stock, strict=True):
        expected, first = plain["snapshots"][0], facts["snapshots"][0]
        # Torch 2.15 leaves splits out of its list of groups without a tag.
        missing = expected["in tables"]
        assert {name for names in missing.values() for name in names} <= {"tags"}
        for snapshot in facts["snapshots"]:
            for what in ("in tables", "lengths", "answers", "meshes"):
                assert snapshot[what] == expected[what], what
            assert snapshot["id"] == first["id"]
            assert all(snapshot["by name"].values())
            assert all(snapshot["sum"].values())
        assert facts["generations"] == {3}
        assert facts["mesh still finds"]


@pytest.mark.matrix
def test_only_the_proxy_refers_to_the_communicator(job):
    """In no table and under no name; it is gone when the offload returns."""
    for facts in job:
        for inner in facts["inner"]:
            assert inner["in tables"] == inner["by own name"] == inner["alive"] == []
            # The attributes of the proxy and of its record; from Python 3.13 on part of these.
            assert {*inner["held by"]} <= {"dict", "ManagedGroup", "ReloadableProcessGroup"}


# ---------------------------------------------------------------------------------------------
# copies and pickles


class _Holder(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.group = group


@pytest.mark.guarantees
@pytest.mark.matrix
@pytest.mark.ranks(3)
def test_copies_and_pickles_are_the_same_object(rank):
    """copy, deepcopy and pickle of groups and of models that hold them, in each state (failure 7).

    A pickle raises where the process has no such group: on a rank that is not a member, where the
    name has other ranks, and after the end of the job.
    """
    start()
    world, pair = dist.group.WORLD, dist.new_group([0, 1])
    store = c10d._get_default_store()
    if rank == 0:
        store.set("test/pair", pickle.dumps(pair))
        store.set("test/world", pickle.dumps({"model": _Holder(world)}))
    worlds.barrier()

    def fails(function, *args):
        with pytest.raises(GroupPickleError, match="a pickled process group"):
            function(*args)

    for step in (lambda: None, reloadpg.offload, reloadpg.reload):
        step()
        assert copy.copy(world) is copy.deepcopy(world) is world
        assert copy.deepcopy(_Holder(world)).group is world
        assert copy.deepcopy([world, {"a": world}]) == [world, {"a": world}]
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(world, protocol)) is world
        assert pickle.loads(store.get("test/world"))["model"].group is world
        if rank < 2:
            assert pickle.loads(store.get("test/pair")) is pair
        else:
            fails(pickle.loads, store.get("test/pair"))
    data = pickle.dumps(world)
    find, (name, ranks) = world.__reduce__()
    fails(find, name, ranks[:-1])
    worlds.barrier()
    dist.destroy_process_group()
    fails(pickle.loads, data)


# ---------------------------------------------------------------------------------------------
# destruction


def _raises(function, *args, **kwargs):
    """The type of the error that a call raises; None if it raises none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error)
    return None


def _use(group):
    return _raises(dist.all_reduce, torch.ones(1), group=group)


def _assert_forgotten(group, name):
    assert mentions(group) == []
    assert resolves_to(name) is None
    assert name not in [entry.name for entry in reloadpg.status().groups]
    assert group.state == "destroyed"


@pytest.mark.matrix
@pytest.mark.ranks(2)
@pytest.mark.parametrize("state", ["live", "offloaded", "reloaded"])
def test_a_destroyed_group_is_forgotten_and_not_rebuilt(rank, state):
    """``destroy_process_group`` removes it from all tables (failure 5), as for the short-lived
    groups of checkpointing.

    The library keeps no reference to it (failure 13); other groups are reloaded.
    """
    start()
    other, before = dist.new_group([0, 1]), lengths()
    for count in (1, 2):
        group = dist.new_group([0, 1])
        name = group.group_name
        dist.all_reduce(torch.ones(1), group=group)
        if state == "reloaded":
            one_cycle()
            assert summed(group, rank) == 3
        inner = weakref.ref(group._managed.communicator)
        if state == "offloaded":
            reloadpg.offload()
        dist.destroy_process_group(group)
        _assert_forgotten(group, name)
        assert inner() is None
        assert _raises(group.allreduce, [torch.ones(1)]) is GroupDestroyedError
        assert _use(group) is not None
        assert _raises(dist.destroy_process_group, group) is not None
        if state == "live":
            reloadpg.offload()
        reloadpg.reload()
        _assert_forgotten(group, name)
        assert summed(other, rank) == summed(None, rank) == 3
        assert (other.generation, group.generation) == (count, count * (state == "reloaded"))
        ref = weakref.ref(group)
        del group
        gc.collect()
        assert ref() is None
    after = lengths()
    # Torch itself leaves the empty list of a destroyed group's tag.
    assert after.pop("tags_to_pg") - before.pop("tags_to_pg") == 2
    assert before == after


@pytest.mark.matrix
@pytest.mark.ranks(2, store="rank0")
@pytest.mark.parametrize("delay", [0, 0.5])
@pytest.mark.parametrize("world", [True, False])
def test_the_store_server_ends_with_the_default_group(rank, world, delay):
    """It has ended when ``destroy_process_group`` returns, although the program still holds WORLD
    and the library was still connecting its own clients (failure 5).
    """
    connect, numbers = store_client.stores.clone_store, itertools.count(1)

    def connect_late(store, **options):
        time.sleep(delay * next(numbers))  # the first is the one that an operation waits for
        return connect(store, **options)

    store_client.stores.clone_store = connect_late
    start(world=world)
    held = dist.group.WORLD if world else None  # a plain group itself keeps its store
    port = int(os.environ["MASTER_PORT"])
    if not delay:
        one_cycle()
    elif not world:
        reloadpg.offload()  # with no reloadable group, the library connects here
    # Rank 1 must not end a group that rank 0 still connects.
    if rank == 0:
        c10d._get_default_store().set("connected", "")
    else:
        c10d._get_default_store().wait(["connected"], timedelta(minutes=1))
    meet_at_rank_0(rank, "end")
    dist.destroy_process_group()
    if rank == 0:
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
    assert getattr(held, "state", "destroyed") == "destroyed"


@pytest.mark.ranks(1)
def test_the_store_of_a_job_is_not_found_after_its_end():
    """The error is of the kind that a lost store raises, whether or not WORLD is still held."""
    for held in (True, False):
        dist.init_process_group("gloo")
        world = dist.group.WORLD
        find = store_client.stores.root_store_of_job(world)
        find().set("key", "value")
        dist.destroy_process_group()
        if not held:
            del world
            gc.collect()
        with pytest.raises(RuntimeError, match="was destroyed"):
            find()


# ---------------------------------------------------------------------------------------------
# which groups are reloadable, and from when on


@pytest.mark.ranks(1)
def test_the_name_of_a_group_cannot_be_changed():
    """A new name raises; torch may set the same name again."""
    reloadpg.install(backends={worlds.BACKEND}, min_size=1)
    worlds.init()
    world = dist.group.WORLD
    world._set_group_name(world.group_name)
    with pytest.raises(ValueError, match="is fixed for the life of the job"):
        world._set_group_name("another")
