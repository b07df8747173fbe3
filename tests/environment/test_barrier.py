"""The bounded barrier, and what rank 0 does first or alone: on the store, never on a collective."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from watched_store import WatchedStore

import reloadpg
from reloadpg import environment
from reloadpg.environment import GroupNotInitializedError
from reloadpg.testing import run_ranks, simulated


def bring_up(backend: str) -> None:
    if backend == "sim":
        simulated.register()
    dist.init_process_group(backend)


def untouched() -> bool:
    """Whether the simulated accelerator has not been called: no operation, no communicator."""
    stats = simulated.stats()
    return (stats.connected, stats.collectives, stats.held_bytes) == (0, 0, 0)


def meet(rank: int, world_size: int, backend: str) -> tuple[bool, bool]:
    bring_up(backend)
    for turn in range(3):
        reloadpg.barrier(60, f"turn {turn}")
    before = untouched()
    dist.all_reduce(torch.ones(1))
    return before, untouched()


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_ranks_meet_repeatedly_without_any_collective(backend: str) -> None:
    """Three barriers leave the accelerator without a communicator; its own first call makes one."""
    assert run_ranks(meet, 3, args=(backend,)) == [(True, backend != "sim")] * 3


def miss(
    rank: int, world_size: int, backend: str, group_ranks: list[int] | None, bounds: list[float]
) -> tuple[Any, ...]:
    if backend == "sim":
        simulated.register()
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(*server, is_master=False)
    met = threading.Event()

    def answered(method: str, key: str) -> None:
        if met.is_set() and method == "set" and "/here/" in key:
            shared.set(f"rank {rank} is counted", "1")

    store = WatchedStore(shared, answered=answered)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    group = dist.new_group(group_ranks) if group_ranks else None
    reloadpg.barrier(60, "connected", group)
    met.set()
    if rank == 2:
        # Comes when the others have given up: they say so in the store that all share.
        shared.wait(["gave up"], timedelta(seconds=150))
    elif rank == 0 and group is None:
        shared.wait(["rank 1 is counted"], timedelta(seconds=150))
    try:
        reloadpg.barrier(timedelta(seconds=bounds[rank]), "before the checkpoint", group)
    except TimeoutError as error:
        assert isinstance(error, reloadpg.RendezvousTimeoutError)
        shared.set("gave up", "1")
        reloadpg.barrier(60, "all are here now", group)
        assert untouched()
        return str(error), error.missing
    return "", ()


@pytest.mark.parametrize(
    ("backend", "group_ranks"),
    [
        ("gloo", None),
        ("sim", [1, 2]),
        pytest.param("gloo", [1, 2], marks=pytest.mark.slow),
        pytest.param("sim", None, marks=pytest.mark.slow),
    ],
)
def test_a_missing_rank_is_named_with_reason_and_seconds_on_all_ranks_also_the_late_one(
    backend: str, group_ranks: list[int] | None
) -> None:
    """Ranks are those of the job, in a subgroup too; afterwards the ranks can meet again."""
    bounds = [1.0, 1.0 if group_ranks else 60.0, 60.0]
    outcomes = run_ranks(miss, 3, args=(backend, group_ranks, bounds), timeout=150)
    for rank, (message, missing) in enumerate(outcomes):
        if group_ranks and rank not in group_ranks:
            assert message == ""
            continue
        assert missing == (2,)
        assert "'before the checkpoint'" in message
        assert f" {bounds[rank]:g} s" in message
        assert "missing: rank 2." in message
        assert ("This rank arrived too late" in message) == (rank == 2)


def bad_calls(rank: int, world_size: int) -> list[str]:
    found: list[str] = []
    for group in ("foo", 0, [0, 1]):
        with pytest.raises(reloadpg.InvalidOptionError, match=r"barrier\(group="):
            reloadpg.barrier(1, "x", group=group)  # type: ignore[arg-type]
    for timeout in (0, -1, float("inf"), float("nan"), "5", True, timedelta(0)):
        with pytest.raises(reloadpg.InvalidOptionError) as caught:
            reloadpg.barrier(timeout, "x")  # type: ignore[arg-type]
        assert isinstance(caught.value, ValueError)
    with pytest.raises(GroupNotInitializedError, match="init_distributed") as no_group:
        reloadpg.barrier(5, "x")
    found.append(str(no_group.value))
    with pytest.raises(GroupNotInitializedError), environment.rank_zero_first(5):
        found.append("ran")
    return found


def test_a_barrier_without_group_or_with_a_bad_bound_says_so_at_once() -> None:
    """Two ranks by the launcher and no group: an error, not a barrier of one."""
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert len(run_ranks(bad_calls, 1, env=env)[0]) == 1


def alone(rank: int, world_size: int) -> str:
    reloadpg.barrier(1, "alone")
    with environment.rank_zero_first(1):
        return "ran"


@pytest.mark.parametrize("world_size", ["1", None])
def test_a_process_alone_passes(world_size: str | None) -> None:
    """A world of 1 needs no group to meet itself."""
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    env = {} if world_size else dict.fromkeys((*names, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    assert run_ranks(alone, 1, env=env) == ["ran"]


def interrupted(rank: int, world_size: int) -> bool:
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["interrupted"], timedelta(seconds=150))
        return False

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        reloadpg.barrier(300, "long")
    except KeyboardInterrupt:
        return True
    finally:
        store.set("interrupted", "1")
    return False


def test_a_signal_is_handled_while_waiting() -> None:
    """Ctrl-C ends a barrier at once; torch's own store wait holds it until the time-out."""
    assert run_ranks(interrupted, 2, timeout=150) == [True, False]


