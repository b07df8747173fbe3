"""``retrying(state=...)``: restored state, state for a new process, and objects that raise."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from helpers.fault_job import Injected, Job, all_reduce, attempt
from helpers.replacing import RANKS, VICTIM, die, incarnation, run_replaced
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import reloadpg
from reloadpg.testing import run_ranks

WIDTH = 8
CHUNKS = "fwd_cache" if TorchVersion(torch.__version__) < "2.15" else "_forward_chunk_states"
"""The attribute of a pipeline stage that holds the microbatches of a step."""
FAULTY = 1
TIMEOUT = 120


def wrong(message: str) -> Any:
    return pytest.raises(reloadpg.errors.InvalidOptionError, match=message)


# -- objects that raise ---------------------------------------------------------------------------


def test_an_object_without_state_is_refused_at_the_call() -> None:
    with wrong(r"object is neither a module nor an optimizer.*nothing was started"):
        reloadpg.recovery.retrying("ab", state=(torch.nn.Linear(1, 1), object()))


@pytest.mark.parametrize("on", [[1], "RuntimeError", (ValueError, 2), int])
def test_on_is_validated_at_the_call(on: Any) -> None:
    """A type, a list of types, or a function."""
    with wrong("on="):
        reloadpg.recovery.retrying("ab", on=on)
    reloadpg.recovery.retrying("ab", on=[ValueError, KeyError])


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        # Its flat parameters cannot be reset.
        (
            lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
            "FSDP1.*ful",
        ),
        # If its first step were repeated, the ranks would issue different collectives.
        (lambda model: DistributedDataParallel(model, static_graph=True), "static_graph=True"),
    ],
    ids=["fsdp1", "ddp"],
)
def test_wrappers_that_cannot_be_reset_are_refused(tmp_path: Any, wrap: Any, message: str) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with wrong(message):
            reloadpg.recovery.retrying("ab", state=torch.nn.Sequential(wrap(torch.nn.Linear(2, 2))))
    finally:
        dist.destroy_process_group()


def test_a_value_that_cannot_be_restored_in_place_is_refused() -> None:
    with wrong("a set in a dict or list cannot be restored in place"):
        reloadpg.recovery.retrying("ab", state=({"seen": [set()]},))


def test_a_loop_in_a_step_cannot_have_state() -> None:
    """A fault repeats the outer step, so the outer loop needs the state."""
    for step in reloadpg.recovery.retrying("a"):
        with step, wrong("Pass `state` to the outer loop"):
            next(reloadpg.recovery.retrying("b", state=torch.ones(1)))


# -- restored state -------------------------------------------------------------------------------


class Counter(torch.nn.Module):
    """A module with extra state, and a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = self.mean + value.detach()
        return (self.weight + 1) * value


@pytest.mark.ranks(4)
def test_a_repeated_step_begins_in_the_state_of_the_first_attempt(rank: int) -> None:
    """This includes weights, buffers, gradients, optimizer, generators, and other values."""
    job = Job("gloo")
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    own = random.Random(rank)
    values: dict[str, Any] = {"list": [torch.ones(1)], "number": 1, "array": numpy.zeros(2)}
    objects = {id(model.weight), id(values["list"]), id(values["array"])}
    swapped = torch.nn.Linear(1, 1)
    state: dict[str, Any] = {"a": model, "b": optimizer, "c": generator, "d": own, "e": values}
    state |= {"entry": torch.zeros(1), "swapped": swapped}
    seen = []
    for step in reloadpg.recovery.retrying(range(3), on=Injected, state=state):
        with step:
            drawn = random.random(), float(numpy.random.rand()), float(torch.rand(()))
            drawn += float(torch.rand((), generator=generator)), own.random()
            seen.append(
                [
                    step.number,
                    drawn,
                    model.weight.tolist(),
                    model.mean.tolist(),
                    model.calls,
                    model.training,
                    None if model.weight.grad is None else model.weight.grad.tolist(),
                    optimizer.param_groups[0]["lr"],
                    sorted(optimizer.state[model.weight]) if optimizer.state else [],
                    str(values),
                    state["entry"].item(),
                    swapped.weight.item(),
                ]
            )
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2
            values["list"].append(torch.zeros(1))
            values["list"][0] += 1
            values["new"] = 1
            values["array"] += 1
            state["entry"] = state["entry"] + 1
            swapped.weight = torch.nn.Parameter(swapped.weight.detach() + 1)
            model.train(step.number > 1)
            if rank == FAULTY and step.attempt == 1:
                raise Injected
            all_reduce(job.ring)
            values.pop("new")
    assert objects == {id(model.weight), id(values["list"]), id(values["array"])}
    assert [one[0] for one in seen] == [0, 0, 1, 1, 2, 2]
    for first, second in zip(seen[::2], seen[1::2], strict=True):
        assert first == second
    assert seen[0] != seen[2]


