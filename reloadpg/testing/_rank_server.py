"""Start ranks in milliseconds and leave none behind: the processes between a test and its ranks.

Run as a script by `_rank_pool`, never imported by the library. The chain of processes is

    test process -> server (imports torch once) -> one supervisor a run -> ranks -> their children

Only the standard library is used here, and no thread is started, so that forking is safe. Each
process is a subreaper (`prctl(2)`), so a descendant whose parent died is handed to it, whatever
session or process group that descendant moved to, and `SIGKILL` reaches it. A run ends, with all
of its processes, when the test process asks for it, closes its socket or dies in any way. Ranks
ask the kernel to be killed with their supervisor, and the server kills what a supervisor that was
itself killed has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MESSAGE_LIMIT = 1 << 16
"""Longest message between the processes, in bytes; each is one packet of a SEQPACKET socket."""
KILL_LIMIT = 10.0
"""Seconds to wait for killed processes to be gone; only uninterruptible I/O takes that long."""
RANK_PROCESS = Path(__file__).with_name("_rank_process.py")


def prctl(option: int, value: int) -> None:
    """Call `prctl(2)`; raise OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def watch_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when `pid` has died, or None if there is none.

    A pidfd is needed besides the end of file of the socket, because any process that the test
    process forks holds a copy of that socket. Linux before 5.3 and some Python builds lack it.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def descendants(pid: int, skip: frozenset[int] = frozenset()) -> list[int]:
    """Return the process ids below `pid`, without those in `skip` and what is below them.

    One pass over /proc: two passes would differ by what was forked in between.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_bytes()
                parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = [child for child in children.get(pid, ()) if child not in skip]
    for one in found:
        found.extend(child for child in children.get(one, ()) if child not in skip)
    return found


def kill(pids: list[int]) -> None:
    """Send SIGKILL to each of `pids` that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class ChildWatch:
    """A descriptor that becomes readable when a child of this process may have ended."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._read

    def reap(self) -> tuple[list[tuple[int, int]], bool]:
        """Return the (pid, wait status) of children that ended, and whether any child is left."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, MESSAGE_LIMIT):
                pass
        ended: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return ended, False
            if pid == 0:
                return ended, True
            ended.append((pid, status))

    def close(self) -> None:
        """Restore the default handling; call in a forked child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(self._read)
        os.close(self._write)


class Supervisor:
    """Run the ranks of one job, report how each ended, then kill all that is left."""

    def __init__(
        self, control: socket.socket, parent: int | None, job_dir: Path, fork_ranks: bool
    ) -> None:
        self._control = control
        self._parent = parent
        self._job_dir = job_dir
        self._fork_ranks = fork_ranks
        self._watch = ChildWatch()
        self._live: dict[int, int] = {}

    def run(self) -> None:
        """Block until the job is over and no process of it is left."""
        job = json.loads((self._job_dir / "job.json").read_text())
        # Ranks ignore it until they have their stack dumper: the default action would kill them.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for rank in range(job["world_size"]):
            self._live[self._start(job, rank)] = rank
        self._tell({"pids": {rank: pid for pid, rank in self._live.items()}})
        sources = [s for s in (self._control, self._watch, self._parent) if s is not None]
        while self._live:
            ready = select.select(sources, [], [])[0]
            if self._parent in ready:
                break
            if self._control in ready:
                message = self._receive()
                if message == b"stacks":
                    for pid in self._live:
                        os.kill(pid, signal.SIGUSR1)  # not reaped yet, so the pid is still ours
                else:
                    break
            self._reap()
        self._tell({"left": self._end_all()})
        self._watch.close()
        # The test process reads the files of the job, removes them and closes the socket. If it
        # died instead, this removes them.
        sources.remove(self._watch)
        while self._control in select.select(sources, [], [])[0] and self._receive():
            pass
        shutil.rmtree(self._job_dir, ignore_errors=True)

    def _start(self, job: dict[str, object], rank: int) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid != 0:
            return pid
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)
            self._watch.close()
            self._control.close()
            if self._parent is not None:
                os.close(self._parent)
            output = os.open(self._job_dir / f"{rank}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            self._become_rank(job, rank)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _become_rank(self, job: dict[str, object], rank: int) -> NoReturn:
        if self._fork_ranks:
            spec = importlib.util.spec_from_file_location("_reloadpg_rank_process", RANK_PROCESS)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {RANK_PROCESS}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.run_forked(self._job_dir, rank)
        environ = {**job["environ"], **job["rank_environ"][rank]}  # type: ignore[dict-item,index]
        command = [sys.executable, str(RANK_PROCESS), str(self._job_dir), str(rank)]
        os.execve(sys.executable, command, environ)

    def _reap(self) -> bool:
        ended, left = self._watch.reap()
        for pid, status in ended:
            rank = self._live.pop(pid, None)  # None: an orphan that one of the ranks left
            if rank is not None:
                self._tell({"rank": rank, "status": status, "at": time.monotonic()})
        return left

    def _end_all(self) -> list[int]:
        deadline = time.monotonic() + KILL_LIMIT
        while self._reap():
            pids = descendants(os.getpid())
            if time.monotonic() > deadline:
                return pids
            kill(pids)
            select.select([self._watch], [], [], 0.02)
        return []

    def _tell(self, message: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the test process is gone: the loop sees it next
            self._control.send(json.dumps(message).encode())

    def _receive(self) -> bytes:
        try:
            return self._control.recv(MESSAGE_LIMIT)
        except ConnectionError:
            return b""


class Server:
    """Fork one supervisor for each socket that the test process sends."""

    def __init__(self, channel: socket.socket, parent: int | None, fork_ranks: bool) -> None:
        self._channel = channel
        self._parent = parent
        self._fork_ranks = fork_ranks
        self._watch = ChildWatch()
        self._supervisors: set[int] = set()

    def serve(self) -> None:
        """Block until the test process is gone and all supervisors have ended."""
        serving = True
        while serving or self._supervisors:
            sources = [self._watch, self._channel, self._parent] if serving else [self._watch]
            ready = select.select([s for s in sources if s is not None], [], [])[0]
            if self._parent in ready:
                serving = False
            elif self._channel in ready:
                message, fds, _, _ = socket.recv_fds(self._channel, MESSAGE_LIMIT, 1)
                serving = bool(message)
                if fds:
                    self._supervise(Path(os.fsdecode(message)), socket.socket(fileno=fds[0]))
            ended, _ = self._watch.reap()
            self._supervisors.difference_update(pid for pid, _ in ended)
            if ended:
                self._kill_orphans()

    def _supervise(self, job_dir: Path, control: socket.socket) -> None:
        with control:
            pid = os.fork()
            if pid != 0:
                self._supervisors.add(pid)
                return
            code = 1
            try:
                os.setsid()
                prctl(PR_SET_CHILD_SUBREAPER, 1)
                self._watch.close()
                self._channel.close()
                Supervisor(control, self._parent, job_dir, self._fork_ranks).run()
                code = 0
            except BaseException:
                (job_dir / "supervisor.error").write_text(traceback.format_exc())
            finally:
                os._exit(code)

    def _kill_orphans(self) -> None:
        """Kill what a supervisor that was killed itself has left: it is this process's now."""
        kill(descendants(os.getpid(), skip=frozenset(self._supervisors)))


def main() -> None:
    """Serve the socket whose descriptor is the first argument; the second is its owner's pid."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    parent = watch_process(int(sys.argv[2]))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    boot = json.loads(channel.recv(MESSAGE_LIMIT))
    sys.path[:] = boot["sys_path"]
    for name in boot["preload"]:
        # A module that cannot be imported here fails in the rank, where the error is reported.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    channel.send(json.dumps({"threads": threads}).encode())
    Server(channel, parent, boot["fork_ranks"]).serve()


if __name__ == "__main__":
    main()
