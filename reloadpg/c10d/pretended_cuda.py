"""A pretended CUDA device, so that a script for GPUs runs to its end on a machine without one.

Tensors of the device are torch's fake tensors: they have a shape, a type and a device, but no
values and no memory. The host reads ones (``False`` for booleans); CPU tensors are real.
Collectives and kernels of torch return immediately, and kernels of Triton do nothing. Other kernels
(Transformer Engine) read addresses and raise.

Only ``reloadpg explain`` uses this, in a forked process, since it changes torch permanently. Seen
on torch 2.13. Torch 2.8 lacks required functions, and torch 2.15 ends the process with SIGABRT.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import importlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
import wrapt
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

aten, prim = torch.ops.aten, torch.ops.prim
_DISPATCH = FakeTensor.__torch_dispatch__
_DEVICE_OF_C = torch.device("meta")
_FAKE_ATTRIBUTES: set[str] = {"_is_param"}
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor}
_MODE: Any = FakeTensorMode  # its types differ between the supported versions
_GENERATOR: Any = torch.Generator
_MEMORY = 80 << 30


def can_pretend() -> bool:
    """Whether this torch has what :func:`pretend` needs. Local."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return hasattr(torch._C, "_ensureCUDADeviceGuardSet") and version < (2, 15)


def pretend(devices: int) -> None:
    """Give this process, and threads that it starts later, this number of CUDA devices."""
    # First: torch._dynamo, which it imports, looks for a real device.
    mode = _PretendedCuda(allow_non_fake_inputs=True)
    _provide_guard()
    _patch_tensors()
    _patch_module(devices)
    _patch_compilers()
    functions, run = _Indexed(), threading.Thread.run

    def run_in_mode(self: threading.Thread) -> None:
        torch.autograd.set_multithreading_enabled(False)
        with functions, mode:
            run(self)

    threading.Thread.run = run_in_mode  # type: ignore[method-assign]
    # A backward pass in the engine's thread for a device would use that device in C++.
    torch.autograd.set_multithreading_enabled(False)
    torch._C._set_only_lift_cpu_tensors(True)
    for one in (functions, mode):
        entered: Any = one
        entered.__enter__()
    _FAKE_ATTRIBUTES.update(vars(torch.empty(0, device="cuda")))


def _patch_compilers() -> None:
    """Run compiled functions eagerly, and skip Triton's kernels, which need a driver."""
    torch.compile = partial(torch.compile, disable=True)  # type: ignore[assignment]
    with contextlib.suppress(ImportError):
        jit: Any = importlib.import_module("triton.runtime.jit")
        jit.KernelInterface.__getitem__ = lambda self, grid: lambda *_, **__: None


