"""Bring-up in real processes: agreement, adoption, timeouts, and bad input before any socket."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from typing import Any

import moments
import pytest
import torch
import torch.distributed as dist
import worlds
from in_turn import in_each, variables

import reloadpg
from reloadpg import environment
from reloadpg.environment import DistributedEnvironmentError, GroupNotInitializedError
from reloadpg.environment import store as bringup_store
from reloadpg.environment.store import Claim, find_differences
from reloadpg.testing import run_ranks, simulated

slow = partial(pytest.param, marks=pytest.mark.slow)
STORES: Any = ["parent", slow("rank0")]
LIMIT = 150.0
"""Seconds within which the ranks of a run must have ended: nothing here is to wait so long."""


def default_timeout() -> timedelta:
    world = dist.group.WORLD
    assert world is not None
    # To the tenth of a second: read back from gloo, 60000 s is 60000.003 s on torch 2.15.
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    return timedelta(seconds=round(timeout.total_seconds(), 1))


class Records(logging.Handler):
    """The log records of ``reloadpg`` at INFO and above, in a process of its own."""

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


def come_up(rank: int, world_size: int) -> tuple[Any, ...]:
    before = dict(os.environ)
    with reloadpg.init_distributed(timeout=60000, init_timeout=20, seed=5) as context:
        value = torch.tensor([float(rank)])
        dist.all_reduce(value)
        environment = context.environment
        facts = (
            (environment.rank, environment.world_size, environment.source),
            dist.get_backend(),
            default_timeout(),
            value.item(),
            str(context.device),
            context.mesh,
            context.owned,
            torch.initial_seed(),
        )
    return (*facts, dist.is_initialized(), dict(os.environ) == before)


@pytest.mark.parametrize("store", ["parent", "rank0"])
def test_bring_up_makes_a_working_group_with_the_real_timeout_and_ends_it(store: Any) -> None:
    """60000 s for collectives beside 20 s for bring-up; ``os.environ`` is as before."""
    for rank, outcome in enumerate(run_ranks(come_up, 2, store=store)):
        identity = (rank, 2, "torchrun")
        timeout = timedelta(seconds=60000)
        facts = (identity, "gloo", timeout, 1.0, "cpu", None, True, 5)
        assert outcome == (*facts, False, True)


def come_up_alone(rank: int, world_size: int) -> tuple[Any, ...]:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a CUDA call")

    import torch.cuda

    built = torch.backends.cuda.is_built()
    for name in ("device_count", "set_device", "current_device", "init", "_lazy_init"):
        setattr(torch.cuda, name, forbidden)
    if not built:
        torch.cuda.is_available = forbidden  # type: ignore[assignment]
    connected = []
    create = socket.socket

    class Watched(create):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            connected.append(args)
            super().__init__(*args, **kwargs)

    socket.socket = Watched  # type: ignore[misc]
    # A torch that is built for CUDA has to look whether there is a device where none is named.
    device = "cpu" if built else None
    with reloadpg.init_distributed(mesh_dims={}, device=device) as context:
        value = torch.ones(1)
        dist.all_reduce(value)
        assert context.mesh is not None
        shape = dict(zip(context.mesh.mesh_dim_names or (), context.mesh.shape, strict=True))
        return context.environment.source, value.item(), shape, connected


def test_a_world_of_1_on_a_cpu_works_without_launcher_socket_or_cuda_call() -> None:
    """A bare process gets a group and a flat mesh of one; each CUDA call is mined."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    env = dict.fromkeys((*names, "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    assert run_ranks(come_up_alone, 1, env=env) == [("single", 1.0, {"dp_shard": 1}, [])]


def come_up_again(rank: int, world_size: int) -> list[float]:
    sums = []
    for turn in range(3):
        with reloadpg.init_distributed(init_timeout=20):
            value = torch.tensor([float(rank + turn)])
            dist.all_reduce(value)
            sums.append(value.item())
    return sums


@pytest.mark.parametrize("store", STORES)
def test_a_process_can_be_brought_up_again_and_never_reads_the_keys_of_before(store: Any) -> None:
    """Three times in one process, on the agent's lasting store and on rank 0's."""
    assert run_ranks(come_up_again, 2, store=store) == [[1.0, 3.0, 5.0]] * 2


