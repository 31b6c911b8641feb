"""Access to vLLM servers: the middleware in a real HTTP server, and the file of the key."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocket

from support.waiting import PATIENCE, wait_until
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.vllm_access import HOSTS, KEY, ServerAccess, client_key, server_key
from torchrl_rloo.engines.vllm_server import VLLMServer, server_command, server_environment

TOKEN = "correct-horse-battery-staple-0123456789"
GOOD = f"Authorization: Bearer {TOKEN}"
HOST = "Host: 127.0.0.1"
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"]


class Site:
    """Server of an application that notes what it serves."""

    def __init__(self) -> None:
        self.served: list[str] = []
        routes = [Route("/{path:path}", self._serve, methods=METHODS), WebSocketRoute("/{path:path}", self._talk)]
        app = Starlette(routes=[Mount("/mounted", routes=list(routes)), *routes])
        app.add_middleware(ServerAccess)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="on")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    async def _serve(self, request: Request) -> PlainTextResponse:
        self.served.append(f"{request.method} {request.url.path}")
        return PlainTextResponse("served")

    async def _talk(self, websocket: WebSocket) -> None:
        self.served.append("websocket")
        await websocket.accept()

    def send(self, line: str, *headers: str, body: bytes = b"") -> int:
        """Send a request, and return the status of the reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            text = "\r\n".join([f"{line} HTTP/1.1", *headers, "Connection: close", "", ""])
            connection.sendall(text.encode("latin-1") + body)
            return int(connection.recv(4096).split()[1])

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY, TOKEN)
        patch.setenv(HOSTS, "trainer.example, Other.Example")
        made = Site()
        yield made
        made.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/collective_rpc", "/pause", "/update_weights", "/server_info", "/docs", "/openapi.json", "/metrics",
     "/", "*"],
)  # fmt: skip
def test_every_method_and_path_wants_the_key(site: Site, method: str, path: str):
    before = len(site.served)
    assert site.send(f"{method} {path}", HOST) == 401
    assert len(site.served) == before
    if path != "*":
        assert site.send(f"{method} {path}", HOST, GOOD) == 200


@pytest.mark.parametrize(
    "path",
    ["//health", "/health/", "/health//", "/HEALTH", "/Health", "/health;a", "/health/../pause", "/./health", "/ping/",
     "/health%2f", "/health%2f..%2fpause", "/health%00", "/health%20", "/%2fhealth", "/v1/health", "/mounted/health",
     "//collective_rpc", "/collective_rpc/", "/COLLECTIVE_RPC", "/%63ollective_rpc", "/pause?x=/health",
     "/pause;/health", "/pause#/health", "http://127.0.0.1/pause", "http://x/health/../pause", "/healthz", "/pingx",
     "/..;/health", "/\\health", "/health\\..\\pause", "/%c0%afhealth", "/health?/../pause/", "/h%65alth/%2e%2e/pause"],
)  # fmt: skip
def test_tricks_of_paths_open_nothing(site: Site, path: str):
    before = len(site.served)
    status = site.send(f"GET {path}", HOST)
    reached = site.served[before:]
    assert status in (400, 401, 404) or reached == ["GET /health"], (status, reached)


@pytest.mark.parametrize("path", ["/health", "/ping", "/health?x=1"])
def test_health_checks_are_open_for_reading_only(site: Site, path: str):
    assert {method: site.send(f"{method} {path}", HOST) for method in METHODS} == {
        method: 200 if method in ("GET", "HEAD") else 401 for method in METHODS
    }


@pytest.mark.parametrize(
    "headers",
    [["Authorization: Bearer " + "a" * 9999], ["Authorization: Bearer None"],
     ["Authorization: Bearer"], ["Authorization: Bearer "], ["Authorization: "], [f"Authorization: {TOKEN}"],
     [f"Authorization: Basic {TOKEN}"], [f"Authorization: Bearer {TOKEN[:-1]}"], [f"Authorization: Bearer {TOKEN}x"],
     [f"Authorization: Bearer  {TOKEN}"], [f"Authorization: Bearer {TOKEN.upper()}"],
     [f"Authorization: Bearer,{TOKEN}"],
     [GOOD, GOOD], ["Authorization: Bearer no", GOOD], [GOOD, "Authorization: Bearer no"], [f"X-Api-Key: {TOKEN}"],
     [f"Proxy-Authorization: Bearer {TOKEN}"], [f"Cookie: Authorization=Bearer {TOKEN}"],
     ["Authorization: Bearer \xff"],
     [f"X-Forwarded-Authorization: Bearer {TOKEN}"]],
)  # fmt: skip
def test_a_key_in_another_form_is_wrong(site: Site, headers: list[str]):
    before = len(site.served)
    assert site.send("POST /pause", HOST, *headers) in (400, 401)
    assert len(site.served) == before


