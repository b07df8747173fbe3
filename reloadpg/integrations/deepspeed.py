"""DeepSpeed engines: a block during which the groups of the job are offloaded.

::

    with offloaded(engine):  # all ranks, between steps
        generate(prompts)

DeepSpeed creates its groups (``deepspeed.comm``, ``deepspeed.utils.groups``) with torch's
``new_group``, so they are reloadable if reloadpg was installed before ``deepspeed.initialize``.
DeepSpeed is not imported here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..errors import InvalidOptionError
from .optimizers import block_around

__all__ = ["offloaded"]


class offloaded:  # noqa: N801 - used like a function
    """Offload the groups for a block of code, and reload them afterwards, also after an exception.

    Collective, like :class:`reloadpg.offloaded`; call it between steps. Reusable. Before the
    offload, the engine's ``empty_partition_cache()`` waits for the parameters that ZeRO-3 is
    prefetching and releases the gathered ones, whose handles belong to the communicators to be
    released. The next forward pass gathers them again, bit for bit the same.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned; of any ZeRO stage.
        block: another context manager than :class:`reloadpg.offloaded` for the groups.

    Raises:
        InvalidOptionError: not a DeepSpeed engine; nothing was changed.
    """

    def __init__(self, engine: Any, *, block: AbstractContextManager[Any] | None = None) -> None:
        if not callable(getattr(engine, "empty_partition_cache", None)):
            raise InvalidOptionError(
                f"offloaded({type(engine).__qualname__}): it has no empty_partition_cache(); "
                "nothing was changed. Pass the engine that deepspeed.initialize() returned."
            )
        self._engine, self._block = engine, block_around(block)

    def __enter__(self) -> Any:
        self._engine.empty_partition_cache()
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._block.__exit__(*error)
