"""Run a script as one rank of a job that does not exist, on torch's fake backend.

Torch creates the groups, with ``fake`` in place of the requested backend; their collectives return
immediately. Only functions that wait for another rank or need a device are replaced. The script
runs in a forked process, which writes a record of each creation when it happens, so the records
exist even if the script raises, exits, hangs or is killed.

If the job's device is CUDA and there is none, the stand-ins for CUDA provide it: the forked process
then executes this module again, with their libraries. Where they cannot be used, as with a CPU
build of torch, tensors of the device are on ``meta``.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import faulthandler
import functools
import importlib
import inspect
import json
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
import wrapt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torch.nn.parallel import DistributedDataParallel

import reloadpg

from .. import c10d, environment
from ..c10d import explaining
from ..environment.model import DistributedEnvironment, on_nodes_of
from ..environment.teardown import OwnGroups
from ..groups.loans import borrower
from ..groups.registry import registry
from ..groups.selection import Selection
from ..groups.sets import TRAINER, creators
from ..testing import standins
from ..testing._tracebacks import folded_traceback
from .console import progress
from .cuda_on_meta import use_meta_for_cuda

RECEIVING = ("broadcast_object_list", "recv_object_list", "scatter_object_list", "gather_object")
"""Functions that receive objects from other ranks."""

LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "LSB_", "JSM_", "TORCHELASTIC_")
NODE = 8
"""Ranks per node, as on most machines with GPUs."""

_ABOVE_SCRIPT = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


def run_script(options: argparse.Namespace) -> dict[str, Any]:
    """Run the script to its end or its timeout. Blocking; leaves no process.

    Returns ``records``: one for each creation (``group``, or ``other`` if the rank is not a
    member), for each group ``destroyed``, and for the ``end``; ``error`` and ``traceback`` of a
    script that ended early, or empty; the end of its ``output``; whether it ``timed_out``;
    ``cuda``: ``standins`` or ``meta`` if the script ran on those, else empty, and ``why`` not on
    the stand-ins.
    """
    c10d.refuse_missing("explain", "explain")
    with (
        tempfile.TemporaryFile("a+") as written,
        tempfile.TemporaryFile() as output,
        _cuda(options) as (cuda, why, environment),
    ):
        pid = os.fork()  # before the progress starts a thread
        if pid == 0:
            _play(options, written, output.fileno(), environment)
        code, deadline = None, time.monotonic() + options.timeout
        try:
            with progress(
                f"running {options.script} as rank {options.rank} of {options.world_size}"
            ):
                while code is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                    done, status = os.waitpid(pid, os.WNOHANG)
                    code = os.waitstatus_to_exitcode(status) if done else None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if code is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        for file in (written, output):
            file.seek(0)
        records = []
        for line in written:
            with suppress(ValueError):  # an incomplete last line of a killed process
                records.append(json.loads(line))
        text = output.read()[-20_000:].decode(errors="replace")
    last = records[-1] if records else {}
    ended = {name: last.get(name, "") for name in ("error", "traceback")}
    if code is not None and last.get("kind") != "end":
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        ended["error"] = f"the script ended its process ({how})"
    state = {"output": text, "timed_out": code is None, "cuda": cuda, "why": why}
    return {"records": records, **ended, **state}


@contextmanager
def _cuda(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield what provides CUDA devices, why it is not the stand-ins, and their environment."""
    if options.device != "cuda" or torch.cuda.is_available():
        yield "", "", {}
        return
    with ExitStack() as stack:
        try:
            with progress("building the stand-ins for CUDA"):
                environment = {**stack.enter_context(standins.job()).environment}
        except standins.StandinsError as error:
            kind, why, environment = "meta", str(error), {}
        else:
            devices = str(_ranks_per_node(options))
            defaults = {"RELOADPG_STANDIN_DEVICES": devices, "RELOADPG_STANDIN_DEVICE_MIB": "81920"}
            kind, why, environment = "standins", "", {**defaults, **os.environ, **environment}
            environment.pop("CUDA_VISIBLE_DEVICES", None)
        yield kind, why, environment


