"""Measure what the store's server pays for a cycle of offload and reload, by the number of ranks.

A separate process serves a TCPStore. Clients replay the requests of all hosts: at each of the four
barriers the leader of a host adds to a counter, waits for the decision's key, and reads it; the
last one writes the decision, and deletes the keys of the barrier before. The other ranks of a host
send it messages, which the store does not see. The figure is the CPU time of the server, over ten
cycles. The clients send at the same time, as the hosts of a job do: a server that sleeps between
two requests pays twice as much for each.

Usage: python benchmarks/store_cost.py [--ranks 8 1024 16384] [--ranks-of-a-host 8] [--json PATH]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch.distributed as dist
from _output import machine, write_json

BARRIERS = 4
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


def cycle(clients: list[dist.Store], hosts: int, threads: ThreadPoolExecutor) -> int:
    """Replay the requests of one cycle; return their number."""
    shares = [range(index, hosts, len(clients)) for index in range(len(clients))]

    def arrive(client: dist.Store, share: range, barrier: int) -> None:
        for _ in share:
            client.add(f"{barrier}/count", 1)

    def read(client: dist.Store, share: range, barrier: int) -> None:
        for _ in share[share[0] == 0 :]:  # the first host has written the decision
            client.wait([f"{barrier}/decision"])
            client.compare_set(f"{barrier}/decision", "-", "-")

    for barrier in range(BARRIERS):
        list(threads.map(partial(arrive, barrier=barrier), clients, shares))
        clients[0].compare_set(f"{barrier}/decision", "", "ok")
        list(threads.map(partial(read, barrier=barrier), clients, shares))
        clients[0].delete_key(f"{barrier}/count")
        clients[0].delete_key(f"{barrier}/decision")
    return BARRIERS * (3 * hosts + 1)


def main() -> int:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024, 16384])
    parser.add_argument("--ranks-of-a-host", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    rows = []
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        clients = [dist.TCPStore("127.0.0.1", port, None, False) for _ in range(CLIENTS)]
        for ranks in options.ranks:
            before = cpu_s(server.pid)
            hosts = -(-ranks // options.ranks_of_a_host)
            with ThreadPoolExecutor(CLIENTS) as threads:
                for _ in range(CYCLES):
                    requests = cycle(clients[:hosts], hosts, threads)
            seconds = round((cpu_s(server.pid) - before) / CYCLES, 4)
            rows.append(
                {"ranks": ranks, "hosts": hosts, "requests": requests, "server_cpu_s": seconds}
            )
            print(f"{ranks} ranks, {hosts} hosts: {requests} requests, {seconds} s of server CPU")
    finally:
        server.kill()
        server.wait()
    if options.json:
        write_json(options.json, {"machine": machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
