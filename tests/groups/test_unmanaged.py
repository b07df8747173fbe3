"""Groups that the library could not take over are named; those made by hand can be handed over."""

from __future__ import annotations

import gc
from datetime import timedelta

import early_bindings
import pytest
import torch
import torch.distributed as dist
from torch._dynamo import distributed as dynamo_distributed
from torch.distributed import distributed_c10d as c10d
from worlds import TIMEOUT, start, summed

import reloadpg
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix


def _by_torch_itself(rank, world_size, world):
    start(world)
    made = [
        c10d._new_group_with_tag([0, 1], pg_tag="mine"),
        dynamo_distributed.get_guard_pg() if hasattr(dynamo_distributed, "get_guard_pg") else None,
    ]
    made = [group for group in made if group is not None]
    again = c10d._new_group_with_tag([0, 1], pg_tag="mine")
    for _ in range(2):
        reloadpg.offload()
        report = reloadpg.reload()
    kinds = {type(group).__name__ for group in made}
    return kinds, again is made[0], {summed(g, rank) for g in made}, report.warnings


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_groups_that_torchs_compiler_makes_are_reloadable(world):
    """They are created by ``_new_group_with_tag``, past ``new_group``; tags are kept."""
    for kinds, same, sums, warnings in run_ranks(_by_torch_itself, 2, args=(world,)):
        assert kinds == {"ReloadableProcessGroup"}
        assert same
        assert sums == {3.0}
        assert warnings == ()


def _early(rank, world_size, world):
    start(world)
    made = {
        "by partial": early_bindings.partial([0, 1]),
        "by class": early_bindings.Holder.new_group([0, 1], group_desc="by class"),
        "by default": early_bindings.by_default([0, 1]),
    }
    reloadpg.offload()
    reloadpg.reload()
    facts = [(g.group_desc == desc, g.generation, summed(g, rank)) for desc, g in made.items()]
    return facts, early_bindings.partial.func is dist.new_group


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_groups_of_early_bindings_are_reloadable(world):
    """Bound in a partial, a class or a default before the patch: torch's function itself calls one
    that is patched.
    """
    for facts, patched in run_ranks(_early, 2, args=(world,)):
        assert facts == [(True, 1, 3.0)] * 3
        assert not patched


def _named(rank, world_size):
    dist.init_process_group("gloo", timeout=TIMEOUT)
    before = dist.new_group([0, 1], group_desc="before")
    with pytest.warns(UserWarning, match="created before"):
        reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.new_group([0], group_desc="single")
    report = reloadpg.offload()
    status = reloadpg.status()
    total = summed(before, rank)  # it works meanwhile: it holds memory
    reloadpg.reload()
    return report.warnings, dict(status.unmanaged), str(status), total, status.bypassed


def test_a_group_made_before_install_is_named_with_what_to_do():
    """In the report's warnings, in ``status()``, and in what it prints."""
    for rank, (warnings, unmanaged, text, total, bypassed) in enumerate(run_ranks(_named, 2)):
        (warning,) = [one for one in warnings if "not reloadable" in one]
        assert "(before)" in warning
        assert "single" not in warning
        assert "before reloadpg.install()" in warning
        assert "reloadpg.register_group()" in warning
        assert len(unmanaged) == 1
        assert "not reloadable: group" in text
        assert bypassed == (1 if rank == 0 else 0)  # the group of one rank
        assert total == 3.0


def _raw_world(rank, world_size, world):
    backend = "gloo" if world == "unbound" else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    if world == "bound":
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    raw = dist.group.WORLD
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    first = reloadpg.offload().warnings
    reloadpg.reload()
    del raw
    gc.collect()
    second = reloadpg.offload().warnings
    reloadpg.reload()
    return first, second


