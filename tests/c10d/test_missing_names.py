"""A torch without a name, or with a changed one, is refused before anything is patched.

Each case runs in a forked process, in which the name is removed or changed for good.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import reloadpg
from reloadpg.c10d import nccl, needs
from reloadpg.c10d.needs import Need
from reloadpg.errors import UnsupportedTorchError

reloadpg.install  # noqa: B018 - imported once, and not in each forked process
EXPECTED = [need for need in needs.NEEDS if need.applies_to(needs.torch_version())]
CORE = [need for need in EXPECTED if need.capability == "core"]
FUNCTIONS = [need for need in CORE if need.parameters or need.named]


def owner_of(need: Need) -> Any:
    module, _, attributes = need.owner.partition(":")
    found: Any = sys.modules[module]
    for name in attributes.split(".") if attributes else ():
        found = getattr(found, name)
    return found


def remove(need: Need) -> None:
    """Remove the name, in this process for good."""
    owner = owner_of(need)
    if not isinstance(owner, type):
        if need.name in vars(owner):
            delattr(owner, need.name)
            return
        owner = type(owner)  # torch's tables are properties of their class
    for base in owner.__mro__:
        if need.name in vars(base):
            delattr(base, need.name)


def change(need: Need, function: Callable[..., Any]) -> None:
    """Replace a function, or a method of a class in C++."""
    setattr(owner_of(need), need.name, function)


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
        owner = owner_of(need)
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
        remove(need)
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
        change(need, changed)
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


def test_a_missing_name_of_a_capability_is_an_error_where_it_is_requested() -> None:
    """Install succeeds, and the capability says which name is missing."""
    rows = [need for need in EXPECTED if need.capability == "suspend" and is_here(need)]
    if not rows:
        pytest.skip(f"torch {torch.__version__} has no name for suspend")

    def case() -> str:
        remove(rows[0])
        reloadpg.install(backends={"gloo"})
        try:
            return str(nccl.suspend_obstacle(object()))  # type: ignore[arg-type]
        except UnsupportedTorchError as error:
            return str(error)

    assert rows[0].path in forked(case)


def test_doctor_names_what_is_missing() -> None:
    """A problem for the core, a warning for a capability; with what does not work."""
    from reloadpg.cli.doctor import diagnose

    def case() -> str:
        remove(next(need for need in CORE if need.name == "_get_split_source"))
        remove(next(need for need in EXPECTED if need.capability == "debug"))
        found = [one for one in diagnose() if one.check == "torch names"]
        return "\n".join(f"[{one.level}] {one.message}" for one in found)

    problem, warning = forked(case).splitlines()
    assert problem.startswith("[problem] core is not available: torch.distributed.")
    assert "_get_split_source (only the members of a group take part" in problem
    assert warning.startswith("[warning] debug is not available: ")