def _ranks_per_node(options: argparse.Namespace) -> int:
    return min(int(options.world_size), NODE)


def _play(
    options: argparse.Namespace, records: TextIO, output: int, environment: dict[str, str]
) -> NoReturn:
    """Play the rank in this process, which executes this module again for an environment."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the parent
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(output, stream)
        if environment:
            os.set_inheritable(records.fileno(), True)
            kept = {name: getattr(options, name) for name in _OPTIONS}
            call = f"import sys; sys.path[:] = {sys.path}; from {__name__} import play_again"
            given = f"{call}; play_again()", json.dumps(kept), str(records.fileno())
            os.execve(sys.executable, [sys.executable, "-c", *given], environment)
        _play_rank(options, records)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


_OPTIONS = ("script", "script_arguments", "module", "rank", "world_size", "device")


def play_again() -> None:
    """Play the rank after the process was executed again."""
    options, records = sys.argv[1:]
    _play_rank(argparse.Namespace(**json.loads(options)), open(int(records), "a"))  # noqa: SIM115


def _play_rank(options: argparse.Namespace, records: TextIO) -> NoReturn:
    try:
        faulthandler.enable(2)  # the stack of a crash is shown like other output
        # After a fork torch replaces its thread pool at the next use, which is not thread-safe: the
        # threads of autograd, one per device, would abort ("Invalid thread pool!", seen on 2.13).
        torch.set_num_threads(torch.get_num_threads())
        rank, size, local = options.rank, options.world_size, _ranks_per_node(options)
        for name in list(os.environ):  # no launcher started this process
            if name.startswith(LAUNCHERS) or name == "TORCH_DIST_INIT_BARRIER":
                del os.environ[name]
        environ = DistributedEnvironment(
            "explain", **on_nodes_of(local, rank, size), master_port=29500
        )
        os.environ.update(environ.variables())
        without_gpu = options.device == "cuda" and not torch.cuda.is_available()
        if without_gpu:
            use_meta_for_cuda(local)
        if without_gpu or standins.enabled():
            _without_compilers()
        fake = FakeRank(options, records)
        fake.patch()
        fake.run()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # an exit handler of the script could hang without its peers
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _without_compilers() -> None:
    """Run compiled functions eagerly, and skip Triton's kernels, which need a GPU."""
    torch.compile = functools.partial(torch.compile, disable=True)  # type: ignore[assignment]
    with suppress(ImportError):
        jit: Any = importlib.import_module("triton.runtime.jit")
        jit.KernelInterface.__getitem__ = lambda self, grid: lambda *_, **__: None


