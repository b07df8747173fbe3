"""``reloadpg doctor``: find causes that prevent offload and reload in this environment.

It can also run inside a program, with that program's state::

    from reloadpg.cli.doctor import diagnose

    for finding in diagnose():
        print(finding.level, finding.check, finding.message)
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from types import FunctionType
from typing import Any

from .. import _TESTED_TORCH
from ..errors import InvalidOptionError, UnsupportedTorchError
from ..reports import groups_of_one_rank
from ..settings import (
    AUTOINSTALL,
    IS_OFF,
    VARIABLES,
    autoinstall_requested,
    install_options,
    is_off,
    unknown_variables,
)
from ..texts import counted
from .console import Finding, existing_file, say

OLDEST, NEWEST = _TESTED_TORCH

REPORTED = (
    *("RELOADPG_", "NCCL_", "TORCH_", "TORCHCOMM_", "GLOO_", "CUDA_", "HIP_", "PYTORCH_"),
    "OMP_NUM_",
)
"""Prefixes of the variables that are shown, for a bug report; others are omitted."""

CREATORS = ("init_process_group", "new_group", "split_group")
"""The functions that are patched."""

Findings = Iterator[Finding]
Check = tuple[str, Callable[[], Findings]]


def diagnose(
    script: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Find causes that prevent offload and reload, in this process and its environment.

    Local; changes nothing except by importing the script's modules. Never raises because of a
    finding.

    Args:
        script: a script whose imports are imported first; the script does not run.
        environ: the variables to look at; ``os.environ`` if None.
    """
    variables = os.environ if environ is None else environ
    checks: list[Check] = [
        ("torch", check_torch),
        ("variables", partial(check_variables, variables)),
        ("autoinstall", partial(check_autoinstall, variables)),
        ("device", check_device),
        ("nccl settings", partial(check_nccl_settings, variables)),
        *([("script", partial(import_of_script, Path(script)))] if script is not None else []),
        ("torch names", check_names),
        ("patches", check_patches),
        ("foreign wrapper", check_wrappers),
        ("launcher", partial(check_launcher, variables)),
        ("groups", check_groups_of_one_rank),
    ]
    findings = []
    for name, check in checks:
        try:
            findings += list(check())
        except Exception as error:  # a torch that is too old or broken fails in many ways
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            findings.append(Finding(name, "note", f"could not be checked: {why}"))
    return findings


