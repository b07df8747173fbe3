"""Each way to end a process, in each state: it ends as it does without reloadpg."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from helpers.sampling import sampled

pytestmark = pytest.mark.matrix

PRELUDE = """
import asyncio, atexit, os, signal, sys
import torch.distributed as dist
import reloadpg
from reloadpg.testing import faults, simulated
from contextlib import nullcontext
from datetime import timedelta
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if INSTALLED:
    simulated.register()
    reloadpg.install(backends={BACKEND}, timeout=timedelta(seconds=SECONDS))
dist.init_process_group(BACKEND if INSTALLED else "gloo", rank=rank, world_size=size)
group = dist.new_group([0, 1])
def meet(where="connected"):
    # On the store: a rank that ends while the other one still connects makes that fail.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{where}/{rank}", "1")
    store.wait([f"{where}/{other}" for other in range(size)])
meet()
def block():
    return reloadpg.offloaded() if INSTALLED else nullcontext()
def call(name, **options):
    return getattr(reloadpg, name)(**options) if INSTALLED else None
def rollouts():
    with block():
        yield 1
class Owner:
    def __init__(self):
        self.block = block()
        self.block.__enter__()
    def __del__(self):
        self.block.__exit__(None, None, None)
def end():
"""

WAYS = {
    "return": "return",
    "exit": "sys.exit(3)",
    "exception": "raise ValueError('of the program')",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "_exit": "os._exit(4)",
    "suspended generator": "global kept; kept = rollouts(); next(kept)",
    "coroutine": """
    async def work():
        with (reloadpg.offloaded() if INSTALLED else nullcontext()):
            sys.exit(3)
    asyncio.run(work())
    """,
    "__del__": "global kept; kept = Owner()",
    "exit handler": "kept = rollouts(); next(kept); atexit.register(kept.close)",
}
"""The ways to end; each is the body of a function, in which ``rollouts`` has an open block."""

STATES = {
    "live": "",
    "offloaded": "call('offload')",
    "in the background": "call('offload'); pending = call('reload', wait=False); meet('begun')",
}

BLOCKS = {way for way, body in WAYS.items() if "rollouts" in body or "Owner" in body} | {
    "coroutine"
}
"""They open a block, which is refused during another operation."""


class Ended(NamedTuple):
    codes: list[int | None]
    stderr: list[str]


Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program as the two ranks of a job, until they have ended."""

    def run(
        body: str, *, installed: bool = True, backend: str = "gloo", seconds: float = 60
    ) -> Ended:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        program = f"INSTALLED, BACKEND, SECONDS = {installed}, {backend!r}, {seconds}\n"
        variables = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", f"{program}{PRELUDE}{body}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**variables, "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=120)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        return Ended([process.returncode for process in ranks], [*map(_plain, said)])

    return run


NOTICES = re.compile(
    r"hostname of the client socket cannot be retrieved"  # a resolver that fails now and then
    r"|^\[Gloo\] Rank \d is connected to "  # printed by gloo for each connected group, before 2.9
    r"|\[c10d\] waitForInput: "  # torch polls a socket again, on a machine with much other work
    r"|is multi-threaded, use of fork\(\) may lead to deadlocks"  # Python 3.12 and later
)


PEER_ENDED = re.compile(r"reload\(wait=False\) has failed: PeerFailedError\(\"reload: rank \d died")
"""The log of the rank that ends last: its reload in the background has seen the other one end."""


def _plain(stderr: str) -> str:
    """What was printed, without the places in the program and torch's notices about connections."""
    lines = (re.sub(r"^\[rank\d\]: ?", "", line) for line in stderr.splitlines())
    kept = (line for line in lines if line and not NOTICES.search(line))
    return "\n".join(line for line in kept if not line.startswith("  "))


@pytest.fixture
def without(run: Run) -> Callable[[str], Ended]:
    """Runs a way to end without reloadpg."""
    return lambda way: run(f"    {WAYS[way]}\nend()", installed=False)


