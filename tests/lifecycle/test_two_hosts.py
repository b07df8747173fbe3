"""Two hosts in network namespaces, with torchrun's rendezvous between them.

Each host has one end of a link and its own address inside its namespace; nothing outside the two
namespaces is changed. Needs root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faulty_gloo
import pytest

import reloadpg

BOUND_S = 5.0
ALLOWANCE_S = 30.0
"""Seconds past the bound within which every rank must have raised."""
LIMIT_S = 180.0
"""Seconds for everything that runs on the two hosts."""
ADDRESSES = ("10.199.0.1", "10.199.0.2")
LINK = "veth0"
STORE_ADDRESSES = ("10.199.1.1", "10.199.1.2")
STORE_LINK = "veth1"
"""Of hosts whose store is on a separate network, as with InfiniBand and Ethernet."""
DOWN_S = 5.0
"""Seconds for which a link is down that comes back."""

HOST_PROGRAM = '''
import json, os, sys, time
from datetime import timedelta
from pathlib import Path

import faulty_gloo
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.testing import simulated

bound, cut, folder = float(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
faulty_gloo.register()
reloadpg.install(backends={"faulty"}, timeout=timedelta(seconds=bound))
dist.init_process_group("faulty", timeout=timedelta(seconds=30))
rank = dist.get_rank()
groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 0])]


def sums():
    found = []
    for group in groups:
        value = torch.tensor([2.0**rank])
        dist.all_reduce(value, group=group)
        found.append(value.item())
    return found


def write(name, text):
    # The reader must see all of it or nothing.
    (folder / f"{name}.new").write_text(text)
    os.replace(folder / f"{name}.new", folder / name)


def cut_here():
    """Let the parent cut the link, then continue."""
    write(f"here.{rank}", "")
    fifo = folder / f"go.{rank}"
    with fifo.open() as go:
        go.read()


seen = {"before": sums(), "group_rank": os.environ["GROUP_RANK"]}
inner = [id(group.communicator) for group in groups]
if cut == "enter":
    fault = simulated.Fault("barrier", "call", operation="reload.enter", call=lambda _: cut_here())
    simulated.inject(fault)
elif cut == "group":
    faulty_gloo.inject("create", cut_here, group=f"{groups[1].group_name}@*")
elif cut == "callback":
    reloadpg.on_reload(cut_here)
reloadpg.offload()
begun = time.monotonic()
try:
    reloadpg.reload()
    seen["error"] = ""
except Exception as error:
    seen["error"] = type(error).__name__
    seen["timeout"] = isinstance(error, TimeoutError)
    seen["text"] = str(error)
seen["seconds"] = time.monotonic() - begun
seen["states"] = [str(group.state) for group in groups]
seen["generations"] = [group.generation for group in groups]
if not seen["error"]:
    seen["after"] = sums()
write(f"rank{rank}.json", json.dumps(seen))
if seen["error"]:
    os._exit(0)  # without notifying the other host
dist.destroy_process_group()
'''

RECOVERING_PROGRAM = '''
import json, os, sys, time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import faulty_gloo
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

import reloadpg

*cases, top = sys.argv[1:]
PATIENCE, IMPATIENCE = timedelta(seconds=90), timedelta(seconds=3)
CUT = 2
faulty_gloo.register()
reloadpg.install(backends={"faulty"}, timeout=PATIENCE)
dist.init_process_group("faulty", timeout=PATIENCE)
rank, size = dist.get_rank(), dist.get_world_size()
made = [dist.new_group(ranks, timeout=PATIENCE) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
groups = [dist.group.WORLD, *(g for g in made if g is not dist.GroupMember.NON_GROUP_MEMBER)]
ids = [id(group) for group in groups]


def write(name, text):
    (folder / f"{name}.new").write_text(text)
    os.replace(folder / f"{name}.new", folder / name)


def cut_here():
    """Let the parent cut the link, then continue."""
    write(f"here.{rank}", "")
    (folder / f"go.{rank}").read_text()


def sums(number):
    for group in groups:
        value = torch.tensor([2.0**rank + number])
        dist.all_reduce(value, group=group)
        ranks = dist.get_process_group_ranks(group)
        assert value.item() == sum(2.0**one + number for one in ranks), (value, ranks)


def run(number, attempt):
    log.append((number, attempt))
    begins = number == CUT and attempt == 1
    if not begins or where == "commit":
        sums(number)
        if begins:
            cut_here()
        return
    if where == "recover":
        write(f"ready.{rank}", "")  # the first to abort would fail others in the step before
        while len(list(folder.glob("ready.?"))) < size:
            time.sleep(0.02)
        faulty_gloo.inject("create", cut_here, group=f"{groups[1].group_name}@*")
        raise dist.DistNetworkError("a fault, in the recovery of which the link goes down")
    for group in groups:
        _set_pg_timeout(IMPATIENCE, group)
    cut_here()
    try:
        sums(number)
    finally:
        for group in groups:
            with suppress(RuntimeError):
                _set_pg_timeout(PATIENCE, group)


def by_hand():
    for number in range(5):
        for attempt in range(1, 20):
            try:
                run(number, attempt)
            except RuntimeError:
                errors.append(repr(sys.exc_info()[1])[:2000])
                recovered = False
                while not recovered and len(errors) < 20:
                    try:
                        reloadpg.recover()
                        recovered = True
                    except reloadpg.ReloadpgError as error:
                        errors.append(repr(error)[:2000])
            else:
                if not reloadpg.recovery_requested():
                    break
                reloadpg.recover()


def with_retrying():
    for step in reloadpg.retrying(range(5)):
        with step as number:
            try:
                run(number, step.attempt)
            except RuntimeError as error:
                errors.append(repr(error)[:2000])
                raise


for case in cases:
    where, way = case.split(", ")
    folder = Path(top, case)
    log, errors, raised = [], [], ""
    before = [group.generation for group in groups]
    begun = time.monotonic()
    try:
        {"by hand": by_hand, "retrying": with_retrying}[way]()
    except Exception as error:
        raised = repr(error)
    seen = {
        "raised": raised,
        "log": log,
        "errors": errors,
        "same": [id(group) for group in groups] == ids,
        "states": [str(group.state) for group in groups],
        "rebuilt": [group.generation - one for group, one in zip(groups, before)],
        "seconds": time.monotonic() - begun,
    }
    write(f"rank{rank}.json", json.dumps(seen))
    if raised:
        os._exit(0)
dist.destroy_process_group()
'''


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True, text=True)


def _why_not() -> str:
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "needs iproute2 (the command ip)"
    name = f"rpg{os.getpid()}probe"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces here: {error.stderr.strip()}"
    return ""


REASON = _why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON or "never")]

OUTAGES = [
    f"{where}, {way}" for where in ("step", "commit", "recover") for way in ("retrying", "by hand")
]
OUTAGE_RANKS = range(4)


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
            # Both ends are created inside: the machine's own namespace never has the link.
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

    def launch(
        self,
        *arguments: str,
        text: str = HOST_PROGRAM,
        ranks_of_a_host: int = 1,
        addresses: tuple[str, str] = ADDRESSES,
    ) -> None:
        """Start torchrun on both hosts, with the first as its rendezvous.

        Args:
            arguments: of the program, before the folder.
            text: the program.
            ranks_of_a_host: how many ranks each host has.
            addresses: the hosts' addresses for the store.
        """
        program = self.folder / "host_program.py"
        program.write_text(text)
        paths = [str(Path(reloadpg.__file__).parents[1]), str(Path(faulty_gloo.__file__).parent)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        for name, address in zip(self.names, addresses, strict=True):
            variables = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "GLOO_SOCKET_IFNAME": LINK,
                "OMP_NUM_THREADS": "1",
            }
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
            command += ["--nnodes", "2", "--nproc-per-node", str(ranks_of_a_host)]
            command += ["--max-restarts", "0"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:29511"]
            command += ["--rdzv-id", "two-hosts", "--local-addr", address]
            # Without it each host looks its own name up, which both have alike, and neither serves.
            command += ["--rdzv-conf", f"is_host={address == addresses[0]}"]
            command += [str(program), *arguments, str(self.folder)]
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

    def await_files(self, names: list[str], end: float) -> None:
        """Wait until all exist; fail with the launchers' output at the end of the time."""
        while not all((self.folder / name).exists() for name in names):
            if time.monotonic() > end:
                pytest.fail(f"{names}: not all written in time\n{self.logs()}")
            time.sleep(0.02)

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
        """The launcher, and what runs in the two namespaces (ranks have separate sessions)."""
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