NOTHING = dict.fromkeys(
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
)
NO_ADDRESS = {"MASTER_ADDR": None, "MASTER_PORT": None, "TORCHELASTIC_USE_AGENT_STORE": None}
ALONE = {
    "WORLD_SIZE=1": {**NOTHING, **NO_ADDRESS, "WORLD_SIZE": "1"},
    "LOCAL_RANK=0": {**NOTHING, **NO_ADDRESS, "LOCAL_RANK": "0"},
    "RANK=0 WORLD_SIZE=1": {**NOTHING, **NO_ADDRESS, "RANK": "0", "WORLD_SIZE": "1"},
}


def come_up_partly(rank: int, world_size: int) -> tuple[Any, ...]:
    helpers = (
        environment.get_rank(),
        environment.is_rank_zero(),
        environment.rank_zero_only(int)("3"),
    )
    with reloadpg.init_distributed(init_timeout=60) as context:
        value = torch.tensor([1.0])
        dist.all_reduce(value)
        return (*helpers, context.environment.world_size, value.item())


def test_a_world_of_1_that_is_partly_described_works() -> None:
    """What is not set follows from the world of 1."""
    [results] = run_ranks(in_each, 1, args=(ALONE, come_up_partly), timeout=LIMIT)
    assert results == dict.fromkeys(ALONE, (0, True, 3, 1, 1.0))


@pytest.mark.parametrize("local", [{"LOCAL_RANK": None}, {}], ids=["no LOCAL_RANK", "LOCAL_RANK"])
def test_ranks_described_as_for_env_rendezvous_come_up(local: dict[str, str | None]) -> None:
    """RANK, WORLD_SIZE and the address, as programs set them that spawn their own ranks."""
    env = {**dict.fromkeys(("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")), **local}
    assert run_ranks(come_up_partly, 2, env=env) == [
        (0, True, 3, 2, 2.0),
        (1, False, None, 2, 2.0),
    ]


def refuse_without_address(rank: int, world_size: int) -> tuple[Any, ...]:
    known = environment.get_rank(), environment.is_rank_zero()
    with pytest.raises(DistributedEnvironmentError, match="missing MASTER_ADDR, MASTER_PORT"):
        reloadpg.init_distributed(init_timeout=60)
    with pytest.raises(GroupNotInitializedError):
        reloadpg.barrier(60, "no group")
    return known


def test_the_rank_is_known_without_an_address_and_bring_up_names_what_it_lacks() -> None:
    """Only what is used is required."""
    env = {**NO_ADDRESS, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    assert run_ranks(refuse_without_address, 2, env=env) == [(0, True), (1, False)]


def come_up_on(rank: int, world_size: int, path: str) -> list[Any]:
    seen = []
    for turn in range(2):
        store = dist.FileStore(path, world_size)
        with reloadpg.init_distributed(store=store, init_timeout=60) as context:
            value = torch.tensor([float(rank + turn)])
            dist.all_reduce(value)
            seen.append((value.item(), context.environment.rank, context.environment.master_port))
    return seen


def test_bring_up_takes_a_store_and_needs_no_address(tmp_path: Any) -> None:
    """Twice on the same one, as after a restart within the process."""
    env = {**NO_ADDRESS, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    outcomes = run_ranks(come_up_on, 2, args=(str(tmp_path / "store"),), env=env, timeout=150)
    assert outcomes == [[(1.0, rank, None), (3.0, rank, None)] for rank in range(2)]


def tell_of_mesh(rank: int, world_size: int) -> list[str]:
    records = Records()
    with reloadpg.init_distributed(mesh_dims={"tp": 2, "pp": 2}, init_timeout=60):
        return [text for text in records.texts() if text.startswith("mesh ")]


def test_the_mesh_is_told_in_one_log_line() -> None:
    """Its sizes, and the place of this rank."""
    for rank, lines in enumerate(run_ranks(tell_of_mesh, 4)):
        place = f"pp={rank // 2} x dp_shard=0 x tp={rank % 2}"
        assert lines == [f"mesh pp=2 x dp_shard=1 x tp=2 over 4 ranks: rank {rank} is at {place}"]


# ---------------------------------------------------------------------------------------------
# adoption


def come_up_within(rank: int, world_size: int) -> tuple[Any, ...]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=77))
    world = dist.group.WORLD
    records = Records()
    with reloadpg.init_distributed("gloo", timeout=77) as same:
        quiet = list(records.texts())
    with reloadpg.init_distributed("nccl", timeout=60) as other:
        warned = list(records.texts())
        with reloadpg.init_distributed("nccl", timeout=60, adopt=True):
            expected = records.texts()[len(warned) :]
        with reloadpg.init_distributed(timeout=33, mesh_dims={"tp": 2}, init_timeout=20) as meshed:
            assert meshed.mesh is not None
            own = meshed.mesh.get_group("dp_shard")
            mesh_timeout = own._get_backend(torch.device("cpu")).options._timeout
    untouched = dist.is_initialized() and dist.group.WORLD is world
    return (
        (same.owned, other.owned),
        quiet,
        warned,
        expected,
        mesh_timeout,
        untouched,
        default_timeout(),
    )


