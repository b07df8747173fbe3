"""Measure what the store's server pays for a cycle of offload and reload, by the number of ranks.

A separate process serves a TCPStore. Clients perform the commands of the protocol for all ranks of
a job (``reloadpg.rendezvous.protocol``): each rank enters an offload and a reload, of two barriers
each. A rank waits for a key only when that exists, so one client serves many ranks. The figures are
the requests, and the CPU time of the server, over ten cycles. The clients send at the same time, as
the ranks of a job do: a server that sleeps between two requests pays twice as much for each.

Usage: python benchmarks/store_cost.py [--ranks 8 1024 16384] [--json PATH]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist
from _output import machine, write_json
from torch.distributed import PrefixStore

from reloadpg.rendezvous.protocol import Await, Delete, Rank, Steps
from reloadpg.rendezvous.rendezvous import PREFIX, perform

CLIENTS = 32
CYCLES = 10

SERVER = """
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Player:
    """One rank of a job: it performs the commands of its generators on a client."""

    def __init__(self, rank: int, size: int, job: int) -> None:
        self.rank = Rank(rank, size)
        self.rank.join(job)  # counted before
        self.requests = 0
        self._steps: Steps = self.rank.count()
        self._waits: Await | None = None

    def arrive(self, client: dist.Store, operation: str, *, ends: bool) -> None:
        """Arrive at the next barrier of an operation; go on until it waits for the other ranks."""
        if not ends:
            self._play(client, self.rank.enter(operation))
        self._play(client, self.rank.barrier(ends=ends))

    def leave(self, client: dist.Store) -> None:
        """Wait until all ranks have arrived, which they have."""
        if self._waits is not None:
            PrefixStore(PREFIX, client).wait([self._waits.key])
            self.requests += 1
            self._play(client, self._steps)

    def _play(self, client: dist.Store, steps: Steps) -> None:
        self._steps, self._waits, reply = steps, None, None
        with suppress(StopIteration):
            while True:
                command = steps.send(reply)
                if isinstance(command, Await):
                    self._waits = command
                    return
                reply = perform(command, PrefixStore(PREFIX, client))
                self.requests += len(command.keys) if isinstance(command, Delete) else 1


def cycle(clients: list[dist.Store], players: list[Player], threads: ThreadPoolExecutor) -> None:
    """Perform the requests of one cycle."""
    shares = [players[index :: len(clients)] for index in range(len(clients))]

    def arrive(client: dist.Store, share: list[Player], operation: str, ends: bool) -> None:
        for player in share:
            player.arrive(client, operation, ends=ends)

    def leave(client: dist.Store, share: list[Player]) -> None:
        for player in share:
            player.leave(client)

    for operation in ("offload", "reload"):
        for ends in (False, True):
            list(threads.map(partial(arrive, operation=operation, ends=ends), clients, shares))
            list(threads.map(leave, clients, shares))


def main() -> int:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024, 16384])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows = []
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = [dist.TCPStore("127.0.0.1", port, None, False) for _ in range(CLIENTS)]
        for job, ranks in enumerate(options.ranks, start=1):
            players = [Player(rank, ranks, job) for rank in range(ranks)]
            before = cpu_s(server.pid)
            with ThreadPoolExecutor(CLIENTS) as threads:
                for _ in range(CYCLES):
                    cycle(clients[:ranks], players, threads)
            seconds = round((cpu_s(server.pid) - before) / CYCLES, 4)
            requests = [player.requests / CYCLES for player in players]
            mean, most = round(sum(requests) / ranks, 2), max(requests)
            row = {"ranks": ranks, "requests": mean, "most": most, "server_cpu_s": seconds}
            rows.append(row)
            print(
                f"{ranks} ranks: {mean} requests a rank, at most {most}, {seconds} s of server CPU"
            )
    finally:
        server.kill()
        server.wait()
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
