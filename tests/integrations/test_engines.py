"""Hooks around stand-ins for engines: TRL's own vLLM, vLLM's workers, and its server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from helpers import worlds

import reloadpg
from reloadpg.integrations import colocated, sglang
from reloadpg.integrations.trl import offloaded_generation
from reloadpg.integrations.vllm import Server, WorkerGroups


class Llm:
    """A ``vllm.LLM`` with tensor parallelism; it records its calls and the states of the sets."""

    def __init__(self, tp_group: Any) -> None:
        self.calls: list[tuple[str, str, str]] = []
        self.fail = ""
        self.tp_group = tp_group

    def _called(self, name: str) -> None:
        sets = reloadpg.status().sets
        self.calls.append((name, sets["trainer"].state, sets["engine"].state))
        if name == self.fail:
            raise KeyError(name)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._called(f"wake_up {','.join(tags or [])}")
        return True

    def sleep(self, level: int = 1) -> None:
        self._called("sleep")

    def generate(self, prompts: Any) -> float:
        self._called("generate")
        return worlds.summed(self.tp_group, dist.get_rank())


class Generation:
    """The calls of TRL's ``VLLMGeneration`` (1.16), in their order."""

    def __init__(self, llm: Any, *, sleeps: bool, peft: bool) -> None:
        self.llm, self.enable_sleep_mode, self.tensor_parallel_size = llm, sleeps, 2
        self.model = SimpleNamespace(peft_config={}) if peft else SimpleNamespace()
        self.tp_group = dist.new_group([0, 1])

    def generate(self) -> tuple[Any, int]:
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["weights"])
        worlds.summed(self.tp_group, dist.get_rank())
        if self.enable_sleep_mode:
            self.llm.wake_up(tags=["kv_cache"])
        if hasattr(self.model, "peft_config"):
            worlds.summed(None, dist.get_rank())
        outputs = self.llm.generate("prompts")
        place = dist.get_rank(self.tp_group)
        if self.enable_sleep_mode:
            self.llm.sleep(level=2)
        return outputs, place


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "case", ["sleeps", "awake", "peft", "generate", "sleep", "wake_up kv_cache"]
)
def test_the_engine_of_trl_generates_with_the_trainers_groups_offloaded(
    case: str, rank: int
) -> None:
    """From before the KV cache is allocated until the engine sleeps; also if the engine raises."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT, sets="engine")
    worlds.init()
    with reloadpg.region("engine"):
        engine_group = dist.new_group([0, 1])
    llm = Llm(engine_group)
    generation = Generation(llm, sleeps=case != "awake", peft=case == "peft")
    trainer = SimpleNamespace(vllm_generation=generation)
    handle = offloaded_generation(trainer, block=colocated(engine_groups="engine"))
    if case in ("sleeps", "awake", "peft"):
        assert [generation.generate() for _ in range(2)] == [(3.0, rank)] * 2
        assert handle.cycles == 2
    else:
        llm.fail = case
        with pytest.raises(KeyError, match=case):
            generation.generate()
        assert handle.cycles == 1
        assert llm.calls[-1] == (case, "offloaded", "live")
    if case == "sleeps":
        rollout = [(f, "offloaded", "live") for f in ("wake_up kv_cache", "generate", "sleep")]
        first, later = (("wake_up weights", "live", state) for state in ("live", "offloaded"))
        assert llm.calls == [first, *rollout, later, *rollout]
    elif case == "awake":
        assert llm.calls == [("generate", "offloaded", "live")] * 2
    elif case == "peft":  # TRL uses the default group in between
        states = ["live", "live", "offloaded", "offloaded"]
        assert [state for _, state, _ in llm.calls] == states * 2
    assert worlds.summed(generation.tp_group, rank) == worlds.summed(None, rank) == 3.0
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="was given before"):
        offloaded_generation(trainer)
    handle.remove()
    handle.remove()
    assert generation.llm is llm


class Workers:
    """A ``vllm.LLM`` whose only worker is this process."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def collective_rpc(self, method: Any) -> list[Any]:
        return [method(self)]

    def sleep(self, level: int = 1) -> None:
        self.calls.append((f"sleep {level}", reloadpg.status().state))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append((f"wake_up {tags}", reloadpg.status().state))
        return tags is None


