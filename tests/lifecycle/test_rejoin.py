"""``rejoin()``: a new process takes the place of one that has died."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import faulty_gloo
import pytest
import torch
import torch.distributed as dist
import worlds
from recovery_job import RING, attempt, interfere
from replacing import RANKS, VICTIM, all_here, die, incarnation, run_replaced, store
from tables import meet_at_rank_0, store_closed_by_rank_0
from torch.distributed.device_mesh import init_device_mesh

import reloadpg
from reloadpg.rendezvous.decision import store_lost, store_silent
from reloadpg.testing import run_ranks, simulated

PATIENCE = timedelta(seconds=120)
"""The timeout of collectives: reached only if something hangs."""
STEPS = 3


class Injected(Exception):
    """The injected error."""


class Member:
    """One rank's program: overlapping groups, a mesh, and a model that is three numbers."""

    def __init__(
        self, rank: int, *, bound: float = 60.0, backends: Any = "gloo", world: str = "gloo"
    ) -> None:
        self.rank = rank
        if world == "sim":
            simulated.register()
        faulty_gloo.register()
        reloadpg.install(
            backends=backends, recoverable=True, timeout=timedelta(seconds=bound), parallelism=1
        )
        worlds.init(world, timeout=PATIENCE)
        self.groups: list[Any] = [dist.group.WORLD]
        for ranks in RING:
            group = dist.new_group(list(ranks), timeout=PATIENCE)
            if rank in ranks:
                self.groups.append(group)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
        self.groups += [self.mesh.get_group("row"), self.mesh.get_group("column")]
        self.made = {
            "names": [group.group_name for group in self.groups],
            "ranks": [dist.get_process_group_ranks(group) for group in self.groups],
            "backends": [dist.get_backend(group) for group in self.groups],
            "states": {str(group.state) for group in self.groups},
        }
        self.ids = [id(group) for group in self.groups]
        self.weights = torch.zeros(3)
        all_here()  # a process that dies while groups are created cannot be replaced

    def sums(self) -> bool:
        """Whether each group sums over its own members."""
        return worlds.sums_right(*self.groups)

    def sum_in(self, group: Any) -> torch.Tensor:
        value = torch.tensor([float(2**self.rank)])
        dist.all_reduce(value, group=group)
        return value

    def whole(self) -> dict[str, Any]:
        """What must hold once the job continues."""
        return {
            "same": [id(group) for group in self.groups] == self.ids,
            "states": {str(group.state) for group in self.groups},
            "sums": self.sums(),
            "pending": reloadpg.recovery_requested(),
        }

    def train(
        self, steps: int, fault: Callable[[int, int], object], **options: Any
    ) -> list[tuple[int, int, tuple[int, ...]]]:
        """Run steps of collectives and of cycles; each attempt at a step.

        Args:
            steps: how many.
            fault: called in each step at several places, with the step and the place.
            options: of ``retrying``.
        """
        log, snapshot = [], []
        for step in reloadpg.retrying(range(steps), attempts=9, **options):
            with step as number:
                log.append((number, step.attempt, step.replaced))
                snapshot = begun(step, [self.weights], snapshot)
                fault(number, 0)
                for group in self.groups:
                    self.weights += self.sum_in(group) * (number + 1) / 7
                dist.all_reduce(self.weights)
                self.weights /= RANKS
                fault(number, 1)
                reloadpg.offload()
                fault(number, 2)
                reloadpg.reload()
                self.weights += self.sum_in(self.groups[-1])
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
    """None."""


# -- one process is killed in a step --------------------------------------------------------------


