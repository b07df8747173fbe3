"""One rank that plays the programs of ``programs``, and checks what it and the others see."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import reloadpg
from helpers import nccl_job, tables, worlds
from helpers.fault_job import (
    ALLOWANCE,
    FAR,
    HELD,
    Injected,
    Seen,
    attempt,
    base_store,
    die,
    eventually,
    fail,
    interfere,
    signalling,
)
from helpers.programs import (
    BRACKET,
    END_CALLS,
    UNTOUCHED,
    WORLD,
    Ended,
    Fault,
    Life,
    Program,
    State,
    Step,
)
from helpers.watched_store import WatchedStore
from reloadpg.environment import process_group_scope
from reloadpg.testing import faults, run_ranks, simulated, standins

LIMIT = timedelta(seconds=60)
"""The timeout of collectives."""
MOST_ATTEMPTS = 5
"""At a step with a fault."""
SHORT = timedelta(seconds=5)
"""The timeout of a collective that waits for a rank whose call has failed."""
VARIABLES = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""No flight recorder: torch's watchdog looks up the Python lines of a collective that has timed out
before it aborts it, and the first look-up imports ``torch._inductor`` (2.13)."""


class Terminated(SystemExit):
    """Raised by the handler of SIGTERM."""


class StoreLink:
    """The link of one rank to the store of the job, which a ``cut`` fault takes down."""

    def __init__(self) -> None:
        self._up = threading.Event()
        self._up.set()

    def watched(self, store: Any) -> dist.Store:
        return WatchedStore(store, watch=lambda *_: self._up.wait())

    def must_fail(self, step: Step) -> bool:
        return True

    def prepare(self, place: int, fault: Fault, rank: int) -> None:
        if rank in fault.ranks:
            interfere(fault.point, self._up.clear)

    def ended(self, place: int) -> None:
        self._up.set()
        faults.clear_faults()


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
        self.rank, self.program = rank, program
        self.on_hosts, self.link = link is not None, link or StoreLink()
        self._signals = nccl_job.signals() if signals is None else signals
        self._shared = 0
        self._alive = list(range(program.size))
        options = {"timeout": FAR, **program.options}
        self._timeout = options["timeout"]
        if program.on_nccl:
            torch.cuda.set_device(rank)
            options = {"recoverable": True, **options}
        else:
            simulated.register()
            simulated.configure(bytes_per_communicator=HELD, eager=program.eager)
            options["backends"] = {program.backend}
        reloadpg.install(**options)

    def share(self, value: Any = None) -> list[Any]:
        """Wait for the other ranks; return the value of each.

        If a peer destroys a gloo group while this rank connects it or runs a collective, the group
        breaks, also with torch alone.
        """
        self._shared += 1
        key = f"shared/{self._shared}"
        self._signals.set(f"{key}/{self.rank}", json.dumps(value))
        self._signals.wait([f"{key}/{rank}" for rank in self._alive], timedelta(seconds=120))
        return [json.loads(self._signals.get(f"{key}/{rank}")) for rank in self._alive]

    def play(self) -> None:
        for number, life in enumerate(self.program.lives):
            self._live(life, number)

    # -- the life of a default group --------------------------------------------------------------

    def _live(self, life: Life, number: int) -> None:
        self._life, self._number, self._baseline, self._stuck = life, number, None, 0
        self._own = 0
        self._state = State(self.program.size)
        self._groups: dict[int, Any] = {}
        self._names: set[str] = set()
        self._keys: tuple[int, ...] = ()
        cause = Injected("the cause")
        try:
            with process_group_scope(timeout=LIMIT) if life.end == BRACKET else nullcontext():
                self._init()
                self._hold(WORLD, dist.group.WORLD)
                if life.bound and not self.program.on_nccl:
                    worlds.bind()
                for place, step in enumerate(life.steps):
                    self._play(place, step)
                    if self._alive != list(range(self.program.size)):
                        return
                self.share()
                self._end(life.end, cause)
        except Injected as error:
            assert error is cause
            assert life.end == BRACKET
        gc.collect()
        self._assert_nothing_left()
        self.share()

    def _assert_nothing_left(self) -> None:
        assert not dist.is_initialized()
        sizes = tables.lengths()
        sizes["pg_group_ranks"] -= (
            dist.GroupMember.NON_GROUP_MEMBER in c10d._world.pg_group_ranks
        )  # torch also enters the value for the groups of which this rank is no member (2.13)
        sizes["tags_to_pg"] = sum(map(len, c10d._world.tags_to_pg.values()))
        assert not any(sizes.values()), f"left in torch's tables by {self._life.end}: {sizes}"
        assert c10d._world.group_count == 0
        assert not [name for name in self._names if tables.resolves_to(name) is not None]
        if self.program.on_nccl:
            assert eventually(lambda: standins.communicators() <= self._stuck)
        else:
            assert eventually(lambda: self._held() == 0)

    def _held(self) -> int:
        """The number of groups on the simulated accelerator.

        A creation that waits for a member that has failed holds nothing yet.
        """
        waits = self.program.eager
        return sum(not waits or one.state == "connected" for one in simulated.groups())

    def _init(self) -> None:
        where: dict[str, Any] = {}
        if not self.on_hosts:
            where = {"store": self._store(), "rank": self.rank, "world_size": self.program.size}
        if self.program.on_nccl and self._life.bound:
            where["device_id"] = self._device()
        dist.init_process_group(self.program.backend, timeout=LIMIT, **where)

    def _store(self) -> dist.Store:
        """The store of one life."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        client = dist.TCPStore(
            address, port, is_master=False, wait_for_workers=False, timeout=LIMIT
        )
        store = dist.PrefixStore(f"life/{self._number}", client)
        cut = any(step.has("cut") for step in self._life.steps)
        return self.link.watched(store) if cut else store

    def _device(self) -> torch.device:
        return torch.device("cuda", self.rank)

    def _hold(self, slot: int, group: Any) -> None:
        self._groups[slot] = group
        self._names.add(group.group_name)

    def _end(self, end: str, cause: Injected) -> None:
        if end == BRACKET:
            device = self._device() if self.program.on_nccl else None
            with c10d._coalescing_manager(self._groups[WORLD], device):
                dist.all_reduce(self._tensor(1.0))
                raise cause
        for call in END_CALLS.get(end, ()):
            if call in ("abort", "shutdown"):
                for group in self._managed():
                    getattr(group, call)()
            else:
                getattr(c10d, call)()

    # -- a step -----------------------------------------------------------------------------------

    def _play(self, place: int, step: Step) -> None:
        """Call a step on this rank; compare what all ranks see with what is expected."""
        self._place, before = place, self._communicators()
        generation = reloadpg.status().generation
        self._prepare(step)
        if step.fault is not None and step.has("die"):
            self._alive = [rank for rank in self._alive if rank not in step.fault.ranks]
        begun = time.monotonic()
        # Not before the step is too long: the dump of a thread that runs can end the process.
        faulthandler.dump_traceback_later(ALLOWANCE)
        seen = attempt(partial(getattr(self, f"_{step.do}"), *step.args))
        faulthandler.cancel_dump_traceback_later()
        where = f"{step} of {self.program}: {seen}"
        assert seen.kind != "AssertionError", where
        self._failed = bool(seen.kind)
        if self._alive != list(range(self.program.size)):
            self._survive(step, seen, time.monotonic() - begun)
            return
        self._undo(step)
        status = reloadpg.status()
        all_seen = self.share([bool(seen.kind), status.state, status.generation, self._numbers()])
        ended = self._state.end_of(step)
        if ended == "any" and step.fault is not None and step.fault.in_nccl:
            assert len({one[0] for one in all_seen}) == 1, f"the ranks end differently: {where}"
            failed = "failed" if status.state == "failed" else "unchanged"
            ended = failed if seen.kind else "completed"  # type: ignore[assignment]
        elif ended == "any" and not any(one[0] for one in all_seen):
            ended = "completed"
        self._state.apply(step, ended)
        try:
            self._check_error(step, ended, seen)
            self._check_groups(step, ended, status, before)
            found = [one[2:] for one in all_seen]
            self._check_generations(step, ended, found, generation)
        except AssertionError as error:
            raise AssertionError(f"{error}: {where}") from error
        self.share()

    def _check_groups(self, step: Step, ended: Ended, status: Any, before: list[int]) -> None:
        """States, tables, and communicators that an operation without effect keeps."""
        state, groups = self._state, {slot: self._groups[slot] for slot in self._live_or_not()}
        if state.known:
            waiting = "failed" if state.failed else "offloaded"
            absent = any(slot not in state.live for slot in groups)
            assert status.state == (waiting if absent else "live")
            expected = {s: "live" if s in state.live else waiting for s in groups}
            assert {slot: str(group.state) for slot, group in groups.items()} == expected
        assert {group.name for group in status.groups} == {g.group_name for g in groups.values()}
        assert all(map(_is_registered, self._groups.values()))
        if ended == "unchanged":
            assert self._communicators() == before
        if state.known and not self.program.on_nccl:
            there = sum(slot in state.live for slot in self._groups)
            assert eventually(lambda: self._held() == there), simulated.groups()
        if ended == "failed":
            assert reloadpg.recovery.recovery_requested()
            if step.do == "offload" and not step.has("stall") and not self.program.on_nccl:
                assert eventually(self._all_released)

    def _check_generations(self, step: Step, ended: Ended, found: Any, before: int) -> None:
        """All ranks are in one generation, which is above that of before if groups were rebuilt."""
        if not self._state.known:
            return
        assert len({generation for generation, _ in found}) == 1, found
        now, done = reloadpg.status().generation, ended == "completed" and not self._failed
        rebuilt = step.do in ("recover", "settle") and done and not self.program.on_nccl
        assert now > before if rebuilt else now >= before  # on NCCL, suspended groups stay
        numbers: dict[str, Any] = {}
        for _, of_rank in found:
            for slot, number in of_rank.items():
                assert numbers.setdefault(slot, number) == number, found

    def _check_error(self, step: Step, ended: Ended, seen: Seen) -> None:
        """Each rank raises an error with the cause, or completes the step."""
        fault = step.fault
        if fault is None or fault.seconds is not None:
            assert not seen.kind, "a delay is no fault"
        elif fault.action == "cut":
            assert seen.seconds < self._timeout + ALLOWANCE
            assert bool(seen.kind) == self.link.must_fail(step)
            if seen.kind and "group" in fault.point:
                assert self._states() == {"failed"}
        elif fault.in_nccl:
            assert seen.kind or fault.action != "stop"
        elif ended == "completed":
            counted = fault.action == "counted" and self.rank in fault.ranks
            assert seen.kind == ("KeyboardInterrupt" if counted else "")
        else:
            assert seen.seconds < ALLOWANCE + (self._timeout if fault.action == "stall" else 0)
            (_check_own if self.rank in fault.ranks else _check_others)(step, fault, seen)

    def _survive(self, step: Step, seen: Seen, seconds: float) -> None:
        """A rank has died in this step: it is named within the timeout, also by a recovery."""
        assert step.fault is not None
        (victim,) = step.fault.ranks
        where = f"{step}: {seen}"
        assert seconds < self._timeout + ALLOWANCE, where
        if step.do != "use":  # a collective may end only when others recover
            assert len({*self.share(reloadpg.status().state)}) == 1, where
        if self.program.on_nccl:
            assert seen.kind, where
            self._free_everything(step)
            return
        if step.do != "use":
            kinds = {"RendezvousTimeoutError", "PeerFailedError", "RebuildError"}
            assert seen.kind in kinds, where
            assert seen.names(victim), where
            self._state.apply(step, "unchanged" if step.fault.point in UNTOUCHED else "failed")
            self._check_groups(step, "any", reloadpg.status(), [])
        for _ in range(2 if step.do in ("recover", "use") else 1):
            seen = attempt(lambda: reloadpg.recovery.recover("test", timeout=self._timeout))
            assert seen.seconds < self._timeout + ALLOWANCE
            self.share()
        assert seen.kind in {"RendezvousTimeoutError", "PeerFailedError"}, seen
        assert seen.missing == (victim,), seen
        for group in self._managed():
            assert attempt(partial(self._value, group, "all_reduce")).kind == "GroupOffloadedError"
        assert reloadpg.recovery.recovery_requested()

    def _free_everything(self, step: Step) -> None:
        """The peers of a killed rank free all of their communicators and memory."""
        assert step.fault is not None
        dist.destroy_process_group()
        # The creation of a communicator waits for a member that is killed before it takes part.
        may_stay = 4 if step.fault.point == "init" else 0
        assert eventually(lambda: standins.communicators() <= may_stay)
        torch.cuda.empty_cache()
        unknown = step.fault.point in ("suspend", "resume") and nccl_job.ABORT_LEAVES
        left = nccl_job.used() - standins.left_bytes() // nccl_job.MIB
        assert may_stay or unknown or left == 0

    def _managed(self) -> list[Any]:
        return [self._groups[slot] for slot in self._live_or_not()]

    def _live_or_not(self) -> list[int]:
        """The slots of this rank's managed groups."""
        kinds = reloadpg.ReloadableProcessGroup
        return [slot for slot, group in self._groups.items() if isinstance(group, kinds)]

    def _communicators(self) -> list[int]:
        return [id(group._managed.communicator) for group in self._managed()]

    def _numbers(self) -> dict[str, Any]:
        """The generation of each live group by slot."""
        return {
            str(slot): self._groups[slot].generation
            for slot in self._live_or_not()
            if str(self._groups[slot].state) == "live"
        }

    def _create(self, slot: int, ranks: Any, kind: str) -> None:
        members = list(ranks)
        if kind == "positional":
            made = dist.new_group(members, LIMIT, None, None, False, f"g{slot}")
        else:
            given: dict[str, Any] = {}
            if kind == "priority":
                given["pg_options"] = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            made = dist.new_group(ranks=members, timeout=LIMIT, group_desc=f"g{slot}", **given)
        members.clear()  # the library must have copied the list
        if self.rank not in ranks:
            assert made is dist.GroupMember.NON_GROUP_MEMBER
            return
        self._hold(slot, made)
        assert isinstance(made, reloadpg.ReloadableProcessGroup) == (len(ranks) > 1)

    def _destroy(self, slot: int) -> None:
        self.share()
        group = self._groups.pop(slot, None)
        if group is not None:
            dist.destroy_process_group(group)
            assert getattr(group, "state", "destroyed") == "destroyed"

    def _use(self, slots: tuple[int, ...], kind: str) -> None:
        fault = self._life.steps[self._place].fault
        if fault is not None and fault.action == "die":
            if self.rank in fault.ranks:
                dist.all_reduce(self._tensor(1.0), async_op=True)
                die()
            self._value(self._groups[WORLD], "all_reduce")
        elif fault is not None:
            self._use_with_a_fault(fault)
        for slot in [] if fault is not None else slots:
            if (group := self._groups.get(slot)) is None:
                continue
            if slot in self._state.live:
                assert self._value(group, kind) == self._expected(group, kind)
            else:
                assert attempt(partial(self._value, group, kind)).kind == "GroupOffloadedError"

    def _expected(self, group: Any, kind: str) -> float:
        ranks = dist.get_process_group_ranks(group)
        if kind == "ring":
            return 2.0 ** ranks[ranks.index(self.rank) - 1]
        return sum(2.0**rank for rank in ranks)

    def _value(self, group: Any, kind: str) -> float:
        """A sum of ``2**rank``, or the number of the previous member."""
        ranks, mine = dist.get_process_group_ranks(group), self._tensor(2.0**self.rank)
        if kind == "all_reduce" or len(ranks) == 1:  # gloo does not send to itself
            dist.all_reduce(mine, group=group)
            return mine.item()
        place, received = ranks.index(self.rank), self._tensor(0.0)
        to_next, from_previous = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, to_next, group=group),
                dist.P2POp(dist.irecv, received, from_previous, group=group),
            ]
        ):
            work.wait()
        return received.item()

    def _tensor(self, number: float) -> torch.Tensor:
        return torch.tensor([number], device=self._device() if self.program.on_nccl else "cpu")

    def _use_with_a_fault(self, fault: Fault) -> None:
        """Sums in a loop that recovers and repeats; without a link one attempt, which may raise."""
        before = reloadpg.status().generation

        def sums() -> bool:
            if (act := self._misuses.get(fault.action)) and reloadpg.status().generation == before:
                act(self, self.rank in fault.ranks)
            return all(
                self._value(group, kind) == self._expected(group, kind)
                for group in self._groups.values()
                for kind in ("all_reduce", "ring")
            )

        def step(attempt: int) -> bool:
            self._set_timeouts(SHORT if attempt == 1 else LIMIT)
            try:
                return sums()
            finally:  # a call that hangs holds its rank: the others have seen it by now
                if attempt > 1 or reloadpg.recovery.recovery_requested():
                    faults.clear_faults()

        try:
            if fault.action == "cut":
                self._set_timeouts(SHORT)
                assert sums()
            else:
                late: set[int] = set()
                assert self._repeat(step, late)
                assert fault.action != "skip" or late >= {*fault.ranks}
        finally:
            self._set_timeouts(LIMIT)

    def _skip(self, faulty: bool) -> None:
        if faulty:
            assert eventually(reloadpg.recovery.recovery_requested)
            raise Injected

    def _abort(self, faulty: bool) -> None:
        for group in self._managed() if faulty else ():
            group.abort()

    def _disconnect(self, faulty: bool) -> None:
        """Shut down the connections of this process, except those to the store."""
        port = int(os.environ["MASTER_PORT"])
        for one in psutil.Process().net_connections("tcp") if faulty else ():
            if one.raddr and port not in (one.laddr.port, one.raddr.port):
                with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _coalesce(self, faulty: bool) -> None:
        """Torch would coalesce all later operations."""
        with c10d._coalescing_manager(self._groups[WORLD]):
            raise Injected

    _misuses: ClassVar[dict[str, Callable[[Player, bool], None]]] = {
        "skip": _skip,
        "abort": _abort,
        "disconnect": _disconnect,
        "coalesce": _coalesce,
    }

    def _repeat(self, step: Callable[[int], bool], late: set[int]) -> bool:
        """Run a step until it passes on all ranks, as the recipe of docs/recovery.md does.

        After a fault, all ranks recover and repeat it. ``step`` gets the number of its attempt;
        ``late`` has the ranks that were late according to the recoveries.
        """

        def recover() -> None:
            self._set_timeouts(LIMIT)  # those of the first attempt are short
            if number:  # the call that hangs may be this loop's own
                faults.clear_faults()
            report = reloadpg.recovery.recover("a test")
            late.update(one.rank for one in report.faults if one.late)

        attempts, right, number = [0, 0], False, 0
        while number < len(attempts):
            attempts[number] += 1
            assert attempts[number] <= MOST_ATTEMPTS
            try:
                if number:  # no rank leaves the loop while another one repeats the step
                    dist.all_reduce(self._tensor(1))
                else:
                    right = step(attempts[number])
                if self.program.on_nccl:
                    torch.cuda.synchronize()
                if not reloadpg.recovery.recovery_requested():
                    number += 1
                    continue
            except RuntimeError:
                recover()
            else:
                recover()
            least = self._tensor(number)
            dist.all_reduce(least, op=dist.ReduceOp.MIN)  # another rank may be one step behind
            number = int(least)
        return right

    def _set_timeouts(self, timeout: timedelta) -> None:
        for group in self._managed():
            with suppress(RuntimeError):
                if self.program.on_nccl:
                    c10d._set_pg_timeout(timeout, group)
                elif (inner := group._managed.communicator) is not None:
                    inner.set_timeout(timeout)  # torch finds no device of a simulated group

    def _call(self, operation: Callable[..., Any]) -> Any:
        """Call an offload or reload; some ranks do not wait in it, in turn."""
        fault = self._life.steps[self._place].fault
        by_signal = fault is not None and fault.action in ("interrupt", "terminate", "counted")
        if by_signal or (self.rank + self._place) % 2 == 0:
            return operation()
        pending = operation(wait=False)
        error = pending.exception()
        for _ in range(2 if error is not None else 0):
            assert attempt(pending.result).text == str(error)
        return pending.result()

    def _offload(self) -> None:
        live = [group for group in self._managed() if group._managed.is_live]
        self._released = [weakref.ref(group._managed.communicator) for group in live]
        report = self._call(reloadpg.offload)
        assert (report.operation, len(report.groups)) == ("offload", len(live))
        assert self.program.options.get("strategy") == "suspend" or self._all_released()

    def _reload(self, connect: Any) -> None:
        report = self._call(partial(reloadpg.reload, connect=connect))
        absent = self._state.count(self.rank, live=False) if self._state.released else 0
        assert (report.operation, len(report.groups)) == ("reload", absent)

    def _recover(self) -> None:
        self.share()  # it aborts groups that a peer may still connect
        fault = self._life.steps[self._place].fault
        if fault is not None and fault.action == "alone" and self.rank not in fault.ranks:
            seen = attempt(reloadpg.offload)
            assert (seen.kind, seen.rank) == ("PeerFailedError", fault.ranks[0])
            assert "has called recover" in seen.text
            assert self._states() == {"live"}
        report = reloadpg.recovery.recover(f"of {self.rank}", timeout=self._timeout)
        assert (report.operation, len(report.groups)) == ("recover", len(self._managed()))
        assert {one.rank: one.reason for one in report.faults} == {
            rank: f"of {rank}" for rank in range(self.program.size)
        }

    def _mend(self, how: str) -> None:
        """All groups are live afterwards, whatever happened before."""
        if not self._state.known:
            states = {state for one in self.share(sorted(self._states())) for state in one}
        else:
            states = set()
        self.share()
        if how == "must recover" or (how == "recover" and self._failed):
            reloadpg.recovery.recover("a test")
            return
        report = reloadpg.reload()
        if len(states) > 1 and "live" in states:
            assert "disagreed on the state" in "".join(report.warnings)

    def _states(self) -> set[str]:
        return {str(group.state) for group in self._managed()}

    def _settle(self) -> None:
        """A cycle, after which nothing is left of what was before."""
        reloadpg.offload()
        reloadpg.reload()
        for group in self._groups.values():  # also connects each group: NVIDIA's NCCL takes more
            for kind in ("all_reduce", *["ring"] * self.program.on_nccl):  # memory for each kind
                self._value(group, kind)
        self.share()  # a rank that ends a collective may still be needed by another
        if not self.program.on_nccl:
            keys = base_store().num_keys() - self.program.size * self._shared - self._own
            self._keys = (*self._keys, keys)
            self.share()
            assert self.on_hosts or keys <= max(self._keys[:2]) + 4 + self.program.size, self._keys
            return
        count = len(self._managed())
        if self._baseline is None or count != self._baseline[0]:
            self._baseline = count, nccl_job.held()
            return
        # The backends of the CPU stay, each with the store client that created it, where an
        # operation that has failed lets the next one connect new clients.
        stores = 0 if self.program.backend == "nccl" else count
        left = nccl_job.left_over(self._baseline[1], self._stuck, stores)
        last = self._life.steps[self._place - 3].fault
        stopped = last is not None and last.action == "stop" and last.point in ("suspend", "resume")
        assert not left or (stopped and nccl_job.ABORT_LEAVES), left

    def _all_released(self) -> bool:
        gc.collect()
        return all(ref() is None for ref in self._released)

    # -- faults -----------------------------------------------------------------------------------

    def _prepare(self, step: Step) -> None:
        if (fault := step.fault) is None:
            return
        self._pids = self.share(os.getpid())
        if fault.action == "cut":
            self.link.prepare(self._place, fault, self.rank)
            if self.on_hosts:  # the link may be down
                return
        elif fault.in_nccl and fault.action in ("stop", "die"):
            if self.rank in fault.ranks:
                arm(fault)
        elif fault.in_nccl:
            if self.rank == 0:
                for rank in fault.ranks:
                    faults.inject(fault.injected(rank))
        elif step.do != "use" or fault.action != "die":
            self._own += 2 if fault.action == "stall" else 0
            if self.rank in fault.ranks:
                self._bring_about(fault)
        if fault.in_nccl and fault.may_stay:
            self._stuck += len(self._groups)
        self.share()

    def _bring_about(self, fault: Fault) -> None:
        """Inject a fault at a point on this rank."""
        place = f"{self._number}/{self._place}"
        interrupt = partial(signalling, signal.SIGINT, KeyboardInterrupt())
        actions: dict[str, Callable[[], Callable[[], object]]] = {
            "raise": lambda: fail,
            "interrupt": interrupt,
            "terminate": partial(signalling, signal.SIGTERM, Terminated(143)),
            "counted": interrupt,
            "stall": lambda: partial(self._await_others, place, fault),
            "die": lambda: die,
        }
        moment = "after" if fault.action == "counted" else "before"
        if fault.action in actions:
            interfere(fault.point, actions[fault.action](), moment)  # type: ignore[arg-type]

    def _await_others(self, place: str, fault: Fault) -> None:
        if fault.point == "use":  # the others have recovered before they end the step
            assert eventually(reloadpg.recovery.recovery_requested)
            return
        self._signals.clone().wait([f"gave up/{place}"], timedelta(seconds=FAR))

    def _undo(self, step: Step) -> None:
        if (fault := step.fault) is None:
            return
        if fault.action == "stop" and self.rank == 0:
            os.kill(self._pids[fault.ranks[0]], signal.SIGCONT)
        if fault.action == "cut":
            if not self.on_hosts:
                self.share()
            self.link.ended(self._place)
        elif fault.action == "stall" and not fault.in_nccl and self.rank not in fault.ranks:
            store, place = self._signals.clone(), f"gave up/{self._number}/{self._place}"
            others = self.program.size - len(fault.ranks)
            if store.add(f"{place}/count", 1) == others:
                store.set(place, "1")
        self.share()
        faults.clear_faults()
        self.share()


