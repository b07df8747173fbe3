"""Runs a program on real ranks twice: with torch alone, and with reloadpg and cycles.

A program is a module-level function ``program(run) -> results``. It creates its groups, computes,
and calls ``run.cycle()`` between its steps. In a plain run that does nothing; in a reloaded run it
offloads and reloads, and checks both.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import all_reduce as early_all_reduce  # bound before install, as Megatron

import reloadpg
from helpers import worlds
from reloadpg.testing import RanksFailedError, run_ranks, simulated

STORE_SOCKETS = 2
"""Connections to the store: that of torch, and that of reloadpg's rendezvous."""

CREATORS = 8
"""Threads that create groups of gloo by default, each with a connection to the store."""

TIMEOUT = 280.0
"""Time limit of one launch, in seconds. Most take 10 s, compiled ones 60 s, on two cores."""

ENVIRONMENT = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""Torch looks up the host name for each connection to the store. Where the name server does not
respond, each lookup took 5 s by default."""


@dataclass(frozen=True)
class Setting:
    """The configuration of a run.

    Attributes:
        backend: the backend of the default group.
        reloadable: whether reloadpg is installed.
        backends: the option of ``install``.
        kept_sockets: maximum number of sockets of earlier gloo communicators that stay open.
    """

    backend: str = worlds.BACKEND
    reloadable: bool = False
    backends: frozenset[str] | None = None
    kept_sockets: int = 0


PLAIN = Setting()
RELOADED = Setting(reloadable=True, backends=frozenset({worlds.BACKEND}))
SIM_PLAIN = Setting(backend="sim")
SIM_RELOADED = Setting(backend="sim", reloadable=True)


@dataclass
class Outcome:
    """The results of one rank, facts about its run, and the number of groups in each cycle."""

    results: Any
    facts: dict[str, Any]
    cycles: list[int]


@dataclass
class Run:
    """The context of a program on one rank."""

    rank: int
    world_size: int
    setting: Setting
    facts: dict[str, Any] = field(default_factory=dict)
    cycles: list[int] = field(default_factory=list)

    @property
    def backend(self) -> str:
        return self.setting.backend

    @property
    def device(self) -> torch.device:
        return worlds.device()

    @property
    def reloadable(self) -> bool:
        return self.setting.reloadable

    def cycle(self, inside: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Offload, call ``inside()``, and reload with these options.

        In a plain run, only call ``inside()``. While groups are offloaded, their communicators and
        sockets are closed, and every collective raises. After the n-th reload each group is live in
        generation n, c10d's tables hold the same objects and no inner group, and each communicator
        has the sockets that it needs.
        """
        if not self.reloadable:
            return inside() if inside is not None else None
        groups, before = managed(), {id(group) for group in tables().pg_map}
        assert self.cycles or "default_pg" in {group.group_desc for group in groups}
        inner = {group.group_name: weakref.ref(group._managed.communicator) for group in groups}
        released = reloadpg.offload()
        assert len(released.groups) == len(groups)
        assert [name for name, ref in inner.items() if ref() is not None] == []
        await_connections()
        held = self._held()
        if isinstance(held, int):
            assert held <= self._allowed(len(groups))
        else:
            assert held.live <= len(bypassed())
            assert held.leaked == 0
        for group in groups:
            assert str(group.state) == "offloaded"
            assert_refused(group)
        result = inside() if inside is not None else None
        rebuilt = reloadpg.reload(**options)
        assert len(rebuilt.groups) >= len(groups)
        after = self._held()
        if isinstance(held, int):
            assert after - held == sockets_of(managed())
        else:
            made = after.created - held.created, after.live - held.live
            assert made == (len(rebuilt.groups),) * 2
        self.cycles.append(len(groups))
        for group in groups:
            assert (str(group.state), group.generation) == ("live", len(self.cycles))
            assert resolve(group.group_name) is group
            assert group in tables().pg_map
            assert group._managed.communicator not in tables().pg_map
        added = [group for group in tables().pg_map if id(group) not in before]
        assert len(added) == len(rebuilt.groups) - len(released.groups)
        return result

    def _held(self) -> Any:
        """The number of sockets of this process, or the simulated accelerator's statistics."""
        return simulated.stats() if self.backend == "sim" else sockets()

    def _allowed(self, groups: int) -> int:
        """Maximum number of sockets while this number of groups is offloaded."""
        allowed = STORE_SOCKETS + min(CREATORS, groups) + self.setting.kept_sockets
        return allowed + sockets_of(bypassed()) + sockets_of_splits(groups, len(bypassed()))


def await_connections() -> None:
    """Wait for the store clients of the next reload, which are connected in the background."""
    for thread in threading.enumerate():
        if thread.name == "reloadpg-connect":
            thread.join(120)


def managed() -> list[reloadpg.ReloadableProcessGroup]:
    """The reloadable groups that c10d's tables hold in this process."""
    return [g for g in tables().pg_map if isinstance(g, reloadpg.ReloadableProcessGroup)]


