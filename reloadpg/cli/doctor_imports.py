"""``doctor``: load what a job loads, so that what this does to torch can be seen.

A script is never run: it would join its job. What it imports at its top level is imported here,
and names that it takes from torch.distributed itself are read from its text.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .doctor_patches import CREATORS
from .findings import Finding

__all__ = ["import_modules", "import_of_script"]


def import_modules(names: Sequence[str]) -> Iterator[Finding]:
    """Import modules; a finding for each that cannot be."""
    for name in names:
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a module may call sys.exit while it is imported
            why = str(error).strip().partition("\n")[0]
            yield Finding(
                "import",
                "warning",
                f"{name} cannot be imported: {type(error).__name__}: {why}",
                "what it does to torch was not looked at; run doctor where the job runs",
            )


def import_of_script(script: Path) -> Iterator[Finding]:
    """Import what a script imports at its top level; also its own early names of torch's."""
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except (OSError, SyntaxError, ValueError) as error:
        yield Finding("script", "problem", f"{script} cannot be read: {error}", "correct it")
        return
    directory = str(script.absolute().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)  # as the interpreter does for a script
    yield from import_modules(list(dict.fromkeys(_imported(tree.body))))
    yield from _own_aliases(script, tree)


def _imported(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Modules that are imported when the statements run, branches included, functions not."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            yield statement.module
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            for block in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(statement, block, ()):
                    yield from _imported(getattr(inner, "body", [inner]))


def _own_aliases(script: Path, tree: ast.Module) -> Iterator[Finding]:
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.ImportFrom):
            continue
        if (statement.module or "").partition(".")[0] != "torch":
            continue
        for alias in statement.names:
            if alias.name in CREATORS:
                yield Finding(
                    "early alias",
                    "warning",
                    f"{script.name}, line {statement.lineno}: {alias.asname or alias.name} is "
                    f"torch's own {alias.name}",
                    "reloadpg.install() patches this name too if it runs after the import",
                )
