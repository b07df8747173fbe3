"""``reloadpg run``: start the ranks of a job on this host, and restart a rank that has died.

torchrun ends all of its processes when one dies. This command keeps the others, which wait in
``recover()`` for the new process. It uses ``torch.distributed.elastic.multiprocessing`` for
processes, logs and signals, with one context per rank, and the option names of torchrun. The
command of node 0 hosts the store, so every rank can be replaced.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from .console import CommandError, say

_POLL_S = 0.2
_END_S = 30
"""Seconds between SIGTERM and SIGKILL."""
_CONNECT = timedelta(minutes=10)
"""Timeout for the start of node 0."""
_KEYS = "reloadpg/run"
_DEFAULT_GROUP = "default_pg"
"""What ``init_process_group`` puts before the keys of its store (seen on torch 2.8 to 2.15)."""


def add(subcommands: Any) -> None:
    parser = subcommands.add_parser(
        "run",
        help="start the ranks of a job, and restart a rank that dies",
        description="Start a job's ranks on this host. Restart a rank that dies, while the others "
        "wait for it in recover() or retrying().",
        epilog="Example: reloadpg run --nproc-per-node 8 train.py --its-options",
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--nproc-per-node", default=1, help="ranks on each host (1)", **number)
    parser.add_argument("--nnodes", default=1, help="hosts (1)", **number)
    parser.add_argument("--node-rank", default=0, help="number of this host, from 0 (0)", **number)
    parser.add_argument("--master-addr", default="127.0.0.1", help="address of node 0 (127.0.0.1)")
    parser.add_argument(
        "--master-port", default=29500, help="port of the store (29500); 0 finds one", **number
    )
    parser.add_argument("--max-restarts", default=3, help="restarts on each host (3)", **number)
    parser.add_argument("--log-dir", help="a folder for the output of each rank", metavar="DIR")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    parser.add_argument("script", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=_run, script_arguments=(), needs={"torch": "cli"})


def _run(options: argparse.Namespace) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    if options.nproc_per_node < 1 or not 0 <= options.node_rank < options.nnodes:
        raise CommandError(
            "--nproc-per-node and --nnodes must be 1 or more, --node-rank below --nnodes"
        )
    if options.nnodes > 1 and options.master_port == 0:
        raise CommandError("--master-port=0 is for one host; name a port that all hosts know")
    host = _Host(options)
    try:
        return host.run()
    except SignalException as error:
        host.give_up(f"node {options.node_rank} got {signal.Signals(error.sigval).name}")
        return 128 + int(error.sigval)
    finally:
        host.close()


class _Host:
    def __init__(self, options: argparse.Namespace) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        self._options = options
        self._first = options.node_rank == 0
        self._size = options.nnodes * options.nproc_per_node
        self._store = TCPStore(
            options.master_addr,
            options.master_port,
            is_master=self._first,
            wait_for_workers=False,
            timeout=_CONNECT,
        )
        self._of_job = PrefixStore(_DEFAULT_GROUP, self._store)
        self._ranks: dict[int, Any] = {}
        self._starts: dict[int, int] = {}
        self._restarts = 0

    def run(self) -> int:
        """Run the ranks until all have succeeded on all hosts, or the job has failed."""
        for local in range(self._options.nproc_per_node):
            self._start(local)
        reported = False
        while True:
            why = self._ended()
            if why:
                say(f"reloadpg run: ended: {why}", sys.stderr)
                return 1
            for local in [*self._ranks]:
                self._look_at(local)
            if not self._ranks and not reported and not self._ended():
                reported = True
                self._store.add(f"{_KEYS}/done", 1)
            # Node 0 hosts the store, which the others need until the last one has ended.
            if reported and (
                not self._first or self._store.add(f"{_KEYS}/done", 0) >= self._options.nnodes
            ):
                return 0
            time.sleep(_POLL_S)

    def give_up(self, why: str) -> None:
        """End the job on all hosts."""
        self._store.compare_set(f"{_KEYS}/ended", "", why)

    def close(self) -> None:
        for context in self._ranks.values():
            context.close(signal.SIGTERM, timeout=_END_S)
        self._ranks.clear()
        if self._first and self._options.nnodes > 1:
            time.sleep(2 * _POLL_S)  # lets the other hosts read the reason

    def _ended(self) -> str:
        try:
            if not self._store.check([f"{_KEYS}/ended"]):
                return ""
            return str(self._store.get(f"{_KEYS}/ended").decode())
        except RuntimeError as error:
            return f"the store, which is in the command of node 0, is lost ({error})"

    def _look_at(self, local: int) -> None:
        """Restart a rank that has failed, if the job can continue with it."""
        from ..rendezvous.predecessor import Predecessor, lost_state

        result = self._ranks[local].wait(timeout=0)
        if result is None:
            return
        self._ranks.pop(local)
        if not result.is_failed():
            self._store.add(f"{_KEYS}/complete", 1)
            return
        rank, code = self._rank(local), next(iter(result.failures.values())).exitcode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        first = self._starts[local] == 1
        if first and not Predecessor.exists(self._of_job, rank, self._size):
            say(
                f"reloadpg run: rank {rank} ended before it was in a recoverable job, so it cannot "
                "be replaced. Call reloadpg.install(recoverable=True) before "
                "init_process_group(), and run the steps in reloadpg.recovery.retrying()",
                sys.stderr,
            )
        lost = lost_state(self._of_job, rank)
        if lost:
            self.give_up(lost)
        # The state of the job is in the processes that were not restarted.
        elif first and self._store.add(f"{_KEYS}/lost", 1) == self._size:
            self.give_up(f"rank {rank} ended with {how}, after all others had ended")
        elif self._store.add(f"{_KEYS}/complete", 0):
            self.give_up(
                f"rank {rank} ended with {how} after other ranks had completed: a new process "
                "could not join them"
            )
        elif self._restarts >= self._options.max_restarts:
            self.give_up(
                f"rank {rank} ended with {how}, and node {self._options.node_rank} has used its "
                f"{self._restarts} restarts (--max-restarts)"
            )
        else:
            self._restarts += 1
            of = f"{self._restarts} of {self._options.max_restarts}"
            say(f"reloadpg run: rank {rank} ended with {how}; restart {of}", sys.stderr)
            self._start(local)

    def _rank(self, local: int) -> int:
        return int(self._options.node_rank * self._options.nproc_per_node + local)

    def _start(self, local: int) -> None:
        from torch.distributed.elastic.multiprocessing import (
            DefaultLogsSpecs,
            Std,
            start_processes,
        )

        options, rank = self._options, self._rank(local)
        start = self._starts[local] = self._starts.get(local, 0) + 1
        folder = options.log_dir and os.path.join(options.log_dir, f"rank-{rank}", str(start))
        if folder:
            os.makedirs(folder, exist_ok=True)
        script = [*(["-m"] if options.module else []), options.script]
        arguments = [*script, *options.arguments, *options.script_arguments]
        self._ranks[local] = start_processes(
            "reloadpg",
            sys.executable,
            {0: ("-u", *arguments)},
            {0: self._environment(rank)},
            DefaultLogsSpecs(folder or None, tee=Std.ALL if folder else Std.NONE),
            log_line_prefixes={0: f"[rank {rank}]: "},
        )

    def _environment(self, rank: int) -> dict[str, str]:
        from ..environment.model import AGENT_STORE, DistributedEnvironment, on_nodes_of

        options = self._options
        environ = DistributedEnvironment(
            "reloadpg run",
            **on_nodes_of(options.nproc_per_node, rank, self._size),
            master_addr=options.master_addr,
            master_port=self._store.port,
        )
        return {
            **environ.variables(),
            **AGENT_STORE,  # equal in all processes: a restarted one belongs to the same job
            "TORCHELASTIC_RUN_ID": "reloadpg",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
