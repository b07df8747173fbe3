"""Groups that could not be captured are named; ``register_group`` makes them reloadable."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.jobs import one_cycle
from helpers.worlds import CAN_SPLIT, TIMEOUT, start, summed
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg import ReloadableProcessGroup
from reloadpg.groups.registry import registry

pytestmark = pytest.mark.matrix


@pytest.mark.ranks(2)
def test_install_after_init_takes_over_world_and_names_older_groups(rank):
    """WORLD keeps its name and timeout. A group created before works while the others are
    offloaded, so it holds memory: ``install``, the report and ``status()`` name it.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=123))
    raw, name = dist.group.WORLD, dist.group.WORLD.group_name
    before, _ = dist.new_group([0, 1], group_desc="before"), dist.new_group([0, 1])
    with pytest.warns(UserWarning, match="created before") as caught:
        reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    (early,) = [str(w.message) for w in caught if "before reloadpg.install" in str(w.message)]
    assert "group '1' (before), '2' (ranks 0-1): it was created before" in early
    world = dist.group.WORLD
    assert isinstance(world, ReloadableProcessGroup)
    assert (world is not raw, world.group_name) == (True, name)
    dist.new_group([0], group_desc="single")
    report, status = reloadpg.offload(), reloadpg.status()
    assert type(before) is dist.ProcessGroup
    assert summed(before, rank) == 3.0
    reloadpg.reload()
    assert (summed(None, rank), world.generation) == (3.0, 1)
    assert reloadpg.status().groups[0].timeout_s == 123
    assert world._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=123)
    (warning,) = [one for one in report.warnings if "not reloadable" in one]
    assert early == f"reloadpg.install(): {warning}"
    assert "reloadpg.register_group()" in warning
    assert len(status.unmanaged) == 2
    assert "not reloadable: group" in str(status)
    assert len(status.bypassed_groups) == (1 if rank == 0 else 0)  # the group of one rank


@pytest.mark.ranks(2)
@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_reference_to_the_raw_world_is_warned_of(world):
    """On gloo, collectives on that object succeed even while the group is offloaded."""
    backend = "gloo" if world == "unbound" else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    if world == "bound":
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    raw = dist.group.WORLD
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    warnings = reloadpg.offload().warnings
    assert any("(default_pg)" in one and "still referenced" in one for one in warnings)
    reloadpg.reload()
    del raw
    gc.collect()
    assert not any("still referenced" in one for one in reloadpg.offload().warnings)


# ---------------------------------------------------------------------------------------------
# groups that are in none of c10d's tables


@pytest.mark.ranks(2)
@pytest.mark.skipif(not CAN_SPLIT, reason="this torch has no such method")
@pytest.mark.parametrize("parent", ["reloadable", "plain"])
def test_a_group_of_the_method_split_group_is_named(rank, parent, tmp_path):
    """In ``status().unmanaged`` and in the report, as long as the program refers to it."""
    original = dist.ProcessGroup.split_group
    start("bound", file=str(tmp_path / "store"), min_size=1)
    whole = dist.group.WORLD
    if parent == "plain":
        with reloadpg.region(None):
            whole = dist.new_group([0, 1])
    part = whole.split_group([rank], group_name=f"part {rank}", group_desc="part")
    ((name, reason),) = reloadpg.status().unmanaged.items()
    assert name == part.group_name
    assert "ProcessGroup.split_group()" in reason
    assert any("(part)" in one and "new_group" in one for one in reloadpg.offload().warnings)
    reloadpg.reload()
    del part
    assert reloadpg.status().unmanaged == {}
    reloadpg.uninstall()
    assert dist.ProcessGroup.split_group is original


@pytest.mark.ranks(2)
@pytest.mark.skipif(
    not importlib.util.find_spec("torch.distributed._dist2"), reason="this torch has no _dist2"
)
def test_a_group_of_the_experimental_module_is_named():
    """It works while the others are offloaded, so it holds memory."""
    from torch.distributed import _dist2

    start("unbound", min_size=1)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # its rendezvous reads the environment
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
    group = _dist2.new_group("gloo", timedelta(seconds=60), "cpu")
    (reason,) = reloadpg.status().unmanaged.values()
    assert "_dist2.new_group()" in reason
    reloadpg.offload()
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    assert tensor.item() == 1.0
    reloadpg.reload()
    reloadpg.uninstall()
    assert _dist2.new_group.__module__ == "torch.distributed._dist2"


