"""What holds for all tests."""

from __future__ import annotations

import os

# A TCPStore server looks up the host name of each client; one that cannot be found costs it 5 s by
# default, in which it serves nobody. Read by the C library at its first look-up in a process.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
