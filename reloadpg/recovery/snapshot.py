"""Snapshot: an in-memory copy of a program's state at the beginning of a step."""

from __future__ import annotations

import copy
import io
import numbers
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import c10d
from ..c10d import devices
from ..errors import InvalidOptionError, ReloadpgError
from ..lifecycle.job import jobs
from ..settings import as_integer
from ..texts import format_ranks


class Snapshot:
    """The state of the objects that a program passes to ``retrying(state=...)``.

    Tensors are copied into buffers that are allocated once. Copies of an accelerator's tensors go
    to pinned host memory, on the current stream, without blocking the host. Objects keep their
    identity; the values of their tensors are restored.
    """

    def __init__(self, objects: Any, replicas: Sequence[int] | None = None) -> None:
        self._objects = objects if isinstance(objects, (tuple, list, Mapping)) else (objects,)
        self._entries = self._list()
        self._buffers = _Buffers()
        self._parts = [_part(value, self._buffers) for _, value in self._entries]
        self._random = _Random()
        self._given = None if replicas is None else _read_replicas(replicas)

    def take(self) -> None:
        """Copy the current state. Local; does not block on an accelerator."""
        before, self._entries = self._entries, self._list()
        if [(key, id(value)) for key, value in before] != [(k, id(o)) for k, o in self._entries]:
            self._parts = [_part(value, self._buffers) for _, value in self._entries]
        self._buffers.begin()
        for part in self._parts:
            part.take()
        self._buffers.end()
        self._random.take()

    def reset(self) -> None:
        """Clear the state of an unfinished step in the modules. Local, idempotent."""
        for part in self._parts:
            part.reset()

    def restore(self) -> None:
        """Restore the last copied state, after :meth:`reset`. Local, idempotent."""
        self.reset()
        self._buffers.restore()
        for part in self._parts:
            part.restore()
        if isinstance(self._objects, MutableMapping):
            self._objects.clear()
            self._objects.update(self._entries)
        elif isinstance(self._objects, list):
            self._objects[:] = [value for _, value in self._entries]
        self._random.restore()

    def _list(self) -> list[tuple[Any, Any]]:
        """The current objects, since a step may replace an entry of a dict or list."""
        if isinstance(self._objects, Mapping):
            return [*self._objects.items()]
        return [*enumerate(self._objects)]

    def transfer(self, replaced: Sequence[int]) -> None:
        """Send the state to replacement processes, from ranks that hold it. Collective over both.

        Random generators are not sent, since they differ between ranks.
        """
        rank = dist.get_rank()
        same = self._replicas(rank)
        sources = sorted(same - {*replaced})
        for new in sorted(same & {*replaced}):
            if new == rank:
                if not sources:
                    reason = _lost(rank, same)
                    if (job := jobs.known) is not None:
                        job.rendezvous.lose_state(reason)
                    raise ReloadpgError(reason)
                self.reset()
                for part, exported in zip(self._parts, _receive(sources[0]), strict=True):
                    part.load(exported)
            elif rank == sources[0]:
                devices.synchronize()  # wait for the copies to the buffers
                _send([part.export() for part in self._parts], new)
        if same & {*replaced}:
            for part in self._parts:
                part.remake()

    def _replicas(self, rank: int) -> set[int]:
        if self._given is not None:
            return self._given | {rank}
        replicas: set[int] | None = None
        for part in self._parts:
            same = part.replicas(rank)
            if same is not None:
                replicas = same if replicas is None else replicas & same
        return {rank} if replicas is None else replicas


def _read_replicas(given: object) -> set[int]:
    known = range(dist.get_world_size() if dist.is_initialized() else sys.maxsize)
    ranks = [as_integer(rank) for rank in given] if isinstance(given, Iterable) else [None]
    replicas = {rank for rank in ranks if rank is not None and rank in known}
    if len(replicas) < len({*ranks}):
        raise InvalidOptionError(
            f"retrying(replicas={given!r}): not ranks of this job; nothing was started. Pass the "
            "global ranks that hold the same state as this one."
        )
    return replicas