def pipelined(rank: int, size: int, fails: str) -> Any:
    """Train a pipeline of one stage per rank; one rank fails in a pass through its layer."""
    job = Job("gloo")
    torch.manual_seed(rank)
    layer = torch.nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(layer, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, torch.nn.MSELoss())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    calls: list[int] = []

    def fault(*_: object) -> None:
        calls.append(1)
        if len(calls) == 7:  # four calls per step, and an earlier one on some versions of torch
            raise Injected

    if (fails, rank) == ("forward", FAULTY):
        layer.register_forward_hook(fault)
    if (fails, rank) == ("backward", size - 1):  # this rank has the losses
        layer.register_full_backward_hook(fault)
    left, losses = [], []
    for step in reloadpg.recovery.retrying(
        range(3), on=(Injected, RuntimeError), state=(layer, optimizer, schedule)
    ):
        with step as number:
            left.append(len(getattr(stage, CHUNKS)))
            inputs = torch.full((4, WIDTH), float(number))
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs)
            elif rank == size - 1:
                schedule.step(target=inputs, losses=found)
            else:
                schedule.step()
            optimizer.step()
            optimizer.zero_grad()
            stage.clear_runtime_states()
        if step.complete:
            losses.append([loss.item() for loss in found])
    assert job.sums()
    return left, losses, layer.weight.tolist()


@pytest.mark.ranks(1)
def test_an_optimizer_and_a_scaler_are_restored() -> None:
    """Options that the step has added are removed, and gradients can be unscaled again."""
    reloadpg.install()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler, found = torch.amp.GradScaler("cpu"), []
    for step in reloadpg.recovery.retrying("a", on=Injected, state=(model, optimizer, scaler)):
        with step:
            found.append("added" in optimizer.param_groups[0])
            optimizer.param_groups[0]["added"] = True
            scaler.scale(model(torch.ones(1)).sum()).backward()
            scaler.unscale_(optimizer)
            if step.attempt == 1:
                raise Injected
    assert found == [False, False]


@pytest.mark.matrix
@pytest.mark.ranks(4)
def test_ddp_synchronizes_its_buffers_as_in_the_first_attempt(rank: int) -> None:
    """After a fault between two microbatches, only some ranks would broadcast the buffers in the
    next forward pass, and the repeated step would hang until its timeout.
    """
    Job("gloo")
    model = DistributedDataParallel(torch.nn.BatchNorm1d(WIDTH))
    attempts = []
    for step in reloadpg.recovery.retrying(range(3), state=model, on=(Injected, RuntimeError)):
        with step as number:
            attempts.append((number, step.attempt))
            inputs = torch.randn(4, WIDTH)
            with model.no_sync():
                model(inputs).sum().backward()
            if (rank, number, step.attempt) == (FAULTY, 1, 1):
                raise Injected
            model(inputs).sum().backward()
    assert attempts == [(0, 1), (1, 1), (1, 2), (2, 1)]


@pytest.mark.matrix
def test_a_pipeline_schedule_drops_the_microbatches_of_an_unfinished_step() -> None:
    """Their losses are dropped as well. The result equals that without a fault."""
    expected, *found = (
        run_ranks(pipelined, 4, args=(fails,), timeout=280) for fails in ("", "forward", "backward")
    )
    for results in found:
        for (left, *ended), (without, *as_without) in zip(results, expected, strict=True):
            assert ended == as_without
            assert len(left) == len(without) + 1
            assert set(left) == {0}


