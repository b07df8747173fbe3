"""``reloadpg explain``: show which groups of a script would be reloadable, in a job of any size.

:mod:`reloadpg.cli.explain_rank` runs the script as one rank, without other ranks and without GPUs,
and records each group. This module shows how ``install`` would treat them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidOptionError
from ..texts import counted, format_ranks
from .console import CommandError, Line, Page, natural, positive, say, seconds, show, tabled

if TYPE_CHECKING:
    from ..groups.selection import Selection

COMMUNICATOR_BYTES = (500_000_000, 1_600_000_000)
"""Smallest and largest measured memory of one NCCL communicator on a GPU."""

SOURCE = (
    "0.5 to 1.6 GB per communicator and GPU, from published measurements: 544 MB with 2 ranks and "
    "688 MB with more on A100, 576 MiB on GB200, about 256 MiB more with NVLS on 8 Hopper GPUs, "
    "up to 512 MiB more for network buffers"
)

PINNED_BYTES = (480 << 20, 720 << 20)
"""Smallest and largest measured pinned host memory of one suspended NCCL communicator."""

_TRACEBACK, _OUTPUT = 30, 8
"""Maximum number of lines of the traceback, or of the script's output, to show."""

NO_VALUES = (
    "The script read a value of a CUDA tensor, which has none here. With torch's CUDA build, "
    "explain runs over stand-ins for CUDA, whose tensors have values."
)

ALONE = "Only this rank ran. Tensors that it would have received are unchanged."

WITHOUT_GPU = {
    "standins": (
        "There is no GPU here, so the script ran over stand-ins for CUDA: its tensors were in host "
        "memory, torch's kernels ran on the CPU, and Triton's did nothing."
    ),
    "meta": (
        "There is no GPU here, and the stand-ins for CUDA cannot be used, so CUDA tensors had a "
        "shape but no values (torch's device meta)."
    ),
}

Record = Mapping[str, Any]


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "explain",
        usage="%(prog)s SCRIPT --world-size N [options] [-- ARGUMENT ...]",
        allow_abbrev=False,  # --mod may be meant for the script
        help="show which groups of a script would be reloadable, in a job of any size",
        description=(
            "Run a script as one rank of a job of N ranks, with fake groups whose collectives do "
            "nothing. Show which of its groups would be reloadable, which would not and why, and "
            "how much memory an offload would release. Exit code 1 if the script raised or "
            "created no group."
        ),
        epilog="Example: reloadpg explain train.py --world-size 64 -- --config small.yaml",
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
        type=lambda text: re.sub(r":\d+$", "", text),  # the index does not matter
        default="cuda",
        metavar="TYPE",
        help="accelerator of the job, for groups that name no backend (default: cuda)",
    )
    parser.add_argument(
        "--backends",
        metavar="NAME[,NAME]",
        help="as for install (default: the script's, or every accelerator backend)",
    )
    parser.add_argument("--min-size", type=positive, help="as for install (default: the script's)")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="S",
        help="end the script after this many seconds (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.set_defaults(
        run=_run,
        script_arguments=[],
        needs={"torch": "cli", "wrapt": "cli", "rich": "cli"},
    )


def _run(options: argparse.Namespace) -> int:
    _check(options)
    from .explain_rank import run_script

    run = run_script(options)
    try:
        result = explain(run["records"], backends=options.backends, min_size=options.min_size)
    except InvalidOptionError as error:
        raise CommandError(str(error)) from None
    result |= {"rank": options.rank, "world_size": options.world_size}
    result |= {name: run[name] for name in ("error", "traceback", "output", "timed_out")}
    result |= {"cuda": run["cuda"], "device_is_here": _is_here(options.device)}
    result["no_standins"] = run["why"]
    if options.json:
        say(json.dumps(result, indent=1))
    else:
        show(_page(options, result))
    return 1 if result["error"] or not result["groups"] else 0


def _check(options: argparse.Namespace) -> None:
    from torch.distributed import Backend

    if options.rank >= options.world_size:
        ranks = f"{options.world_size} ranks"
        raise CommandError(f"--rank {options.rank} is not in a job of {ranks}")
    if not options.module and not Path(options.script).is_file():
        raise CommandError(
            f"there is no file {options.script!r}; nothing was run. For a module use -m."
        )
    known = sorted(name for name in Backend.default_device_backend_map if name.isidentifier())
    if options.device not in known:
        here = ", ".join(known)
        raise CommandError(
            f"torch knows no device {options.device!r} here ({here}); nothing was run."
        )


def _is_here(device: str) -> bool:
    """Whether this machine has a device of that type, as scripts check it."""
    import torch

    try:
        return bool(torch.get_device_module(device).is_available())
    except (RuntimeError, AttributeError):  # torch was built without it
        return False


# -- the selection ----------------------------------------------------------------------------