def one_replaced(rank: int, size: int, dies: bool) -> dict[str, Any]:
    """Rank 2 is killed in the second loop, while the other ranks are in a collective with it."""
    job = Member(rank)
    found: dict[str, Any] = {"made": job.made}
    if not incarnation():
        reloadpg.barrier(PATIENCE, "a barrier that the new process was not at")
    if incarnation():
        found |= {
            "use": attempt(lambda: job.sum_in(job.groups[1])),
            "offload": attempt(reloadpg.offload),
            "barrier": attempt(lambda: reloadpg.barrier(60, "test")),
            "pending": reloadpg.recovery_requested(),
        }
    report = reloadpg.rejoin()
    found |= {"rejoined": report.changed, "replaced": report.replaced, "note": report.note}

    def fault(step: int, place: int) -> None:
        if dies and (rank, step, place, incarnation()) == (VICTIM, 1, 1, 0):
            dist.all_reduce(torch.ones(1), async_op=True)
            die()

    log = [*job.train(1, no_fault), *job.train(STEPS, fault)]
    reloadpg.barrier(PATIENCE, "one that it is at")
    found |= {"log": log, "weights": job.weights.tolist(), "after": job.whole()}
    return found | {"again": reloadpg.rejoin().changed}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """The results of each process; the last one took rank 2's place."""
    return run_replaced(one_replaced, True)


@pytest.fixture(scope="module")
def whole_job(found: list[Any]) -> list[Any]:
    """The results of the four ranks at the end of the job, in rank order."""
    return [found[RANKS] if rank == VICTIM else found[rank] for rank in range(RANKS)]


@pytest.mark.matrix
class TestOneProcessIsReplaced:
    """In the middle of a training step, in a collective; bound or not as ``TEST_WORLD`` says."""

    def test_its_groups_are_created_without_the_other_ranks(self, found: Any) -> None:
        """Names, ranks and backends as on a rank that started the job; no communicator."""
        new, other = found[RANKS], found[3]
        assert new["made"]["states"] == {"failed"}
        assert other["made"]["states"] == {"live"}
        names = {tuple(r): n for one in found if one for n, r in _named(one)}
        assert all(names[tuple(r)] == n for n, r in _named(new))
        assert len(new["made"]["names"]) == 6
        assert set(new["made"]["backends"]) == {"gloo"}
        assert new["pending"]

    def test_other_calls_raise_before_rejoin(self, found: Any) -> None:
        """The errors say what to call."""
        new = found[RANKS]
        assert new["use"].kind == "GroupOffloadedError"
        assert "replaces one that has ended. Call reloadpg.rejoin()" in new["use"].text
        for call in ("offload", "barrier"):
            assert new[call].kind == "ReloadpgError"
            assert "Call reloadpg.rejoin() first" in new[call].text

    def test_all_groups_are_live_on_all_ranks(self, whole_job: Any) -> None:
        """The same objects, and right sums."""
        for rank, facts in enumerate(whole_job):
            assert facts["after"] == {
                "same": True,
                "states": {"live"},
                "sums": True,
                "pending": False,
            }, rank

    def test_the_loop_continues_at_the_step_of_the_other_ranks(self, whole_job: Any) -> None:
        """``step.replaced`` has the rank, in that step only."""
        for rank, facts in enumerate(whole_job):
            if rank == VICTIM:
                assert facts["log"] == [(1, 1, (VICTIM,)), (2, 1, ())]
            else:
                log = [(0, 1, ()), (0, 1, ()), (1, 1, ()), (1, 2, (VICTIM,)), (2, 1, ())]
                assert facts["log"] == log

    def test_only_the_new_process_rejoins(self, whole_job: Any) -> None:
        """On other ranks, and a second time, ``rejoin`` does nothing."""
        for rank, facts in enumerate(whole_job):
            assert facts["rejoined"] == (rank == VICTIM)
            assert facts["replaced"] == ((VICTIM,) if rank == VICTIM else ())
            assert not facts["again"]

    def test_training_ends_as_without_a_death(self, whole_job: Any) -> None:
        """Bit by bit, on all ranks."""
        expected = run_replaced(one_replaced, False, deaths=0)
        assert [one["weights"] for one in whole_job] == [one["weights"] for one in expected]


def _named(facts: Any) -> list[tuple[str, list[int]]]:
    """The groups whose name is a number, without WORLD: one per list of ranks."""
    made = facts["made"]
    return list(zip(made["names"], made["ranks"], strict=True))[1:5]


# -- killed at any phase --------------------------------------------------------------------------

