"""``reloadpg standins``: run a program's NCCL code paths without a GPU."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from ..testing import standins
from .console import CommandError, say


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "standins",
        help="run torch's ProcessGroupNCCL over stand-ins for CUDA and NCCL",
        description=(
            "Run a program with torch's CUDA build on a machine without a GPU. Device memory is\n"
            "host memory, and NCCL's operations run on the CPU. So do torch's operators, by their\n"
            "CPU kernels. Other kernels (of extensions, cuBLAS, cuDNN) raise an error. Uses of\n"
            "released communicators are reported at the end, with exit code 1."
        ),
        epilog="Example: reloadpg standins run -- torchrun --nproc-per-node 2 train.py\n\n"
        "Environment variables that the program's processes read (RELOADPG_STANDIN_...):\n"
        "  DEVICES (8), DEVICE_MIB (81920)   number of devices, and the memory of each\n"
        "  CONTEXT_MIB (0)   memory that a process takes on a device that it uses\n"
        "  CONNECT=1         the first collective connects in the call, as NCCL's does\n"
        "  PEER_ERRORS=1     aborts and ends of peers are noticed, as over sockets\n"
        "  NVLS=1            the devices support multicast\n"
        "  LOG=FILE          write every call of NCCL to this file",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "action",
        choices=("build", "run"),
        help="build: compile the libraries for the installed torch (once; 10 to 60 s); "
        "run: run the command that follows --",
    )
    parser.add_argument(
        "--nccl",
        metavar="PATH",
        help="also run the host code of this NCCL, built from NVIDIA's source and linked to a "
        "dynamic CUDA runtime (default: the variable RELOADPG_NCCL)",
    )
    parser.set_defaults(run=_run, script_arguments=[])


def _run(options: argparse.Namespace) -> int:
    command = options.script_arguments
    if (options.action == "run") != bool(command):
        raise CommandError(
            "run needs a command and build takes none; nothing was started. Write for example: "
            "reloadpg standins run -- torchrun --nproc-per-node 2 train.py"
        )
    if command:
        _check_installed()
    try:
        if options.action == "build":
            say(str(standins.build()))
            return 0
        with standins.job(nccl=options.nccl) as job:
            code = _program(command, {**os.environ, **job.environment})
            uses = job.uses_after_release()
            for use in uses:
                say(f"reloadpg standins: use after release: {use}", sys.stderr)
            return code or int(bool(uses))
    except standins.StandinsError as error:
        raise CommandError(str(error)) from None


def _check_installed() -> None:
    """The program's processes import this package, whatever their working directory is."""
    try:
        distribution("reloadpg")
    except PackageNotFoundError:
        root = Path(__file__).resolve().parents[2]
        raise CommandError(
            "reloadpg is not installed in this environment, so the program's processes cannot "
            "import it: torch's operators would have no kernels. Nothing was started. Run: "
            f"pip install {root}"
        ) from None


def _program(command: list[str], environment: dict[str, str]) -> int:
    """Run a program to its end; the program handles Ctrl-C and SIGTERM."""
    # Settings of visible devices do not apply to the stand-ins.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise CommandError(f"{command[0]} cannot be run: {error}; nothing was started") from None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the program, too
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    if code < 0:
        say(f"reloadpg standins: {command[0]} was ended by signal {-code}", sys.stderr)
        return 128 - code
    return code