# ---------------------------------------------------------------------------------------------
# groups created by hand


def _by_hand(store, rank, size, name):
    """As slime, OpenRLHF and verl create the group of trainer ranks and rollout engine."""
    group, _ = c10d._new_process_group_helper(
        *(size, rank, [], c10d.Backend("gloo"), dist.PrefixStore(name, store)),
        group_name=name,
        timeout=TIMEOUT,
    )
    c10d._world.pg_group_ranks[group] = {r: r for r in range(size)}
    return group


@pytest.mark.ranks(3)
def test_a_weight_update_group(rank, free_port):
    """Ranks 0 and 1 are the trainer's job, rank 2 is an engine without a default group.

    The group is named as unmanaged. Once registered, it is released first and rebuilt last, behind
    one object and one name.
    """
    shared = dist.TCPStore("127.0.0.1", free_port, 3, is_master=rank == 2, timeout=TIMEOUT)
    generations = iter(range(100))

    def make():
        # The same name each time; only the keys in the shared store must be new.
        store = dist.PrefixStore(f"generation {next(generations)}", shared)
        return _by_hand(store, rank, 3, "weights")

    if rank == 2:
        for _ in range(3):
            group = make()
            assert summed(group, rank) == 6.0
            c10d.destroy_process_group(group)
        return
    store = dist.PrefixStore("trainer", shared)
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    group = make()
    (warning,) = [one for one in reloadpg.offload().warnings if "not reloadable" in one]
    assert "'weights'" in warning
    assert "reloadpg.register_group()" in warning
    reloadpg.reload()
    group = reloadpg.register_group(group, rebuild=make)
    dist.new_group([0, 1], timeout=TIMEOUT)
    assert summed(group, rank) == 6.0
    for _ in range(2):
        assert reloadpg.offload().groups[0].name == "weights"
        assert group.state == "offloaded"
        assert reloadpg.reload().groups[-1].name == "weights"
        assert summed(group, rank) == 6.0
    assert c10d._resolve_process_group("weights") is group
    assert group.generation == 3


@pytest.mark.ranks(1)
def test_arguments_of_register_group():
    """A group of one rank may be registered. What cannot be called is refused, and WORLD."""
    with pytest.raises(reloadpg.errors.NotInstalledError):
        reloadpg.register_group(None, rebuild=list)
    start("unbound", min_size=2)
    group = dist.new_group([0])
    for one, wrong in (
        (group, {"rebuild": None}),
        (dist.group.WORLD, {"rebuild": list}),
    ):
        with pytest.raises(reloadpg.errors.InvalidOptionError):
            reloadpg.register_group(one, **wrong)
    reloadpg.register_group(group, rebuild=list)


@pytest.mark.ranks(1)
def test_registered_groups_are_rebuilt_one_after_the_other():
    """Their members may be processes outside the job, which rebuild them in one order."""
    start("unbound", min_size=2, parallelism=4)
    threads = []

    def rebuild():
        threads.append(threading.get_ident())
        return dist.new_group([0])

    for _ in range(4):
        reloadpg.register_group(dist.new_group([0]), rebuild=rebuild)
    one_cycle()
    assert threads == threads[:1] * 4


@pytest.mark.ranks(1)
def test_rebuild_must_return_the_group_that_it_created():
    start("unbound", min_size=2)
    for returned in (None, "group", dist.group.WORLD):
        group = reloadpg.register_group(dist.new_group([0]), rebuild=lambda made=returned: made)
        reloadpg.offload()
        with pytest.raises(
            reloadpg.errors.RebuildError, match=r"given to register_group\(\) returned"
        ):
            reloadpg.reload()
        dist.destroy_process_group(group)