def test_an_existing_group_is_adopted_untouched_and_differences_are_warned_about() -> None:
    """Not owned, not ended, not changed; a warning names what is not as asked, unless expected."""
    for owned, quiet, warned, expected, mesh_timeout, untouched, timeout in run_ranks(
        come_up_within, 2
    ):
        assert owned == (False, False)
        assert quiet == []
        assert len(warned) == 1
        assert "backend 'nccl' (it has 'gloo')" in warned[0]
        assert "timeout 60 s (it has 77 s)" in warned[0]
        assert expected == []
        assert mesh_timeout == timedelta(seconds=33)
        assert untouched
        assert timeout == timedelta(seconds=77)


def describe(rank: int, world_size: int, path: str) -> tuple[Any, ...]:
    store = dist.FileStore(path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = reloadpg.init_distributed(adopt=True).environment
    reloadpg.barrier(60, "both have looked")
    dist.destroy_process_group()
    return found.source, found.rank, found.local_rank, found.local_world_size, found.master_port


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": None}, [("torchrun", rank, rank, None, None) for rank in range(2)]),
        ({"RANK": "0"}, [("torchrun", 0, 0, None, None), ("process_group", 1, None, None, None)]),
    ],
    ids=["launcher fits", "launcher does not fit"],
)
def test_an_adopted_group_is_described_by_what_is_known_and_by_no_more(
    env: dict[str, str | None], expected: list[tuple[Any, ...]], tmp_path: Any
) -> None:
    """Ranks that met on a store of their own: what neither launcher nor group says is None."""
    env = {**NO_ADDRESS, "LOCAL_WORLD_SIZE": None, **env}
    assert run_ranks(describe, 2, args=(str(tmp_path / "store"),), env=env) == expected


# ---------------------------------------------------------------------------------------------
# disagreement


def disagree(
    rank: int, world_size: int, cases: dict[str, tuple[list[dict[str, Any]], str]]
) -> dict[str, tuple[str, str]]:
    """What the ranks of each case raise, one case after the other."""
    raised = {}
    for name, (ranks, _) in cases.items():
        if rank < len(ranks):
            sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(len(ranks)))
            with variables({**sizes, **ranks[rank].get("env", {})}):
                try:
                    reloadpg.init_distributed(
                        init_timeout=2 * LIMIT, **ranks[rank].get("options", {})
                    )
                except (reloadpg.DisagreementError, reloadpg.RendezvousTimeoutError) as error:
                    raised[name] = type(error).__name__, str(error)
            assert not dist.is_initialized()
    return raised


