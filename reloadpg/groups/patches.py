"""Patches of the functions that create groups, at every name they are bound to.

Each function gets one wrapper, put at every name that held torch's own function: in
``torch.distributed`` and its modules, and in any loaded module that imported it early (found by
identity in ``sys.modules``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from .. import c10d
from .wrappers import Wrapper, wrappers

__all__ = ["Patches"]


def _wrapped(name: str, original: Any, wrapper_of: Wrapper) -> Any:
    """Put a wrapper over a function of a module.

    A job of 16,384 ranks creates 100,000 groups, and one that the rank is no member of takes torch
    8 us. Wrapt's own call takes 2: it asks the function for its ``__self__``, which a function of a
    module has not. What torch's ``new_group`` calls in turn, with keywords, gets a plain function.
    """
    if name.startswith("_"):
        return functools.wraps(original)(wrapper_of(original))

    def bound(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapper_of(wrapped)(*args, **kwargs)  # it was found in a class

    class FunctionWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
        __call__ = staticmethod(wrapper_of(original))

    return FunctionWrapper(original, bound)


@dataclass(frozen=True)
class _Patch:
    """One name that was changed."""

    owner: ModuleType | type
    attribute: str
    original: Any
    replacement: Any

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.attribute}"


@dataclass
class Patches:
    """All names that were changed, in order."""

    patches: list[_Patch] = field(default_factory=list)

    @classmethod
    def apply(cls) -> Patches:
        """Put the wrappers in place everywhere, or change nothing.

        A wrapper that somebody else has put over a creating function stays below ours, and torch's
        function gets one of ours too at the names that the other one left out.
        """
        put: dict[int, tuple[Any, Any]] = {}
        found: list[_Patch] = []
        for name, wrapper_of in wrappers().items():
            if "." not in name:
                for original in _originals(name):
                    put[id(original)] = (original, _wrapped(name, original, wrapper_of))
                continue
            owner, attribute = c10d.owner_of(name)
            original = vars(owner)[attribute]
            if isinstance(owner, type):
                found.append(_Patch(owner, attribute, original, wrapper_of(original)))
            else:
                put[id(original)] = (original, wrapper_of(original))
        found += [_Patch(owner, attribute, *put[key]) for owner, attribute, key in _bindings(put)]
        applied = cls()
        try:
            for patch in found:
                setattr(patch.owner, patch.attribute, patch.replacement)
                applied.patches.append(patch)
        except Exception:
            applied.undo()
            raise
        return applied

    def foreign(self) -> list[str]:
        """The changed names that no longer hold our wrapper, with what they hold."""
        return [
            f"{patch} is {now!r}"
            for patch in self.patches
            if (now := vars(patch.owner).get(patch.attribute)) is not patch.replacement
            and (
                isinstance(patch.owner, type)
                or sys.modules.get(patch.owner.__name__) is patch.owner
            )
        ]

    def undo(self) -> None:
        """Put the originals back: at the names changed, and where ours was imported since."""
        replaced = {id(patch.replacement): patch.original for patch in self.patches}
        for owner, attribute, key in list(_bindings(replaced)):
            setattr(owner, attribute, replaced[key])
        for patch in self.patches:
            if isinstance(patch.owner, type):
                setattr(patch.owner, patch.attribute, patch.original)
        self.patches.clear()


def _originals(name: str) -> list[Any]:
    """List the functions that torch's modules bind to the name, and those that they wrap."""
    found: list[Any] = []
    for home in c10d.creator_modules():
        value = vars(home).get(name)
        while value is not None and all(value is not other for other in found):
            found.append(value)
            value = getattr(value, "__wrapped__", None)
    return found


def _bindings(targets: Iterable[int]) -> Iterator[tuple[ModuleType, str, int]]:
    """Every name in every loaded module that is bound to one of the objects with these ids.

    Reads module dictionaries only: a module with a hostile ``__getattr__`` or ``__dir__`` is not
    asked anything. A quick set test skips the modules that hold none, which is nearly all.
    """
    ids = frozenset(targets)
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        names = module.__dict__
        if ids.isdisjoint(map(id, list(names.values()))):
            continue
        for attribute, value in list(names.items()):
            if id(value) in ids:
                yield module, attribute, id(value)