def results(hosts: Hosts) -> list[dict[str, Any]]:
    return [json.loads((hosts.folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_a_cycle_over_two_hosts(tmp_path: Path) -> None:
    """Torchrun counts two nodes; every group is rebuilt, and sums over both of them."""
    with two_hosts(tmp_path) as hosts:
        hosts.launch(str(BOUND_S), "never")
        hosts.await_files(["rank0.json", "rank1.json"], time.monotonic() + LIMIT_S)
        for launcher in hosts.launchers:
            assert launcher.wait(LIMIT_S) == 0, hosts.logs()
        found = results(hosts)
    assert sorted(seen["group_rank"] for seen in found) == ["0", "1"]
    for seen in found:
        assert seen["error"] == "", seen
        assert seen["states"] == ["live"] * 3
        assert seen["generations"] == [1] * 3
        assert seen["before"] == seen["after"] == [3.0] * 3


@pytest.mark.parametrize("where", ["enter", "group", "callback"])
def test_a_link_that_is_cut_during_a_reload(tmp_path: Path, where: str) -> None:
    """At the start, in a group's rebuild, or before the last barrier (failures 14 and 16).

    The ranks of both hosts raise within the timeout and name ranks, or the unresponsive store. No
    group is live.
    """
    with two_hosts(tmp_path) as hosts:
        fifos = [hosts.folder / f"go.{rank}" for rank in range(2)]
        for fifo in fifos:
            os.mkfifo(fifo)
        hosts.launch(str(BOUND_S), where)
        hosts.await_files(["here.0", "here.1"], time.monotonic() + LIMIT_S)
        hosts.cut()
        for fifo in fifos:
            fifo.write_text("")
        end = time.monotonic() + BOUND_S + ALLOWANCE_S + 10
        hosts.await_files(["rank0.json", "rank1.json"], end)
        found = results(hosts)
    for seen in found:
        assert seen["error"] == "RendezvousTimeoutError", seen
        assert "rank " in seen["text"] or "store" in seen["text"], seen
        assert seen["seconds"] < BOUND_S + ALLOWANCE_S, seen
        assert "live" not in seen["states"], seen
        assert len(set(seen["states"])) == 1, seen


@pytest.fixture(scope="module", params=["same link", "other link"])
def outages(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The results of each rank of one job that goes through all outages.

    The store is on the link that goes down, or on another one.
    """
    seen: dict[str, list[dict[str, Any]]] = {}
    with two_hosts(tmp_path_factory.mktemp("hosts")) as hosts:
        for case in OUTAGES:
            (hosts.folder / case).mkdir()
            for rank in OUTAGE_RANKS:
                os.mkfifo(hosts.folder / case / f"go.{rank}")
        addresses = ADDRESSES if request.param == "same link" else STORE_ADDRESSES
        hosts.launch(*OUTAGES, text=RECOVERING_PROGRAM, addresses=addresses, ranks_of_a_host=2)
        for case in OUTAGES:
            names = [f"{case}/here.{rank}" for rank in OUTAGE_RANKS]
            hosts.await_files(names, time.monotonic() + LIMIT_S)
            hosts.cut()
            for rank in OUTAGE_RANKS:
                (hosts.folder / case / f"go.{rank}").write_text("")
            time.sleep(DOWN_S)
            hosts.join()
            names = [f"{case}/rank{rank}.json" for rank in OUTAGE_RANKS]
            hosts.await_files(names, time.monotonic() + LIMIT_S)
            seen[case] = [json.loads((hosts.folder / name).read_text()) for name in names]
            if any(found["raised"] for found in seen[case]):
                break
    return seen


@pytest.mark.parametrize("case", OUTAGES)
def test_a_link_that_is_down_for_five_seconds(
    outages: dict[str, list[dict[str, Any]]], case: str
) -> None:
    """In a step, at its end, or in a recovery: all ranks repeat what failed, with right sums."""
    assert case in outages, f"an outage before it was not survived: {outages}"
    seen = outages[case]
    for rank, found in enumerate(seen):
        assert found["raised"] == "", (rank, found)
        assert found["same"]
        assert found["states"] == ["live"] * 3
        assert found["log"] == seen[0]["log"]
        numbers = [number for number, _ in found["log"]]
        assert sorted({*numbers}) == list(range(5))
        if not case.startswith("commit"):
            assert found["errors"]
            assert numbers.count(2) > 1
            assert min(found["rebuilt"]) >= 1
        assert found["rebuilt"] == seen[0]["rebuilt"]
