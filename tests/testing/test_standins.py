"""The stand-ins for CUDA and NCCL against plain torch: its own ProcessGroupNCCL runs over them."""

from __future__ import annotations

import math
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

from reloadpg.testing import run_ranks, standins

CUDA_BUILD = torch.version.cuda is not None
pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(not CUDA_BUILD, reason=f"torch {torch.__version__} is built without CUDA"),
]
NEW_ENGINE = hasattr(dist.distributed_c10d, "ProcessGroupNCCL2")
ENGINES = ("legacy", "default") if NEW_ENGINE else ("default",)
MIB = 1 << 20
LIMIT = timedelta(minutes=5)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Variables that choose torch's implementation of the backend; 2.15 has two."""
    return {"TORCH_DIST_USE_NCCL2": "0" if request.param == "legacy" else None}


def ranks(fn: Callable[..., Any], size: int = 2, *args: Any, **settings: Any) -> list[Any]:
    return run_ranks(fn, size, args=args, standins=True, **{"timeout": 240.0, **settings})


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


def collectives(rank: int, n: int, bound: bool) -> list[str]:
    start(rank, bound=bound)
    wrong = []

    def check(name: str, found: torch.Tensor | list[torch.Tensor], expected: list[float]) -> None:
        one = found if isinstance(found, torch.Tensor) else torch.cat([x.cpu() for x in found])
        if one.cpu().tolist() != expected:
            wrong.append(f"{name}: {one.cpu().tolist()}, not {expected}")

    integers = (torch.int32, torch.int64, torch.uint8)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, *integers):
        x = on_device(rank + 1, 2, dtype=dtype)
        dist.all_reduce(x)
        check(f"all_reduce {dtype}", x, [n * (n + 1) / 2, 2 * n])
    operations = {
        dist.ReduceOp.MAX: n,
        dist.ReduceOp.MIN: 1,
        dist.ReduceOp.PRODUCT: math.factorial(n),
        dist.ReduceOp.AVG: (n + 1) / 2,
        dist._make_nccl_premul_sum(0.5): n * (n + 1) / 4,
    }
    for operation, expected in operations.items():
        x = on_device(rank + 1)
        dist.all_reduce(x, op=operation)
        check(f"all_reduce {operation}", x, [expected])
    x = on_device(rank)
    dist.broadcast(x, 1)
    check("broadcast", x, [1])
    x = on_device(rank + 1)
    dist.reduce(x, 0)
    check("reduce", x, [n * (n + 1) / 2 if rank == 0 else rank + 1])
    parts = [on_device(0) for _ in range(n)]
    dist.all_gather(parts, on_device(rank))
    check("all_gather", parts, [*range(n)])
    x = torch.empty(n, device="cuda")
    dist.all_gather_into_tensor(x, on_device(rank))
    check("all_gather_into_tensor", x, [*range(n)])
    x = torch.empty(1, device="cuda")
    dist.reduce_scatter_tensor(x, on_device(*range(n)))
    check("reduce_scatter_tensor", x, [n * rank])
    x = on_device(0)
    dist.reduce_scatter(x, [on_device(i) for i in range(n)])
    check("reduce_scatter", x, [n * rank])
    x = torch.empty(n, device="cuda")
    dist.all_to_all_single(x, on_device(*(10 * rank + i for i in range(n))))
    check("all_to_all_single", x, [10 * i + rank for i in range(n)])
    parts = [on_device(0) for _ in range(n)]
    dist.all_to_all(parts, [on_device(10 * rank + i) for i in range(n)])
    check("all_to_all", parts, [10 * i + rank for i in range(n)])
    parts = [on_device(0) for _ in range(n)]
    dist.gather(on_device(rank), parts if rank == 0 else None, 0)
    check("gather", parts, [*range(n)] if rank == 0 else [0] * n)
    x = on_device(0)
    dist.scatter(x, [on_device(i) for i in range(n)] if rank == 0 else None, 0)
    check("scatter", x, [rank])
    together = [on_device(rank + 1), on_device(2)]
    with dist._coalescing_manager(device=x.device, async_ops=True) as works:
        for each in together:
            dist.all_reduce(each)
    works.wait()
    check("coalesced", together, [n * (n + 1) / 2, 2 * n])
    dist.barrier()
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("bound", [False, True], ids=["unbound", "bound"])
def test_every_collective_has_the_right_value(engine: Any, bound: bool) -> None:
    assert ranks(collectives, 3, bound, env=engine) == [[], [], []]


