"""``colocated``: a trainer's groups and memory out, a rollout engine in, and back.

Real ranks on the simulated accelerator share a device with so little room that the engine fits
only when the communicators and the trainer's memory are gone, and these only when it sleeps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds
from helpers.worlds import sums_right
from integrations.stand_ins import BYTES, Device, StandInSaver, VllmEngine

import reloadpg
from reloadpg.integrations import ColocationError, MemorySaver, colocated
from reloadpg.testing import simulated

pytestmark = pytest.mark.matrix

CYCLES = 3
PARAMETERS = 4 * BYTES
CAPACITY = 6 * BYTES
"""Room for the engine's 6, or for the trainer's 4 and its two communicators."""

STEPS = [
    "synchronize",
    "offload groups",
    "empty cache",
    "pause saver",
    "wake engine",
    "put engine to sleep",
    "resume saver",
    "empty cache",
    "reload groups",
]


class Side:
    """One rank's trainer, device and log."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.log: list[str] = []
        self.bare = StandInSaver()
        self.bare.log = self.log
        self.bare.malloc("parameters", PARAMETERS, tag="trainer")
        self.device = Device(CAPACITY, self.bare)
        self.bare.room = self.device.need
        self.group = dist.new_group([0, 1])
        reloadpg.on_offload(lambda: self.log.append("callback"))
        reloadpg.on_reload(lambda: self.log.append("rebuilt"))

    def engine(self, **options: Any) -> VllmEngine:
        return VllmEngine(self.device, self.log, **options)

    def check_live(self) -> None:
        """The groups sum right, the trainer's memory is active, and the engine holds none."""
        assert reloadpg.status().state == "live"
        parameters = self.bare.account["parameters"]
        assert (parameters.size, parameters.active) == (PARAMETERS, True)
        assert self.device.engine_bytes == 0
        assert sums_right(None, self.group)

    def check_restored(self, rollout: Any, engine: VllmEngine) -> None:
        """A ``restore()`` of what is restored does nothing, and the next rollout succeeds."""
        rollout.restore()
        self.check_live()
        with rollout:
            assert engine.generate() == "sample"
        self.check_live()


@contextmanager
def a_side() -> Iterator[Side]:
    """A trainer whose communicators a preloaded saver has seen being created."""
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install(timeout=timedelta(seconds=20), sets=["engine", "server"])
    worlds.init("sim")
    side = Side()
    with side.bare.preloaded():
        reloadpg.offload()
        reloadpg.reload()
        side.log.clear()
        yield side
    dist.destroy_process_group()


def steps_of(rollout: Any) -> list[str]:
    assert all(ms >= 0 for _, ms in rollout.steps)
    return [step for step, _ in rollout.steps]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("eager", [False, True])
def test_the_engine_generates_in_three_rollouts_with_nothing_of_the_trainer_on_the_device(
    eager: bool,
) -> None:
    """In between the trainer's memory is back, the engine holds none, and sums are right by value.

    With ``wake_tags=()`` nothing wakes on entering. ``connect="eager"`` has every communicator
    connected when the block ends.
    """
    with a_side() as side:
        engine = side.engine()
        options: Any = {"connect": "eager", "wake_tags": ()} if eager else {"sleep_level": 2}
        rollout = colocated(engine, saver=MemorySaver(side.bare), **options)
        for _ in range(CYCLES):
            side.check_live()
            side.log.clear()
            with rollout as inside:
                assert inside is rollout
                for tags in [["weights"], ["kv_cache"]] if eager else []:
                    rollout.wake_up(tags)
                assert engine.generate() == "sample"
                assert reloadpg.status().state == "offloaded"
                assert (simulated.stats().held_bytes, side.bare.active_bytes) == (0, 0)
            assert simulated.stats().held_bytes == (2 * BYTES if eager else 0)
            assert steps_of(rollout) == [s for s in STEPS if not eager or s != "wake engine"]
        side.check_live()
        woken = ["wake_up weights", "wake_up kv_cache"] if eager else ["wake_up"]
        asleep = ["sleep 1" if eager else "sleep 2", "resume", "rebuilt"]
        order = ["callback", "pause", *woken, "generate", *asleep]
        assert side.log == order
        assert str(rollout.offload_report).startswith("offload:")
        assert str(rollout.reload_report).startswith("reload:")