def explain(
    records: Sequence[Record], *, backends: str | None = None, min_size: int | None = None
) -> dict[str, Any]:
    """Return how ``install`` would treat each recorded group, and an offload's memory.

    ``backends`` and ``min_size`` replace the script's arguments of ``install``.
    """
    from ..groups.selection import Selection

    created = [one for one in records if one["kind"] == "group"]
    given = [one["options"] for one in records if one.get("options")]
    options = {"backends": "accelerators", "min_size": 2, "world": True, **(given or [{}])[-1]}
    named = None if options["backends"] == "accelerators" else options["backends"]
    named = named if backends is None else backends.split(",")
    min_size = min_size or options["min_size"]
    exclude = tuple(options.get("exclude", ()))
    if named is not None and set(named) <= {n for one in created for n in one["devices"].values()}:
        # The script may have registered a backend that this process does not know.
        selection = Selection(frozenset(named), min_size, options["world"], exclude)
    else:
        selection = Selection.of(named, min_size, options["world"], exclude)
    destroyed = {one["name"] for one in records if one["kind"] == "destroyed"}
    groups = []
    for one in created:
        selected, reason = _decision(one, selection, bool(given))
        kept = {name: one[name] for name in ("name", "desc", "ranks", "backend", "made_by", "set")}
        kept["desc"] = "" if one["desc"] == "undefined" else one["desc"]
        outcome = {"selected": selected, "reason": reason, "reloadable": bool(selected)}
        groups.append({**kept, **outcome, "destroyed": one["name"] in destroyed})
    communicators = sum(
        any(one["devices"][device].startswith("nccl") for device in group["selected"])
        for one, group in zip(created, groups, strict=True)
        if not group["destroyed"] and len(group["ranks"]) > 1  # one rank connects to none
    )
    least, most = (communicators * size for size in COMMUNICATOR_BYTES)
    least_pinned, most_pinned = (communicators * size for size in PINNED_BYTES)
    return {
        "policy": {
            "backends": None if selection.backends is None else sorted(selection.backends),
            "min_size": selection.min_size,
            "world": selection.world,
        },
        "script_installs": bool(given),
        "groups": groups,
        "borrowed": _borrowers(records),
        "groups_of_others": sum(one["kind"] == "other" for one in records),
        "bypassed": dict(Counter(g["reason"] for g in groups if not g["selected"]).most_common()),
        "memory": {
            "communicators": communicators,
            "least_bytes": least,
            "most_bytes": most,
            "least_pinned_bytes": least_pinned,
            "most_pinned_bytes": most_pinned,
            "estimated_from": SOURCE,
        },
    }


