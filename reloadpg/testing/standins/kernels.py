"""Operators on tensors of the stand-in device, computed by torch's CPU kernels.

The stand-in for CUDA launches no kernel, but its device memory is host memory. :func:`activate`
replaces the CUDA kernel of each ``aten`` operator by one function: it waits for the current stream,
runs the operator on CPU tensors that alias the same memory, and copies new results to the device.
Allocation, views and contiguous copies stay torch's own.

Limits:

- The caller waits for each operator. Work on other streams stays asynchronous.
- No operator can be captured in a CUDA graph; collectives and copies can.
- An operator without a CPU kernel raises ``NotImplementedError`` (cuDNN and fused attention are
  disabled, so layers do not select them).
- Random values depend on the seed and on the number of earlier draws, as on a GPU, but they
  come from the CPU's generator.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...c10d import compiling

_CPU = torch.device("cpu")
_C: Any = torch._C

_NATIVE = frozenset(
    {
        *("_local_scalar_dense", "_pin_memory", "is_pinned", "record_stream"),
        *("resize_", "set_", "_efficientzerotensor", "_copy_from", "_copy_from_and_resize"),
        *("_has_same_storage_numel", "_cudnn_init_dropout_state"),
        *("empty", "empty_strided", "_empty_affine_quantized", "_cslt_compress"),
    }
)
"""Operators that compute nothing, by name without overload."""
_DRAWS_PER_CALL = 4
"""Increment of a CUDA generator's offset per random operator; offsets are multiples of four."""

_STRIDE = 0x9E3779B1
"""Distance between the seeds of two draws. The CPU's generator uses the low 32 bits of a seed."""

_libraries: list[torch.library.Library] = []
"""Holds the replaced kernels, which end with their library."""

_draw = threading.Lock()


def activate() -> None:
    """Replace torch's CUDA kernels. Local, idempotent; takes less than a second."""
    if _libraries:
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    _skip_in_compiled_code()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overridden kernels, which are intended
        for full in list(_C._dispatch_get_registrations_for_dispatch_key("CUDA")):
            namespace, _, name = full.partition("::")
            base, _, overload = name.partition(".")
            if namespace == "aten" and base not in _NATIVE:
                kernel = _Kernel(base, overload)
                if not kernel.makes_view:
                    library.impl(name, kernel.run, "CUDA", allow_override=True)
        library.impl("copy_", _copy, "CUDA", allow_override=True)
    torch.backends.cudnn.enabled = False
    for name in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)


def _skip_in_compiled_code() -> None:
    """Keep ``torch.compile`` from tracing these functions where it runs an operator eagerly."""
    compiling.skip_in_compiled_code((_Kernel.run, _copy), callees=True)


class _Kernel:
    """One operator, computed on the host."""

    def __init__(self, base: str, overload: str) -> None:
        self._names = base, overload or "default"
        self._op: Any = None
        schema = _C._get_schema(f"aten::{base}", overload)
        self._arguments = [argument.name for argument in schema.arguments]
        self._written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
        sources = {
            alias: argument.name
            for argument in schema.arguments
            if argument.alias_info
            for alias in argument.alias_info.before_set
        }
        # For each result the argument that it aliases, or None.
        self._returned = [
            next((sources[alias] for alias in value.alias_info.before_set), None)
            if value.alias_info
            else None
            for value in schema.returns
        ]
        self.makes_view = not self._written and any(self._returned)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with _C.DisableTorchFunction():
            if self._op is None:  # looked up at the first call: a thousand look-ups take a second
                self._op = getattr(getattr(torch.ops.aten, self._names[0]), self._names[1])
            given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
            call = _Call(self._written)
            on_host = {name: call.to_host(name, value) for name, value in given.items()}
            device = call.device
            torch.cuda.current_stream(device).synchronize()
            try:
                if torch.Tag.nondeterministic_seeded in self._op.tags:
                    result = self._run_random(device, given, on_host)
                else:
                    result = self._op(**on_host)
            except NotImplementedError as error:
                raise NotImplementedError(
                    f"{self._op} cannot be computed on the stand-in for CUDA: torch has no CPU "
                    "kernel for it. Use another operator, or a CPU tensor."
                ) from error
            call.finish()
            if not self._returned:
                return None
            several = len(self._returned) > 1
            results = [
                call.to_device(one, given.get(source) if source else None)
                for one, source in zip(
                    result if several else (result,), self._returned, strict=True
                )
            ]
            return tuple(results) if several else results[0]

    def _run_random(self, device: Any, given: dict[str, Any], on_host: dict[str, Any]) -> Any:
        """Draw from a CPU generator that is seeded by the state of the device's generator."""
        index = torch.cuda.current_device() if device.index is None else device.index
        own = given.get("generator") or torch.cuda.default_generators[index]
        seed = own.initial_seed()
        with _draw:
            if own.device.type == "cuda":
                seed += own.get_offset() * _STRIDE
                own.set_offset(own.get_offset() + _DRAWS_PER_CALL)
            seed &= (1 << 63) - 1
            if "generator" in self._arguments:
                generator = torch.Generator().manual_seed(seed)
                return self._op(**{**on_host, "generator": generator})
            before = torch.default_generator.get_state()
            try:
                torch.default_generator.manual_seed(seed)
                return self._op(**on_host)
            finally:
                torch.default_generator.set_state(before)