PHASES = {
    "offload": ("offload.enter", "offload.quiesced", "offload.group3", "offload.released"),
    "reload": ("reload.enter", "reload.group1", "reload.group3", "reload.rebuilt", "reload.done"),
    "recover": ("recover.enter", "recover.agreed", "recover.group2", "recover.done"),
    "step": ("step.0", "step.1", "step.2", "step.3"),
}


def killed_at(rank: int, size: int, points: tuple[str, ...], backend: str) -> dict[str, Any]:
    """In each step a process of another rank is killed at the step's point."""
    # A survivor of a death in a recovery waits so long for the new process.
    bound = 20.0 if points and points[0].startswith("recover") else 4.0
    job = Member(rank, bound=bound, backends=backend, world=backend)
    reloadpg.rejoin()
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
                raise Injected

    job.train(len(points) + 1, fault, on=(Injected, RuntimeError))
    found = {"weights": job.weights.tolist(), "after": job.whole()}
    if backend == "sim":
        stats = simulated.stats()
        found |= {"live": stats.live, "held": stats.held_bytes, "groups": len(job.groups)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [*((kind, "gloo" if kind == "step" else "faulty") for kind in PHASES), ("reload", "sim")],
)
def test_a_process_killed_at_any_phase_is_replaced(kind: str, backend: str) -> None:
    """Each rank in its turn; training ends as without a fault.

    On the simulated accelerator each rank then holds one communicator per group, with as many bytes
    as a rank of an undisturbed job.
    """
    points = PHASES[kind]
    found = run_replaced(killed_at, points, backend, deaths=len(points))
    there = [one for one in found if one is not None]
    expected = run_replaced(undisturbed, len(points) + 1, deaths=0)
    assert len(there) == RANKS
    for facts in there:
        assert facts["weights"] == expected[0]
        assert facts["after"]["sums"]
        assert facts["after"]["states"] == {"live"}
    if backend == "sim":
        held = run_replaced(killed_at, (), "sim", deaths=0)[0]["held"]
        assert {(one["live"], one["held"]) for one in there} == {(there[0]["groups"], held)}


def undisturbed(rank: int, size: int, steps: int) -> list[float]:
    job = Member(rank)
    job.train(steps, no_fault)
    return job.weights.tolist()


# -- when the new process comes -------------------------------------------------------------------


def comes_first(job: Member, meeting: Any) -> list[Any]:
    """The other ranks have no error, and detect the new process by ``recovery_requested``."""
    if incarnation():
        return [reloadpg.rejoin().replaced]
    if job.rank == VICTIM:
        die()
    while not reloadpg.recovery_requested():
        meeting.wait(["test/death/1"])
    return [reloadpg.recover().replaced]


def comes_late(job: Member, meeting: Any) -> list[Any]:
    """The other ranks have timed out; the new process waits for their next call."""
    if incarnation():
        return [reloadpg.rejoin().replaced]
    if job.rank == VICTIM:
        meeting.wait(["test/gave up"])
        die()
    seen = attempt(lambda: reloadpg.recover(timeout=5))
    if meeting.add("test/count", 1) == RANKS - 1:
        meeting.set("test/gave up", "1")
    return [seen, reloadpg.recover().replaced]


def dies_before_it_rejoins(job: Member, meeting: Any) -> list[Any]:
    """The first new process ends after its groups are created."""
    if incarnation() == 1 or (job.rank == VICTIM and not incarnation()):
        die()
    return [(reloadpg.rejoin() if incarnation() else reloadpg.recover()).replaced]


def dies_as_it_rejoins(job: Member, meeting: Any) -> list[Any]:
    """The first new process ends while the groups are rebuilt: all ranks call again."""
    if job.rank == VICTIM and not incarnation():
        die()
    if incarnation() == 1:
        interfere("recover.group2", die)
    seen = None
    if not incarnation():
        seen = attempt(reloadpg.recover)
    return [seen, (reloadpg.rejoin() if incarnation() else reloadpg.recover()).replaced]


