"""``colocated``: a trainer's groups and memory out, a rollout engine in, and back.

Real ranks on the simulated accelerator share a device with so little room that the engine fits
only when the communicators and the trainer's memory are gone, and these only when it sleeps.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
import worlds
from stand_ins import BYTES, Device, SglangEngine, StandInSaver, VllmEngine, attempt
from worlds import sums_right

import reloadpg
from reloadpg.integrations import ColocationError, MemorySaver, colocated
from reloadpg.testing import run_ranks, simulated

pytestmark = pytest.mark.matrix

CYCLES = 3
PARAMETERS = 4 * BYTES
CAPACITY = 6 * BYTES
"""Room for the engine's 6, or for the trainer's 4 and its two communicators."""


class Side:
    """One rank's trainer, device and log."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[str] = []
        self.bare = StandInSaver()
        self.bare.log = self.log
        self.bare.malloc("parameters", PARAMETERS, tag="trainer")
        self.device = Device(CAPACITY, self.bare)
        self.bare.room = self.device.need
        self.group = dist.new_group([0, 1])
        self.remove = [
            reloadpg.on_offload(lambda: self.log.append("callback")),
            reloadpg.on_reload(lambda: self.log.append("rebuilt")),
        ]

    def close(self) -> None:
        for remove in self.remove:
            remove()
        dist.destroy_process_group(self.group)

    def right(self) -> bool:
        return sums_right(None, self.group)

    def state(self) -> tuple[str, int, int, bool]:
        """Groups, the trainer's active memory, the engine's memory, and whether sums are right."""
        parameters = self.bare.account["parameters"]
        active = parameters.size if parameters.active else 0
        return reloadpg.status().state, active, self.device.engine_bytes, self.right()


def cycles(side: Side, engine: Any, **options: Any) -> dict[str, Any]:
    """Three rollouts, with sums by value in between."""
    rollout = colocated(engine, saver=MemorySaver(side.bare), **options)
    seen: dict[str, Any] = {"in": [], "steps": [], "held": [], "connected": [], "states": []}
    for _ in range(CYCLES):
        seen["states"].append(side.state())
        side.log.clear()
        with rollout as inside:
            assert inside is rollout
            for tags in [["weights"], ["kv_cache"]] if options.get("wake_tags") == () else []:
                rollout.wake_up(tags)
            seen["in"].append((engine.generate(), reloadpg.status().state))
            seen["held"].append((simulated.stats().held_bytes, side.bare.active_bytes))
        seen["connected"].append(simulated.stats().held_bytes)
        seen["steps"].append([step for step, _ in rollout.steps])
        assert all(ms >= 0 for _, ms in rollout.steps)
        seen["log"] = list(side.log)
    seen["states"].append(side.state())
    seen["reports"] = (str(rollout.offload_report)[:8], str(rollout.reload_report)[:7])
    return seen


def naive(side: Side) -> dict[str, tuple[str, str]]:
    """The device has teeth: the engine does not fit beside the trainer."""
    engine = VllmEngine(side.device, side.log)
    assert side.right()
    seen = {"all there": attempt(engine.wake_up)}
    side.bare.pause("trainer")
    seen["groups there"] = attempt(engine.wake_up)
    engine.sleep()
    side.bare.resume("trainer")
    with reloadpg.offloaded():
        seen["parameters there"] = attempt(engine.wake_up)
        engine.sleep()
    with reloadpg.offloaded():
        side.bare.pause()
        engine.wake_up()
        seen["back too early"] = attempt(side.bare.resume)
        engine.sleep()
        side.bare.resume()
    return seen


def broken(side: Side, step: str) -> dict[str, Any]:
    """One step fails once, on rank 1; all is as it was after ``restore()`` on both."""
    engine = VllmEngine(side.device, side.log)
    rollout = colocated(engine, saver=side.bare)
    if side.rank == 1:
        (side.bare.fail if step in ("pause", "resume") else engine.fail).append(step)
    seen: dict[str, Any] = {"error": None, "body": False}
    assert side.right()
    side.log.clear()
    try:
        with rollout:
            seen["body"] = True
    except ColocationError as error:
        seen["error"] = str(error)
        seen["failures"] = [(name, type(cause).__name__) for name, cause in error.failures]
        seen["cause"] = error.__cause__ is error.failures[0][1]
        seen["handle"] = error.colocation is rollout
    seen["log"] = list(side.log)
    seen["left"] = reloadpg.status().state
    if step == "answer":  # nothing collective is left to do
        if side.rank == 1:
            rollout.restore()
    else:
        rollout.restore()
    rollout.restore()
    seen["after"] = side.state()
    with rollout:
        seen["again"] = engine.generate()
    seen["end"] = side.state()
    return seen


