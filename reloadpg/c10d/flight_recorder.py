"""The dump of NCCL's flight recorder at a timeout, in place of torch's first NCCL group.

A rank of ``ProcessGroupNCCL`` that notices a timeout or an error sets a key in the store. On each
rank the process's first group of this class, by its ``uid``, polls the key and writes the dump
(``HeartbeatMonitor::runLoop``; torch 2.8, 2.13, and the older engine of 2.15, over stand-ins). Its
number cannot be given to another group, so no rank writes a dump once it was released.

``ProcessGroupNCCL2`` (2.15) writes the dump of the rank that notices the timeout, in any group.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch._C import _distributed_c10d as _cpp
from torch.distributed import ProcessGroup
from torch.torch_version import TorchVersion

from .backends import monitored_backends
from .needs import missing

DUMP_SIGNAL = "exception_dump"
"""The key, beneath all prefixes of the store, by which a rank signals a timeout."""

_POLL = "TORCH_NCCL_COORD_CHECK_MILSEC"
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_SWITCHES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_OFF = ("0", "n", "no", "f", "false")


def lacks_dumps(groups: Iterable[ProcessGroup], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether none of these groups writes dumps, although one of them may signal a timeout.

    Args:
        groups: all live groups of this process that torch created.
        environ: the environment, in which dumps may be disabled.
    """
    if _given(environ, _SIZES) == "0" or _given(environ, _SWITCHES).lower() in _OFF:
        return False
    if missing("flight recorder"):
        return False
    backends: list[Any] = [one for group in groups for one in monitored_backends(group)]
    return bool(backends) and all(backend.uid for backend in backends)


def dump_interval(environ: Mapping[str, str] = os.environ) -> float:
    """Seconds between two looks at the signal, as torch's group takes them."""
    given = environ.get(_POLL, "")
    return int(given) / 1000 if given.isdecimal() and int(given) else 1.0


def write_dump(rank: int, environ: Mapping[str, str] = os.environ) -> str:
    """Write what torch would write to the file that torch would write; return its path.

    Blocking, local. Torch asks the device whether each recorded operation has ended.
    """
    dump = cast(Any, _cpp)._dump_nccl_trace(
        includeCollectives=True, includeStackTraces=True, onlyActive=False
    )
    path = Path(f"{_given(environ, _PREFIXES) or _default_prefix(environ)}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump)
    return str(path)


def _default_prefix(environ: Mapping[str, str]) -> str:
    home = Path(environ.get("HOME", "/tmp"), ".cache")
    if TorchVersion(torch.__version__) < "2.9":
        return str(home / "torch" / "nccl_trace_rank_")
    return str(Path(environ.get("XDG_CACHE_HOME") or home) / "torch" / "comm_lib_trace_rank_")


def _given(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """The value of the first of these variables that is set; empty if none is."""
    return next((environ[name] for name in names if environ.get(name)), "")
