"""Stand-ins for the programs that share a device with a trainer, as strict as the originals.

``StandInSaver`` counts allocations by torch_memory_saver's rules. It intercepts those of simulated
communicators, as a preloaded one intercepts ``cudaMalloc`` and ``cudaFree``. :class:`SaverCrash`
stands for the end of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from reloadpg.testing import faults, simulated
from reloadpg.testing.faults import Fault
from reloadpg.testing.simulated import GroupInfo

BYTES = 1 << 16
"""Bytes of each communicator."""


class SaverCrash(RuntimeError):
    """An error for which torch_memory_saver prints this message and ends the process."""


class OutOfMemory(RuntimeError):
    """The simulated device has too little free memory."""


@dataclass
class Allocation:
    tag: str
    size: int
    active: bool = True


class PerThread(threading.local):
    """The saver's per-thread switches, as ``TMS_INIT_ENABLE=1`` sets them in every new thread."""

    tracking = True


class StandInSaver:
    """A preloaded torch_memory_saver: pause, resume, disable, and its record of allocations."""

    def __init__(self) -> None:
        self.account: dict[Any, Allocation] = {}
        self.calls: list[str] = []
        self.fail: list[str] = []  # calls that fail once, such as "resume"
        self.log: list[str] | None = None
        self.room: Callable[[int], None] = lambda size: None
        self.thread = PerThread()

    # -- interface ----------------------------------------------------------------------------

    def pause(self, tag: str | None = None) -> None:
        self._called("pause", tag)
        for allocation in self._of(tag):
            if not allocation.active:
                raise SaverCrash(f"Cannot pause allocation that is not active. tag={tag}")
            allocation.active = False

    def resume(self, tag: str | None = None) -> None:
        self._called("resume", tag)
        for allocation in self._of(tag):
            if allocation.active:
                raise SaverCrash(f"Cannot resume allocation that is not paused. tag={tag}")
            self.room(allocation.size)
            allocation.active = True

    @contextmanager
    def disable(self) -> Iterator[None]:
        assert self.thread.tracking, "disable() should be called only when tms is active"
        self.thread.tracking = False
        try:
            yield
        finally:
            self.thread.tracking = True

    def _called(self, name: str, tag: str | None) -> None:
        call = name if tag is None else f"{name} {tag}"
        if call in self.fail:
            self.fail.remove(call)
            raise RuntimeError(f"{name} was made to fail")
        self.calls.append(call)
        if self.log is not None:
            self.log.append(call)

    def _of(self, tag: str | None) -> list[Allocation]:
        return [a for a in self.account.values() if tag is None or a.tag == tag]

    # -- allocations --------------------------------------------------------------------------

    def malloc(self, key: Any, size: int, tag: str = "default") -> None:
        if self.thread.tracking:
            self.account[key] = Allocation(tag, size)

    def free(self, key: Any) -> None:
        allocation = self.account.get(key)
        if allocation is None:
            return
        if not allocation.active:
            raise SaverCrash("CUresult error: 1 (invalid argument) func=free")
        del self.account[key]

    @property
    def active_bytes(self) -> int:
        return sum(a.size for a in self.account.values() if a.active)

    @contextmanager
    def preloaded(self) -> Iterator[StandInSaver]:
        """Intercept the allocations of simulated communicators within this block."""

        def connected(group: GroupInfo) -> None:
            self.malloc(group.serial, group.held_bytes)

        def released(group: GroupInfo) -> None:
            self.free(group.serial)

        every: Any = {"action": "call", "moment": "after", "times": None}
        with (
            faults.inject(Fault("connect", call=connected, **every)),
            faults.inject(Fault("release", call=released, **every)),
        ):
            yield self


@dataclass
class Device:
    """A device of this capacity for communicators, the saver's allocations and the engine."""

    capacity: int
    saver: StandInSaver
    engine_bytes: int = 0

    def need(self, size: int) -> None:
        tracked = sum(a.size for key, a in self.saver.account.items() if not isinstance(key, str))
        others = simulated.stats().held_bytes - tracked  # communicators without the tracked ones
        used = others + self.saver.active_bytes + self.engine_bytes
        if used + size > self.capacity:
            raise OutOfMemory(
                f"{size} bytes requested, {self.capacity - used} of {self.capacity} free"
            )


@dataclass
class VllmEngine:
    """``sleep(level)`` and ``wake_up(tags)``; it needs memory, and generates only while awake."""

    device: Device
    log: list[str]
    sizes: dict[str, int] = field(
        default_factory=lambda: {"weights": 2 * BYTES, "kv_cache": 4 * BYTES}
    )
    awake: set[str] = field(default_factory=set)
    fail: list[str] = field(default_factory=list)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._called("wake_up", None if tags is None else ",".join(tags))
        for tag in tags or list(self.sizes):
            if tag not in self.awake:
                self.device.need(self.sizes[tag])
                self.awake.add(tag)
                self.device.engine_bytes += self.sizes[tag]
        return self.awake == set(self.sizes)

    def sleep(self, level: int = 1) -> None:
        self._called("sleep", str(level))
        self.awake.clear()
        self.device.engine_bytes = 0
        self._fail("answer")  # the call has taken effect, but its response is lost

    def generate(self) -> str:
        if self.awake != set(self.sizes):
            raise RuntimeError(f"generate() with only {sorted(self.awake)} awake")
        self.log.append("generate")
        return "sample"

    def _called(self, name: str, argument: str | None) -> None:
        self.log.append(name if argument is None else f"{name} {argument}")
        self._fail(name)

    def _fail(self, name: str) -> None:
        if name in self.fail:
            self.fail.remove(name)
            raise RuntimeError(f"{name} was made to fail")
