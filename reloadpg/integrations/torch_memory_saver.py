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
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import finalize, ref

from ..errors import InvalidOptionError, ReloadpgError
from ..extend import check_before, concerns, managed_groups, named_sets
from ..texts import counted
from . import framework

__all__ = ["MemorySaver", "MemorySaverError"]

logger = logging.getLogger("reloadpg")


class MemorySaverError(ReloadpgError):
    """Groups and memory saver were used in the wrong order, or the saver failed."""


def checked_tags(tags: object, where: str, least: int = 0) -> list[str] | None:
    """Tags as a list; None for all. A string is an error: it would be a sequence of letters."""
    if tags is None:
        return None
    if isinstance(tags, Sequence) and not isinstance(tags, str):
        listed = list(tags)
        if len(listed) >= least and all(isinstance(tag, str) for tag in listed):
            return listed
    raise InvalidOptionError(
        f"{where}={tags!r}): not a sequence of tags; nothing was changed. Pass a list such as "
        "['weights', 'kv_cache'], or None for all."
    )


class MemorySaver:
    """A wrapper around a memory saver that knows the state of the groups. Not thread-safe.

    ``pause`` and ``resume`` have the saver's signatures and record what is paused; all other
    attributes (``region``, ``disable``, settings) are the saver's. Calls on the saver itself are
    not recorded, so use this object everywhere. The rules, for memory of the trainer:

    =============================  =================================================================
    call                           allowed
    =============================  =================================================================
    ``pause(tag)``, ``pause()``    while no group of ``sets`` is live
    ``offload()``, ``reload()``    while none of the trainer's memory is paused, on all ranks
    ``pause()``, ``resume()``      while all memory is in one state; otherwise call them by tag
    =============================  =================================================================

    A call for memory in that state does nothing.

    Args:
        saver: an object with ``pause(tag)`` and ``resume(tag)``; None for the process's
            ``torch_memory_saver``.
        tags: the tags of the trainer's memory, in the order in which to pause them; None for all
            memory at once. Other tags may be paused and resumed at any time: a rollout engine's in
            the same process, or a buffer that is paused while groups are live, such as miles'
            ``param_buffer``. Communicators must not be created in the region of such a tag.
        sets: the sets of groups to check; None for all. Use ``"trainer"`` if a rollout engine has
            groups in the same processes.

    Attributes:
        sets: see the argument.

    Raises:
        ImportError: ``saver`` is None and torch_memory_saver is not installed.
        InvalidOptionError: ``saver`` cannot pause and resume, or ``tags`` is empty or a string.
    """

    sets: frozenset[str]

    def __init__(
        self,
        saver: Any = None,
        *,
        tags: Sequence[str] | None = None,
        sets: Iterable[str] | str | None = None,
    ) -> None:
        named = checked_tags(tags, "MemorySaver(tags", least=1)
        if saver is None:
            name = "torch_memory_saver"
            install = f"{name} (or pass an object with its methods)"
            saver = framework(name, install, name, error=ImportError).torch_memory_saver
        can = all(callable(getattr(saver, method, None)) for method in ("pause", "resume"))
        if isinstance(saver, MemorySaver) or not can:
            why = "it is a MemorySaver" if can else "it has no pause() and resume()"
            raise InvalidOptionError(
                f"MemorySaver({saver!r}): {why}; nothing was changed. Pass torch_memory_saver's "
                "object, or one with its methods."
            )
        self._saver = saver
        self._tags: tuple[str | None, ...] = (None,) if named is None else tuple(named)
        self._everything = False  # whether memory is paused, except the tags in _apart
        self._apart: set[str] = set()
        self._untracked = False
        checked = named_sets(() if sets is None else sets, "MemorySaver")
        object.__setattr__(self, "sets", checked)
        refuse = partial(_refuse, ref(self))
        self._watch = finalize(self, check_before("memory saver order", refuse, checked))
        self._watch.atexit = False

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

    def pause(self, tag: str | None = None) -> None:
        """Pause the memory of a tag, or all memory. Local; idempotent.

        Raises:
            MemorySaverError: the rules do not allow it, and nothing was changed; or the saver
                failed: the cause is chained.
        """
        self._switch(tag, "pause")

    def resume(self, tag: str | None = None) -> None:
        """Resume the memory of a tag, or all memory. Local; idempotent. Raises as :meth:`pause`."""
        self._switch(tag, "resume")

    def pause_all(self) -> None:
        """Pause the trainer's tags, as :meth:`pause` does. Local; idempotent."""
        for tag in self._tags:
            self.pause(tag)

    def resume_all(self) -> None:
        """Resume the trainer's tags, last one first. Local; idempotent."""
        for tag in reversed(self._tags):
            self.resume(tag)

    def is_paused(self, tag: str | None = None) -> bool:
        """Whether the memory of a tag is paused; for None, whether all memory is. Local."""
        if tag is None:
            return self._everything and not self._apart
        return self._everything != (tag in self._apart)

    @property
    def paused(self) -> tuple[str, ...]:
        """The trainer's paused tags; ``("*",)`` for all memory. Local."""
        if self._tags == (None,):
            return ("*",) if self._everything else tuple(sorted(self._apart))
        return tuple(tag for tag in self._tags if tag is not None and self.is_paused(tag))

    def _switch(self, tag: str | None, call: str) -> None:
        """Make a call of the saver, if the rules allow it and it has an effect."""
        pauses = call == "pause"
        if self.is_paused(tag) == pauses and not (tag is None and self._apart):
            return
        live = [g for g in managed_groups() if g.is_live and concerns(self.sets, [g.set_name])]
        if pauses and live and (tag is None or {tag, None}.intersection(self._tags)):
            hint = "; or, if no communicator has this tag, pass the trainer's other tags: "
            hint = f"{hint}MemorySaver(tags=[...])" if tag else ""
            raise MemorySaverError(
                f"pause(tag={tag!r}): {counted(len(live), 'group')} "
                f"{'is' if len(live) == 1 else 'are'} live, first {live[0]!r}; their memory would "
                "be released while they use it. Nothing was changed. Call reloadpg.offload() on "
                f"all ranks first{hint}."
            )
        if tag is None and self._apart:
            raise MemorySaverError(
                f"{call}(): the tags {sorted(self._apart)} are "
                f"{'active' if self._everything else 'paused'} but the rest is not; the saver "
                f"would end the process. Nothing was changed. Call {call}(tag) for each tag."
            )
        try:
            getattr(self._saver, call)(tag)
        except Exception as cause:
            raise MemorySaverError(
                f"{call}(tag={tag!r}): the memory saver failed: {type(cause).__name__}: {cause}. "
                f"Paused now: {', '.join(self.paused) or 'nothing'}. Call {call}_all() again; it "
                "continues where it stopped."
            ) from cause
        if tag is None:
            self._everything = pauses
        else:
            self._apart ^= {tag}

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
            with nullcontext() if before or not self.paused else self._disabled():
                yield
        finally:
            self._untracked = before

    def _disabled(self) -> AbstractContextManager[object]:
        if not hasattr(self._saver, "disable"):
            raise MemorySaverError(
                f"cannot reload groups while {', '.join(self.paused)} is paused: the memory saver "
                "has no disable(), so it would record their memory. Nothing was changed. Call "
                "resume_all() first."
            )
        stack = ExitStack()
        try:
            stack.enter_context(self._saver.disable())
        except (AssertionError, NotImplementedError) as error:
            # The saver records only allocations in its regions (hook mode "torch", XPU).
            logger.debug("memory saver: disable() is not for this mode: %s", error)
        return stack


def _refuse(saver: ref[MemorySaver], operation: str) -> None:
    """Refuse an operation on groups while memory is paused, if the saver still exists.

    It comes before a reload too, since the saver's list cannot be corrected afterwards.
    """
    there = saver()
    if there is not None and there.paused and not there._untracked:
        raise MemorySaverError(
            f"{operation} while {', '.join(there.paused)} is paused: the memory saver would "
            "end the process at its next pause or resume. Call resume_all() first; for a "
            "weight update in a rollout, use the groups_live() of colocated()."
        )
