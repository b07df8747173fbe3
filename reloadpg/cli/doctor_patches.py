"""Find other patches of the functions that create groups, and modules that imported them early.

Reads module dictionaries only, as the patching itself does: no ``__getattr__`` of a module is
called. A function is recognised by the file of its code, which ``functools.wraps`` does not copy. A
script is never run, since it would join its job; the modules that it imports at its top level are
imported.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .console import Finding

CREATORS = ("init_process_group", "new_group", "split_group")
"""The functions that are patched."""

_NOT_SEARCHED = frozenset({"torch", "reloadpg", "wrapt"})


def check_foreign_wrappers() -> Iterator[Finding]:
    from .. import status
    from ..c10d import creator_modules

    found, seen = functools.partial(Finding, "foreign wrapper"), list[Any]()
    for module in creator_modules():
        for name in CREATORS:
            for layer in _layers(vars(module).get(name)):
                behind = getattr(layer, "_self_wrapper", layer)  # not wrapt's class
                if _is_of("torch", behind) or _is_of("reloadpg", behind):
                    continue
                if any(layer is one for one in seen):
                    continue
                seen.append(layer)
                what = f"{module.__name__}.{name} is wrapped by {_described(behind)}"
                remedy = "remove it if it replaces or records groups, like reloadpg; otherwise "
                remedy += "install it before reloadpg.install(), whose wrapper then calls it"
                yield found("problem", what, remedy)
    for changed in status().foreign:
        remedy = "remove that wrapper: groups created through it may not be reloadable, and "
        remedy += "reloadpg.uninstall() fails while it exists"
        yield found("problem", f"{changed}; reloadpg had patched that name", remedy)
    if not seen:
        yield found("ok", f"none over {', '.join(CREATORS)}")


def check_early_aliases() -> Iterator[Finding]:
    """Find modules that hold torch's creating functions by a name.

    A reference inside a value (a class, a closure) is not searched for: a group that is created
    through it is named in ``Status.unmanaged``.
    """
    from .. import is_installed

    installed, found = is_installed(), 0
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        name = str(vars(module).get("__name__", "?"))
        if name.partition(".")[0] in _NOT_SEARCHED:
            continue
        for attribute, value in list(vars(module).items()):
            if _is_torchs_creator(value):
                found += 1
                yield _alias(f"{name}.{attribute}", value, installed)
    if not found:
        yield Finding("early alias", "ok", "no module holds an unpatched creating function")


def _alias(where: str, function: Any, installed: bool) -> Finding:
    message = f"{where} is torch's own {function.__name__}"
    remedy = "reloadpg.install() patches this name too if the module is loaded by then"
    if installed:
        message += ", but reloadpg is installed: groups created through it are not reloadable"
        remedy = "use the function of torch.distributed there, or load that module before "
        remedy += "reloadpg.install()"
    return Finding("early alias", "problem" if installed else "warning", message, remedy)


def _layers(value: Any) -> list[Any]:
    """A function and the functions that it wraps, outermost first."""
    found: list[Any] = []
    while value is not None and all(value is not other for other in found):
        found.append(value)
        value = getattr(value, "__wrapped__", None)
    return found


def _is_of(package: str, function: Any) -> bool:
    """Whether a function's code belongs to a package; wrappers copy all other attributes."""
    if type(function) is not FunctionType or package not in sys.modules:
        return False
    home = Path(sys.modules[package].__file__ or "").parent
    return home in Path(function.__code__.co_filename).parents


def _is_torchs_creator(value: Any) -> bool:
    return (
        type(value) is FunctionType
        and value.__name__ in CREATORS
        and value.__module__ == "torch.distributed.distributed_c10d"
        and _is_of("torch", value)
    )


def _described(wrapper: Any) -> str:
    code = getattr(wrapper, "__code__", None)
    if code is not None:
        # wraps() copies the name of the wrapped function; the code keeps its own name.
        name = getattr(code, "co_qualname", code.co_name)
        return f"{name} ({code.co_filename}, line {code.co_firstlineno})"
    name = getattr(wrapper, "__qualname__", None) or type(wrapper).__name__
    return f"{name} of {getattr(wrapper, '__module__', None) or type(wrapper).__module__}"


# -- what a job imports -----------------------------------------------------------------------


def import_modules(names: Sequence[str]) -> Iterator[Finding]:
    """Import modules; yield a finding for each failure."""
    for name in names:
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may call sys.exit while it is imported
            why = str(error).strip().partition("\n")[0]
            what = f"{name} cannot be imported: {type(error).__name__}: {why}"
            remedy = "its changes to torch were not checked; run doctor where the job runs"
            yield Finding("import", "warning", what, remedy)


def import_of_script(script: Path) -> Iterator[Finding]:
    """Import what a script imports at its top level; a finding for each that cannot be."""
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except (OSError, SyntaxError, ValueError) as error:
        remedy = "correct it"
        if isinstance(error, SyntaxError) and _is_shell(script):
            remedy = "this is a shell script: name the Python program that it starts"
        yield Finding("script", "problem", f"{script} cannot be read: {error}", remedy)
        return
    directory = str(script.absolute().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as the interpreter does for a script
    yield from import_modules(list(dict.fromkeys(_imported(tree.body))))


def _is_shell(script: Path) -> bool:
    first, _, _ = script.read_bytes().partition(b"\n")
    return script.suffix == ".sh" or (first.startswith(b"#!") and b"python" not in first)


def _imported(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Modules that the statements import, including branches but not function bodies."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, block, ()):
                    yield from _imported(getattr(inner, "body", [inner]))
