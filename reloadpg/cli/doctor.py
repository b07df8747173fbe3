"""``reloadpg doctor``: what, here or in a job, keeps offload and reload from working.

Also for use inside a program, where it sees that program's own state::

    from reloadpg.cli.doctor import diagnose

    diagnosis = diagnose()
    assert diagnosis.ok, str(diagnosis)
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .console import Line, Page, existing_file, progress, say, show
from .doctor_autoinstall import check_autoinstall
from .doctor_imports import import_modules, import_of_script
from .doctor_job import check_job, check_launcher
from .doctor_patches import check_early_aliases, check_foreign_wrappers
from .doctor_torch import check_nccl, check_nccl_settings, check_suspend, check_torch
from .findings import LEVELS, Diagnosis, Finding
from .records import STATUS_DIR

__all__ = ["add", "diagnose"]

TONES = dict(zip(LEVELS, ("good", "note", "warning", "bad"), strict=True))


def diagnose(
    script: str | os.PathLike[str] | None = None,
    *,
    modules: Sequence[str] = (),
    status_dir: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Look for what keeps offload and reload from working, in this process and around it.

    Local; changes nothing but what importing the named modules changes. Raises nothing because
    of what it finds.

    Args:
        script: a script whose imports are imported first; it is not run itself.
        modules: modules that are imported first.
        status_dir: the status directory of a running job, whose ranks are compared.
        environ: the variables to look at; ``os.environ`` if None.
    """
    variables = os.environ if environ is None else environ
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("torch", check_torch),
        ("autoinstall", lambda: check_autoinstall(variables)),
        ("nccl", check_nccl),
        ("nccl settings", lambda: check_nccl_settings(variables)),
        ("suspend", lambda: check_suspend(variables)),
        ("import", lambda: import_modules(modules)),
        ("script", lambda: import_of_script(Path(script)) if script is not None else iter(())),
        ("foreign wrapper", check_foreign_wrappers),
        ("early alias", check_early_aliases),
        ("launcher", lambda: check_launcher(variables)),
    ]
    if status_dir is not None:
        checks.append(("job", lambda: check_job(Path(status_dir))))
    return Diagnosis([finding for name, check in checks for finding in _carried_out(name, check)])


def _carried_out(name: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # a torch that is too old or broken fails in many ways
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        return [Finding(name, "note", f"could not be looked at: {why}")]


# ---------------------------------------------------------------------------------------------


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "doctor",
        help="what keeps offload and reload from working here",
        description=(
            "Look at torch, NCCL and its settings, at who else patches the functions that create "
            "groups, at modules that hold them early, at the launcher, and at the ranks of a "
            "running job. Exit code 1 if there is a problem."
        ),
    )
    parser.add_argument(
        "script",
        nargs="?",
        type=existing_file,
        metavar="SCRIPT",
        help="import what this script imports first; the script is not run",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import this module first; may be given several times",
    )
    parser.add_argument(
        "--status-dir",
        type=Path,
        metavar="DIR",
        help=f"compare the ranks of the running job that has this directory in {STATUS_DIR}",
    )
    parser.add_argument("--strict", action="store_true", help="exit code 1 on a warning too")
    parser.add_argument("--json", action="store_true", help="all findings as JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for python -m: --import finds the user's modules
    with progress("importing torch and what the job imports"):
        diagnosis = diagnose(options.script, modules=options.modules, status_dir=options.status_dir)
    if options.json:
        say(json.dumps(diagnosis.to_dict(), indent=1))
    else:
        show(_page(diagnosis))
    bad = not diagnosis.ok or (options.strict and bool(diagnosis.at("warning")))
    return 1 if bad else 0


def _page(diagnosis: Diagnosis) -> Page:
    from .. import __version__

    head = f"reloadpg {__version__}, Python {platform.python_version()}, {platform.node()}"
    lines = [Line(head, "head"), Line("")]
    width = max(len(finding.check) for finding in diagnosis.findings)
    for finding in diagnosis.findings:
        level = f"[{finding.level}]".ljust(9)
        head = f"  {level}  {finding.check.ljust(width)}  "
        lines.append(Line(f"{head}{finding.message}", TONES[finding.level], len(head)))
        if finding.remedy and finding.level != "ok":
            lines.append(Line(f"{' ' * len(head)}-> {finding.remedy}", "", len(head) + 3))
    problems, warnings = len(diagnosis.at("problem")), len(diagnosis.at("warning"))
    verdict = "No problem was found" if not problems else f"{_counted(problems, 'problem')}"
    lines += [Line(""), Line(f"{verdict}; {_counted(warnings, 'warning')}.", "head")]
    return Page(lines)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
