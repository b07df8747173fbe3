"""One rank of a job on two hosts; the test cuts the link between them.

``torchrun ... two_hosts_job.py FOLDER SEED``: a random program. A rank that is ready
for the cut of a step writes ``STEP/here.RANK`` and waits for ``STEP/go.RANK``. When its call has
ended it writes ``STEP/over.RANK`` and waits for ``STEP/up.RANK``; at its end it writes
``done.RANK``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from helpers.fault_job import interfere
from helpers.program_ranks import Player
from helpers.programs import Fault, Step, program_on_two_hosts

from reloadpg.testing.faults import clear_faults


def mark(folder: Path, name: str) -> None:
    (folder / f"{name}.{os.environ['RANK']}").touch()


class Link:
    """The link between the hosts, which the test cuts and joins."""

    def __init__(self, folder: Path, other_link: bool) -> None:
        self._folder, self._other_link = folder, other_link

    def watched(self, store: dist.Store) -> dist.Store:
        return store

    def prepare(self, place: int, fault: Fault, rank: int) -> None:
        """Cut the link at a point of the next operation, or now."""
        if fault.point == "use":
            self._cut(place)
        else:
            interfere(fault.point, lambda: self._cut(place))

    def must_fail(self, step: Step) -> bool:
        """Whether something uses the link after a cut: the store, or groups that connect."""
        connected = step.do == "offload" or step.fault.point.endswith("done")
        return not self._other_link or not connected

    def _cut(self, place: int) -> None:
        mark(self._folder / str(place), "here")
        (self._folder / f"{place}/go.{os.environ['RANK']}").read_text()

    def ended(self, place: int) -> None:
        """Wait until the link is up again."""
        clear_faults()
        mark(self._folder / str(place), "over")
        (self._folder / f"{place}/up.{os.environ['RANK']}").read_text()


def play(folder: Path, seed: int) -> None:
    """Whatever the link cuts off, the next call on all ranks after it is up makes all groups live.

    The ranks may end the call differently, and none hangs.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    program, _, other_link = program_on_two_hosts(seed)
    assert program.size == size
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("test", dist.TCPStore(address, port, is_master=False))
    Player(rank, program, store, Link(folder, other_link)).play()


def main() -> None:
    folder, seed = sys.argv[1:]
    play(Path(folder), int(seed))
    mark(Path(folder), "done")


if __name__ == "__main__":
    main()
