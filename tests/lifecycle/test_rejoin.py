"""``rejoin()``: a new process replaces one that has died."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import BOUND, PATIENCE, Injected, Job, attempt, fail, interfere
from helpers.replacing import RANKS, VICTIM, all_here, die, incarnation, run_replaced, store
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.recovery.recovering import longest_wait
from reloadpg.rendezvous.decision import store_lost, store_silent

STEPS = 3


class Member(Job):
    """One rank's program: overlapping groups, a mesh, and a model of three numbers."""

    def __init__(self, backend: str = "gloo", timeout: float = 60.0) -> None:
        os.environ |= worlds.SILENCE  # of the processes that die
        # A new process cannot use its groups yet.
        super().__init__(backend, timeout=timeout, used=False, recoverable=True, parallelism=1)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        for name in ("row", "column"):
            self.add(mesh.get_group(name))
        self.weights = torch.zeros(3)
        all_here()  # a process that dies while groups are created cannot be replaced

    def sum_in(self, group: Any) -> torch.Tensor:
        value = torch.tensor([float(2**self.rank)])
        dist.all_reduce(value, group=group)
        return value

    def train(
        self, steps: int, fault: Callable[[int, int], object], **options: Any
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """Run steps of collectives and of cycles; return the attempts.

        Args:
            steps: the number of steps.
            fault: called at several places of each step, with the step and the place.
            options: of ``retrying``.
        """
        log, snapshot = [], []
        for step in reloadpg.recovery.retrying(range(steps), attempts=9, **options):
            with step as number:
                log.append((number, step.attempt, step.replaced))
                snapshot = begun(step, [self.weights], snapshot)
                fault(number, 0)
                for group in self.groups.values():
                    self.weights += self.sum_in(group) * (number + 1) / 7
                dist.all_reduce(self.weights)
                self.weights /= RANKS
                fault(number, 1)
                reloadpg.offload()
                fault(number, 2)
                reloadpg.reload()
                self.weights += self.sum_in(self.ring)
                dist.all_reduce(self.weights)
                self.weights /= RANKS
                fault(number, 3)
        return log


def begun(step: Any, state: list[torch.Tensor], snapshot: list[torch.Tensor]) -> list[torch.Tensor]:
    """Restore or receive the state at the beginning of a step; return the new snapshot."""
    if step.attempt > 1:
        for tensor, before in zip(state, snapshot, strict=True):
            tensor.copy_(before)
    if step.replaced:
        source = next(rank for rank in range(RANKS) if rank not in step.replaced)
        for tensor in state:
            dist.broadcast(tensor, source)
    return copy.deepcopy(state)


def no_fault(step: int, place: int) -> None:
    """Do nothing."""


# -- killed in a step -----------------------------------------------------------------------------


def one_replaced(rank: int, size: int, dies: bool) -> list[float]:
    """Rank 2 is killed in the second loop, while the other ranks are in a collective with it."""
    new = incarnation() > 0
    if new:  # torch's creating functions would then end in a barrier of all ranks
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    job = Member()
    # A new process creates its groups without the others: same names, but no communicators.
    assert len(job.groups) == 6
    for group in [*job.groups.values()][1:4]:
        job.agree(f"{dist.get_process_group_ranks(group)}", group.group_name)
    # A new process, too, waits as long as a collective may take.
    assert longest_wait(job.ring._managed) > PATIENCE.total_seconds()
    assert {dist.get_backend(group) for group in job.groups.values()} == {"gloo"}
    assert job.states() == {"failed" if new else "live"}
    if new:
        message = r"replaces one that has ended. Call reloadpg.recovery.rejoin\(\)"
        with pytest.raises(reloadpg.GroupOffloadedError, match=message):
            job.sum_in(job.ring)
        for call in (reloadpg.offload, lambda: reloadpg.environment.barrier(60, "test")):
            with pytest.raises(
                reloadpg.ReloadpgError, match=r"Call reloadpg.recovery.rejoin\(\) first"
            ):
                call()
        assert reloadpg.recovery.recovery_requested()
    else:
        reloadpg.environment.barrier(PATIENCE, "before the replacement")
    report = reloadpg.recovery.rejoin()
    assert (report.changed, report.replaced) == (new, (VICTIM,) if new else ())

    def fault(step: int, place: int) -> None:
        if dies and (rank, step, place, incarnation()) == (VICTIM, 1, 1, 0):
            dist.all_reduce(torch.ones(1), async_op=True)
            die()

    log = [*job.train(1, no_fault), *job.train(STEPS, fault)]
    reloadpg.environment.barrier(PATIENCE, "after the replacement")
    # `step.replaced` has the rank only in the step that is repeated.
    before = [] if new else [(0, 1, ()), (0, 1, ()), (1, 1, ())]
    repeated = [(1, 1 if new else 2, (VICTIM,))] if dies else []
    assert log == [*before, *repeated, (2, 1, ())]
    job.assert_live()
    assert not reloadpg.recovery.rejoin().changed
    return job.weights.tolist()


@pytest.mark.slow
@pytest.mark.matrix
def test_a_process_killed_in_a_step_is_replaced() -> None:
    """The loop continues at the step of the other ranks.

    The result of the training is bit-identical to that without a death.
    """
    expected = run_replaced(one_replaced, False, deaths=0)
    found = run_replaced(one_replaced, True)
    found[VICTIM] = found.pop()
    assert found == expected


# -- killed in other phases -----------------------------------------------------------------------

PHASES = {
    "offload": ("offload.enter", "offload.group3", "offload.released"),
    "reload": ("reload.enter", "reload.group1", "reload.group3", "reload.done"),
    "recover": ("recover.enter", "recover.agreed", "recover.group2", "recover.done"),
    "step": ("step.0", "step.1", "step.2", "step.3"),
}


def killed_at(rank: int, size: int, points: tuple[str, ...], backend: str) -> list[float]:
    """In each step, a process of another rank is killed at the step's point."""
    # After a death in a recovery, the survivors wait for the new process up to this timeout.
    job = Member(backend, 20.0 if points[0].startswith("recover") else 4.0)
    reloadpg.recovery.rejoin()
    deaths = store()

    def fault(step: int, place: int) -> None:
        if step >= len(points) or step % size != rank or deaths.add("test/deaths", 0) != step:
            return
        operation, where = points[step].split(".")
        if operation == "step":
            if place == int(where):
                die()
        elif place == 1:
            interfere(points[step], die)
            if operation == "recover":
                fail()

    job.train(len(points) + 1, fault, on=(Injected, RuntimeError))
    job.assert_live()
    if backend == "sim":
        job.assert_memory()
    return job.weights.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "gloo" if kind == "step" else "faulty") for kind in PHASES), ("reload", "sim")],
)
def test_a_process_killed_at_any_phase_is_replaced(kind: str, backend: str) -> None:
    """The ranks die in turn. The result of the training equals that without a fault."""
    points = PHASES[kind]
    found = run_replaced(killed_at, points, backend, deaths=len(points))
    (expected, *_) = run_replaced(undisturbed, len(points) + 1, deaths=0)
    assert [one for one in found if one is not None] == [expected] * RANKS


