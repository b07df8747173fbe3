"""Holders of communication memory that many trainers have, for :func:`reloadpg.register_holder`.

::

    holders.cublas_workspaces()
    holders.memory_pool(pool, ep_group)

Each function returns a function that ends it. Neither has run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import c10d, on_generation, register_holder
from ..c10d.devices import clears_cublas_workspaces
from ..errors import InvalidOptionError
from ..extend import check_group, managed

__all__ = ["GroupResource", "cublas_workspaces", "memory_pool"]


class GroupResource:
    """Creates something for each generation of a group; the base of the adapters for libraries.

    On all members in one order, it is dropped before an offload that recreates the group, and
    created by the reload when all groups are live. A suspended group keeps its communicator and
    what belongs to it.

    Attributes:
        value: what was created for the current generation; None while the group is offloaded.
    """

    PACKAGE = ""
    """The package or module whose handles :meth:`drop` drops: they do not count as borrowed."""

    def __init__(self, group: Any, make: Callable[[], Any] | None) -> None:
        self._make = make
        self.value: Any = None
        self.create()
        self.end = on_generation(
            group,
            before=lambda group, _: self.drop(group, broken=False),
            after=self._after,
            name=self.PACKAGE,
            package=self.PACKAGE,
        )
        """Stop following the group; nothing is destroyed. Local, idempotent."""

    def create(self) -> None:
        """Create the value unless there is one."""
        if self._make is not None and self.value is None:
            self.value = self._make()

    def drop(self, group: Any, *, broken: bool) -> None:
        """Free the value, and what the library keeps for the group. Idempotent.

        Args:
            group: the group.
            broken: the communicator has ended already: the job has recovered.
        """
        raise NotImplementedError

    def _after(self, group: Any, backend: Any) -> None:
        self.drop(group, broken=True)  # after a recovery, which has made no call before
        known = managed(group)
        if self._make is not None and known is not None:
            check_group(known, "eager")  # otherwise it has no communicator yet
        self.create()


def cublas_workspaces(*, name: str = "cuBLAS workspaces") -> Callable[[], None]:
    """Free cuBLAS's workspaces in each offload; the next matrix product allocates them. Local.

    They take 8 to 32 MiB for each handle and stream, and stay in torch's caching allocator, so
    call ``torch.cuda.empty_cache()`` afterwards. Do not use it with CUDA graphs, which hold their
    addresses.

    Raises:
        InvalidOptionError: this torch has no such function, or the name is taken; nothing was
            registered.
    """
    clear = clears_cublas_workspaces()
    if clear is None:
        raise InvalidOptionError(
            "cublas_workspaces(): this torch is built without CUDA, or lacks the function that "
            "frees them; nothing was registered."
        )
    return register_holder(name, release=clear, restore=_nothing)


def memory_pool(
    pool: Any, group: Any, *, name: str = "", collective: bool = False, **options: Any
) -> Callable[[], None]:
    """Register a memory pool with a group's NCCL backend now, and again after each reload. Local.

    A registration ends with the communicator, so it would be lost silently in a reload
    (Megatron-LM#6925). An offload deregisters the pool while the group is live.

    Args:
        pool: a ``torch.cuda.MemPool``.
        group: a reloadable group.
        name: name for messages; by default that of the group.
        collective: whether the registration needs all members, as for symmetric memory.
        options: further arguments of the backend's ``register_mem_pool``, such as ``symm``.

    Raises:
        InvalidOptionError: the group is not reloadable, or its backend registers no pools; nothing
            was registered.
    """
    known = managed(group)
    if known is None:
        raise InvalidOptionError(
            f"memory_pool(group={group!r}): not a reloadable group; nothing was registered."
        )

    def call(method: str, *arguments: Any, **given: Any) -> None:
        backends = c10d.live_backends(group, known.construction.selected)
        for backend in {id(one): one for one in backends.values()}.values():
            register = getattr(backend, method, None)
            if register is None:
                raise InvalidOptionError(
                    f"memory_pool(): the backend {backend.name()} of {group!r} registers no memory "
                    "pools; nothing was registered."
                )
            register(*arguments, **given)

    def restore() -> None:
        call("register_mem_pool", pool, **options)

    restore()
    return register_holder(
        name or f"memory pool of group {group.group_name}",
        release=lambda: call("deregister_mem_pool", pool),
        restore=restore,
        group=group,
        collective=collective,
    )


def _nothing() -> None:
    pass
