"""``reloadpg explain``: show which groups of a script would be reloadable, in a job of any size.

The script runs as one rank in a fresh process (:mod:`reloadpg.cli.explain_rank`), on the devices
that are there. Its output and its traceback go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..settings import STATUS_DIR
from ..texts import counted, format_ranks, table
from .console import CommandError, positive, say

COMMUNICATOR_BYTES = (500_000_000, 1_600_000_000)
"""Smallest and largest measured memory of one NCCL communicator on a GPU."""

SOURCE = (
    "0.5 to 1.6 GB for each communicator of 2 or more ranks, as others have measured "
    "(benchmarks/README.md, Figures of others, rows 4, 5 and 12)"
)

NODE = 8  # ranks of a node where there is no accelerator to count

NO_DEVICE = (
    "This machine has no accelerator. If the script needs one, run this where there is one, "
    "or, with torch's CUDA build: reloadpg standins run -- reloadpg explain ..."
)
_OF_DEVICES = re.compile(r"accelerator|cuda|device|gpu|nccl|nvidia|xpu", re.IGNORECASE)


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "explain",
        usage="%(prog)s SCRIPT --world-size N [options] [-- ARGUMENT ...]",
        allow_abbrev=False,  # --mod may be meant for the script
        help="show which groups of a script would be reloadable, in a job of any size",
        description=(
            "Run a script as one rank of N, on the devices of this machine, with fake groups whose "
            "collectives do nothing. Show which of its groups would be reloadable, and why, and "
            "the memory that an offload would release. Exit code 1 if it raised or made no group."
        ),
        epilog="Example: reloadpg explain train.py --world-size 64 -- --config small.yaml",
    )
    option = parser.add_argument
    option("script", metavar="SCRIPT", help="the script; its arguments follow --")
    option("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    option("--world-size", type=positive, required=True, metavar="N", help="ranks of the job")
    option("--rank", type=int, default=0, metavar="R", help="the rank to run (default: 0)")
    names = "as for install (default: the script's, or every accelerator backend)"
    option("--backends", metavar="NAME[,NAME]", help=names)
    option("--timeout", type=positive, default=60, metavar="S", help="end it then (default: 60)")
    option("--json", action="store_true", help="everything as JSON")
    parser.set_defaults(run=_run, script_arguments=[])


def _run(options: argparse.Namespace) -> int:
    if not 0 <= options.rank < options.world_size:
        raise CommandError(f"--rank {options.rank} is not in a job of {options.world_size} ranks")
    if not options.module and not os.path.isfile(options.script):
        raise CommandError(f"there is no file {options.script!r}. For a module, use -m.")
    run = run_script(options)
    result = {**explain(run.pop("records")), **run}
    say(json.dumps(result, indent=1) if options.json else _page(options, result))
    return 1 if result["error"] or not result["groups"] else 0


def run_script(options: argparse.Namespace) -> dict[str, Any]:
    """Run the script to its end or its timeout, in a fresh process. Blocking; leaves no process.

    Returns the ``records`` of the process, the ``error`` of a script that ended early, whether it
    ``timed_out``, and the number of accelerator ``devices`` here.
    """
    import torch

    devices = torch.accelerator.device_count()  # here: in its process, the script may fork first
    given = {n: getattr(options, n) for n in ("script", "script_arguments", "module", "backends")}
    code = f"import sys; sys.path[:] = {sys.path}; from {__package__}.explain_rank import play"
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", f"{code}; play()", json.dumps(given), str(file.fileno())],
            env=_environment(options.rank, options.world_size, devices or NODE),
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[file.fileno()],
            start_new_session=True,
        )
        deadline = time.monotonic() + options.timeout
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        finally:
            timed_out = process.poll() is None
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            ended = process.wait()
        file.seek(0)  # a killed process leaves part of a line
        records = [json.loads(line) for line in file.read().split("\n")[:-1]]
    error = records[-1].get("error", "") if records else ""
    if not timed_out and not any(one["kind"] == "end" for one in records):
        error = f"the script ended its process (exit code {ended})"
    return {"records": records, "error": error, "timed_out": timed_out, "devices": devices}


def _environment(rank: int, size: int, local: int) -> dict[str, str]:
    """The variables that torchrun would set."""
    node, local_rank = divmod(rank, local)
    places = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "WORLD_SIZE": size}
    places |= {"LOCAL_WORLD_SIZE": min(local, size - node * local), "MASTER_PORT": 29500}
    given = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in places.items()}}
    return {k: v for k, v in given.items() if k not in (STATUS_DIR, "TORCH_DIST_INIT_BARRIER")}


def explain(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how ``install`` would treat each recorded group, and an offload's memory."""
    installs = any(one["installed"] for one in records)
    groups = {one["name"]: dict(one) for one in records if one["kind"] == "group"}
    for name, one in groups.items():
        if installs and not one["installed"] and name != "WORLD":
            one |= {"reloadable": False, "reason": "created before reloadpg.install()"}
    held = [one for one in groups.values() if one["reloadable"] and one["nccl"]]
    count = sum(len(one["ranks"]) > 1 for one in held)  # one rank connects to none
    least, most = (count * size for size in COMMUNICATOR_BYTES)
    memory = {"communicators": count, "least_bytes": least, "most_bytes": most}
    return {"script_installs": installs, "groups": [*groups.values()], "memory": memory}


