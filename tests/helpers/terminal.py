"""Runs a command on a separate terminal, and reads its output."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

from helpers.cli_process import LIMIT, environment

_ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command whose stdout is a terminal. ``raw`` is its whole output."""

    def __init__(self, process, master):
        self.process = process
        self.master = master
        self.raw = b""

    @property
    def text(self):
        """The output without control sequences."""
        return _ESCAPE.sub(b"", self.raw).decode(errors="replace").replace("\r", "")

    def read_until(self, condition):
        """Read until the condition holds or the command ends; fail after the time limit."""
        deadline = time.monotonic() + LIMIT
        while not condition(self):
            assert time.monotonic() < deadline, f"not seen within {LIMIT} s:\n{self.text}"
            if not select.select([self.master], [], [], 1.0)[0]:
                continue
            try:
                data = os.read(self.master, 1 << 16)
            except OSError:  # on Linux: the other side is closed
                return
            self.raw += data


@contextmanager
def on_terminal(*arguments, columns=160, lines=40, **variables):
    """Run ``python -m reloadpg`` on a terminal of this size."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    env = environment(TERM="xterm-256color", **variables)
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        env.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-m", "reloadpg", *map(str, arguments)],
        env=env,
        stdin=slave,
        stdout=slave,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