def bypassed() -> list[dist.ProcessGroup]:
    """The bypassed groups in c10d's tables."""
    return [g for g in tables().pg_map if not isinstance(g, reloadpg.ReloadableProcessGroup)]


def tables() -> Any:
    return dist.distributed_c10d._world


def resolve(name: str) -> Any:
    """Look up a group by name, as compiled code and device meshes do."""
    return dist.distributed_c10d._resolve_process_group(name)


def sockets() -> int:
    """The number of open TCP sockets of this process, for the store and for gloo communicators."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the directory's own descriptor
            if stat.S_ISSOCK(os.fstat(int(fd)).st_mode):
                with socket.socket(fileno=os.dup(int(fd))) as one:
                    count += one.family != socket.AF_UNIX
    return count


def sockets_of(groups: Sequence[dist.ProcessGroup]) -> int:
    """The number of sockets of groups' gloo communicators; those of NCCL's stand-in have none.

    A gloo communicator of n ranks has a listening socket and n - 1 connections.
    """
    configs = tables().pg_backend_config
    return sum(group.size() for group in groups if "nccl" not in configs[group])


def sockets_of_splits(managed: int, bypassed: int) -> int:
    """Connections to the store that torch before 2.15 opens for splits of a bound default group.

    ``split_group`` clones the parent's store once for the group, for its lifetime, and once for the
    backend, until the offload (seen on 2.13).
    """
    return managed - 1 + 2 * bypassed if worlds.SPLIT_CLONES_STORE else 0


def assert_refused(group: dist.ProcessGroup) -> None:
    """Check that each kind of collective raises on a group, and leaves the tensor unchanged."""
    tensor = torch.full((4,), 7.0)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor, group=group),
        "early alias": lambda: early_all_reduce(tensor, group=group),
        "async": lambda: dist.all_reduce(tensor, group=group, async_op=True).wait(),
        "barrier": lambda: dist.barrier(group=group),
        "object": lambda: dist.all_gather_object([None] * group.size(), 1, group=group),
        "method": lambda: group.allreduce([tensor]).wait(),
        "functional": lambda: funcol.all_reduce(tensor, "sum", group).sum().item(),
        "by name": lambda: torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name),
    }
    if worlds.NCCL and torch.device("cpu") in group._device_types:
        del calls["barrier"], calls["object"]  # a mixed group runs them on gloo, which stays live
    for call in calls.values():
        with pytest.raises(reloadpg.GroupOffloadedError):
            call()
    assert tensor.tolist() == [7.0] * 4


def run_program(
    rank: int, world_size: int, program: Callable[[Run], Any], setting: Setting
) -> Outcome:
    """Run one rank of a program."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    if setting.backend == "sim":
        simulated.register()
        simulated.configure(bytes_per_communicator=1 << 16)
    if setting.reloadable:
        reloadpg.install(backends=setting.backends)
    worlds.init(setting.backend)
    run = Run(rank, world_size, setting)
    results = program(run)
    run.facts["reloadpg installed"] = reloadpg.is_installed()
    dist.destroy_process_group()
    return Outcome(plain_values(results), run.facts, run.cycles)


@contextmanager
def scratch(run: Run, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Create a directory that all ranks share; remove it at the end, also if the block raises."""
    path = [tempfile.mkdtemp(prefix="reloadpg-consumer-") if run.rank == 0 else ""]
    try:
        dist.broadcast_object_list(path, group=group)
        yield Path(path[0])
        dist.barrier(group)
    finally:
        if run.rank == 0:
            shutil.rmtree(path[0], ignore_errors=True)


def plain_values(value: Any) -> Any:
    """Replace tensors by detached CPU copies, which can be sent to the test process."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"return plain tensors, not {type(value).__qualname__}")
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return value


@cache
def launched(
    program: Callable[[Run], Any], world_size: int, setting: Setting
) -> list[Outcome] | RanksFailedError:
    """Launch the ranks, once per test session; return their outcomes or the error."""
    try:
        return run_ranks(
            run_program,
            world_size,
            args=(program, setting),
            timeout=TIMEOUT,
            env=ENVIRONMENT,
            preload=getattr(sys.modules[program.__module__], "PRELOAD", ()),
        )
    except RanksFailedError as error:
        return error


def outcomes(
    program: Callable[[Run], Any], world_size: int, setting: Setting = PLAIN
) -> list[Outcome]:
    """The outcomes of a launch, in rank order."""
    result = launched(program, world_size, setting)
    if isinstance(result, RanksFailedError):
        raise result.with_traceback(None)
    return result


def assert_identical(one: Any, other: Any, where: str = "results") -> None:
    """Check that values, types, shapes and keys are bit-identical."""
    assert type(one) is type(other), f"{where}: {type(one)} and {type(other)}"
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        same = (
            one.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(other.contiguous().view(-1).view(torch.uint8))
        )
        assert same, f"{where} differs by {(one.double() - other.double()).abs().max().item()}"
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_identical(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_identical(left, right, f"{where}[{index}]")
    else:
        assert one == other, where