TP, FLAT = {"dp_shard": 1, "tp": 2}, {"dp_shard": 2}
DISAGREEMENTS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "same rank": (
        [{}, {}, {"env": {"RANK": "1"}}],
        "rank 1 was taken by 2 processes: on ",
    ),
    "world size": (
        [{}, {"env": {"WORLD_SIZE": "3"}}],
        "world_size is 2 on rank 0; 3 on rank 1",
    ),
    "smaller world": (
        [{"env": {"WORLD_SIZE": "3"}}, {}],
        "world_size is 3 on rank 0; 2 on rank 1",
    ),
    "mesh dims": (
        [{"options": {"mesh_dims": TP}}, {"options": {"mesh_dims": FLAT}}],
        "mesh_dims is dp_shard=1 x tp=2 on rank 0; dp_shard=2 on rank 1",
    ),
    "mesh or none": (
        [{"options": {"mesh_dims": TP}}, {}],
        "mesh_dims is dp_shard=1 x tp=2 on rank 0; none on rank 1",
    ),
    "backend": (
        [{}, {"options": {"backend": "cpu:gloo"}}],
        "backend is gloo on rank 0; cpu:gloo on rank 1",
    ),
    "connection": (
        [{}, {"options": {"connect": "none"}}],
        "connect is eager on rank 0; none on rank 1",
    ),
}


@pytest.mark.parametrize("store", STORES)
def test_ranks_that_disagree_all_raise_soon_and_name_ranks_and_values(store: Any) -> None:
    """Long before the bound, where stock torch succeeds on one and hangs on the other."""
    outcomes = run_ranks(disagree, 3, args=(DISAGREEMENTS,), store=store, timeout=LIMIT)
    for name, (ranks, text) in DISAGREEMENTS.items():
        for outcome in outcomes[: len(ranks)]:
            kind, message = outcome[name]
            assert kind == "DisagreementError", (name, message)
            assert text in message


def test_three_ranks_are_sorted_by_value_and_only_those_that_differ_apart() -> None:
    """With many ranks the message groups them, also a rank that was taken twice."""
    claims = [Claim(rank, 4, "gloo", "none", f"n{rank // 2}", rank % 2) for rank in range(4)]
    assert find_differences(claims) == []
    claims[3] = Claim(3, 4, "nccl", "none", "n1", 1)
    assert find_differences(claims) == ["backend is gloo on ranks 0-2; nccl on rank 3"]
    claims[3] = Claim(2, 4, "gloo", "none", "n1", 1)
    assert find_differences(claims) == [
        "rank 2 was taken by 2 processes: on n1 (local rank 0), n1 (local rank 1)"
    ]


def test_two_ranks_of_one_host_may_both_have_local_rank_0() -> None:
    """One visible device a task, and containers with equal host names: gloo shares nothing."""
    env = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert [ok[:3] for ok in run_ranks(come_up_partly, 2, env=env)] == [
        (0, True, 3),
        (1, False, None),
    ]


def wait_for_claim() -> dist.TCPStore:
    """Wait until another rank has written its claim in bring-up; return a client of the store."""
    serves = os.environ["RANK"] == "0" and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=serves,
        wait_for_workers=False,
        multi_tenant=True,  # bring-up's own store at this address has the same server
    )
    store.wait(["reloadpg/bringup/0/1/claim/1"], timedelta(seconds=LIMIT))
    return store


def come_or_not(
    rank: int, world_size: int, absent: int, bounds: list[float]
) -> tuple[str, tuple[int, ...]]:
    if rank == absent:
        return "", ()
    # Rank 0 judges for all: its bound begins when the other one that comes has come.
    store = wait_for_claim() if rank == 0 else None
    try:
        reloadpg.init_distributed(init_timeout=bounds[rank])
    except reloadpg.RendezvousTimeoutError as error:
        return str(error), error.missing
    finally:
        del store
    return "", ()


@pytest.mark.parametrize(
    ("absent", "store"),
    [(2, "parent"), slow(2, "rank0"), (0, "rank0"), slow(0, "parent")],
)
def test_a_rank_that_never_comes_is_named_by_the_others_within_the_bound(
    absent: int, store: Any
) -> None:
    """``init_timeout`` is real, also where the missing rank is the one with the store."""
    bounds = [4.0, 60.0, 60.0] if absent == 2 else [4.0] * 3
    outcomes = run_ranks(come_or_not, 3, args=(absent, bounds), store=store, timeout=LIMIT)
    for rank, (message, missing) in enumerate(outcomes):
        if rank != absent:
            assert missing == (absent,), message
            assert f" {bounds[rank]:g} s" in message


