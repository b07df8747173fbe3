"""The process in which ``reloadpg explain`` runs a script: one rank without other ranks."""

from __future__ import annotations

import ctypes
import inspect
import json
import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
import torch.distributed as dist
import wrapt
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Backend, BackendConfig

from .. import environment
from ..c10d import creation, stores, tables
from ..groups.registry import registry
from ..groups.selection import Selected, Selection
from ..groups.sets import TRAINER, creators


def play() -> NoReturn:
    """Run the script that the command line of this process names, and end the process."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive the command
    logging.getLogger("reloadpg").setLevel(logging.ERROR)  # its warnings are about the fake groups
    given, records = json.loads(sys.argv[1]), open(int(sys.argv[2]), "w")  # noqa: SIM115
    rank = FakeRank(given["backends"], records)
    script, error = given["script"], ""
    sys.argv = [script, *given["script_arguments"]]
    sys.path.insert(0, os.getcwd() if given["module"] else str(Path(script).absolute().parent))
    run = runpy.run_module if given["module"] else runpy.run_path
    try:
        run(script, run_name="__main__")
    except SystemExit as end:
        error = f"the script called sys.exit({end.code!r})" if end.code else ""
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        traceback.print_exception(raised)
    rank.note_world()
    rank.note("end", error=error)
    sys.stdout.flush()
    os._exit(0)  # an exit handler of the script could hang without its peers


class FakeRank:
    """The rank of this process. Its groups have torch's backend ``fake``, whose collectives return.

    Wrapped are the functions that create groups, to which the backend is an argument, and this
    library's bring-up, which waits for other ranks. No other function is replaced.
    """

    def __init__(self, backends: str | None, records: TextIO) -> None:
        self._backends = None if backends is None else frozenset(backends.split(","))
        here = torch.accelerator.current_accelerator()
        self._device = "cuda" if here is None else here.type
        self._records, self._create = records, dist.new_group
        self._requested = self._world_by = ""
        self._world_rule: Selection | None = None
        torchs = creation.creator_modules()
        _wrap(torchs, "init_process_group", self._init_process_group)
        _wrap(torchs, "destroy_process_group", self._destroy_process_group)
        _wrap(torchs, "new_group", self._new_group)
        _wrap(torchs, "split_group", self._split_group)
        _wrap([environment], "init_distributed", self._init_distributed)
        torch.nn.modules.module.register_module_forward_pre_hook(_reduce_alone)

    def note(self, kind: str, **values: Any) -> None:
        """Write a record now: the script may raise, exit or hang later."""
        record = {"kind": kind, "installed": registry.selection is not None, **values}
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()

    def _init_process_group(self, wrapped: Any, given: dict[str, Any]) -> None:
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        wrapped("fake", store=stores.fake_store(), timeout=given.get("timeout"), **place)
        self._requested = str(given.get("backend") or "undefined").lower()
        self._world_by = next(creators(), "")
        self._world_rule = None
        self._note_group(dist.group.WORLD, self._requested, self._world_by)

    def note_world(self) -> None:
        """Record the default group again if the selection has changed since.

        ``install`` takes over one that exists, and so does ``register_default_process_group`` of
        :mod:`reloadpg.integrations.slime`.
        """
        rule = registry.selection
        if dist.is_initialized() and rule is not None and self._world_rule != rule:
            self._note_group(dist.group.WORLD, self._requested, self._world_by)

    def _destroy_process_group(self, wrapped: Any, given: dict[str, Any]) -> None:
        self.note_world()
        wrapped(**given)

    def _new_group(self, wrapped: Any, given: dict[str, Any]) -> Any:
        self.note_world()  # the script may be ended before its end
        # Options and devices belong to the requested backend.
        kept = {name: given[name] for name in given if name not in ("pg_options", "device_id")}
        group = wrapped(**{**kept, "backend": "fake"})
        asked = str(given.get("backend") or "fake").lower()
        if not tables.is_non_member(group):  # get_backend() returns "fake"
            asked = self._requested if asked == "fake" else asked
            self._note_group(group, asked, next(creators(), ""))
        return group

    def _split_group(self, wrapped: Any, given: dict[str, Any]) -> Any:
        # Torch splits communicators of an accelerator only, so the parts are created as new groups.
        parent: Any = given.get("parent_pg") or dist.group.WORLD
        mine = [part for part in given.get("split_ranks") or () if parent.rank() in part]
        if not mine:
            return None
        ranks = dist.get_process_group_ranks(parent)
        part = {name: given.get(name) for name in ("timeout", "backend", "group_desc")}
        return self._new_group(self._create, {**part, "ranks": [ranks[n] for n in sorted(mine[0])]})

    def _note_group(self, group: Any, asked: str, made_by: str) -> None:
        """Record a group, and whether ``install`` would make it reloadable."""
        if asked == "undefined":  # torch uses the backend of the job's accelerator
            asked = f"{self._device}:{Backend.default_device_backend_map[self._device]}"
        config = str(BackendConfig(Backend(asked)))
        ranks, desc = dist.get_process_group_ranks(group), str(group.group_desc)
        is_world, rule = group is dist.group.WORLD, Selection()
        name = "WORLD" if is_world else tables.name_of(group)
        if registry.selection is not None:
            rule = registry.selection
        if is_world:
            self._world_rule = rule
        if self._backends is not None:
            rule = replace(rule, backends=self._backends)
        in_set = TRAINER if is_world else rule.set_now()
        entry = tables.Entry(name, ranks, asked, config, desc)
        decision, devices = rule.decide(entry, lambda: in_set, is_world=is_world), entry.devices
        selected = decision.devices if isinstance(decision, Selected) else ()
        stay = ", ".join(f"{one}:{devices[one]} stays" for one in devices if one not in selected)
        shown = "" if is_world or desc == "undefined" else desc
        names: dict[str, Any] = {"name": name, "desc": shown, "in_set": in_set}
        reason = stay if isinstance(decision, Selected) else decision.reason
        state = {"reloadable": bool(selected), "reason": reason}
        state["nccl"] = any(devices[device].startswith("nccl") for device in selected)
        self.note("group", **names, **state, ranks=ranks, backend=asked, made_by=made_by)

    def _init_distributed(self, wrapped: Any, given: dict[str, Any]) -> Any:
        if not dist.is_initialized():
            dist.init_process_group(given.get("backend"))
        context = wrapped(device=given.get("device"), seed=given.get("seed"))
        if (dims := given.get("mesh_dims")) is not None:
            sizes = environment.resolve_mesh_dims(dims, dist.get_world_size())
            shape, names = tuple(sizes.values()), tuple(sizes)
            context.mesh = init_device_mesh(context.device.type, shape, mesh_dim_names=names)
        return context


def _wrap(owners: Sequence[Any], name: str, call: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Replace a function in these modules by ``call(original, arguments by name)``."""

    def wrapper(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
        return call(wrapped, inspect.signature(wrapped).bind(*args, **kwargs).arguments)

    replacement = wrapt.FunctionWrapper(getattr(owners[0], name), wrapper)
    for owner in owners:
        if hasattr(owner, name):
            setattr(owner, name, replacement)


def _reduce_alone(module: torch.nn.Module, _: object) -> None:
    """Let DDP keep its gradients: the work of torch's fake backend has no result to reduce."""
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        with suppress(RuntimeError):  # it has a hook
            module.register_comm_hook(None, noop_hook)
