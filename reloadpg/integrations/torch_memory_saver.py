"""The order between a memory saver and the groups: groups first, then pause; resume, then reload.

A memory saver such as ``torch_memory_saver`` takes device memory away from under allocations and
keeps an account of them. Preloaded, it sees the communicators' allocations too. Releasing groups
while they are paused frees memory that is not there; building groups while others are paused puts
live allocations among paused ones. Its next ``pause`` or ``resume`` then ends the process
("invalid argument", "Cannot resume allocation that is not paused"; slime#1690, #1786, #1895).

:class:`MemorySaver` refuses a wrong order; :func:`~reloadpg.integrations.colocated` keeps the
right one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from weakref import finalize, ref

from ..errors import InvalidOptionError, ReloadpgError, counted
from ..groups.registry import Callback, registry
from ..groups.sets import Chosen
from ..lifecycle import memory
from ..lifecycle.callbacks import register

__all__ = ["MemorySaver", "MemorySaverError"]

logger = logging.getLogger("reloadpg")


class MemorySaverError(ReloadpgError):
    """Groups and memory saver were asked for in the wrong order, or the saver failed."""


class MemorySaver:
    """A memory saver that knows about the groups, for use in place of the saver's own object.

    ``pause`` and ``resume`` have its signatures and keep account of what is paused; everything
    else (``region``, ``disable``, settings) is the saver's own. While something of the trainer is
    paused, :func:`reloadpg.offload` and :func:`reloadpg.reload` fail on all ranks. What is paused
    directly on the saver's own object is not seen: use this one everywhere.

    Not thread-safe: one thread drives the lifecycle.

    Args:
        saver: an object with ``pause(tag)`` and ``resume(tag)``; None for the process's
            ``torch_memory_saver``.
        tags: the tags that the trainer's memory is under, in the order in which to pause them;
            None for all memory at once. Other tags (a rollout engine's in the same process) may
            be paused and resumed at any time.
        sets: the sets of groups whose memory it watches; None for all. Where a rollout engine has
            groups in the same processes, ``"trainer"``.

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
        sets: Sequence[str] | str | Chosen | None = None,
    ) -> None:
        if isinstance(tags, str) or (tags is not None and not tags):
            raise InvalidOptionError(
                f"MemorySaver(tags={tags!r}): not a sequence of tags; nothing was changed. Pass "
                'for example ["default"], or None for all memory.'
            )
        if isinstance(saver, MemorySaver):
            raise InvalidOptionError(
                "MemorySaver(saver): that is a MemorySaver already; nothing was changed. Use it "
                "as it is."
            )
        self._saver = _torch_memory_saver() if saver is None else saver
        for method in ("pause", "resume"):
            if not callable(getattr(self._saver, method, None)):
                raise InvalidOptionError(
                    f"MemorySaver({self._saver!r}): it has no {method}(); nothing was changed. "
                    "Pass torch_memory_saver's object or one with its methods."
                )
        self._tags: tuple[str | None, ...] = (None,) if tags is None else tuple(tags)
        chosen = sets
        if not isinstance(chosen, Chosen):
            named = [chosen] if isinstance(chosen, str) else chosen or ()
            chosen = Chosen.of(named, "MemorySaver")
        object.__setattr__(self, "sets", chosen)
        self._everything = False
        self._apart: set[str] = set()  # tags in the other state than the rest
        self._untracked = False
        self._watch = finalize(self, _end_watch, _watch(ref(self), chosen))
        self._watch.atexit = False

    sets: Chosen

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
        """Watch the lifecycle no more. Local, idempotent; the saver stays as it is."""
        self._watch()

    # -- the saver's own two calls ------------------------------------------------------------

    def pause(self, tag: str | None = None) -> None:
        """Take the memory under a tag away, or all of it. Local; idempotent.

        Raises:
            MemorySaverError: groups are live and the tag is the trainer's, or all memory is asked
                for and some of it is paused already; nothing was changed.
        """
        if self.is_paused(tag):
            return
        live = [g for g in registry.managed() if g.is_live and g.set_name in self.sets]
        if live and (tag is None or self._tags == (None,) or tag in self._tags):
            raise MemorySaverError(
                f"pause(tag={tag!r}): {counted(len(live), 'group')} "
                f"{'is' if len(live) == 1 else 'are'} live, first {live[0]!r}; their "
                "memory would be taken from under them. Nothing was changed. Call "
                "reloadpg.offload() on all ranks first."
            )
        self._switch(tag, self._saver.pause, "pause")

    def resume(self, tag: str | None = None) -> None:
        """Give the memory under a tag back, or all of it. Local; idempotent.

        Raises:
            MemorySaverError: all memory is asked for and only some of it is paused; nothing was
                changed.
        """
        if self._everything or self._apart if tag is None else self.is_paused(tag):
            self._switch(tag, self._saver.resume, "resume")

    def is_paused(self, tag: str | None = None) -> bool:
        """Whether the memory under a tag is paused; for None, whether all of it is. Local."""
        if tag is None:
            return self._everything and not self._apart
        return self._everything != (tag in self._apart)

    @property
    def paused(self) -> tuple[str, ...]:
        """The trainer's tags that are paused, ``("*",)`` for all memory. Local."""
        if self._tags == (None,):
            if self._everything:
                return ("*",)
            return tuple(sorted(self._apart))
        return tuple(tag for tag in self._tags if tag is not None and self.is_paused(tag))

    def _switch(self, tag: str | None, action: Any, name: str) -> None:
        if tag is None and self._apart:
            raise MemorySaverError(
                f"{name}(): the tags {sorted(self._apart)} are "
                f"{'active' if self._everything else 'paused'} and the rest is not; the saver "
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
            MemorySaverError: as :meth:`pause`, or the saver failed; the cause is chained.
        """
        self._each(self._tags, self.pause, "pause")

    def resume_all(self) -> None:
        """Resume each of the trainer's tags that is paused, last one first. Local; idempotent.

        Raises:
            MemorySaverError: as :meth:`resume`, or the saver failed; the cause is chained.
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
                    f"{cause}. Paused now: {', '.join(self.paused) or 'nothing'}. Once it can, "
                    "call pause_all() or resume_all() again; each goes on where it stopped."
                ) from cause

    @contextmanager
    def outside_account(self) -> Iterator[None]:
        """Within this block groups may be reloaded although memory is paused.

        It runs under the saver's ``disable()``, so that what communicators allocate stays out of
        its account. That switch is the calling thread's.

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
        disable = getattr(self._saver, "disable", None)
        if disable is None:
            raise MemorySaverError(
                f"cannot reload groups while {', '.join(self.paused)} is paused: the memory saver "
                "has no disable() to keep them out of its account. Nothing was changed. Call "
                "resume_all() first."
            )
        try:
            stack.enter_context(disable())
        except (AssertionError, NotImplementedError) as error:
            # It watches allocations in its regions only (hook mode "torch", XPU), so that there
            # is nothing to keep out.
            logger.debug("memory saver: disable() is not for this mode: %s", error)

    def _refuse(self, operation: str) -> None:
        if self.paused and not self._untracked:
            raise MemorySaverError(
                f"{operation} while {', '.join(self.paused)} is paused would leave the memory "
                "saver with a wrong account and end the process at its next pause or resume. Call "
                "resume_all() first; for a weight update in a rollout, the groups_live() of "
                "colocated()."
            )


def _watch(saver: ref[MemorySaver], sets: Chosen) -> list[Callable[[], None]]:
    """Let offload and reload ask a saver that is still there; the functions that end it.

    Asked before the reload: an account that is wrong cannot be corrected afterwards.
    """

    def asking(operation: str) -> Callable[[], None]:
        def memory_saver_order() -> None:
            there = saver()
            if there is not None:
                there._refuse(operation)

        return memory_saver_order

    def paused() -> str | None:
        there = saver()
        if there is None or not there.paused:
            return None
        return f"the memory saver has {', '.join(there.paused)} paused"

    def watch(callbacks: list[Callback], operation: str) -> Callable[[], None]:
        entry = Callback("memory saver order", asking(operation), sets)
        return register(callbacks, entry)

    return [
        watch(registry.callbacks.offload, "offload"),
        watch(registry.callbacks.before_reload, "reload"),
        memory.add_check(paused),
    ]


def _end_watch(removals: list[Callable[[], None]]) -> None:
    for remove in removals:
        remove()


def _torch_memory_saver() -> Any:
    try:
        return import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise ImportError(
            "MemorySaver() needs torch_memory_saver; nothing was changed. Install it with: "
            "pip install torch_memory_saver, or pass an object with its methods."
        ) from error