def test_the_scheme_may_have_either_case(site: Site):
    assert site.send("POST /pause", HOST, f"authorization: bEARER {TOKEN}") == 200


@pytest.mark.parametrize("path", ["/pause", "/health"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "", "http://127.0.0.1", "http://localhost:8000", "file://", "http://a http://b"]
)  # fmt: skip
def test_web_pages_are_refused_even_with_the_key(site: Site, origin: str, path: str):
    before = len(site.served)
    for method in ("GET", "POST", "OPTIONS"):
        headers = [HOST, GOOD, f"Origin: {origin}", "Access-Control-Request-Method: POST"]
        assert site.send(f"{method} {path}", *headers) == 403
    assert len(site.served) == before


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example",
     "evil.example#127.0.0.1", "", "[evil]", "[::1", "localhost.", "trainer.example.evil", "0x7f.1", "2130706433",
     "127.0.0.1:80@evil.example", "localhost:8000@evil.example", "[::1]evil.example", "[::1]:80:evil.example",
     "[::1].evil.example:80", "[localhost]", "127.0.0.1:x", "localhost:80/evil.example", "[::1]]", "[[::1]]",
     "127.0.0.1, evil.example", "xn--localhost-9za", "evil.example\t127.0.0.1"],
)  # fmt: skip
def test_names_of_other_parties_are_refused(site: Site, host: str):
    if host == "[::1":
        pytest.skip("means [::1]")
    before = len(site.served)
    for path in ("/pause", "/health"):
        assert site.send(f"GET {path}", f"Host: {host}", GOOD) in (400, 403)
    assert len(site.served) == before


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "[fe80::1]", "localhost", "LOCALHOST:1",
     "trainer.example", "OTHER.example:80", socket.gethostname()],
)  # fmt: skip
def test_addresses_and_known_names_are_served(site: Site, host: str):
    assert site.send("POST /pause", f"Host: {host}", GOOD) == 200


@pytest.mark.parametrize("headers", [[], [HOST, "Host: 10.0.0.1"]], ids=["none", "two"])
def test_one_host_has_to_be_named(site: Site, headers: list[str]):
    assert site.send("POST /pause", *headers, GOOD) in (400, 403)