def come_up_stopped(rank: int, world_size: int, last: float, bound: float, stopped: float) -> int:
    bringup_store._LAST_S = last
    between = dist.FileStore(os.path.join(os.environ["TMPDIR"], "between"), 2)
    if rank == 0:
        between.set("rank 0", str(os.getpid()))
    else:
        wait_for_claim()
        worlds.stop_for(stopped, after=0.0, pids=[int(between.get("rank 0")), os.getpid()])
        clock = [time.monotonic()] * 2
        while clock[1] - clock[0] < stopped - 2:  # and so comes when both run again
            time.sleep(0.05)
            clock = [clock[1], time.monotonic()]
    with reloadpg.init_distributed(init_timeout=bound if rank == 0 else LIMIT):
        return dist.get_world_size()


@pytest.mark.slow
@pytest.mark.parametrize("last", [5.0, LIMIT], ids=["one question", "many questions"])
def test_time_in_which_the_machine_stood_still_is_not_waited_for_a_rank(last: float) -> None:
    """Past the bound by the clock, and long before it by what the ranks could do.

    A long wait is one question to the store, its last seconds are many. The bound is one that a
    loaded machine does not reach.
    """
    assert run_ranks(come_up_stopped, 2, args=(last, 30.0, 35.0), timeout=LIMIT) == [2, 2]


def refuse_address(
    rank: int, world_size: int, cases: list[Any], bound_s: float = 1.5
) -> tuple[str, tuple[int, ...]]:
    values, taken, text, _ = cases[rank]
    with socket.socket() as server:
        # Bound, so that nobody else takes it; who reuses the address can still listen.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("0.0.0.0", 0))
        port = server.getsockname()[1]
        if taken:
            server.listen()
        two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update({**two, "MASTER_PORT": str(port), **values})
        with pytest.raises(reloadpg.RendezvousTimeoutError) as caught:
            # A port that is taken is told at once, and only within the bound.
            bound_s = 60.0 if "Free the port" in text else bound_s
            reloadpg.init_distributed(init_timeout=bound_s)
        return str(caught.value), caught.value.missing


UNREACHABLE: dict[str, tuple[dict[str, str], bool, str, tuple[int, ...]]] = {
    "nobody listens": (
        {"RANK": "1", "LOCAL_RANK": "1"},
        False,
        "no store responded at 127.0.0.1:",
        (0,),
    ),
    "a server that says nothing": (
        {"RANK": "1", "LOCAL_RANK": "1"},
        True,
        "no store responded at 127.0.0.1:",
        (0,),
    ),
    "no such host, rank 1": (
        {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "nobody.invalid"},
        False,
        "MASTER_ADDR 'nobody.invalid' cannot be resolved",
        (0,),
    ),
    "no such host": (
        {"MASTER_ADDR": "nobody.invalid"},
        False,
        "MASTER_ADDR 'nobody.invalid' cannot be resolved",
        (),
    ),
    "no name": ({"MASTER_ADDR": "a..b"}, False, "MASTER_ADDR 'a..b' cannot be resolved", ()),
    "another host": (
        {"MASTER_ADDR": "192.0.2.1"},
        False,
        "rank 0 cannot reach its own store at 192.0.2.1:",
        (),
    ),
    "port taken": ({}, True, "Free the port, or set another MASTER_PORT", ()),
}


def test_a_store_that_cannot_be_had_is_reported_within_the_bound_with_what_to_correct() -> None:
    """torch would wait indefinitely for a server that says nothing. Address and port are told
    apart; the remedy fits. Each case has a process."""
    cases, env = list(UNREACHABLE.values()), {"TORCHELASTIC_USE_AGENT_STORE": None}
    outcomes = run_ranks(refuse_address, len(cases), args=(cases,), env=env, timeout=LIMIT)
    for (message, found), (*_, text, missing) in zip(outcomes, cases, strict=True):
        assert text in message
        taken = "Free the port" in text
        assert ("Free the port" in message) == taken
        assert ("within 1.5 s" in message) == ("within" in message) == (not taken)
        assert found == missing, message


def refuse_slowly(rank: int, world_size: int, cases: list[Any], bound_s: float) -> float:
    begun = time.monotonic()
    refuse_address(rank, world_size, cases, bound_s)
    return time.monotonic() - begun


