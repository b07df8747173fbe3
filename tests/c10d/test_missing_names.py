"""A torch without a name, or with a changed one, is refused: never after an offload.

Each case runs in a forked process, in which the name is removed or changed for good.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers import broken_torch

import reloadpg
from reloadpg import c10d
from reloadpg.c10d import needs
from reloadpg.c10d.needs import Need
from reloadpg.errors import UnsupportedTorchError
from reloadpg.extend import GroupState

reloadpg.install  # noqa: B018 - imported once, and not in each forked process
EXPECTED = [need for need in needs.NEEDS if need.applies_to(needs.torch_version())]
CORE = [need for need in EXPECTED if need.capability == "core"]
FUNCTIONS = [need for need in CORE if need.parameters or need.keywords]

SAMPLE = ("_get_split_source", "_is_barrier_after_init", "pg_map", "_register_backend")
"""Names that the default run removes after the installation; the slow test removes all."""


def forked(case: Callable[[], str]) -> str:
    """What a function returns in a forked process, or its error."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)  # gloo prints a notice on torch 2.8
            os.dup2(null, 2)
            text = case()
        except BaseException:
            text = traceback.format_exc()[-3000:]
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


def is_here(need: Need) -> bool:
    """Whether this build has the owner and the name: one without NCCL lacks some."""
    try:
        owner = broken_torch.owner_of(need)
    except (AttributeError, KeyError):
        return False
    return isinstance(owner, type) or hasattr(owner, need.name)


def refusal_of_install() -> str:
    originals = dist.new_group, dist.split_group, dist.init_process_group
    try:
        reloadpg.install(backends={"gloo"})
    except UnsupportedTorchError as error:
        now = dist.new_group, dist.split_group, dist.init_process_group
        assert now == originals, "it was refused after a change"
        assert not reloadpg.is_installed()
        return str(error)
    return "installed"


@pytest.mark.slow
@pytest.mark.matrix
def test_install_refuses_a_torch_that_lacks_a_name() -> None:
    """Each name of the core; the message names it and says what does not work without it."""

    def case(need: Need) -> str:
        broken_torch.remove(need)
        return refusal_of_install()

    wrong = {}
    for need in filter(is_here, CORE):
        if need.name in ("new_group", "split_group", "init_process_group"):
            continue  # this test compares them
        text = forked(lambda need=need: case(need))  # type: ignore[misc]
        if not text.startswith("install: torch ") or need.path not in text or need.why not in text:
            wrong[need.path] = text
    assert wrong == {}


@pytest.mark.matrix
def test_install_refuses_a_function_with_other_parameters() -> None:
    """Functions that are replaced, or called with arguments by position or by name."""

    def changed(something: object, /, *, other: object = None) -> None: ...

    def case(need: Need) -> str:
        broken_torch.change(need, changed)
        return refusal_of_install()

    wrong = {}
    for need in FUNCTIONS:
        if need.name in ("new_group", "split_group", "init_process_group"):
            continue
        text = forked(lambda need=need: case(need))  # type: ignore[misc]
        if need.path not in text:
            wrong[need.path] = text
    assert FUNCTIONS
    assert wrong == {}


def cycle_after(change: Callable[[], object]) -> str:
    """An offload and a reload in a job of one rank, in which torch changes before the offload."""
    reloadpg.install(backends={"gloo"}, min_size=1, timeout=30)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.group.WORLD, dist.new_group([0])]
    change()
    try:
        reloadpg.offload()
    except Exception as error:
        assert all(group.state is GroupState.LIVE for group in groups), groups
        return f"refused: {error}"
    reloadpg.reload()
    for group in groups:
        group.allreduce([torch.ones(1)]).wait()
    return "completed"