def undisturbed(rank: int, size: int, steps: int) -> list[float]:
    job = Member()
    job.train(steps, no_fault)
    return job.weights.tolist()


# -- when the new process starts ------------------------------------------------------------------


def continued() -> reloadpg.Report:
    """Recover, or rejoin in a new process."""
    return reloadpg.recovery.rejoin() if incarnation() else reloadpg.recovery.recover()


def comes_first(job: Member, meeting: Any) -> reloadpg.Report:
    """The other ranks have no error, and detect the new process by ``recovery_requested``."""
    if job.rank == VICTIM and not incarnation():
        die()
    while not (incarnation() or reloadpg.recovery.recovery_requested()):
        meeting.wait(["test/death/1"])
    return continued()


def comes_late(job: Member, meeting: Any) -> reloadpg.Report:
    """The other ranks have timed out; the new process waits for their next recovery."""
    if incarnation():
        return reloadpg.recovery.rejoin()
    if job.rank == VICTIM:
        meeting.wait(["test/gave up"])
        die()
    seen = attempt(lambda: reloadpg.recovery.recover(timeout=BOUND))
    assert seen.missing == (VICTIM,)
    assert "reloadpg.recovery.rejoin()" in seen.text
    if meeting.add("test/count", 1) == RANKS - 1:
        meeting.set("test/gave up", "1")
    return reloadpg.recovery.recover()


