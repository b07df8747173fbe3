"""Two hosts, simulated by network namespaces, with torchrun's rendezvous between them.

Nothing outside the two namespaces is changed. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.launching import HELPERS
from helpers.programs import program_on_two_hosts
from helpers.worlds import SILENCE

import reloadpg

PROGRAMS = int(os.environ.get("FAULT_PROGRAMS", "3"))
"""The number of random programs, of one seed each."""
LIMIT_S = 180.0
"""Time limit for the jobs on the two hosts, in seconds."""
ADDRESSES = ("10.199.0.1", "10.199.0.2")
LINK = "veth0"
STORE_ADDRESSES = ("10.199.1.1", "10.199.1.2")
STORE_LINK = "veth1"
"""Addresses and link of a separate network for the store, as with InfiniBand and Ethernet."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True, text=True)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, to create network namespaces"
    if shutil.which("ip") is None:
        return "needs iproute2 (the command ip)"
    name = f"rpg{os.getpid()}probe"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"cannot create network namespaces here: {error.stderr.strip()}"
    return ""


REASON = _why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON or "never")]


class Hosts:
    """Two network namespaces with a link between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"rpg{os.getpid()}{side}" for side in "ab"]
        self.launchers: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        for name in self.names:
            ip("-n", name, "link", "set", "lo", "up")
        for link, addresses in ((LINK, ADDRESSES), (STORE_LINK, STORE_ADDRESSES)):
            # Both ends are created inside the namespaces, never in that of the machine.
            ip("-n", first, "link", "add", link, "type", "veth", "peer", link, "netns", second)
            for name, address in zip(self.names, addresses, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")

    def cut(self) -> None:
        self._set_link("down")

    def join(self) -> None:
        """Undo :meth:`cut`."""
        self._set_link("up")

    def _set_link(self, state: str) -> None:
        for name in self.names:
            ip("-n", name, "link", "set", LINK, state)

    def launch(self, seed: int, ranks_of_a_host: int, addresses: tuple[str, str]) -> None:
        """Start ``two_hosts_job`` by torchrun on both hosts, with the first as its rendezvous.

        ``addresses`` are those of the hosts for the store.
        """
        paths = [str(Path(reloadpg.__file__).parents[1]), str(HELPERS.parent)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        for name, address in zip(self.names, addresses, strict=True):
            variables = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "GLOO_SOCKET_IFNAME": LINK,
                **SILENCE,
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--nproc-per-node", str(ranks_of_a_host)]
            command += ["--max-restarts", "0"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:29511"]
            command += ["--rdzv-id", "two-hosts", "--local-addr", address]
            # Without it each host looks up its name, which is the same on both, and none serves.
            command += ["--rdzv-conf", f"is_host={address == addresses[0]}"]
            script = Path(__file__).with_name("two_hosts_job.py")
            command += [str(script), str(self.folder), str(seed)]
            with (self.folder / f"{name}.log").open("wb") as log:
                self.launchers.append(
                    subprocess.Popen(
                        command,
                        env=variables,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def logs(self) -> str:
        return "\n".join((self.folder / f"{n}.log").read_text()[-6000:] for n in self.names)

    def make_fifos(self, ranks: int, folder: str = "", name: str = "go") -> None:
        """Create the pipes with which the test lets the ranks continue."""
        for rank in range(ranks):
            os.mkfifo(self.folder / folder / f"{name}.{rank}")

    def let_go(self, ranks: int, folder: str = "", name: str = "go") -> None:
        """Let the ranks continue that read their pipes."""
        for rank in range(ranks):
            (self.folder / folder / f"{name}.{rank}").write_text("")

    def await_all(self, name: str, ranks: int, folder: str = "", seconds: float = LIMIT_S) -> None:
        """Wait for a file of each rank; fail with the output if a rank fails, or at the limit."""
        end = time.monotonic() + seconds
        while len(list((self.folder / folder).glob(f"{name}.?"))) < ranks:
            if time.monotonic() > end or any(one.poll() for one in self.launchers):
                pytest.fail(f"{folder} {name}: missing on some ranks\n{self.logs()}")
            time.sleep(0.02)

    def await_ends(self) -> None:
        for launcher in self.launchers:
            # An agent of torchrun waits 300 s for that of the other host, over the link.
            assert launcher.wait(LIMIT_S + 300) == 0, self.logs()

    def end(self) -> None:
        for launcher in self.launchers:
            for pid in self._inside(launcher):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            launcher.wait(20)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], timeout=20, capture_output=True)

    def _inside(self, launcher: subprocess.Popen[bytes]) -> list[int]:
        """The launcher and the processes in the two namespaces; ranks have separate sessions."""
        found = [launcher.pid]
        for name in self.names:
            text = subprocess.run(
                ["ip", "netns", "pids", name], timeout=20, capture_output=True, text=True
            ).stdout
            found += [int(pid) for pid in text.split()]
        return found


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    hosts = Hosts(folder)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.end()


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_programs(seed: int, tmp_path: Path) -> None:
    """Random calls in which the link is down until they have ended on all ranks.

    So the outage is longer than every timeout. Then one call on all ranks makes all groups live
    (failures 14, 16 and 35). ``FAULT_PROGRAMS`` is the number of programs.
    """
    program, ranks_of_a_host, other_link = program_on_two_hosts(seed)
    (life,) = program.lives
    with two_hosts(tmp_path) as hosts:
        parts = [str(place) for place, step in enumerate(life.steps) if step.fault is not None]
        for part in parts:
            (hosts.folder / part).mkdir()
            hosts.make_fifos(program.size, part)
            hosts.make_fifos(program.size, part, "up")
        addresses = STORE_ADDRESSES if other_link else ADDRESSES
        hosts.launch(seed, ranks_of_a_host, addresses)
        for part in parts:
            hosts.await_all("here", program.size, part)
            hosts.cut()
            hosts.let_go(program.size, part)
            hosts.await_all("over", program.size, part)
            hosts.join()
            hosts.let_go(program.size, part, "up")
        hosts.await_all("done", program.size)
        hosts.await_ends()
