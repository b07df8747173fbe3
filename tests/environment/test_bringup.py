"""Bring-up in real processes: agreement, adoption, timeouts, and bad input before any socket."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import worlds
from helpers.fault_job import BOUND, meet
from helpers.in_turn import variables

import reloadpg
from reloadpg import environment
from reloadpg.environment import DistributedEnvironmentError
from reloadpg.testing import faults, simulated

LIMIT = 150.0
"""Seconds within which the ranks of a run must have ended: nothing here is to wait so long."""


def default_timeout() -> timedelta:
    world = dist.group.WORLD
    assert world is not None
    # To the tenth of a second: read back from gloo, 60000 s is 60000.003 s on torch 2.15.
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    return timedelta(seconds=round(timeout.total_seconds(), 1))


class Records(logging.Handler):
    """The log records of ``reloadpg`` at INFO and above, in a separate process."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[logging.LogRecord] = []
        logging.getLogger("reloadpg").addHandler(self)
        logging.getLogger("reloadpg").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record)

    def but_waits(self) -> list[logging.LogRecord]:
        """Those that do not say how long something was waited for."""
        return [record for record in self.found if record.name != "reloadpg"]

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.found]


# ---------------------------------------------------------------------------------------------
# what works


def on_stores(ranks: int, *others: Any) -> Any:
    """Run a test with a store that outlives the group, and with the one of rank 0."""
    marks = [pytest.mark.ranks(ranks, store="rank0"), *others]
    params = [
        pytest.param("parent", marks=pytest.mark.ranks(ranks)),
        pytest.param("rank0", marks=marks),
    ]
    return pytest.mark.parametrize("store", params)


def summed(value: float) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return tensor.item()


@on_stores(2)
def test_bring_up_creates_a_group_with_the_timeout_of_collectives_and_ends_it(
    store: str, rank: int
) -> None:
    """60000 s for collectives with 20 s for bring-up; ``os.environ`` is as before at the end."""
    before = dict(os.environ)
    with reloadpg.environment.init_distributed(timeout=60000, init_timeout=20, seed=5) as context:
        assert summed(rank) == 1
        found = context.environment
        assert (found.rank, found.world_size, found.source) == (rank, 2, "torchrun")
        assert (dist.get_backend(), default_timeout()) == ("gloo", timedelta(seconds=60000))
        assert (str(context.device), context.mesh, context.owned) == ("cpu", None, True)
        assert torch.initial_seed() == 5
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def open_sockets() -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {target for target in found if target.startswith("socket:")}


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
NOTHING = dict.fromkeys(NAMES)
NO_ADDRESS = {"MASTER_ADDR": None, "MASTER_PORT": None, "TORCHELASTIC_USE_AGENT_STORE": None}


