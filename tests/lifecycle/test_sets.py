"""Two sets of groups in one job: each is offloaded and reloaded separately."""

from __future__ import annotations

import re
from contextlib import contextmanager, nullcontext

import pytest
import torch.distributed as dist
from helpers.worlds import BACKEND, TIMEOUT, init, summed

import reloadpg
from reloadpg import DisagreementError, GroupOffloadedError, PeerFailedError
from reloadpg.errors import InvalidOptionError
from reloadpg.testing import faults, simulated

pytestmark = pytest.mark.matrix


def groups_of_two_sets(**options):
    """The default group and one more in the trainer's set, and one in the engine's."""
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets=["engine", "critic"], **options)
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


@pytest.mark.ranks(2)
def test_each_set_is_offloaded_and_reloaded_separately(rank):
    """The other set stays usable. Without a name, an operation is for all sets."""
    groups = groups_of_two_sets()
    for operation, names, used, found in (
        (lambda: reloadpg.offload("trainer"), {"trainer"}, [False, False, True], "offloaded live"),
        (lambda: reloadpg.offload("engine"), {"engine"}, [False] * 3, "offloaded offloaded"),
        # while the default group is offloaded
        (lambda: reloadpg.reload("engine"), {"engine"}, [False, False, True], "offloaded live"),
        (reloadpg.offload, {"engine"}, [False] * 3, "offloaded offloaded"),
        (reloadpg.reload, {"trainer", "engine"}, [True] * 3, "live live"),
    ):
        report = operation()
        assert {one.set for one in report.groups} == names
        assert report.sets in ("all", *names)
        assert [works(group, rank) for group in groups] == used
        assert [states()[name] for name in ("trainer", "engine")] == found.split()
    assert not reloadpg.reload("trainer").changed
    reloadpg.offload()
    for group, call in zip(groups[1:], ("reload()", 'reload("engine")'), strict=True):
        with pytest.raises(GroupOffloadedError, match=re.escape(f"Call reloadpg.{call} on all ")):
            summed(group, rank)
    reloadpg.reload()
    status = reloadpg.status()
    assert {name: one.groups for name, one in status.sets.items()} == {
        "trainer": 2,
        "engine": 1,
        "critic": 0,
    }
    assert status.generation == 3
    assert "set engine: live" in str(status)


@pytest.mark.ranks(2)
def test_all_sets_by_name_are_those_of_a_call_without_names(rank):
    """The ranks agree, whichever way each of them has called it."""
    groups = groups_of_two_sets()
    names = ["trainer", "engine", "critic"]
    reports = [
        reloadpg.offload(*(names if rank else [])),
        reloadpg.reload(*([] if rank else names)),
    ]
    assert [report.sets for report in reports] == ["all", "all"]
    assert [works(group, rank) for group in groups] == [True] * 3


@pytest.mark.ranks(2)
def test_blocks_of_sets_nest(rank):
    """The outermost block of a set reloads it."""
    world, _, engine = groups_of_two_sets()

    def usable():
        return works(world, rank), works(engine, rank)

    with reloadpg.offloaded("trainer"):
        assert usable() == (False, True)
        with pytest.raises(GroupOffloadedError, match=r"leave the offloaded\(\) block"):
            summed(world, rank)
        with reloadpg.offloaded(connect="eager"):
            assert usable() == (False, False)
        assert usable() == (False, True)
        with reloadpg.offloaded("trainer"):
            pass
        assert usable() == (False, True)
    assert usable() == (True, True)
    with reloadpg.offloaded("trainer"):
        with reloadpg.offloaded("engine"):
            pass
        assert usable() == (False, True)
    assert usable() == (True, True)


@contextmanager
def engine_live():
    """The engine's set is live in the block, and the trainer's offloaded: docs/colocated-rl.md."""
    with reloadpg.offloaded("trainer"):
        try:
            report = reloadpg.reload("engine")
            yield report
        finally:
            reloadpg.offload("engine")


@pytest.mark.ranks(2)
def test_one_set_is_live_while_the_other_is_offloaded(rank):
    """Afterwards the trainer's set is live, whatever has failed.

    The engine's set is offloaded, unless its offload has failed.
    """
    world, _, engine = groups_of_two_sets()

    def usable():
        return works(world, rank), works(engine, rank)

    with engine_live() as report:
        assert usable() == (False, True)
    assert (report.sets, report.changed) == ("engine", False)
    assert usable() == (True, False)
    with pytest.raises(ZeroDivisionError), engine_live():
        assert usable() == (False, True)
        raise ZeroDivisionError
    assert usable() == (True, False)
    for before in (True, False):
        fails = before or rank == 1  # a callback after the reload fails on its rank alone
        remove = reloadpg.on_reload(lambda good=not fails: 1 / good, before=before, sets="engine")
        with pytest.raises(reloadpg.ReloadpgError) if fails else nullcontext(), engine_live():
            assert not fails
            assert states()["engine"] == "live"
        assert usable() == (True, False)
        remove()
    remove = reloadpg.on_offload(lambda: 1 / 0, sets="engine")
    with pytest.raises(reloadpg.ReloadpgError), engine_live():
        pass
    assert usable() == (True, True)  # the failed offload has changed nothing
    remove()