def counted_at_the_barrier(job: Member, meeting: Any) -> list[Any]:
    """It dies at the first barrier of a recovery, after its arrival was counted."""
    if job.rank == VICTIM and not incarnation():
        arrive = attempt(lambda: reloadpg.recover(timeout=5))
        assert arrive.missing == (0, 1, 3)
        die()
    if not incarnation():
        meeting.wait(["test/death/1"])
    return [(reloadpg.rejoin() if incarnation() else reloadpg.recover()).replaced]


def two_at_once(job: Member, meeting: Any) -> list[Any]:
    """Half of the job is new."""
    if not incarnation() and job.rank in (1, VICTIM):
        die()
    return [(reloadpg.rejoin() if incarnation() else reloadpg.recover()).replaced]


def all_of_them(job: Member, meeting: Any) -> list[Any]:
    """All processes are new; only the store has continued."""
    if not incarnation():
        die()
    return [reloadpg.rejoin().replaced]


def at_a_moment(rank: int, size: int, name: str) -> dict[str, Any]:
    backend = "faulty" if name == "dies_as_it_rejoins" else "gloo"
    job = Member(rank, bound=10.0, backends=backend, world=backend)
    found = globals()[name](job, store())
    return {"found": found, "after": job.whole(), "new": incarnation()}


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
    there = [
        one for one in run_replaced(at_a_moment, moment.__name__, deaths=deaths) if one is not None
    ]
    assert len(there) == RANKS
    for one in there:
        assert one["after"] == {"same": True, "states": {"live"}, "sums": True, "pending": False}
        assert one["found"][-1] == replaced
        if moment is comes_late and not one["new"]:
            assert one["found"][0].missing == (VICTIM,)
            assert "reloadpg.rejoin()" in one["found"][0].text


# -- started by init_distributed ---------------------------------------------------------------


def brought_up(rank: int, size: int) -> Any:
    """Start and end the job by ``init_distributed``, with a mesh."""
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True, timeout=PATIENCE)
    with reloadpg.init_distributed(
        "gloo", mesh_dims={"dp_shard": 2, "tp": 2}, timeout=PATIENCE, device="cpu"
    ) as context:
        report = reloadpg.rejoin()
        if rank == VICTIM and not incarnation():
            die()
        if not incarnation():
            report = reloadpg.recover()
        mesh: Any = context.mesh
        value = torch.ones(1)
        for name in ("dp_shard", "tp"):
            dist.all_reduce(value, group=mesh.get_group(name))
        return report.replaced, value.item()


@pytest.mark.slow
def test_a_job_started_by_init_distributed() -> None:
    """``init_distributed`` of the new process waits for no other rank."""
    found = [one for one in run_replaced(brought_up) if one is not None]
    assert found == [((VICTIM,), 4.0)] * RANKS


# -- groups that torch splits ---------------------------------------------------------------------


def split(rank: int, size: int, file: str) -> Any:
    """Parts of the default group, and parts of those, on a FileStore that no rank hosts."""
    worlds.start("bound late", file=file, recoverable=True, min_size=1)
    halves = worlds.split([[0, 1], [2, 3]])
    odd = worlds.split([[1, 3]], group_desc="odd")
    single = worlds.split([[0], [1]], parent=halves)
    all_here()
    mine = [one for one in (halves, odd, single) if isinstance(one, dist.ProcessGroup)]
    made = [(one.group_name, dist.get_process_group_ranks(one)) for one in mine]
    if rank == VICTIM and not incarnation():
        die()
    report = reloadpg.rejoin() if incarnation() else reloadpg.recover()
    sums = []
    for group in mine:
        value = torch.tensor([2.0**rank])
        dist.all_reduce(value, group=group)
        sums.append((group.group_name, value.item()))
    return made, sums, report.replaced


@pytest.mark.slow
@pytest.mark.skipif(not worlds.CAN_SPLIT, reason="this torch cannot split gloo groups")
def test_splits_are_created_without_the_other_ranks(tmp_path: Path) -> None:
    """Under torch's names, whichever part the rank is in."""
    found = run_replaced(split, str(tmp_path / "store"))
    names: dict[tuple[int, ...], str] = {}
    for made, sums, replaced in filter(None, found):
        for (name, ranks), (_, total) in zip(made, sums, strict=True):
            assert names.setdefault(tuple(ranks), name) == name
            assert total == sum(2.0**rank for rank in ranks)
        assert replaced == (VICTIM,)
    assert sorted(names) == [(0,), (0, 1), (1,), (1, 3), (2,), (2, 3), (3,)]
    assert len(found[-1][0]) == 2