def _provide_guard() -> None:
    """Register a C++ guard for CUDA devices that does nothing, if torch has none.

    Torch's fake tensors do this only in a CUDA build.
    """
    torch._C._ensureCUDADeviceGuardSet()
    cpu, cuda = 0, 1
    guards = (ctypes.c_void_p * 2).in_dll(
        ctypes.CDLL("libc10.so"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    guards[cuda] = guards[cuda] or guards[cpu]


class _PretendedCuda(_MODE):  # type: ignore[misc]
    """Runs functions of the device on fake tensors, and all others normally."""

    _nested = False
    supports_higher_order_operators = True
    avoid_device_init = True  # as where torch finds no device, whatever torch.cuda says by then

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is prim.device.default:
            return _DEVICE_OF_C
        if isinstance(func, torch._ops.HigherOrderOperator):
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if not {*types} <= _PLAIN:  # a tensor that is made of others, which come here next
            return NotImplemented
        kwargs = dict(kwargs or {})
        given = pytree.arg_tree_leaves(*args, **kwargs)
        fakes = [one for one in given if isinstance(one, FakeTensor)]
        device = kwargs.get("device")
        if fakes and device == _DEVICE_OF_C:
            device = kwargs["device"] = fakes[0].fake_device
        on_cuda = device is not None and torch.device(device).type == "cuda"
        name = func.overloadpacket.__name__
        reads = name in ("_to_copy", "_local_scalar_dense") and args[0].is_meta
        reads = reads or (name == "copy_" and args[1].is_meta)
        if not fakes and not on_cuda and not reads:  # meta: made by C++ for the device
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return _sent(func, args)
        if name == "record_stream":
            return None
        if name in ("_local_scalar_dense", "equal"):
            return func(*map(_value, args))
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].copy_(_value(args[1]))
        if fakes and device is not None and not on_cuda:
            return _on_values(func, args, kwargs)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._of_kernel, (args, kwargs))
        nested, self._nested = self._nested, True  # some functions are made of others
        try:
            made = super().__torch_dispatch__(func, types, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            values = _on_values(func, args, kwargs)
            device = next(one.device for one in fakes)
            empty = partial(self._empty_like, device=device)
            made = pytree.tree_map_only(torch.Tensor, empty, values)
            _keep(made, values)
            return made
        finally:
            # Its weak references to what was converted would keep modules from moving.
            self.fake_tensor_converter = FakeTensorConverter()
            self._nested = nested
        if nested:
            return pytree.tree_map_only(FakeTensor, _on_host, made)
        tensors = [one for one in (*given, *pytree.tree_leaves(made)) if _is_tensor(one)]
        known = all(_is_known(one) for one in given if _is_tensor(one))
        if name == "copy_" and _is_known(args[1]) and args[0].numel() <= _KEPT:
            _keep(args[0], _ones(args[0]).copy_(_value(args[1])))
        elif known and sum(one.numel() for one in tensors) <= _KEPT:
            with contextlib.suppress(Exception):  # a kernel that the CPU lacks
                _keep(made, _on_values(func, args, kwargs))
        elif name == "_to_copy" and made.dtype is torch.bool and args[0].dtype is not torch.bool:
            _keep(made, torch.ones((), dtype=torch.bool).expand(made.shape))  # of an unknown 1
        elif _is_decided(name.rstrip("_"), args):  # a generation ends at its maximum length
            _keep(made, torch.full(made.shape, "or" in name))
        elif func._schema.is_mutable:
            for one in pytree.tree_leaves(args[:1]):
                vars(one).pop(_VALUE, None)
        return pytree.tree_map_only(FakeTensor, _on_host, made)

    def _of_kernel(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor. One that C++ has created on ``meta`` is replaced by one on the device."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if not tensor.is_meta:  # torch's conversion of a view would call this mode for its base
            return tensor.clone() if tensor._is_view() else tensor
        return self._empty_like(tensor, _indexed("cuda"))

    def _empty_like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        given = {"dtype": tensor.dtype, "device": device}
        empty: torch.Tensor = super().__torch_dispatch__(
            aten.empty_strided.default, (), (tensor.shape, tensor.stride()), given
        )
        return empty


_VALUE = "_reloadpg_value"
_KEPT = 4096
"""Elements of tensors whose values are kept, such as flags and counts that the host has set."""


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_known(tensor: Any) -> bool:
    return _VALUE in vars(tensor) or not (isinstance(tensor, FakeTensor) or tensor.is_meta)


def _is_decided(name: str, args: Any) -> bool:
    """Whether one known operand determines the result of an ``or`` or ``and``."""
    if name not in ("bitwise_or", "logical_or", "bitwise_and", "logical_and"):
        return False
    known = [_value(one) for one in args if _is_tensor(one) and _is_known(one)]
    either = [one for one in known if one.dtype is torch.bool and one.shape == args[0].shape]
    return any(one.all() if "or" in name else not one.any() for one in either)


def _keep(made: Any, values: Any) -> None:
    for one, value in zip(pytree.tree_leaves(made), pytree.tree_leaves(values), strict=True):
        if isinstance(one, FakeTensor) and not isinstance(value, FakeTensor):
            vars(one)[_VALUE] = value


def _on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function of torch on the CPU, with ones for unknown values."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _value, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    return func(*args, **kwargs)


def _on_host(tensor: FakeTensor) -> Any:
    """A fake tensor; one that is on the CPU becomes a real one."""
    return tensor if tensor.fake_device.type != "cpu" else _value(tensor)


def _value(tensor: Any) -> torch.Tensor:
    return vars(tensor).get(_VALUE, tensor) if _is_known(tensor) else _ones(tensor)


def _ones(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.fill_(0 if tensor.dtype is torch.bool else 1)


class _Indexed(TorchFunctionMode):
    """Adds an index to each device ``cuda``, since C++ has no current device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return False
        if func in (torch.tensor, torch.as_tensor):  # which reads values past all modes
            args = pytree.tree_map_only(FakeTensor, _value, args)
        if func is torch.Tensor.cuda:
            device = kwargs.get("device") if len(args) < 2 else args[1]
            args, kwargs = (args[0], "cuda" if device is None else device), {}
            func = torch.Tensor.to
        if kwargs.get("device") is not None:
            kwargs["device"] = _indexed(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to:
            devices = (str, int, torch.device)  # and bool is a flag
            known = (isinstance(o, devices) and not isinstance(o, bool) for o in args)
            args = tuple(_indexed(o) if k else o for o, k in zip(args, known, strict=True))
            if isinstance(args[0], FakeTensor) and _is_there(*args, **kwargs):
                return args[0]
        return func(*args, **kwargs)


def _indexed(device: Any) -> torch.device:
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = torch.device(device)
    plain = found == torch.device("cuda")
    return torch.device("cuda", torch.cuda.current_device()) if plain else found


def _is_there(tensor: Any, *args: Any, copy: bool = False, **kwargs: Any) -> bool:
    """Whether ``Tensor.to`` returns the tensor itself."""
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].device, args[0].dtype)
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args[:2], **kwargs)
    same = device in (None, tensor.device) and dtype in (None, tensor.dtype)
    return same and not copy and memory_format is None


def _sent(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of a collective of c10d: its arguments, and a completed work."""
    types = [str(one.type) for one in func._schema.returns]
    made = [FakeWork().boxed() if "Work" in one else args[0] for one in types]
    return made[0] if len(made) == 1 else tuple(made)


# -- tensors ----------------------------------------------------------------------------------


def _patch_tensors() -> None:
    """Present the pretended device to Python, and the device ``meta`` to C++.

    Torch's autograd gets the stream of a tensor's device in C++, and aborts if there is none.
    """

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is prim.device.default:
            return _DEVICE_OF_C
        return _DISPATCH.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]

    kinds: Any = FakeTensor
    kinds.__torch_dispatch__ = classmethod(dispatch)
    kinds.is_cuda = property(lambda self: self.device.type == "cuda")
    kinds.is_cpu = property(lambda self: self.device.type == "cpu")
    kinds.is_meta = property(lambda self: self.device.type == "meta")
    kinds.__reduce_ex__ = lambda self, protocol: cast(Any, _value(self)).__reduce_ex__(protocol)
    kinds.type = _type
    kinds.get_device = lambda self: -1 if self.device.index is None else self.device.index
    address = torch.UntypedStorage.data_ptr
    storage: Any = torch.UntypedStorage
    storage.data_ptr = lambda self: address(self) or self._cdata  # identifies tied weights
    wrapt.wrap_function_wrapper(torch.nn.Module, "_apply", _apply)
    torch.utils.swap_tensors = _swap
    # Torch groups tensors by device in C++.
    foreach: Any = torch.utils._foreach_utils
    foreach._get_foreach_kernels_supported_devices = lambda: ["cuda", _DEVICE_OF_C.type]
    from torch.distributed.tensor import DTensor

    local: Any = DTensor
    local.device = property(lambda self: self._local_tensor.device)
    local.is_cuda = property(lambda self: self._local_tensor.is_cuda)


def _type(self: Any, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs:
        return torch.Tensor.type(self, *args, **kwargs)
    return torch.empty(0, dtype=self.dtype).type().replace("torch.", f"torch.{self.device.type}.")


def _apply(apply: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """``Module.to``: parameters stay the same objects, with their attributes."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return apply(*args, **kwargs)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _swap(one: Any, other: Any) -> None:
    """Swap the contents of two tensors; attributes that the script has set stay."""
    kept = {name: value for name, value in vars(one).items() if name not in _FAKE_ATTRIBUTES}
    given = dict(vars(other))
    for slot in copyreg._slotnames(type(other)):  # type: ignore[attr-defined]
        setattr(one, slot, getattr(other, slot))
    one.__class__, other.__class__ = other.__class__, one.__class__
    vars(one).clear()
    vars(one).update({**kept, **given})
    torch._C._swap_tensor_impl(one, other)


# -- torch.cuda -------------------------------------------------------------------------------


_WITHOUT_RESULT = """
_lazy_init init synchronize empty_cache ipc_collect manual_seed manual_seed_all seed seed_all
set_rng_state set_rng_state_all reset_peak_memory_stats set_stream reset_max_memory_allocated
reset_accumulated_memory_stats set_per_process_memory_fraction _lazy_call set_sync_debug_mode
reset_max_memory_cached
"""
_MEMORY_COUNTERS = """
memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached
max_memory_cached
"""
_GENERIC = """
is_available device_count synchronize current_stream set_stream empty_cache memory_stats
"""
"""Functions that ``torch.accelerator`` has by the same name."""


def _patch_module(devices: int) -> None:
    """Replace the functions of ``torch.cuda`` and ``torch.accelerator`` that need a device."""
    cuda: Any = torch.cuda
    current = [0]

    def index_of(device: Any = None) -> int:
        if isinstance(device, (str, torch.device)):
            device = torch.device(device).index
        return current[0] if device is None else int(device)

    def set_device(device: Any) -> None:
        current[0] = index_of(device)

    @contextlib.contextmanager
    def on_device(device: Any) -> Any:
        before = current[0]
        set_device(device)
        try:
            yield
        finally:
            current[0] = before

    properties = SimpleNamespace(
        name="pretended GPU",
        major=9,
        minor=0,
        total_memory=_MEMORY,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
        regs_per_multiprocessor=65536,
    )
    answers: Mapping[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": devices,
        "get_device_name": properties.name,
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (_MEMORY, _MEMORY),
        "is_bf16_supported": True,
        "can_device_access_peer": True,
        "get_arch_list": ["sm_90"],
        "is_current_stream_capturing": False,
        "utilization": 0,
        "get_rng_state_all": [],
        "memory_snapshot": [],
        "memory_summary": "",
        **dict.fromkeys(_WITHOUT_RESULT.split()),
        **dict.fromkeys(_MEMORY_COUNTERS.split(), 0),
    }
    table: dict[str, Any] = {name: _answer(value) for name, value in answers.items()}
    stream = _Stream()
    table |= {
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": on_device,
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "current_stream": _answer(stream),
        "default_stream": _answer(stream),
        "stream": lambda _: contextlib.nullcontext(),
        "StreamContext": lambda _: contextlib.nullcontext(),
        "memory_stats": lambda *_, **__: defaultdict(int),
        "get_rng_state": lambda *_, **__: torch.zeros(16, dtype=torch.uint8),
        "default_generators": tuple(_GENERATOR() for _ in range(devices)),
        "graph": lambda *_, **__: contextlib.nullcontext(),
    }
    for name, value in table.items():
        setattr(cuda, name, value)
        for inner in (cuda.memory, cuda.random):
            if hasattr(inner, name):
                setattr(inner, name, value)
    cuda.nccl.version = _answer((2, 29, 7))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _answer(0))
    accelerator: Any = torch.accelerator
    generic = {name: table[name] for name in f"{_MEMORY_COUNTERS} {_GENERIC}".split()}
    generic |= {
        "current_accelerator": _answer(torch.device("cuda")),
        "current_device_index": table["current_device"],
        "current_device_idx": table["current_device"],
        "set_device_index": set_device,
        "set_device_idx": set_device,
        "device_index": on_device,
        "get_memory_info": table["mem_get_info"],
    }
    for name, value in generic.items():
        setattr(accelerator, name, value)
    torch._C._get_accelerator = lambda *_: torch.device("cuda")  # type: ignore[assignment,misc]

    class Generator(_GENERATOR):  # type: ignore[misc,valid-type]
        """A CPU generator, for any device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls)

    torch.Generator = Generator  # type: ignore[misc]


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = _answer(None)
    query = _answer(True)
    elapsed_time = _answer(1.0)


class _Stream:
    """A stream that completes everything immediately."""

    cuda_stream = stream_id = device_index = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    __exit__ = synchronize = wait_stream = wait_event = _answer(None)
    query = _answer(True)
    is_capturing = _answer(False)

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()