@pytest.mark.ranks(1, env={**NOTHING, "MASTER_ADDR": None, "MASTER_PORT": None})
def test_a_process_without_a_launcher_comes_up_without_a_cuda_call() -> None:
    """It gets a group and a flat mesh of one rank; each call of CUDA raises here."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a CUDA call")

    import torch.cuda

    built = torch.backends.cuda.is_built()
    for name in ("device_count", "set_device", "current_device", "init", "_lazy_init"):
        setattr(torch.cuda, name, forbidden)
    if not built:
        torch.cuda.is_available = forbidden  # type: ignore[assignment]
    # A torch that is built for CUDA has to look whether there is a device where none is named.
    device = "cpu" if built else None
    with reloadpg.environment.init_distributed(mesh_dims={}, device=device) as context:
        assert summed(1) == 1
        assert context.mesh is not None
        assert (context.mesh.mesh_dim_names, context.mesh.shape) == (("dp_shard",), (1,))
        assert context.environment.source == "single"


@pytest.mark.ranks(1, env={**NOTHING, "MASTER_ADDR": None, "MASTER_PORT": None})
def test_a_world_of_1_makes_no_group_unless_asked() -> None:
    """As a program without torch.distributed; seed, device and barrier are as with a group. It
    opens no socket."""
    before = open_sockets()
    with reloadpg.environment.init_distributed(seed=5, timeout=60, device="cpu") as context:
        assert not dist.is_initialized()
        reloadpg.environment.barrier()
        assert (context.rank, context.world_size, context.local_rank) == (0, 1, 0)
        assert (context.owned, context.mesh, str(context.device)) == (False, None, "cpu")
        assert torch.initial_seed() == 5
        assert open_sockets() <= before
    for asked in ({"backend": "gloo"}, {"mesh_dims": {}}):
        with reloadpg.environment.init_distributed(**asked, device="cpu") as context:  # type: ignore[arg-type]
            assert (summed(1), context.owned) == (1, True)
        assert not dist.is_initialized()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("installed", [False, True])
def test_the_library_has_one_connection_to_the_store_from_bring_up_to_exit(
    installed: bool, rank: int
) -> None:
    """The job is counted once: bring-up is its first operation, and its list of processes is that
    of barriers."""
    from reloadpg.c10d import stores

    opened, clone = [], stores.clone_store

    def counted(store: dist.Store, **options: Any) -> dist.Store:
        opened.append(store)
        return clone(store, **options)

    stores.clone_store = counted
    if installed:
        reloadpg.install(backends={"gloo"})
    with environment.init_distributed("gloo", init_timeout=LIMIT):
        world = dist.group.WORLD
        assert world is not None
        environment.barrier("all are up")
        if installed:
            reloadpg.offload()
            reloadpg.reload()
        assert stores.root_store(world).get(f"reloadpg/jobs/{rank}") == b"1"
    assert len(opened) == 1 + installed  # a reload has a separate client


# ---------------------------------------------------------------------------------------------
# adoption


@pytest.mark.ranks(2)
def test_an_existing_group_is_adopted_unchanged_and_a_warning_names_what_differs() -> None:
    """The context does not own it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    world = dist.group.WORLD
    records = Records()
    with reloadpg.environment.init_distributed("gloo", timeout=77) as same:
        assert not same.owned
        assert (same.environment.source, same.environment.master_port) == ("torchrun", None)
        assert records.texts() == []
    with reloadpg.environment.init_distributed("nccl", timeout=60) as other:
        assert not other.owned
        (warning,) = records.texts()
        assert "backend 'nccl' (it has 'gloo')" in warning
        assert "timeout 60 s (it has 77 s)" in warning
        mesh: Any = {"mesh_dims": {"tp": 2}, "init_timeout": 20}
        for given, expected in ((33, 33), (None, 77)):  # None: that of the adopted group
            with reloadpg.environment.init_distributed(timeout=given, **mesh) as meshed:
                assert meshed.mesh is not None
                assert meshed.mesh.get_group("tp") is world  # no second group over the same ranks
                own = meshed.mesh.get_group("dp_shard")
                timeout = own._get_backend(torch.device("cpu")).options._timeout
                assert round(timeout.total_seconds(), 1) == expected
    assert dist.group.WORLD is world
    assert default_timeout() == timedelta(seconds=77)


# ---------------------------------------------------------------------------------------------
# disagreement


TP, FLAT = (
    {"options": {"mesh_dims": dims}} for dims in ({"dp_shard": 1, "tp": 2}, {"dp_shard": 2})
)
SILENT = {"env": worlds.SILENCE}
SECOND_RANK_1, OF_THREE = (
    {"env": {**worlds.SILENCE, name: value}} for name, value in (("RANK", "1"), ("WORLD_SIZE", "3"))
)
DISAGREEMENTS: dict[str, list[dict[str, Any]]] = {
    "rank 1 was taken by 2 processes: on ": [SILENT, SILENT, SECOND_RANK_1],
    "world_size is 2 on rank 0; 3 on rank 1": [SILENT, OF_THREE],
    "world_size is 3 on rank 0; 2 on rank 1": [OF_THREE, SILENT],
    "mesh_dims is dp_shard=1 x tp=2 on rank 0 and dp_shard=2 on rank 1": [TP, FLAT],
    "mesh_dims is dp_shard=1 x tp=2 on rank 0 and none on rank 1": [TP, {}],
    "backend is gloo on rank 0 and cpu:gloo on rank 1": [{}, {"options": {"backend": "cpu:gloo"}}],
    "connect is eager on rank 0 and none on rank 1": [{}, {"options": {"connect": "none"}}],
}
"""By message, what differs on each rank. In the first three, the ranks expect different numbers
of answers, so one may wait for its whole grace period."""