@pytest.mark.ranks(2)
def test_the_groups_of_workers_are_offloaded_while_the_engine_sleeps() -> None:
    """They are offloaded after the engine's ``sleep``, and reloaded before its ``wake_up``."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT)
    worlds.init()
    workers = Workers()
    engine = WorkerGroups(workers)
    colocated(engine)  # accepted
    assert [engine.sleep()[0]["offload/groups"] for _ in range(2)] == [1, 0]
    assert (engine.wake_up(["weights"]), engine.wake_up()) == (False, True)
    assert reloadpg.status().state == "live"
    engine.sleep(level=2)
    assert reloadpg.status().state == "offloaded"
    assert workers.calls == [
        ("sleep 1", "live"),
        ("sleep 1", "offloaded"),
        ("wake_up ['weights']", "live"),
        ("wake_up None", "live"),
        ("sleep 2", "live"),
    ]


def test_engines_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="no engine in this process"):
        offloaded_generation(SimpleNamespace())
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="RELOADPG_AUTOINSTALL=1"):
        WorkerGroups(Workers())
    with pytest.raises(reloadpg.errors.InvalidOptionError, match="no collective_rpc"):
        WorkerGroups(object())

    class Asynchronous(Workers):
        async def collective_rpc(self, method: Any) -> list[Any]:
            return []

    said = r"Asynchronous.: collective_rpc.. is asynchronous"
    with pytest.raises(reloadpg.errors.InvalidOptionError, match=said):
        WorkerGroups(Asynchronous())


class Routes(BaseHTTPRequestHandler):
    """Routes of an engine's server, which keeps the requests."""

    def _respond(self) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, body = self.answer(self.server, json.loads(sent) if sent else {})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    do_GET = do_POST = _respond

    def answer(self, server: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the response."""
        raise NotImplementedError

    def log_message(self, *_: Any) -> None: ...


class VllmRoutes(Routes):
    """The routes of vLLM's server that ``colocated`` needs."""

    def answer(self, server: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        route, _, query = self.path.partition("?")
        if route not in ("/is_sleeping", "/sleep", "/wake_up"):
            return 404, {}
        server.calls.append(f"{self.command} {self.path}")
        if route != "/is_sleeping":
            server.sleeping = route == "/sleep" or query == "tags=weights"
        return server.status, {"is_sleeping": server.sleeping}


@contextmanager
def serving(routes: type[Routes]) -> Iterator[Any]:
    """An HTTP server with these routes, in a thread."""
    with HTTPServer(("127.0.0.1", 0), routes) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        server.calls, server.sleeping, server.status = [], False, 200
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server() -> Iterator[Any]:
    with serving(VllmRoutes) as server:
        yield server


def test_a_server_is_driven_by_its_routes(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level and tags are in the query; a proxy of the environment is not used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    engine = Server(f"http://127.0.0.1:{server.server_port}/")
    server.calls.clear()
    colocated(engine, wake_tags=["weights"])  # accepted
    engine.sleep(level=2)
    awake = engine.wake_up(["weights"]), engine.wake_up(["weights", "kv_cache"]), engine.wake_up()
    assert awake == (False, True, True)
    assert [call for call in server.calls if "is_sleeping" not in call] == [
        "POST /sleep?level=2",
        "POST /wake_up?tags=weights",
        "POST /wake_up?tags=weights&tags=kv_cache",
        "POST /wake_up",
    ]


def test_a_server_that_refuses_or_is_not_there(server: Any) -> None:
    """The error names the request; a server without the routes is refused at the beginning."""
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(
        reloadpg.errors.InvalidOptionError, match="Start vLLM's server with VLLM_SERVER"
    ):
        Server(f"{url}/v1")
    engine = Server(url)
    server.status = 500
    with pytest.raises(
        reloadpg.ReloadpgError, match=rf"POST {url}/sleep\?level=1 failed.* 500.*is_slee"
    ):
        engine.sleep()
    with pytest.raises(reloadpg.ReloadpgError, match=r"GET .*/is_sleeping.* failed: .*500"):
        Server(url)
    for wrong in ("127.0.0.1:8000", 8000):
        with pytest.raises(reloadpg.errors.InvalidOptionError, match="not an address"):
            Server(wrong)
    server.shutdown()
    server.server_close()
    with pytest.raises(reloadpg.ReloadpgError, match=r"failed: .*refused"):
        Server(url)


class SglangRoutes(Routes):
    """SGLang's routes (0.5.23), as strict as its scheduler: it ends where that one would.

    Attributes of the server: ``released`` tags, ``busy`` (how often a flush finds requests),
    ``saves`` memory, ``key``, ``ended``, and ``calls``, with the state of the trainer's groups.
    """

    TAGS = ("kv_cache", "weights", "cuda_graph")

    def answer(self, server: Any, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        tags, calls, state = body.get("tags") or self.TAGS, server.calls, reloadpg.status().state
        status = 500 if server.ended else 200
        found: dict[str, Any] = {"message": "no"}
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            status = 401
        elif self.path == server.info_route:
            found = {"enable_memory_saver": server.saves}
        elif self.path == "/abort_request" and body["abort_all"]:
            calls.append(("abort", state))
        elif self.path == "/flush_cache":
            if server.busy:
                server.busy, status = server.busy - 1, 400
        elif self.path == "/release_memory_occupation":
            server.ended = server.busy > 0 or bool(server.released.intersection(tags))
            server.released |= set(tags)
            calls.append((f"release {len(tags)}", state))
        elif self.path == "/resume_memory_occupation":
            server.ended = not server.released.issuperset(tags)
            server.released -= set(tags)
            calls.append((f"resume {','.join(tags)}", state))
        else:
            status = 404
        return status, found


@contextmanager
def sglang_server() -> Iterator[Any]:
    with serving(SglangRoutes) as server:
        server.released, server.busy, server.saves, server.key = set(), 0, True, ""
        server.ended, server.info_route = False, "/server_info"
        yield server


def test_a_server_of_sglang_is_driven_by_tags() -> None:
    """Repeated calls send nothing: the scheduler would end. A busy engine is waited for."""
    with sglang_server() as server:
        engine = sglang.Server(server.url)
        colocated(engine, wake_tags=["weights"])  # accepted
        server.busy = 3
        for _ in range(2):
            engine.release_memory_occupation()
        woken = [engine.resume_memory_occupation(tags) for tags in (["weights"], ["weights"], None)]
        assert woken == [False, False, True]
        assert engine.resume_memory_occupation()
        assert [call for call, _ in server.calls] == [
            "abort",
            "release 3",
            "resume weights",
            "resume kv_cache,cuda_graph",
        ]
        asleep = sglang.Server(server.url, asleep=True)
        server.released = set(SglangRoutes.TAGS)
        assert asleep.resume_memory_occupation()
        assert not server.ended
        server.busy = 10**6
        engine = sglang.Server(server.url, timeout=2.0)
        with pytest.raises(reloadpg.ReloadpgError, match=r"still runs requests .*not released"):
            engine.release_memory_occupation()
        server.ended = True
        with pytest.raises(
            reloadpg.ReloadpgError, match=r"POST .*/abort_request failed: .*500.*no"
        ):
            engine.release_memory_occupation()


def test_a_server_of_sglang_that_cannot_release_memory_is_refused() -> None:
    """One with a key is reached with it; one of before 0.5.10 has another route."""
    with sglang_server() as server:
        server.saves = False
        with pytest.raises(reloadpg.errors.InvalidOptionError, match="Start it with this option"):
            sglang.Server(server.url)
        server.saves, server.key = True, "secret"
        with pytest.raises(reloadpg.ReloadpgError, match=r"server_info failed: .*401"):
            sglang.Server(server.url)
        sglang.Server(server.url, api_key="secret")
        server.key, server.info_route = "", "/get_server_info"
        sglang.Server(server.url)
        server.info_route = ""
        with pytest.raises(reloadpg.ReloadpgError, match=r"get_server_info failed: .*404"):
            sglang.Server(server.url)
        with serving(VllmRoutes) as other, pytest.raises(reloadpg.ReloadpgError, match="404"):
            sglang.Server(other.url)


@pytest.mark.ranks(2)
def test_a_trainer_wakes_a_server_of_sglang_by_tags(rank: int) -> None:
    """Its weights once the groups are offloaded, the rest after they were live for an update."""
    reloadpg.install(backends={"gloo"}, timeout=worlds.TIMEOUT, sets="server")
    worlds.init()
    with sglang_server() as server:
        engine = sglang.Server(server.url) if rank == 0 else None
        if engine is not None:
            engine.release_memory_occupation()
        rollout = colocated(engine, wake_tags=["weights"], engine_groups="server")
        for _ in range(2):
            with rollout:
                with rollout.groups_live():
                    assert worlds.summed(None, rank) == 3.0
                assert rollout.wake_up() is (None if rank else True)
            assert worlds.summed(None, rank) == 3.0
        cycle = ["resume weights", "resume kv_cache,cuda_graph", "abort", "release 3"]
        offloaded = [(call, "offloaded") for call in cycle]
        starts = [("abort", "live"), ("release 3", "live")]
        assert server.calls == ([] if rank else [*starts, *offloaded, *offloaded])