def outcomes(rows: list[Need]) -> dict[str, str]:
    found = {}
    for need in filter(is_here, rows):
        owner = broken_torch.owner_of(need)
        found[f"without {need.path}"] = forked(
            lambda need=need: cycle_after(lambda: broken_torch.remove(need))  # type: ignore[misc]
        )
        if callable(getattr(owner, need.name, None)):
            found[f"changed {need.path}"] = forked(
                lambda need=need: cycle_after(  # type: ignore[misc]
                    lambda: broken_torch.change(need, broken_torch.fails)
                )
            )
    return found


def wrong_outcomes(found: dict[str, str]) -> dict[str, str]:
    return {
        name: text
        for name, text in found.items()
        if text != "completed" and not text.startswith("refused: ")
    }


@pytest.mark.matrix
def test_a_change_that_no_name_shows_is_refused_before_anything_is_released() -> None:
    """A sample: the groups are live after the error. Where the name is not used, a cycle works."""
    found = outcomes([need for need in CORE if need.name in SAMPLE])
    assert wrong_outcomes(found) == {}
    refused = [name for name, text in found.items() if "rehearsal" in text]
    assert "changed torch._C._distributed_c10d.ProcessGroup._register_backend" in refused


@pytest.mark.slow
@pytest.mark.matrix
def test_no_name_of_the_core_fails_after_an_offload() -> None:
    """All names, each removed or changed after the installation and before the first offload."""
    assert wrong_outcomes(outcomes(CORE)) == {}


def test_the_rehearsal_leaves_nothing_behind() -> None:
    """Neither in torch's tables nor in its counter, from which later groups get their names."""

    def state() -> tuple[object, ...]:
        backend = dist.Backend
        world = dist.distributed_c10d._world
        return (
            c10d.table_sizes(),
            world.group_count,
            [*backend.backend_list],
            {**backend.backend_type_map},
            {**backend._plugins},
            {**backend.default_device_backend_map},
            len(os.listdir("/proc/self/fd")),
            type(world).__name__,
        )

    def case() -> str:
        from reloadpg.lifecycle.rehearsal import rehearse

        reloadpg.install(backends={"gloo"}, min_size=1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        before = state()
        for _ in range(2):
            rehearse(dist.group.WORLD)
        names = ["reloadpg rehearsal", "reloadpg rehearsal of the default group"]
        names += [f"{name}@1" for name in names]
        assert c10d.registered(names) == frozenset()
        return "" if state() == before else f"{before} became {state()}"

    assert forked(case) == ""


@pytest.mark.parametrize(
    ("capability", "ask"),
    [
        ("suspend", lambda: c10d.suspend_obstacle(object())),  # type: ignore[arg-type]
        ("tests", lambda: c10d.registered([])),
        ("slime", lambda: c10d.on_collective_error(print)),
    ],
)
def test_a_missing_name_of_a_capability_is_an_error_where_it_is_requested(
    capability: str, ask: Callable[[], object]
) -> None:
    """Install succeeds, and the capability says which name is missing."""
    rows = [need for need in EXPECTED if need.capability == capability and is_here(need)]
    if not rows:
        pytest.skip(f"torch {torch.__version__} has no name for {capability}")

    def case() -> str:
        broken_torch.remove(rows[0])
        reloadpg.install(backends={"gloo"})
        try:
            return str(ask())
        except UnsupportedTorchError as error:
            return str(error)

    assert rows[0].path in forked(case)


def test_doctor_names_what_is_missing() -> None:
    """A problem for the core, a warning for a capability; with what does not work."""
    from reloadpg.cli.doctor import diagnose

    def case() -> str:
        broken_torch.remove(next(need for need in CORE if need.name == "_get_split_source"))
        broken_torch.remove(next(need for need in EXPECTED if need.name == "_c10d_logger"))
        lines = str(diagnose()).splitlines()
        return "\n".join(line for line in lines if "torch names" in line)

    problem, warning = forked(case).splitlines()
    assert problem.startswith("[problem] torch names: core is not available: torch.distributed.")
    assert "_get_split_source (only the members of a group take part" in problem
    assert warning.startswith("[warning] torch names: slime is not available: ")