@pytest.mark.parametrize("world", ["unbound", "bound"])
def test_a_raw_world_that_code_still_holds_is_named(world):
    """On gloo its collectives even succeed while the group is offloaded."""
    for first, second in run_ranks(_raw_world, 2, args=(world,)):
        assert any("(default_pg)" in one and "still referenced" in one for one in first)
        assert not any("still referenced" in one for one in second)


# ---------------------------------------------------------------------------------------------
# groups made by hand


def _by_hand(store, rank, size, name):
    """As slime, OpenRLHF and verl make the group between trainer ranks and rollout engine."""
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend("gloo"),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=TIMEOUT,
    )
    c10d._world.pg_group_ranks[group] = {r: r for r in range(size)}
    return group


def _weight_update(rank, world_size, side, handed_over):
    """Ranks 0 and 1 are the trainer's job; rank 2 is a rollout engine with no job of its own."""
    shared = dist.TCPStore("127.0.0.1", side, 3, is_master=rank == 2, timeout=TIMEOUT)
    generations = iter(range(100))

    def make():
        # The same name each time; only the keys in the shared store must be new.
        store = dist.PrefixStore(f"generation {next(generations)}", shared)
        return _by_hand(store, rank, 3, "weights")

    if rank == 2:
        sums = []
        for _ in range(3 if handed_over else 1):
            group = make()
            sums.append(summed(group, rank))
            if handed_over:
                c10d.destroy_process_group(group)
        return sums
    reloadpg.install(backends={"gloo"}, timeout=TIMEOUT)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("trainer", shared),
        rank=rank,
        world_size=2,
        timeout=TIMEOUT,
    )
    group = make()
    if not handed_over:
        sums = [summed(group, rank)]
        warnings = reloadpg.offload().warnings
        reloadpg.reload()
        return sums, [one for one in warnings if "not reloadable" in one]
    group = reloadpg.register_group(group, rebuild=make)
    dist.new_group([0, 1], timeout=TIMEOUT)
    sums, states = [summed(group, rank)], []
    for _ in range(2):
        released = [one.name for one in reloadpg.offload().groups]
        state = str(group.state)
        rebuilt = [one.name for one in reloadpg.reload().groups]
        states.append((state, released[0], rebuilt[-1]))
        sums.append(summed(group, rank))
    known = c10d._resolve_process_group("weights") is group
    return sums, states, known, group.generation


def test_a_weight_update_group_is_named(free_port):
    """Made by hand with the helper, with a rendezvous and members of its own."""
    results = run_ranks(_weight_update, 3, args=(free_port, False))
    assert results[2] == [6.0]
    for sums, warnings in results[:2]:
        assert sums == [6.0]
        (warning,) = warnings
        assert "'weights'" in warning
        assert "reloadpg.register_group()" in warning


def test_a_weight_update_group_can_be_handed_over(free_port):
    """It goes before the others and comes back after them, behind one object, under one name."""
    results = run_ranks(_weight_update, 3, args=(free_port, True))
    assert results[2] == [6.0] * 3
    for sums, states, known, generation in results[:2]:
        assert sums == [6.0] * 3
        assert states == [("offloaded", "weights", "weights")] * 2
        assert known
        assert generation == 2


def _refused_by_manage(rank, world_size):
    seen = []
    for when in ("before", "after"):
        if when == "after":
            start("unbound", min_size=2)
        for arguments in ({}, {"rebuild": None}, {"rebuild": list, "destroy": 3}):
            group = dist.new_group([0]) if when == "after" else None
            try:
                reloadpg.register_group(group, **{"rebuild": list, **arguments})
                seen.append("")
            except (reloadpg.ReloadpgError, TypeError) as error:
                seen.append(type(error).__name__)
    return seen


def test_what_manage_refuses():
    """Nothing installed, what cannot be called; a group of one rank can be handed over."""
    (seen,) = run_ranks(_refused_by_manage, 1)
    assert seen == ["NotInstalledError"] * 3 + ["", "InvalidOptionError", "InvalidOptionError"]


