"""Code of this library in programs that torch compiles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def skip_in_compiled_code(functions: Iterable[Any], *, callees: bool = False) -> None:
    """Exclude these Python functions from ``torch.compile``; what they call is traced.

    With ``callees``, what they call is excluded too.

    After a graph break torch runs its own function eagerly, which calls the group's method. A plain
    group's method is in C++. A reloadable group's is a Python frame, which Dynamo would compile:
    reading an attribute of the group, an opaque object for it, would be an error. Does not
    import ``torch._dynamo``. Seen on 2.8, 2.13 and 2.15.
    """
    from torch._C._dynamo import eval_frame

    action = eval_frame._FrameAction
    rest = action.SKIP if callees else action.DEFAULT
    skip = eval_frame._FrameExecStrategy(action.SKIP, rest)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, skip)


def skip_methods_in_compiled_code(*classes: type) -> None:
    """Exclude the methods and properties of these classes, as above."""
    for cls in classes:
        members = vars(cls).values()
        functions = [function for one in members for function in (one, getattr(one, "fget", None))]
        skip_in_compiled_code(function for function in functions if hasattr(function, "__code__"))