def _lost(rank: int, same: set[int]) -> str:
    others = same - {rank}
    why = (
        f"the ranks that held the same state ({format_ranks(others)}) were replaced too"
        if others
        else "no other rank is known to hold the same state: there is no DDP, no mesh with a "
        "dimension of replicas, and no retrying(replicas=)"
    )
    return (
        f"the state of rank {rank} was lost with its process: {why}. Restore a checkpoint on all "
        "ranks."
    )


# -- tensors --------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    tensor: Tensor
    buffers: list[Tensor]

    def plain(self, alike: bool = False) -> _Plain:
        return _Plain(self.buffers, alike, self.tensor.device.type)


class _Buffers:
    """The copies of tensors that one snapshot holds, and reuses for the next."""

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}
        self._before: dict[int, _Saved] = {}

    def begin(self) -> None:
        self._before, self._saved = self._saved, {}

    def save(self, tensor: Tensor) -> _Saved:
        """Add a tensor; :meth:`end` copies its data."""
        saved = self._saved.get(id(tensor))
        if saved is None:
            leaves = [*c10d.leaves_of(tensor)]
            saved = self._before.get(id(tensor))
            if saved is None or not _alike(saved.buffers, leaves):
                saved = _Saved(tensor, [_buffer_for(leaf) for leaf in leaves])
            self._saved[id(tensor)] = saved
        return saved

    def end(self) -> None:
        """Copy the data of all added tensors."""
        self._before = {}
        c10d.copy_tensors(*self._both())

    def restore(self) -> None:
        into, of = self._both()
        c10d.copy_tensors(of, into)

    def _both(self) -> tuple[list[Tensor], list[Tensor]]:
        saved = self._saved.values()
        return (
            [buffer for entry in saved for buffer in entry.buffers],
            [leaf for entry in saved for leaf in c10d.leaves_of(entry.tensor)],
        )


