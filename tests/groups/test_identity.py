"""A proxy is the group: in every table, by name, by object, copied, pickled, destroyed."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import pickle
import socket
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worlds
import wrapt
from tables import (
    expected_sum,
    holders,
    lengths,
    meet_at_rank_0,
    mentions,
    resolves_to,
    store_closed_by_rank_0,
    summed,
    world_tables,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg import (
    GroupDestroyedError,
    GroupOffloadedError,
    GroupPickleError,
    ReloadableProcessGroup,
)
from reloadpg.rendezvous import store_client
from reloadpg.testing import run_ranks, simulated

SPLITS = TorchVersion(torch.__version__) >= "2.15"
TIMEOUT = timedelta(seconds=30)


def _cycle():
    reloadpg.offload()
    reloadpg.reload()


def _install(**options):
    return reloadpg.install(**{"backends": {worlds.BACKEND}, "timeout": TIMEOUT, **options})


# ---------------------------------------------------------------------------------------------
# one program that makes groups in every way, with and without the library


def _make_groups(rank):
    """Everything that a creating function returned on this rank, by how it was called."""
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
    made["from_group"] = DeviceMesh.from_group(made["new_subgroups"], "cpu").get_group()
    if SPLITS:
        made["split_group"] = dist.split_group(None, [[0, 1], [3, 2]])
        if worlds.WORLD != "torchcomms":  # its gloo raises on the other ranks
            made["split_group, not of all"] = dist.split_group(None, [[1, 2]])
    # Last: since torch 2.15 it advances the members' counter, which all later names come from.
    # Where torch makes groups by a split of WORLD, it waits for ever for ranks that do not call.
    if not worlds.SPLITS_EVERY_GROUP:
        made["local sync"] = dist.new_group([0, 1], use_local_synchronization=True)
    return made, meshes


def _is_group(value):
    return isinstance(value, dist.ProcessGroup)


def _snapshot(made, rank):
    """What can be said of the groups now."""
    groups = {label: group for label, group in made.items() if _is_group(group)}
    tables = world_tables()
    return {
        "id": {label: (id(group), hash(group)) for label, group in groups.items()},
        "name": {label: group.group_name for label, group in groups.items()},
        "ranks": {label: dist.get_process_group_ranks(group) for label, group in groups.items()},
        "sum": {
            label: summed(group, rank) == expected_sum(dist.get_process_group_ranks(group))
            for label, group in groups.items()
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
        "lengths": lengths(),
    }


def _everywhere(rank, world_size, installed):
    if installed:
        _install()
    worlds.init(timeout=TIMEOUT)
    made, meshes = _make_groups(rank)
    facts = {
        "kinds": {label: type(group).__name__ for label, group in made.items()},
        "outside": {label: repr(group) for label, group in made.items() if not _is_group(group)},
        "is NON_GROUP_MEMBER": {
            label: group is dist.GroupMember.NON_GROUP_MEMBER for label, group in made.items()
        },
        "snapshots": [_snapshot(made, rank)],
    }
    if not installed:
        return facts
    proxies = {g for g in made.values() if isinstance(g, ReloadableProcessGroup)}
    facts["inner"] = []
    for _ in range(3):
        old = {proxy.group_name: weakref.ref(proxy.communicator) for proxy in proxies}
        facts["inner"].append(
            {
                "in tables": sorted({p for proxy in proxies for p in mentions(proxy.communicator)}),
                "held by": sorted({h for proxy in proxies for h in holders(proxy.communicator)}),
                "by own name": [
                    proxy.communicator.group_name
                    for proxy in proxies
                    if resolves_to(proxy.communicator.group_name) is proxy.communicator
                ],
            }
        )
        reloadpg.offload()
        facts["inner"][-1]["alive"] = [name for name, ref in old.items() if ref() is not None]
        reloadpg.reload()
        facts["snapshots"].append(_snapshot(made, rank))
    facts["generations"] = {proxy.generation for proxy in proxies}
    facts["mesh still finds"] = all(
        mesh.get_group(name) is made[f"mesh{dims}.{name}"]
        for dims, mesh in meshes.items()
        for name in mesh.mesh_dim_names
    )
    return facts


@pytest.fixture(scope="module")
def stock():
    return run_ranks(_everywhere, 4, args=(False,))


@pytest.fixture(scope="module")
def job():
    return run_ranks(_everywhere, 4, args=(True,))


@pytest.mark.matrix
def test_every_group_of_two_and_more_is_a_proxy(job, stock):
    """Groups of init_device_mesh, new_subgroups, split_group and from_group too (failure 8)."""
    for rank, (facts, plain) in enumerate(zip(job, stock, strict=True)):
        assert facts["kinds"].keys() == plain["kinds"].keys()
        for label, kind in plain["kinds"].items():
            size = len(plain["snapshots"][0]["ranks"].get(label, ()))
            proxied = "ReloadableProcessGroup" if size >= 2 else kind
            assert facts["kinds"][label] == proxied, (rank, label)
    assert {label for label in job[0]["kinds"] if label.startswith("mesh")} == {
        *("mesh1.all", "mesh2.dp", "mesh2.tp", "mesh3.pp", "mesh3.dp3", "mesh3.tp3")
    }


@pytest.mark.matrix
def test_non_member_gets_what_torch_gives(job, stock):
    """NON_GROUP_MEMBER from new_group, or torch's own value for the other ways (failure 6)."""
    for facts, plain in zip(job, stock, strict=True):
        assert facts["outside"] == plain["outside"]
        assert facts["is NON_GROUP_MEMBER"] == plain["is NON_GROUP_MEMBER"]
    assert job[1]["is NON_GROUP_MEMBER"]["new_group"]
    local = set() if worlds.SPLITS_EVERY_GROUP else {"local sync"}
    assert job[2]["outside"].keys() >= {"new_group, a pair", *local}