def _page(options: argparse.Namespace, result: Mapping[str, Any]) -> str:
    lines = [f"reloadpg explain: {options.script}, rank {options.rank} of {options.world_size}"]
    groups = result["groups"]
    if groups:
        lines += ["", _table(groups), "", *_summary(result)]
    else:
        lines.append("The script created no process group.")
        lines.append("Groups in other processes that the script starts are not recorded.")
    if result["timed_out"]:
        end = f"The script was ended after {options.timeout} s; later groups are not shown. "
        lines.append(f"{end}To wait longer, use --timeout.")
    elif result["error"]:
        lines.append(f"The script failed: {result['error']}")
        lines.append("Groups that it would have created later are not shown.")
        if options.rank and groups:
            lines.append(
                f"Only rank {options.rank} ran: what it would receive from others is unchanged. "
                "If the error comes from that, use --rank 0, which receives least."
            )
    if not result["devices"] and (_OF_DEVICES.search(result["error"]) or not groups):
        lines.append(NO_DEVICE)
    return "\n".join(lines)


def _table(groups: Sequence[Mapping[str, Any]]) -> str:
    header = ("group", "size", "reloadpg", "backend", "created by", "set", "ranks", "desc")
    rows = []
    for one in groups:
        ranks, state = format_ranks(one["ranks"]), "reloadable" if one["reloadable"] else "bypassed"
        if len(ranks) > 24:
            ranks = f"{one['ranks'][0]}, {one['ranks'][1]}, ..., {one['ranks'][-1]}"
        place = (one["backend"], one["made_by"], one["in_set"] or "", ranks, one["desc"])
        rows.append((one["name"][:9], len(one["ranks"]), state, *place))
    return table(header, rows)


def _summary(result: Mapping[str, Any]) -> list[str]:
    groups, memory = result["groups"], result["memory"]
    share = f"{sum(one['reloadable'] for one in groups)} of {counted(len(groups), 'group')}"
    lines = [f"{share} of this rank would be reloadable."]
    reasons = Counter(one["reason"] for one in groups if one["reason"])
    lines += [f"  {counted(n, 'group')}: {why}" for why, n in reasons.most_common()]
    if not result["script_installs"]:
        lines.append("The script does not call reloadpg.install(); shown as if it did.")
    if memory["communicators"]:
        least, most = memory["least_bytes"] / 1e9, memory["most_bytes"] / 1e9
        what = f"An offload would release about {least:.1f} to {most:.1f} GB of this rank's GPU: "
        held = f"{counted(memory['communicators'], 'NCCL communicator')}, if each has been used."
        lines += [f"{what}{held}", f"  An estimate: {SOURCE}."]
    return lines