def raising(side: Side) -> dict[str, Any]:
    """The body raises, alone and with a step back that fails too."""
    engine = VllmEngine(side.device, side.log)
    rollout = colocated(engine, saver=side.bare)

    def body() -> None:
        with rollout:
            raise KeyError("body")

    seen = {"body": attempt(body), "after": side.state()}
    engine.fail.append("sleep")
    seen["both"] = attempt(body)
    seen["awake"] = len(engine.awake)
    rollout.restore()
    seen["end"] = side.state()

    def nested() -> None:
        with rollout, rollout:
            pass

    seen["nested"] = attempt(nested)
    seen["outside"] = attempt(rollout.wake_up)
    seen["letters"] = attempt(lambda: rollout.wake_up("weights"))
    seen["last"] = side.state()
    return seen


def usable(group: Any) -> bool | str:
    """Whether sums over a group are right, or the error that it raises."""
    try:
        return sums_right(group)
    except reloadpg.GroupOffloadedError as error:
        return type(error).__name__


def with_groups(side: Side) -> dict[str, Any]:
    """An engine with a group in the trainer's processes."""
    with reloadpg.region("engine"):
        group = dist.new_group([0, 1])
    sizes = {"weights": 2 * BYTES, "kv_cache": 3 * BYTES}  # and one communicator
    engine = VllmEngine(side.device, side.log, sizes)
    reloadpg.offload("engine")
    refused = attempt(lambda: colocated(saver=MemorySaver(side.bare), engine_groups="engine"))
    rollout = colocated(
        engine, saver=side.bare, engine_groups="engine", wake_tags=["weights"], connect="eager"
    )
    seen: dict[str, Any] = {"refused": refused, "in": [], "out": []}
    for _ in range(CYCLES):
        with rollout:
            awake = rollout.wake_up(["kv_cache"])
            sums = [usable(one) for one in (group, side.group)]
            seen["in"].append((awake, engine.generate(), sums))
        sums = [usable(one) for one in (side.group, group)]
        seen["out"].append(sums)
    seen["steps"] = [step for step, _ in rollout.steps]
    dist.destroy_process_group(group)
    return seen


def without(side: Side) -> dict[str, Any]:
    """Neither engine nor saver, on rank 1 alone; and an offload that fails on the way in."""
    engine = VllmEngine(side.device, side.log) if side.rank == 0 else None
    options = {"saver": side.bare} if side.rank == 0 else {}
    rollout = colocated(engine, collect=False, **options)
    with rollout:
        rollout.wake_up(["weights"])
    seen: dict[str, Any] = {"steps": [step for step, _ in rollout.steps], "state": side.state()}

    def fail() -> None:
        raise KeyError("callback")

    remove = reloadpg.on_offload(fail) if side.rank == 1 else (lambda: None)
    seen["refused"] = attempt(rollout.__enter__)
    remove()
    seen["untouched"] = side.state()
    with rollout:
        seen["again"] = reloadpg.status().state
    return seen


def shared(side: Side) -> dict[str, Any]:
    """One engine on the devices of both ranks, which rank 0 alone can call."""
    engine = VllmEngine(side.device, side.log) if side.rank == 0 else None
    rollout = colocated(engine, saver=side.bare, engine_groups="server")
    for _ in range(CYCLES):
        with rollout:
            pass
    return {"steps": [step for step, _ in rollout.steps], "state": side.state()}


def copying(side: Side) -> dict[str, Any]:
    """The weights' copy and the reload begin, each waiting until the other one has begun."""
    engine = VllmEngine(side.device, side.log)
    copies, rebuilds = threading.Event(), threading.Event()
    seen: dict[str, Any] = {}

    def before_reload() -> None:
        rebuilds.set()
        seen["copy had begun"] = copies.wait(60)

    def copy_back() -> None:
        side.log.append("copy")
        seen["reload had begun"] = rebuilds.wait(60)
        seen["sum"] = attempt(side.right)
        copies.set()  # the reload goes on

    rollout = colocated(engine, saver=side.bare, copy_back=copy_back)
    remove = reloadpg.on_reload(before_reload, before=True)
    side.log.clear()
    with rollout:
        pass
    remove()
    return seen | {"log": list(side.log), "steps": rollout.steps[-4:], "after": side.state()}