# -- without state= -------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.ranks(4)
@pytest.mark.parametrize("repair", ["", "reset"])
def test_a_half_gathered_model_is_refused_without_state(rank: int, repair: str) -> None:
    """A fault in the backward pass leaves a model of FSDP2 gathered.

    Loading weights does not repair it; torch's own reset does.
    """
    if repair and not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"):
        pytest.skip("this torch has no reset_iter_state()")
    Job("gloo")
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    fails = [rank == FAULTY]

    def fault(*_: object) -> None:
        if fails[0]:
            fails[0] = False
            raise Injected

    layers[0].register_full_backward_pre_hook(fault)
    begin = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def run() -> None:
        for step in reloadpg.recovery.retrying("ab", on=(Injected, RuntimeError)):
            with step:
                if step.attempt > 1:
                    model.load_state_dict(begin)
                    if repair == "reset":
                        model.reset_iter_state()
                model(torch.ones(1, WIDTH)).sum().backward()

    seen = attempt(run)
    if repair:
        assert seen.kind == ""
    else:
        assert seen.kind in ("RuntimeError", "PeerFailedError")
        assert "retrying(state=(model, optimizer))" in seen.text


# -- replaced processes ----------------------------------------------------------------------------


def replaced(rank: int, size: int, kind: str, dies: bool) -> Any:
    """Train; rank 2 is killed in a backward pass, and the new process starts with other weights.

    Kinds: ``ddp``, ``hsdp`` (shards with replicas), ``fsdp`` (shards without replicas).
    """
    reloadpg.install(backends={"gloo"}, recoverable=True, timeout=TIMEOUT)
    dist.init_process_group("gloo")
    torch.manual_seed(incarnation())
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    model: Any = torch.nn.Sequential(layers[0], torch.nn.BatchNorm1d(WIDTH), layers[1])
    if kind == "ddp":  # with this option buckets, and so the order of sums, are not rebuilt
        model = DistributedDataParallel(model, init_sync=False, find_unused_parameters=True)
    else:
        dims = (2, 2) if kind == "hsdp" else (1, 4)
        mesh = init_device_mesh("cpu", dims, mesh_dim_names=("replicate", "shard"))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    reloadpg.recovery.rejoin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    begun = []

    def run() -> None:
        for step in reloadpg.recovery.retrying(range(4), state=(model, optimizer, schedule)):
            with step as number:
                begun.append(number)
                if dies and (rank, number, incarnation()) == (VICTIM, 2, 0):
                    layers[0].register_full_backward_hook(lambda *_: die())
                generator = torch.Generator().manual_seed(100 * rank + number)
                inputs = torch.randn(4, WIDTH, generator=generator)
                (model(inputs) - inputs.roll(1, 1)).pow(2).mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                with torch.no_grad():  # DDP then broadcasts no buffers in the next step
                    model(inputs)

    seen = attempt(run)
    if seen.kind:
        return seen, begun
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    found = [tensor.detach().tolist() for tensor in whole]
    buffers = [buffer.tolist() for buffer in model.buffers()] if kind == "ddp" else []
    return [found, buffers, schedule.get_last_lr()]


@pytest.mark.parametrize("kind", ["ddp", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_a_new_process_gets_the_state(kind: str) -> None:
    """Another rank with the same state sends it; the result is bit-identical."""
    found = run_replaced(replaced, kind, True)
    expected = run_replaced(replaced, kind, False, deaths=0)
    found[VICTIM] = found.pop()
    assert found == expected


def test_a_shard_that_no_other_rank_holds_is_lost() -> None:
    """All ranks raise before the step is repeated; the error names the remedy."""
    found = run_replaced(replaced, "fsdp", True)
    for rank in (0, 1, 3, RANKS):
        seen, begun = found[rank]
        assert seen.kind == ("ReloadpgError" if rank == RANKS else "PeerFailedError"), seen
        assert "the state of rank 2 was lost with its process: no other rank is known" in seen.text
        assert "Restore a checkpoint on all ranks." in seen.text
        assert ".." not in seen.text
        assert begun == ([] if rank == RANKS else [0, 1, 2])