def test_collectives_of_communicators_that_connect_without_blocking() -> None:
    env = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
    assert ranks(collectives, 2, True, env=env) == [[], []]


def transfers(rank: int, n: int) -> tuple[Any, ...]:
    start(rank)
    x = on_device(5 if rank == 0 else 0)
    if rank == 0:
        dist.send(x, 1)
    if rank == 1:
        dist.recv(x, 0)
    a, b = on_device(*range(100_000 + rank)), torch.empty(100_000 + (rank - 1) % n, device="cuda")
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, a, (rank + 1) % n), dist.P2POp(dist.irecv, b, (rank - 1) % n)]
    )
    for work in works:
        work.wait()
    last = b.cpu()[-1].item()
    dist.destroy_process_group()
    return x.item(), last


def test_sends_and_receives_pair_up(engine: Any) -> None:
    assert ranks(transfers, 3, env=engine) == [(5, 100001), (5, 99999), (0, 100000)]


def splits(rank: int, n: int) -> list[float]:
    start(rank, bound=True)
    halves = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    x = on_device(rank)
    dist.all_reduce(x, group=halves)
    whole = dist.new_group([3, 2, 1, 0])
    y = on_device(rank)
    dist.all_reduce(y, group=whole)
    dist.destroy_process_group()
    return [x.item(), y.item()]


def test_split_groups_of_a_bound_world_reduce_their_own_members(engine: Any) -> None:
    assert ranks(splits, 4, env=engine) == [[2, 6], [4, 6], [2, 6], [4, 6]]


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
    env = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    outcomes = ranks(different, check=False, env=env)
    assert "rank 0 calls AllReduce of 1 elements" in outcomes[0].output
    assert "rank 1 AllReduce of 2" in outcomes[0].output


# ---------------------------------------------------------------------------------------------
# streams, events, copies, kernels


def streams(rank: int, n: int) -> tuple[bool, ...]:
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
    side_before = side.query()
    before.record(side)
    work.wait()  # the current stream waits, not the host
    after = torch.cuda.Event(enable_timing=True)
    after.record()
    if rank == 1:
        torch.cuda.synchronize()
        return ()
    found = (side_before, before.query(), after.query(), torch.cuda.current_stream().query())
    # A copy from pageable memory behind the collective is of the values at the call.
    y, source = torch.empty(1, device="cuda"), torch.ones(1)
    y.copy_(source, non_blocking=True)
    source.fill_(7)
    side.wait_event(after)
    store.set("pending", "")
    side.synchronize()
    late = (after.query(), before.elapsed_time(after) >= 0, x.item() == 2, y.item() == 1)
    return (*found, *late)


def test_a_collective_waits_on_its_stream_and_not_on_the_host(engine: Any) -> None:
    first, _ = ranks(streams, env=engine)
    assert first == (True, True, False, False, True, True, True, True)


def kernels(rank: int, n: int) -> list[Any]:
    torch.cuda.set_device(0)
    x = torch.full((5,), 2.0, device="cuda")
    x += torch.ones(5, device="cuda")
    x += 1
    found: list[Any] = [x.cpu().tolist(), torch.cuda.get_device_name()]
    try:
        torch.sigmoid(x)
    except RuntimeError as error:
        found.append(str(error).splitlines()[0])
    return found


def test_a_kernel_that_it_does_not_have_is_refused_by_name() -> None:
    values, name, error = ranks(kernels, 1, env={"RELOADPG_STANDIN_KERNELS": "refuse"})[0]
    assert values == [4.0] * 5
    assert name == "stand-in for CUDA (no GPU)"
    assert "not supported by the stand-in for CUDA" in error
    assert "sigmoid" in error


