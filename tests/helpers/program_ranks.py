"""A pool of ranks that interpret the programs of ``programs``, one after another."""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import reloadpg
from helpers import faulty_gloo, worlds
from helpers.fault_job import fail, meet
from helpers.programs import WORLD, WORLD_TIMEOUT_S, Instruction, Program, contribution
from reloadpg.testing import RanksFailedError, run_ranks

RANKS = 4
BOUND_S = 10.0
"""The library's timeout."""
PROGRAM_LIMIT_S = 60.0
"""The time limit for one program; a rank that exceeds it writes its stacks and ends."""


class Interpreter:
    """One rank's execution of a program; it records observations after each instruction."""

    def __init__(self, rank: int, barriers: dist.Store) -> None:
        self._rank = rank
        self._barriers = barriers
        self._groups: dict[int, Any] = {}

    def run(self, number: int, program: Program) -> list[Any]:
        # Splits need a FileStore, see worlds.start().
        file = str(Path(os.environ["TMPDIR"], f"{number}.store"))  # of all ranks of the run
        store = dist.FileStore(file, program.size) if program.bound else _connect()
        self._barrier = dist.PrefixStore(f"barrier/{number}", self._barriers)
        self._size = program.size
        worlds.init(
            faulty_gloo.NAME,
            store=dist.PrefixStore(f"program/{number}", store),
            rank=self._rank,
            world_size=program.size,
            timeout=timedelta(seconds=WORLD_TIMEOUT_S),
            bound=program.bound,
        )
        self._groups[WORLD] = dist.group.WORLD
        try:
            return [self._step(*step) for step in enumerate(program.instructions)]
        finally:
            self._meet(len(program.instructions))
            dist.destroy_process_group()

    def _step(self, number: int, instruction: Instruction) -> dict[str, Any]:
        try:
            result = getattr(self, f"_{instruction[0]}")(number, *instruction[1:])
        except (reloadpg.ReloadpgError, RuntimeError) as error:
            result = [type(error).__name__, getattr(error, "rank", None)]
            if not isinstance(error, reloadpg.ReloadpgError):
                result[1] = str(error)
        status = reloadpg.status()
        by_name = {group.name: group for group in status.groups}
        groups = {
            slot: by_name.pop(group.group_name)
            for slot, group in self._groups.items()
            if isinstance(group, reloadpg.ReloadableProcessGroup)
        }
        return {
            "result": result,
            "state": status.state,
            "generation": status.generation,
            "groups": {
                slot: [g.state, g.generation, g.timeout_s, g.desc] for slot, g in groups.items()
            },
            "tables": not by_name and all(map(_is_registered, self._groups.values())),
        }

    def _create(
        self, _: int, slot: int, ranks: list[int], form: str, local: bool, desc: str, timeout: int
    ) -> str:
        ranks = list(ranks)
        limit = timedelta(seconds=timeout) if timeout else None
        if form == "positional":
            made: Any = dist.new_group(ranks, limit, None, None, local, desc or None)
        else:
            made = dist.new_group(
                ranks=ranks,
                timeout=limit,
                use_local_synchronization=local,
                group_desc=desc or None,
            )
        ranks.clear()  # the library must have copied the list
        if made is None or (local and made is dist.GroupMember.NON_GROUP_MEMBER):
            return "none"  # 2.15 returns NON_GROUP_MEMBER
        if made is dist.GroupMember.NON_GROUP_MEMBER:
            return "no member"
        self._groups[slot] = made
        reloadable = isinstance(made, reloadpg.ReloadableProcessGroup)
        return "reloadable" if reloadable else "as torch made it"

    def _split(self, number: int, slot: int, ranks: list[int], desc: str, timeout: int) -> str:
        self._meet(number)
        made = worlds.split([ranks], timeout=timedelta(seconds=timeout), group_desc=desc)
        if made is None or made is dist.GroupMember.NON_GROUP_MEMBER:
            return "none"
        self._groups[slot] = made
        reloadable = isinstance(made, reloadpg.ReloadableProcessGroup)
        return "reloadable" if reloadable else "as torch made it"

    def _meet(self, number: int) -> None:
        """Wait for the other ranks of the program.

        If a peer destroys a gloo group while this rank connects it or runs a collective, the group
        breaks, also with torch alone.
        """
        meet(f"{number}", self._size, PROGRAM_LIMIT_S, self._barrier)

    def _destroy(self, number: int, slot: int, only: int | None) -> str:
        self._meet(number)
        if slot not in self._groups or only not in (None, self._rank):
            return ""
        group = self._groups.pop(slot)
        dist.destroy_process_group(group)
        return str(getattr(group, "state", "gone"))

    def _retime(self, _: int, slot: int, seconds: int) -> str:
        if slot in self._groups:
            c10d._set_pg_timeout(timedelta(seconds=seconds), self._groups[slot])
        return ""

    def _collective(self, number: int, slot: int, kind: str) -> Any:
        if slot not in self._groups:
            return ""
        group = self._groups[slot]
        ranks = dist.get_process_group_ranks(group)
        mine = torch.tensor([contribution(self._rank, number)])
        if kind == "all_reduce":
            dist.all_reduce(mine, group=group)
            return mine.tolist()
        if kind == "all_gather":
            gathered = torch.empty(len(ranks))
            dist.all_gather_into_tensor(gathered, mine, group=group)
            return gathered.tolist()
        place = ranks.index(self._rank)
        if len(ranks) == 1:
            return mine.tolist()  # gloo does not send to itself
        received = torch.empty(1)
        to_next, from_previous = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, to_next, group=group),
                dist.P2POp(dist.irecv, received, from_previous, group=group),
            ]
        ):
            work.wait()
        return received.tolist()

    def _offload(self, _: int, fault: list[Any] | None) -> list[Any]:
        inner = [
            weakref.ref(group._managed.communicator)
            for group in self._groups.values()
            if isinstance(group, reloadpg.ReloadableProcessGroup) and group._managed.is_live
        ]
        return self._operate(reloadpg.offload, fault, inner)

    def _reload(self, _: int, connect: Any, fault: list[Any] | None) -> list[Any]:
        return self._operate(lambda: reloadpg.reload(connect=connect), fault, [])

    def _operate(
        self,
        operation: Callable[[], reloadpg.Report],
        fault: list[Any] | None,
        inner: list[weakref.ref[Any]],
    ) -> list[Any]:
        if fault is not None and fault[0] == self._rank:
            before: tuple[faulty_gloo.Moment, ...] = ("shutdown", "create")
            after: tuple[faulty_gloo.Moment, ...] = ("shut down", "created")
            for moment in before if fault[2] == "before" else after:  # one of them occurs
                faulty_gloo.inject(moment, fail, nth=fault[1] + 1)
        try:
            report = operation()
        finally:
            faulty_gloo.clear()
        if any(ref() is not None for ref in inner):
            gc.collect()
        alive = sum(ref() is not None for ref in inner)
        return [report.operation, len(report.groups), report.generation, alive]


