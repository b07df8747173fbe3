"""Run a phase with the groups offloaded after every n-th optimizer step, with any trainer.

::

    every(8, generate)  # once, before or after the optimizers are created

It needs no hook of the training framework. If a trainer waits for its gradients, no collective is
in flight after a step. Do not assume this for an optimizer that starts collectives within its
``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import offloaded
from ..errors import InvalidOptionError
from ..settings import as_integer

__all__ = ["Every", "OffloadedPhase", "Rollouts", "every"]


def block_around(block: AbstractContextManager[Any] | None) -> AbstractContextManager[Any]:
    """The block of a hook: by default a :class:`reloadpg.offloaded`. Refuses other objects."""
    if block is not None and not hasattr(block, "__enter__"):
        raise InvalidOptionError(
            f"block={block!r}: not a context manager; nothing was registered. Pass "
            "reloadpg.offloaded() or the result of colocated()."
        )
    return offloaded() if block is None else block


class Rollouts:
    """Enters and leaves a block in methods of an engine; base of handles.

    Attributes:
        cycles: number of rollouts after which the groups were reloaded.
    """

    def __init__(self, block: AbstractContextManager[Any] | None) -> None:
        self.cycles = 0
        self._block, self._inside = block_around(block), False

    def begin(self) -> None:
        """Offload the groups, if they are live. Collective over all ranks."""
        if not self._inside:
            self._block.__enter__()
            self._inside = True

    def end(self, error: BaseException | None = None) -> None:
        """Reload the groups, if :meth:`begin` offloaded them. Collective over all ranks.

        After ``error``, which will propagate, a failed reload is only logged.
        """
        if self._inside:
            self._inside = False
            self._block.__exit__(type(error) if error else None, error, None)
            self.cycles += 1

    @contextmanager
    def ends_on_error(self) -> Iterator[None]:
        """If the body raises, reload the groups before the exception propagates."""
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise


class OffloadedPhase:
    """Run a phase within an offloaded block at every n-th call.

    Args:
        phase: the function to run while the groups are offloaded, such as a rollout. It must not
            use the groups. None only offloads and reloads.
        every: run it at each n-th call.
        block: the context manager to run it in; by default a :class:`reloadpg.offloaded`, or for
            example a :class:`reloadpg.integrations.colocated`. It is entered each time.

    Attributes:
        calls: number of calls.
        cycles: number of completed phases, after which the groups were reloaded.

    Raises:
        InvalidOptionError: an argument is invalid.
    """

    def __init__(
        self,
        phase: Callable[..., object] | None = None,
        *,
        every: int = 1,
        block: AbstractContextManager[Any] | None = None,
    ) -> None:
        interval = as_integer(every)
        if interval is None or interval < 1:
            raise InvalidOptionError(
                f"every={every!r}: not a positive whole number; nothing was registered. Pass 1 to "
                "run the phase each time."
            )
        if phase is not None and not callable(phase):
            raise InvalidOptionError(
                f"phase={phase!r}: not callable; nothing was registered. Pass a function."
            )
        self._phase, self._every, self._block = phase, interval, block_around(block)
        self.calls = 0
        self.cycles = 0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Count the call, and at each n-th call run the phase with these arguments.

        An n-th call is collective over all ranks of the job, so all ranks must make the same number
        of calls. An exception of the phase propagates after the groups are reloaded.
        """
        self.calls += 1
        if self.calls % self._every:
            return
        with self._block:
            if self._phase is not None:
                self._phase(*args, **kwargs)
        self.cycles += 1

    @classmethod
    def as_callback(
        cls,
        base: Callable[[], Any],
        when: str,
        moments: Sequence[str],
        hook: Callable[..., object],
        **options: Any,
    ) -> Any:
        """Create such a phase as a trainer's callback, of the class that ``base`` imports.

        Its method for the moment ``when`` is ``hook``, with the callback as the first argument.
        """
        if when not in moments:
            raise InvalidOptionError(
                f"offloaded_phase(when={when!r}): not one of {', '.join(moments)}; nothing was "
                "created."
            )
        kind = type("OffloadedPhaseCallback", (cls, base()), {f"on_{when}": hook})
        return kind(**options)


class Every(OffloadedPhase):
    """Handle of a hook of :func:`every`; as a context manager it removes the hook at the end."""

    remove: Callable[[], None]
    """Removes the hook. Local; idempotent."""

    def __enter__(self) -> Every:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.remove()


def every(
    steps: int,
    phase: Callable[[], object] | None = None,
    *,
    optimizer: Optimizer | None = None,
    block: AbstractContextManager[Any] | None = None,
) -> Every:
    """Run a phase with the groups offloaded after every n-th step of an optimizer.

    Local; call it on every rank. Each n-th step then ends with an offload, the phase and a reload,
    which are collective: the optimizer must make the same number of steps on all ranks. Not for
    compiled steps or CUDA graphs, since hooks (``Optimizer.register_step_post_hook``) run in
    Python.

    Args:
        steps: number of steps between two phases.
        optimizer: the optimizer whose steps count. None means the first optimizer of the process
            that steps from now on, while it exists; then the next one. Name it if there are
            several, unless each rank steps them in the same order.
        phase, block: see :class:`OffloadedPhase`.

    Returns:
        A handle that can remove the hook.

    Raises:
        InvalidOptionError: an argument is invalid; nothing was registered.
    """
    turn = Every(phase, every=steps, block=block)
    counted: list[ref[Optimizer]] = []

    def after_step(stepped: Optimizer, *_: Any) -> None:
        first = counted[0]() if counted else None
        if first is None:
            counted[:] = [ref(stepped)]
        if first in (None, stepped):
            turn()

    register = register_optimizer_step_post_hook
    if optimizer is not None:
        register = optimizer.register_step_post_hook
    turn.remove = register(after_step).remove
    return turn