class FakeRank:
    """The rank of this process."""

    def __init__(self, options: argparse.Namespace, records: TextIO) -> None:
        self.options = options
        self.backends: dict[str, str] = {}  # the requested ones, by name of the group
        self._pid, self._records, self._create = os.getpid(), records, dist.new_group

    def note(self, kind: str, **values: Any) -> None:
        """Write a record. A forked child of the script writes none."""
        if os.getpid() == self._pid:
            self._records.write(json.dumps({"kind": kind, **values}) + "\n")
            self._records.flush()

    def patch(self) -> None:
        """Replace the functions that create groups or need other ranks or devices."""
        torchs = c10d.creator_modules()
        _replace(torchs, "init_process_group", self._init_process_group)
        _replace(torchs, "new_group", self._new_group)
        _replace(torchs, "split_group", self._split_group)
        _replace(torchs, "destroy_process_group", self._destroy_process_group)
        _replace(torchs, "get_backend", self._get_backend)
        for name in (*RECEIVING, "all_gather_object", "monitored_barrier"):
            _replace(torchs, name, _receive_nothing)
        for name in explaining.BACKEND_GETTERS:
            self._note_borrowers(name)
        _replace([torch.cuda], "set_device", _if_possible)
        _replace([torch.accelerator], "set_device_index", _if_possible)
        ours = (environment, reloadpg)
        _replace(ours, "init_distributed", self._init_distributed)
        _replace(ours, "ensure_process_group", self._ensure_process_group)
        _replace([DistributedDataParallel], "forward", _without_reduction)
        explaining.verify_no_parameters()
        for name in ("register_comm_hook", explaining.BUILTIN_HOOK):
            _replace([DistributedDataParallel], name, lambda wrapped, given: None)

    def _note_borrowers(self, name: str) -> None:
        """Record which code takes backend objects out of groups. It keeps torch's function."""
        original: Any = getattr(dist.ProcessGroup, name, None)
        if original is None:
            return

        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            if (frame := borrower(1)) is not None:
                where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                by = str(frame.f_globals.get("__name__", "?"))
                group_name = "WORLD" if group is dist.group.WORLD else c10d.name_of(group)
                self.note("borrowed", name=group_name, by=by, where=where)
            return original(group, *args, **kwargs)

        setattr(dist.ProcessGroup, name, method)

    def _init_process_group(self, wrapped: Any, given: dict[str, Any]) -> None:
        backend, device = given.get("backend"), given.get("device_id")
        if backend is None and device is not None:
            kind = getattr(device, "type", self.options.device)
            backend = Backend.default_device_backend_map.get(kind)
        place = {"rank": self.options.rank, "world_size": self.options.world_size}
        wrapped("fake", store=explaining.fake_store(), timeout=given.get("timeout"), **place)
        self._note_group(dist.group.WORLD, backend or "undefined")

    def _new_group(self, wrapped: Any, given: dict[str, Any]) -> Any:
        backend = given.get("backend") or dist.get_backend()
        # Options and devices belong to the requested backend.
        kept = {name: given[name] for name in given if name not in ("pg_options", "device_id")}
        group = wrapped(**{**kept, "backend": "fake"})
        if c10d.is_non_member(group):
            self.note("other")
        else:
            self._note_group(group, backend)
        return group

    def _split_group(self, wrapped: Any, given: dict[str, Any]) -> Any:
        # Torch splits communicators of an accelerator only, so the parts are created as new groups.
        parent: Any = given.get("parent_pg") or dist.group.WORLD
        mine = [part for part in given.get("split_ranks") or () if parent.rank() in part]
        if not mine:
            self.note("other")
            return None
        ranks = dist.get_process_group_ranks(parent)
        part = {
            "ranks": [ranks[one] for one in sorted(mine[0])],
            "timeout": given.get("timeout"),
            "backend": given.get("backend") or dist.get_backend(parent),
            "group_desc": given.get("group_desc") or f"{parent.group_desc}:split",
        }
        return self._new_group(self._create, part)

    def _destroy_process_group(self, wrapped: Any, given: dict[str, Any]) -> None:
        group = given.get("group")
        if group is not None and group is not dist.group.WORLD:
            with suppress(KeyError):
                self.note("destroyed", name=c10d.name_of(group))
        wrapped(**given)

    def _get_backend(self, wrapped: Any, given: dict[str, Any]) -> str:
        """The requested backend, which the script and torch pass to ``new_group``."""
        made: str = wrapped(**given)
        group: Any = given.get("group") or dist.group.WORLD
        return self.backends.get(c10d.name_of(group), made)

    def _init_distributed(self, wrapped: Any, given: dict[str, Any]) -> Any:
        dims, device = given.get("mesh_dims"), given.get("device")
        kind = self.options.device if device is None else torch.device(device).type
        owned, own = not dist.is_initialized(), OwnGroups()
        if owned:
            default = Backend.default_device_backend_map[kind]
            dist.init_process_group(given.get("backend") or default)
        context = wrapped(device="cpu", seed=given.get("seed"), adopt=True)
        if dims is None:
            return dataclasses.replace(context, owned=owned, own=own)
        sizes = reloadpg.environment.resolve_mesh_dims(dims, dist.get_world_size())
        mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return dataclasses.replace(context, owned=owned, own=own, mesh=mesh)

    def _ensure_process_group(self, wrapped: Any, given: dict[str, Any]) -> bool:
        creates = not dist.is_initialized() and self.options.world_size > 1
        if creates:
            dist.init_process_group("gloo")
        return creates

    def _note_group(self, group: Any, backend: object) -> None:
        name, asked = c10d.name_of(group), str(backend).lower()
        self.backends[name] = asked
        if asked == "undefined":  # torch uses the backend of the job's accelerator
            kind = self.options.device
            asked = f"{kind}:{Backend.default_device_backend_map[kind]}"
        devices = BackendConfig(Backend(asked)).get_device_backend_map()
        self.note(
            "group",
            name="WORLD" if group is dist.group.WORLD else name,
            desc="" if group is dist.group.WORLD else str(group.group_desc),
            ranks=dist.get_process_group_ranks(group),
            backend=asked,
            devices={device: str(one) for device, one in devices.items()},
            made_by=next(creators(), ""),
            set=TRAINER if group is dist.group.WORLD else _set_now(),
            options=dict(reloadpg.status().options),
        )

    def run(self) -> None:
        script, error, trace = self.options.script, "", ""
        sys.argv = [script, *self.options.script_arguments]
        try:
            if self.options.module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(script).absolute().parent))
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            error = f"the script called sys.exit({end.code!r})" if end.code else ""
        except BaseException as raised:
            frames = raised.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in _ABOVE_SCRIPT:
                frames = frames.tb_next
            trace = folded_traceback(raised.with_traceback(frames))
            error = f"{type(raised).__name__}: {raised}"
        self.note("end", options=dict(reloadpg.status().options), error=error, traceback=trace)