def dies_before_it_rejoins(job: Member, meeting: Any) -> reloadpg.Report:
    """The first new process dies after it has created its groups."""
    if incarnation() == 1 or (job.rank == VICTIM and not incarnation()):
        die()
    return continued()


def dies_as_it_rejoins(job: Member, meeting: Any) -> reloadpg.Report:
    """The first new process dies while the groups are rebuilt: all ranks call again."""
    if job.rank == VICTIM and not incarnation():
        die()
    if incarnation() == 1:
        interfere("recover.group2", die)
    if not incarnation():
        attempt(reloadpg.recovery.recover)
    return continued()


def counted_at_the_barrier(job: Member, meeting: Any) -> reloadpg.Report:
    """The old process dies at the first barrier of a recovery, after it was counted."""
    if job.rank == VICTIM and not incarnation():
        assert attempt(lambda: reloadpg.recovery.recover(timeout=5)).missing == (0, 1, 3)
        die()
    if not incarnation():
        meeting.wait(["test/death/1"])
    return continued()


def two_at_once(job: Member, meeting: Any) -> reloadpg.Report:
    """Two of four processes are replaced."""
    if not incarnation() and job.rank in (1, VICTIM):
        die()
    return continued()


def all_of_them(job: Member, meeting: Any) -> reloadpg.Report:
    """All processes are replaced; only the store continues."""
    if not incarnation():
        die()
    return reloadpg.recovery.rejoin()


def at_a_moment(rank: int, size: int, name: str, replaced: tuple[int, ...]) -> bool:
    job = Member("faulty" if name == "dies_as_it_rejoins" else "gloo", timeout=10.0)
    assert globals()[name](job, store()).replaced == replaced
    job.assert_live()
    return True


