"""The stand-ins for CUDA and NCCL against plain torch: its own ProcessGroupNCCL runs over them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_job import ENGINES, NEW_ENGINE, engine_variables

from reloadpg.testing import run_ranks, standins

CUDA_BUILD = torch.version.cuda is not None
pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(not CUDA_BUILD, reason=f"torch {torch.__version__} is built without CUDA"),
]
MIB = 1 << 20
LIMIT = timedelta(minutes=5)
LEGACY = {"TORCH_DIST_USE_NCCL2": "0"}
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def on_ranks(size: int, env: dict[str, str]) -> Any:
    return pytest.mark.ranks(size, standins=True, timeout=240, env=env)


def on_engines(size: int, **env: str) -> Any:
    """Run the body on ranks, once with each of torch's implementations of the backend."""
    params = [
        pytest.param(one, marks=on_ranks(size, {**engine_variables(one), **env})) for one in ENGINES
    ]
    return pytest.mark.parametrize("engine", params)


def connects_at_creation(engine: str) -> bool:
    return NEW_ENGINE and engine == "default"


def ranks(fn: Callable[..., Any], size: int, *args: Any, env: dict[str, str]) -> list[Any]:
    """The outcomes of ranks of which some end early."""
    settings: Any = {"standins": True, "timeout": 240.0, "env": env, "check": False}
    return run_ranks(fn, size, args=args, **settings)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables that choose torch's implementation of the backend."""
    return engine_variables(request.param)


def start(rank: int, *, bound: bool = False, timeout: timedelta = LIMIT) -> None:
    torch.cuda.set_device(rank)
    device = {"device_id": torch.device("cuda", rank)} if bound else {}
    dist.init_process_group("nccl", timeout=timeout, **device)


