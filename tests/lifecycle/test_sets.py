"""Two sets of groups in one job: each is offloaded and reloaded separately."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from worlds import BACKEND, TIMEOUT, init, summed

import reloadpg
from reloadpg import DisagreementError, GroupOffloadedError, InvalidOptionError, PeerFailedError
from reloadpg.testing import run_ranks

pytestmark = pytest.mark.matrix


def groups_of_two_sets(**options):
    """The default group and one more in the trainer's set, and one in the engine's."""
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, **options)
    init()
    with reloadpg.region("engine"):
        engine = dist.new_group()
    return dist.group.WORLD, dist.new_group(), engine


def works(group, rank):
    """Whether a collective on the group runs, with the right sum."""
    try:
        return summed(group, rank) == 3.0
    except GroupOffloadedError:
        return False


def states():
    return {name: one.state for name, one in reloadpg.status().sets.items()}


def _one_at_a_time(rank, world_size):
    groups = groups_of_two_sets()
    seen = []

    def see(report):
        names = {one.set for one in report.groups}
        seen.append(([works(group, rank) for group in groups], states(), names, report.sets))

    see(reloadpg.offload("trainer"))
    see(reloadpg.offload("engine"))
    see(reloadpg.reload("engine"))  # while the default group is offloaded
    see(reloadpg.offload())
    see(reloadpg.reload())
    again = reloadpg.reload("trainer")
    status = reloadpg.status()
    cycles = {name: (one.groups, one.cycles) for name, one in status.sets.items()}
    return seen, again.changed, cycles, status.generation, str(status)


def test_each_set_is_offloaded_and_reloaded_separately():
    """The other one works on; ``offload()`` and ``reload()`` are for all of them."""
    for seen, again, cycles, generation, text in run_ranks(_one_at_a_time, 2):
        used, found, sets, named = zip(*seen, strict=True)
        assert list(used) == [
            [False, False, True],
            [False, False, False],
            [False, False, True],
            [False, False, False],
            [True, True, True],
        ]
        assert found[0] == {"trainer": "offloaded", "engine": "live"}
        assert found[2] == {"trainer": "offloaded", "engine": "live"}
        assert found[4] == {"trainer": "live", "engine": "live"}
        assert sets == ({"trainer"}, {"engine"}, {"engine"}, {"engine"}, {"trainer", "engine"})
        assert named == ("trainer", "engine", "engine", "all", "all")
        assert not again
        assert cycles == {"trainer": (2, 1), "engine": (1, 2)}
        assert generation == 2
        assert "set engine: live" in text


def _blocks(rank, world_size):
    world, _, engine = groups_of_two_sets()
    seen = {}

    def see(name):
        seen[name] = works(world, rank), works(engine, rank)

    with reloadpg.offloaded("trainer"):
        see("trainer")
        with reloadpg.offloaded(collect=True, connect="eager"):
            see("all within")
        see("after all within")
        with reloadpg.offloaded("trainer"):
            pass
        see("after itself within")
    see("after")
    with reloadpg.offloaded():
        reloadpg.reload("engine")
        see("reloaded in a block")
        with reloadpg.offloaded("engine"):
            see("engine in a block")
        see("engine after its block")
    swap = reloadpg.swapped(out="trainer", into="engine")
    with swap:
        see("swapped")
    see("after swap")
    with pytest.raises(ZeroDivisionError), swap:
        see("swapped again")
        raise ZeroDivisionError
    see("after a swap that raised")
    reloadpg.reload()
    return seen


def test_blocks_of_sets_nest():
    """The outermost block of a set reloads it; a swap leaves its first set live."""
    for seen in run_ranks(_blocks, 2):
        assert seen == {
            "trainer": (False, True),
            "all within": (False, False),
            "after all within": (False, True),
            "after itself within": (False, True),
            "after": (True, True),
            "reloaded in a block": (False, True),
            "engine in a block": (False, False),
            "engine after its block": (False, True),
            "swapped": (False, True),
            "after swap": (True, False),
            "swapped again": (False, True),
            "after a swap that raised": (True, False),
        }


def _partial(rank, world_size):
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT)
    init()
    with reloadpg.region("engine"):
        engine = dist.new_group([0, 1])
    member = rank < 2
    called = []
    for name in ("trainer", "engine"):
        reloadpg.on_offload(lambda name=name: called.append(f"offload {name}"), sets=name)
        reloadpg.on_reload(lambda name=name: called.append(f"reload {name}"), sets=[name])
    reloadpg.on_offload(lambda: called.append("offload any"))
    for _ in range(2):
        with reloadpg.swapped(out="trainer", into="engine"):
            used = works(engine, rank) if member else None
    pending = reloadpg.reload("engine", wait=False)
    total = summed(dist.group.WORLD, rank)  # the trainer's groups are not reserved
    pending.result()
    return used, total, called, states()


def test_ranks_in_no_group_of_a_set_take_part():
    """Callbacks are called for their sets; a pending reload leaves the other set usable."""
    swap = ["offload trainer", "offload any", "offload engine", "offload any", "reload trainer"]
    again = [*swap[:2], "reload engine", *swap[2:]]
    for rank, (used, total, called, found) in enumerate(run_ranks(_partial, 3)):
        assert used is (True if rank < 2 else None)
        assert total == 6.0
        assert called == [*swap, *again, "reload engine"]
        assert found == {"trainer": "live", "engine": "live"}


def _failure(rank, world_size):
    world, _, engine = groups_of_two_sets()

    def fail():
        if rank == 1:
            raise RuntimeError("as asked")

    reloadpg.offload("engine")
    remove = reloadpg.on_reload(fail, sets="engine")
    with pytest.raises(PeerFailedError if rank == 0 else reloadpg.ReloadpgError):
        reloadpg.reload("engine")
    failed = states(), works(world, rank), works(engine, rank)
    remove()
    generation = world.generation
    reloadpg.reload("engine")
    repaired = states(), works(engine, rank), world.generation == generation
    reloadpg.offload("trainer")
    reloadpg.recover("a fault")
    return failed, repaired, states(), works(world, rank), works(engine, rank)


def test_a_failure_in_one_set_leaves_the_other_as_it_is():
    """The failed one can be reloaded again; a recovery makes all sets live."""
    for failed, repaired, recovered, *used in run_ranks(_failure, 2):
        assert failed == ({"trainer": "live", "engine": "failed"}, True, False)
        assert repaired == ({"trainer": "live", "engine": "live"}, True, True)
        assert recovered == {"trainer": "live", "engine": "live"}
        assert used == [True, True]


def _disagreements(rank, world_size):
    groups_of_two_sets()
    texts = []
    with pytest.raises(DisagreementError) as raised:
        reloadpg.offload("engine" if rank else "trainer")
    texts.append(str(raised.value))
    with reloadpg.region("engine" if rank else "critic"):
        dist.new_group()
    with pytest.raises(DisagreementError) as raised:
        reloadpg.offload()
    texts.append(str(raised.value))
    return texts, states()


def test_ranks_agree_on_the_sets():
    """On those that are asked for, and on the set of each group."""
    for (asked, group), found in run_ranks(_disagreements, 2):
        assert "chosen sets is trainer on rank 0 and engine on rank 1" in asked
        assert "set is critic on rank 0 and engine on rank 1" in group
        assert set(found.values()) == {"live"}


@pytest.mark.parametrize(
    "call",
    [
        lambda: reloadpg.offload(""),
        lambda: reloadpg.reload(None),
        lambda: reloadpg.offloaded(3),
        lambda: reloadpg.swapped(out="trainer", into="trainer"),
        lambda: reloadpg.swapped(out="trainer", into=[]),
        lambda: reloadpg.on_offload(print, sets=[""]),
    ],
)
def test_what_is_no_name_of_a_set_is_refused(call):
    with reloadpg.install(), pytest.raises(InvalidOptionError, match="nothing was changed"):
        call()


def _typing_error(rank, world_size):
    _, _, engine = groups_of_two_sets()
    report = reloadpg.offload("engin")
    return report.changed, report.warnings, works(engine, rank)


def test_a_name_that_is_nearly_that_of_a_set_is_warned_of():
    for changed, warnings, used in run_ranks(_typing_error, 2):
        assert not changed
        assert any("engine" in one for one in warnings)
        assert used


class _Named(SimpleNamespace):
    """An object of an engine; its class names it."""


class PyNcclCommunicator(_Named):
    pass


class CustomAllreduce(_Named):
    pass


class Coordinator(_Named):
    """As vLLM's and SGLang's ``GroupCoordinator``, which their modules refer to weakly."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("package", "freed"),
    [("vllm", "enable_nccl_comm_suspend"), ("sglang.srt", "disable_custom_all_reduce")],
)
def test_what_an_engine_keeps_that_is_no_process_group_is_named(monkeypatch, package, freed):
    """With what frees it; not what is switched off, suspended, or gone."""
    nccl = PyNcclCommunicator(disabled=False, _suspended=False)
    reduce = CustomAllreduce(disabled=False)
    off = {"qr_comm": CustomAllreduce(disabled=True), "symm_mem_comm": None}
    if package == "vllm":
        owner = SimpleNamespace(pynccl_comm=nccl, ca_comm=reduce, **off)
        group = Coordinator(device_communicator=owner)
    else:
        group = Coordinator(pynccl_comm=nccl, ca_comm=reduce, **off)
    state = ModuleType("parallel_state")
    state._groups = {"tp:0": weakref.ref(group)}
    monkeypatch.setitem(sys.modules, f"{package}.distributed.parallel_state", state)
    status = reloadpg.status()
    assert set(status.kept) == {"tp:0.pynccl_comm", "tp:0.ca_comm"}
    assert any("PyNcclCommunicator" in text for text in status.kept.values())
    assert freed in str(status)
    assert status.details()["kept"] == status.kept
    nccl._suspended = True
    assert set(reloadpg.status().kept) == {"tp:0.ca_comm"}
    del group
    assert reloadpg.status().kept == {}
