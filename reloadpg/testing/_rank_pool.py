"""The test process's end of the rank servers: at most one server for each start method.

A server is started at its first use and lives as long as this process: importing torch is what
makes a rank slow to start, and a server pays for it once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import ReloadpgError

_SERVER = Path(__file__).with_name("_rank_server.py")
_BOOT_LIMIT = 180.0
"""Seconds for a server to import torch; 1 to 4 s were measured, cold disks take longer."""
_MESSAGE_LIMIT = 1 << 16


def _hang_up(ours: socket.socket) -> None:
    """End the connection even if a forked process holds a copy of this end."""
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
    ours.close()


class _Server:
    def __init__(self, preload: Sequence[str], *, fork_ranks: bool) -> None:
        # Its errors go to a file of its own: holding this process's stderr open would make
        # whoever reads that wait for the server too.
        self._errors = os.memfd_create("reloadpg-rank-server")
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_SERVER), str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
                # One thread: with more, NumPy's OpenBLAS starts threads when it is imported,
                # and the ranks are forked from this process.
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "MKL_NUM_THREADS": "1",
                    "PYTHONSAFEPATH": "1",
                },
            )
        try:
            boot = {"sys_path": sys.path, "preload": list(preload), "fork_ranks": fork_ranks}
            self._channel.send(json.dumps(boot).encode())
            self._channel.settimeout(_BOOT_LIMIT)
            self.facts: dict[str, Any] = json.loads(self._channel.recv(_MESSAGE_LIMIT))
            self._channel.settimeout(None)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            errors = self._read_errors()
            self.close()
            if isinstance(error, OSError | ValueError):
                raise ReloadpgError(
                    f"the process that starts ranks did not come up within {_BOOT_LIMIT:g} s or "
                    f"died (exit status {self._process.returncode}); no rank was started. "
                    f"Its errors:\n{errors}"
                ) from error
            raise

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read_errors(self) -> str:
        return os.pread(self._errors, _MESSAGE_LIMIT, 0).decode(errors="replace")

    def open_job(self, job_dir: Path) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._channel, [os.fsencode(job_dir)], [theirs.fileno()])
        return ours

    def forget(self) -> None:
        """Let go of a server that is another process's."""
        self._channel.close()
        os.close(self._errors)
        self._process.returncode = 0  # Popen would warn about, and wait for, a process not its own

    def close(self) -> None:
        _hang_up(self._channel)
        os.close(self._errors)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankPool:
    """Servers by start method. Thread-safe; a forked child starts with an empty pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, _Server] = {}
        self._hooks_set = False

    @contextlib.contextmanager
    def open_job(self, job_dir: Path, start_method: str) -> Iterator[socket.socket]:
        """Start the supervisor of the job in `job_dir`; yield the socket to it.

        The job ends with the context. Blocks while a server starts. Raises ReloadpgError if the
        server does not start.
        """
        with self._lock:
            control = self._server(start_method).open_job(job_dir)
        try:
            yield control
        finally:
            _hang_up(control)

    def server_facts(self, start_method: str) -> dict[str, Any]:
        """Return what the server reported about itself, and its `pid`; starts it if needed."""
        with self._lock:
            server = self._server(start_method)
            return {**server.facts, "pid": server.pid}

    def _server(self, start_method: str) -> _Server:
        server = self._servers.get(start_method)
        if server is not None and server.alive:
            return server
        if server is not None:
            server.close()
        if not self._hooks_set:
            os.register_at_fork(after_in_child=self._reset)
            atexit.register(self._close)
            self._hooks_set = True
        preload: list[str] = []
        if start_method == "forkserver":
            preload = ["torch", "torch.distributed", "reloadpg"]
            if "pytest" in sys.modules:  # then the ranks' module imports it too
                preload.append("pytest")
        server = _Server(preload, fork_ranks=start_method == "forkserver")
        self._servers[start_method] = server
        return server

    def _reset(self) -> None:
        self._lock = threading.Lock()
        for server in self._servers.values():
            server.forget()
        self._servers = {}

    def _close(self) -> None:
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers = {}


POOL = RankPool()