@pytest.mark.parametrize("path", ["/v1/realtime", "/health", "/ping", "/"])
def test_websockets_want_the_key(site: Site, path: str):
    upgrade = ["Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]

    def shake(*headers: str) -> int:
        with socket.create_connection(("127.0.0.1", site.port), timeout=PATIENCE) as connection:
            lines = [f"GET {path} HTTP/1.1", HOST, "Connection: Upgrade", *upgrade, *headers, "", ""]
            connection.sendall("\r\n".join(lines).encode())
            return int(connection.recv(4096).split()[1])

    before = len(site.served)
    assert shake() == 403 and shake(GOOD, "Origin: http://evil.example") == 403
    assert len(site.served) == before
    assert shake(GOOD) == 101 and site.served[before:] == ["websocket"]


def test_a_refused_body_is_not_read(site: Site):
    headers = [HOST, "Content-Length: 100000000000", "Content-Type: text/plain"]
    assert site.send("POST /collective_rpc", *headers, body=b"{}") == 401


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ValueError, match=f"{KEY} is not set.*server_environment"):
        ServerAccess(None)
    monkeypatch.setenv(KEY, "")
    with pytest.raises(ValueError, match=KEY):
        ServerAccess(None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("TORCHRL_RLOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "server.key"


def test_a_key_is_made_once_and_for_this_user(cache: Path):
    key = server_key()
    assert len(key) > 40 and server_key() == key and cache.stat().st_mode & 0o777 == 0o600
    assert cache.parent.stat().st_mode & 0o077 == 0 and list(cache.parent.iterdir()) == [cache]
    assert server_environment()[KEY] == key and key not in " ".join(server_command("model"))


def test_processes_that_start_together_agree_on_the_key(cache: Path):
    code = "from torchrl_rloo.engines.vllm_access import server_key; print(server_key())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate(timeout=PATIENCE)[0].strip() for process in processes} == {server_key()}


def test_the_environment_has_priority(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY, TOKEN)
    assert server_environment()[KEY] == server_key() == TOKEN and not cache.exists()


def own_address() -> str:
    """Return the address of this machine on its way out, else the loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("192.0.2.1", 1))
            return probe.getsockname()[0]
    return "127.0.0.1"


@pytest.mark.parametrize(
    "place",
    ["127.0.0.1", "127.9.8.7", "[::1]", "localhost", "LocalHost", socket.gethostname(), own_address(),
     "evil.example@127.0.0.1", "\uff4cocalhost"],
)  # fmt: skip
def test_a_server_of_this_machine_gets_the_made_key(cache: Path, place: str):
    assert client_key(f"http://{place}:8000/path") == client_key(f"https://{place}") == server_key()


@pytest.mark.parametrize(
    "place",
    ["192.0.2.1", "8.8.8.8", "[2001:db8::1]", "example.com", "127.0.0.1.example.com", "localhost.example.com",
     "127.0.0.1@example.com", "localhost:1@example.com", "example.com#@127.0.0.1", "example.com?@localhost",
     "example.com/@localhost", "localhost.", "127.1.example", "255.255.255.255", "224.0.0.1", "[::ffff:192.0.2.1]",
     "2130706434.example", "xn--localhost-9za", socket.gethostname() + ".evil.example"],
)  # fmt: skip
def test_no_other_server_gets_the_made_key(cache: Path, monkeypatch: pytest.MonkeyPatch, place: str):
    for scheme in ("http", "https"):
        with pytest.raises(ValueError, match=f"no IP address of this machine; set api_key, or {KEY}"):
            VLLMServer(f"{scheme}://{place}", connect_timeout=1e-3)
    assert not cache.exists()
    monkeypatch.setenv(KEY, TOKEN)
    assert client_key(f"http://{place}") == TOKEN


def test_a_key_for_another_server_is_sent_to_it_only(cache: Path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        seen = []

        def serve() -> None:
            with listener.accept()[0] as connection:
                seen.append(connection.recv(9999))

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(EngineError):
            VLLMServer(url, api_key=TOKEN, connect_timeout=0.4)
        thread.join(PATIENCE)
    assert TOKEN.encode() in seen[0] and not cache.exists()


@pytest.mark.parametrize(
    "kind", ["readable", "writable", "link", "fifo", "folder", "empty", "short", "stranger", "broken link"]
)
def test_a_key_that_others_could_know_is_refused(cache: Path, kind: str):
    cache.parent.mkdir()
    cache.write_text("" if kind == "empty" else "abc" if kind == "short" else "k" * 43)
    cache.chmod({"readable": 0o640, "writable": 0o602}.get(kind, 0o600))
    if kind == "stranger":
        if os.geteuid():
            pytest.skip("requires root")
        os.chown(cache, 12345, 12345)
    if kind in ("link", "broken link", "fifo", "folder"):
        cache.rename(cache.with_name("other"))
        made = {"fifo": lambda: os.mkfifo(cache, 0o600), "folder": cache.mkdir}
        made.get(kind, lambda: cache.symlink_to("other" if kind == "link" else "missing"))()
    began = time.process_time()
    with pytest.raises(OSError, match="server.key.*remove it, or set VLLM_API_KEY"):
        server_key()
    assert time.process_time() - began < PATIENCE


def test_a_key_on_the_command_line_is_refused():
    with pytest.raises(ValueError, match=f"api_key cannot be on a command line.*{KEY}"):
        server_command("model", api_key="secret")
    assert server_command("model", middleware=["mine.Middleware"])[-1].endswith("ServerAccess")