@pytest.mark.slow
def test_it_is_reported_within_the_bound() -> None:
    """torch tries for twice its own."""
    names, env = ("nobody listens", "another host"), {"TORCHELASTIC_USE_AGENT_STORE": None}
    cases = [UNREACHABLE[name] for name in names]
    seconds = run_ranks(refuse_slowly, len(cases), args=(cases, 30.0), env=env, timeout=LIMIT)
    assert all(29 < one < 50 for one in seconds)


# ---------------------------------------------------------------------------------------------
# connection

MESH = {"dp_shard": 2, "tp": 2}


CONNECTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, True),
    "canary": ({"connect": "canary"}, True),
    "none": ({"connect": "none"}, False),
}


def connect_all(rank: int, world_size: int, adopts: bool) -> dict[str, list[str]]:
    """By connection, the groups that were used when bring-up had returned."""
    simulated.register()
    if adopts:
        dist.init_process_group("sim")
    used = {}
    for name, (options, _) in CONNECTIONS.items():
        with reloadpg.init_distributed("sim", mesh_dims=MESH, init_timeout=60, **options):
            used[name] = sorted(group.desc for group in simulated.groups() if group.collectives)
    return used


@pytest.mark.parametrize("adopts", [False, True])
def test_bring_up_connects_the_groups_that_it_makes_unless_told_not_to(adopts: bool) -> None:
    """WORLD and the mesh; over a WORLD that existed the mesh alone."""
    made = ["mesh_dp_shard", "mesh_tp"] if adopts else ["default_pg", "mesh_dp_shard", "mesh_tp"]
    expected = {name: made if connects else [] for name, (_, connects) in CONNECTIONS.items()}
    assert run_ranks(connect_all, 4, args=(adopts,), timeout=LIMIT) == [expected] * 4


def connect_badly(
    rank: int, world_size: int, fault: dict[str, Any], options: dict[str, Any]
) -> tuple[str, str, bool]:
    moments.wait_for_answers()
    simulated.register()
    with simulated.inject(simulated.Fault(**fault)):
        try:
            reloadpg.init_distributed("sim", mesh_dims=MESH, **options)
        except reloadpg.ReloadpgError as error:
            return type(error).__name__, str(error), dist.is_initialized()
    return "", "", True


def test_a_group_that_does_not_connect_is_an_error_with_group_ranks_and_interface() -> None:
    """The failing rank says where; the others hear it at once; no group is left."""
    fault = {"at": "connect", "group": "mesh_tp", "rank": 2, "message": "no route to host"}
    options = {"network": {"NCCL_SOCKET_IFNAME": "ib7"}, "init_timeout": 60}
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    outcomes = run_ranks(connect_badly, 4, args=(fault, options), env=env, timeout=150)
    for rank, (kind, message, left) in enumerate(outcomes):
        assert kind == ("ReloadpgError" if rank == 2 else "PeerFailedError")
        assert "connecting 'mesh_tp' of ranks 2-3 (sim) over ib7 and lo" in message
        assert "no route to host" in message
        assert not left


def test_a_group_that_hangs_while_it_connects_is_named_within_the_bound() -> None:
    """A peer that cannot be reached holds its group: the ranks in it are told from the others."""
    fault = {"at": "connect", "action": "stall", "group": "mesh_tp", "rank": 2}
    outcomes = run_ranks(connect_badly, 4, args=(fault, {"init_timeout": 5}), timeout=150)
    for kind, message, left in outcomes:
        assert kind == "RendezvousTimeoutError"
        assert "Ranks 2-3 did not finish their own work" in message
        assert "connecting 'mesh_tp' of ranks 2-3 (sim) over lo" in message
        assert not left


def bind_to_nothing(rank: int, world_size: int) -> tuple[str, str]:
    if rank == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    try:
        reloadpg.init_distributed(init_timeout=60)
    except reloadpg.ReloadpgError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_an_interface_that_does_not_exist_is_named_on_all_ranks() -> None:
    """gloo's own failure, on real sockets."""
    zero, one = run_ranks(bind_to_nothing, 2, timeout=150)
    assert (zero[0], one[0]) == ("PeerFailedError", "ReloadpgError")
    for _, message in (zero, one):
        assert "rank 1 failed at creating the default group (gloo) over nosuch0" in message


