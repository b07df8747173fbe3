"""A torch without a name, or with a changed one, is refused before anything is patched.

Each case runs in a forked process, in which the name is removed or changed for good.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.distributed as dist
from helpers.forking import forked

from reloadpg.c10d.needs import FUNCTIONS, NEEDS

Need = tuple[str, str]

CREATORS = ("new_group", "split_group", "init_process_group")
"""These tests compare them."""


def owner_of(need: Need) -> Any:
    module, _, attributes = need[0].partition(":")
    found: Any = sys.modules[module]
    for name in attributes.split(".") if attributes else ():
        found = getattr(found, name)
    return found


def path_of(need: Need) -> str:
    return ".".join(need).replace(":", ".")


def remove(need: Need) -> None:
    """Remove the name, in this process for good."""
    owner = owner_of(need)
    if not isinstance(owner, type):
        if need[1] in vars(owner):
            delattr(owner, need[1])
            return
        owner = type(owner)  # torch's tables are properties of their class
    for base in owner.__mro__:
        if need[1] in vars(base):
            delattr(base, need[1])


def is_here(need: Need) -> bool:
    """Whether this build has the owner and the name: one without NCCL lacks some."""
    try:
        owner = owner_of(need)
    except (AttributeError, KeyError):
        return False
    return isinstance(owner, type) or hasattr(owner, need[1])


def refusal() -> str:
    """What the first use of the library raises, in a process that has not imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "reloadpg"]:
        del sys.modules[name]
    import reloadpg

    originals = [getattr(dist, name) for name in CREATORS]
    try:
        reloadpg.install(backends={"gloo"})
    except RuntimeError as error:
        assert type(error).__name__ == "UnsupportedTorchError"
        assert originals == [getattr(dist, name) for name in CREATORS], "refused after a change"
        return str(error)
    return "installed"


@pytest.mark.slow
@pytest.mark.matrix
def test_a_torch_that_lacks_a_name_is_refused() -> None:
    """The message names it."""

    def case(need: Need) -> str:
        remove(need)
        return refusal()

    wrong = {}
    for need in filter(is_here, NEEDS):
        if need[1] in CREATORS:
            continue
        text = forked(lambda need=need: case(need))  # type: ignore[misc]
        if not text.startswith("torch ") or path_of(need) not in text:
            wrong[path_of(need)] = text
    assert wrong == {}


@pytest.mark.matrix
def test_a_function_with_other_parameters_is_refused() -> None:
    """Functions that are replaced, or called with arguments by position."""

    def changed(something: object, /, *, other: object = None) -> None: ...

    def case(need: Need) -> str:
        setattr(owner_of(need), need[1], changed)
        return refusal()

    functions = [need for need in NEEDS if FUNCTIONS.get(need[1]) and need[1] not in CREATORS]
    wrong = {}
    for need in functions:
        text = forked(lambda need=need: case(need))  # type: ignore[misc]
        if path_of(need) not in text:
            wrong[path_of(need)] = text
    assert functions
    assert wrong == {}


def test_doctor_names_what_is_missing() -> None:
    def case() -> str:
        remove(next(need for need in NEEDS if need[1] == "_get_split_source"))
        refusal()
        from reloadpg.cli.doctor import diagnose

        found = [one for one in diagnose() if one.check == "torch names"]
        return "\n".join(f"[{one.level}] {one.message}" for one in found)

    (problem,) = forked(case).splitlines()
    assert problem.startswith("[problem] torch ")
    assert "torch.distributed.distributed_c10d._get_split_source" in problem