def _check_own(step: Step, fault: Fault, seen: Seen) -> None:
    """A faulty rank raises its own error, with the cause."""
    if len(fault.ranks) > 1:
        assert seen.kind
    elif fault.action == "raise" and fault.point[-1].isdigit():
        own = "ReleaseError" if step.do == "offload" else "RebuildError"
        assert (seen.kind, seen.cause) == (own, "Injected('injected')")
    elif fault.action == "raise" and fault.point.endswith("callbacks"):
        assert (seen.kind, seen.cause) == ("ReloadpgError", "Injected('injected')")
    else:
        kinds = {
            "raise": "Injected",
            "interrupt": "KeyboardInterrupt",
            "counted": "KeyboardInterrupt",
            "terminate": "Terminated",
            "stall": "RendezvousTimeoutError",
        }
        assert seen.kind == kinds[fault.action]


def _check_others(step: Step, fault: Fault, seen: Seen) -> None:
    """Another rank names a faulty rank and its error.

    An interrupted rank drops its groups before the others have read its error, so a rank that is
    still connecting to it raises RebuildError.
    """
    assert any(seen.names(rank) for rank in fault.ranks)
    if fault.action == "stall":
        assert seen.kind == "RendezvousTimeoutError"
        assert ("recover" if step.do == "recover" else "install") + "(timeout=...)" in seen.text
    elif seen.kind != "RebuildError" or (fault.action == "raise" and len(fault.ranks) == 1):
        assert seen.kind == "PeerFailedError"
        assert seen.rank in fault.ranks
    text = {"raise": "injected", "interrupt": "KeyboardInterrupt", "terminate": "Terminated"}
    assert text.get(fault.action, "") in seen.text


