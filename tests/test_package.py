"""Importing the package: its names, and what it does not load."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys

import pytest

import reloadpg
import reloadpg.environment
import reloadpg.integrations
from reloadpg import errors


def _python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )


def test_importing_the_package_does_not_import_torch():
    """Nor wrapt; the errors need neither."""
    done = _python(
        "import sys, reloadpg, reloadpg.errors\n"
        "print(reloadpg.ReloadpgError.__name__, 'torch' in sys.modules, 'wrapt' in sys.modules)"
    )
    assert done.stdout == "ReloadpgError False False\n", done.stderr


def test_importing_changes_nothing_in_torch():
    """Until ``install`` the functions of torch are unchanged."""
    done = _python(
        "import torch.distributed as dist\n"
        "before = dist.new_group, dist.split_group, dist.init_process_group\n"
        "import reloadpg\n"
        "reloadpg.status, reloadpg.install, reloadpg.ReloadableProcessGroup\n"
        "print(before == (dist.new_group, dist.split_group, dist.init_process_group))"
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    "package",
    [
        reloadpg,
        reloadpg.environment,
        reloadpg.extend,
        reloadpg.integrations,
        reloadpg.recovery,
        reloadpg.reports,
    ],
)
def test_every_public_name_exists(package):
    """Loaded on first use; ``dir`` lists it. An unknown one is an attribute error."""
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)
    assert not hasattr(package, "no_such_name")


def test_the_root_is_small():
    """It has what a program calls and catches; everything else is in a module."""
    assert len(reloadpg.__all__) <= 24


def test_the_lists_of_public_names_agree():
    """The names that are found at run time are those declared for type checkers."""
    tree = ast.parse(inspect.getsource(reloadpg))
    block = next(one for one in tree.body if isinstance(one, ast.If))  # if TYPE_CHECKING
    declared = {alias.asname for one in block.body for alias in one.names}
    caught = {name for name in errors.__all__ if name in vars(reloadpg)}
    assert sorted({*declared, *caught, "__version__"} - {*reloadpg._MODULES}) == reloadpg.__all__