def _borrowers(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The code that takes backend objects out of groups, with the groups."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in records:
        if one["kind"] == "borrowed":
            names = found.setdefault((one["by"], one["where"]), [])
            names += [one["name"]] * (one["name"] not in names)
    return [{"by": by, "where": where, "groups": g} for (by, where), g in found.items()]


def _decision(group: Record, selection: Selection, script_installs: bool) -> tuple[list[str], str]:
    """Return the devices whose backends would be released, and why others are not."""
    devices, size, is_world = group["devices"], len(group["ranks"]), group["name"] == "WORLD"
    if script_installs and not group["options"] and not is_world:
        return [], "created before reloadpg.install()"
    bypass = selection.bypass(
        devices,
        size,
        name=group["name"],
        desc=group["desc"],
        is_world=is_world,
        in_set=group["set"],
    )
    if bypass is not None:
        return [], bypass.reason
    selected = list(selection.selected(devices, size))
    kept = [f"{device}:{devices[device]}" for device in devices if device not in selected]
    return selected, f"{', '.join(kept)} stays" if kept else ""


# -- the page ---------------------------------------------------------------------------------


def _page(options: argparse.Namespace, result: Record) -> Page:
    head = f"reloadpg explain: {options.script}, rank {result['rank']} of {result['world_size']}"
    parts = [Line(head, "head")]
    if result["groups"]:
        parts += [Line(""), *_table(result["groups"]), Line(""), *_summary(result, options.device)]
    else:
        parts.append(Line("The script created no process group.", "warning"))
        parts.append(Line("Groups in other processes that the script starts are not recorded."))
    if result["cuda"]:
        parts.append(Line(WITHOUT_GPU[result["cuda"]], "note"))
    if result["no_standins"]:
        parts.append(Line(f"  Reason: {result['no_standins']}", "note", 2))
    if result["timed_out"]:
        parts.append(
            Line(
                f"The script was ended after {options.timeout:g} s; later groups are not shown. "
                "To wait longer, use --timeout.",
                "warning",
            )
        )
    if result["error"]:
        parts += [Line(""), Line(f"The script failed: {result['error']}", "bad")]
        # The last line of a traceback is the error, which is printed above.
        lines = result["traceback"].strip().splitlines()[:-1]
        lines = lines[-_TRACEBACK:] or _last_output(result["output"])
        parts += [Line(f"  {line}", "note") for line in lines]
        parts.append(Line("Groups that it would have created later are not shown."))
        if result["cuda"] == "meta" and re.search(r"\bmeta\b", result["error"], re.IGNORECASE):
            parts.append(Line(NO_VALUES, "note"))
        if result["traceback"] and result["groups"]:
            further = " Rank 0 receives less and may get further." if result["rank"] else ""
            parts.append(Line(ALONE + further, "note"))
    return parts


def _last_output(text: str) -> list[str]:
    """The end of the script's output; of a crash its beginning, where the innermost frames are."""
    _, mark, crash = text.partition("\nExtension modules")[0].rpartition("Fatal Python error")
    if mark:
        return f"{mark}{crash}".strip().splitlines()[:_TRACEBACK]
    return text.strip().splitlines()[-_OUTPUT:]


def _table(groups: Sequence[Record]) -> list[Line]:
    """The groups as rows, the most important columns first, since a terminal cuts rows off.

    Reasons are below the table, so that a terminal of 80 columns shows who created a group.
    """
    reasons = _reasons(groups)
    columns: dict[str, Callable[[Record], object]] = {
        "group": lambda one: one["name"] if len(one["name"]) <= 9 else f"{one['name'][:6]}...",
        "size": lambda one: len(one["ranks"]),
        "reloadpg": lambda one: _outcome(one, reasons),
        "backend": lambda one: one["backend"],
        "created by": lambda one: one["made_by"],
        "set": lambda one: one["set"] or "",
        "ranks": lambda one: _short_ranks(one["ranks"]),
        "desc": lambda one: one["desc"],
    }
    if len({one["set"] for one in groups}) < 2:
        del columns["set"]
    rows = [[column(one) for column in columns.values()] for one in groups]
    tones = ["good" if one["reloadable"] else "note" for one in groups]
    return [replace(line, indent=None) for line in tabled(list(columns), rows, tones)]


DESTROYED = "destroyed later"


def _reasons(groups: Sequence[Record]) -> list[str]:
    """What the page says of groups below the table, in the order of its numbers."""
    found = [one["reason"] for one in groups if one["reason"]]
    found += [DESTROYED for one in groups if one["destroyed"]]
    return list(dict.fromkeys(found))


def _outcome(group: Record, reasons: Sequence[str]) -> str:
    """``reloadable`` or ``bypassed``, with the numbers of the reasons."""
    its = (group["reason"], DESTROYED if group["destroyed"] else "")
    numbers = ", ".join(str(reasons.index(one) + 1) for one in its if one)
    outcome = "reloadable" if group["reloadable"] else "bypassed"
    return f"{outcome} ({numbers})" if numbers else outcome


def _short_ranks(ranks: Sequence[int]) -> str:
    """Ranks as text, at most 24 characters: ``0, 2, ..., 62`` if they have one stride."""
    text = format_ranks(ranks)
    if len(text) <= 24:
        return text
    strides = {after - before for before, after in pairwise(ranks)}
    if len(strides) == 1:
        return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return f"{text[:19].rpartition(', ')[0]}, ..."


def _summary(result: Record, device: str) -> list[Line]:
    groups, memory = result["groups"], result["memory"]
    share = f"{sum(one['reloadable'] for one in groups)} of {counted(len(groups), 'group')}"
    lines = [Line(f"{share} of this rank would be reloadable.", "head")]
    for number, reason in enumerate(_reasons(groups), 1):
        count = result["bypassed"].get(reason, 0)
        lines.append(Line(f"  ({number}) {f'{count} would not: ' if count else ''}{reason}", "", 6))
    none = not any(one["reloadable"] for one in groups)
    if none and not result["device_is_here"] and all("gloo" in one["backend"] for one in groups):
        lines.append(
            Line(
                f"There is no {device} device here, so the script may have selected gloo. Run this "
                "on a machine with one, or use --backends gloo to treat these groups as its.",
                "warning",
            )
        )
    if result["groups_of_others"]:
        lines.append(Line(f"  {result['groups_of_others']} more groups do not include this rank."))
    if not result["script_installs"]:
        lines.append(Line("The script does not call reloadpg.install(); shown as if it did."))
    for one in result["borrowed"]:
        taken = f"{one['by']} ({one['where']}) takes backend objects out of"
        which = ", ".join(one["groups"][:3]) + ", ..." * (len(one["groups"]) > 3)
        lines.append(Line(f"{taken} {counted(len(one['groups']), 'group')} ({which}).", "note"))
    if result["borrowed"]:
        lines.append(Line("  These end with each offload: see install(borrowed=...).", "note"))
    if memory["communicators"]:
        least, most = memory["least_bytes"] / 1e9, memory["most_bytes"] / 1e9
        communicators = counted(memory["communicators"], "NCCL communicator")
        lines.append(
            Line(
                f"An offload would release about {least:.1f} to {most:.1f} GB of this rank's GPU "
                f"({communicators} of 2 or more ranks, if each has been used).",
                "head",
            )
        )
        lines.append(Line(f"  This is an estimate: {SOURCE}.", "note", 2))
        least, most = memory["least_pinned_bytes"] / 1e9, memory["most_pinned_bytes"] / 1e9
        lines.append(
            Line(
                f'  strategy="suspend" would pin about {least:.1f} to {most:.1f} GB of host memory '
                "for each rank of a node, until the reload (0.5 to 0.75 GB per communicator). "
                '"recreate" pins none.',
                "note",
                2,
            )
        )
    return lines
