"""transformers' ``Trainer``: a callback that runs a phase with the groups offloaded.

::

    Trainer(..., callbacks=[offloaded_phase(generate, when="step_end", every=8)])

The trainer calls it between steps, with nothing in flight. transformers is imported when the
function is called; accelerate and the trainer's own backends need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

from . import framework
from .optimizers import OffloadedPhase

__all__ = ["offloaded_phase"]

When = Literal["step_end", "epoch_end", "evaluate", "save"]


def offloaded_phase(
    phase: Callable[..., object] | None = None,
    *,
    when: When = "step_end",
    every: int = 1,
    block: AbstractContextManager[Any] | None = None,
) -> Any:
    """Create a ``TrainerCallback`` that runs a phase while the trainer's groups are offloaded.

    Local. The callback is collective over all ranks, like :func:`reloadpg.offload` and
    :func:`reloadpg.reload`; the trainer calls it on every rank. TRL's trainers accept it, too.

    Args:
        phase: called with the trainer's callback arguments: ``phase(args, state, control,
            **kwargs)``; the model is in ``kwargs["model"]``. It must not use the groups.
        when: after an optimizer step, an epoch, an evaluation, or a checkpoint was saved.
        every, block: see :class:`~reloadpg.integrations.optimizers.OffloadedPhase`.

    Returns:
        The callback, which is an :class:`~reloadpg.integrations.optimizers.OffloadedPhase`.

    Raises:
        InvalidOptionError: an argument is invalid.
        ReloadpgError: transformers is not installed.
    """

    def base() -> Any:
        package = "transformers"
        return framework(package, "'reloadpg[transformers]'", package).TrainerCallback

    moments, hook = get_args(When), OffloadedPhase.__call__
    return OffloadedPhase.as_callback(
        base, when, moments, hook, phase=phase, every=every, block=block
    )
