"""What a run needs before its ranks start: the pickled call, environments, a port, a directory."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

_JOB_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    }
)
"""Set by a launcher that the caller itself may run under; they would mislead the ranks."""


class _CallPickler(pickle.Pickler):
    """Notes the modules that the receiver has to import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.module_names: dict[str, None] = {}

    def reducer_override(self, obj: Any, /) -> Any:
        named = obj if isinstance(getattr(obj, "__qualname__", None), str) else type(obj)
        name = getattr(named, "__module__", None)
        if isinstance(name, str):
            self.module_names[name] = None
        return NotImplemented


class ResultUnpickler(pickle.Unpickler):
    """Reads results of ranks, in which this process's `__main__` is called `__mp_main__`."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return super().find_class(
            "__main__" if module_name == "__mp_main__" else module_name, global_name
        )


def pickle_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the pickled call, and the (name, file) of each module that it refers to.

    Raises TypeError if the function or an argument cannot be pickled, or if the function was
    typed into an interactive session, where no rank can find it.
    """
    if not callable(fn):
        raise TypeError(f"fn must be callable, got {fn!r}; nothing was started")
    parts = {"fn": fn, "args": args, "kwargs": kwargs}
    for name, part in parts.items():
        try:
            pickle.dumps(part)
        except Exception as error:
            hint = "fn must be a module-level function" if name == "fn" else "pass plain values"
            raise TypeError(
                f"{name} cannot be pickled ({error}); nothing was started; {hint}"
            ) from error
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    pickler.dump((fn, args, kwargs))
    modules = []
    for name in pickler.module_names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            modules.append((name, os.path.abspath(file)))
        elif name == "__main__":
            raise TypeError(
                "fn or an argument is defined in an interactive __main__, which ranks cannot "
                "import; nothing was started; put it in a file"
            )
    return buffer.getvalue(), modules


def environments(
    world_size: int, port: int, store: str, env: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the environment that all ranks share, and what each rank has besides."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    environ.update(
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
    )
    if store == "parent":
        # Both are what torchelastic's agent sets; older torch reads the count as well.
        environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    for variables in (environ, *ranks):
        for name, value in env.items():
            if value is None:
                variables.pop(name, None)
            elif variables is environ or name in variables:
                variables[name] = value
    return {"environ": environ, "rank_environ": ranks}


@contextlib.contextmanager
def store_port(store: str) -> Iterator[int]:
    """Yield the port of the run's TCPStore, which no other process can take meanwhile.

    `parent`: a TCPStore server in this process, on a loopback socket that was bound to port 0 and
    handed over to it. `rank0`: the port is bound here but not listened on, with SO_REUSEADDR as
    the store's own socket has it; Linux then lets rank 0 bind and listen, and gives the port to
    nobody who asks for a free one.
    """
    if store == "rank0":
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            yield reserved.getsockname()[1]
        return
    # Imported here, because the rest of this module has no need of torch.
    distributed: Any = importlib.import_module("torch.distributed")
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    server = [
        distributed.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
    ]
    try:
        yield port
    finally:
        server.clear()  # a traceback that is kept must not keep the server


@contextlib.contextmanager
def job_dir() -> Iterator[Path]:
    """Yield a new directory, and remove it."""
    path = Path(tempfile.mkdtemp(prefix="reloadpg-ranks-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def tail(path: Path, limit: int) -> str:
    """Return the last `limit` bytes of a file as text; an empty string if there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - limit, 0))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