# ---------------------------------------------------------------------------------------------
# bad input

BAD: dict[str, tuple[dict[str, str | None], dict[str, Any], str]] = {
    "rank": ({"RANK": "2"}, {}, "RANK='2'"),
    "empty": ({"RANK": ""}, {}, "RANK=''"),
    "partial": ({"MASTER_PORT": None}, {}, "missing MASTER_PORT"),
    "backend": ({}, {"backend": "glue"}, "'glue'"),
    "backend pairs": ({}, {"backend": "cpu:gloo,cuda"}, "neither one name nor"),
    "timeout": ({}, {"timeout": 0}, "timeout=0"),
    "timeout sign": ({}, {"timeout": timedelta(seconds=-1)}, "timeout="),
    "init_timeout": ({}, {"init_timeout": float("nan")}, "init_timeout=nan"),
    "device": ({}, {"device": "toaster"}, "'toaster'"),
    "device count": ({}, {"device": "cuda"}, "cuda"),
    "device_id": ({}, {"device": "cpu", "device_id": 0}, "device_id"),
    "mesh": ({}, {"mesh_dims": {"tp": 3}}, "world_size=2"),
    "mesh name": ({}, {"mesh_dims": {"dp": 2}}, "'dp'"),
    "mesh tuple": ({}, {"mesh_dims": ("tp",)}, "mesh_dims=('tp',) is not a mapping"),
    "mesh list": ({}, {"mesh_dims": [2]}, "mesh_dims=[2] is not a mapping"),
    "address with port": ({"MASTER_ADDR": "h:29500"}, {}, "MASTER_ADDR='h:29500'"),
    "seed": ({}, {"seed": -1}, "seed=-1"),
    "store": ({}, {"store": "tcp://n0"}, "store='tcp://n0' is not a store"),
    "connect": ({}, {"connect": "now"}, "init_distributed(connect='now')"),
    "network": ({}, {"network": "ib0"}, "network='ib0'"),
    "network values": ({}, {"network": {"NCCL_DEBUG": 1}}, "network={'NCCL_DEBUG': 1}"),
}


def refuse(rank: int, world_size: int) -> dict[str, tuple[str, bool, list[str]]]:
    """By case: the message, whether all variables are as before, and sockets that were opened."""

    def sockets() -> list[str]:
        found = []
        for number in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue
            found += [target] if target.startswith("socket:") else []
        return sorted(found)

    import reloadpg.environment.store as stores

    def opened(*args: object, **kwargs: object) -> None:
        raise AssertionError("a store was opened")

    stores.TCPStore = opened  # type: ignore[assignment, misc]
    refused = {}
    for name, (env, options, _) in BAD.items():
        with variables({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **env}):
            environ, before = dict(os.environ), sockets()
            with pytest.raises(ValueError, match="") as caught:
                reloadpg.init_distributed(**options)
            assert isinstance(caught.value, reloadpg.ReloadpgError)
            new = sorted(set(sockets()) - set(before))
            refused[name] = str(caught.value), dict(os.environ) == environ, new
    return refused


def test_bad_input_is_a_value_error_before_a_socket_is_opened_or_a_variable_written() -> None:
    """Everything is validated first: the process has the same sockets and variables as before."""
    [refused] = run_ranks(refuse, 1, timeout=LIMIT)
    for name, (_, _, text) in BAD.items():
        message, same, sockets = refused[name]
        assert text in message, name
        assert (same, sockets) == (True, []), name


# ---------------------------------------------------------------------------------------------
# the evaluator


def ensure(rank: int, world_size: int) -> tuple[Any, ...]:
    records = Records()
    made = reloadpg.ensure_process_group()
    again = reloadpg.ensure_process_group()
    backend = dist.get_backend() if dist.is_initialized() else ""
    timeout = default_timeout() if dist.is_initialized() else None
    levels = [record.levelname for record in records.but_waits()]
    reloadpg.destroy_distributed()
    reloadpg.destroy_distributed()
    logging.getLogger("reloadpg").removeHandler(records)
    return made, again, backend, timeout, levels, records.texts(), dist.is_initialized()