@pytest.mark.matrix
def test_proxy_is_the_group_in_every_generation(job, stock):
    """In each table in which torch has the group, which are as long as torch's (failure 1).

    The C++ registry has it under the name that torch gives (failure 8). Object, hash, name and
    ranks never change, and a collective never sums over WORLD instead (failure 4).
    """
    for facts, plain in zip(job, stock, strict=True):
        expected, first = plain["snapshots"][0], facts["snapshots"][0]
        # Torch 2.15 leaves splits out of its list of groups without a tag.
        missing = expected["in tables"]
        if worlds.WORLD == "torchcomms":  # taken out, so that they end with their group
            expected["lengths"] |= {"comms": facts["snapshots"][0]["lengths"]["comms"]}
            assert expected["lengths"]["comms"] == 1  # of the group of one rank, which bypasses
        assert {name for names in missing.values() for name in names} <= {"tags"}
        for snapshot in facts["snapshots"]:
            for what in ("in tables", "lengths", "name", "ranks"):
                assert snapshot[what] == expected[what], what
            assert snapshot["id"] == first["id"]
            assert all(snapshot["by name"].values())
            assert all(snapshot["sum"].values())
        assert facts["generations"] == {3}
        assert facts["mesh still finds"]


@pytest.mark.matrix
def test_inner_group_is_nowhere_but_in_its_proxy(job):
    """In no table and under no name; it is gone when the offload returns."""
    for facts in job:
        for inner in facts["inner"]:
            assert inner["in tables"] == inner["by own name"] == inner["alive"] == []
            # The proxy's attributes, which from Python 3.14 on lie in the proxy itself.
            assert inner["held by"] in (["dict"], ["ReloadableProcessGroup"])


# ---------------------------------------------------------------------------------------------
# copies and pickles


class _Holder(torch.nn.Module):
    def __init__(self, group):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.group = group