ENGINE = ["put engine to sleep: RuntimeError"]
OFFLOADED = "groups offloaded, saver paused (*), engine"
SAVER = ["resume saver: MemorySaverError", "reload groups: ReloadpgError"]
PEER = ["reload groups: PeerFailedError"]
FAILURES: dict[str, tuple[list[str], list[str], str]] = {
    "wake_up": (["wake engine: RuntimeError"], [], "groups live, saver active, engine asleep"),
    "pause": (["pause saver: MemorySaverError"], [], "groups live, saver active, engine asleep"),
    "answer": (ENGINE, [], "groups live, saver active, engine awake"),
    "resume": (SAVER, PEER, f"{OFFLOADED} asleep, weights not copied back"),
    "sleep": ([*ENGINE, *SAVER], PEER, f"{OFFLOADED} awake, weights not copied back"),
}
"""By the call that fails on rank 1: the failures there and on rank 0, and the state told there."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("step", FAILURES)
def test_a_step_that_fails_is_named_with_its_cause_and_the_state(step: str) -> None:
    """The other steps are made. Where the saver cannot resume, by itself or because the engine
    keeps its memory, the reload fails on all ranks: no rank waits.

    ``restore()`` on both ranks does what is left. Nothing is copied to memory that is paused.
    """
    mine, peers, state = FAILURES[step]
    with a_side() as side:
        expected = mine if side.rank == 1 else peers
        engine = side.engine()
        copy_back = partial(side.log.append, "copy")
        rollout = colocated(engine, saver=side.bare, copy_back=copy_back)
        if side.rank == 1:
            (side.bare.fail if step in ("pause", "resume") else engine.fail).append(step)
        body = False
        with pytest.raises(ColocationError) if expected else nullcontext() as caught, rollout:
            body = True
        assert body == (side.rank == 0 or step not in ("wake_up", "pause"))
        assert reloadpg.status().state == ("live" if "live" in state else "offloaded")
        assert side.log.count("copy") == (side.rank == 0 or "live" in state)
        if expected:
            error, causes = caught.value, caught.value.failures
            assert [f"{name}: {type(cause).__name__}" for name, cause in causes] == expected
            assert (error.__cause__, error.colocation) == (causes[0][1], rollout)
            assert f"{causes[0][0]}: {type(causes[0][1]).__name__}: " in str(error)
            assert side.rank == 0 or f"State now: {state}" in str(error)
            assert "call restore()" in str(error)
        rollout.restore()
        assert side.log.count("copy") == 1
        side.check_restored(rollout, engine)


@pytest.mark.ranks(2)
def test_an_exception_of_the_body_is_raised_after_the_way_back() -> None:
    """Also if a step back fails. A misuse raises an error with the call to make; all is live."""
    with a_side() as side:
        engine = side.engine()
        rollout = colocated(engine, saver=side.bare)
        for fails in (False, True):
            if fails:
                engine.fail.append("sleep")
            with pytest.raises(KeyError, match="body"), rollout:
                raise KeyError("body")
            if not fails:
                side.check_live()
        assert len(engine.awake) == 2
        rollout.restore()
        side.check_live()
        twice = pytest.raises(reloadpg.ReloadpgError, match="entered twice; nothing was changed")
        with twice, rollout, rollout:
            pass
        with pytest.raises(reloadpg.ReloadpgError, match=r"within the colocated\(\) block"):
            rollout.wake_up()
        said = r"wake_up\(tags='weights'\): not a sequence of tags"
        with pytest.raises(reloadpg.errors.InvalidOptionError, match=said):
            rollout.wake_up("weights")
        side.check_live()


@pytest.mark.ranks(2)
def test_the_end_of_a_block_within_another_reloads_nothing() -> None:
    """The outer block still needs the groups offloaded."""
    with a_side() as side:
        with reloadpg.offloaded():
            with colocated():
                pass
            assert reloadpg.status().state == "offloaded"
        side.check_live()


@pytest.mark.ranks(2)
def test_the_groups_of_an_engine_in_the_trainers_processes_are_live_in_the_block_alone() -> None:
    """They do not keep the trainer's saver from pausing, and are not warned of its pause."""
    with a_side() as side:
        with reloadpg.region("engine"):
            group = dist.new_group([0, 1])
        sizes = {"weights": 2 * BYTES, "kv_cache": 3 * BYTES}  # and one communicator
        engine = side.engine(sizes=sizes)
        reloadpg.offload("engine")
        with pytest.raises(reloadpg.errors.InvalidOptionError, match="sets="):
            colocated(saver=MemorySaver(side.bare), engine_groups="engine")
        rollout = colocated(
            engine, saver=side.bare, engine_groups="engine", wake_tags=["weights"], connect="eager"
        )
        warnings = []
        reloadpg.on_report(lambda report: warnings.extend(report.warnings))
        for _ in range(CYCLES):
            with rollout:
                assert rollout.wake_up(["kv_cache"])
                assert engine.generate() == "sample"
                assert sums_right(group)
                sets = reloadpg.status().sets
                assert (sets["engine"].memory_bytes, sets["trainer"].memory_bytes) == (BYTES, 0)
                with pytest.raises(reloadpg.GroupOffloadedError):
                    sums_right(side.group)
            assert sums_right(side.group)
            assert reloadpg.status().sets["trainer"].memory_bytes == 2 * BYTES
            with pytest.raises(reloadpg.GroupOffloadedError):
                sums_right(group)
        steps = [*STEPS[:4], "reload engine's groups", *STEPS[4:6], "offload engine's groups"]
        assert steps_of(rollout) == [*steps, *STEPS[6:]]
        assert warnings == []


