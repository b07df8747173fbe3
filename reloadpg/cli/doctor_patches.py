"""``doctor``: who else has changed the functions that create groups, and who holds them early.

Looks at module dictionaries only, as the patching itself does: a module with a hostile
``__getattr__`` is not asked anything. What a foreign wrapper hides is found all the same, since
torch's own functions are recognised by where their code is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .findings import Finding

__all__ = ["CREATORS", "check_early_aliases", "check_foreign_wrappers"]

CREATORS = ("init_process_group", "new_group", "split_group")
"""The functions that are patched."""

_NOT_SEARCHED = frozenset({"torch", "reloadpg", "wrapt"})
_CONTAINERS = (dict, list, tuple)
_LARGEST_CONTAINER = 1000


def check_foreign_wrappers() -> Iterator[Finding]:
    """Wrappers that are neither torch's nor ours, over the creating functions."""
    from ..c10d import creator_modules

    seen: list[Any] = []
    for module in creator_modules():
        for name in CREATORS:
            for layer in _layers(vars(module).get(name)):
                if _is_torchs(layer) or _is_ours(layer) or any(layer is one for one in seen):
                    continue
                seen.append(layer)
                yield Finding(
                    "foreign wrapper",
                    "problem",
                    f"{module.__name__}.{name} is wrapped by {_described(layer)}",
                    "remove it if it replaces or records groups itself, as reloadpg does; if it "
                    "must stay, put it in place before reloadpg.install(), which leaves it below",
                )
    from ..groups.registry import registry

    for changed in registry.patches.foreign() if registry.patches is not None else ():
        yield Finding(
            "foreign wrapper",
            "problem",
            f"{changed}; reloadpg had patched that name",
            "remove that wrapper: groups created through it may not be reloadable, and "
            "reloadpg.uninstall() refuses while it is there",
        )
    if not seen:
        yield Finding("foreign wrapper", "ok", f"none over {', '.join(CREATORS)}")


def check_early_aliases() -> Iterator[Finding]:
    """Modules that hold torch's own creating functions at a name or in a place of their own."""
    from ..lifecycle.install import is_installed

    installed = is_installed()
    found = 0
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        name = str(vars(module).get("__name__", "?"))
        if name.partition(".")[0] in _NOT_SEARCHED:
            continue
        for attribute, value in list(vars(module).items()):
            where = f"{name}.{attribute}"
            if _is_torchs_creator(value):
                found += 1
                yield _alias(where, value, installed)
                continue
            for place, held in _inside(name, value):
                found += 1
                yield _hidden(f"{where}{place}", held)
    if not found:
        yield Finding("early alias", "ok", "no module holds an unpatched creating function")


def _alias(where: str, function: Any, installed: bool) -> Finding:
    message = f"{where} is torch's own {function.__name__}"
    if installed:
        return Finding(
            "early alias",
            "problem",
            f"{message}, though reloadpg is installed: groups made through it are not reloadable",
            "use the function of torch.distributed there, or load that module before "
            "reloadpg.install()",
        )
    return Finding(
        "early alias",
        "warning",
        message,
        "reloadpg.install() patches this name too if the module is loaded by then",
    )


def _hidden(where: str, function: Any) -> Finding:
    return Finding(
        "early alias",
        "problem",
        f"{where} holds torch's own {function.__name__} where no patch reaches it: groups made "
        "through it are not reloadable",
        "look the function up in torch.distributed when it is called, or call "
        "reloadpg.install() before that module is imported",
    )


# ---------------------------------------------------------------------------------------------


def _layers(value: Any) -> list[Any]:
    """A function and what it wraps, outermost first."""
    found: list[Any] = []
    while value is not None and all(value is not other for other in found):
        found.append(value)
        value = getattr(value, "__wrapped__", None)
    return found


def _is_torchs(layer: Any) -> bool:
    """Whether a function's code is torch's; ``functools.wraps`` copies every other sign of it."""
    import torch

    code = getattr(layer, "__code__", None)
    if type(layer) is not FunctionType or code is None:
        return False
    return Path(torch.__file__).parent in Path(code.co_filename).parents


def _is_ours(layer: Any) -> bool:
    import wrapt

    from ..groups.wrappers import wrappers

    if not isinstance(layer, wrapt.FunctionWrapper):
        return False
    wrapper = getattr(layer, "_self_wrapper", None)
    return any(wrapper is ours for ours in wrappers().values())


def _is_torchs_creator(value: Any) -> bool:
    return (
        type(value) is FunctionType
        and value.__name__ in CREATORS
        and value.__module__ == "torch.distributed.distributed_c10d"
        and _is_torchs(value)
    )


def _inside(module: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Creating functions one step inside a value of a module, with where they are.

    Class attributes, partial functions, argument defaults, closures, and small containers of the
    module's own; deeper nesting is not searched.
    """
    # A foreign wrapper closes over what it wraps; that is a finding of its own.
    if type(value) is FunctionType and value.__name__ not in CREATORS:
        if value.__module__ != module:
            return
        for held in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            if _is_torchs_creator(held):
                yield "() as a default", held
        for cell in value.__closure__ or ():
            held = _content(cell)
            if _is_torchs_creator(held):
                yield "() in its closure", held
    elif isinstance(value, type) and value.__module__ == module:
        for name, held in list(vars(value).items()):
            held = held.__func__ if isinstance(held, staticmethod) else held
            if _is_torchs_creator(held):
                yield f".{name}", held
    elif isinstance(value, functools.partial):
        if _is_torchs_creator(value.func):
            yield " (a partial)", value.func
    elif type(value) in _CONTAINERS and 0 < len(value) <= _LARGEST_CONTAINER:
        pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, held in pairs:
            if _is_torchs_creator(held):
                yield f"[{key!r}]", held


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _described(layer: Any) -> str:
    """What something is and where it comes from."""
    behind = getattr(layer, "_self_wrapper", layer)  # wrapt's own class says nothing
    code = getattr(behind, "__code__", None)
    name = getattr(behind, "__qualname__", None) or type(behind).__name__
    if code is not None:
        # wraps() gives a wrapper the name of what it wraps; its code keeps its own.
        name = getattr(code, "co_qualname", code.co_name)
        return f"{name} ({code.co_filename}, line {code.co_firstlineno})"
    return f"{name} of {getattr(behind, '__module__', None) or type(behind).__module__}"