def arm(fault: Fault) -> None:
    """Kill or stop this process when it next makes a call of NCCL."""
    stall = faults.inject(faults.Fault("nccl", "stall", operation=fault.point, rank=fault.ranks[0]))

    def watch() -> None:
        assert stall.wait_fired(FAR)
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "die" else signal.SIGSTOP)
        stall.clear()

    threading.Thread(target=watch, daemon=True, name="reloadpg test").start()


def _is_registered(group: Any) -> bool:
    """Whether c10d finds this group by object and by name."""
    name = c10d._world.pg_names.get(group)
    return name is not None and c10d._resolve_process_group(name) is group


def play(rank: int, size: int, program: Program) -> None:
    """Play a program on this rank."""
    Player(rank, program).play()


def run(program: Program, **variables: str) -> None:
    """Play a program on new ranks."""
    variables = {**VARIABLES, **program.variables, **variables}
    given: dict[str, Any] = {"store": "parent", "standins": program.on_nccl, "timeout": 500}
    given["check"] = not program.dead
    outcomes = run_ranks(play, program.size, args=(program,), env=variables, **given)
    for outcome in outcomes if program.dead else ():
        killed = outcome.rank in program.dead
        shown = f"rank {outcome.rank}: {outcome.exception}"
        assert outcome.signal == (signal.SIGKILL if killed else None), shown
        assert killed or outcome.exception is None, shown
