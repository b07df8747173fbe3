"""Consumers on the simulated accelerator, with ``install()`` as it is by default.

Its groups are reloadable and gloo's are not, as NCCL's and gloo's are in a real job. Its results
are gloo's, so they are compared with those of plain torch on gloo.
"""

from __future__ import annotations

import pytest
from helpers import worlds
from helpers.consumer_run import SIM_PLAIN, SIM_RELOADED
from helpers.consumer_tests import Consumer, ConsumerTests
from test_checkpoint import checkpoint_program


@worlds.unbound_only
@pytest.mark.slow
class TestCheckpointWhileOffloaded(ConsumerTests):
    """Sharded state is saved, loaded and saved asynchronously while offloaded."""

    consumer = Consumer(checkpoint_program, 2, plain=SIM_PLAIN, reloaded=SIM_RELOADED)
