"""CUDA tensors on torch's device ``meta``: a shape, a type and no values.

For ``reloadpg explain`` without a GPU where the stand-ins for CUDA cannot be used: in a process of
its script, since it replaces functions of ``torch.cuda``. Reading a value raises torch's error.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..c10d import explaining

_META = torch.device("meta")
_MEMORY = 80 << 30
_SILENT = """
init synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all set_rng_state
set_rng_state_all reset_peak_memory_stats reset_accumulated_memory_stats set_stream
set_per_process_memory_fraction
"""
_COUNTERS = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"


class CudaOnMeta(TorchFunctionMode):
    """Creates tensors for ``cuda`` on ``meta``, and presents tensors of ``meta`` as on ``cuda``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensor: Any = torch.Tensor
        if func in (tensor.pin_memory, tensor.record_stream):
            return args[0]
        if func is tensor.cuda:
            return args[0].to(_META)
        if func == tensor.is_cuda.__get__:
            return args[0].is_meta
        if func is tensor.get_device and args[0].is_meta:
            return torch.cuda.current_device()
        moves = func is tensor.to
        args = tuple(_on_meta(value) if _is_device(value, moves) else value for value in args)
        if _is_device(kwargs.get("device"), True):
            kwargs["device"] = _on_meta(kwargs["device"])
        kwargs.pop("pin_memory", None)
        if kwargs.get("generator") is not None:  # those of CUDA are the CPU's here
            on_meta = kwargs.get("device") == _META or getattr(args[0], "is_meta", False)
            kwargs["generator"] = None if on_meta else kwargs["generator"]
        result = func(*args, **kwargs)
        if func == tensor.device.__get__ and result == _META:
            return torch.device("cuda", torch.cuda.current_device())
        return result


def _is_device(value: Any, moves: bool) -> bool:
    index = moves and isinstance(value, (int, str)) and not isinstance(value, bool)
    return isinstance(value, torch.device) or index


def _on_meta(value: Any) -> Any:
    return _META if isinstance(value, int) or torch.device(value).type == "cuda" else value


def use_meta_for_cuda(devices: int) -> None:
    """Give this process, and threads that it starts later, this number of CUDA devices."""
    mode, run = CudaOnMeta(), threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        with mode:
            run(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
    _patch_queries(devices)
    explaining.provide_meta_collectives()
    explaining.run_backward_in(mode)
    mode.__enter__()  # type: ignore[no-untyped-call]


def _patch_queries(devices: int) -> None:
    """Replace what ``torch.cuda`` and ``torch.accelerator`` ask a device for."""
    current = [0]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        current[0] = current[0] if index is None else index

    @contextmanager
    def on_device(device: Any) -> Any:
        before = current[0]
        set_device(device)
        yield
        current[0] = before

    properties = SimpleNamespace(
        name="meta (no GPU)", major=9, minor=0, total_memory=_MEMORY, multi_processor_count=132
    )
    values: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": devices,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (_MEMORY, _MEMORY),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "memory_stats": defaultdict(int),
        "current_stream": _Done(),
        "default_stream": _Done(),
        "stream": nullcontext(),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(_SILENT.split()),
        **dict.fromkeys(_COUNTERS.split(), 0),
    }
    functions = {name: _returning(value) for name, value in values.items()}
    functions |= {"current_device": lambda: current[0], "set_device": set_device}
    functions |= {"device": on_device, "Stream": _Done, "Event": _Done}
    functions |= {
        "current_accelerator": _returning(torch.device("cuda")),
        "current_device_index": functions["current_device"],
        "set_device_index": set_device,
    }
    for module in (torch.cuda, torch.accelerator):
        for name in functions:
            if hasattr(module, name):
                setattr(module, name, functions[name])
    torch.cuda.nccl.version = _returning((2, 29, 7))
    cuda: Any = torch.cuda
    cuda.default_generators = tuple(torch.Generator() for _ in range(devices))
    torch.Generator = _Generator  # type: ignore[misc]


class _Generator(torch.Generator):
    """A generator of the CPU, for any device."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls)


def _returning(value: Any) -> Any:
    return lambda *_, **__: value


class _Done:
    """A stream whose work, or an event whose moment, is always past."""

    device = torch.device("cuda", 0)
    device_index = device_type = cuda_stream = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Done:
        return self

    __exit__ = synchronize = wait = record = wait_stream = wait_event = _returning(None)
    query = _returning(True)
    is_capturing = _returning(False)
    elapsed_time = _returning(1.0)

    def record_event(self, event: Any = None) -> Any:
        return event or _Done()