def signals() -> dist.Store:
    """A store of the test's own, for events between ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    return dist.PrefixStore("test", store)


def on_device(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).cuda()


def backend(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cuda"))


def used_mib(device: int = 0) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) // MIB


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it holds before a minute has passed."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---------------------------------------------------------------------------------------------
# collectives


LACKING = (
    *("all_reduce[B", "all_gather_coalesced", "fc.permute_tensor"),
    *("gather_into_tensor", "gather_single", "_coalescing_manager"),
)
"""Operations that NCCL lacks, by the start of their names; a coalescing on the CPU is one."""


def check_operations(rank: int, n: int, bound: bool) -> None:
    """Every row of the operation table, and what it has no row for."""
    import op_table

    torch.set_default_device(torch.device("cuda", rank))
    start(rank, bound=bound)
    lacking = set()
    for row, key, case in op_table.cases({"world": (None, range(n))}, rank, 1):
        if key[1] != row.ways[0] or row.name.startswith("monitored_barrier"):
            continue
        outcome = op_table.run_row(row, case)
        if outcome.error:
            lacking.add(row.name)
        else:
            assert outcome.value == outcome.expected, key
    assert {name for name in lacking if not name.startswith(LACKING)} == set()
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.uint8):
        x = on_device(rank + 1, 2, dtype=dtype)
        dist.all_reduce(x)
        assert x.tolist() == [n * (n + 1) / 2, 2 * n], dtype
    x = on_device(rank + 1)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    assert x.item() == n * (n + 1) / 4
    dist.destroy_process_group()


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound"])
@on_engines(3, TEST_WORLD="nccl")
def test_every_operation_gives_the_right_value(engine: str, bound: bool, rank: int) -> None:
    """As in the operation table; what NCCL lacks raises."""
    check_operations(rank, 3, bound)


@on_ranks(2, {**LEGACY, "TEST_WORLD": "nccl", "TORCH_NCCL_USE_COMM_NONBLOCKING": "1"})
def test_every_operation_gives_the_right_value_on_nonblocking_communicators(rank: int) -> None:
    check_operations(rank, 2, True)


@on_engines(3)
def test_sends_and_receives_pair_up(engine: str, rank: int, world_size: int) -> None:
    """Large ones, of different sizes, in a ring."""
    start(rank)
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    a, b = on_device(*range(100_000 + rank)), torch.empty(100_000 + before, device="cuda")
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, a, after), dist.P2POp(dist.irecv, b, before)]
    )
    for work in works:
        work.wait()
    assert b.cpu()[-1].item() == 100_000 + before - 1
    dist.destroy_process_group()


@on_engines(4)
def test_groups_split_from_a_bound_world_reduce_over_their_own_members(
    engine: str, rank: int
) -> None:
    start(rank, bound=True)
    halves = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    x, y = on_device(rank), on_device(rank)
    dist.all_reduce(x, group=halves)
    dist.all_reduce(y, group=dist.new_group([3, 2, 1, 0]))
    assert (x.item(), y.item()) == (2 * (rank % 2) + 2, 6)
    dist.destroy_process_group()


def different(rank: int, n: int) -> bool:
    start(rank)
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()
    dist.all_reduce(torch.empty(1 + rank, device="cuda"), async_op=True)
    assert eventually(lambda: "SUCCESS" not in str(backend().get_error()))
    signals().set(f"seen{rank}", "")
    signals().wait(["seen0", "seen1"])
    os._exit(0)  # torch's watchdog would end the process otherwise


def test_collectives_that_differ_are_reported() -> None:
    outcomes = ranks(different, 2, env={**LEGACY, **NO_WATCHDOG})
    assert "rank 0 calls AllReduce of 1 elements" in outcomes[0].output
    assert "rank 1 AllReduce of 2" in outcomes[0].output


# ---------------------------------------------------------------------------------------------
# streams, events, copies, kernels


@on_engines(2)
def test_a_collective_waits_on_its_stream_and_not_on_the_host(engine: str, rank: int) -> None:
    start(rank)
    store = signals()
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()
    if rank == 1:
        store.wait(["pending"])
    x = on_device(1)
    work = dist.all_reduce(x, async_op=True)
    before = torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream()
    assert rank == 1 or side.query()
    before.record(side)
    work.wait()  # the current stream waits, not the host
    after = torch.cuda.Event(enable_timing=True)
    after.record()
    if rank == 1:
        torch.cuda.synchronize()
        return
    assert before.query()
    assert not after.query()
    assert not torch.cuda.current_stream().query()
    # A copy from pageable memory behind the collective is of the values at the call.
    y, source = torch.empty(1, device="cuda"), torch.ones(1)
    y.copy_(source, non_blocking=True)
    source.fill_(7)
    side.wait_event(after)
    store.set("pending", "")
    side.synchronize()
    assert after.query()
    assert before.elapsed_time(after) >= 0
    assert (x.item(), y.item()) == (2, 1)


@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param(one, marks=on_ranks(1, {"RELOADPG_STANDIN_KERNELS": one}))
        for one in ("refuse", "skip")
    ],
)
def test_a_kernel_without_a_stand_in_is_refused_by_name_or_skipped_on_request(kernels: str) -> None:
    torch.cuda.set_device(0)
    x = torch.full((5,), 2.0, device="cuda")
    x += torch.ones(5, device="cuda")
    x += 1
    assert x.cpu().tolist() == [4.0] * 5
    assert torch.cuda.get_device_name() == "stand-in for CUDA (no GPU)"
    if kernels == "skip":
        torch.sigmoid(x)
    else:
        said = r"(?s)sigmoid.*not supported by the stand-in for CUDA|"
        said += r"not supported by the stand-in for CUDA.*sigmoid"
        with pytest.raises(RuntimeError, match=said):
            torch.sigmoid(x)


# ---------------------------------------------------------------------------------------------
# memory


def memory(rank: int, n: int) -> list[int]:
    torch.cuda.set_device(0)  # all ranks on one device
    store = signals()
    found = [used_mib()]
    store.add("a", 1)
    assert eventually(lambda: store.add("a", 0) == n)
    x = torch.empty((10 + 2 * rank) * MIB, dtype=torch.uint8, device="cuda")
    store.add("b", 1)
    assert eventually(lambda: store.add("b", 0) == n)
    found.append(used_mib())
    store.add("c", 1)
    assert eventually(lambda: store.add("c", 0) == n)
    if rank == 1:
        os.kill(os.getpid(), 9)
    assert eventually(lambda: used_mib() == 10)
    del x
    torch.cuda.empty_cache()
    found.append(used_mib())
    try:
        torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(90 * MIB, dtype=torch.uint8, device="cuda").view(-1)
        two = [torch.empty(90 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
        found.append(len(two))
    except torch.OutOfMemoryError:
        found.append(-1)
    return found


def test_memory_is_counted_over_all_processes_and_that_of_a_killed_one_is_freed() -> None:
    first, second = ranks(memory, 2, env={"RELOADPG_STANDIN_DEVICE_MIB": "100"})
    assert second.signal == 9
    assert first.result == [0, 22, 0, -1], first.exception


def without_cache(rank: int) -> int:
    """MiB in use on a device, without those that torch's allocator keeps."""
    return used_mib(rank) - torch.cuda.memory_reserved() // MIB


