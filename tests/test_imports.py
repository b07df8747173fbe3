"""The packages of reloadpg import each other in one direction, as docs/architecture.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import reloadpg
from reloadpg import extend

HOME = Path(reloadpg.__file__).parent
PACKAGES = (
    "errors",
    "texts",
    "settings",
    "processes",
    "reports",
    "c10d",
    "threads",
    "groups",
    "rendezvous",
    "lifecycle",
    "recovery",
    "extend",
    "observability",
    "environment",
    "integrations",
    "testing",
    "cli",
)
"""Each may import those before it, so the core never imports a package that builds on it."""

APART = {"groups", "rendezvous"}
"""They do not import each other: the lifecycle connects them."""

MODULES = {
    ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HOME.rglob("*.py"))
    if path.parent != HOME and "_activation" not in path.parts
}


def imported(name: str) -> Iterator[str]:
    """The modules of reloadpg that a module imports, anywhere in it, for types too."""
    path = MODULES[name]
    package = path.relative_to(HOME).parts[:-1]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            parts = (*package[: len(package) - node.level + 1], *parts)
        elif parts[:1] == ("reloadpg",):
            parts = parts[1:]
        else:
            continue
        for alias in node.names:
            inner = ".".join((*parts, alias.name))
            yield inner if inner in MODULES else ".".join(parts) or alias.name


def test_every_folder_is_a_package() -> None:
    """A new package needs a place in the order."""
    folders = {path.name for path in HOME.iterdir() if (path / "__init__.py").is_file()}
    assert folders == {name for name in PACKAGES if not (HOME / f"{name}.py").exists()}


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_package_imports_only_those_before_it(package: str) -> None:
    """In none of its modules, not for types either. Public names of the package are exempt."""
    later = {*PACKAGES[PACKAGES.index(package) + 1 :]}
    later |= (APART - {package}) if package in APART else set()
    wrong = {
        f"{name} imports {target}"
        for name in MODULES
        if name.split(".")[0] == package
        for target in imported(name)
        if target.split(".")[0] in later
    }
    assert wrong == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Within a package, too, and not for types either. Exempt are the ``__init__`` modules, which
    import names on use.
    """
    graph = {name: {*imported(name)} & MODULES.keys() for name in MODULES}
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for target in sorted(graph[name] - packages):
            visit(target, (*trail, name))
        done.add(name)

    for name in sorted(graph.keys() - packages):
        visit(name, ())


FLOOR = {"c10d", "environment", "errors", "extend", "processes", "recovery", "reports"}
FLOOR |= {"settings", "texts", ""}
"""What integrations and observability may use: public modules, and helpers of the package."""


@pytest.mark.parametrize("package", ["integrations", "observability"])
def test_what_builds_on_the_core_uses_the_second_floor(package: str) -> None:
    """No module of the core itself, so that other packages can do the same."""
    public = {*reloadpg.__all__}
    wrong = {
        f"{name} imports {target}"
        for name in MODULES
        if name.split(".")[0] == package
        for target in imported(name)
        if target.split(".")[0] not in FLOOR | public | {package}
    }
    assert wrong == set()


def test_every_name_of_the_second_floor_is_documented() -> None:
    """In its own docstring, by name."""
    text = extend.__doc__ or ""
    assert [name for name in extend.__all__ if f"{name}`" not in text] == []
