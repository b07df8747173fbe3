"""Torch's dispatcher, for the operators of the stand-in for CUDA. Not imported by the core."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import _C

_PRIVATE: Any = _C

NATIVE = frozenset(
    {
        *("_local_scalar_dense", "_pin_memory", "is_pinned", "record_stream"),
        *("resize_", "set_", "_efficientzerotensor", "_copy_from", "_copy_from_and_resize"),
        *("_has_same_storage_numel", "_cudnn_init_dropout_state"),
        *("empty", "empty_strided", "_empty_affine_quantized", "_cslt_compress"),
    }
)
"""Operators that compute nothing, by name without overload."""


def registered_for(key: str) -> Iterable[str]:
    """The operators, with overloads, that have a kernel for a dispatch key."""
    return list(_PRIVATE._dispatch_get_registrations_for_dispatch_key(key))


def schema_of(name: str, overload: str) -> Any:
    """The schema of an operator: its arguments, returns and aliases."""
    return _PRIVATE._get_schema(name, overload)


def storage_at(address: int, device: torch.device, size: int) -> torch.UntypedStorage:
    """A storage on existing memory, which must outlive it."""
    storage: torch.UntypedStorage = _PRIVATE._construct_storage_from_data_pointer(
        address, device, size
    )
    return storage


def without_torch_function() -> AbstractContextManager[Any]:
    """A block in which ``__torch_function__`` is not called."""
    block: AbstractContextManager[Any] = _PRIVATE.DisableTorchFunction()
    return block


def keys_of(name: str) -> Any:
    """The set of one dispatch key, for ``redispatch``."""
    return _PRIVATE.DispatchKeySet(getattr(_PRIVATE.DispatchKey, name))
