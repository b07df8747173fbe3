"""Runs a function in a forked process."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def forked(body: Callable[[], object]) -> str:
    """What a function returns in a forked process, as text, or its traceback. Its output is lost:
    gloo prints a notice on torch 2.8.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            text = str(body())
        except BaseException:
            text = traceback.format_exc()[-3000:]
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text