STARTS_NO_THREADS = sys.version_info[:2] == (3, 12)
"""Python 3.12 starts no thread once the main program has ended, in an exit handler or before."""

NO_THREAD = "can't create new thread at interpreter shutdown"

CASES = [
    (way, state)
    for way in WAYS
    for state in STATES
    if not (way in BLOCKS and state == "in the background")
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "state"), CASES)
def test_a_process_ends_as_without_reloadpg(
    run: Run, without: Callable[[str], Ended], way: str, state: str
) -> None:
    """Its exit code and what it prints are the same, and it does not hang."""
    ended = run(f"    {WAYS[way]}\n{STATES[state]}\nend()")
    plain = without(way)
    if state == "in the background":
        lines = [text.splitlines() for text in ended.stderr]
        kept = ["\n".join(one for one in text if not PEER_ENDED.search(one)) for text in lines]
        ended = Ended(ended.codes, kept)
    if STARTS_NO_THREADS and (state == "in the background" or way == "exit handler"):
        assert ended.codes == plain.codes, ended
        assert all(NO_THREAD in text for text in ended.stderr if text != plain.stderr[0]), ended
    else:
        assert ended == plain


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit", "SIGTERM", "SIGINT", "_exit"])
def test_a_process_ends_within_an_operation(
    run: Run, without: Callable[[str], Ended], way: str
) -> None:
    """In a callback of an offload, on all ranks; the exit code is that of the program."""
    meet = "reloadpg.on_offload(lambda: meet('within'))"  # none is late, and only hears of it
    ended = run(f"    {WAYS[way]}\n{meet}\nreloadpg.on_offload(end)\nreloadpg.offload()")
    assert ended.codes == without(way).codes, ended


IGNORED = re.compile(
    # The latter in Python 3.14 and later.
    r"Exception ignored (?:in:|while calling deallocator) <function Last.__del__"
)


@pytest.mark.slow
@pytest.mark.parametrize("handler", sampled([True, False], True))
def test_an_operation_while_the_interpreter_exits(run: Run, handler: bool) -> None:
    """It works in an exit handler, where Python starts threads; otherwise its error says why."""
    ended = run(f"""
    reloadpg.reload()
    print(reloadpg.status().state)
class Last:
    def __del__(self):
        end()
reloadpg.offload()
reloadpg.reload()  # a first use imports it, which a finalizer cannot
reloadpg.offload()
kept = Last()
{"atexit.register(end)" if handler else ""}
""")
    assert ended.codes == [0, 0], ended
    for text in ended.stderr:
        in_handler, *later = IGNORED.split(text, maxsplit=1)
        assert "reload was called while the interpreter exits" in "".join(later), text
        if handler and not STARTS_NO_THREADS:
            assert in_handler == "live\n", text
        elif handler:
            assert NO_THREAD in in_handler


@pytest.mark.slow
@pytest.mark.parametrize("in_block", sampled([False, True], True))
def test_a_forked_child_ends(run: Run, in_block: bool) -> None:
    """Leaving the parent's block in the child does nothing; the parent's groups work afterwards."""
    ended = run(f"""
    if os.fork() == 0:
        sys.exit(3)
    _, status = os.wait()
    return os.waitstatus_to_exitcode(status)
with block() if {in_block} else nullcontext():
    code = end()
dist.barrier()
sys.exit(code)
""")
    assert ended == Ended([3, 3], ["", ""])


@pytest.mark.slow
def test_a_process_ends_while_a_thread_is_stuck_in_a_rebuild(run: Run) -> None:
    """The rebuild has timed out and still blocks its thread."""
    ended = run(
        """    pass
reloadpg.offload()
if rank == 1:
    faults.inject(faults.Fault("create", "stall"))
try:
    reloadpg.reload()
except reloadpg.RendezvousTimeoutError:
    sys.exit(3)
""",
        backend="sim",
        seconds=5,
    )
    assert ended.codes == [3, 3], ended
