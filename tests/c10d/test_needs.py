"""The table of torch's private names: it is complete, and a torch that lacks a name is refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.distributed import distributed_c10d

import reloadpg
from reloadpg.c10d import needs

HOME = Path(reloadpg.__file__).parent
PRIVATE = re.compile(r"_[A-Za-z]\w*")

OTHERS = {
    "_exit": "os",
    "_getframe": "sys",
    "_pytest": "pytest",
    "_global_process_group_list": "Megatron",
    "_pybind11_conduit_v1_": "pybind11",
    "_query_collect_info": "verl",
    "_query_dispatch_info": "verl",
    "_self_wrapper": "wrapt",
    "_dynamo": "torch: documented by this name",
    "_available": "the end of a name",
    "_ms": "the end of a name",
    "_sdp": "the end of a name",
    "_World": "the name of a class that c10d creates",
}
"""Strings and names that are not private names of torch, and whose they are."""

GROUPS = {
    "groups/borrowed.py",
    "groups/loans.py",
    "groups/dispatch.py",
    "groups/offloaded.py",
    "groups/proxy.py",
    "testing/simulated.py",
}
"""Modules with classes that are groups or backends, or wrap their methods by torch's names."""

MEGATRONS = "integrations/megatron.py"
"""The module that reads private names of Megatron, DeepEP and TransformerEngine."""

OPERATORS = "testing/standins/kernels.py"
"""The module that uses torch's dispatcher, for the stand-in for CUDA."""


class Use(NamedTuple):
    """A private name in a module, and the expression that holds it."""

    name: str
    module: str
    line: int
    text: str


@cache
def modules() -> dict[str, ast.Module]:
    names = {path.relative_to(HOME).as_posix(): path for path in sorted(HOME.rglob("*.py"))}
    del names["c10d/needs.py"]
    return {name: ast.parse(path.read_text()) for name, path in names.items()}


def defined(tree: ast.Module) -> Iterator[str]:
    """The private names that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) in ("self", "cls")
        ):
            yield node.attr


def docstrings(tree: ast.Module) -> set[ast.AST]:
    """The strings of a module that stand alone: documentation."""
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def uses(module: str, tree: ast.Module) -> Iterator[Use]:
    """The private names that a module uses: attributes, imports, and strings of names."""
    texts = docstrings(tree)
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node not in texts
            and re.fullmatch(r"[\w.\s]+", node.value)
        ):
            found = re.split(r"[.\s]+", node.value)
        for name in found:
            ours = name.isupper() or name.startswith("_reloadpg")
            if PRIVATE.fullmatch(name) and not ours and not hasattr(torch.ops.aten, name):
                yield Use(name, module, getattr(node, "lineno", 0), ast.unparse(node)[:70])


@cache
def torch_names() -> list[Use]:
    """The private names of torch that the package uses."""
    trees = modules()
    ours = {name for tree in trees.values() for name in defined(tree)}
    ours |= {path.stem for path in HOME.rglob("*.py")}
    owners = (torch.distributed.ProcessGroup, distributed_c10d, torch._C._distributed_c10d.Backend)
    theirs = {name for owner in owners for name in dir(owner)} - {"_exit"}
    return [
        use
        for module, tree in trees.items()
        for use in uses(module, tree)
        if module != MEGATRONS
        if (use.name not in ours or use.name in theirs) and use.name not in OTHERS
    ]


LISTED = {
    part
    for need in needs.NEEDS
    for part in re.split(r"[.:]", ".".join(need))
    if PRIVATE.fullmatch(part)
}


def test_every_private_name_of_torch_is_in_the_table() -> None:
    known = LISTED | needs.OPTIONAL
    wrong = [use for use in torch_names() if use.name not in known and use.module not in GROUPS]
    assert [str(use) for use in wrong] == []


def test_every_private_name_of_torch_is_used_in_c10d() -> None:
    """Other packages only define methods with such names, in classes that are groups.

    The operators of the stand-in for CUDA are no part of the core.
    """
    wrong = [
        use
        for use in torch_names()
        if not use.module.startswith("c10d/") and use.module not in {*GROUPS, OPERATORS}
    ]
    assert [str(use) for use in wrong] == []


def test_every_row_is_used() -> None:
    """Nothing is refused for a name that no module uses any more."""
    paths = [path for path in HOME.rglob("*.py") if path.name != "needs.py"]
    used = {name for path in paths for name in re.findall(r"\w+", path.read_text())}
    listed = {*needs.OPTIONAL, *(name for _, name in needs.NEEDS)}
    assert listed <= used


def test_names_of_other_libraries_are_used() -> None:
    used = {use.name for module, tree in modules().items() for use in uses(module, tree)}
    assert [name for name in OTHERS if name not in used] == []


@pytest.mark.matrix
def test_the_installed_torch_meets_all_needs() -> None:
    assert needs.missing() == []
