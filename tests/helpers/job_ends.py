"""Ends of a job, in every state of its groups, and the start of the next one in the same process.

A :class:`Cell` is one start and one end. :func:`play` runs many of them in the same ranks, and
returns what differs from the rules: the program's own error is raised, torch's tables are clean,
and the process starts again.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as torch_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

import reloadpg
from helpers import faulty_gloo, worlds
from helpers.fault_job import interfere, meet, stop_interfering
from reloadpg import c10d
from reloadpg.environment import init_distributed, process_group_scope
from reloadpg.testing import run_ranks, standins
from reloadpg.testing.standins import Fault

LIMIT = timedelta(seconds=60)
PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "3"))
"""The number of random programs, of one seed each."""
SIZE = 2
MESH_KILLS = "2.9" <= TorchVersion(torch.__version__) < "2.14"
"""Whether torch alone ends in SIGSEGV where a mesh splits a later default group (2.13.0)."""
NO_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""Variables without which the watchdog writes a dump of each failed collective."""


class Cell(NamedTuple):
    """One start and one end.

    Attributes:
        end: what ends the job or one of its groups; a key of ``ENDS``.
        state: of the groups before that.
        target: the group that is ended: WORLD, a sub-group, a part of a split, or of a mesh.
        bound: whether WORLD is bound to a device.
        installed: whether the library is installed.
    """

    end: str
    state: str
    target: str
    bound: bool
    installed: bool


STATES = ("live", "offloaded", "suspended", "failed", "half rebuilt")
TARGETS = ("world", "group", "split", "mesh")
CALLS = {
    "abort all": ("_abort_process_group",),
    "destroy": ("destroy_process_group",),
    "abort": ("abort",),
    "shutdown": ("shutdown",),
    "abort, abort all, twice": ("abort", "_abort_process_group") * 2,
    "abort, shutdown, destroy, twice": ("abort", "shutdown", "destroy_process_group") * 2,
    "shutdown, abort, abort all": ("shutdown", "abort", "_abort_process_group"),
}
"""Ends that are calls of torch's functions and of the group's methods."""
BLOCKS = ("scope", "scope raises", "context", "context raises")
BRACKETS = ("scope raises in a bracket", "context raises in a bracket")
"""Ends by an error while the group coalesces collectives."""
FAILURES = ("failed connect", "failed mesh", "failed new_group", "context raises, abort fails")
ENDS = (*CALLS, *BLOCKS, *BRACKETS, *FAILURES)


def cells(backend: str) -> list[Cell]:
    """All cells that exist on a backend."""
    return [
        cell
        for values in itertools.product(ENDS, STATES, TARGETS, (False, True), (True, False))
        if _exists(cell := Cell(*values), backend)
    ]


def _exists(cell: Cell, backend: str) -> bool:
    nccl = backend == "nccl"
    if not cell.installed and cell.state != "live":
        return False
    if cell.state == "suspended" and not (
        nccl and hasattr(torch._C._distributed_c10d.Backend, "suspend")
    ):
        return False
    if cell.target == "split" and not (cell.bound and (nccl or worlds.CAN_SPLIT)):
        return False
    splits = cell.target == "split" or (
        nccl and cell.bound and cell.target == "mesh" and MESH_KILLS
    )
    if splits and not cell.installed:
        return False  # torch's split of a later default group kills the process, see complete_ranks
    if cell.end in ("failed connect", "failed mesh"):
        # They have no state before, and end all groups.
        connects = not nccl or cell.end == "failed connect" or cell.bound
        return connects and cell.state == "live" and cell.target == "world"
    if cell.end == "failed new_group":
        # Torch creates an NCCL communicator at once if WORLD is bound and live.
        can_fail = not nccl or (cell.bound and cell.state == "live")
        return can_fail and cell.target == "group" and cell.state != "suspended"
    if cell.end in BRACKETS:
        return cell.state == "live"
    if cell.end == "context raises, abort fails":
        return not nccl and cell.state == "live"
    if cell.end.startswith("context"):
        return cell.target != "world" or cell.state == "live" or cell.installed
    return True


