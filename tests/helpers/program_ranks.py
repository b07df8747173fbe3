"""One rank that interprets the programs of ``programs``, and records what it sees of each step."""

from __future__ import annotations

import gc
import logging
import os
import signal
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import reloadpg
from helpers import faulty_gloo, nccl_job, tables, worlds
from helpers.fault_job import (
    FAR,
    Injected,
    Seen,
    attempt,
    base_store,
    eventually,
    fail,
    interfere,
    meet,
    signalling,
    stop_interfering,
)
from helpers.programs import (
    BRACKETS,
    END_CALLS,
    WORLD,
    WORLD_TIMEOUT_S,
    Fault,
    Job,
    Program,
    Step,
    contribution,
)
from helpers.repeating import repeat
from reloadpg.environment import init_distributed, process_group_scope
from reloadpg.testing import run_ranks, standins

LIMIT = timedelta(seconds=WORLD_TIMEOUT_S)
SHORT = timedelta(seconds=5)
"""The timeout of a collective that waits for a rank whose call has failed."""
VARIABLES = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""No flight recorder: torch's watchdog looks up the Python lines of a collective that has timed out
before it aborts it, and the first look-up imports ``torch._inductor`` (2.13)."""


class Terminated(SystemExit):
    """Raised by the handler of SIGTERM."""


class Player:
    """One rank's run of a program.

    Args:
        rank: of this process.
        program: the same on all ranks.
        signals: a store apart from those of the jobs; by default a client of the launcher's.
        link: what cuts the link between the hosts, on two hosts.
    """

    def __init__(
        self, rank: int, program: Program, signals: dist.Store | None = None, link: Any = None
    ) -> None:
        self.rank, self.program, self.link = rank, program, link
        self._signals = nccl_job.signals() if signals is None else signals
        self._met = 0
        self._threads = int(program.options.get("parallelism", 8))
        options = {"timeout": FAR, **program.options}
        self._timeout = options["timeout"]
        if program.on_nccl:
            torch.cuda.set_device(rank)
            options = {"recoverable": True, **options}
        else:
            faulty_gloo.register()
            options["backends"] = {program.backend}
        reloadpg.install(**options)
        self._log = Log(self)

    def play(self) -> list[list[dict[str, Any]]]:
        """Go through the jobs; return what was seen of each step of each of them."""
        return [self._play(job, number) for number, job in enumerate(self.program.jobs)]

    def meet(self) -> None:
        """Wait for the other ranks.

        If a peer destroys a gloo group while this rank connects it or runs a collective, the group
        breaks, also with torch alone.
        """
        self._met += 1
        meet(f"{self._met}", self.program.size, 120.0, self._signals)

    # -- a job ------------------------------------------------------------------------------------

    def _play(self, job: Job, number: int) -> list[dict[str, Any]]:
        self._job, self._number, self._baseline, self._stuck = job, number, None, 0
        self._groups: dict[int, Any] = {}
        self._names: set[str] = set()
        self._keys: tuple[int, ...] = ()
        self._own = 0
        seen: list[dict[str, Any]] = []
        cause = Injected("the cause") if "raises" in job.end else None
        try:
            with self._block():
                if not job.end.startswith("context"):
                    self._init()
                self._hold(WORLD, dist.group.WORLD)
                if job.bound and not self.program.on_nccl:
                    worlds.bind()
                for place, step in enumerate(job.steps):
                    seen.append(self._step(place, step))
                self.meet()
                self._end(job.end, cause)
        except Injected as error:
            assert error is cause
        else:
            assert cause is None
        gc.collect()
        assert not dist.is_initialized()
        sizes = tables.lengths()
        sizes["pg_group_ranks"] -= (
            dist.GroupMember.NON_GROUP_MEMBER in c10d._world.pg_group_ranks
        )  # torch also enters the value for the groups of which this rank is no member (2.13)
        sizes["tags_to_pg"] = sum(map(len, c10d._world.tags_to_pg.values()))
        assert not any(sizes.values()), f"left in torch's tables by {job.end}: {sizes}"
        assert c10d._world.group_count == 0
        assert not [name for name in self._names if tables.resolves_to(name) is not None]
        if self.program.on_nccl:
            assert eventually(lambda: standins.communicators() <= self._stuck)
        self.meet()
        return seen

    def _block(self) -> Any:
        if self._job.end.startswith("scope"):
            return process_group_scope(timeout=LIMIT)
        if not self._job.end.startswith("context"):
            return nullcontext()
        given: dict[str, Any] = {"device": "cpu"}
        if self.program.on_nccl:
            given = {"device": self._device()}
            given |= {"device_id": self._device()} if self._job.bound else {}
        return init_distributed(self.program.backend, store=self._store(), timeout=LIMIT, **given)

    def _init(self) -> None:
        where: dict[str, Any] = {}
        if self.link is None:
            where = {"store": self._store(), "rank": self.rank, "world_size": self.program.size}
        if self.program.on_nccl and self._job.bound:
            where["device_id"] = self._device()
        dist.init_process_group(self.program.backend, timeout=LIMIT, **where)

    def _store(self) -> dist.Store:
        """The store of one job. Splits of gloo groups need a FileStore, see ``worlds.start``."""
        if self._job.bound and not self.program.on_nccl:
            return dist.FileStore(
                str(Path(os.environ["TMPDIR"], f"{self._number}.store")), self.program.size
            )
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=LIMIT
        )
        return dist.PrefixStore(f"job/{self._number}", client)

    def _device(self) -> torch.device:
        return torch.device("cuda", self.rank)

    def _hold(self, slot: int, group: Any) -> None:
        self._groups[slot] = group
        self._names.add(group.group_name)

    def _end(self, end: str, cause: Injected | None) -> None:
        if end in BRACKETS:
            device = self._device() if self.program.on_nccl else None
            with c10d._coalescing_manager(self._groups[WORLD], device):
                dist.all_reduce(self._tensor(1.0))
                raise cause or AssertionError
        if cause is not None:
            raise cause
        done: set[str] = set()
        ended = [*self._groups.values()]
        for call in END_CALLS.get(end, ()):
            if call in ("abort", "shutdown"):
                for group in ended:
                    if isinstance(group, reloadpg.ReloadableProcessGroup):
                        getattr(group, call)()
            elif call not in done:
                getattr(c10d, call)()
            else:  # torch's own error: there is no such group any more
                with suppress(AssertionError, ValueError):
                    getattr(c10d, call)()
                    raise RuntimeError(f"a second {call} did not raise")
            done.add(call)

    # -- a step -----------------------------------------------------------------------------------

    def _step(self, number: int, step: Step) -> dict[str, Any]:
        self._place = number
        result, error, before = None, None, self._communicators()
        try:
            self._prepare(step)
            result = self._called(step)
        except _Raised as raised:
            error = raised.seen
        finally:
            self._undo(step)
        self._failed = error is not None
        if self._failed and step.fault is not None and reloadpg.status().state == "failed":
            assert step.fault.kind == "cut" or reloadpg.recovery.recovery_requested()
            if step.do == "offload" and step.fault.kind != "hang" and not self.program.on_nccl:
                assert eventually(self._all_released)
        status = reloadpg.status()
        by_name = {group.name: group for group in status.groups}
        groups = {
            slot: by_name.pop(group.group_name)
            for slot, group in self._groups.items()
            if isinstance(group, reloadpg.ReloadableProcessGroup)
        }
        if step.fault is not None:
            self.meet()
        return {
            "result": result,
            "error": error,
            "state": status.state,
            "generation": status.generation,
            "groups": {
                slot: [str(g.state), g.generation, g.timeout_s, g.desc]
                for slot, g in groups.items()
            },
            "tables": not by_name and all(map(_is_registered, self._groups.values())),
            "kept": self._communicators() == before,
        }

    def _communicators(self) -> list[int]:
        return [
            id(group._managed.communicator)
            for group in self._groups.values()
            if isinstance(group, reloadpg.ReloadableProcessGroup)
        ]

    def _called(self, step: Step) -> Any:
        call = partial(getattr(self, f"_{step.do}"), *step.args)
        if step.do not in ("offload", "reload", "recover", "use"):
            return call()
        results: list[Any] = []
        seen = attempt(lambda: results.append(call()))
        if seen.kind == "AssertionError":
            raise AssertionError(seen.text)
        if seen.kind:
            raise _Raised(seen)
        return results[0]

    def _create(self, slot: int, ranks: Any, kind: str, desc: str, timeout: int) -> str:
        ranks, limit = list(ranks), timedelta(seconds=timeout) if timeout else None
        if kind == "split":
            self.meet()
            if self.program.on_nccl:
                made = dist.split_group(split_ranks=[ranks], timeout=limit, group_desc=desc)
            else:
                made = worlds.split([ranks], timeout=limit, group_desc=desc)
        elif kind == "positional":
            made = dist.new_group(ranks, limit, None, None, False, desc or None)
        else:
            given: dict[str, Any] = {"use_local_synchronization": kind == "local"}
            if kind == "priority":
                given["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            made = dist.new_group(ranks=ranks, timeout=limit, group_desc=desc or None, **given)
        ranks.clear()  # the library must have copied the list
        if made is None or made is dist.GroupMember.NON_GROUP_MEMBER:
            return "no member"
        self._hold(slot, made)
        reloadable = isinstance(made, reloadpg.ReloadableProcessGroup)
        return "reloadable" if reloadable else "as torch made it"

    def _destroy(self, slot: int, only: int | None) -> str:
        self.meet()
        if slot not in self._groups or only not in (None, self.rank):
            return ""
        group = self._groups.pop(slot)
        dist.destroy_process_group(group)
        return str(getattr(group, "state", "gone"))

    def _retime(self, slot: int, seconds: int) -> str:
        if slot in self._groups:
            c10d._set_pg_timeout(timedelta(seconds=seconds), self._groups[slot])
        return ""

    def _use(self, slots: tuple[int, ...], kind: str) -> Any:
        if (fault := self._job.steps[self._place].fault) is not None:
            return self._use_with_a_fault(fault)
        values = {}
        for one in slots:
            if (group := self._groups.get(one)) is None:
                continue
            try:
                values[one] = self._value(group, kind, contribution(self.rank, self._place))
            except reloadpg.GroupOffloadedError as error:
                values[one] = type(error).__name__
        return values

    def _value(self, group: Any, kind: str, number: float) -> list[float]:
        ranks, mine = dist.get_process_group_ranks(group), self._tensor(number)
        if kind == "all_reduce":
            dist.all_reduce(mine, group=group)
            return mine.tolist()
        if kind == "all_gather":
            gathered = self._tensor(*[0.0] * len(ranks))
            dist.all_gather_into_tensor(gathered, mine, group=group)
            return gathered.tolist()
        if len(ranks) == 1:
            return mine.tolist()  # gloo does not send to itself
        place, received = ranks.index(self.rank), self._tensor(0.0)
        to_next, from_previous = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, to_next, group=group),
                dist.P2POp(dist.irecv, received, from_previous, group=group),
            ]
        ):
            work.wait()
        return received.tolist()

    def _tensor(self, *numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, device=self._device() if self.program.on_nccl else "cpu")

    def _use_with_a_fault(self, fault: Fault) -> Any:
        """Sums in a loop that recovers and repeats; without a link one attempt, which may raise."""
        groups = [*self._groups.values()]

        def sums() -> bool:
            right = True
            for group in groups:
                expected = sum(2.0**rank for rank in dist.get_process_group_ranks(group))
                right &= self._value(group, "all_reduce", 2.0**self.rank) == [expected]
                right &= self._value(group, "ring", 1.0) == [1.0]
            return right

        self._set_timeouts(SHORT)
        if fault.kind == "cut":
            try:
                return sums()
            finally:
                self._set_timeouts(LIMIT)

        def step(number: int, attempt: int) -> bool:
            if attempt > 1:
                self._set_timeouts(LIMIT)
            try:
                return sums()
            finally:  # a call that hangs holds its rank: the others have seen it by now
                if attempt > 1 or reloadpg.recovery.recovery_requested():
                    standins.clear_faults()

        def recover() -> None:
            self._set_timeouts(LIMIT)  # those of the first attempt are short
            reloadpg.recovery.recover("a test")

        ((attempts, right),) = repeat(step, 1, recover)
        assert right
        self._set_timeouts(LIMIT)
        return attempts

    def _set_timeouts(self, timeout: timedelta) -> None:
        for group in self._groups.values():
            with suppress(RuntimeError):
                c10d._set_pg_timeout(timeout, group)

    def _offload(self) -> list[Any]:
        inner = [
            weakref.ref(group._managed.communicator)
            for group in self._groups.values()
            if isinstance(group, reloadpg.ReloadableProcessGroup) and group._managed.is_live
        ]
        try:
            return self._reported(reloadpg.offload(), inner)
        except BaseException:
            self._released = inner
            raise

    def _reload(self, connect: Any) -> list[Any]:
        return self._reported(reloadpg.reload(connect=connect), [])

    def _recover(self) -> list[Any]:
        self.meet()  # it aborts groups that a peer may still connect
        return self._reported(reloadpg.recovery.recover("a test", timeout=self._timeout), [])

    def _reported(self, report: Any, inner: list[weakref.ref[Any]]) -> list[Any]:
        if any(ref() is not None for ref in inner):
            gc.collect()
        alive = sum(ref() is not None for ref in inner)
        return [report.operation, len(report.groups), reloadpg.status().generation, alive]

    def _mend(self, how: str) -> None:
        self.meet()
        if how == "must recover" or (how == "recover" and self._failed):
            reloadpg.recovery.recover("a test")
        else:
            reloadpg.reload()

    def _settle(self) -> str:
        """A cycle; the text is empty if nothing is left of what was before."""
        reloadpg.offload()
        reloadpg.reload()
        for group in self._groups.values():  # also connects each group
            self._value(group, "all_reduce", 1.0)
        self.meet()  # a rank that ends a collective may still be needed by another
        if not self.program.on_nccl:
            keys = base_store().num_keys() - 2 * self._met - self._own  # without the test's
            self._keys = (*self._keys, keys)
            self.meet()
            grown = self.link is None and keys > max(self._keys[:2]) + 4
            return f"keys: {self._keys}" if grown else ""
        count = sum(isinstance(g, reloadpg.ReloadableProcessGroup) for g in self._groups.values())
        if self._baseline is None or count != self._baseline[0]:
            self._baseline = count, nccl_job.held()
            return ""
        # The backends of the CPU stay, each with the store client that created it, where an
        # operation that has failed lets the next one connect new clients.
        stores = 0 if self.program.backend == "nccl" else count
        return nccl_job.left_over(self._baseline[1], self._stuck, stores)

    def _all_released(self) -> bool:
        gc.collect()
        return all(ref() is None for ref in self._released)

    # -- faults -----------------------------------------------------------------------------------

    def _prepare(self, step: Step) -> None:
        if (fault := step.fault) is None:
            return
        self.meet()
        if fault.kind == "cut":
            self.link.prepare(self._place, fault.point)
        elif fault.in_nccl:
            if self.rank == 0:
                for rank in fault.ranks:
                    standins.inject(
                        standins.Fault(
                            fault.kind,  # type: ignore[arg-type]
                            fault.point,  # type: ignore[arg-type]
                            rank=rank,
                            skip=fault.skip,
                            times=None if fault.kind == "hang" else 1,
                            seconds=1.0 if fault.kind == "delay" else 0.0,
                        )
                    )
            if fault.may_stay:
                self._stuck += len(self._groups)
            self.meet()
        else:
            self._own += {"late": 1, "hang": 2}.get(fault.kind, 0)
            self._log.follow(step.do, f"{self._number}/{self._place}")
            if self.rank in fault.ranks:
                self._bring_about(fault)

    def _bring_about(self, fault: Fault) -> None:
        """Inject a fault at a point on this rank."""
        place = f"{self._number}/{self._place}"
        interrupt = signalling(signal.SIGINT, KeyboardInterrupt())
        actions: dict[str, Callable[[], object]] = {
            "raise": fail,
            "interrupt": interrupt,
            "terminate": signalling(signal.SIGTERM, Terminated(143)),
            "counted": interrupt,
            "late": partial(self._await, f"logged/{place}"),
            "hang": partial(self._await, f"gave up/{place}"),
        }
        moment = "after" if fault.kind == "counted" else "before"
        interfere(fault.point, actions[fault.kind], moment)  # type: ignore[arg-type]

    def _await(self, key: str) -> None:
        self._signals.clone().wait([key], timedelta(seconds=FAR))

    def _undo(self, step: Step) -> None:
        if (fault := step.fault) is None:
            return
        if fault.kind == "cut":
            self.link.ended(self._place)
        elif fault.kind == "hang" and not fault.in_nccl and self.rank not in fault.ranks:
            store, place = self._signals.clone(), f"gave up/{self._number}/{self._place}"
            others = self.program.size - len(fault.ranks)
            if store.add(f"{place}/count", 1) == others:
                store.set(place, "1")
        if fault.kind == "late" and self.rank == 0:
            assert self._log.names_the_cause
        self.meet()
        stop_interfering()
        if fault.in_nccl:
            standins.clear_faults()
        self.meet()


class _Raised(Exception):
    """A step has raised."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(seen)
        self.seen = seen


