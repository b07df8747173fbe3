"""DeepSpeed engines: a block within which the groups of the job are offloaded.

::

    with offloaded(engine):  # all ranks, between steps
        generate(prompts)

DeepSpeed's own groups (``deepspeed.comm``, ``deepspeed.utils.groups``) are made by torch's
``new_group``, so they are reloadable if reloadpg was installed before ``deepspeed.initialize``.
Nothing of DeepSpeed (0.19) is imported here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from ..errors import InvalidOptionError
from ..lifecycle.block import offloaded as offloaded_groups

__all__ = ["offloaded"]


class offloaded:  # noqa: N801 - used like a function
    """Offload the groups for a block of code, and reload them afterwards, whatever happens.

    Collective, like :class:`reloadpg.offloaded`; call it between steps. Before the offload the
    engine's ``empty_partition_cache()`` waits for the parameters that ZeRO-3 is prefetching and
    gives the gathered ones back: their handles belong to communicators that are about to go. The
    next forward pass gathers them again, bit for bit the same. It may be entered again and again.

    Args:
        engine: what ``deepspeed.initialize`` returned first; of any ZeRO stage.
        block: the context manager for the groups; by default a :class:`reloadpg.offloaded`, else
            for example what :func:`reloadpg.integrations.colocated` returned.

    Raises:
        InvalidOptionError: this is no engine of DeepSpeed; nothing was changed.
    """

    def __init__(self, engine: Any, *, block: AbstractContextManager[Any] | None = None) -> None:
        if not callable(getattr(engine, "empty_partition_cache", None)):
            raise InvalidOptionError(
                f"offloaded({type(engine).__qualname__}): it has no empty_partition_cache(); "
                "nothing was changed. Pass the engine that deepspeed.initialize() returned."
            )
        self._engine = engine
        self._block: AbstractContextManager[Any] = offloaded_groups() if block is None else block

    def __enter__(self) -> Any:
        self._engine.empty_partition_cache()
        return self._block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)
