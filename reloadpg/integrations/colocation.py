"""A trainer and a rollout engine on the same devices: a context manager to switch between them.

::

    rollout = colocated(engine, saver=saver)  # once
    for batch in data:
        with rollout:  # all ranks
            samples = engine.generate(batch)
        train(samples)
"""

from __future__ import annotations

import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

from .. import offload, reload, status
from ..c10d import devices
from ..errors import InvalidOptionError, ReloadpgError
from ..extend import (
    TRAINER,
    Block,
    Connect,
    Pending,
    check_name,
    concerns,
    declared_sets,
    validate,
)
from ..reports import Report
from ..settings import checked_attempts, seconds_or_none
from .torch_memory_saver import MemorySaver, checked_tags

__all__ = ["ColocationError", "colocated"]

logger = logging.getLogger("reloadpg")

Action = Callable[[], object]
Failures = list[tuple[str, Exception]]

COPY = "copy weights back"

STILL_DUE = object()
"""Returned by a step back that could not be made yet and has not failed."""


class ColocationError(ReloadpgError):
    """Steps into or out of a rollout failed on this rank.

    Attributes:
        failures: the failed steps by name, with their errors, in order; the first is chained.
        colocation: what ``colocated`` returned; its ``restore()`` retries the remaining steps.
    """

    def __init__(
        self, message: str, failures: Sequence[tuple[str, Exception]], colocation: colocated
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.colocation = colocation


class colocated:  # noqa: N801 - used like a function
    """A context manager for a rollout: offloads the trainer and wakes the engine.

    At entry: synchronize, release the trainer's groups, collect and empty the allocator's cache,
    pause the memory saver, reload the engine's groups, wake the engine. At exit: put the engine to
    sleep, release its groups, resume the saver, empty the cache, reload the trainer's groups and,
    while that runs, copy the weights back. If a step at exit fails, the later ones are still run,
    and every failure is reported.

    Local. Entering and leaving the block are collective over all ranks of the job, with the
    timeouts of :func:`reloadpg.offload` and :func:`reloadpg.reload`. Reusable, but not reentrant.

    Args:
        engine: the rollout engine, asleep; None on ranks without one. Either vLLM's methods
            (``sleep(level)``, ``wake_up(tags)``) or SGLang's (``release_memory_occupation()``,
            ``resume_memory_occupation(tags)``). They must block: an asynchronous engine (vLLM's
            ``AsyncLLM``, the handle of a Ray actor) is an error.
        saver: a memory saver, or a :class:`MemorySaver` around one; None without.
        wake_tags: the parts of the engine to wake at entry: None for all, ``()`` for none, or tags
            such as ``["weights"]``. Wake the rest with :meth:`wake_up` within the block before the
            engine generates: vLLM's ``generate`` does not return while the engine is partly asleep.
        sleep_level: vLLM's sleep level.
        connect: as for :func:`reloadpg.reload`.
        collect: also run a full garbage collection before the cache is emptied.
        copy_back: copies the trainer's weights back to the device, for example
            ``lambda: model.load_state_dict(weights)``; None for none. Called in the caller's thread
            while the groups are reloaded. It must not call a collective: groups refuse them until
            the reload has ended. It may be called again after a failure. Need not be given on all
            ranks.
        engine_groups: the set of the engine's groups, if it runs in the trainer's processes; see
            ``install(sets=...)`` and :class:`reloadpg.region`. These groups are live in the block
            and offloaded outside of it; all others belong to the trainer. Equal on all ranks. If
            one rank drives an engine on the devices of several, pass an unused name. The engine
            then wakes after all ranks have released their memory, and every rank resumes its
            memory after the engine sleeps. Otherwise None.
        attempts: as for :func:`reloadpg.reload`, of the trainer's groups.
        timeout: as for :class:`reloadpg.offloaded`: how long the exit waits for ranks that are
            still in the block.

    Attributes:
        steps: the steps of the last entry and exit, in order, with their milliseconds.
        offload_report: report of the last offload.
        reload_report: report of the last reload.

    Raises:
        InvalidOptionError: an argument is invalid; nothing was changed.
    """

    def __init__(
        self,
        engine: Any = None,
        *,
        saver: Any = None,
        wake_tags: Sequence[str] | None = None,
        sleep_level: int = 1,
        connect: Connect | None = None,
        collect: bool = True,
        copy_back: Callable[[], object] | None = None,
        engine_groups: str | None = None,
        attempts: int = 1,
        timeout: timedelta | float | None = None,
    ) -> None:
        self._seconds = seconds_or_none(timeout, "colocated(timeout)")
        self._attempts = checked_attempts(attempts)
        self._wake_tags = checked_tags(wake_tags, "colocated(wake_tags")
        self._engine = None if engine is None else _Engine(engine, sleep_level, self._wake_tags)
        validate(connect)
        self._connect = connect
        self._collect = collect
        if copy_back is not None and not callable(copy_back):
            raise InvalidOptionError(
                f"colocated(copy_back={copy_back!r}): not callable; nothing was changed. Pass a "
                "function without arguments that copies the weights to the device."
            )
        self._copy_back = copy_back
        if engine_groups is not None:
            check_name(engine_groups, f"colocated(engine_groups={engine_groups!r})")
            if engine_groups == TRAINER:
                raise InvalidOptionError(
                    f"colocated(engine_groups={engine_groups!r}): this is the set of the trainer's "
                    'own groups; nothing was changed. Pass the engine\'s set, such as "engine".'
                )
        self._engine_groups = engine_groups
        if saver is not None and not isinstance(saver, MemorySaver):
            saver = MemorySaver(saver, sets=self._trainer_sets)
        elif saver is not None and engine_groups and concerns(saver.sets, [engine_groups]):
            raise InvalidOptionError(
                f"colocated(engine_groups={engine_groups!r}): the memory saver also checks that "
                'set; nothing was changed. Create it with MemorySaver(saver, sets="trainer").'
            )
        self._saver: MemorySaver | None = saver
        self._block = Block(self._trainer_sets, self._seconds)
        self._wait_s: float | None = None  # for ranks that are still in the block
        self._due: list[tuple[str, Action]] = []  # steps back, the first one last
        self._pending: Pending | None = None
        self._inside, self._awake = False, False
        self.steps: list[tuple[str, float]] = []
        self.offload_report: Report | None = None
        self.reload_report: Report | None = None

    @property
    def _trainer_sets(self) -> frozenset[str]:
        """All sets but the engine's; empty, for all, if the engine has none."""
        named = self._engine_groups
        return frozenset() if named is None else declared_sets() - {named}

    def wake_up(self, tags: Sequence[str] | None = None) -> bool | None:
        """Wake more of the engine, within the block; without an engine, do nothing. Local.

        Returns:
            Whether the whole engine is awake, if the engine reports it (vLLM); otherwise None.

        Raises:
            ReloadpgError: called outside the block; nothing was changed.
            InvalidOptionError: ``tags`` is not a sequence of tags; nothing was changed.
        """
        chosen = checked_tags(tags, "wake_up(tags")
        self._check_inside("wake_up")
        if self._engine is not None:
            self._awake = True  # after a failure, too, the engine must be put to sleep
            return self._engine.wake_up(chosen)
        return None

    @contextmanager
    def groups_live(self) -> Iterator[Report]:
        """Within this block the trainer's groups work: a weight update during a rollout.

        Collective over all ranks, within the colocated block; yields the report of the reload. The
        trainer's memory stays paused, and a memory saver does not see what the communicators
        allocate, if they connect in their first collective: do not bind them to a device.

        Raises:
            ReloadpgError: called outside the colocated block; nothing was changed.
            MemorySaverError: memory is paused and the saver has no ``disable()``; nothing was
                changed.
        """
        self._check_inside("groups_live")
        offloaded = self._block.is_offloaded  # not in a block within another
        with nullcontext() if self._saver is None else self._saver.outside_account():
            report = reload(*self._trainer_sets)
            try:
                yield report
            finally:
                if offloaded:
                    offload(*self._trainer_sets)

    def _check_inside(self, what: str) -> None:
        if not self._inside:
            raise ReloadpgError(
                f"{what}: the trainer's groups and memory are not released; nothing was changed. "
                "Call it within the colocated() block."
            )

    def restore(self) -> None:
        """Run the remaining steps of a failed exit. Idempotent.

        Collective if groups are still offloaded.

        Raises:
            ColocationError: a step failed again.
        """
        if failures := self._go_back():
            raise self._error("restore", failures)

    def __enter__(self) -> colocated:
        if self._inside:
            raise ReloadpgError(
                "colocated: entered twice; nothing was changed. Leave the block first, or call "
                "restore() if leaving it failed."
            )
        self.steps = []
        self._step("synchronize", devices.synchronize)
        # Fails on all ranks, with an error that names the remedy: nothing to undo here.
        block = Block(self._trainer_sets, self._seconds)
        self.offload_report = self._step("offload groups", partial(block.enter, self._connect))
        self._block, self._inside, self._due, step = block, True, [], ""
        try:
            for step, enter, back, leave in self._steps():
                self._due.append((back, leave))  # after a failure of enter, too
                if enter is not None:
                    self._step(step, enter)
        except BaseException as error:
            failures = self._go_back()
            if not isinstance(error, Exception):
                self._log(failures)
                raise
            raise self._error("enter", [(step, error), *failures]) from error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._block.is_void:
            self._block.close()
            return
        failures = self._go_back(error)
        if error is not None:
            self._log(failures)  # must not hide the body's exception
        elif failures:
            raise self._error("leave", failures)

    # -- steps ------------------------------------------------------------------------------

    def _steps(self) -> Iterator[tuple[str, Action | None, str, Action]]:
        """The steps after the offload, each with its step back. Those are made in reverse order."""
        yield "", None, "reload groups", self._reload
        if self._copy_back is not None:
            yield "", None, COPY, self._copy_weights_back
        yield "empty cache", self._empty_cache, "empty cache", devices.empty_cache
        if self._saver is not None:
            yield "pause saver", self._saver.pause_all, "resume saver", self._saver.resume_all
        if (named := self._engine_groups) is not None:
            come = partial(reload, named, connect=self._connect)
            go = partial(self._offload_engines, named)
            yield "reload engine's groups", come, "offload engine's groups", go
        if self._engine is not None:
            wake = None if self._wake_tags == [] else self._wake_engine
            yield "wake engine", wake, "put engine to sleep", self._sleep_engine

    def _go_back(self, raised: BaseException | None = None) -> Failures:
        """Make all steps back that are due. Return the failures; they stay due.

        Args:
            raised: what the body of the block has raised.
        """
        self._wait_s = self._block.seconds(raised)
        failures: Failures = []

        def make(step: str, action: Action) -> None:
            try:
                if self._step(step, action) is not STILL_DUE:
                    self._due.remove((step, action))
            except Exception as error:
                failures.append((step, error))

        try:
            with ExitStack() as stack:  # in reverse order, and all of them, also after an interrupt
                for back in self._due:
                    stack.callback(make, *back)
        finally:
            self._block.close()
            self._inside = self._block.is_offloaded
        return failures

    def _step(self, name: str, action: Action) -> Any:
        begun = time.perf_counter()
        try:
            return action()
        finally:
            self.steps.append((name, (time.perf_counter() - begun) * 1e3))

    def _empty_cache(self) -> None:
        if self._collect:
            gc.collect()
        devices.empty_cache()

    def _wake_engine(self) -> None:
        if self.wake_up(self._wake_tags) is False and self._wake_tags is None:
            raise ReloadpgError("wake_up() without tags left the engine partly asleep")

    def _sleep_engine(self) -> None:
        if self._awake and self._engine is not None:
            self._engine.sleep()
        self._awake = False

    def _copy_weights_back(self) -> object:
        """Copy while the reload runs, which :meth:`_reload` waits for."""
        if self._block.is_offloaded:
            begin = partial(reload, *self._block.due, wait=False, **self._options)
            self._pending = self._step("begin reload", begin)
        if self._copy_back is None or (self._saver is not None and self._saver.paused):
            return STILL_DUE  # the saver failed, so there is no memory to copy to
        self._copy_back()
        return None

    def _offload_engines(self, named: str) -> object:
        return offload(named, timeout=self._wait_s)

    @property
    def _options(self) -> dict[str, Any]:
        return {"connect": self._connect, "attempts": self._attempts, "timeout": self._wait_s}

    def _reload(self) -> None:
        # If a saver could not be resumed on a rank, this fails on all ranks.
        pending, self._pending = self._pending, None
        if pending is not None:
            self.reload_report = pending.result()
        elif self._block.is_offloaded:
            self.reload_report = reload(*self._block.due, **self._options)

    # -- messages ---------------------------------------------------------------------------

    def _error(self, doing: str, failures: Failures) -> ColocationError:
        copied = all(step != COPY for step, _ in self._due)
        told = "; ".join(f"{step}: {type(error).__name__}: {error}" for step, error in failures)
        paused = ", ".join(self._saver.paused) if self._saver is not None else ""
        failure = ColocationError(
            f"colocated: could not {doing} the block on this rank: {told}. All other steps of the "
            f"exit were run. State now: groups {status().state}, "
            f"saver {f'paused ({paused})' if paused else 'active'}, "
            f"engine {'awake' if self._awake else 'asleep'}"
            f"{'' if copied else ', weights not copied back'}. Once the cause is fixed, call "
            "restore() on the object that colocated() returned, on all ranks if their groups are "
            "not live.",
            failures,
            self,
        )
        failure.__cause__ = failures[0][1]
        return failure

    def _log(self, failures: Failures) -> None:
        if failures:
            logger.error("%s", self._error("leave", failures))


class _Engine:
    """A rollout engine with the methods of vLLM or of SGLang."""

    METHODS = (("sleep", "wake_up"), ("release_memory_occupation", "resume_memory_occupation"))

    def __init__(self, engine: Any, level: int, tags: list[str] | None) -> None:
        def has(method: str) -> bool:
            return callable(getattr(engine, method, None))

        sleep, wake = next((pair for pair in self.METHODS if all(map(has, pair))), ("", ""))
        if not sleep:
            raise InvalidOptionError(
                f"colocated(engine={engine!r}): it has neither vLLM's sleep() and wake_up() nor "
                "SGLang's release_memory_occupation() and resume_memory_occupation(); nothing was "
                "changed. Wrap it in an object with one of these pairs."
            )
        options = {"level": level} if sleep == "sleep" else {}
        where = f"colocated(engine={type(engine).__qualname__})"
        self.sleep: Callable[[], object] = partial(blocking(engine, sleep, where), **options)
        self._wake = blocking(engine, wake, where)
        if tags and not _takes_tags(getattr(engine, wake)):
            raise InvalidOptionError(
                f"colocated(engine={type(engine).__qualname__}, wake_tags={tags!r}): its {wake}() "
                "takes no tags; nothing was changed. Leave wake_tags out, or pass an engine that "
                "wakes by tag."
            )

    def wake_up(self, tags: list[str] | None) -> bool | None:
        result = self._wake(**({} if tags is None else {"tags": tags}))
        return result if isinstance(result, bool) else None


def blocking(engine: Any, name: str, where: str) -> Callable[..., Any]:
    """A method that must block. Those of a Ray actor are called by remote() and return at once.

    Args:
        where: the call of the program that has passed the engine, for messages.
    """
    method = getattr(engine, name)
    asynchronous = InvalidOptionError(
        f"{where}: {name}() is asynchronous but must block; it was not awaited. Pass an object "
        "whose methods wait for it (asyncio.run, run_until_complete, ray.get)."
    )
    if inspect.iscoroutinefunction(method) or hasattr(method, "remote"):
        raise asynchronous

    def call(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # otherwise Python also warns that it was never awaited
            raise asynchronous
        return result

    return call


def _takes_tags(method: Callable[..., Any]) -> bool:
    """Whether it takes tags: the method of SGLang's ``HttpServerEngineAdapter`` does not."""
    try:
        inspect.signature(method).bind(tags=[])
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True
