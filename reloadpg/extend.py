"""What integrations and other packages may build on, beyond the functions that programs call."""

from __future__ import annotations

from .groups.managed import ManagedGroup as ManagedGroup
from .groups.offloaded import GroupState as GroupState
from .groups.proxy import managed as managed
from .lifecycle.install import Installation as Installation
from .lifecycle.install import reload_world as reload_world

__all__ = ["GroupState", "Installation", "ManagedGroup", "managed", "reload_world"]