def _alike(buffers: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
    return len(buffers) == len(leaves) and all(
        a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        for a, b in zip(buffers, leaves, strict=True)
    )


def _buffer_for(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return torch.empty_like(tensor, memory_format=torch.preserve_format)
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


_PLAIN = (numbers.Number, str, bytes, type(None), torch.dtype, torch.device)
"""Types of values that cannot be changed in place."""


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _refuse_unknown(value: Any) -> None:
    if isinstance(value, dict):
        for item in value.values():
            _refuse_unknown(item)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            _refuse_unknown(item)
    elif not (isinstance(value, (Tensor, *_PLAIN)) or _is_array(value)):
        raise InvalidOptionError(
            f"retrying(state=...): a {type(value).__name__} in a dict or list cannot be restored "
            "in place. Pass tensors, arrays, numbers, strings, dicts and lists there, and an "
            "object with state_dict() and load_state_dict() as a separate entry of `state`."
        )


class _Tree:
    """A nested value that a program may change in place: tensors, dicts, lists and plain data."""

    def __init__(self, value: Any, buffers: _Buffers) -> None:
        self._value = value
        self._kept: Any
        if isinstance(value, Tensor):
            self._kept = buffers.save(value)
        elif isinstance(value, dict):
            self._kept = {key: _Tree(item, buffers) for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            self._kept = [_Tree(item, buffers) for item in value]
        else:
            self._kept = copy.deepcopy(value)

    def restored(self) -> Any:
        """The restored value, with the original dict, list and tensor objects."""
        value = self._value
        if isinstance(value, Tensor):
            return value
        if isinstance(value, dict):
            contents = {key: tree.restored() for key, tree in self._kept.items()}
            value.clear()
            value.update(contents)
            return value
        if isinstance(value, list):
            value[:] = [tree.restored() for tree in self._kept]
            return value
        if isinstance(value, tuple):
            return _sequence(type(value), [tree.restored() for tree in self._kept])
        if _is_array(value):
            value[...] = self._kept
            return value
        return copy.deepcopy(self._kept)

    def plain(self, like: Tensor | None = None) -> Any:
        """The saved value as plain data; tensors of the shape of ``like`` are marked."""
        if isinstance(self._value, Tensor):
            alike = like is not None and self._value.shape == like.shape
            return self._kept.plain(alike)
        if isinstance(self._value, dict):
            return {key: tree.plain(like) for key, tree in self._kept.items()}
        if isinstance(self._value, (list, tuple)):
            return _sequence(type(self._value), [tree.plain(like) for tree in self._kept])
        return self._kept


def _sequence(kind: Any, parts: list[Any]) -> Any:
    """A list, tuple or named tuple of its parts."""
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


class _Plain(NamedTuple):
    """The data of a tensor that is sent; ``alike`` if it is of the kind of another one there."""

    data: list[Tensor]
    alike: bool
    device_type: str


def _revived(value: Any, like: Tensor | None = None) -> Any:
    if isinstance(value, _Plain):
        if value.alike and like is not None:
            tensor = torch.empty_like(like.detach())
            c10d.copy_tensors([*c10d.leaves_of(tensor)], value.data)
            return tensor
        return value.data[0].to(value.device_type, copy=True)
    if isinstance(value, dict):
        return {key: _revived(item, like) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return _sequence(type(value), [_revived(item, like) for item in value])
    return value


# -- parts ----------------------------------------------------------------------------------------


class _Part:
    """The state of one object. All methods are local, and empty by default."""

    def take(self) -> None: ...
    def reset(self) -> None: ...  # clear the state of an unfinished step
    def restore(self) -> None: ...  # the data of tensors is already restored
    def export(self) -> Any: ...  # the copied state, for a process that must hold the same
    def load(self, exported: Any) -> None: ...
    def remake(self) -> None: ...  # recreate what must be equal on all ranks with that state
    def replicas(self, rank: int) -> set[int] | None: ...  # None if unknown


class _Module(_Part):
    def __init__(self, module: torch.nn.Module, buffers: _Buffers) -> None:
        self._module = module
        self._buffers = buffers
        obstacle = c10d.training_obstacle(module)
        if obstacle:
            raise InvalidOptionError(
                f"retrying(state=...): {type(module).__name__} cannot be reset after a fault: "
                f"{obstacle}. Nothing was started. Leave it out, and recreate it in steps with "
                "`attempt` above 1."
            )

    def take(self) -> None:
        save = self._buffers.save
        self._parameters = [(p, save(p)) for p in c10d.module_parameters(self._module)]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else save(parameter.grad))
            for parameter, _ in self._parameters
        ]
        self._registered = [
            (owner, name, parameter)
            for owner in self._module.modules()
            for name, parameter in c10d.registered_parameters(owner).items()
        ]
        self._named = [
            (owner, name, buffer, None if buffer is None else save(buffer))
            for owner in self._module.modules()
            for name, buffer in c10d.registered_buffers(owner).items()
        ]
        self._held = [
            (owner, name, save(getattr(owner, name)))
            for owner, name in c10d.held_gradients(self._module)
        ]
        self._flags = [
            (owner, name, getattr(owner, name)) for owner, name in c10d.step_flags(self._module)
        ]
        base = torch.nn.Module.get_extra_state
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in self._module.modules()
            if type(module).get_extra_state is not base
        ]

    def reset(self) -> None:
        c10d.reset_step(self._module)

    def restore(self) -> None:
        for module, name, registered in self._registered:
            parameters = c10d.registered_parameters(module)
            if parameters.get(name) is not registered:  # the step has replaced it
                parameters[name] = registered
        for parameter, gradient, _ in self._gradients:
            parameter.grad = gradient
        for owner, name, buffer, _ in self._named:
            c10d.registered_buffers(owner)[name] = buffer
        for held, name, saved in self._held:
            setattr(held, name, saved.tensor)
        for owner, name, value in self._flags:
            setattr(owner, name, value)
        for module, extra in self._extra:
            module.set_extra_state(copy.deepcopy(extra))

    def export(self) -> Any:
        return {
            "parameters": [saved.plain() for _, saved in self._parameters],
            "gradients": [saved and saved.plain() for _, _, saved in self._gradients],
            "buffers": [saved and saved.plain() for _, _, _, saved in self._named],
            "flags": [flag for owner, _, flag in self._flags if isinstance(owner, torch.nn.Module)],
            "extra": [extra for _, extra in self._extra],
        }

    def load(self, exported: Any) -> None:
        self.take()
        with torch.no_grad():
            pairs = zip(self._parameters, exported["parameters"], strict=True)
            for (parameter, _), given in pairs:
                c10d.copy_tensors([*c10d.leaves_of(parameter)], given.data)
            for (parameter, _), given in zip(self._parameters, exported["gradients"], strict=True):
                parameter.grad = given and _revived(given._replace(alike=True), parameter)
            for (owner, name, buffer, _), given in zip(
                self._named, exported["buffers"], strict=True
            ):
                if given is not None and buffer is not None:
                    c10d.copy_tensors([*c10d.leaves_of(buffer)], given.data)
                else:
                    c10d.registered_buffers(owner)[name] = given and _revived(given)
        flags = [(owner, n) for owner, n, _ in self._flags if isinstance(owner, torch.nn.Module)]
        for (owner, name), value in zip(flags, exported["flags"], strict=True):
            setattr(owner, name, value)
        for (module, _), extra in zip(self._extra, exported["extra"], strict=True):
            module.set_extra_state(extra)

    def remake(self) -> None:
        c10d.remake_step(self._module)

    def replicas(self, rank: int) -> set[int] | None:
        return c10d.replicas_of(self._module, rank)


class _Optimizer(_Part):
    def __init__(self, optimizer: torch.optim.Optimizer, buffers: _Buffers) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        if isinstance(getattr(optimizer, "optim", None), torch.optim.Optimizer):
            raise InvalidOptionError(
                f"retrying(state=...): {type(optimizer).__name__} keeps its state in another "
                "optimizer, `optim`; nothing was started. Pass that optimizer."
            )

    def take(self) -> None:
        self._groups = [
            (group, {k: _Tree(v, self._buffers) for k, v in group.items() if k != "params"})
            for group in self._optimizer.param_groups
        ]
        self._state = {p: _Tree(v, self._buffers) for p, v in self._optimizer.state.items()}

    def restore(self) -> None:
        for group, trees in self._groups:
            for name in {*group} - {*trees, "params"}:
                del group[name]
            group.update({name: tree.restored() for name, tree in trees.items()})
        state = {parameter: tree.restored() for parameter, tree in self._state.items()}
        self._optimizer.state.clear()
        self._optimizer.state.update(state)

    def export(self) -> Any:
        index = {id(parameter): number for number, parameter in enumerate(self._parameters())}
        return {
            "groups": [{k: tree.plain() for k, tree in trees.items()} for _, trees in self._groups],
            "state": {index[id(p)]: tree.plain(p) for p, tree in self._state.items()},
        }

    def load(self, exported: Any) -> None:
        for group, given in zip(self._optimizer.param_groups, exported["groups"], strict=True):
            group.update(_revived(given))
        parameters = [*self._parameters()]
        self._optimizer.state.clear()
        for number, given in exported["state"].items():
            parameter = parameters[number]
            self._optimizer.state[parameter] = _revived(given, parameter)

    def _parameters(self) -> Iterator[Tensor]:
        for group in self._optimizer.param_groups:
            yield from group["params"]


class _Values(_Part):
    """A tensor, or dicts and lists of tensors, that the program changes in place."""

    def __init__(self, value: Any, buffers: _Buffers) -> None:
        _refuse_unknown(value)
        self._value = value
        self._buffers = buffers

    def take(self) -> None:
        _refuse_unknown(self._value)
        self._tree = _Tree(self._value, self._buffers)

    def restore(self) -> None:
        self._tree.restored()

    def export(self) -> Any:
        return self._tree.plain()

    def load(self, exported: Any) -> None:
        if isinstance(self._value, Tensor):
            c10d.copy_tensors([*c10d.leaves_of(self._value)], exported.data)
        elif isinstance(self._value, list):
            self._value[:] = _revived(exported)
        else:
            self._value.clear()
            self._value.update(_revived(exported))


class _Stateful(_Part):
    """An object with a method that returns its state and one that loads it."""

    def __init__(self, value: Any, give: str, take: str) -> None:
        self._value = value
        self._give: Callable[[], Any] = getattr(value, give)
        self._load: Callable[[Any], Any] = getattr(value, take)

    def take(self) -> None:
        self._kept = copy.deepcopy(self._give())
        self._stages = c10d.scaler_stages(self._value)

    def restore(self) -> None:
        self._load(copy.deepcopy(self._kept))
        if self._stages is not None:
            c10d.set_scaler_stages(self._value, self._stages)

    def export(self) -> Any:
        return self._kept

    def load(self, exported: Any) -> None:
        self._load(exported)


_METHODS = (
    ("state_dict", "load_state_dict"),
    ("get_states", "set_states"),  # megatron-core's tracker of random generators
    ("get_state", "set_state"),  # torch.Generator
    ("getstate", "setstate"),  # random.Random
)


class _Pipeline(_Part):
    """A pipeline, which holds microbatches during a step and no state between steps."""

    def __init__(self, schedule: Any, stages: Sequence[Any]) -> None:
        self._schedule = schedule
        self._stages = stages

    def reset(self) -> None:
        c10d.reset_pipeline(self._schedule, self._stages)


def _part(value: Any, buffers: _Buffers) -> _Part:
    if isinstance(value, torch.nn.Module):
        return _Module(value, buffers)
    if isinstance(value, torch.optim.Optimizer):
        return _Optimizer(value, buffers)
    if isinstance(value, (Tensor, dict, list)):
        return _Values(value, buffers)
    stages = c10d.stages_of(value)
    if all(hasattr(stage, "clear_runtime_states") for stage in stages):
        return _Pipeline(value, stages)
    for give, take in _METHODS:
        if callable(getattr(value, give, None)) and callable(getattr(value, take, None)):
            return _Stateful(value, give, take)
    raise InvalidOptionError(
        f"retrying(state=...): {type(value).__name__} is neither a module nor an optimizer nor a "
        "tensor, dict or list, and has no state_dict() and load_state_dict(); nothing was started. "
        "Leave it out, and restore it in steps with `attempt` above 1."
    )


class _Random:
    def take(self) -> None:
        self._states = [(random.setstate, random.getstate())]
        if numpy := sys.modules.get("numpy"):
            self._states.append((numpy.random.set_state, numpy.random.get_state()))
        for source in filter(None, (torch, devices.runtime())):
            self._states.append((source.set_rng_state, source.get_rng_state()))

    def restore(self) -> None:
        for set_state, state in self._states:
            set_state(state)


# -- from one process to another ------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1, value.shape, value.dtype, value.device.type


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, receive: Callable[[Tensor], Tensor]) -> None:
        super().__init__(file)
        self._receive = receive
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, noted: Any) -> Tensor:
        number, shape, dtype, device_type = noted
        if number not in self._tensors:
            self._tensors[number] = self._receive(torch.empty(shape, dtype=dtype)).to(device_type)
        return self._tensors[number]


def _send(value: Any, to: int) -> None:
    """Send a value to a rank: first all but its tensors, then each tensor."""
    file, device = io.BytesIO(), _device()
    pickler = _Pickler(file)
    pickler.dump(value)
    dist.send_object_list([file.getvalue()], to, device=device)
    for tensor in pickler.tensors:
        dist.send(tensor.to(device).contiguous(), to)


def _receive(source: int) -> Any:
    device, given = _device(), [b""]

    def receive(tensor: Tensor) -> Tensor:
        into = tensor.to(device)
        dist.recv(into, source)
        return into.cpu()

    dist.recv_object_list(given, source, device=device)
    return _Unpickler(io.BytesIO(given[0]), receive).load()


def _device() -> torch.device:
    world = c10d.world()
    served = {} if world is None else c10d.device_backends(world)
    if "cpu" in served or devices.runtime() is None:
        return torch.device("cpu")
    return torch.device(next(iter(served)), devices.current_index() or 0)
