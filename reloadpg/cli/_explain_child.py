"""One rank of a job that is not there: runs a script with fake groups, and notes what it creates.

Started by ``reloadpg explain`` as a process of its own. The script's default group becomes a fake
one of the size that was asked for, whatever backend it names; collectives on it do nothing and
return at once, and objects that other ranks would send do not come. Each creation is written to a
file as it happens, so that what was seen is known also of a script that raises, exits or is ended.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
import select
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import wrapt
from torch.distributed.distributed_c10d import Backend, BackendConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from .. import c10d

__all__ = ["main"]

Wrapped = Callable[..., Any]

_RUNNERS = frozenset({__file__, runpy.__file__, "<frozen runpy>"})


class FakeRank:
    """The rank that this process plays, and the replacements of torch's functions.

    Attributes:
        settings: what the parent passed.
        backend: the backend that the script asked for its default group, as torch calls it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings
        self.backend = ""
        self._asked: dict[str, str] = {}
        self._file = open(settings["record"], "a", buffering=1)  # noqa: SIM115 - for life
        self._pid = os.getpid()

    def note(self, kind: str, **values: Any) -> None:
        """Write one record. A forked child of the script writes none."""
        if os.getpid() == self._pid:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    # -- torch's functions ----------------------------------------------------------------------

    def patch(self) -> None:
        """Replace what the script would reach other ranks or devices with."""
        replacements = {
            "init_process_group": self._init_process_group,
            "new_group": self._new_group,
            "split_group": self._split_group,
            "destroy_process_group": self._destroy_process_group,
            "get_backend": self._get_backend,
            "monitored_barrier": self._receive_nothing,
            "broadcast_object_list": self._receive_nothing,
            "recv_object_list": self._receive_nothing,
            "scatter_object_list": self._scatter_object_list,
        }
        for name, replacement in replacements.items():
            wrapper = wrapt.FunctionWrapper(vars(dist)[name], replacement)
            for module in c10d.creator_modules():
                if name in vars(module):
                    setattr(module, name, wrapper)
        for module, name in ((torch.cuda, "set_device"), (torch.accelerator, "set_device_index")):
            setattr(module, name, wrapt.FunctionWrapper(getattr(module, name), self._set_device))
        self._patch_bring_up()

    def _init_process_group(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        asked, device = given.get("backend"), given.get("device_id")
        if asked is None and device is not None:
            kind = getattr(device, "type", self.settings["device"])
            asked = Backend.default_device_backend_map.get(kind)
        self.backend = str(asked or "undefined").lower()
        wrapped(
            "fake",
            store=FakeStore(),
            rank=self.settings["rank"],
            world_size=self.settings["world_size"],
            timeout=given.get("timeout"),
        )
        world = c10d.world()
        if world is not None:
            self._note_group(world, self.backend, is_world=True)

    def _new_group(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        asked = given.pop("backend", None)
        # Torch's own code hands on what get_backend tells it.
        backend = self.backend if asked in (None, "fake") else str(asked).lower()
        # Options and devices are those of a backend that is not here.
        made = wrapped(**{k: v for k, v in given.items() if k not in ("pg_options", "device_id")})
        if c10d.is_non_member(made):
            ranks = given.get("ranks")
            self.note("other", size=None if ranks is None else len(list(ranks)))
        else:
            self._note_group(made, backend)
        return made

    def _split_group(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        # Torch splits communicators of an accelerator only: the parts are made as new groups.
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        parent: Any = given.get("parent_pg") or c10d.world()
        ranks = c10d.ranks_of(parent)
        mine = ranks.index(self.settings["rank"])
        part = next((part for part in given.get("split_ranks") or () if mine in part), None)
        if part is None:
            self.note("other", size=None)
            return None
        create = dist.new_group
        while hasattr(create, "__wrapped__") and hasattr(create, "_self_wrapper"):
            create = create.__wrapped__
        made = create(
            [ranks[one] for one in sorted(part)],
            timeout=given.get("timeout"),
            group_desc=given.get("group_desc") or f"{parent.group_desc}:split",
        )
        asked = given.get("backend")
        backend = self._asked.get(c10d.name_of(parent), self.backend)
        self._note_group(made, backend if asked is None else str(asked).lower())
        return made

    def _destroy_process_group(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        group = args[0] if args else kwargs.get("group")
        if group is not None and group is not c10d.world():
            with suppress(KeyError):
                self.note("destroyed", name=c10d.name_of(group))
        return wrapped(*args, **kwargs)

    def _get_backend(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        """To the script what it asked for. Torch's own code would then turn to GPUs and NCCL."""
        made = wrapped(*args, **kwargs)
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if asker.partition(".")[0] == "torch":
            return made
        group: Any = (args[0] if args else kwargs.get("group")) or c10d.world()
        return self._asked.get(c10d.name_of(group), made)

    def _receive_nothing(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        # Torch would make objects of memory that nobody has written to.
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        return given.get("src")

    def _scatter_object_list(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(wrapped).bind(*args, **kwargs).arguments
        parts = given.get("scatter_object_input_list") or ()
        mine = dist.get_rank(given.get("group"))
        if 0 <= mine < len(parts):
            given["scatter_object_output_list"][0] = parts[mine]

    def _set_device(self, wrapped: Wrapped, _: Any, args: Any, kwargs: Any) -> Any:
        # A device that is not here; a torch without CUDA lacks even the function.
        with suppress(RuntimeError, AssertionError, ValueError, AttributeError):
            return wrapped(*args, **kwargs)

    # -- reloadpg's own bring-up ------------------------------------------------------------------

    def _patch_bring_up(self) -> None:
        """``init_distributed`` meets the other ranks before it creates anything: it must not."""
        from ..environment import bringup
        from ..environment.device import Placement
        from ..environment.mesh_groups import build_mesh

        def place(backend: str | None, device: Any, *_: Any) -> Placement:
            kind = self.settings["device"] if device is None else torch.device(device).type
            named = backend or Backend.default_device_backend_map[kind]
            return Placement(torch.device("cpu"), named, None)

        def bring_up(environment: Any, placement: Placement, *others: Any, **_: Any) -> Any:
            timeout, _init_timeout, sizes = others
            dist.init_process_group(placement.backend, timeout=timeout)
            return None if sizes is None else build_mesh(sizes, placement.device.type, timeout)

        for name, replacement in {"choose_placement": place, "bring_up": bring_up}.items():
            setattr(bringup, name, replacement)

    # -- what is noted ----------------------------------------------------------------------------

    def _note_group(self, group: Any, backend: str, *, is_world: bool = False) -> None:
        name = c10d.name_of(group)
        self._asked[name] = backend
        if backend == "undefined":  # torch takes what the job's accelerators have
            kind = self.settings["device"]
            backend = f"{kind}:{Backend.default_device_backend_map[kind]}"
        devices = BackendConfig(Backend(backend)).get_device_backend_map()
        registry = sys.modules.get("reloadpg.registry")
        options = registry.registry.options if registry is not None else None
        self.note(
            "group",
            name=name,
            desc=str(group.group_desc),
            ranks=list(c10d.ranks_of(group)),
            backend=backend,
            devices={device: str(one) for device, one in devices.items()},
            is_world=is_world,
            installed=options is not None,
        )
        if options is not None:
            self.note_policy(options.selection)

    def note_policy(self, policy: Any) -> None:
        """What the script gave ``install``."""
        backends = None if policy.backends is None else sorted(policy.backends)
        self.note("policy", backends=backends, min_size=policy.min_size, world=policy.world)

    # -- the script -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the script to its end, and note how it ended."""
        script, arguments = self.settings["script"], self.settings["arguments"]
        sys.argv = [script, *arguments]
        self.note("begin")
        try:
            if self.settings["module"]:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(script).absolute().parent))
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                self.note("error", error=f"the script called sys.exit({end.code!r})", trace="")
        except BaseException as error:
            why = f"{type(error).__name__}: {error}"
            self.note("error", error=why, trace=self._trace(error))
        registry = sys.modules.get("reloadpg.registry")
        if registry is not None and registry.registry.options is not None:
            self.note_policy(registry.registry.options.selection)
        self.note("end")

    def _trace(self, error: BaseException) -> str:
        """The traceback from the script on: what runs the script is of no interest."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace))


def _end_with(process: int) -> None:
    """End this process as soon as its parent has ended, however that came about."""
    try:
        ended = os.pidfd_open(process)
    except (OSError, AttributeError):
        return

    def wait() -> None:
        select.select([ended], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def main() -> None:
    """Play the rank that the parent's settings (JSON, the only argument) describe."""
    settings = json.loads(sys.argv[1])
    _end_with(settings["parent"])
    rank = FakeRank(settings)
    rank.patch()
    rank.run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no exit handler of the script may hang without its peers


if __name__ == "__main__":
    main()
