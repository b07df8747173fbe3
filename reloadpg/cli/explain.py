"""``reloadpg explain``: what a script's groups would be to reloadpg, in a job of any size.

The script runs as one rank, here, without the other ranks and without GPUs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidOptionError, format_ranks
from .console import Line, Page, Table, natural, positive, progress, say, seconds, show
from .explain_run import Run, run_script

if TYPE_CHECKING:
    from .explain_policy import Explanation

__all__ = ["add"]


def add(subcommands: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subcommands.add_parser(
        "explain",
        usage="%(prog)s SCRIPT --world-size N [options] [-- ARGUMENT ...]",
        help="which groups of a script would be reloadable, in a job of any size",
        description=(
            "Run a script as one rank of a job of N ranks, with fake groups whose collectives do "
            "nothing, and say which of its groups would be reloadable, which would not and why, "
            "and how much memory an offload would give back. Exit code 1 if the script raised or "
            "created no group."
        ),
    )
    parser.add_argument("script", metavar="SCRIPT", help="the script; its arguments follow --")
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument(
        "--world-size", type=positive, required=True, metavar="N", help="ranks of the job"
    )
    parser.add_argument(
        "--rank", type=natural, default=0, metavar="R", help="the rank to look at (default: 0)"
    )
    parser.add_argument(
        "--device",
        type=_device_type,
        default="cuda",
        metavar="TYPE",
        help="accelerator that the job runs on, for groups that name no backend (default: cuda)",
    )
    parser.add_argument(
        "--backends",
        metavar="NAME[,NAME]",
        help="as for install (default: what the script gives it, or every accelerator's)",
    )
    parser.add_argument("--min-size", type=positive, help="as for install (default: likewise)")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="end the script after so many seconds (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.set_defaults(run=_run, script_arguments=[])


def _device_type(text: str) -> str:
    """``cuda`` of ``cuda:0`` too: which one of its kind does not matter."""
    return re.sub(r":\d+$", "", text)


def _run(options: argparse.Namespace) -> int:
    refusal = _refusal(options)
    if refusal:
        say(f"reloadpg explain: {refusal}", sys.stderr)
        return 2
    job = f"as rank {options.rank} of {options.world_size}"
    with progress(f"running {options.script} {job}; groups created") as update:
        run = run_script(
            options.script,
            options.script_arguments,
            module=options.module,
            rank=options.rank,
            world_size=options.world_size,
            device=options.device,
            timeout=options.timeout,
            progress=update,
        )
    try:
        explanation = _explanation(options, run)
    except InvalidOptionError as error:
        say(f"reloadpg explain: {error}", sys.stderr)
        return 2
    if options.json:
        ended = {"error": run.error, "traceback": run.trace, "timed_out": run.timed_out}
        say(json.dumps({**explanation.to_dict(), **ended}, indent=1))
    else:
        show(_page(options, run, explanation))
    return 1 if run.error or not run.groups else 0


def _refusal(options: argparse.Namespace) -> str:
    if options.rank >= options.world_size:
        return f"--rank {options.rank} is not in a job of {options.world_size} ranks"
    if not options.module and not Path(options.script).is_file():
        return f"there is no file {options.script!r}; nothing was run. For a module use -m."
    from torch.distributed import Backend

    known = sorted(name for name in Backend.default_device_backend_map if name.isidentifier())
    if options.device not in known:
        return (
            f"torch knows no device {options.device!r} here ({', '.join(known)}); nothing was run."
        )
    return ""


def _explanation(options: argparse.Namespace, run: Run) -> Explanation:
    from ..policy import Policy
    from .explain_policy import Explanation, decide

    given = {"backends": None, "min_size": 2, "world": True, **(run.policy or {})}
    if options.backends is not None:
        given["backends"] = options.backends.split(",")
    if options.min_size is not None:
        given["min_size"] = options.min_size
    # The script may have registered a backend of its own, which this process does not know.
    noted = {name for group in run.groups for name in group["devices"].values()}
    backends = given["backends"]
    if backends is not None and set(backends) <= noted:
        policy = Policy(frozenset(backends), given["min_size"], given["world"])
    else:
        policy = Policy.of(backends, given["min_size"], given["world"])
    decisions = decide(run.groups, policy, script_installs=run.policy is not None)
    return Explanation(options.rank, options.world_size, policy, decisions, run.others)


def _page(options: argparse.Namespace, run: Run, explanation: Explanation) -> Page:
    job = f"rank {explanation.rank} of {explanation.world_size}"
    parts: list[Line | Table] = [Line(f"reloadpg explain: {options.script}, {job}", "head")]
    if run.groups:
        parts += [Line(""), _table(explanation), Line("")]
        parts += _summary(run, explanation)
    else:
        parts.append(Line("The script created no process group.", "warning"))
        parts.append(Line("Groups of other processes that the script starts are not seen."))
    if run.timed_out:
        parts.append(
            Line(
                f"The script was still running after {options.timeout:g} s and was ended; groups "
                "that it creates later are not shown. --timeout gives it longer.",
                "warning",
            )
        )
    if run.error:
        parts += [Line(""), Line(f"The script did not end well: {run.error}", "bad")]
        # The last line of a traceback is the error, which stands above.
        trace = run.trace.strip().splitlines()[:-1] or run.output.strip().splitlines()
        parts += [Line(f"  {line}", "note") for line in trace[-8:]]
        parts.append(Line("Groups that it would have created after that are not shown."))
    return Page(parts)


def _table(explanation: Explanation) -> Table:
    rows: list[list[object]] = []
    tones = []
    for one in explanation.decisions:
        verdict = "reloadable" if one.reloadable else "bypasses"
        reason = ", ".join(filter(None, (one.reason, "destroyed later" * one.destroyed)))
        name = one.name if len(one.name) <= 16 else f"{one.name[:8]}..."
        rows.append([name, one.desc, len(one.ranks), _shortened(one.ranks), one.backend])
        rows[-1] += [verdict, reason]
        tones.append("good" if one.reloadable else "note")
    return Table(["group", "desc", "size", "ranks", "backend", "reloadpg", "why"], rows, tones)


def _summary(run: Run, explanation: Explanation) -> list[Line]:
    count, reloadable = len(explanation.decisions), len(explanation.reloadable)
    lines = [Line(f"{reloadable} of {count} groups of this rank would be reloadable.", "head")]
    for reason, number in explanation.bypassed.most_common():
        lines.append(Line(f"  {number} would not: {reason}"))
    if explanation.others:
        lines.append(Line(f"  {explanation.others} more are other ranks' (not a member)"))
    if run.policy is None:
        lines.append(Line("The script does not call reloadpg.install(); as if it did so first."))
    least, most = (size / 1e9 for size in explanation.memory_bytes)
    if explanation.communicators:
        from .explain_policy import SOURCE

        count = explanation.communicators
        communicators = f"{count} NCCL communicator{'' if count == 1 else 's'}"
        lines.append(
            Line(
                f"An offload would give back about {least:.1f} to {most:.1f} GB of this rank's "
                f"GPU ({communicators}, each used before).",
                "head",
            )
        )
        lines.append(Line(f"  This is an estimate: {SOURCE}.", "note", 2))
    return lines


def _shortened(ranks: Any) -> str:
    text = format_ranks(ranks)
    return text if len(text) <= 24 else f"{text[:21]}..."