def interrupted(side: Side, error: type[BaseException]) -> dict[str, Any]:
    """The copy ends in an exception, once, on rank 1."""
    engine = VllmEngine(side.device, side.log)
    left = [error("copy")] if side.rank == 1 else []

    def copy_back() -> None:
        side.log.append("copy")
        if left:
            raise left.pop()

    rollout = colocated(engine, saver=side.bare, copy_back=copy_back)

    def block() -> None:
        with rollout:
            pass

    side.log.clear()
    try:
        block()
        raised = ""
    except BaseException as failure:
        raised = f"{type(failure).__name__}: {failure}"
    seen: dict[str, Any] = {"raised": raised, "after": side.state()}
    rollout.restore()
    rollout.restore()
    return seen | {"copies": side.log.count("copy")}


def not_resumed(side: Side) -> dict[str, Any]:
    """The saver cannot resume on rank 1, so that there is no memory to copy to."""
    engine = VllmEngine(side.device, side.log)
    rollout = colocated(engine, saver=side.bare, copy_back=lambda: side.log.append("copy"))
    if side.rank == 1:
        side.bare.fail.append("resume")
    side.log.clear()
    seen: dict[str, Any] = {}
    try:
        with rollout:
            pass
    except ColocationError as error:
        seen["error"] = str(error)
    seen["copied"] = side.log.count("copy")
    rollout.restore()
    return seen | {"copies": side.log.count("copy"), "after": side.state()}


def colocated_job(rank: int, size: int) -> dict[str, Any]:
    simulated.register()
    simulated.configure(bytes_per_communicator=BYTES)
    reloadpg.install(timeout=timedelta(seconds=20))
    worlds.init("sim")
    seen: dict[str, Any] = {}
    scenarios: dict[str, Any] = {
        "naive": naive,
        "vllm": lambda side: cycles(side, VllmEngine(side.device, side.log), sleep_level=2),
        "eager": lambda side: cycles(
            side, VllmEngine(side.device, side.log), connect="eager", wake_tags=()
        ),
        "sglang": lambda side: cycles(side, SglangEngine(side.device, side.log)),
        "wake_up": lambda side: broken(side, "wake_up"),
        "sleep": lambda side: broken(side, "sleep"),
        "answer": lambda side: broken(side, "answer"),
        "pause": lambda side: broken(side, "pause"),
        "resume": lambda side: broken(side, "resume"),
        "raising": raising,
        "with groups": with_groups,
        "without": without,
        "shared": shared,
        "copying": copying,
        "copy failed": lambda side: interrupted(side, OSError),
        "copy interrupted": lambda side: interrupted(side, KeyboardInterrupt),
        "not resumed": not_resumed,
    }
    for name, scenario in scenarios.items():
        side = Side(rank)
        with side.bare.preloaded():
            # Communicators that the saver has seen coming.
            reloadpg.offload()
            reloadpg.reload()
            seen[name] = scenario(side)
            reloadpg.offload()  # nothing of this saver's account is left for the next
        side.close()
        reloadpg.reload()
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(colocated_job, 2, timeout=120)


LIVE = ("live", PARAMETERS, 0, True)
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


def test_the_device_is_too_small_for_both(ranks: list[dict[str, Any]]) -> None:
    """Without the order the engine, or the trainer, runs out of memory: groups count, parameters
    count, and so does coming back before the engine sleeps."""
    for seen in ranks:
        for case in ("all there", "groups there", "parameters there", "back too early"):
            assert seen["naive"][case][0] == "OutOfMemory", case


@pytest.mark.parametrize("engine", ["vllm", "eager", "sglang"])
def test_three_rollouts(ranks: list[dict[str, Any]], engine: str) -> None:
    """In each rollout nothing of the trainer is left on the device and the engine generates; in
    between the trainer's memory is back, the engine holds none, and sums are right by value."""
    for seen in ranks:
        assert seen[engine]["in"] == [("sample", "offloaded")] * CYCLES
        assert seen[engine]["held"] == [(0, 0)] * CYCLES
        assert seen[engine]["states"] == [LIVE] * (CYCLES + 1)
        assert seen[engine]["reports"] == ("offload:", "reload:")


def test_the_order_of_steps(ranks: list[dict[str, Any]]) -> None:
    """The steps, as named, and the calls that were made: callbacks, then the pause, then the
    engine; the engine asleep, then the resume, then the groups."""
    for seen in ranks:
        assert seen["vllm"]["steps"] == [STEPS] * CYCLES
        order = ["callback", "pause", "wake_up", "generate", "sleep 2", "resume", "rebuilt"]
        assert seen["vllm"]["log"] == order
        assert seen["sglang"]["log"] == [s.replace("sleep 2", "sleep 0") for s in order]