@on_stores(3, pytest.mark.slow)
def test_ranks_that_disagree_raise_on_all_ranks_with_ranks_and_values(
    store: str, rank: int
) -> None:
    """Long before the timeout, where stock torch succeeds on one and hangs on the other."""
    for text, ranks in DISAGREEMENTS.items():
        if rank < len(ranks):
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(ranks)))
            options = ranks[rank].get("options", {})
            with variables({**sizes, **ranks[rank].get("env", {})}):
                with pytest.raises(reloadpg.DisagreementError) as caught:
                    reloadpg.environment.init_distributed(init_timeout=2 * LIMIT, **options)
                assert text in str(caught.value)
            assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_a_process_that_comes_after_the_agreement_is_refused(rank: int) -> None:
    """A rank that is started a second time. The job continues without it."""
    with reloadpg.environment.init_distributed("gloo", init_timeout=LIMIT):
        if rank == 1:
            code = "import reloadpg; reloadpg.environment.init_distributed('gloo', init_timeout=60)"
            command = [sys.executable, "-c", code]
            late = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            assert late.returncode == 1
            assert "rank 1 was taken by 2 processes: on " in late.stderr
        assert summed(rank) == 1


@pytest.mark.ranks(3)
def test_a_missing_rank_is_named_by_the_others_at_the_timeout(rank: int) -> None:
    """Rank 0 reaches its timeout, when rank 1 has arrived, and decides for both."""
    if rank == 2:
        return
    os.environ["RELOADPG_GRACE_S"] = "10"  # in which the ranks that are here respond
    timeout = 60.0 if rank else 1.5
    if rank == 0:
        server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        arrived = ["reloadpg/bringup/0/1/reloadpg/1/1/count"]
        dist.TCPStore(*server, is_master=False).wait(arrived, timedelta(seconds=LIMIT))
    with pytest.raises(reloadpg.RendezvousTimeoutError, match=f" {timeout:g} s") as caught:
        reloadpg.environment.init_distributed(init_timeout=timeout)
    assert (caught.value.phase, caught.value.missing) == ("agree", (2,))


SECOND = {"RANK": "1", "LOCAL_RANK": "1"}
SILENT = "no store responded at 127.0.0.1:"
UNREACHABLE: dict[str, tuple[dict[str, str], bool, str, tuple[int, ...]]] = {
    "no server": (SECOND, False, SILENT, (0,)),
    "a server that says nothing": (SECOND, True, SILENT, (0,)),
    "no such host": (
        {**SECOND, "MASTER_ADDR": "absent.invalid"},
        False,
        "no store responded at absent.invalid:",
        (0,),
    ),
    "another host": (
        {"MASTER_ADDR": "192.0.2.1"},
        False,
        "rank 0 cannot reach its own store at 192.0.2.1:",
        (),
    ),
    "port taken": ({}, True, "Free the port, or set another MASTER_PORT", ()),
}
"""By case: variables, whether the port is taken, the message, and the missing ranks."""


