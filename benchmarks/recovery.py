"""Measure the time from a fault to the next good step: ``recover`` against a restart by torchrun.

One script trains a small model on four gloo ranks, under torchrun, in two ways. With ``recover``
the ranks recover in place, and repeat the step from a copy in memory. With ``restart`` the
fault ends a rank, torchrun's agent ends the others and starts all of them again
(``--max-restarts``), and the step is repeated from a checkpoint on the local disk. The fault is an
error of communication on one rank, while the others are in a collective with it. The time is from
that error to the moment at which the last rank has completed the step. Both ways must end with the
same weights. Schedulers, device contexts, compile caches and checkpoints on a shared file system,
which a restart of a real job waits for, are not in it.

Usage: python benchmarks/recovery.py [--check] [--json PATH] [--quick] [--faults N]
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _output import command_line, machine, write_json

RANKS = 4
WIDTH = 256
FAULTY = 1
LIMIT = 0.25
"""Of the time with a restart, with ``recover``."""
TIME_LIMIT_S = 400
WAYS = ("recover", "restart")
PAIRS = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [1, 2]]


# -- the script that is measured ------------------------------------------------------------------


class Training:
    """One rank's training: sums over the grid's groups in each step, as of a sharded model."""

    def __init__(self, folder: Path, faults: Sequence[int]) -> None:
        self.folder = folder
        self.faults = faults
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        made = [dist.new_group(ranks) for ranks in (*PAIRS, *PAIRS)]
        self.groups = [g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER]
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.001)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(1000 * self.rank + number)
        inputs = torch.randn(8, WIDTH, generator=generator)
        self.optimizer.zero_grad()
        self.model(inputs).pow(2).mean().backward()
        for group in self.groups:
            dist.all_reduce(torch.ones(WIDTH), group=group)
        self._fail_once(number)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()

    def _fail_once(self, number: int) -> None:
        marker = self.folder / f"fault.{number}"
        if self.rank == FAULTY and number in self.faults and not marker.exists():
            marker.write_text(str(time.monotonic()))  # the clock of the whole machine
            raise dist.DistNetworkError("a link is down")

    def completed(self, number: int) -> None:
        if number in self.faults:
            (self.folder / f"completed.{number}.{self.rank}").write_text(str(time.monotonic()))

    def write_result(self) -> None:
        total = sum(parameter.double().sum().item() for parameter in self.model.parameters())
        (self.folder / f"result.{self.rank}").write_text(repr(total))


def recover_steps(folder: Path, steps: int, faults: Sequence[int]) -> None:
    """The loop with the library: recover in place, and repeat the step (docs/recovery.md)."""
    import reloadpg

    reloadpg.install(backends={"gloo"})
    training = Training(folder, faults)
    saved: dict[int, Any] = {}
    number = 0
    while number < steps:
        state = copy.deepcopy(training.state())
        saved = {number - 1: saved.get(number - 1), number: state}
        try:
            training.step(number)
        except RuntimeError:
            reloadpg.recovery.recover()
            begin = torch.tensor(number)
            dist.all_reduce(begin, op=dist.ReduceOp.MIN)
            number = int(begin)
            training.load(saved[number])
        else:
            training.completed(number)
            number += 1
    training.write_result()


def step_from_checkpoint(folder: Path, steps: int, faults: Sequence[int]) -> None:
    """The loop without the library: continue from the last checkpoint of all ranks."""
    training = Training(folder, faults)
    mine = folder / f"checkpoint.{training.rank}"
    begin = torch.tensor(-1)
    if mine.exists():
        begin = torch.load(mine, weights_only=True)["step"]
    dist.all_reduce(begin, op=dist.ReduceOp.MIN)
    for number in range(max(0, int(begin)), steps):
        if number == begin:
            training.load(torch.load(mine, weights_only=True)["state"])
        else:
            state = {"step": torch.tensor(number), "state": training.state()}
            torch.save(state, f"{mine}.new")
            os.replace(f"{mine}.new", mine)
            dist.all_reduce(torch.ones(1))  # no rank is a step ahead of another one's checkpoint
        training.step(number)
        training.completed(number)
    training.write_result()


# -- the measurement ------------------------------------------------------------------------------


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher. It and its processes end with this block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                # Otherwise restarted ranks read the addresses of the earlier ones: gloo's
                # connections are refused (seen on torch 2.13).
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # its agent ends the ranks, in separate sessions
            process.wait(60)


def measured(way: str, faults: Sequence[int]) -> tuple[list[float], list[str]]:
    """Run the script under torchrun; seconds of each fault, and what each rank ended with."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1"]
        command += [f"--nproc-per-node={RANKS}", f"--max-restarts={len(faults)}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += [__file__, "--way", way, "--folder", name, "--faults", str(len(faults))]
        with running(command, folder / "log") as process:
            code = process.wait(TIME_LIMIT_S)
        if code != 0:
            raise SystemExit(f"{way} failed:\n{(folder / 'log').read_text()[-4000:]}")

        def read(file: str) -> str:
            return (folder / file).read_text()

        seconds = [
            max(float(read(f"completed.{number}.{rank}")) for rank in range(RANKS))
            - float(read(f"fault.{number}"))
            for number in faults
        ]
        return seconds, [read(f"result.{rank}") for rank in range(RANKS)]


def steps_of(faults: int) -> tuple[int, list[int]]:
    """How many steps there are, and which of them fail once."""
    return 2 * faults + 2, [2 * index + 1 for index in range(faults)]


def main() -> int:
    """Run it and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=5, help="in each way")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps, faults = steps_of(1 if options.quick else options.faults)
    if options.way:
        torch.set_num_threads(1)
        loop = {"recover": recover_steps, "restart": step_from_checkpoint}[options.way]
        loop(options.folder, steps, faults)
        return 0
    from reloadpg.texts import table

    seconds, results = {}, {}
    for way in WAYS:
        seconds[way], results[way] = measured(way, faults)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    ratio = medians["recover"] / medians["restart"]
    equal = results["recover"] == results["restart"]
    rows = [
        (way, medians[way], max(seconds[way]), medians[way] / medians["restart"]) for way in WAYS
    ]
    print(table((f"faults: {len(faults)}", "s, median", "s, longest", "of a restart"), rows))
    print(f"equal weights at the end: {equal}")
    figures = {"seconds": seconds, "medians": medians, "ratio": ratio, "equal": equal}
    write_json(options.json, {"machine": machine(), **figures})
    if options.check and (ratio > LIMIT or not equal):
        print(f"above the limit: {ratio:.2f} ({LIMIT}), or unequal weights")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
