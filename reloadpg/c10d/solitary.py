"""Groups of this process alone, which torch creates as any other, without a peer or a socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch._C import _distributed_c10d as _cpp
from torch.distributed import distributed_c10d as _c10d

_PLUGIN = "FAKE"


@contextmanager
def solitary_backend() -> Iterator[str]:
    """A block in which torch can create groups with its ``fake`` backend.

    Yields the backend as the creating functions take it. Its object has no store, thread, socket or
    communicator, and the flight recorder leaves it out. Torch registers it with its test utilities;
    here only the entry is made that creates a group, and removed at the end (2.8, 2.13 and 2.15).
    """
    backend: Any = _c10d.Backend
    plugin = backend._BackendPlugin(_create, False)
    used = backend._plugins.setdefault(_PLUGIN, plugin)
    try:
        yield f"cpu:{_PLUGIN.lower()}"
    finally:
        if used is plugin:
            backend._plugins.pop(_PLUGIN, None)


def _create(store: Any, rank: int, size: int, timeout: Any) -> Any:
    kind = cast(Any, _cpp).FakeProcessGroup
    return getattr(kind, "_create_internal", kind)(rank, size)  # 2.8 has the constructor
