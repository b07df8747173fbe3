"""verl's hybrid engine: offloads the groups of a worker while its rollout engine generates.

::

    offloaded_rollouts()  # in each worker process, before its model is built

Based on ``ActorRolloutRefWorker.update_weights`` of ``verl/workers/engine_workers.py`` (0.9.1).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

import wrapt

from ..errors import InvalidOptionError, ReloadpgError
from .optimizers import Rollouts

__all__ = ["OffloadedRollouts", "offloaded_rollouts"]

REMOTE = "attrs_3141562937"
"""Attribute of a method that the driver can call (``verl/single_controller/base/decorator.py``)."""

MARK = "_reloadpg_rollouts"
"""Attribute of a method that was replaced."""

DURING_ROLLOUTS = (
    "start_profile",
    "stop_profile",
    "step_profile",
    "_query_dispatch_info",
    "_query_collect_info",
)
"""Methods on all ranks that the driver also calls while the engine generates; none uses groups."""


def offloaded_rollouts(
    *classes: type, block: AbstractContextManager[Any] | None = None
) -> OffloadedRollouts:
    """Make verl's workers offload the groups of their process during each rollout.

    Local; call it once in every worker process. The groups are offloaded when the engine has its
    weights, before it allocates its KV cache. They are reloaded when the driver next calls a method
    of the worker that runs on all ranks (log probabilities, an update, a checkpoint). Both are
    collective over all ranks. A transfer to an engine that does not share the worker's GPU offloads
    nothing. Exceptions of verl's methods propagate, with the groups live.

    Args:
        classes: workers of verl or subclasses; their methods are replaced. None:
            ``ActorRolloutRefWorker`` and ``TrainingWorker`` of verl 0.9. Name all workers that
            share a process, a critic too, in one call.
        block: the context manager between the two; by default a :class:`reloadpg.offloaded`.

    Raises:
        InvalidOptionError: a class has none of the methods, or was already passed; nothing was
            changed.
        ReloadpgError: no class was passed, and verl 0.9 is not installed; nothing was changed.
    """
    return OffloadedRollouts(classes or _workers(), block)


class OffloadedRollouts(Rollouts):
    """Handle of the methods that :func:`offloaded_rollouts` replaced."""

    def __init__(
        self, classes: tuple[type, ...], block: AbstractContextManager[Any] | None
    ) -> None:
        super().__init__(block)
        found = [(owner, self._replacements(owner)) for owner in classes]
        self._replaced = ExitStack()
        for owner, replacements in found:
            for name, replacement in replacements.items():
                own = vars(owner).get(name)
                restore = (delattr, owner, name) if own is None else (setattr, owner, name, own)
                self._replaced.callback(*restore)
                setattr(owner, name, replacement)

    def remove(self) -> None:
        """Restore the methods of the classes. Idempotent.

        Local between rollouts; during a rollout it reloads the groups, collective over all ranks.
        """
        self.end()
        self._replaced.close()

    # -- replacement methods ------------------------------------------------------------------

    def _replacements(self, owner: type) -> dict[str, Any]:
        methods = dict(inspect.getmembers(owner, inspect.isfunction))
        if any(hasattr(method, MARK) for method in methods.values()):
            raise InvalidOptionError(
                f"offloaded_rollouts({owner.__qualname__}): already passed in an earlier call; "
                "nothing was changed. First call remove() on the handle of that call."
            )
        replacements = {
            name: _within(self._outside, method)
            for name, method in methods.items()
            if _on_all_ranks(method)
        }
        if inspect.iscoroutinefunction(methods.get("update_weights")):
            replacements["update_weights"] = self._transfer(methods["update_weights"])
        if not replacements:
            raise InvalidOptionError(
                f"offloaded_rollouts({owner.__qualname__}): it has no method that verl's driver "
                "calls; nothing was changed. Pass a worker of verl."
            )
        for replacement in replacements.values():
            setattr(replacement, MARK, True)
        return replacements

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """End an open rollout before a method, and after an error one that it has begun."""
        self.end()
        with self.ends_on_error():
            yield

    def _transfer(self, method: Callable[..., Any]) -> Any:
        """Begin a rollout after the engine has the weights and before it allocates its KV cache."""

        @wraps(method)
        async def transfer(worker: Any, *args: Any, **kwargs: Any) -> Any:
            engine = getattr(worker, "rollout", None)
            with self._outside():
                if engine is None:  # a worker of another role
                    return await method(worker, *args, **kwargs)
                worker.rollout = watched = _Engine(engine, self.begin)
                try:
                    result = await method(worker, *args, **kwargs)
                finally:
                    worker.rollout = engine
            if watched._self_has_weights:  # the engine kept its KV cache
                self.begin()
            return result

        return transfer


def _within(
    around: Callable[[], AbstractContextManager[None]], method: Callable[..., Any]
) -> Callable[..., Any]:
    """The method, run within a context; asynchronous if the method is."""

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        with around():
            return method(*args, **kwargs)

    @wraps(method)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with around():
            return await method(*args, **kwargs)

    return awaited if inspect.iscoroutinefunction(method) else called


class _Engine(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """A worker's rollout engine while weights are sent to it."""

    def __init__(self, engine: Any, begin: Callable[[], None]) -> None:
        super().__init__(engine)
        self._self_begin = begin
        self._self_has_weights = False

    async def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        result = await self.__wrapped__.update_weights(*args, **kwargs)
        self._self_has_weights = True
        return result

    async def resume(self, tags: Any, *args: Any, **kwargs: Any) -> Any:
        if self._self_has_weights and "kv_cache" in tags:
            self._self_begin()
        return await self.__wrapped__.resume(tags, *args, **kwargs)


def _on_all_ranks(method: Any) -> bool:
    """Whether the driver calls a method on all ranks, outside of a generation."""
    called = getattr(method, REMOTE, None)
    if called is None or method.__name__ in DURING_ROLLOUTS:
        return False
    dispatch, execute = called["dispatch_mode"], called["execute_mode"]
    # Values of verl's enumerations; the dispatch over a mesh is a dictionary.
    direct = getattr(dispatch, "name", "") == "DIRECT_ROLLOUT_METHOD"
    return not direct and getattr(execute, "name", "ALL") == "ALL"


def _workers() -> tuple[type, ...]:
    try:
        workers = import_module("verl.workers.engine_workers")
        return workers.ActorRolloutRefWorker, workers.TrainingWorker
    except (ModuleNotFoundError, AttributeError) as error:
        raise ReloadpgError(
            "offloaded_rollouts() needs verl 0.9, which cannot be imported here "
            f"({error}); nothing was changed. Install it, or pass the classes of your workers."
        ) from error