@on_engines(2, RELOADPG_STANDIN_COMM_MIB="100")
def test_a_communicator_holds_memory_from_its_creation_to_its_end(engine: str, rank: int) -> None:
    torch.cuda.set_device(rank)
    start(rank)
    assert used_mib(rank) == (100 if connects_at_creation(engine) else 0)
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()
    assert without_cache(rank) == 100
    dist.destroy_process_group()
    assert without_cache(rank) == 0


needs_suspend = pytest.mark.skipif(
    torch.__version__ < "2.12", reason=f"torch {torch.__version__} has no Backend.suspend"
)


@needs_suspend
@on_engines(2)
def test_a_suspended_communicator_releases_memory_until_it_is_resumed(
    engine: str, rank: int
) -> None:
    start(rank, bound=True)
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    assert without_cache(rank) == 64
    backend().suspend()
    assert without_cache(rank) == 4
    backend().resume()
    assert without_cache(rank) == 64
    dist.all_reduce(x)
    assert x.item() == 4
    dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------
# ends


@on_engines(2, **NO_WATCHDOG)
def test_an_abort_is_local_and_frees_the_stream(engine: str, rank: int) -> None:
    start(rank)
    store = signals()
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()
    if rank == 1:  # is absent, and its communicator is not affected by the abort of rank 0
        store.wait(["aborted"])
        work = dist.all_reduce(on_device(1), async_op=True)
        time.sleep(0.5)
        assert not work.is_completed()
        backend().abort()
        return
    work = dist.all_reduce(on_device(1), async_op=True)
    assert not work.is_completed()
    backend().abort()
    torch.cuda.synchronize()  # the operation has left the stream
    store.set("aborted", "")


@on_ranks(2, LEGACY)
def test_a_communicator_ends_only_after_the_graphs_that_hold_it(rank: int) -> None:
    start(rank, bound=True)
    x = on_device(1)
    group = dist.new_group([0, 1])
    dist.all_reduce(x, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(x, group=group)
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert x.item() == 8
    ended = threading.Event()

    def destroy() -> None:
        torch.cuda.set_device(rank)
        dist.destroy_process_group(group)
        ended.set()

    thread = threading.Thread(target=destroy)
    thread.start()
    assert not ended.wait(1)
    graph.reset()
    del graph
    assert ended.wait(60)
    thread.join()


@on_engines(2)
def test_nothing_is_left_after_many_communicators(engine: str, rank: int) -> None:
    """Neither threads nor descriptors, files or memory."""
    start(rank)
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        group = dist.new_group([0, 1])
        dist.all_reduce(on_device(1), group=group)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)

    cycle()
    eventually(lambda: "standin-stream" not in thread_names())
    first = count()
    for _ in range(30):
        cycle()
    eventually(lambda: "standin-stream" not in thread_names())
    assert count() == first
    job = standins.current_job()
    assert job is not None
    assert [path.name for path in job.folder.iterdir() if path.name.startswith("comm-")] == []
    assert without_cache(rank) == 64


