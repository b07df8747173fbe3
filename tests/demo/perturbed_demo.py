"""Runs the demo once for each fault in its ranks: ``python perturbed_demo.py DIRECTORY``.

Leaves there, for each, ``FAULT.json``: exit code, output, errors, and the results it wrote. One
process for all, since torch is then imported once.
"""

import json
import os
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
import torch.distributed as dist

import reloadpg
from reloadpg.__main__ import main
from reloadpg.demo import job, launch, trainer
from reloadpg.testing import simulated

_kept = []


def other_loss(settings):
    """On rank 1 the losses of the run that offloads are a few units in the last place larger."""
    if settings.offload and os.environ["RANK"] == "1":
        loss = trainer.surrogate_loss
        trainer.surrogate_loss = lambda *args: loss(*args) * (1 + 2**-22)
    return job.main(settings)


def kept_memory(settings):
    """What the communicators gave back is taken again while they are released."""
    reloadpg.on_offload(lambda: _kept.append(torch.ones(simulated.stats().held_bytes // 4)))
    return job.main(settings)


def no_offload(settings):
    """Offloading does nothing."""
    job.reloadpg.offload = lambda: reloadpg.Report("offload", False, 0)
    return job.main(settings)


def failing_rank(settings):
    """Rank 1 raises in its first iteration."""

    def evaluate(*_):
        raise ValueError("broken on purpose")

    if os.environ["RANK"] == "1":
        job.evaluate = evaluate
    return job.main(settings)


def failing_rank_reported_last(settings):
    """Rank 1 raises, and rank 0, which loses its peer, is the one that the launcher reports."""
    try:
        return failing_rank(settings)
    except ValueError:
        dist.destroy_process_group()
        signal.pause()  # the launcher ends this process once it has seen rank 0's error


def killed_rank(settings):
    """Rank 1 is killed as soon as the job has formed."""
    if os.environ["RANK"] == "1":
        job.Job = lambda *_: (dist.barrier(), os.kill(os.getpid(), signal.SIGKILL))
    else:
        job.Job = lambda *_: (dist.barrier(), signal.pause())
    return job.main(settings)


FAULTS = (
    other_loss,
    kept_memory,
    no_offload,
    failing_rank,
    failing_rank_reported_last,
    killed_rank,
)


def run(fault, directory):
    """The demo with a fault: what ``python -m reloadpg demo`` would end with."""
    launch.ENTRYPOINT = fault
    results = directory / "results"
    results.unlink(missing_ok=True)
    arguments = ["--accelerator", "simulated", "--ranks", "2", "--cycles", "1"]
    with redirect_stdout(StringIO()) as output, redirect_stderr(StringIO()) as errors:
        code = main(["demo", *arguments, "--json", str(results)])
    return {
        "code": code,
        "output": output.getvalue(),
        "errors": errors.getvalue(),
        "results": json.loads(results.read_text()) if results.exists() else None,
    }


if __name__ == "__main__":
    for fault in FAULTS:
        ended = run(fault, Path(sys.argv[1]))
        Path(sys.argv[1], f"{fault.__name__}.json").write_text(json.dumps(ended))