class Player:
    """One rank, which goes through cells."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.rank = int(os.environ["RANK"])
        self.base = self._connect()
        self.options: dict[str, Any] | None = None
        self.number = 0
        self.names: set[str] = set()
        if backend == "nccl":
            # Torch would end a process in which a collective has failed.
            os.environ |= c10d.recovery_settings({}, LIMIT.total_seconds())[0] | NO_RECORDER
            torch.cuda.set_device(self.rank)
            torch.set_default_device("cuda")
        else:
            faulty_gloo.register()

    def play(self, cells: Sequence[Cell]) -> list[str]:
        """Go through the cells; return what is wrong, with the cell."""
        wrong: list[str] = []
        for self.number, cell in enumerate(cells):
            self.meet("begin")
            try:
                self._play(cell)
            except BaseException as error:
                wrong.append(f"{cell}: " + "".join(traceback.format_exception(error)))
                print(wrong[-1], flush=True)  # shown if the other rank hangs
                with suppress(Exception):
                    c10d.abort_all()
            finally:
                faulty_gloo.clear()
            self.meet("end")
            if self.backend == "nccl" and self.rank == 0:
                standins.clear_faults()
        return wrong

    def meet(self, name: str) -> None:
        meet(f"{self.number}/{name}", SIZE, 40.0, self.base.clone())

    # -- one cell -------------------------------------------------------------------------------

    def _play(self, cell: Cell) -> None:
        self._install(cell)
        self.names.clear()
        kind = "faulty" if cell.end in FAILURES or cell.state == "half rebuilt" else "gloo"
        self.kind = "nccl" if self.backend == "nccl" else kind
        if cell.end in ("failed connect", "failed mesh"):
            self._fail_to_start(cell)
        elif cell.end == "failed new_group":
            self._fail_to_create(cell)
        elif cell.end in CALLS:
            self._end_by_calls(cell)
        else:
            self._end_by_block(cell)
        gc.collect()
        assert not dist.is_initialized()
        assert tables() == {}, "left in torch's tables"
        assert torch_c10d._world.group_count == 0
        assert not c10d.registered(self.names), f"left in the registry of {self.names}"
        self.meet("clean")
        self._start_again()

    def _install(self, cell: Cell) -> None:
        options: dict[str, Any] | None = None
        if cell.installed:
            strategy = "suspend" if cell.state == "suspended" else "recreate"
            backends = {"nccl"} if self.backend == "nccl" else {"gloo", "faulty"}
            options = {"strategy": strategy, "backends": backends, "timeout": LIMIT}
            options["parallelism"] = 1  # so that a fault is in the same group on all ranks
        if options != self.options:
            reloadpg.uninstall()
            if options is not None:
                reloadpg.install(**options)
            self.options = options

    def _end_by_calls(self, cell: Cell) -> None:
        self._init(cell)
        before = tables()
        targets = self._targets(cell)
        self._bring_about(cell)
        self.meet("in its state")
        done: list[str] = []
        for call in CALLS[cell.end]:
            for target in targets:
                if call in ("abort", "shutdown"):
                    if not self._raises_by_itself(cell, target):
                        getattr(target, call)()
                elif call not in done:
                    given = () if cell.target == "world" else (target,)
                    getattr(torch_c10d, call)(*given)
                else:  # torch's own errors: there is no such group any more
                    with pytest.raises((AssertionError, ValueError)):
                        getattr(torch_c10d, call)(target)
            done.append(call)
        if cell.target == "world":
            if not any("process_group" in call for call in done):
                if cell.installed:
                    self._adopt_nothing()
                else:
                    dist.destroy_process_group()
            return
        if any("process_group" in call for call in done):
            assert named(tables()) == named(before), (tables(), before)
            assert not c10d.registered({*self.names} - {c10d.name_of(dist.group.WORLD)})
        if cell.state == "live":
            assert worlds.sums_right(None)
        self.meet("ended")
        dist.destroy_process_group()

    def _raises_by_itself(self, cell: Cell, target: Any) -> bool:
        """Whether torch raises: its first NCCL engine, in an abort of a group after a shutdown."""
        plain = not isinstance(target, reloadpg.ReloadableProcessGroup)
        return plain and self.kind == "nccl" and cell.end == "shutdown, abort, abort all"

    def _adopt_nothing(self) -> None:
        """``init_distributed`` replaces a default group that was aborted or shut down."""
        ended = dist.group.WORLD
        with init_distributed(self.kind, store=self._store(), **self._given()) as context:
            assert context.owned
            assert dist.group.WORLD is not ended
            assert worlds.sums_right(None)

    def _end_by_block(self, cell: Cell) -> None:
        cause = ValueError("the cause") if "raises" in cell.end else None
        if cell.end.startswith("context"):
            block: Any = init_distributed(
                self.kind, store=self._store(cell.bound), **self._given(cell)
            )
            self._bind(cell)
        else:
            block = process_group_scope(timeout=LIMIT)
            if cell.target != "world":
                self._init(cell)
        before = tables()
        try:
            with block:
                if cell.target == "world" and cell.end.startswith("scope"):
                    self._init(cell)
                target = self._targets(cell)[-1]
                self._bring_about(cell)
                self.meet("in its state")
                if cause is not None and cell.end in BRACKETS:
                    device = self._device() if self.kind == "nccl" else None
                    with torch_c10d._coalescing_manager(target, device):
                        dist.all_reduce(torch.ones(1), group=target)
                        raise cause
                if cell.end == "context raises, abort fails":
                    faulty_gloo.inject("abort", _fail)
                if cause is not None:
                    raise cause
        except ValueError as error:
            assert error is cause
        else:
            assert cause is None
        if dist.is_initialized():
            assert cell.end.startswith("scope")
            assert cell.target != "world"
            assert named(tables()) == named(before), (tables(), before)
            if cell.state == "live":
                assert worlds.sums_right(None)
            self.meet("ended")
            dist.destroy_process_group()

    def _fail_to_start(self, cell: Cell) -> None:
        mesh = {"mesh_dims": {"pp": 1, "tp": SIZE}} if cell.end == "failed mesh" else {}
        # A split of NCCL cannot be aborted while it waits for a rank whose split has failed.
        ranks = (0, 1) if mesh and self.kind == "nccl" else (1,)
        with self._fault("split" if mesh else "collective", ranks=ranks, nth=2 if mesh else 1):
            try:
                init_distributed(
                    self.kind,
                    store=self._store(cell.bound),
                    init_timeout=LIMIT,
                    **mesh,  # type: ignore[arg-type]
                    **self._given(cell),
                )
            except reloadpg.ReloadpgError as error:
                text = str(error)
            else:
                raise AssertionError("it has started")
        assert "rank 1" in text or len(ranks) > 1, text
        cause = "injected" if self.kind != "nccl" else "NCCL" if self.rank == 1 else ""
        assert cause in text, text

    def _fail_to_create(self, cell: Cell) -> None:
        self._init(cell)
        before = tables()
        self._bring_about(cell)
        self.meet("in its state")
        with self._fault("split", ranks=(0, 1), nth=1):
            try:
                dist.new_group([0, 1], timeout=LIMIT)
            except RuntimeError as error:
                assert "injected" in str(error) or "NCCL" in str(error), error
            else:
                raise AssertionError("it was created")
        assert named(tables()) == named(before), (tables(), before)
        self.meet("failed")
        torch_c10d._abort_process_group()

    # -- steps ----------------------------------------------------------------------------------

    def _init(self, cell: Cell) -> None:
        device = {"device_id": self._device()} if cell.bound and self.kind == "nccl" else {}
        dist.init_process_group(
            self.kind,
            store=self._store(cell.bound),
            rank=self.rank,
            world_size=SIZE,
            timeout=LIMIT,
            **device,
        )
        self._bind(cell)

    def _given(self, cell: Cell | None = None) -> dict[str, Any]:
        if self.kind != "nccl":
            return {"device": "cpu", "timeout": LIMIT, "network": "off"}
        bound = {"device_id": self._device()} if cell is not None and cell.bound else {}
        return {"device": self._device(), "timeout": LIMIT, "network": "off", **bound}

    def _device(self) -> torch.device:
        return torch.device("cuda", self.rank)

    def _bind(self, cell: Cell) -> None:
        if cell.bound and self.kind != "nccl":
            worlds.bind()
        self._note(dist.group.WORLD)

    def _targets(self, cell: Cell) -> list[Any]:
        """The groups that are to end; created now, except for WORLD."""
        before = c10d.known_groups()
        if cell.target == "world":
            return before
        if cell.target == "group":
            dist.new_group([0, 1], timeout=LIMIT)
        elif cell.target == "split" and self.kind == "nccl":
            dist.split_group(split_ranks=[[0, 1]], timeout=LIMIT)
        elif cell.target == "split":
            worlds.split([[0, 1]])
        else:
            init_device_mesh(
                "cuda" if self.kind == "nccl" else "cpu", (1, SIZE), mesh_dim_names=("a", "b")
            )
        made = [group for group in c10d.known_groups() if group not in before]
        for group in made:
            self._note(group)
        return made

    def _note(self, group: Any) -> None:
        self.names.add(c10d.name_of(group))

    def _bring_about(self, cell: Cell) -> None:
        groups = [one for one in c10d.known_groups() if one.size() > 1]
        assert worlds.sums_right(*groups)
        if cell.state == "live":
            return
        self.meet("summed")
        if cell.state == "failed":
            if self.rank == 1:
                interfere("offload.released", _fail)
            _raises(reloadpg.offload)
            stop_interfering()
        else:
            reloadpg.offload()
        if cell.state == "half rebuilt":
            ranks = (0, 1) if self.kind == "nccl" else (1,)  # as in a split, see above
            with self._fault("init", ranks=ranks, nth=len(groups)):
                _raises(lambda: reloadpg.reload(connect="eager"))
        wanted = "offloaded" if cell.state == "suspended" else cell.state
        wanted = "failed" if wanted == "half rebuilt" else wanted
        proxies = [one for one in groups if isinstance(one, reloadpg.ReloadableProcessGroup)]
        assert proxies
        assert {str(one.state) for one in proxies} == {wanted}
        assert all(
            (one._managed.communicator is not None) == (cell.state == "suspended")
            for one in proxies
        )
        for one in proxies:
            self.names.update(one._managed.names_in_store)

    @contextmanager
    def _fault(self, call: Any, *, ranks: tuple[int, ...], nth: int) -> Iterator[None]:
        """Make a call fail on some ranks: of NCCL, or the same step of gloo."""
        if self.kind == "nccl":
            self.meet(f"before the fault {call}")
            if self.rank == 0:
                for rank in ranks:
                    skip = nth - 1 if call == "init" else 0
                    standins.inject(Fault("fail", call, rank=rank, skip=skip, times=1))
            self.meet(f"fault {call}")
        elif self.rank in ranks:
            moment: Any = "allreduce" if call == "collective" else "create"
            faulty_gloo.inject(moment, _fail, nth=nth)
        yield

    def _start_again(self) -> None:
        if self.number % 2:
            with init_distributed(self.kind, store=self._store(), **self._given()):
                assert worlds.sums_right(None)
            return
        self._init(Cell("", "live", "world", False, False))
        assert worlds.sums_right(None)
        self.meet("started again")
        dist.destroy_process_group()

    # -- stores ---------------------------------------------------------------------------------

    def _store(self, bound: bool = False) -> Any:
        """A store for one default group."""
        self._stores = getattr(self, "_stores", 0) + 1
        if bound and self.backend != "nccl":  # splits need a FileStore, see worlds.start()
            return dist.FileStore(str(Path(os.environ["TMPDIR"], f"store{self._stores}")), SIZE)
        return dist.PrefixStore(f"job/{self._stores}", self._connect())

    def _connect(self) -> Any:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=LIMIT)


def named(sizes: dict[str, int]) -> dict[str, int]:
    """Without the flight recorder's hooks, which a group without a communicator has not."""
    return {name: size for name, size in sizes.items() if name != "pg_flight_recorder_hooks"}