@pytest.mark.ranks(3)
def test_ranks_without_a_group_of_a_set_take_part(rank):
    """Callbacks are called for their sets; a pending reload leaves the other set usable."""
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets="engine")
    init()
    with reloadpg.region("engine"):
        engine = dist.new_group([0, 1])
    called = []
    for name in ("trainer", "engine"):
        reloadpg.on_offload(lambda name=name: called.append(f"offload {name}"), sets=name)
        reloadpg.on_reload(lambda name=name: called.append(f"reload {name}"), sets=[name])
    reloadpg.on_offload(lambda: called.append("offload any"))
    for _ in range(2):
        with engine_live():
            assert rank == 2 or works(engine, rank)
    pending = reloadpg.reload("engine", wait=False)
    assert summed(dist.group.WORLD, rank) == 6.0
    pending.result()
    swap = ["offload trainer", "offload any", "offload engine", "offload any", "reload trainer"]
    assert called == [*swap, *swap[:2], "reload engine", *swap[2:], "reload engine"]
    assert states() == {"trainer": "live", "engine": "live"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failed", ["trainer", "engine"])
@pytest.mark.parametrize(("name", "at"), [("offload", "release"), ("reload", "create")])
def test_a_group_that_fails_leaves_the_other_set_live(rank, failed, name, at):
    """It fails on one rank, after the first change. All ranks then reload only this set.

    A recovery makes all sets live.
    """
    simulated.register()
    reloadpg.install(timeout=TIMEOUT, sets="engine")
    init(simulated.NAME)
    with reloadpg.region("engine"):
        engine = dist.new_group()
    groups = {"trainer": dist.new_group(), "engine": engine}
    [other] = groups.keys() - {failed}
    generation = groups[other].generation

    if name == "reload":
        reloadpg.offload(failed)
    if rank == 1:
        faults.inject(faults.Fault(at, group=f"{groups[failed].group_name}*"))
    error = reloadpg.errors.ReleaseError if name == "offload" else reloadpg.errors.RebuildError
    with pytest.raises(error if rank == 1 else PeerFailedError):
        getattr(reloadpg, name)(failed)
    assert states() == {failed: "failed", other: "live"}
    assert reloadpg.status().state == "failed"  # the worst
    assert (works(groups[failed], rank), works(groups[other], rank)) == (False, True)
    assert groups[other].generation == generation
    reloadpg.offload(other)  # and is offloaded and reloaded separately
    reloadpg.reload(other)
    assert states() == {failed: "failed", other: "live"}
    reloadpg.reload(failed)
    assert states() == {failed: "live", other: "live"}
    reloadpg.offload(other)
    reloadpg.recovery.recover("a fault")
    assert states() == {failed: "live", other: "live"}
    assert works(groups[failed], rank)
    assert works(groups[other], rank)


@pytest.mark.ranks(2)
def test_ranks_must_agree_on_the_sets(rank):
    """On the requested sets, and on the set of each group."""
    groups_of_two_sets()
    chosen = "chosen sets is trainer on rank 0 and engine on rank 1"
    with pytest.raises(DisagreementError, match=chosen):
        reloadpg.offload("engine" if rank else "trainer")
    with reloadpg.region("engine" if rank else "critic"):
        dist.new_group()
    with pytest.raises(DisagreementError, match="set is critic on rank 0 and engine on rank 1"):
        reloadpg.offload()
    assert set(states().values()) == {"live"}


@pytest.mark.parametrize(
    "call",
    [
        lambda: reloadpg.reload(None),
        lambda: reloadpg.offloaded(3),
    ],
)
def test_an_invalid_name_of_a_set_is_refused(call):
    with pytest.raises(InvalidOptionError, match="nothing was changed"):
        call()


@pytest.mark.ranks(2)
def test_an_undeclared_set_is_refused(rank):
    """By each operation, block and region, on the rank that names it; nothing is changed."""
    trainer, _, engine = groups_of_two_sets()
    blocks = (reloadpg.offloaded("engin"), reloadpg.region("engin"))
    for call in (
        lambda: reloadpg.offload("engin"),
        lambda: reloadpg.reload("engin", wait=False),
        *(block.__enter__ for block in blocks),
    ):
        with pytest.raises(InvalidOptionError) as caught:
            call()
        assert "('engin'): install(sets=...) declares no such set" in str(caught.value)
        assert "did you mean engine?" in str(caught.value)
        assert "Declared: trainer, engine, critic." in str(caught.value)
    for one in (trainer, engine):
        assert works(one, rank)
    reloadpg.offload("engine")
    assert states() == {"trainer": "live", "engine": "offloaded", "critic": "live"}
    reloadpg.reload()
    assert works(engine, rank)


@pytest.mark.ranks(2)
def test_ranks_that_declare_other_sets_disagree(rank):
    reloadpg.install(backends={BACKEND}, timeout=TIMEOUT, sets=["engine", "critic"][: rank + 1])
    init()
    with pytest.raises(DisagreementError, match="sets is"):
        reloadpg.offload()


@pytest.mark.ranks(3)
def test_a_set_without_groups_is_offloaded_and_reloaded(rank):
    """On a rank, or on all of them."""
    groups_of_two_sets()
    with reloadpg.region("critic"):
        pair = dist.new_group([0, 1])
    assert reloadpg.offload("critic").changed == (rank < 2), pair
    reloadpg.reload("critic")
    assert states()["critic"] == "live"