class Log(logging.Handler):
    """The warnings of an operation. Rank 0 notifies a late rank once its wait was logged."""

    def __init__(self, player: Player) -> None:
        super().__init__(logging.WARNING)
        self._player, self._operation, self.names_the_cause = player, "", False
        self._store = player._signals.clone()
        logging.getLogger("reloadpg").addHandler(self)

    def follow(self, operation: str, place: str) -> None:
        self._operation, self._key, self.names_the_cause = operation, f"logged/{place}", False

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line that names the missing rank, or the group."""
        line = record.getMessage()
        names = "missing: rank 1" in line or "ReloadableProcessGroup" in line
        if names and self._operation and line.startswith(f"{self._operation}, phase "):
            self.names_the_cause = True
            if self._player.rank == 0:
                self._store.set(self._key, "1")


def _is_registered(group: Any) -> bool:
    """Whether c10d finds this group by object and by name."""
    name = c10d._world.pg_names.get(group)
    return name is not None and c10d._resolve_process_group(name) is group


def play(rank: int, size: int, program: Program) -> list[list[dict[str, Any]]]:
    """Run a program on this rank."""
    return Player(rank, program).play()


def run(program: Program, **given: Any) -> list[list[list[dict[str, Any]]]]:
    """Run a program on new ranks; return what each rank saw of each step of each job."""
    variables = {**program.variables, **given.pop("env", {})}
    if program.on_nccl:
        variables, given = {**VARIABLES, **variables}, {"standins": True, **given}
    return run_ranks(
        play, program.size, args=(program,), env=variables, timeout=500, store="parent", **given
    )