def _error_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def _copies(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    world, pair = dist.group.WORLD, dist.new_group([0, 1])
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("test/pair", pickle.dumps(pair))
        store.set("test/world", pickle.dumps({"model": _Holder(world)}))
    worlds.barrier()
    facts = {}
    for state in ("live", "offloaded", "reloaded"):
        if state != "live":
            getattr(reloadpg, state.removesuffix("ed"))()
        facts[state] = {
            "copy": copy.copy(world) is world,
            "deepcopy": copy.deepcopy(world) is world,
            "deepcopied model": copy.deepcopy(_Holder(world)).group is world,
            "deepcopied list": copy.deepcopy([world, {"a": world}]) == [world, {"a": world}],
            "pickle": [
                pickle.loads(pickle.dumps(world, protocol)) is world
                for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
            ],
            "from rank 0": pickle.loads(store.get("test/world"))["model"].group is world,
        }
        if rank < 2:
            facts[state]["pair from rank 0"] = pickle.loads(store.get("test/pair")) is pair
        else:
            facts[state]["error"] = _error_of(pickle.loads, store.get("test/pair"))
    data = pickle.dumps(world)
    find, (name, ranks) = world.__reduce__()
    facts["other ranks"] = _error_of(find, name, ranks[:-1])
    worlds.barrier()
    dist.destroy_process_group()
    facts["after destroy"] = _error_of(pickle.loads, data)
    return facts


@pytest.fixture(scope="module")
def copies():
    return run_ranks(_copies, 3)


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["live", "offloaded", "reloaded"])
def test_copies_and_pickles_are_the_same_object(copies, state):
    """copy, deepcopy and pickle of groups and of models that hold them (failure 7)."""
    for rank, facts in enumerate(copies):
        got = dict(facts[state])
        error = got.pop("error", None)
        assert got.pop("pickle") == [True] * (pickle.HIGHEST_PROTOCOL - 1)
        assert set(got.values()) == {True}, got
        assert (error is None) == (rank < 2)


def test_pickle_of_a_group_that_is_not_here_says_so(copies):
    """On a non-member, where the name has other ranks, and after the end of the job."""
    for kind, text in (
        copies[2]["live"]["error"],
        copies[2]["offloaded"]["error"],
        copies[0]["other ranks"],
        copies[0]["after destroy"],
    ):
        assert kind == GroupPickleError.__name__
        assert "a pickled process group" in text


# ---------------------------------------------------------------------------------------------
# destruction


def _use(group):
    return _error_of(dist.all_reduce, torch.ones(1), group=group)


def _forgotten(group, name):
    return {
        "in tables": mentions(group),
        "by name": resolves_to(name) is None,
        "in status": name in [entry.name for entry in reloadpg.status().groups],
    }


