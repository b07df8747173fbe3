"""Lightning's ``Trainer``: a callback that runs a phase with the groups offloaded.

::

    Trainer(..., callbacks=[offloaded_phase(generate, when="train_batch_end", every=8)])

Lightning (``lightning`` or ``pytorch_lightning``) is imported when the function is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

from . import framework
from .optimizers import OffloadedPhase

__all__ = ["offloaded_phase"]

When = Literal["train_batch_end", "train_epoch_end", "validation_end"]
HOMES = ("lightning.pytorch", "pytorch_lightning")
"""The two packages of Lightning, which have separate classes."""


def offloaded_phase(
    phase: Callable[..., object] | None = None,
    *,
    when: When = "train_batch_end",
    every: int = 1,
    block: AbstractContextManager[Any] | None = None,
) -> Any:
    """Create a Lightning ``Callback`` that runs a phase while the trainer's groups are offloaded.

    Local. The callback is collective over all ranks, like :func:`reloadpg.offload` and
    :func:`reloadpg.reload`; Lightning calls it on every rank. Validation before training
    (``num_sanity_val_steps``) does not count.

    Args:
        phase: called with the trainer and the module. It must not use the groups.
        when: after a batch (with or without an optimizer step, if gradients are accumulated), a
            training epoch, or a validation.
        every, block: see :class:`~reloadpg.integrations.optimizers.OffloadedPhase`.

    Returns:
        The callback, which is an :class:`~reloadpg.integrations.optimizers.OffloadedPhase`.

    Raises:
        InvalidOptionError: an argument is invalid.
        ReloadpgError: Lightning is not installed.
    """

    def call(self: OffloadedPhase, trainer: Any, module: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self(trainer, module)

    def base() -> Any:
        """The class of the package that the program has imported, or else is installed."""
        names = sorted(HOMES, key=lambda name: name not in sys.modules)
        return framework("Lightning", "'reloadpg[lightning]'", *names).Callback

    moments = get_args(When)
    return OffloadedPhase.as_callback(
        base, when, moments, call, phase=phase, every=every, block=block
    )
