"""Makes the helper modules of this folder importable, in pytest and in the ranks it starts."""

from __future__ import annotations

import sys
from pathlib import Path

# The importlib import mode leaves a test's own folder off the path; ranks get pytest's path.
sys.path.insert(0, str(Path(__file__).parent))
