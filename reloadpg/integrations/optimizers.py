"""Run something with the groups offloaded after every n-th optimizer step, whatever the trainer.

::

    every(8, generate)  # once, before or after the optimizers are made

It uses ``torch.optim.Optimizer.register_step_post_hook``, so it needs no hook of the framework that
trains; ``transformers``, ``lightning`` and others have hooks of their own beside this module, at
moments that they name. No collective is in flight after a step of a trainer that waits for its
gradients. Do not assume that for an optimizer that starts collectives within its own ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import InvalidOptionError
from ..lifecycle.block import offloaded

__all__ = ["Every", "OffloadedPhase", "every"]


class OffloadedPhase:
    """Run a phase within an offloaded block, at every n-th time it is called.

    Args:
        phase: what to run while the groups are offloaded: a rollout, an evaluation by another
            engine. It must not use the groups. None: nothing, the groups only go and come back.
        every: run it at each n-th call.
        block: the context manager to run it in; by default a :class:`reloadpg.offloaded`, else for
            example what :func:`reloadpg.integrations.colocated` returned. It is entered anew each
            time.

    Attributes:
        calls: how often it was called.
        cycles: how often the phase was run and the groups came back.

    Raises:
        InvalidOptionError: an argument cannot be used.
    """

    def __init__(
        self,
        phase: Callable[..., object] | None = None,
        *,
        every: int = 1,
        block: AbstractContextManager[Any] | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidOptionError(
                f"every={every!r}: not a positive whole number; nothing was registered. Pass 1 to "
                "run the phase each time."
            )
        if phase is not None and not callable(phase):
            raise InvalidOptionError(
                f"phase={phase!r}: it cannot be called; nothing was registered. Pass a function."
            )
        if block is not None and not hasattr(block, "__enter__"):
            raise InvalidOptionError(
                f"block={block!r}: not a context manager; nothing was registered. Pass "
                "reloadpg.offloaded() or what colocated() returned."
            )
        self._phase, self._every = phase, every
        self._block: AbstractContextManager[Any] = offloaded() if block is None else block
        self.calls = 0
        self.cycles = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Count, and run the phase with these arguments if it is its turn.

        Collective over all ranks of the job where it is, as :func:`reloadpg.offload` and
        :func:`reloadpg.reload` are: all ranks must call it equally often. What the phase raises
        goes on, after the groups have come back.
        """
        self.calls += 1
        if self.calls % self._every:
            return
        with self._block:
            if self._phase is not None:
                self._phase(*args, **kwargs)
        self.cycles += 1

    def as_callback(
        self,
        base: Callable[[], Any],
        when: str,
        moments: Sequence[str],
        hook: Callable[..., object],
    ) -> Any:
        """Make a callback for a trainer that runs this at one of the moments it names. Local.

        Args:
            base: gives the trainer's class of callbacks; imports it if need be.
            when: the moment; the callback's method is named ``on_`` and it.
            moments: those that there are.
            hook: what that method does with what the trainer gives it.

        Returns:
            The callback, with the attributes ``calls`` and ``cycles`` of this.

        Raises:
            InvalidOptionError: there is no such moment; nothing was made.
        """
        if when not in moments:
            raise InvalidOptionError(
                f"offloaded_phase(when={when!r}): not one of {', '.join(moments)}; nothing was "
                "made."
            )
        shown = {
            name: property(lambda _, name=name: getattr(self, name))  # type: ignore[misc]
            for name in ("calls", "cycles")
        }
        method = {f"on_{when}": lambda _, *args, **kwargs: hook(*args, **kwargs)}
        return type("OffloadedPhaseCallback", (base(),), {**shown, **method})()


class Every:
    """Handle on what :func:`every` registered; as a context manager it removes it at the end."""

    def __init__(self, phase: OffloadedPhase, remove: Callable[[], None]) -> None:
        self._phase, self._remove = phase, remove

    @property
    def cycles(self) -> int:
        """How often the groups were offloaded and came back."""
        return self._phase.cycles

    def remove(self) -> None:
        """Run it no more. Local; idempotent."""
        self._remove()

    def __enter__(self) -> Every:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def every(
    steps: int,
    phase: Callable[[], object] | None = None,
    *,
    optimizer: Optimizer | None = None,
    block: AbstractContextManager[Any] | None = None,
) -> Every:
    """Run a phase with the groups offloaded after every n-th step of an optimizer.

    Local; call it alike on every rank. From then on each n-th step ends with an offload, the phase
    and a reload: collective over all ranks, so that optimizer must step equally often on all of
    them. Not for a step that is compiled or captured in a graph: hooks run in Python.

    Args:
        steps: after how many steps, each time.
        phase: what to run meanwhile; None for nothing.
        optimizer: whose steps count. None: those of the first optimizer of the process that
            steps from now on, as long as it lives; then the next one. Name it where several
            optimizers step, unless each rank steps them in the same order.
        block: as for :class:`OffloadedPhase`.

    Returns:
        A handle, to remove it again.

    Raises:
        InvalidOptionError: an argument cannot be used; nothing was registered.
    """
    turn = OffloadedPhase(phase, every=steps, block=block)
    if optimizer is not None:
        return Every(turn, optimizer.register_step_post_hook(lambda *_: turn()).remove)
    counted: list[ref[Optimizer]] = []
    hook = partial(_after_any_step, turn, counted)
    return Every(turn, register_optimizer_step_post_hook(hook).remove)


def _after_any_step(
    turn: OffloadedPhase, counted: list[ref[Optimizer]], optimizer: Optimizer, *_: Any
) -> None:
    first = counted[0]() if counted else None
    if first is None:
        counted[:] = [ref(optimizer)]
    elif first is not optimizer:
        return
    turn()
