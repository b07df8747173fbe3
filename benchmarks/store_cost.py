"""Measure what the store's server pays for a cycle of offload and reload, by the number of ranks.

A separate process serves a TCPStore. A few clients replay the requests of all hosts: at each of the
four barriers the leader of a host adds to a counter, waits for the decision's key, and reads it;
the last one writes the decision, and deletes the keys of the barrier before. The other ranks of a
host send it messages, which the store does not see. The figure is the CPU time of the server, which
does not depend on how fast the clients are, over ten cycles.

Usage: python benchmarks/store_cost.py [--ranks 8 1024 16384] [--ranks-of-a-host 8] [--json PATH]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from _output import machine, write_json

BARRIERS = 4
CLIENTS = 8
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


def cycle(clients: list[dist.Store], hosts: int) -> int:
    """Replay the requests of one cycle; return their number."""
    requests = 0
    for barrier in range(BARRIERS):
        for host in range(hosts):
            clients[host % CLIENTS].add(f"{barrier}/count", 1)
        clients[0].compare_set(f"{barrier}/decision", "", "ok")
        for host in range(hosts - 1):
            client = clients[host % CLIENTS]
            client.wait([f"{barrier}/decision"])
            client.compare_set(f"{barrier}/decision", "-", "-")
        clients[0].delete_key(f"{barrier}/count")
        clients[0].delete_key(f"{barrier}/decision")
        requests += 3 * hosts + 1
    return requests


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
            for _ in range(CYCLES):
                requests = cycle(clients, hosts)
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