def test_an_engine_woken_in_stages(ranks: list[dict[str, Any]]) -> None:
    """With ``wake_tags=()`` nothing wakes on entering, and tags wake one by one in the block."""
    for seen in ranks:
        assert seen["eager"]["log"][2:4] == ["wake_up weights", "wake_up kv_cache"]
        assert "wake engine" not in seen["eager"]["steps"][0]


def test_connect_eager(ranks: list[dict[str, Any]]) -> None:
    """``connect="eager"`` has every communicator connected when the block ends; ``none`` none."""
    for seen in ranks:
        assert seen["eager"]["connected"] == [2 * BYTES] * CYCLES
        assert seen["vllm"]["connected"] == [0] * CYCLES


@pytest.mark.parametrize(
    ("step", "name", "log"),
    [
        ("wake_up", "wake engine", ["callback", "pause", "wake_up", "sleep 1", "resume"]),
        ("pause", "pause saver", ["callback"]),
        ("answer", "put engine to sleep", ["callback", "pause", "wake_up", "sleep 1", "resume"]),
    ],
)
def test_a_step_that_fails(
    ranks: list[dict[str, Any]], step: str, name: str, log: list[str]
) -> None:
    """A step that fails on one rank is named there with its cause and the state; every later step
    of the way back is done, the groups are live on both ranks, and restore() does what is left."""
    other, failed = ranks[0][step], ranks[1][step]
    assert (other["error"], other["body"]) == (None, True)
    assert failed["body"] is (step == "answer")
    assert failed["failures"] == [(name, "MemorySaverError" if step == "pause" else "RuntimeError")]
    assert f"{name}: " in failed["error"]
    assert "State now: groups live, saver active" in failed["error"]
    assert f"engine {'awake' if step == 'answer' else 'asleep'}" in failed["error"]
    assert failed["cause"]
    assert failed["handle"]
    assert failed["log"] == [*log, "rebuilt"]
    for seen in ranks:
        assert seen[step]["left"] == "live"
        assert seen[step]["after"] == LIVE
        assert (seen[step]["again"], seen[step]["end"]) == ("sample", LIVE)


@pytest.mark.parametrize(
    ("step", "before", "engine"),
    [("resume", [], "asleep"), ("sleep", [("put engine to sleep", "RuntimeError")], "awake")],
)
def test_a_saver_that_cannot_resume(
    ranks: list[dict[str, Any]], step: str, before: list[tuple[str, str]], engine: str
) -> None:
    """A resume that fails on rank 1, by itself or because the engine keeps its memory, fails the
    reload on both ranks, so that neither waits. Each names its own part, and restore() on both
    brings all back."""
    other, failed = ranks[0][step], ranks[1][step]
    assert other["failures"] == [("reload groups", "PeerFailedError")]
    assert failed["failures"] == [
        *before,
        ("resume saver", "MemorySaverError"),
        ("reload groups", "ReloadpgError"),
    ]
    assert f"State now: groups offloaded, saver paused (*), engine {engine}" in failed["error"]
    assert "call restore()" in failed["error"]
    for seen in ranks:
        assert seen[step]["left"] == "offloaded"
        assert seen[step]["after"] == LIVE
        assert (seen[step]["again"], seen[step]["end"]) == ("sample", LIVE)


def test_a_body_that_raises(ranks: list[dict[str, Any]]) -> None:
    """The body's exception goes on, also when a step back fails too; the way back is gone."""
    for seen in ranks:
        found = seen["raising"]
        assert found["body"] == found["both"] == ("KeyError", "'body'")
        assert found["after"] == found["end"] == found["last"] == LIVE
        assert found["awake"] == 2


def test_misuse(ranks: list[dict[str, Any]]) -> None:
    """Entered within itself, woken outside: errors that say what to call, and all is live."""
    for seen in ranks:
        kind, text = seen["raising"]["nested"]
        assert kind == "ReloadpgError"
        assert "entered twice; nothing was changed" in text
        kind, text = seen["raising"]["outside"]
        assert kind == "ReloadpgError"
        assert "Call it within the colocated() block" in text
        kind, text = seen["raising"]["letters"]
        assert kind == "InvalidOptionError"
        assert text.startswith("wake_up(tags='weights'): not a sequence of tags")


def test_an_engine_with_groups_in_the_trainers_processes(ranks: list[dict[str, Any]]) -> None:
    """They are live in the block alone, and are no obstacle to the trainer's saver."""
    for seen in ranks:
        found = seen["with groups"]
        kind, text = found["refused"]
        assert kind == "InvalidOptionError"
        assert "sets=" in text
        for awake, sample, (mine, trainers) in found["in"]:
            assert (awake, sample, mine) == (True, "sample", True)
            assert trainers == "GroupOffloadedError"
        for trainers, engines in found["out"]:
            assert trainers is True
            assert engines == "GroupOffloadedError"
        steps = [*STEPS[:4], "reload engine's groups", *STEPS[4:6], "offload engine's groups"]
        assert found["steps"] == [*steps, *STEPS[6:]]