@pytest.mark.ranks(2)
def test_a_rank_needs_neither_engine_nor_saver() -> None:
    """Here rank 1 has none. An offload that fails on the way in changes nothing."""
    with a_side() as side:
        engine = side.engine() if side.rank == 0 else None
        options = {"saver": side.bare} if side.rank == 0 else {}
        rollout = colocated(engine, collect=False, **options)
        with rollout:
            rollout.wake_up(["weights"])
        bare = [step for step in STEPS if "engine" not in step and "saver" not in step]
        assert steps_of(rollout) == (bare if side.rank else STEPS)
        side.check_live()

        def fail() -> None:
            raise KeyError("callback")

        remove = reloadpg.on_offload(fail) if side.rank == 1 else (lambda: None)
        with pytest.raises(reloadpg.ReloadpgError) as caught:
            rollout.__enter__()
        assert isinstance(caught.value, reloadpg.PeerFailedError) == (side.rank == 0)
        remove()
        side.check_live()
        with rollout:
            assert reloadpg.status().state == "offloaded"


@pytest.mark.ranks(2)
def test_weights_are_copied_back_while_the_groups_are_reloaded() -> None:
    """After the saver's resume. Copy and reload begin, each waiting until the other has begun.

    Groups refuse collectives until both are done, at the end of the block.
    """
    with a_side() as side:
        copies, rebuilds = threading.Event(), threading.Event()

        def before_reload() -> None:
            rebuilds.set()
            assert copies.wait(60)

        def copy_back() -> None:
            side.log.append("copy")
            assert rebuilds.wait(60)
            with pytest.raises(reloadpg.GroupOffloadedError, match="a reload is running"):
                sums_right(None)
            copies.set()  # the reload continues

        rollout = colocated(side.engine(), saver=side.bare, copy_back=copy_back)
        reloadpg.on_reload(before_reload, before=True)
        with rollout:
            pass
        order = ["callback", "pause", "wake_up", "sleep 1", "resume", "copy", "rebuilt"]
        assert side.log == order
        last = ["empty cache", "begin reload", "copy weights back", "reload groups"]
        assert steps_of(rollout)[-4:] == last
        side.check_live()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_copy_that_fails_on_one_rank_does_not_stop_the_reload(error: type[BaseException]) -> None:
    """``restore()`` copies again, on that rank alone. An interrupt is raised unchanged."""
    with a_side() as side:
        left = [error("copy")] if side.rank == 1 else []

        def copy_back() -> None:
            side.log.append("copy")
            if left:
                raise left.pop()

        rollout = colocated(side.engine(), saver=side.bare, copy_back=copy_back)
        raised = ""
        try:
            with rollout:
                pass
        except BaseException as failure:
            raised = f"{type(failure).__name__}: {failure}"
        side.check_live()
        rollout.restore()
        rollout.restore()
        assert side.log.count("copy") == 1 + side.rank
        if side.rank == 0:
            assert raised == ""
        elif error is KeyboardInterrupt:
            assert raised == "KeyboardInterrupt: copy"
        else:
            assert "copy weights back: OSError: copy" in raised
            assert "engine asleep, weights not copied back" in raised


class Asynchronous:
    """An engine as vLLM's AsyncLLM is: its methods are coroutines."""

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> bool: ...


class Remote:
    """An engine as the handle of a Ray actor is: its methods are called by ``.remote()``."""

    class Method:
        def __call__(self) -> None:
            raise TypeError("Actor methods cannot be called directly.")

        def remote(self) -> None: ...

    sleep = wake_up = Method()


class WithoutTags:
    """An engine as SGLang's HttpServerEngineAdapter is."""

    def release_memory_occupation(self) -> None: ...

    def resume_memory_occupation(self) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"engine": "http://localhost:8000"}, "neither vLLM's sleep.*Wrap it in an object"),
        ({"engine": WithoutTags(), "wake_tags": ["kv_cache"]}, "takes no tags; nothing was chang"),
        ({"engine": object()}, "neither vLLM's sleep"),
        ({"connect": "always"}, "reload\\(connect='always'\\)"),
        ({"saver": object()}, "no pause"),
        ({"wake_tags": "kv_cache"}, "wake_tags='kv_cache'.: not a sequence of tags"),
        ({"wake_tags": 3}, "wake_tags=3.: not a sequence of tags"),
        ({"wake_tags": [b"weights"]}, "not a sequence of tags"),
        ({"engine": Asynchronous()}, "sleep.. is asynchronous.*Pass an object whose methods wait"),
        ({"engine": Remote()}, "Remote.: sleep.. is asynchronous.*ray.get"),
        ({"engine_groups": ""}, "colocated.engine_groups=''.: not the name of a set"),
        ({"engine_groups": "trainer"}, "the set of the trainer's own groups; nothing was changed"),
        ({"copy_back": {}}, "copy_back=.*: not callable; nothing was changed"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments: dict[str, Any], said: str) -> None:
    """With what to pass, before anything is done."""
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=said):
        colocated(**arguments)