# ---------------------------------------------------------------------------------------------
# rank 0 first, and alone


def first(rank: int, world_size: int, path: str) -> list[str]:
    dist.init_process_group("gloo")
    with environment.rank_zero_first(60):
        found = sorted(os.listdir(path))
        if rank == 0:
            for number in range(3):
                with open(os.path.join(path, f"{number}"), "w") as file:
                    file.write("data")
    return found


def test_rank_0_runs_the_body_first_and_the_others_see_what_it_did(tmp_path: Any) -> None:
    """The others begin when rank 0 has ended its body."""
    outcomes = run_ranks(first, 3, args=(str(tmp_path),))
    assert outcomes == [[], ["0", "1", "2"], ["0", "1", "2"]]


def first_fails(rank: int, world_size: int) -> str:
    dist.init_process_group("gloo")
    try:
        with environment.rank_zero_first(300):
            if rank == 0:
                raise FileNotFoundError("no data")
            return "ran"
    except (FileNotFoundError, reloadpg.PeerFailedError) as error:
        return f"{type(error).__name__}: {error}"


def test_if_rank_0_fails_the_others_hear_why_and_do_not_run_the_body() -> None:
    """No rank waits for the time-out."""
    zero, one = run_ranks(first_fails, 2, timeout=150)
    assert zero == "FileNotFoundError: no data"
    assert one.startswith("PeerFailedError")
    assert "no data" in one


@environment.rank_zero_only
def only_zero(value: int) -> int:
    return value + 1


def ranks_seen(rank: int, world_size: int) -> tuple[Any, ...]:
    before = (environment.get_rank(), environment.is_rank_zero(), only_zero(1))
    os.environ["RANK"] = "0"  # stale: from here on the group knows better
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.environ["RENDEZVOUS"], 2), rank=1 - rank, world_size=2
    )
    return before, (environment.get_rank(), environment.is_rank_zero(), only_zero(1))


def test_the_rank_is_the_launchers_before_the_group_and_the_groups_afterwards(
    tmp_path: Any,
) -> None:
    """Looked up at each call, also by ``rank_zero_only``, which was decorated before either."""
    outcomes = run_ranks(ranks_seen, 2, env={"RENDEZVOUS": str(tmp_path / "store")})
    assert outcomes == [
        ((0, True, 2), (1, False, None)),
        ((1, False, None), (0, True, 2)),
    ]


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1",
          "SLURM_LOCALID": "1", "SLURM_JOB_ID": "3", "SLURM_STEP_NODELIST": "n1",
          "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}, 1),
        ({"SLURM_JOB_ID": "3", "SLURM_NTASKS": "8"}, 0),
    ],
    ids=["step", "shell"],
)  # fmt: skip
def test_the_rank_under_srun_is_right_before_there_is_a_group(
    env: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where RANK is not set, not every process is rank 0."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert environment.get_rank() == rank
    assert environment.is_rank_zero() == (rank == 0)
    assert only_zero(1) == (2 if rank == 0 else None)
