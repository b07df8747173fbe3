"""``doctor``: torch, NCCL and its settings. Works with any torch, and with none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from .findings import Finding

__all__ = ["check_nccl", "check_nccl_settings", "check_suspend", "check_torch"]

OLDEST, NEWEST = (2, 8), (2, 15)
"""The torch versions that reloadpg is tested with, and all between."""

SUSPENDS = (2, 29, 7)
"""The first NCCL that can suspend a communicator."""

Version = tuple[int, ...]


def check_torch() -> Iterator[Finding]:
    """Whether torch can be imported, and is of a version that this library knows."""
    try:
        import torch
    except Exception as error:
        yield Finding(
            "torch",
            "problem",
            f"cannot be imported: {type(error).__name__}: {error}",
            f"install torch {_shown(OLDEST)} to {_shown(NEWEST)} in this environment",
        )
        return
    text = str(getattr(torch, "__version__", ""))
    version = _version(text)
    if version is None:
        yield Finding(
            "torch",
            "problem",
            f"version {text!r} cannot be read, so it is unknown whether it can be used",
            f"use a torch of version {_shown(OLDEST)} to {_shown(NEWEST)}",
        )
    elif version[:2] < OLDEST:
        yield Finding(
            "torch",
            "problem",
            f"version {text} is too old: {_shown(OLDEST)} to {_shown(NEWEST)} are supported",
            f"install torch {_shown(OLDEST)} or later",
        )
    elif version[:2] > NEWEST:
        yield Finding(
            "torch",
            "warning",
            f"version {text} is newer than {_shown(NEWEST)}, the newest that was tested",
            "run your own offload and reload test with it, or look for a newer reloadpg",
        )
    else:
        yield Finding("torch", "ok", f"version {text}")


def _version(text: str) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def nccl_version() -> Version | None:
    """The version of the NCCL that torch has loaded; None if this torch has none."""
    try:
        import torch

        version = cast(Any, torch.cuda.nccl).version()  # asks the library, needs no GPU
    except Exception:
        return None
    return version if isinstance(version, tuple) else None


def check_nccl() -> Iterator[Finding]:
    """Which NCCL torch has."""
    version = nccl_version()
    if version is None:
        yield Finding(
            "nccl",
            "note",
            "this torch has no NCCL: gloo and the simulated accelerator only",
            "for a machine with GPUs, install a CUDA build of torch",
        )
    else:
        yield Finding("nccl", "ok", f"version {_shown(version)}")


def torch_can_suspend() -> bool:
    """Whether torch's backends have ``suspend``: 2.12 and later."""
    try:
        import torch.distributed as dist
    except Exception:
        return False
    # Both classes inherit it from the C++ class of all backends; a build may lack one of them.
    names = ("ProcessGroupNCCL", "ProcessGroupGloo")
    return any(hasattr(getattr(dist, name, None), "suspend") for name in names)


def check_suspend(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether communicators can be suspended, which is another way than recreating them."""
    instead = 'strategy="recreate" needs none of this'
    version = nccl_version()
    if not torch_can_suspend():
        why = "this torch cannot suspend communicators (2.12 and later can)"
    elif version is None:
        why = "there is no NCCL in this torch"
    elif version < SUSPENDS:
        why = f"NCCL {_shown(version)} cannot suspend ({_shown(SUSPENDS)} and later can)"
    elif _cumem(environ) is not None:
        why = f"{_cumem(environ)} makes a suspend give nothing back"
    else:
        yield Finding("suspend", "ok", f"torch and NCCL {_shown(version)} can suspend")
        return
    yield Finding("suspend", "note", f"not available: {why}", instead)


def check_nccl_settings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The settings of NCCL, and of torch's use of it, that matter to offload and reload."""
    cumem = _cumem(environ)
    if cumem is not None:
        yield Finding(
            "nccl settings",
            "problem",
            f"{cumem}: NCCL then says that a suspend worked and gives no memory back",
            'unset it to use strategy="suspend" or "auto"; strategy="recreate" is not affected',
        )
    if environ.get("TORCH_DIST_INIT_BARRIER") == "1":
        yield Finding(
            "nccl settings",
            "warning",
            "TORCH_DIST_INIT_BARRIER=1: all ranks take part in the rebuild of every group",
            "unset it; a reload then costs what a rank's own groups cost",
        )
    if environ.get("NCCL_RUNTIME_CONNECT") == "1":
        yield Finding(
            "nccl settings",
            "note",
            "NCCL_RUNTIME_CONNECT=1: a communicator takes its memory at its first use",
            "measure memory after a collective on each group",
        )
    known = {name: value for name, value in environ.items() if _is_setting(name)}
    in_files = {name: value for name, (value, _) in _file_settings(environ).items()}
    everything = sorted({**in_files, **known}.items())
    shown = ", ".join(f"{name}={value}" for name, value in everything)
    yield Finding("nccl settings", "ok" if cumem is None else "note", shown or "none are set")


def _is_setting(name: str) -> bool:
    return name.startswith(("NCCL_", "TORCH_NCCL_"))


def _cumem(environ: Mapping[str, str]) -> str | None:
    """What switches NCCL's cuMem allocator off, and where it is set; None if nothing does."""
    if "NCCL_CUMEM_ENABLE" in environ:
        value, where = environ["NCCL_CUMEM_ENABLE"], "the environment"
    else:
        value, where = _file_settings(environ).get("NCCL_CUMEM_ENABLE", ("", ""))
    return f"NCCL_CUMEM_ENABLE=0 in {where}" if value.strip() == "0" else None


def _file_settings(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What NCCL's configuration files set, and which; a variable of the environment wins.

    NCCL reads the file that ``NCCL_CONF_FILE`` names, or else ``~/.nccl.conf``, and then
    ``/etc/nccl.conf``; the first one to set a name wins.
    """
    named = environ.get("NCCL_CONF_FILE")
    home = environ.get("HOME")
    files = [Path(named)] if named else [Path(home, ".nccl.conf")] if home else []
    found: dict[str, tuple[str, str]] = {}
    for file in (*files, Path("/etc/nccl.conf")):
        try:
            lines = file.read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and not name.lstrip().startswith("#"):
                found.setdefault(name.strip(), (value.strip(), str(file)))
    return found


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