def thread_names() -> set[str]:
    names = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            names.add((task / "comm").read_text().strip())
        except OSError:  # it has ended
            continue
    return names


# ---------------------------------------------------------------------------------------------
# faults


def failing(rank: int, n: int, call: str) -> str:
    torch.cuda.set_device(rank)
    fault = standins.Fault("fail", call, rank=0, times=1, result="system_error")
    injected = standins.inject(fault)
    store = signals()
    if rank == 1:  # in its place: it would wait for the member whose creation fails
        threading.Thread(target=start, args=(rank,), daemon=True).start()
        store.wait(["seen"])
        os._exit(0)
    try:
        dist.init_process_group("nccl", timeout=LIMIT)
        dist.all_reduce(on_device(1))
    except RuntimeError as error:
        return str(error)
    finally:
        injected.clear()
        store.set("seen", "")
    return "no error"


def test_an_injected_failure_is_an_error_of_torch(engine: dict[str, str]) -> None:
    message = ranks(failing, 2, "init", env=engine)[0].result
    assert "system error" in message


def faulty(rank: int, n: int, call: str) -> tuple[str, int]:
    start(rank, bound=True)
    store = signals()
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved() // MIB
    calls: dict[str, Callable[[], Any]] = {
        "split": lambda: dist.split_group(split_ranks=[[0, 1]]),
        "send": lambda: dist.send(x, 1 - rank),
        "recv": lambda: dist.recv(x, 1 - rank),
        "suspend": lambda: backend().suspend(),
        "resume": lambda: backend().resume(),
        "abort": lambda: backend().abort(),
        "finalize": lambda: backend().shutdown(),
        "destroy": lambda: backend().shutdown(),
    }
    if call == "resume":
        backend().suspend()
    if rank == 1:
        if call in ("send", "recv"):  # both create the communicator of the pair
            threading.Thread(target=calls[call], daemon=True).start()
        store.wait(["seen"])
        os._exit(0)
    message = ""
    with standins.inject(standins.Fault("fail", call, rank=0, times=1, result="system_error")):  # type: ignore[arg-type]
        try:
            calls[call]()
        except RuntimeError as error:
            message = str(error)
    found = message, used_mib(rank) - kept
    store.set("seen", "")
    return found


SHUTDOWN = ("finalize", "destroy")
PAIR = 64 if torch.__version__ >= "2.12" else 128  # 2.8 has created the pair's communicator
FAULTY = {
    "split": 64,
    "send": PAIR,
    "recv": PAIR,
    "suspend": 64,
    "resume": 4,
    "abort": 64,
    "finalize": 64,
    "destroy": 64,
}
"""MiB that the communicator of a call holds after the call has failed."""


@pytest.mark.parametrize("call", FAULTY)
def test_each_call_fails_as_injected(engine: dict[str, str], call: str) -> None:
    """Torch raises the error of that call, and the call has had no effect."""
    if call in ("suspend", "resume") and torch.__version__ < "2.12":
        pytest.skip(f"torch {torch.__version__} has no Backend.suspend")
    outcome = ranks(faulty, 2, call, env=engine)[0]
    message, mib = outcome.result
    # ProcessGroupNCCL2 (torch 2.15) drops the errors of a shutdown, and destroys after the first.
    silent = NEW_ENGINE and engine != LEGACY and call in SHUTDOWN
    assert message == "" if silent else "system error" in message
    assert mib == (0 if silent and call == "finalize" else FAULTY[call])


