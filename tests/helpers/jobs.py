"""Jobs on the backend of the test world in which every group is reloadable."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import reloadpg
from helpers import worlds

TIMEOUT = timedelta(seconds=30)


def install(**options: Any) -> None:
    """Install for the backend of the world, with these options."""
    reloadpg.install(**{"backends": {worlds.BACKEND}, "timeout": TIMEOUT, **options})


def start(**options: Any) -> None:
    """Install, and create the default group."""
    install(**options)
    worlds.init(timeout=TIMEOUT)


def one_cycle() -> None:
    """Offload and reload once. Collective."""
    reloadpg.offload()
    reloadpg.reload()
