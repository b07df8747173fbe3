"""``doctor``: the launcher of this process, and the ranks of a running job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from .findings import Finding
from .records import read_directory
from .status import JobView

__all__ = ["check_job", "check_launcher"]


def check_launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Which launcher started this process, as which rank."""
    from ..environment.detect import detect_environment

    try:
        found = detect_environment(environ)
    except Exception as error:
        yield Finding("launcher", "problem", str(error), "start the job through its launcher")
        return
    if found.source == "single":
        yield Finding("launcher", "note", "none: this is a single process")
        return
    yield Finding(
        "launcher",
        "ok",
        f"{found.source}: rank {found.rank} of {found.world_size}, node {found.node_rank} of "
        f"{found.num_nodes}, rendezvous at {found.master_addr}:{found.master_port}",
    )


def check_job(directory: Path) -> Iterator[Finding]:
    """What does not fit together among the ranks that keep a file in a status directory."""
    view = JobView(read_directory(directory))
    if not view.ranks:
        yield Finding("job", "problem", view.reading.absence, view.reading.remedy)
        return
    troubles = [fact for fact in view.facts() if fact.tone in ("warning", "bad")]
    for fact in troubles:
        level = "problem" if fact.tone == "bad" else "warning"
        yield Finding("job", level, f"{fact.name}: {fact.text}", fact.remedy)
    for record in view.ranks:
        if record.error:
            yield Finding("job", "warning", f"rank {record.rank}: {record.error}")
    for failure in view.reading.failures:
        yield Finding("job", "warning", f"unreadable: {failure}")
    if not troubles:
        yield Finding(
            "job", "ok", f"{len(view.ranks)} ranks, all with reloadpg at the same generation"
        )