@on_engines(2)
def test_a_hang_ends_when_the_fault_is_cleared(engine: str, rank: int) -> None:
    start(rank)
    store = signals()
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        dist.all_reduce(x)
        torch.cuda.synchronize()
        store.wait(["end"])
        return
    returned = threading.Event()

    def call() -> None:
        torch.cuda.set_device(rank)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        returned.set()

    with standins.inject(standins.Fault("hang", "collective", rank=0)):
        thread = threading.Thread(target=call)
        thread.start()
        assert not returned.wait(1)
    assert returned.wait(60)
    assert x.item() == 4
    store.set("end", "")


@on_ranks(2, {})
def test_a_delay_applies_to_the_calls_that_it_names(rank: int) -> None:
    start(rank)
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    with standins.inject(standins.Fault("delay", "collective", skip=1, times=1, seconds=0.5)):
        for number in range(3):
            begun = time.monotonic()
            dist.all_reduce(x)
            assert number != 1 or time.monotonic() - begun >= 0.5
            torch.cuda.synchronize()
        dist.barrier()  # before the fault is cleared for the other rank, too


def asynchronous(rank: int, n: int) -> bool:
    start(rank)
    store = signals()
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0:
        with standins.inject(standins.Fault("async", "collective", rank=0)):
            dist.all_reduce(x, async_op=True)
        seen = eventually(lambda: "SUCCESS" not in str(backend().get_error()))
        store.set("seen", "")
        os._exit(0 if seen else 1)
    store.wait(["seen"])
    os._exit(0)


def test_an_asynchronous_error_reaches_torchs_watchdog() -> None:
    outcomes = ranks(asynchronous, 2, env={**LEGACY, **NO_WATCHDOG})
    assert [outcome.exitcode for outcome in outcomes] == [0, 0]


def fault_from_outside(rank: int, n: int) -> str:
    start(rank)
    try:
        dist.all_reduce(on_device(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_test_can_inject_into_the_job_of_its_ranks() -> None:
    with standins.job() as job, job.inject(standins.Fault("fail", "collective")):
        messages = run_ranks(fault_from_outside, 2, standins=job, timeout=240)
    assert all("remote process exited" in message for message in messages)


def peer_errors(rank: int, n: int) -> None:
    start(rank)
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.all_reduce(on_device(1), async_op=True)
    assert eventually(lambda: "SUCCESS" not in str(backend().get_error()))
    os._exit(0)


def test_the_end_of_a_peer_is_noticed_on_request() -> None:
    env = {**LEGACY, **NO_WATCHDOG, "RELOADPG_STANDIN_PEER_ERRORS": "1"}
    noticed = ranks(peer_errors, 2, env=env)
    assert (noticed[0].exitcode, noticed[1].signal) == (0, 9), noticed[0].exception


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(standins.StandinsError, match="did you mean RELOADPG_STANDIN_DEVICES"):
        run_ranks(no_job, 1, standins=True, env={"RELOADPG_STANDIN_DEVICE": "1"})
    with pytest.raises(standins.StandinsError, match="it is compute, refuse or skip"):
        run_ranks(no_job, 1, standins=True, env={"RELOADPG_STANDIN_KERNELS": "ignore"})


@on_ranks(2, LEGACY)  # the other engine takes the device of the rank's number
def test_two_members_on_one_device_are_refused_as_by_nccl() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=LIMIT)
    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        dist.all_reduce(on_device(1))


def no_job(rank: int, n: int) -> tuple[bool, str]:
    try:
        standins.inject(standins.Fault("fail", "init"))
    except standins.StandinsError as error:
        return torch.cuda.is_available(), str(error)
    return True, ""


def test_a_process_in_no_job_has_no_devices_and_no_faults() -> None:
    available, message = run_ranks(no_job, 1, standins=False, timeout=240)[0]
    assert not available
    assert "in no job" in message


def test_a_fault_with_unknown_words_is_refused() -> None:
    with pytest.raises(ValueError, match="call='colective' must be one of"):
        standins.Fault("fail", "colective")  # type: ignore[arg-type]