class _Call:
    """The arguments and results of one call, on the device and on the host."""

    def __init__(self, written: set[str]) -> None:
        self._written = written
        self._device: torch.device | None = None
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def device(self) -> torch.device:
        return self._device or torch.device("cuda", torch.cuda.current_device())

    def to_host(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != "cuda":
                return value
            self._device = self._device or value.device
            if name in self._written and value.numel() == 0:
                # The operator resizes such an output, and an alias cannot be resized.
                fresh = torch.empty(value.shape, dtype=value.dtype, device=_CPU)
                self._fresh.append((value, fresh))
                return fresh
            return alias(value)
        if isinstance(value, list | tuple):
            return [self.to_host(name, one) for one in value]
        if isinstance(value, torch.device) and value.type == "cuda":
            self._device = value
            return _CPU
        return value

    def finish(self) -> None:
        """Copy size and values of outputs that the operator has resized to the device."""
        for value, fresh in self._fresh:
            if fresh.numel():
                value.resize_(fresh.shape)
                alias(value).copy_(fresh)

    def to_device(self, value: Any, source: Any) -> Any:
        if source is not None:
            return source
        if isinstance(value, torch.Tensor):
            result = torch.empty_like(value, device=self.device)
            alias(result).copy_(value)
            return result
        if isinstance(value, list | tuple):
            return [self.to_device(one, None) for one in value]
        return value


def alias(value: torch.Tensor) -> torch.Tensor:
    """A CPU tensor on the memory of a device tensor, which must outlive it. Does not wait."""
    storage = value.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CPU)
    own = _C._construct_storage_from_data_pointer(storage.data_ptr(), _CPU, storage.nbytes())
    return torch.empty(0, dtype=value.dtype, device=_CPU).set_(
        own, value.storage_offset(), value.size(), value.stride()
    )


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``copy_``: torch's own, asynchronous one for contiguous copies; otherwise on the host."""
    with _C.DisableTorchFunction():
        plain = (
            target.dtype == source.dtype
            and target.size() == source.size()
            and target.is_contiguous()
            and source.is_contiguous()
            and target.is_neg() == source.is_neg()
            and target.is_conj() == source.is_conj()
        )
        if plain:
            # copy_ has one kernel for all backends; under XPU's key nothing else is registered.
            return _copy_of_all(target, source, non_blocking)
        for tensor in (target, source):
            if tensor.device.type == "cuda":
                torch.cuda.current_stream(tensor.device).synchronize()
        here, there = (alias(t) if t.device.type == "cuda" else t for t in (target, source))
        here.copy_(there)
        return target


def _copy_of_all(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    op: Callable[..., torch.Tensor] = torch.ops.aten.copy_.default.redispatch
    return op(_C.DispatchKeySet(_C.DispatchKey.XPU), target, source, non_blocking)