@pytest.mark.ranks(len(UNREACHABLE), env={"TORCHELASTIC_USE_AGENT_STORE": None})
def test_a_store_that_cannot_be_reached_is_reported_at_the_timeout_with_what_to_correct(
    rank: int,
) -> None:
    """Torch waits indefinitely for a server that is silent. Each rank has another case."""
    values, taken, text, missing = list(UNREACHABLE.values())[rank]
    is_named = "Free the port" in text
    with socket.socket() as server:
        # Bound, so no other process takes it; who reuses the address can still listen.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", 0))
        if taken:
            server.listen()
        two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update({**two, "MASTER_PORT": str(server.getsockname()[1]), **values})
        with pytest.raises(reloadpg.RendezvousTimeoutError) as caught:
            # A port that is taken is reported at once; a timeout could come before it.
            reloadpg.environment.init_distributed(init_timeout=60.0 if is_named else 1.5)
    message = str(caught.value)
    assert text in message
    assert ("Free the port" in message) == is_named
    assert ("within 1.5 s" in message) == ("within" in message) == (not is_named)
    assert caught.value.missing == missing


# ---------------------------------------------------------------------------------------------
# connection

MESH = {"dp_shard": 2, "tp": 2}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("adopts", [False, True])
def test_bring_up_connects_the_groups_that_it_creates_unless_asked_not_to(adopts: bool) -> None:
    """WORLD and the mesh; over a WORLD that existed the mesh alone."""
    simulated.register()
    if adopts:
        dist.init_process_group("sim")
    created = ["mesh_dp_shard", "mesh_tp"] if adopts else ["default_pg", "mesh_dp_shard", "mesh_tp"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({}, created),
        ({"connect": "canary"}, created),
        ({"connect": "none"}, []),
    ]
    for options, expected in cases:
        with reloadpg.environment.init_distributed(
            "sim", mesh_dims=MESH, init_timeout=60, **options
        ):
            used = sorted(group.desc for group in simulated.groups() if group.collectives)
            assert used == expected, options