def test_a_kernel_that_it_does_not_have_is_skipped_on_request() -> None:
    skipped = ranks(kernels, 1, env={"RELOADPG_STANDIN_KERNELS": "skip"})[0]
    assert len(skipped) == 2


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


def test_memory_is_counted_over_all_processes_and_given_back_by_a_killed_one() -> None:
    first, second = ranks(memory, check=False, env={"RELOADPG_STANDIN_DEVICE_MIB": "100"})
    assert second.signal == 9
    assert first.result == [0, 22, 0, -1], first.exception


def communicator_memory(rank: int, n: int) -> list[int]:
    torch.cuda.set_device(rank)
    start(rank)
    found = [used_mib(rank)]
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    found.append(used_mib(rank) - torch.cuda.memory_reserved() // MIB)
    dist.destroy_process_group()
    found.append(used_mib(rank) - torch.cuda.memory_reserved() // MIB)
    return found


def test_a_communicator_holds_memory_from_its_creation_to_its_end(engine: Any) -> None:
    env = {**engine, "RELOADPG_STANDIN_COMM_MIB": "100"}
    eager = NEW_ENGINE and engine["TORCH_DIST_USE_NCCL2"] is None  # it connects when it is created
    assert ranks(communicator_memory, env=env) == [[100 if eager else 0, 100, 0]] * 2


def suspends(rank: int, n: int) -> list[Any]:
    start(rank, bound=True)
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_reserved() // MIB
    found: list[Any] = [used_mib(rank) - kept]
    backend().suspend()
    found.append(used_mib(rank) - kept)
    backend().resume()
    found.append(used_mib(rank) - kept)
    dist.all_reduce(x)
    found.append(x.item())
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not hasattr(dist.Backend, "suspend") and not CUDA_BUILD, reason="no CUDA")
def test_a_suspended_communicator_gives_memory_back_until_it_is_resumed(engine: Any) -> None:
    if torch.__version__ < "2.12":
        pytest.skip(f"torch {torch.__version__} has no Backend.suspend")
    assert ranks(suspends, env=engine) == [[64, 4, 64, 4.0]] * 2


# ---------------------------------------------------------------------------------------------
# ends


def aborts(rank: int, n: int) -> tuple[bool, bool]:
    start(rank)
    store = signals()
    dist.all_reduce(on_device(1))
    torch.cuda.synchronize()
    if rank == 1:  # is absent, and its communicator is not affected by the abort of rank 0
        store.wait(["aborted"])
        work = dist.all_reduce(on_device(1), async_op=True)
        time.sleep(0.5)
        done = work.is_completed()
        backend().abort()
        return done, True
    work = dist.all_reduce(on_device(1), async_op=True)
    before = work.is_completed()
    backend().abort()
    torch.cuda.synchronize()  # the operation has left the stream
    store.set("aborted", "")
    return before, True


def test_an_abort_is_local_and_frees_the_stream(engine: Any) -> None:
    env = {**engine, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert ranks(aborts, env=env) == [(False, True)] * 2


def captures(rank: int, n: int) -> list[Any]:
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
    found: list[Any] = [x.item()]
    ended = threading.Event()

    def destroy() -> None:
        torch.cuda.set_device(rank)
        dist.destroy_process_group(group)
        ended.set()

    thread = threading.Thread(target=destroy)
    thread.start()
    found.append(ended.wait(1))
    graph.reset()
    del graph
    found.append(ended.wait(60))
    thread.join()
    return found


def test_a_communicator_ends_only_after_the_graphs_that_hold_it() -> None:
    legacy = {"TORCH_DIST_USE_NCCL2": "0"}
    assert ranks(captures, env=legacy) == [[8.0, False, True]] * 2


def cycles(rank: int, n: int) -> list[tuple[int, int]]:
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
    last = count()
    folder = standins.current_job()
    assert folder is not None
    left = [path.name for path in folder.folder.iterdir() if path.name.startswith("comm-")]
    assert left == []
    assert used_mib(rank) - torch.cuda.memory_reserved() // MIB == 64
    return [first, last]


def thread_names() -> set[str]:
    names = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            names.add((task / "comm").read_text().strip())
        except OSError:  # it has ended
            continue
    return names


def test_nothing_is_left_after_many_communicators(engine: Any) -> None:
    for first, last in ranks(cycles, env=engine):
        assert last == first


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


def test_an_injected_failure_is_torchs_error(engine: Any) -> None:
    message = ranks(failing, 2, "init", env=engine, check=False)[0].result
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
def test_each_call_fails_as_injected(engine: Any, call: str) -> None:
    """Torch raises the error of that call, and the call has had no effect."""
    if call in ("suspend", "resume") and torch.__version__ < "2.12":
        pytest.skip(f"torch {torch.__version__} has no Backend.suspend")
    outcome = ranks(faulty, 2, call, env=engine, check=False)[0]
    message, mib = outcome.result
    # ProcessGroupNCCL2 (torch 2.15) drops the errors of a shutdown, and destroys after the first.
    silent = NEW_ENGINE and engine["TORCH_DIST_USE_NCCL2"] is None and call in SHUTDOWN
    assert message == "" if silent else "system error" in message
    assert mib == (0 if silent and call == "finalize" else FAULTY[call])


def hanging(rank: int, n: int) -> list[Any]:
    start(rank)
    store = signals()
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 1:
        dist.all_reduce(x)
        torch.cuda.synchronize()
        store.wait(["end"])
        return []
    returned = threading.Event()

    def call() -> None:
        torch.cuda.set_device(rank)
        dist.all_reduce(x)
        torch.cuda.synchronize()
        returned.set()

    with standins.inject(standins.Fault("hang", "collective", rank=0)):
        thread = threading.Thread(target=call)
        thread.start()
        held = not returned.wait(1)
    found = [held, returned.wait(60), x.item()]
    store.set("end", "")
    return found


def test_a_hang_ends_when_the_fault_is_cleared(engine: Any) -> None:
    assert ranks(hanging, env=engine)[0] == [True, True, 4.0]


def delayed(rank: int, n: int) -> list[float]:
    start(rank)
    x = on_device(1)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    with standins.inject(standins.Fault("delay", "collective", skip=1, times=1, seconds=0.5)):
        times = []
        for _ in range(3):
            begun = time.monotonic()
            dist.all_reduce(x)
            times.append(time.monotonic() - begun)
            torch.cuda.synchronize()
        dist.barrier()  # before the fault is cleared for the other rank, too
    return times


def test_a_delay_concerns_the_calls_that_it_names() -> None:
    for _, second, _ in ranks(delayed):
        assert second >= 0.5


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
    env = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert [x.exitcode for x in ranks(asynchronous, check=False, env=env)] == [0, 0]


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
    env = {"TORCH_DIST_USE_NCCL2": "0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    env["RELOADPG_STANDIN_PEER_ERRORS"] = "1"
    noticed = ranks(peer_errors, check=False, env=env)
    assert (noticed[0].exitcode, noticed[1].signal) == (0, 9), noticed[0].exception


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(standins.StandinsError, match="did you mean RELOADPG_STANDIN_DEVICES"):
        run_ranks(no_job, 1, standins=True, env={"RELOADPG_STANDIN_DEVICE": "1"})
    with pytest.raises(standins.StandinsError, match="it is compute, refuse or skip"):
        run_ranks(no_job, 1, standins=True, env={"RELOADPG_STANDIN_KERNELS": "ignore"})


def same_device(rank: int, n: int) -> str:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=LIMIT)
    try:
        dist.all_reduce(on_device(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_two_members_on_one_device_are_refused_as_by_nccl() -> None:
    legacy = {"TORCH_DIST_USE_NCCL2": "0"}  # the other engine takes the device of the rank's number
    for message in ranks(same_device, env=legacy):
        assert "Duplicate GPU detected" in message


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