def _is_registered(group: Any) -> bool:
    """Whether c10d finds this group by object and by name."""
    name = c10d._world.pg_names.get(group)
    return name is not None and c10d._resolve_process_group(name) is group


def _connect() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def serve(rank: int, size: int, address: str) -> None:
    """Interpret programs until the pool closes."""
    barriers = _connect()
    faulty_gloo.register()
    reloadpg.install(backends={faulty_gloo.NAME}, timeout=timedelta(seconds=BOUND_S))
    with Client(address, "AF_UNIX") as connection:
        connection.send(rank)
        while (task := connection.recv()) is not None:
            faulthandler.dump_traceback_later(PROGRAM_LIMIT_S, exit=True)
            number, program = task
            seen = Interpreter(rank, barriers).run(number, program) if rank < program.size else []
            faulthandler.cancel_dump_traceback_later()
            connection.send(seen)


class PoolBrokenError(Exception):
    """A rank ended or hung within a program."""


class Pool:
    """Persistent ranks, started for the first program and restarted after one that broke them."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._count = 0
        self._connections: dict[int, Connection] = {}
        self._thread: threading.Thread | None = None
        self._error = ""

    def run(self, program: Program) -> list[list[Any]]:
        """Run a program; return the observations after each instruction, by rank.

        Raises:
            PoolBrokenError: with the tracebacks, or with the stacks of ranks that hung.
        """
        if self._thread is None:
            self._start()
        self._count += 1
        seen: list[list[Any]] = []
        try:
            for connection in self._connections.values():
                connection.send((self._count, program))
            for rank in range(RANKS):
                seen.append(self._receive(rank))
        except (EOFError, OSError) as cause:
            self.close()
            lines = [f"rank {rank} observed {steps}" for rank, steps in enumerate(seen)]
            raise PoolBrokenError("\n".join([self._error, *lines])) from cause
        return seen[: program.size]

    def close(self) -> None:
        """End the ranks; those that hang end at their time limit."""
        for connection in self._connections.values():
            try:
                connection.send(None)
            except OSError:
                continue
        if self._thread is not None:
            self._thread.join(PROGRAM_LIMIT_S + 30)
        for connection in self._connections.values():
            connection.close()
        self._connections, self._thread = {}, None

    def _receive(self, rank: int) -> list[Any]:
        if not self._connections[rank].poll(PROGRAM_LIMIT_S + 10):
            raise EOFError
        seen: list[Any] = self._connections[rank].recv()
        return seen

    def _start(self) -> None:
        self._error = ""
        with tempfile.TemporaryDirectory() as directory:
            address = str(Path(directory) / "pool")
            with Listener(address, "AF_UNIX", backlog=RANKS) as listener:
                self._thread = threading.Thread(target=self._launch, args=(address,), daemon=True)
                self._thread.start()
                for _ in range(RANKS):
                    connection = listener.accept()
                    self._connections[connection.recv()] = connection

    def _launch(self, address: str) -> None:
        try:
            run_ranks(serve, RANKS, args=(address,), timeout=self._limit)
        except RanksFailedError as error:
            self._error = str(error)
