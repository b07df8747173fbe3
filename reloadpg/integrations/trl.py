"""TRL's ``GRPOTrainer``: rollouts with the groups offloaded.

With TRL's own vLLM in the trainer's processes (``use_vllm=True``, ``vllm_mode="colocate"``)::

    reloadpg.install(sets={"engine": "vllm.*"})
    trainer = GRPOTrainer(...)
    offloaded_generation(trainer, block=colocated(engine_groups="engine"))

A program's ``rollout_func`` calls its engine within :class:`reloadpg.offloaded`.

TRL (1.16) is not imported here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import wrapt

from ..errors import InvalidOptionError
from .optimizers import Rollouts

__all__ = ["OffloadedEngine", "offloaded_generation"]


def offloaded_generation(
    trainer: Any, *, block: AbstractContextManager[Any] | None = None
) -> OffloadedEngine:
    """Offload the trainer's groups while TRL's own vLLM generates in the trainer's processes.

    Local; call it alike on every rank, once the trainer is constructed. From then on each
    generation is collective over all ranks, as :func:`reloadpg.offload` and
    :func:`reloadpg.reload` are. TRL has sent the weights and gathered the prompts by then. With
    ``vllm_enable_sleep_mode`` the groups are offloaded before the engine allocates its KV cache,
    and reloaded after its ``sleep``. With PEFT and tensor parallelism TRL synchronizes the default
    group in between, so there the groups are offloaded after the KV cache is allocated. An
    exception of the engine propagates, with the groups live.

    Args:
        trainer: a trainer of TRL with ``use_vllm=True`` and ``vllm_mode="colocate"``.
        block: the context manager around a generation; by default a :class:`reloadpg.offloaded`.
            With tensor parallelism the engine's groups must be live: install with
            ``sets={"engine": "vllm.*"}`` and pass
            ``reloadpg.integrations.colocated(engine_groups="engine")``.

    Returns:
        A handle, to undo it.

    Raises:
        InvalidOptionError: the trainer has no such engine, or was given before; nothing was
            changed.
    """
    generation = getattr(trainer, "vllm_generation", None)
    llm = getattr(generation, "llm", None)
    if llm is None or isinstance(llm, _Engine):
        what = "was given before" if llm is not None else "has no engine in this process"
        raise InvalidOptionError(
            f"offloaded_generation({type(trainer).__qualname__}): it {what}; nothing was changed. "
            'Pass a trainer of TRL with use_vllm=True and vllm_mode="colocate", once.'
        )
    return OffloadedEngine(generation, block)


class OffloadedEngine(Rollouts):
    """Handle of the engine that :func:`offloaded_generation` replaced.

    Attributes:
        sleeps: whether TRL puts the engine to sleep after each generation.
        waits_for_peers: whether TRL uses the default group between ``wake_up`` and ``generate``.
    """

    def __init__(self, generation: Any, block: AbstractContextManager[Any] | None) -> None:
        super().__init__(block)
        self._generation = generation
        parallel = getattr(generation, "tensor_parallel_size", 1) > 1
        self.sleeps = bool(getattr(generation, "enable_sleep_mode", False))
        self.waits_for_peers = parallel and hasattr(generation.model, "peft_config")
        generation.llm = _Engine(generation.llm, self)

    def remove(self) -> None:
        """Restore the trainer's engine. Local, idempotent; not during a generation."""
        if isinstance(self._generation.llm, _Engine):
            self._generation.llm = self._generation.llm.__wrapped__


class _Engine(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The ``vllm.LLM`` of a trainer, as its ``VLLMGeneration`` sees it."""

    def __init__(self, llm: Any, handle: OffloadedEngine) -> None:
        super().__init__(llm)
        self._self_handle = handle

    def wake_up(self, tags: list[str] | None = None) -> Any:
        handle = self._self_handle
        if (tags is None or "kv_cache" in tags) and not handle.waits_for_peers:
            handle.begin()
        with handle.ends_on_error():
            return self.__wrapped__.wake_up(tags=tags)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        handle = self._self_handle
        handle.begin()
        with handle.ends_on_error():
            outputs = self.__wrapped__.generate(*args, **kwargs)
        if not handle.sleeps:  # otherwise the engine releases its memory first
            handle.end()
        return outputs

    def sleep(self, *args: Any, **kwargs: Any) -> Any:
        with self._self_handle.ends_on_error():
            result = self.__wrapped__.sleep(*args, **kwargs)
        self._self_handle.end()
        return result
