"""Controls the process that supervises ranks. Pass this module as ``preload`` of a run.

A rank advances the supervisor's clock to reach a time limit at a chosen event. After a failure the
other ranks have a minute to end, and a minute to write Python stacks. Import it only in functions
of ranks: it patches the importing process.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

from reloadpg.testing import _rank


def _file(name: str) -> Path:
    """A file of the run. The supervisor has the environment of the last rank that it started."""
    return Path(os.environ["TMPDIR"], f"supervisor-{name}")


def _monotonic() -> float:
    ahead = _file("ahead")
    return time.monotonic() + (float(ahead.read_text()) if ahead.exists() else 0.0)


def _tell(self: _rank._Supervisor, message: object) -> None:
    _original_tell(self, message)
    _file("pids-sent").touch()


def _look(self: _rank._StartedRank) -> None:
    _original_look(self)
    if self.returned:
        _file("returned").touch()


def advance(seconds: float) -> None:
    """Advance the supervisor's clock, and wake it. Called in a rank, once per run."""
    part = _file("part")
    part.write_text(str(seconds))
    part.rename(_file("ahead"))
    os.kill(os.getppid(), signal.SIGCHLD)


def await_pids_sent() -> None:
    """Wait until the supervisor has sent the ranks' process ids to the caller. In a rank."""
    while not _file("pids-sent").exists():
        time.sleep(0.01)


def await_return() -> None:
    """Wait until the supervisor knows that the function of a rank has returned. In a rank."""
    while not _file("returned").exists():
        time.sleep(0.01)


_original_tell, _original_look = _rank._Supervisor._tell, _rank._StartedRank.look
_rank._Supervisor._tell = _tell  # type: ignore[method-assign]
_rank._StartedRank.look = _look  # type: ignore[method-assign]
_rank.time = SimpleNamespace(monotonic=_monotonic)  # type: ignore[assignment]
_rank.GRACE = _rank.STACK_LIMIT = 60.0