MOMENTS = {
    comes_first: ((VICTIM,), 1),
    comes_late: ((VICTIM,), 1),
    dies_before_it_rejoins: ((VICTIM,), 2),
    dies_as_it_rejoins: ((VICTIM,), 2),
    counted_at_the_barrier: ((VICTIM,), 1),
    two_at_once: ((1, VICTIM), 2),
    all_of_them: ((0, 1, 2, 3), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_process_can_be_replaced_at_any_moment(moment: Callable[..., Any]) -> None:
    """All ranks are live at the end, and know the replaced ranks."""
    replaced, deaths = MOMENTS[moment]
    found = run_replaced(at_a_moment, moment.__name__, replaced, deaths=deaths)
    assert found.count(True) == RANKS


# -- jobs started by init_distributed ----------------------------------------------------------


def brought_up(rank: int, size: int) -> Any:
    """Run a job with a mesh, started by ``init_distributed``."""
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True, timeout=PATIENCE)
    with reloadpg.environment.init_distributed(
        "gloo", mesh_dims={"dp_shard": 2, "tp": 2}, timeout=PATIENCE, device="cpu"
    ) as context:
        report = reloadpg.recovery.rejoin()
        if rank == VICTIM and not incarnation():
            die()
        if not incarnation():
            report = reloadpg.recovery.recover()
        mesh: Any = context.mesh
        value = torch.ones(1)
        for name in ("dp_shard", "tp"):
            dist.all_reduce(value, group=mesh.get_group(name))
        return report.replaced, value.item()


@pytest.mark.slow
def test_a_job_started_by_init_distributed() -> None:
    """``init_distributed`` does not wait for other ranks in the new process."""
    found = [one for one in run_replaced(brought_up) if one is not None]
    assert found == [((VICTIM,), 4.0)] * RANKS


# -- groups that torch splits ---------------------------------------------------------------------


def split(rank: int, size: int, file: str) -> Any:
    """Split the default group, and one of its parts, on a FileStore, which no rank hosts."""
    worlds.start("bound late", file=file, recoverable=True, min_size=1)
    halves = worlds.split([[0, 1], [2, 3]])
    odd = worlds.split([[1, 3]], group_desc="odd")
    single = worlds.split([[0], [1]], parent=halves)
    all_here()
    mine = [one for one in (halves, odd, single) if isinstance(one, dist.ProcessGroup)]
    made = {(*dist.get_process_group_ranks(one),): one.group_name for one in mine}
    if rank == VICTIM and not incarnation():
        die()
    report = reloadpg.recovery.rejoin() if incarnation() else reloadpg.recovery.recover()
    assert report.replaced == (VICTIM,)
    assert worlds.sums_right(*mine)
    return made


@pytest.mark.slow
@pytest.mark.skipif(not worlds.CAN_SPLIT, reason="this torch cannot split gloo groups")
def test_splits_are_created_without_the_other_ranks(tmp_path: Path) -> None:
    """They have the names that torch chooses, in whichever part the rank is."""
    names: dict[tuple[int, ...], str] = {}
    *_, last = found = run_replaced(split, str(tmp_path / "store"))
    for made in filter(None, found):
        assert {**made, **names} == {**names, **made}
        names |= made
    assert sorted(names) == [(0,), (0, 1), (1,), (1, 3), (2,), (2, 3), (3,)]
    assert len(last) == 2


# -- cases that raise -----------------------------------------------------------------------------


def refuse(rank: int, size: int) -> None:
    """Create a group that matches ``exclude`` in the new process."""
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True, timeout=PATIENCE, exclude="left*")
    worlds.init(timeout=PATIENCE)
    if incarnation():
        alone = dist.new_group([rank])
        message = r"it is not reloadable: matches exclude 'left\*'"
        with pytest.raises(reloadpg.ReloadpgError, match=message):
            dist.new_group([0, 1, 2, 3], group_desc="left out")
        reloadpg.recovery.rejoin()
        assert worlds.sums_right(alone)
        return
    all_here()
    if rank == VICTIM:
        die()
    reloadpg.recovery.recover()


@pytest.mark.slow
def test_a_new_process_cannot_create_a_group_that_is_not_reloadable() -> None:
    """A group of this rank alone can be created."""
    run_replaced(refuse)


@pytest.mark.parametrize("operation", ["recover", "step", "reload"])
def test_errors_of_a_lost_store_say_which_process_cannot_be_replaced(operation: str) -> None:
    """They do so in operations in which a process could be replaced."""
    lost = store_lost(operation, "enter", RuntimeError("gone"))
    silent = store_silent(operation, "enter", seconds=1.0, rank=1, size=2)
    for error in (lost, silent):
        said = "The process that hosts the store cannot be replaced" in str(error)
        assert said == (operation != "reload")
    assert silent.unknown == (0,)


def test_rejoin_without_a_job() -> None:
    """Without an installation, it raises and names the call."""
    with pytest.raises(reloadpg.errors.NotInstalledError, match="recoverable=True"):
        reloadpg.recovery.rejoin()
    with reloadpg.install(backends={worlds.BACKEND}):
        report = reloadpg.recovery.rejoin()
    assert (report.changed, report.note) == (False, "this process replaces no other one")