def _replace(owners: Iterable[Any], name: str, call: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Replace a function in these modules by ``call(original, arguments by name)``."""

    def wrapper(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return call(wrapped, inspect.signature(wrapped).bind(*args, **kwargs).arguments)

    found = [owner for owner in owners if hasattr(owner, name)]
    replacement = wrapt.FunctionWrapper(getattr(found[0], name), wrapper)
    for owner in found:
        setattr(owner, name, replacement)


def _receive_nothing(wrapped: Any, given: dict[str, Any]) -> Any:
    """Leave objects unchanged, except for those that this rank sends to itself."""
    mine = dist.get_rank(given.get("group"))
    if given.get("scatter_object_input_list"):
        given["scatter_object_output_list"][0] = given["scatter_object_input_list"][mine]
    if given.get("object_gather_list"):
        given["object_gather_list"][mine] = given["obj"]
    if "object_list" in given and "obj" in given:  # one object per rank is expected
        given["object_list"][:] = [given["obj"]] * len(given["object_list"])
    return given.get("src")


def _set_now() -> str | None:
    """The set of a group that the script creates now, by its options of ``install``."""
    options = registry.options
    return (Selection() if options is None else options.selection).set_now()


def _if_possible(wrapped: Any, given: dict[str, Any]) -> Any:
    # The device does not exist here; a torch without CUDA lacks even the function.
    with suppress(RuntimeError, AssertionError, ValueError, AttributeError):
        return wrapped(*given.values())


def _without_reduction(wrapped: Any, given: dict[str, Any]) -> Any:
    """Run a DistributedDataParallel's module: its reducer, in C++, needs real collectives."""
    ddp = wrapped.__self__
    inputs, kwargs = given.get("inputs", ()), given.get("kwargs", {})
    if ddp.device_ids:
        place = torch.device(ddp.device_type, ddp.device_ids[0])
        (inputs,), (kwargs,) = explaining.to_kwargs(
            inputs, kwargs, place, ddp.use_side_stream_for_tensor_copies
        )
    return ddp.module(*inputs, **kwargs)