def _destroying(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    facts = {}
    for state in ("live", "offloaded"):
        group, other = dist.new_group([0, 1]), dist.new_group([0, 1])
        name = group.group_name
        dist.all_reduce(torch.ones(1), group=group)
        inner = weakref.ref(group.communicator)
        if state == "offloaded":
            reloadpg.offload()
        dist.destroy_process_group(group)
        facts[state] = {
            "forgotten": _forgotten(group, name),
            "state": str(group.state),
            "inner": inner() is None,
            "error": _error_of(group.allreduce, [torch.ones(1)]),
            "through dist": _use(group),
            "again": _error_of(dist.destroy_process_group, group),
        }
        if state == "live":
            reloadpg.offload()
        reloadpg.reload()
        facts[state] |= {
            "not back": _forgotten(group, name),
            "state after": str(group.state),
            "other": summed(other, rank),
            "WORLD": summed(None, rank),
            "generation": (other.generation, group.generation),
        }
        ref = weakref.ref(group)
        group_was = ref() is group
        del group
        gc.collect()
        facts[state]["collected"] = group_was and ref() is None
        dist.destroy_process_group(other)
    before = lengths()
    for _ in range(5):
        short = [dist.new_group([0, 1]) for _ in range(3)]
        refs = [weakref.ref(group) for group in short]
        _cycle()
        for group in short:
            assert summed(group, rank) == 3
            dist.destroy_process_group(group)
        del short, group
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
    after = lengths()
    # Torch itself leaves the empty list of a destroyed group's tag behind.
    facts["tags"] = after.pop("tags_to_pg") - before.pop("tags_to_pg")
    facts["short-lived"] = (before == after, len(reloadpg.status().groups))
    return facts


@pytest.fixture(scope="module")
def destroying():
    return run_ranks(_destroying, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["live", "offloaded"])
def test_destroyed_group_is_forgotten_and_does_not_come_back(destroying, state):
    """destroy_process_group(proxy) takes it from all tables for good (failure 5).

    The library keeps no reference to it (failure 13); other groups are reloaded.
    """
    gone = {"in tables": [], "by name": True, "in status": False}
    for facts in (found[state] for found in destroying):
        assert facts["forgotten"] == facts["not back"] == gone
        assert facts["state"] == facts["state after"] == "destroyed"
        assert facts["inner"]
        assert facts["error"][0] == GroupDestroyedError.__name__
        assert facts["through dist"] is not None
        assert facts["again"] is not None
        assert facts["other"] == facts["WORLD"] == 3
        mine, destroyed = facts["generation"]
        assert (mine > 0, destroyed) == (True, 0)
        assert facts["collected"]


def test_short_lived_groups_leave_nothing(destroying):
    """Groups as checkpointing makes them: created, reloaded, destroyed, gone (failure 13)."""
    assert [facts["short-lived"] for facts in destroying] == [(True, 1)] * 2
    assert [facts["tags"] for facts in destroying] == [15, 15]


def _again(rank, world_size, state, folder):
    _install()
    facts = []
    old = []
    for life in range(3):
        worlds.init(timeout=TIMEOUT)
        world, pair = dist.group.WORLD, dist.new_group([0, 1])
        old.append(world)
        facts.append(
            {
                "kinds": (type(world).__name__, type(pair).__name__),
                "generation": reloadpg.status().generation,
                "sums": [summed(None, rank), summed(pair, rank)],
            }
        )
        _cycle()
        _cycle()
        facts[-1] |= {
            "later": [summed(None, rank), summed(pair, rank)],
            "generations": (world.generation, pair.generation),
        }
        inner = weakref.ref(pair.communicator)
        if state == "offloaded":
            reloadpg.offload()
        meet_at_rank_0(rank, f"life {life}")
        dist.destroy_process_group()
        store_closed_by_rank_0(rank, folder / f"closed {life}")
        facts[-1] |= {
            "tables": {name: n for name, n in lengths().items() if n and name != "tags_to_pg"},
            "states": (str(world.state), str(pair.state)),
            "inner": inner() is None,
            "calls": [reloadpg.offload().changed, reloadpg.reload().changed],
            "error": _error_of(world.allreduce, [torch.ones(1)]),
            "initialized": reloadpg.status().initialized,
        }
    facts.append(len({id(world) for world in old}))
    return facts


def _installed_only(rank, world_size, world, folder):
    reloadpg.install(backends={worlds.BACKEND}, world=world, timeout=TIMEOUT)
    sums = []
    for life in range(3):
        worlds.init(timeout=TIMEOUT)
        sums += [summed(None, rank), summed(dist.new_group([0, 1]), rank)]
        if not world:  # our own connection to the store is made by the first operation
            reloadpg.offload()
            reloadpg.reload()
        meet_at_rank_0(rank, f"life {life}")
        dist.destroy_process_group()
        store_closed_by_rank_0(rank, folder / f"closed {life}")
    return sums


@pytest.mark.matrix
@pytest.mark.parametrize("world", [True, False])
def test_nothing_of_ours_outlives_the_default_group(world, tmp_path):
    """Rank 0's store ends with it, as without us: the next job finds no old keys (failure 5)."""
    results = run_ranks(_installed_only, 2, args=(world, tmp_path), store="rank0")
    assert results == [[3] * 6] * 2


def _follow_rank_0(rank, key):
    """Rank 1 must not end a group that rank 0 still connects."""
    store = c10d._get_default_store()
    if rank == 0:
        store.set(key, "")
    else:
        store.wait([key], timedelta(minutes=1))


def _held(rank, world_size, world, delay):
    connect, numbers = store_client.c10d.clone_store, itertools.count(1)

    def connect_late(store):
        time.sleep(delay * next(numbers))  # the first is the one that an operation waits for
        return connect(store)

    store_client.c10d.clone_store = connect_late
    reloadpg.install(backends={worlds.BACKEND}, world=world, timeout=TIMEOUT)
    worlds.init(timeout=TIMEOUT)
    held = dist.group.WORLD if world else None  # a plain group itself keeps its store
    port = int(os.environ["MASTER_PORT"])
    if not delay:
        _cycle()
    elif not world:
        reloadpg.offload()  # with no group to manage, the job begins here
    _follow_rank_0(rank, "connected")
    meet_at_rank_0(rank, "end")
    dist.destroy_process_group()
    with socket.socket() as client:
        refused = client.connect_ex(("127.0.0.1", port)) != 0
    return refused or rank != 0, str(getattr(held, "state", "destroyed"))


@pytest.mark.matrix
@pytest.mark.parametrize("delay", [0, 0.5])
@pytest.mark.parametrize("world", [True, False])
def test_store_server_ends_with_the_default_group(world, delay):
    """It is gone when destroy_process_group returns, though WORLD is still held, and though our
    own connections were still being made (failure 5)."""
    assert run_ranks(_held, 2, args=(world, delay), store="rank0") == [(True, "destroyed")] * 2


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["live", "offloaded"])
def test_job_can_end_and_begin_again_in_the_same_process(state, tmp_path):
    """destroy_process_group() live or offloaded, then init_process_group and cycles (failure 5)."""
    for facts in run_ranks(_again, 2, args=(state, tmp_path), store="rank0"):
        assert facts.pop() == 3  # the WORLD of each life is an object of its own
        for life in facts:
            assert life["kinds"] == ("ReloadableProcessGroup",) * 2
            assert life["generation"] == 0
            assert life["sums"] == life["later"] == [3, 3]
            assert life["generations"] == (2, 2)
            assert life["tables"] == {}
            assert life["states"] == ("destroyed", "destroyed")
            assert life["inner"]
            assert life["calls"] == [False, False]
            assert life["error"][0] == GroupDestroyedError.__name__
            assert not life["initialized"]