# -- the command ------------------------------------------------------------------------------


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="find causes that prevent offload and reload",
        description=(
            "Check torch, NCCL and its settings, other patches of the functions that create "
            "groups, and the launcher. Paste the output into a bug report. Exit code 1 if there "
            "is a problem."
        ),
        epilog="Example: reloadpg doctor train.py",
    )
    parser.add_argument(
        "script",
        nargs="?",
        type=existing_file,
        metavar="SCRIPT",
        help="first import the imports of this script; the script does not run",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    findings = diagnose(options.script)
    say(_page(findings, os.environ))
    return int(any(one.level == "problem" for one in findings))


def _page(findings: Sequence[Finding], environ: Mapping[str, str]) -> str:
    """The findings with what a bug report needs: versions, machine and settings."""
    from .. import __version__

    versions = [f"reloadpg {__version__}", f"Python {platform.python_version()}"]
    for name in ("torch", "wrapt", "ray", "megatron-core", "torch-memory-saver"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version_of(name)}")
    lines = [", ".join(versions), f"{platform.platform()}, {os.cpu_count()} cores", ""]
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        level = f"[{finding.level}]".ljust(9)
        lines += finding.lines(f"  {level}  {finding.check.ljust(width)}  ")
    shown = [f"  {name}={environ[name]}" for name in sorted(environ) if name.startswith(REPORTED)]
    lines += ["", "settings:", *(shown or ["  none are set"])]
    levels = [finding.level for finding in findings]
    problems, warnings = levels.count("problem"), counted(levels.count("warning"), "warning")
    found = counted(problems, "problem") if problems else "No problem was found"
    return "\n".join([*lines, "", f"{found}; {warnings}."])


# -- torch and NCCL ---------------------------------------------------------------------------


def check_torch() -> Findings:
    supported = f"{_shown(OLDEST)} to {_shown(NEWEST)}"
    try:
        import torch
    except Exception as error:
        why = f"cannot be imported: {type(error).__name__}: {error}"
        yield Finding("torch", "problem", why, f"install torch {supported} in this environment")
        return
    text = str(getattr(torch, "__version__", ""))
    version = tuple(map(int, re.findall(r"\d+", text)[:2]))
    if version < OLDEST:
        why = f"version {text} is too old: {supported} are supported"
        yield Finding("torch", "problem", why, f"install torch {_shown(OLDEST)} or later")
    elif version > NEWEST:
        why = f"version {text} is newer than {_shown(NEWEST)}, the newest that was tested"
        remedy = "test an offload and a reload of your job, or use a newer reloadpg"
        yield Finding("torch", "warning", why, remedy)
    else:
        yield Finding("torch", "ok", f"version {text}")


def check_names() -> Findings:
    """Check the private names of torch that this library uses."""
    found = partial(Finding, "torch names")
    try:
        from ..c10d import needs
    except UnsupportedTorchError as error:
        what, _, remedy = str(error).partition(" Nothing was changed. ")
        yield found("problem", what, remedy)
        return
    yield found("ok", f"{len(needs.NEEDS)} are used; none is missing")


def check_device() -> Findings:
    from ..c10d.devices import name_devices
    from ..c10d.nccl import nccl_version

    if devices := name_devices():
        yield Finding("device", "ok", devices)
    else:
        what = "no accelerator here: checks that need a GPU were skipped"
        yield Finding("device", "note", what, "also run doctor on a machine of the job")
    if version := nccl_version():
        yield Finding("nccl", "ok", f"version {_shown(version)}")
    else:
        what = "this torch has no NCCL: gloo and the simulated accelerator only"
        remedy = "on a machine with GPUs, install a CUDA build of torch"
        yield Finding("nccl", "note", what, remedy)


def check_nccl_settings(environ: Mapping[str, str]) -> Findings:
    """Check the settings of NCCL, and of torch for NCCL, that affect offload and reload."""
    from ..environment.network import advisory_timeouts

    found, warned = partial(Finding, "nccl settings"), set[str]()
    hook = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    if environ.get(hook, "0") not in ("", "0"):
        # Each new segment of memory is registered with every communicator in a table that
        # shutdown() does not clear (ProcessGroupNCCL.cpp of torch 2.8 to 2.15).
        what = (
            f"{hook} is set: torch keeps registering memory with communicators that were released, "
            "and freeing memory can then raise an error"
        )
        pools = "deregister memory pools in on_offload() and register them in on_reload()"
        warned.add(hook)
        yield found("warning", what, f"unset it, or {pools}")
    saver, register = "torch_memory_saver", "NCCL_GRAPH_REGISTER"
    graphs = environ.get(register, "")
    if (saver in sys.modules or saver in environ.get("LD_PRELOAD", "")) and graphs != "0":
        warned.add(register)
        what = f"{register}={graphs}" if graphs else f"the environment has no {register}"
        what += f": with {saver}, graphs whose buffers NCCL has registered hang (SGLang#40648)"
        yield found("warning", what, f"set {register}=0 where CUDA graphs are captured")
    if what := advisory_timeouts(environ):
        warned.add(what.partition("=")[0])
        yield found("warning", what, "unset it; the default of torch is 3")
    prefixes = ("NCCL_", "TORCH_NCCL_")
    others = sorted(name for name in environ if name.startswith(prefixes) and name not in warned)
    if others or not warned:
        shown = ", ".join(f"{name}={environ[name]}" for name in others)
        yield found("ok", shown or "none are set")


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


# -- this process and the job -----------------------------------------------------------------


def check_variables(environ: Mapping[str, str]) -> Findings:
    for name in unknown_variables(environ):
        yield Finding(
            "variables",
            "problem",
            f"{name} is unknown to reloadpg, which cannot be installed while it is set",
            "correct the name or unset it"
            + ("" if "did you mean" in name else f"; known are {', '.join(sorted(VARIABLES))}"),
        )
    if is_off(environ):
        remedy = "unset RELOADPG to make groups reloadable"
        yield Finding("variables", "warning", f"{IS_OFF}, with plain torch", remedy)
    try:
        install_options(environ)
    except InvalidOptionError as error:
        what, _, remedy = str(error).partition("; nothing was installed. ")
        yield Finding("variables", "problem", f"{what}; reloadpg cannot be installed", remedy)


def check_autoinstall(environ: Mapping[str, str]) -> Findings:
    """Check that reloadpg is installed in this process, where the environment asks for it."""
    if is_off(environ):
        return
    with suppress(InvalidOptionError):  # of an invalid value 'import torch' has said so
        if not autoinstall_requested(environ):
            return
    from .. import status

    if status().installed:
        yield Finding("autoinstall", "ok", "installed")
        return
    yield Finding(
        "autoinstall",
        "problem",
        f"not installed in this process ({AUTOINSTALL}={environ[AUTOINSTALL]!r})",
        "'import torch' says why on stderr, if it tried; otherwise unset "
        "TORCH_DEVICE_BACKEND_AUTOLOAD, see that pip has installed reloadpg in this environment, "
        "and that the program does not call reloadpg.uninstall()",
    )


def check_launcher(environ: Mapping[str, str]) -> Findings:
    from ..environment import detect_environment

    try:
        found = detect_environment(environ)
    except Exception as error:
        yield Finding("launcher", "problem", str(error), "start the job through its launcher")
        return
    if found.source == "single":
        yield Finding("launcher", "note", "none: this is a single process")
        return
    yield Finding(
        "launcher",
        "ok",
        f"{found.source}: rank {found.rank} of {found.world_size}, node {found.node_rank} of "
        f"{found.num_nodes}, rendezvous at {found.master_addr}:{found.master_port}",
    )


def check_groups_of_one_rank() -> Findings:
    """Check, inside a program, that no group of one rank keeps its communicator."""
    if "reloadpg.lifecycle.install" in sys.modules:  # otherwise nothing is installed
        from .. import status

        what, _, remedy = groups_of_one_rank(status().bypassed_groups).partition("; ")
        if what:
            yield Finding("groups", "warning", what, remedy)


# -- patches of the functions that create groups ----------------------------------------------


def check_patches() -> Findings:
    """List what install() wraps; this process needs no installation."""
    from ..groups.patches import wrapped_names

    yield Finding("patches", "note", f"install() wraps {', '.join(wrapped_names())}")


def check_wrappers() -> Findings:
    """Find wrappers of other libraries over the functions that are patched."""
    from ..c10d.creation import creator_modules

    found, seen = partial(Finding, "foreign wrapper"), dict[int, str]()
    for module in creator_modules():
        for name in CREATORS:
            layer = vars(module).get(name)
            while layer is not None:
                function = getattr(layer, "_self_wrapper", layer)  # not wrapt's class
                if not _is_of("torch", function) and not _is_of("reloadpg", function):
                    # wraps() copies the name of the wrapped function; the code keeps its own name.
                    code = getattr(function, "__code__", None)
                    who = (
                        f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})" if code else ""
                    )
                    what = f"{module.__name__}.{name} is wrapped by {who or repr(function)}"
                    seen.setdefault(id(function), what)
                layer = getattr(layer, "__wrapped__", None)
    remedy = "remove it if it replaces or records groups, like reloadpg; otherwise install it "
    remedy += "before reloadpg.install(), whose wrapper then calls it"
    for what in seen.values():
        yield found("problem", what, remedy)
    if not seen:
        yield found("ok", f"none over {', '.join(CREATORS)}")


def _is_of(package: str, function: Any) -> bool:
    """Whether a function's code belongs to a package; wrappers copy all other attributes."""
    if type(function) is not FunctionType or package not in sys.modules:
        return False
    home = Path(sys.modules[package].__file__ or "").parent
    return home in Path(function.__code__.co_filename).parents


def import_of_script(script: Path) -> Findings:
    """Import the modules that a script imports outside of functions. The script does not run."""
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except (OSError, SyntaxError, ValueError) as error:
        remedy = "pass a Python script; for a shell script, the one that it starts"
        yield Finding("script", "problem", f"{script} cannot be read: {error}", remedy)
        return
    directory = str(script.absolute().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as the interpreter does for a script
    for name in dict.fromkeys(_imported(tree)):
        try:
            import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may call sys.exit while it is imported
            why = str(error).strip().partition("\n")[0]
            what = f"{name} cannot be imported: {type(error).__name__}: {why}"
            remedy = "its changes to torch were not checked; run doctor where the job runs"
            yield Finding("script", "warning", what, remedy)


def _imported(node: ast.AST) -> Iterator[str]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom) and inner.module and not inner.level:
            yield inner.module
        elif not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _imported(inner)
