"""Torch's own ProcessGroupNCCL over the stand-ins for CUDA and NCCL, without the library."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import eventually
from helpers.nccl_job import (
    ENGINES,
    LIMIT,
    MIB,
    Meetings,
    engine_variables,
    on_engines,
    on_ranks,
    signals,
    used,
)

from reloadpg.testing import run_ranks
from reloadpg.testing.faults import Fault, inject

CUDA_BUILD = torch.version.cuda is not None
pytestmark = [
    pytest.mark.standins,
    pytest.mark.skipif(not CUDA_BUILD, reason=f"torch {torch.__version__} is built without CUDA"),
]
LEGACY = engine_variables("legacy")


def ranks(fn: Callable[..., Any], size: int, *args: Any, env: dict[str, str]) -> list[Any]:
    """The outcomes of ranks of which some end early."""
    settings: Any = {"standins": True, "timeout": 240.0, "env": env, "check": False}
    return run_ranks(fn, size, args=args, **settings)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables that choose torch's implementation of the backend."""
    return engine_variables(request.param)


def start(rank: int, *, bound: bool = False) -> None:
    torch.cuda.set_device(rank)
    device = {"device_id": torch.device("cuda", rank)} if bound else {}
    dist.init_process_group("nccl", timeout=LIMIT, **device)


def on_device(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).cuda()


def backend(group: Any = None) -> Any:
    return (group or dist.group.WORLD)._get_backend(torch.device("cuda"))


# ---------------------------------------------------------------------------------------------
# collectives


LACKING = (
    *("all_reduce[B", "all_gather_coalesced", "fc.permute_tensor"),
    *("gather_into_tensor", "gather_single", "_coalescing_manager"),
)
"""Operations that NCCL lacks, by the start of their names; a coalescing on the CPU is one."""


def check_operations(rank: int, n: int, bound: bool) -> None:
    """Every row of the operation table has the values of gloo; and what it has no row for."""
    from helpers import op_table

    torch.set_default_device(torch.device("cuda", rank))
    start(rank, bound=bound)
    gloo: Any = dist.new_group(backend="gloo")
    lacking, compared = set(), 0
    for row, key, case in op_table.cases({"world": (None, range(n))}, rank, 1):
        if key[1] != row.ways[0] or row.name.startswith("monitored_barrier"):
            continue
        outcome = op_table.run_row(row, case)
        if outcome.error:
            lacking.add(row.name)
            continue
        with torch.device("cpu"):
            expected = op_table.run_row(row, replace(case, group=gloo, notes=[]))
        compared += not expected.error
        assert expected.error or outcome.value == expected.value, key
    assert compared > 70
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


@on_ranks(2, **LEGACY, TEST_WORLD="nccl", TORCH_NCCL_USE_COMM_NONBLOCKING="1")
def test_every_operation_gives_the_right_value_on_nonblocking_communicators(rank: int) -> None:
    check_operations(rank, 2, True)


# ---------------------------------------------------------------------------------------------
# streams, events, copies, kernels


@on_engines(2)
def test_a_collective_blocks_its_stream_and_not_the_host(engine: str, rank: int) -> None:
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


@on_ranks(1)
def test_a_kernel_that_is_no_operator_raises() -> None:
    torch.cuda.set_device(0)
    assert torch.cuda.get_device_name() == "stand-in for CUDA (no GPU)"
    with pytest.raises(RuntimeError, match="not supported by the stand-in for CUDA"):
        torch.cuda._sleep(1)


# ---------------------------------------------------------------------------------------------
# memory


def memory(rank: int, n: int) -> list[int]:
    torch.cuda.set_device(0)  # all ranks on one device
    meetings, found = Meetings(n), [used()]
    meetings.meet()
    x = torch.empty((10 + 2 * rank) * MIB, dtype=torch.uint8, device="cuda")
    meetings.meet()
    found.append(used())
    meetings.meet()
    if rank == 1:
        os.kill(os.getpid(), 9)
    assert eventually(lambda: used() == 10)
    del x
    torch.cuda.empty_cache()
    found.append(used())
    kept = torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty_like(kept)
    return found


def test_memory_is_counted_over_all_processes_of_a_device() -> None:
    first, second = ranks(memory, 2, env={"RELOADPG_STANDIN_DEVICE_MIB": "100"})
    assert second.signal == 9
    assert first.result == [0, 22, 0], first.exception


# ---------------------------------------------------------------------------------------------
# faults


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
        "recv": lambda: dist.recv(x, 1 - rank),
        "abort": lambda: backend().abort(),
        "finalize": lambda: backend().shutdown(),
        "destroy": lambda: backend().shutdown(),
    }
    if rank == 1:
        # It creates the pair's communicator, or meets a destroy that follows a failed finalize.
        if call in ("recv", "finalize"):
            threading.Thread(target=calls[call], daemon=True).start()
        store.wait(["seen"])
        os._exit(0)
    message = ""
    with inject(Fault("nccl", operation=call, rank=0)):
        try:
            calls[call]()
        except RuntimeError as error:
            message = str(error)
    found = message, used() - kept
    store.set("seen", "")
    return found


SHUTDOWN = ("finalize", "destroy")
CONNECTED = 484
"""MiB of a communicator of two ranks once an operation has connected it (nccl_holdings.h)."""
PAIR = CONNECTED + (0 if torch.__version__ >= "2.12" else 196)  # 2.8 has created the pair's
FAULTY = {**dict.fromkeys(("split", "abort", "finalize", "destroy"), CONNECTED), "recv": PAIR}
"""MiB that the communicator of a call holds after the call has failed. Those of the other calls
are in ``tests/nccl``."""


@pytest.mark.parametrize("call", FAULTY)
def test_a_failed_call_raises_and_has_no_effect(engine: dict[str, str], call: str) -> None:
    """Torch raises the error of that call."""
    outcome = ranks(faulty, 2, call, env=engine)[0]
    message, mib = outcome.result
    # ProcessGroupNCCL2 (torch 2.15) drops the errors of a shutdown, and destroys after the first.
    silent = engine != LEGACY and call in SHUTDOWN
    assert message == "" if silent else "remote process" in message
    assert mib == (0 if silent and call == "finalize" else FAULTY[call])


@on_ranks(2, **LEGACY)  # the other engine takes the device of the rank's number
def test_two_members_on_one_device_raise_as_with_nccl() -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", timeout=LIMIT)
    with pytest.raises(RuntimeError, match="Duplicate GPU detected"):
        dist.all_reduce(on_device(1))