# ---------------------------------------------------------------------------------------------
# who is wrapped, and when


def _layers(function):
    count = 0
    while isinstance(function, wrapt.FunctionWrapper):
        count += 1
        function = function.__wrapped__
    return count


def _twice(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    _install()  # as the framework does, after its dependency has
    pair = dist.new_group([0, 1])
    _install()
    layers = {
        f"{module.__name__}.{name}": _layers(getattr(module, name))
        for module in (dist, c10d)
        for name in ("new_group", "split_group", "init_process_group")
    }
    counts = []
    for _ in range(3):
        _install()
        _cycle()
        inner = {type(one.communicator).__name__ for one in (pair, dist.group.WORLD)}
        counts.append((len(c10d._world.pg_map), inner, pair.generation))
    return layers, counts


def test_installing_twice_wraps_once():
    """One wrapt layer at each name, one proxy a group, no growth (failure 24)."""
    for layers, counts in run_ranks(_twice, 2):
        assert set(layers.values()) == {1}
        assert counts == [(2, {"ProcessGroup"}, cycle) for cycle in (1, 2, 3)]


def _made_while_offloaded(rank, world_size):
    _install()
    worlds.init(timeout=TIMEOUT)
    before = dist.new_group([0, 1, 2])
    reloadpg.offload()
    made = dist.new_group([0, 1], group_desc="made while offloaded")
    absent = dist.new_group([1, 2])
    # Its name is a hash of the ranks and of how many groups the caller knows (since torch 2.15: of
    # how many were made): three on each of its ranks.
    local = dist.new_group([0, 2], use_local_synchronization=True)
    facts = {
        "live": [made.is_live, summed(made, rank)] if rank < 2 else None,
        "local": [local.is_live, summed(local, rank)] if rank != 1 else None,
        "before": _use(before),
        "WORLD": _use(None),
        "absent": absent is dist.GroupMember.NON_GROUP_MEMBER,
    }
    inner = made.communicator if rank < 2 else None
    reloadpg.reload()
    facts["kept"] = rank == 2 or (made.communicator is inner and made.generation == 0)
    del inner
    facts["sums"] = [summed(None, rank), summed(before, rank)]
    facts["sums"] += [summed(made, rank)] if rank < 2 else []
    _cycle()
    facts["generations"] = [before.generation] + ([made.generation] if rank < 2 else [])
    facts["sums later"] = [summed(None, rank), summed(before, rank)]
    facts["sums later"] += [summed(made, rank)] if rank < 2 else []
    if rank != 1:
        facts["local later"] = summed(local, rank)
    return facts


@pytest.mark.matrix
def test_group_made_while_offloaded_lives_at_once_and_outlives_the_reload():
    """It is not rebuilt by that reload, and takes part in the next cycle (failure 22)."""
    for rank, facts in enumerate(run_ranks(_made_while_offloaded, 3)):
        assert facts["WORLD"][0] == GroupOffloadedError.__name__
        assert facts["kept"]
        assert facts["absent"] == (rank == 0)
        assert facts["before"][0] == GroupOffloadedError.__name__
        assert facts["generations"] == ([2, 2] if rank < 2 else [2])
        if rank < 2:
            assert facts["live"] == [True, 3]
        if rank != 1:
            assert facts["local"] == [True, 5]
            assert facts["local later"] == 5
        assert facts["sums"] == facts["sums later"] == ([7, 7, 3] if rank < 2 else [7, 7])


def _choice(rank, world_size):
    facts = {}
    with _install(world=False, min_size=3):
        worlds.init(timeout=TIMEOUT)
        pair, trio = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
        reloadpg.offload()
        facts["kinds"] = [type(g).__name__ for g in (dist.group.WORLD, pair, trio)]
        facts["WORLD"] = summed(None, rank)
        facts["pair"] = summed(pair, rank) if rank < 2 else 3
        facts["trio"] = _use(trio)
        facts["status"] = len(reloadpg.status().groups), reloadpg.status().bypassed
        reloadpg.reload()
        facts["reloaded"] = summed(trio, rank)
    return facts


@pytest.mark.matrix
def test_world_and_small_groups_can_be_left_alone():
    """``world=False`` and ``min_size`` leave groups as torch made them, and usable."""
    for rank, facts in enumerate(run_ranks(_choice, 3)):
        small = "ProcessGroup" if rank < 2 else type(dist.GroupMember.NON_GROUP_MEMBER).__name__
        assert facts["kinds"] == ["ProcessGroup", small, "ReloadableProcessGroup"]
        assert (facts["WORLD"], facts["pair"], facts["reloaded"]) == (7, 3, 7)
        assert facts["trio"][0] == GroupOffloadedError.__name__
        assert facts["status"] == (1, 2 if rank < 2 else 1)


def _bypass(rank, world_size):
    simulated.register()
    reloadpg.install(timeout=TIMEOUT)
    worlds.init("sim", timeout=TIMEOUT)
    pair = dist.new_group([0, 1])
    cpu = dist.new_group([0, 1], backend="gloo")
    local = dist.new_group([0, 1], backend="gloo", use_local_synchronization=True)
    store = c10d._world.pg_map[cpu][1]
    facts = {"kinds": [type(g).__name__ for g in (dist.group.WORLD, pair, cpu, local)]}
    inner = cpu._get_backend(torch.device("cpu"))
    for _ in range(2):
        reloadpg.offload()
        facts["gloo while offloaded"] = [summed(cpu, rank), summed(local, rank)]
        facts["sim while offloaded"] = [_use(None)[0], _use(pair)[0]]
        dist.monitored_barrier(cpu)
        reloadpg.reload()
    facts["sums"] = [summed(group, rank) for group in (None, pair, cpu, local)]
    facts["same gloo"] = cpu._get_backend(torch.device("cpu")) is inner
    facts["same store"] = c10d._world.pg_map[cpu][1] is store
    dist.destroy_process_group(cpu)
    dist.destroy_process_group()
    return facts


@worlds.unbound_only
@pytest.mark.matrix
def test_gloo_groups_bypass_beside_an_accelerators():
    """By default only accelerators' groups are reloadable; gloo groups outlive WORLD's release.

    (failure 21)
    """
    for facts in run_ranks(_bypass, 2):
        proxy = "ReloadableProcessGroup"
        assert facts["kinds"] == [proxy, proxy, "ProcessGroup", "ProcessGroup"]
        assert facts["gloo while offloaded"] == [3, 3]
        assert facts["sim while offloaded"] == [GroupOffloadedError.__name__] * 2
        assert facts["sums"] == [3, 3, 3, 3]
        assert facts["same gloo"]
        assert facts["same store"]


def _after_init(rank, world_size):
    worlds.init(timeout=timedelta(seconds=77))
    held = dist.group.WORLD
    _install()
    world = dist.group.WORLD
    facts = {
        "proxy": type(world).__name__,
        "name": world.group_name == held.group_name,
    }
    del held
    _cycle()
    backend = world._get_backend(worlds.device())
    facts["timeout"] = backend.options._timeout.total_seconds()
    facts["sum"] = summed(None, rank)
    facts["generation"] = world.generation
    return facts


@pytest.mark.matrix
def test_world_is_taken_over_when_install_comes_after_init():
    """It is a proxy from then on, under its own name, with the timeout it was made with."""
    for facts in run_ranks(_after_init, 2):
        assert facts == {
            "proxy": "ReloadableProcessGroup",
            "name": True,
            "timeout": 77.0,
            "sum": 3,
            "generation": 1,
        }
