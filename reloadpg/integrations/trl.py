"""TRL's ``GRPOTrainer``: rollouts with the groups offloaded.

::

    GRPOTrainer(..., rollout_func=offloaded_rollout(rollout))

TRL (1.16) calls ``rollout_func(prompts, trainer)`` on every rank whenever it needs completions.
Weights for the engine must be gathered before the groups are offloaded: by TRL with ``use_vllm``,
or by ``prepare``. Between steps, the callback of ``reloadpg.integrations.transformers`` also works
in TRL's trainers. TRL is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..errors import InvalidOptionError
from ..lifecycle.block import offloaded

__all__ = ["offloaded_rollout"]


def offloaded_rollout(
    rollout: Callable[[Any, Any], Any],
    *,
    prepare: Callable[[Any], object] | None = None,
    block: AbstractContextManager[Any] | None = None,
) -> Callable[[Any, Any], Any]:
    """Wrap a ``rollout_func`` of TRL, so that it runs while the trainer's groups are offloaded.

    Local. The returned function is collective over all ranks, like :func:`reloadpg.offload` and
    :func:`reloadpg.reload`. An exception of the rollout propagates after the groups are reloaded.

    Args:
        rollout: ``rollout(prompts, trainer)``. If its engine uses groups of this process (tensor
            parallelism in ``vllm_mode="colocate"``), install with ``sets={"engine": "vllm.*"}`` and
            pass ``block=reloadpg.swapped(out="trainer", into="engine")``.
        prepare: called with the trainer while the groups are still live, to gather parameters and
            pass them to the engine.
        block: the context manager around the rollout; by default a :class:`reloadpg.offloaded`,
            or for example the result of :func:`reloadpg.integrations.colocated`.

    Raises:
        InvalidOptionError: an argument is invalid.
    """
    for name, value in (("rollout", rollout), ("prepare", prepare)):
        if not callable(value) and (name == "rollout" or value is not None):
            raise InvalidOptionError(
                f"offloaded_rollout({name}={value!r}): not callable; nothing was wrapped. "
                "Pass a function."
            )
    around: AbstractContextManager[Any] = offloaded() if block is None else block

    def rollout_func(prompts: Any, trainer: Any) -> Any:
        if prepare is not None:
            prepare(trainer)
        with around:
            return rollout(prompts, trainer)

    return rollout_func
