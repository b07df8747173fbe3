"""Patches of the functions that create groups, at every name they are bound to.

Each function gets one wrapper, which replaces it at every name that held torch's function: in
``torch.distributed`` and its modules, and in any loaded module that imported it early (found by
identity in ``sys.modules``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt

from ..c10d import creation
from .borrowed import recorders
from .wrappers import Wrapper, wrappers


def _wrapped(name: str, original: Any, wrapper_of: Wrapper) -> Any:
    """Wrap a function of a module.

    A job of 16,384 ranks creates 100,000 groups, and a group of which the rank is not a member
    takes torch 8 us. Wrapt's call takes 2 us: it looks up ``__self__``, which a module's function
    lacks. The function that torch's ``new_group`` calls with keywords gets a plain wrapper.
    """
    if name.startswith("_") and "." not in name:
        return functools.wraps(original)(wrapper_of(original))

    def bound(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapper_of(wrapped)(*args, **kwargs)  # bound as a class attribute

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
    def apply(cls, after_world: Callable[[], object]) -> Patches:
        """Install all wrappers, or change nothing.

        ``after_world`` is called when a new default group is reloadable.

        If another library has wrapped a creating function, its wrapper stays inside ours. Names
        that the other library left unchanged get our wrapper around torch's function.
        """
        put: dict[int, tuple[Any, Any]] = {}
        planned: list[_Patch] = []
        for name, wrapper_of in wrappers(after_world).items():
            for original in _originals(name):
                put[id(original)] = (original, _wrapped(name, original, wrapper_of))
            owner, attribute = creation.owner_of(name) if "." in name else (None, name)
            if isinstance(owner, type):
                original = vars(owner)[attribute]
                planned.append(_Patch(owner, attribute, original, wrapper_of(original)))
        planned += [_Patch(owner, attribute, *put[key]) for owner, attribute, key in _bindings(put)]
        for owner, attribute, replacement in recorders():
            planned.append(_Patch(owner, attribute, vars(owner)[attribute], replacement))
        applied = cls()
        try:
            for patch in planned:
                setattr(patch.owner, patch.attribute, patch.replacement)
                applied.patches.append(patch)
        except Exception:
            applied.undo()
            raise
        return applied

    def foreign(self) -> list[str]:
        """List the changed names that no longer hold our wrapper, with their current value."""
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
        """Restore the originals at the changed names, and where a wrapper was imported since."""
        replaced = {id(patch.replacement): patch.original for patch in self.patches}
        for owner, attribute, key in list(_bindings(replaced)):
            setattr(owner, attribute, replaced[key])
        for patch in self.patches:  # methods, and modules that are no longer loaded
            setattr(patch.owner, patch.attribute, patch.original)


def wrapped_names() -> list[str]:
    """List what an installation wraps: functions by name, then methods with their class. Local."""
    return [*wrappers(), *(f"{owner.__name__}.{name}" for owner, name, _ in recorders())]


def _originals(name: str) -> list[Any]:
    """List the functions that torch's modules bind to the name, and what they wrap."""
    functions: list[Any] = []
    homes: tuple[Any, ...] = creation.creator_modules()
    if "." in name:
        owner, name = creation.owner_of(name)
        homes = () if isinstance(owner, type) else (owner,)
    for home in homes:
        value = vars(home).get(name)
        while value is not None and all(value is not other for other in functions):
            functions.append(value)
            value = getattr(value, "__wrapped__", None)
    return functions


def _bindings(targets: Iterable[int]) -> Iterator[tuple[ModuleType, str, int]]:
    """Yield every name in every loaded module that is bound to one of the objects with these ids.

    Reads module dictionaries only: no ``__getattr__`` or ``__dir__`` of a module is called.
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
