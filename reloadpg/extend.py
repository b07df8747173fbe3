"""What integrations and other packages may build on, beyond the functions that programs call."""

from __future__ import annotations

from .groups.proxy import GroupState as GroupState
from .lifecycle.install import Installation as Installation

__all__ = ["GroupState", "Installation"]
