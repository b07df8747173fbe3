"""``region``: a block that puts the groups created in it into a set."""

from __future__ import annotations

from contextlib import ContextDecorator

from .registry import registry
from .sets import check_name, open_regions


class region(ContextDecorator):  # noqa: N801 - used like a function
    """Put the groups that are created within this block into a set.

    ::

        reloadpg.install(sets=["engine"])
        with reloadpg.region("engine"):
            llm = vllm.LLM(model, tensor_parallel_size=2, distributed_executor_backend=...)

    Local, not blocking. All members of a group must create it in the same region. A region applies
    to the calling thread (or asyncio task) and overrides the rules of ``install(sets=...)``.
    Regions nest; the innermost one counts. It decorates functions, like :class:`offloaded`. The
    default group is always in the set ``"trainer"``. Existing groups stay in their sets.

    Args:
        name: a set that ``install(sets=...)`` declares, or ``"trainer"``. None makes the groups
            bypass, without a warning.

    Raises:
        InvalidOptionError: ``name`` is not the name of a set; or, at the entry, ``install`` does
            not declare it. Without an installation, nothing is checked.
    """

    def __init__(self, name: str | None) -> None:
        if name is not None:
            check_name(name, f"region({name!r})")
        self._name = name

    def __enter__(self) -> None:
        if registry.selection is not None and self._name is not None:
            registry.selection.refuse_undeclared([self._name], "region")
        open_regions.set((*open_regions.get(), self._name))

    def __exit__(self, *_: object) -> None:
        open_regions.set(open_regions.get()[:-1])