def _wrong_rebuilds(rank, world_size):
    start("unbound", min_size=2)
    seen = []
    for returned in ("nothing", "text", "WORLD"):
        made = {"nothing": None, "text": "group", "WORLD": dist.group.WORLD}[returned]
        group = reloadpg.register_group(dist.new_group([0]), rebuild=lambda made=made: made)
        reloadpg.offload()
        try:
            reloadpg.reload()
        except reloadpg.RebuildError as error:
            seen.append(str(error))
        dist.destroy_process_group(group)
    return seen


def test_what_rebuild_must_return():
    """The group that it has made, and nothing else: the error says so."""
    (seen,) = run_ranks(_wrong_rebuilds, 1)
    assert len(seen) == 3
    for text in seen:
        assert "the rebuild function given to register_group() returned" in text


# ---------------------------------------------------------------------------------------------
# groups written in Python


class _Python(dist.ProcessGroup):
    """A group in Python whose size is known only later, as torchft's; or that is one object."""

    def __init__(self, rank, size, ready):
        super().__init__(rank, size)
        self._place, self._count, self.ready, self.ended = rank, size, ready, 0
        self._made = ""

    def size(self):
        if not self.ready:
            raise RuntimeError("not configured")
        return self._count

    def rank(self):
        return self._place

    def getBackendName(self):
        return "python"

    def name(self):
        return "python"

    def shutdown(self):
        self.ended += 1

    def abort(self):
        self.ended += 1

    group_name = property(lambda self: self._made)
    group_desc = property(lambda self: "python")
    bound_device_id = None

    def _set_group_name(self, name):
        self._made = name

    def _set_group_desc(self, desc):
        pass


def _foreign(rank, world_size, kind):
    count = {"not ready": 2, "other size": 5, "one object": 2, "configured": 2}[kind]
    only = _Python(rank, count, ready=kind != "not ready")
    if kind == "configured":
        only.configure = lambda *_: None
    dist.Backend.register_backend("python", lambda *_: only, extended_api=True, devices=["cpu"])
    reloadpg.install(backends={"python", "gloo"}, timeout=timedelta(seconds=10))
    dist.init_process_group("gloo", timeout=TIMEOUT)
    group = dist.new_group([0, 1], backend="python")
    reloadpg.offload()
    ended = only.ended
    try:
        reloadpg.reload()
        text = ""
    except reloadpg.ReloadpgError as error:
        text = str(error)
    return group is only, ended, dict(reloadpg.status().unmanaged), text


def test_a_python_group_that_is_not_ready_is_left_alone():
    """Asking it for its size made ``new_group`` raise; c10d has the ranks."""
    for same, ended, unmanaged, text in run_ranks(_foreign, 2, args=("not ready",)):
        assert same
        assert (ended, text) == (0, "")
        (reason,) = unmanaged.values()
        assert "size() raised RuntimeError" in reason


def test_a_python_group_of_another_size_is_left_alone():
    """It counts its members by itself, and manages them."""
    for same, ended, unmanaged, text in run_ranks(_foreign, 2, args=("other size",)):
        assert same
        assert (ended, text) == (0, "")
        (reason,) = unmanaged.values()
        assert "its size() is 5" in reason


def test_a_python_group_that_is_configured_anew_is_left_alone():
    """As torchft's are, which could be selected where ``min_size`` is 1: it is one object."""
    for same, ended, unmanaged, text in run_ranks(_foreign, 2, args=("configured",)):
        assert same
        assert (ended, text) == (0, "")
        (reason,) = unmanaged.values()
        assert "its configure()" in reason


def test_a_replay_that_returns_the_released_object_is_refused():
    """Such a group came back dead; now the reload says so, and what to leave out."""
    for same, ended, _, text in run_ranks(_foreign, 2, args=("one object",)):
        assert not same
        assert ended >= 1
        assert "returned the object that was released" in text
        assert "install(backends=...)" in text