def test_ranks_without_an_engine(ranks: list[dict[str, Any]]) -> None:
    """A rank may have neither engine nor saver; an offload that fails leaves all as it was."""
    bare = [step for step in STEPS if "engine" not in step and "saver" not in step]
    assert [seen["without"]["steps"] for seen in ranks] == [STEPS, bare]
    kinds = [seen["without"]["refused"][0] for seen in ranks]
    assert kinds == ["PeerFailedError", "ReloadpgError"]
    for seen in ranks:
        assert seen["without"]["state"] == seen["without"]["untouched"] == LIVE
        assert seen["without"]["again"] == "offloaded"


def test_an_engine_that_one_rank_calls_on_the_devices_of_others(
    ranks: list[dict[str, Any]],
) -> None:
    """With a set of no group each rank waits for all savers' pauses and for the engine's sleep."""
    mine = [*STEPS[:4], "reload engine's groups", *STEPS[4:6], "offload engine's groups"]
    mine += STEPS[6:]
    calls = ("wake engine", "put engine to sleep")
    theirs = [step for step in mine if step not in calls]
    assert [seen["shared"]["steps"] for seen in ranks] == [mine, theirs]
    assert all(seen["shared"]["state"] == LIVE for seen in ranks)


def test_weights_come_back_beside_the_reload(ranks: list[dict[str, Any]]) -> None:
    """Copy and reload go on at the same time, after the saver's resume; groups refuse meanwhile,
    and when the block ends both are done."""
    for seen in ranks:
        found = seen["copying"]
        assert found["copy had begun"]
        assert found["reload had begun"]
        kind, text = found["sum"]
        assert kind == "GroupOffloadedError"
        assert "a reload is running" in text
        order = ["callback", "pause", "wake_up", "sleep 1", "resume", "copy", "rebuilt"]
        assert found["log"] == order
        assert [step for step, _ in found["steps"]] == [
            "empty cache",
            "begin reload",
            "copy weights back",
            "reload groups",
        ]
        assert found["after"] == LIVE


@pytest.mark.parametrize("how", ["copy failed", "copy interrupted"])
def test_a_copy_that_fails(ranks: list[dict[str, Any]], how: str) -> None:
    """The reload completes on all ranks all the same, and restore() copies again, on the rank that
    failed alone; an interrupt goes on as it is."""
    for rank, seen in enumerate(ranks):
        assert seen[how]["after"] == LIVE
        assert seen[how]["copies"] == 1 + rank
    assert ranks[0][how]["raised"] == ""
    if how == "copy interrupted":
        assert ranks[1][how]["raised"] == "KeyboardInterrupt: copy"
    else:
        assert "copy weights back: OSError: copy" in ranks[1][how]["raised"]
        assert "engine asleep, weights not copied back" in ranks[1][how]["raised"]


def test_nothing_is_copied_to_memory_that_is_paused(ranks: list[dict[str, Any]]) -> None:
    """Where the saver cannot resume nothing is copied until restore() has resumed it."""
    for rank, seen in enumerate(ranks):
        found = seen["not resumed"]
        assert found["copied"] == 1 - rank
        assert found["copies"] == 1
        assert found["after"] == LIVE
    assert "saver paused (*), engine asleep, weights not copied" in ranks[1]["not resumed"]["error"]


class Asynchronous:
    """An engine as vLLM's AsyncLLM is: its methods are coroutines."""

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> bool: ...


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
        ({"saver_tags": ["default"]}, "not a plain memory saver"),
        ({"saver": object()}, "no pause"),
        ({"wake_tags": "kv_cache"}, "wake_tags='kv_cache'.: not a sequence of tags"),
        ({"wake_tags": 3}, "wake_tags=3.: not a sequence of tags"),
        ({"wake_tags": [b"weights"]}, "not a sequence of tags"),
        ({"engine": Asynchronous()}, "sleep.. is asynchronous.*Pass an object whose methods wait"),
        ({"engine_groups": ""}, "not the name of a set"),
        ({"copy_back": {}}, "copy_back=.*: not callable; nothing was changed"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], said: str) -> None:
    """Refused with what to pass, before anything is done."""
    with pytest.raises(reloadpg.InvalidOptionError, match=said):
        colocated(**arguments)
