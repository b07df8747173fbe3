"""Order of a memory saver and the groups: offload before pause, resume before reload.

A memory saver such as ``torch_memory_saver`` unmaps the device memory of allocations and keeps a
list of them; if it is preloaded, also of the communicators'. If groups are released or rebuilt
while memory is paused, its next ``pause`` or ``resume`` ends the process ("invalid argument",
"Cannot resume allocation that is not paused"; slime#1690, #1786, #1895).

:class:`MemorySaver` refuses a wrong order; :class:`~reloadpg.integrations.colocated` keeps the
right one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import finalize, ref

from ..errors import InvalidOptionError, ReloadpgError
from ..extend import Callback, callbacks, concerns, managed_groups, named_sets, register
from ..texts import counted
from . import framework

__all__ = ["MemorySaver", "MemorySaverError"]

logger = logging.getLogger("reloadpg")


class MemorySaverError(ReloadpgError):
    """Groups and memory saver were used in the wrong order, or the saver failed."""


class MemorySaver:
    """A wrapper around a memory saver that knows the state of the groups. Not thread-safe.

    ``pause`` and ``resume`` have the saver's signatures and record what is paused; all other
    attributes (``region``, ``disable``, settings) are the saver's. While memory of the trainer is
    paused, :func:`reloadpg.offload` and :func:`reloadpg.reload` fail on all ranks. Calls on the
    saver itself are not recorded, so use this object everywhere.

    Args:
        saver: an object with ``pause(tag)`` and ``resume(tag)``; None for the process's
            ``torch_memory_saver``.
        tags: the tags of the trainer's memory, in the order in which to pause them; None for all
            memory at once. Other tags (of a rollout engine in the same process) may be paused and
            resumed at any time.
        sets: the sets of groups to check; None for all. Use ``"trainer"`` if a rollout engine has
            groups in the same processes.

    Attributes:
        sets: see the argument.

    Raises:
        ImportError: ``saver`` is None and torch_memory_saver is not installed.
        InvalidOptionError: ``saver`` cannot pause and resume, or ``tags`` is empty or a string.
    """

    def __init__(
        self,
        saver: Any = None,
        *,
        tags: Sequence[str] | None = None,
        sets: Iterable[str] | str | None = None,
    ) -> None:
        if isinstance(tags, str) or (tags is not None and not tags):
            raise InvalidOptionError(
                f"MemorySaver(tags={tags!r}): not a sequence of tags; nothing was changed. Pass "
                'for example ["default"], or None for all memory.'
            )
        if isinstance(saver, MemorySaver):
            raise InvalidOptionError(
                "MemorySaver(saver): already a MemorySaver; nothing was changed. Use it directly."
            )
        if saver is None:
            module = framework(
                "torch_memory_saver",
                "torch_memory_saver (or pass an object with its methods)",
                "torch_memory_saver",
                error=ImportError,
            )
            saver = module.torch_memory_saver
        self._saver = saver
        for method in ("pause", "resume"):
            if not callable(getattr(self._saver, method, None)):
                raise InvalidOptionError(
                    f"MemorySaver({self._saver!r}): it has no {method}(); nothing was changed. "
                    "Pass torch_memory_saver's object, or one with its methods."
                )
        self._tags: tuple[str | None, ...] = (None,) if tags is None else tuple(tags)
        named = named_sets(() if sets is None else sets, "MemorySaver")
        object.__setattr__(self, "sets", named)
        self._everything = False
        self._apart: set[str] = set()  # tags whose state differs from the rest
        self._untracked = False
        self._watch = finalize(self, _watch(ref(self), named).close)
        self._watch.atexit = False

    sets: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._saver, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:  # hook_mode, memory_margin_bytes, ...
            setattr(self._saver, name, value)

    def close(self) -> None:
        """Stop checking the lifecycle. Local, idempotent; the saver is unchanged."""
        self._watch()

    # -- the saver's methods ------------------------------------------------------------------

    def pause(self, tag: str | None = None) -> None:
        """Pause the memory of a tag, or all memory. Local; idempotent.

        Raises:
            MemorySaverError: groups are live and the tag is the trainer's, or all memory was
                requested and some of it is already paused; nothing was changed.
        """
        if self.is_paused(tag):
            return
        live = [g for g in managed_groups() if g.is_live and concerns(self.sets, [g.set_name])]
        if live and (tag is None or self._tags == (None,) or tag in self._tags):
            raise MemorySaverError(
                f"pause(tag={tag!r}): {counted(len(live), 'group')} "
                f"{'is' if len(live) == 1 else 'are'} live, first {live[0]!r}; their "
                "memory would be released while they use it. Nothing was changed. Call "
                "reloadpg.offload() on all ranks first."
            )
        self._switch(tag, self._saver.pause, "pause")

    def resume(self, tag: str | None = None) -> None:
        """Resume the memory of a tag, or all memory. Local; idempotent.

        Raises:
            MemorySaverError: all memory was requested and only some of it is paused; nothing was
                changed.
        """
        if self._everything or self._apart if tag is None else self.is_paused(tag):
            self._switch(tag, self._saver.resume, "resume")

    def is_paused(self, tag: str | None = None) -> bool:
        """Whether the memory of a tag is paused; for None, whether all memory is. Local."""
        if tag is None:
            return self._everything and not self._apart
        return self._everything != (tag in self._apart)

    @property
    def paused(self) -> tuple[str, ...]:
        """The trainer's paused tags; ``("*",)`` for all memory. Local."""
        if self._tags == (None,):
            if self._everything:
                return ("*",)
            return tuple(sorted(self._apart))
        return tuple(tag for tag in self._tags if tag is not None and self.is_paused(tag))

    def _switch(self, tag: str | None, action: Any, name: str) -> None:
        if tag is None and self._apart:
            raise MemorySaverError(
                f"{name}(): the tags {sorted(self._apart)} are "
                f"{'active' if self._everything else 'paused'} but the rest is not; the saver "
                f"would end the process. Nothing was changed. Call {name}(tag) for each tag."
            )
        action(tag)
        if tag is None:
            self._everything = not self._everything
        else:
            self._apart ^= {tag}

    # -- the trainer's tags ---------------------------------------------------------------------

    def pause_all(self) -> None:
        """Pause each of the trainer's tags that is not paused yet. Local; idempotent.

        Raises:
            MemorySaverError: see :meth:`pause`, or the saver failed; the cause is chained.
        """
        self._each(self._tags, self.pause, "pause")

    def resume_all(self) -> None:
        """Resume each of the trainer's tags that is paused, last one first. Local; idempotent.

        Raises:
            MemorySaverError: see :meth:`resume`, or the saver failed; the cause is chained.
        """
        self._each(tuple(reversed(self._tags)), self.resume, "resume")

    def _each(self, tags: tuple[str | None, ...], action: Any, name: str) -> None:
        for tag in tags:
            try:
                action(tag)
            except MemorySaverError:
                raise
            except Exception as cause:
                raise MemorySaverError(
                    f"{name}(tag={tag!r}): the memory saver failed: {type(cause).__name__}: "
                    f"{cause}. Paused now: {', '.join(self.paused) or 'nothing'}. Call "
                    f"{name}_all() again; it continues where it stopped."
                ) from cause

    @contextmanager
    def outside_account(self) -> Iterator[None]:
        """Within this block groups may be reloaded although memory is paused.

        It runs under the saver's ``disable()``, a switch of the calling thread, so the saver does
        not record what communicators allocate.

        Raises:
            MemorySaverError: memory is paused and the saver has no ``disable()``; nothing was
                changed.
        """
        before, self._untracked = self._untracked, True
        try:
            with ExitStack() as stack:
                if self.paused and not before:
                    self._disable(stack)
                yield
        finally:
            self._untracked = before

    def _disable(self, stack: ExitStack) -> None:
        if not hasattr(self._saver, "disable"):
            raise MemorySaverError(
                f"cannot reload groups while {', '.join(self.paused)} is paused: the memory saver "
                "has no disable(), so it would record their memory. Nothing was changed. Call "
                "resume_all() first."
            )
        try:
            stack.enter_context(self._saver.disable())
        except (AssertionError, NotImplementedError) as error:
            # The saver records only allocations in its regions (hook mode "torch", XPU).
            logger.debug("memory saver: disable() is not for this mode: %s", error)

    def _refuse(self, operation: str) -> None:
        if self.paused and not self._untracked:
            raise MemorySaverError(
                f"{operation} while {', '.join(self.paused)} is paused: the memory saver would end "
                "the process at its next pause or resume. Call resume_all() first; for a weight "
                "update in a rollout, use the groups_live() of colocated()."
            )


def _watch(saver: ref[MemorySaver], sets: frozenset[str]) -> ExitStack:
    """Make offload and reload check a saver, if it still exists; closing the result undoes this.

    The check comes before the reload, since the saver's list cannot be corrected afterwards.
    """

    def refuse(operation: str) -> None:
        there = saver()
        if there is not None:
            there._refuse(operation)

    name = "memory saver order"
    removals = ExitStack()
    for at, operation in ((callbacks.offload, "offload"), (callbacks.before_reload, "reload")):
        removals.callback(register(at, Callback(name, partial(refuse, operation), sets)))
    return removals
