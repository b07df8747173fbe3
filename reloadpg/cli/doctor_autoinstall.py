"""``doctor``: what became of ``RELOADPG_AUTOINSTALL``, which never fails loudly."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

from ..lifecycle.autoinstall import SWITCH
from .findings import Finding

__all__ = ["check_autoinstall"]

_LIMIT_S = 120.0
"""For a process that imports torch, which can take long from a network file system."""

_OFF = frozenset({"", "0", "false", "no", "off"})


def check_autoinstall(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether reloadpg is installed in this process, where the environment asks for it.

    Blocking for some seconds if it is not: only another process can say why.
    """
    if environ.get(SWITCH, "").strip().lower() in _OFF:
        return
    from ..groups.registry import registry

    options = registry.options
    if options is not None:
        backends = options.selection.backends
        yield Finding(
            "autoinstall",
            "ok",
            f"installed: backends {'of accelerators' if backends is None else _listed(backends)}, "
            f"strategy {options.strategy.name}, timeout {options.timeout.total_seconds():g} s",
        )
        return
    said = _said_by_import(environ)
    if said:
        why = said.partition(" Torch is not affected.")[0]
        remedy = f"correct the cause and start again, or unset {SWITCH}"
        yield Finding("autoinstall", "problem", why, remedy)
        return
    yield Finding(
        "autoinstall",
        "problem",
        f"not installed in this process ({SWITCH}={environ[SWITCH]!r})",
        "unset TORCH_DEVICE_BACKEND_AUTOLOAD, see that pip has installed reloadpg in this "
        "environment, and that the program does not call reloadpg.uninstall()",
    )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _said_by_import(environ: Mapping[str, str]) -> str:
    """What autoinstall writes in a fresh process that imports torch; empty if it is content."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import torch"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stderr.splitlines()
    found = [line for line in lines if line.startswith("reloadpg: not installed")]
    return found[0].removeprefix("reloadpg: ") if found else ""