# ---------------------------------------------------------------------------------------------
# groups written in Python


class _Reconfigured(dist.ProcessGroup):
    """A group that is given its members later, and again after a fault, as torchft's."""

    ended = 0
    group_name = "managed"
    group_desc = "python"
    bound_device_id = None

    def configure(self, *_):
        pass

    def shutdown(self):
        self.ended += 1

    def _set_group_name(self, name):
        pass

    _set_group_desc = _set_group_name


@pytest.mark.ranks(2)
def test_a_python_group_that_manages_its_members_is_unmanaged(rank):
    """``new_group`` does not raise, an offload does not release it, and the status names it."""
    only = _Reconfigured(rank, 2)
    dist.Backend.register_backend("python", lambda *_: only, extended_api=True, devices=["cpu"])
    reloadpg.install(backends={"python", "gloo"}, timeout=TIMEOUT)
    dist.init_process_group("gloo", timeout=TIMEOUT)  # torch looks for the device of a bound one
    assert dist.new_group([0, 1], backend="python") is only
    one_cycle()
    assert only.ended == 0
    (found,) = reloadpg.status().unmanaged.values()
    assert "its configure()" in found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("state", ["offloaded", "failed"])
def test_a_registered_group_whose_far_end_is_dead_is_destroyed(rank, state):
    """Only rank 0 is in the group. The error of the failed reload says what to do.

    The trainer's groups are rebuilt, and the successor is registered under the same name.
    """
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    worlds.init(timeout=TIMEOUT)

    def make():
        return _by_hand(dist.HashStore(), 0, 1, "weights")

    def rebuild():
        raise RuntimeError("the engine has ended")

    if rank == 0:
        group = reloadpg.register_group(make(), rebuild=rebuild)
    reloadpg.offload()
    if state == "failed":
        with pytest.raises((reloadpg.errors.RebuildError, reloadpg.PeerFailedError)) as failed:
            reloadpg.reload()
        assert "the engine has ended. If its members outside the job have" in str(failed.value)
    if rank == 0:
        assert group.state == state
        dist.destroy_process_group(group)
        assert group.state == "destroyed"
    assert len(reloadpg.reload().groups) == 1
    if rank == 0:
        group = reloadpg.register_group(make(), rebuild=make)
    one_cycle()
    assert worlds.sums_right(dist.group.WORLD)
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=group)
        assert c10d._resolve_process_group("weights") is group


@pytest.mark.ranks(2)
@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_groups_that_the_program_dropped_are_counted(rank, world):
    """A group of an earlier epoch, not one that anything refers to.

    A reload rebuilds them until the program destroys them.
    """
    start(world)
    kept, [by_list] = dist.new_group([0, 1]), [dist.new_group([0, 1])]
    module = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(1, 1), process_group=dist.new_group([0, 1])
    )
    reloadpg.offload()
    assert reloadpg.reload().warnings == ()
    for epoch in range(3):
        group = dist.new_group([0, 1], group_desc=f"epoch {epoch}")
        assert summed(group, rank) == 3.0
    for reload in (reloadpg.reload, lambda: reloadpg.reload(wait=False).result()):
        reloadpg.offload()
        (text,) = reload().warnings
        assert text.startswith("2 groups are referenced by torch's tables alone"), text
        assert "(epoch 0)" in text
        assert "(epoch 1)" in text
        assert "(epoch 2)" not in text  # `group`
    for dropped in registry.dropped():
        dist.destroy_process_group(dropped)
    reloadpg.offload()
    assert reloadpg.reload().warnings == ()
    del dropped
    assert {summed(one, rank) for one in (kept, by_list, group)} == {3.0}
    module(torch.ones(1, 1)).sum().backward()


@pytest.mark.ranks(4)
def test_groups_of_a_mesh_are_not_counted_as_dropped(rank):
    """A mesh finds its groups by name."""
    start("unbound")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reloadpg.offload()
    assert reloadpg.reload().warnings == ()
    assert summed(mesh.get_group("tp"), rank) == (3.0 if rank < 2 else 7.0)