def tables() -> dict[str, int]:
    """The sizes of torch's tables of groups that are not empty."""
    sizes = c10d.table_sizes()
    # Torch also enters the value for the groups of which this rank is no member (2.13).
    sizes["pg_group_ranks"] -= dist.GroupMember.NON_GROUP_MEMBER in torch_c10d._world.pg_group_ranks
    return {name: size for name, size in sizes.items() if size}


def _fail() -> None:
    raise RuntimeError("injected")


def _raises(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError:
        return
    raise AssertionError(f"{call} has not failed")


def play(rank: int, size: int, backend: str, chosen: Sequence[Cell]) -> list[str]:
    """Go through cells on this rank."""
    return Player(backend).play(chosen)


def core(cells: Sequence[Cell]) -> list[Cell]:
    """Two cells for each end, and five for each state; the targets differ."""
    chosen = []
    for index, end in enumerate(ENDS):
        for state in (STATES[index % 5], STATES[(index + 3) % 5]):
            found = [cell for cell in cells if (cell.end, cell.state) == (end, state)]
            chosen += found[index % len(found) :][:1] if found else []
    return chosen


def program(cells: Sequence[Cell], seed: int) -> list[Cell]:
    """Some cells in the order that a seed gives."""
    return random.Random(seed).sample(cells, 6)


def check(backend: str, chosen: Sequence[Cell], **settings: Any) -> None:
    """Go through cells on two ranks. ``settings`` are those of ``run_ranks``."""
    seen = run_ranks(play, SIZE, args=(backend, chosen), timeout=500, **settings)
    if found := [one for of_rank in seen for one in of_rank]:
        pytest.fail(f"{len(found)} of {len(chosen)} cells:\n" + "\n".join(found), pytrace=False)