# -- what is refused ------------------------------------------------------------------------------


def refuse(rank: int, size: int) -> Any:
    """Create a group that matches ``exclude`` in the new process."""
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True, timeout=PATIENCE, exclude="left*")
    worlds.init(timeout=PATIENCE)
    if incarnation():
        alone = dist.new_group([rank])
        refused = attempt(lambda: dist.new_group([0, 1, 2, 3], group_desc="left out"))
        value = torch.ones(1)
        dist.all_reduce(value, group=alone)
        return refused, attempt(reloadpg.rejoin), value.item()
    all_here()
    if rank == VICTIM:
        die()
    return attempt(reloadpg.recover)


@pytest.mark.slow
def test_a_new_process_cannot_create_a_group_that_is_not_reloadable() -> None:
    """With other ranks; a group of one rank works."""
    found = run_replaced(refuse)
    refused, seen, alone = found.pop()
    assert refused.kind == "ReloadpgError"
    assert "it is not reloadable: matches exclude 'left*'" in refused.text
    assert alone == 1.0
    for one in [seen, *filter(None, found)]:
        assert one.kind == "", one


def host_dies(rank: int, size: int) -> Any:
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True, timeout=PATIENCE)
    worlds.init(timeout=PATIENCE)
    attempt(worlds.barrier)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(reloadpg.recover)


@pytest.mark.slow
def test_the_process_that_hosts_the_store_cannot_be_replaced() -> None:
    """The error says so, whether the store has ended or does not respond."""
    outcomes = run_ranks(host_dies, 3, timeout=120, check=False, store="rank0")
    for one in outcomes[1:]:
        assert one.exception is None, one.exception
        assert "rendezvous store" in one.result.text
        assert "The process that hosts the store cannot be replaced" in one.result.text


@pytest.mark.parametrize("operation", ["recover", "step", "reload"])
def test_errors_of_a_lost_store_say_which_process_cannot_be_replaced(operation: str) -> None:
    """In operations in which a process could be replaced."""
    lost = store_lost(operation, "enter", RuntimeError("gone"))
    silent = store_silent(operation, "enter", seconds=1.0, rank=1, size=2)
    for error in (lost, silent):
        said = "The process that hosts the store cannot be replaced" in str(error)
        assert said == (operation != "reload")


def two_jobs(rank: int, size: int, folder: Path) -> Any:
    """Two jobs of the same processes, each on a separate store, which rank 0 hosts."""
    reloadpg.install(backends={worlds.BACKEND}, recoverable=True, timeout=PATIENCE)
    found = []
    for job in range(2):
        worlds.init(timeout=PATIENCE)
        found.append((str(dist.group.WORLD.state), reloadpg.rejoin().changed))
        meet_at_rank_0(rank, f"job {job}")
        dist.destroy_process_group()
        store_closed_by_rank_0(rank, folder / f"closed {job}")
    return found


@pytest.mark.slow
def test_a_second_job_of_the_same_processes_replaces_no_process(tmp_path: Path) -> None:
    for found in run_ranks(two_jobs, 2, args=(tmp_path,), timeout=120, store="rank0"):
        assert found == [("live", False), ("live", False)]


def test_rejoin_without_a_job() -> None:
    """Without an installation, the error says what to call."""
    with pytest.raises(reloadpg.NotInstalledError, match="recoverable=True"):
        reloadpg.rejoin()
    with reloadpg.install(backends={worlds.BACKEND}):
        report = reloadpg.rejoin()
    assert (report.changed, report.note) == (False, "this process replaces no other one")


@pytest.mark.parametrize("given", [0, -1.0, float("nan")])
def test_the_timeout_must_be_positive(given: float) -> None:
    with pytest.raises(reloadpg.InvalidOptionError, match=r"timeout="):
        reloadpg.rejoin(timeout=given)