def test_an_evaluator_under_a_launcher_gets_gloo_once_and_one_log_line() -> None:
    """WORLD_SIZE > 1 with addresses: gloo, 60000 s, one INFO line; a second call does nothing."""
    for outcome in run_ranks(ensure, 2, env={"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}):
        made, again, backend, timeout, levels, _, left = outcome
        assert (made, again, backend, left) == (True, False, "gloo", False)
        assert timeout == timedelta(seconds=60000)
        assert levels == ["INFO"]


NO_GROUP: dict[str, dict[str, str | None]] = {
    "a world of 1": {"WORLD_SIZE": "1"},
    "no world": {"WORLD_SIZE": None},
    "MASTER_PORT": {"WORLD_SIZE": "2", "MASTER_PORT": None},
    "MASTER_ADDR": {"WORLD_SIZE": "2", "MASTER_ADDR": None},
}


def test_an_evaluator_alone_or_without_addresses_gets_nothing() -> None:
    """A world of 1 is silent; missing addresses are one warning that names them."""
    [results] = run_ranks(in_each, 1, args=(NO_GROUP, ensure), timeout=LIMIT)
    for name, (made, again, backend, _, levels, texts, left) in results.items():
        assert (made, again, backend, left) == (False, False, "", False)
        assert levels == (["WARNING"] * 2 if name.startswith("MASTER") else [])
        assert all(name in text for text in texts)


def work_alone(rank: int, world_size: int) -> tuple[Any, ...]:
    made = reloadpg.ensure_process_group()
    shard = environment.get_rank()
    reloadpg.destroy_distributed()
    return made, shard


SHARDS: dict[str, tuple[dict[str, str | None], int]] = {
    "RANK=1 WORLD_SIZE=2": ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
    "RANK=1": ({"RANK": "1"}, 1),
    "LOCAL_RANK=0": ({"LOCAL_RANK": "0"}, 0),
    "WORLD_SIZE=1": ({"WORLD_SIZE": "1"}, 0),
    "nothing": ({}, 0),
}


def test_an_evaluator_without_a_group_still_knows_its_shard() -> None:
    """The example of ``reloadpg.environment`` where no group is made."""
    environments = {name: {**NOTHING, **NO_ADDRESS, **env} for name, (env, _) in SHARDS.items()}
    [results] = run_ranks(in_each, 1, args=(environments, work_alone), timeout=LIMIT)
    assert results == {name: (False, shard) for name, (_, shard) in SHARDS.items()}


def ensure_without_torch_distributed(rank: int, world_size: int) -> tuple[bool, int]:
    records = Records()
    dist.is_available = lambda: False  # a build of torch for one process
    return reloadpg.ensure_process_group(), len(records.found)


def ensure_within(rank: int, world_size: int) -> tuple[bool, int]:
    dist.init_process_group("gloo")
    records = Records()
    return reloadpg.ensure_process_group(), len(records.found)


@pytest.mark.parametrize("function", [ensure_without_torch_distributed, ensure_within])
def test_an_evaluator_that_needs_no_group_makes_none_and_logs_nothing(function: Any) -> None:
    """On a torch without torch.distributed, and where there is a default group already."""
    assert run_ranks(function, 2) == [(False, 0)] * 2


def ensure_unknown(rank: int, world_size: int) -> str:
    with pytest.raises(DistributedEnvironmentError) as caught:
        reloadpg.ensure_process_group()
    return str(caught.value)


def test_an_evaluator_of_several_ranks_must_be_told_which_it_is() -> None:
    """WORLD_SIZE=2 alone: two processes that both took shard 0 would give half a result twice."""
    env = {**NOTHING, **NO_ADDRESS, "WORLD_SIZE": "2"}
    [message] = run_ranks(ensure_unknown, 1, env=env)
    assert "missing RANK" in message


def test_no_thread_is_in_torchs_store_while_there_is_none() -> None:
    """The exit of the interpreter would end in SIGABRT there; torch would also say its part."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        code = "import reloadpg; reloadpg.init_distributed(device='cpu', init_timeout=2)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **place, **ranks},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 1, done.stderr
    assert "RendezvousTimeoutError" in done.stderr.splitlines()[-1]
    assert "socket.cpp" not in done.stderr