@pytest.mark.slow
@pytest.mark.ranks(4, env={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib7"})
def test_a_group_that_does_not_connect_is_named_with_its_ranks_and_interfaces(rank: int) -> None:
    """On all ranks at the timeout; no group is left. One that fails is named at once, as below."""
    simulated.register()
    started = dist.FileStore(os.path.join(os.environ["TMPDIR"], "started"), 4)
    meet("all have started", 4, LIMIT, started)
    fault = faults.Fault("connect", "stall", group="mesh_tp", rank=2)
    with faults.inject(fault), pytest.raises(reloadpg.RendezvousTimeoutError) as caught:
        reloadpg.environment.init_distributed("sim", mesh_dims=MESH, init_timeout=BOUND)
    assert "Ranks 2-3 did not finish their own work" in str(caught.value)
    said = "connecting 'mesh_tp' of ranks 2-3 (sim) over 'ib7' and 'lo'"
    assert said in str(caught.value)
    assert not dist.is_initialized()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("value", "wrong"), [("nosuch0", "'nosuch0'"), ("lo, lo", "' lo'")])
def test_an_interface_that_does_not_exist_is_named_on_all_ranks(
    value: str, wrong: str, rank: int
) -> None:
    """In quotes, and not as unreachable. The failure is gloo's, on real sockets."""
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = value
    said = rf"rank 1 failed at creating the default group \(gloo\) over '{value}'"
    with pytest.raises(reloadpg.ReloadpgError, match=said) as caught:
        reloadpg.environment.init_distributed(init_timeout=60)
    assert isinstance(caught.value, reloadpg.PeerFailedError) == (rank == 0)
    assert f"GLOO_SOCKET_IFNAME='{value}': {wrong} is no interface of host" in str(caught.value)
    assert "it has 'lo'" in str(caught.value)
    assert "reachable" not in str(caught.value)


@pytest.mark.ranks(1, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
def test_bring_up_warns_if_torch_does_not_act_on_timeouts() -> None:
    """Also where the default group exists; not if each wait raises by itself."""
    for waits in (False, True):
        with variables({"TORCH_NCCL_BLOCKING_WAIT": "1"} if waits else {}):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with reloadpg.environment.init_distributed("gloo"):
                    pass
            texts = [str(one.message) for one in caught if "ERROR_HANDLING=0" in str(one.message)]
            assert len(texts) == (not waits)


# ---------------------------------------------------------------------------------------------
# bad input

BAD: dict[str, tuple[dict[str, str | None], dict[str, Any], str]] = {
    "rank": ({"RANK": "2"}, {}, "RANK='2'"),
    "partial": ({"MASTER_PORT": None}, {}, "missing MASTER_PORT"),
    "backend": ({}, {"backend": "glue"}, "'glue'"),
    "timeout": ({}, {"timeout": 0}, "timeout=0"),
    "init_timeout": ({}, {"init_timeout": float("nan")}, "init_timeout=nan"),
    "device": ({}, {"device": "toaster"}, "'toaster'"),
    "mesh": ({}, {"mesh_dims": {"tp": 3}}, "world_size=2"),
    "seed": ({}, {"seed": -1}, "seed=-1"),
    "connect": ({}, {"connect": "now"}, "init_distributed(connect='now')"),
}


@pytest.mark.ranks(1)
def test_bad_input_is_refused_before_a_socket_is_opened_or_a_variable_written() -> None:
    """With a ValueError that names the value."""
    for name, (env, options, text) in BAD.items():
        with variables({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **env}):
            environ, before = dict(os.environ), open_sockets()
            with pytest.raises(ValueError, match=re.escape(text)) as caught:
                reloadpg.environment.init_distributed(**options)
            assert isinstance(caught.value, reloadpg.ReloadpgError), name
            assert dict(os.environ) == environ, name
            assert open_sockets() <= before, name


# ---------------------------------------------------------------------------------------------
# the evaluator


@pytest.mark.ranks(2, env=NOTHING)
def test_an_evaluator_under_a_launcher_gets_a_gloo_group_once_and_one_log_line(rank: int) -> None:
    """Here SLURM's; another part of the program that also calls it adopts the group."""
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": f"{rank}"}
    records = Records()
    with variables({**step, "SLURM_PROCID": f"{rank}"}):
        assert environment.ensure_process_group()
        assert not environment.ensure_process_group()
        assert (dist.get_backend(), default_timeout()) == ("gloo", timedelta(seconds=60000))
        assert [record.levelname for record in records.but_waits()] == ["INFO"]
        assert summed(rank) == 1
        environment.destroy_distributed()
        environment.destroy_distributed()
        assert not dist.is_initialized()


@pytest.mark.ranks(1)
def test_an_evaluator_alone_gets_no_group_and_one_without_an_address_an_error() -> None:
    """Without a log line. Each of several processes would otherwise work alone, as shard 0."""
    records = Records()
    for alone in ({}, {"LOCAL_RANK": "0"}, {"WORLD_SIZE": "1"}):
        with variables({**NOTHING, **NO_ADDRESS, **alone}):
            assert not environment.ensure_process_group()
            assert environment.get_rank() == 0
            environment.destroy_distributed()
    assert records.texts() == []
    several = {"WORLD_SIZE": "2"}
    for given, missing in ((several, "missing RANK"), ({**several, "RANK": "1"}, "MASTER_ADDR")):
        with (
            variables({**NOTHING, **NO_ADDRESS, **given}),
            pytest.raises(DistributedEnvironmentError, match=missing),
        ):
            environment.ensure_process_group()


def test_an_evaluator_that_does_not_reach_the_store_exits_normally_and_names_its_call() -> None:
    """A thread in the store of torch would end it with SIGABRT; no warning of torch is written."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nothing listens there
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        code = "import reloadpg; reloadpg.environment.ensure_process_group(init_timeout=1)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **place, **ranks},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 1, done.stderr
    said = "RendezvousTimeoutError: ensure_process_group: rank 1 of 2: no store responded"
    assert said in done.stderr.splitlines()[-1]
    assert "socket.cpp" not in done.stderr
