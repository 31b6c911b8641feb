"""Tests of VLLMServer with a server in this process that loses connections and hangs."""

from __future__ import annotations

import gc
import json
import socket
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from support.waiting import PATIENCE
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineLoad, EngineTimeoutError, Request
from torchrl_rloo.engines.vllm_server import VLLMServer

REQUEST = Request([1, 2], limit=1, seed=0)
CHOICE = {
    "token_ids": [3],
    "logprobs": {"content": [{"logprob": -1.0, "top_logprobs": [{"logprob": -1.0}, {"logprob": -9999.0}]}]},
    "finish_reason": "stop",
    "weight_versions": [{"version": "0", "start": 0, "end": 1}],
}
REPLIES = {
    "/weight_info": {"weight_version": "default"},
    "/get_world_size": {"world_size": 1},
    "/v1/models": {"data": [{"max_model_len": 64}]},
    "/reset_prefix_cache": {"success": True},
    "/collective_rpc": {"results": [{"rank": 0}]},
    "/inference/v1/generate": {"choices": [CHOICE]},
}


class Faulty(ThreadingHTTPServer):
    """Server that resets the next connections to a path, as often as ``resets`` says, or hangs."""

    daemon_threads = True

    def __init__(self):
        self.resets: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, *_: object) -> None:
        """Print nothing about clients that did not wait."""


class Handler(BaseHTTPRequestHandler):
    """Handler of :class:`Faulty`."""

    server: Faulty

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.calls[path] += 1
        if self.server.resets[path]:
            self.server.resets[path] -= 1
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()  # with a reset
            return
        self.server.answers.wait(PATIENCE)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(REPLIES.get(path, {})).encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Faulty]:
    with Faulty() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()


@pytest.fixture
def engine(server: Faulty) -> Iterator[VLLMServer]:
    with VLLMServer(f"http://127.0.0.1:{server.server_port}", request_timeout=0.5, connect_timeout=5.0) as engine:
        yield engine


def test_a_reset_connection_is_no_death(engine: VLLMServer, server: Faulty):
    server.resets["/inference/v1/generate"] = server.resets["/health"] = 1
    assert engine.generate([REQUEST])[0].tokens == [3]
    server.resets["/collective_rpc"] = 1
    engine.check_health()
    server.resets["/collective_rpc"] = 1
    with pytest.raises(EngineError, match="/collective_rpc lost its connection: .*the server answers others") as caught:
        engine._rpc("update_weights", timeout=PATIENCE)  # may have had its effect, so it is not repeated
    assert not isinstance(caught.value, EngineDeadError)
    assert engine.load() == EngineLoad(tokens=1)
    server.resets.update({"/collective_rpc": 9, "/health": 9})
    with pytest.raises(EngineDeadError, match="no server answers"):
        engine.check_health()


def test_a_hung_server_is_found_and_requests_reach_their_deadlines(engine: VLLMServer, server: Faulty):
    server.answers.clear()
    future = engine.submit(REQUEST)
    with pytest.raises(EngineDeadError, match="hangs: .*collective_rpc|hangs: weight_report") as caught:
        engine.check_health(timeout=0.2)
    assert isinstance(caught.value.__cause__, EngineTimeoutError) and engine.load().running == 1
    with pytest.raises(EngineTimeoutError, match="request_timeout=0.5 s of sampling"):
        future.result(PATIENCE)


def test_restarts_keep_nothing_of_earlier_connections(engine: VLLMServer):
    earlier = [weakref.ref(engine._loop)]
    for _ in range(3):
        engine.restart()
        earlier.append(weakref.ref(engine._loop))
    gc.collect()
    assert [reference() is not None for reference in earlier] == [False] * 3 + [True]
    assert engine.start_count == 3 and engine.generate([REQUEST])[0].tokens == [3]
