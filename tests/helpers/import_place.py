"""Where this module was imported: in which process, and whether torch was there before."""

import os
import sys

PROCESS = os.getpid()
AFTER_TORCH = "torch" in sys.modules
