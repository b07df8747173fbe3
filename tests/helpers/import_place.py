"""Records the process in which it was imported, and whether torch was imported before."""

import os
import sys

PROCESS = os.getpid()
AFTER_TORCH = "torch" in sys.modules
