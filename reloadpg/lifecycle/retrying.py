"""Retrying: a loop whose steps are repeated, on all ranks alike, after a fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

from .. import c10d
from ..c10d import devices
from ..errors import (
    DisagreementError,
    GroupOffloadedError,
    InvalidOptionError,
    PeerFailedError,
    RebuildError,
    ReleaseError,
    ReloadpgError,
    RendezvousTimeoutError,
)
from ..groups.proxy import ReloadableProcessGroup
from ..groups.registry import registry
from .recover import Meeting, Position, longest_wait, meet
from .report import Fault

__all__ = ["Step", "retrying"]

logger = logging.getLogger("reloadpg")

T = TypeVar("T")

On = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]

_OWN = (
    DisagreementError,
    GroupOffloadedError,
    PeerFailedError,
    RebuildError,
    ReleaseError,
    RendezvousTimeoutError,
)
"""Errors of this library that say that ranks are not in step."""

_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between a recovery that failed and the next one: a link that is down comes back."""


def retrying(items: Iterable[T], *, attempts: int = 3, on: On | None = None) -> Iterator[Step[T]]:
    """Iterate over the steps of a loop, each of which is repeated on all ranks after a fault.

    Each step is a context manager, which holds all that is to be repeated::

        for step in reloadpg.retrying(batches):
            with step as batch:
                if step.attempt == 1:
                    snapshot = copy_of(model, optimizer)
                else:  # a failed attempt has changed them, on some ranks more than on others
                    restore(model, optimizer, snapshot)
                train(batch)

    The snapshot belongs at the beginning: only there all ranks are known to have completed the
    step before. What keeps the state of half a step is to be made anew after a fault (the wrapper
    ``DistributedDataParallel``, a model sharded by FSDP2, a pipeline schedule); groups and meshes
    stay.

    Collective: all ranks iterate over as many items. At the end of its block each rank waits for
    its device, and then for the others: a step is complete on all ranks or on none. If a rank
    raises an error of ``on``, all ranks call :func:`recover` and repeat the step, those too that
    had finished it. Any other exception ends the loop on all ranks: the communicators are made
    anew, it goes on where it was raised, and the other ranks raise ``PeerFailedError`` with its
    text. An interrupt (``KeyboardInterrupt``, ``SystemExit``) is told and goes on at once.

    Args:
        items: one item a step; an item is kept until its step is complete.
        attempts: how often a step is begun. A recovery that fails itself is called again, four
            times at most, after 1, 2, 4 and 8 s: a link that is down for some seconds fails it at
            once. One to which ranks did not come within its bound is not.
        on: the errors after which a step is repeated: types, or a function that is called with the
            error. None means those that backends and this library raise for a fault of
            communication.

    Yields:
        The steps; ``with step`` gives the item. ``step.number`` counts from 0, ``step.attempt``
        from 1.

    Raises:
        PeerFailedError: another rank has raised what is not to be repeated; or the step has failed
            ``attempts`` times and not by an error of this rank.
        Exception: what this rank raised, if it is not repeated any more, or what
            :func:`recover` raises.
        InvalidOptionError: ``attempts`` is not positive.
    """
    if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
        raise InvalidOptionError(
            f"retrying(attempts={attempts!r}): not a positive number; nothing was begun."
        )
    return _steps(iter(items), attempts, on)


def _steps(items: Iterator[T], attempts: int, on: On | None) -> Iterator[Step[T]]:
    number = 0
    while True:
        progress = _Progress(number, attempts, on)
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:  # as much this rank's own as one in the block
            progress.fail(error, repeats=False)
            raise
        while not progress.complete:
            step = Step(item, number, progress.failed + 1, progress)
            yield step
            if not step.left:
                raise ReloadpgError(
                    "a step of retrying() was not used as a context manager, so nothing says how "
                    "it ended. Write `for step in reloadpg.retrying(...):` and, around all of the "
                    "body, `with step as item:`."
                )
        number += 1


class Step(Generic[T]):
    """One attempt at a step of :func:`retrying`; a context manager that gives the item.

    Attributes:
        value: the item.
        number: number of the step, from 0.
        attempt: number of this attempt, from 1.
        left: whether its block has ended.
    """

    def __init__(self, value: T, number: int, attempt: int, progress: _Progress) -> None:
        self.value = value
        self.number = number
        self.attempt = attempt
        self.left = False
        self._progress = progress

    def __enter__(self) -> T:
        return self.value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.left = True
        if error is not None and not isinstance(error, Exception):
            self._progress.tell(error)
            return False
        if error is None:
            try:
                self._progress.commit()
            except Exception as failed:
                self._progress.fail(failed)
            return False
        self._progress.fail(error)
        return True


class _Progress:
    """The attempts at one step on this rank.

    Attributes:
        complete: whether the step is complete on all ranks.
        failed: how many attempts have failed, on all ranks alike.
    """

    def __init__(self, number: int, attempts: int, on: On | None) -> None:
        self.complete = False
        self.failed = 0
        self._number = number
        self._attempts = attempts
        self._on = on
        self._ended = False

    def commit(self) -> None:
        """Wait until all ranks have finished the step. Collective, blocking, bounded."""
        devices.synchronize()  # a collective that fails on the device fails in this step
        job = registry.job("retrying")
        if job is not None:
            round_ = job.rendezvous.open("step", ["enter"], _seconds())
            try:
                round_.barrier("enter")
            finally:  # a rank that was interrupted takes no part in a recovery
                self._ended = round_.outcome is not None and round_.outcome.kind == "failed"
        self.complete = True

    def tell(self, error: BaseException) -> None:
        """Tell ranks that wait for this one that it was interrupted. Local, bounded."""
        job = registry.job("retrying")
        if job is not None:
            job.rendezvous.open("step", ["enter"], _seconds()).fail(error)

    def fail(self, error: Exception, *, repeats: bool | None = None) -> None:
        """Recover, and return if the step is to be repeated, or is complete on other ranks.

        Raises:
            Exception: ``error``, or what another rank has raised, if it is not.
        """
        if self._ended:
            raise error
        if repeats is None:
            repeats = self._is_fault(error)
        self.failed += 1
        report, furthest = self._recover(error, repeats)
        if furthest.step > self._number:
            self.complete = True
            return
        self.failed = furthest.attempt
        fatal = next((fault for fault in report.faults if not fault.repeats), None)
        if not repeats:
            raise error
        if fatal is not None:
            raise self._peer_failed([fatal]) from error
        if self.failed >= self._attempts:
            if isinstance(error, PeerFailedError):
                raise self._peer_failed(report.faults) from error
            raise error

    def _recover(self, error: Exception, repeats: bool) -> Meeting:
        """Recover, again if that fails: on all ranks alike, since it has failed on all of them."""
        pauses = iter(_PAUSES_S)
        while True:
            try:
                here = Position(self._number, self.failed)
                return meet(error, position=here, repeats=repeats)
            except DisagreementError:  # raised on all ranks, now and in any further attempt
                raise
            except Exception as failed:
                pause = next(pauses, None)
                gone = isinstance(failed, RendezvousTimeoutError) and failed.missing
                if pause is None or gone:
                    raise
                logger.warning("step %d: recovering again in %g s: %s", here.step, pause, failed)
                time.sleep(pause)

    def _is_fault(self, error: Exception) -> bool:
        if isinstance(error, _OWN):
            return True
        if self._on is None:
            return c10d.is_communication_error(error)
        if isinstance(self._on, (type, tuple)):
            return isinstance(error, self._on)
        return self._on(error)

    def _peer_failed(self, faults: list[Fault] | tuple[Fault, ...]) -> PeerFailedError:
        causes = "; ".join(map(str, faults)) or "no rank said why"
        return PeerFailedError(
            f"step {self._number} failed in attempt {self.failed} of {self._attempts}: {causes}. "
            "All groups are live again; nothing of the step is to be relied on.",
            rank=faults[0].rank if faults else -1,
            phase="step",
        )


def _seconds() -> float:
    """How long a rank may be in a step that others have finished: as long as in a collective."""
    options, world = registry.options, c10d.world()
    bound = options.timeout.total_seconds() if options is not None else 0.0
    return max(bound, longest_wait(world) if isinstance(world, ReloadableProcessGroup) else 0.0)
