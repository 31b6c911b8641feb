"""Browser: TorchRL's actions, private contexts, allowed hosts, and a browser that dies."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tools import ToolError
from torchrl_rloo.envs.tools.browser import PROGRAMS, Browser, check_hosts, is_allowed
from torchrl_rloo.envs.transforms import BrowserTransform
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.runtime.processes import descendants

needs_browser = pytest.mark.skipif(not any(map(shutil.which, PROGRAMS)), reason="requires Chromium or Chrome")

HOME = """<!doctype html><title>Home</title><body>
<a id="green" href="/green" target="_blank">Green</a> <a id="away" href="http://{other}/away">Elsewhere</a>
<form action="/find"><input name="q"><button>Find</button></form>
<img src="http://{other}/image.png" alt="a cup"><iframe src="http://{other}/frame"></iframe>
<script>
fetch("http://{other}/fetch", {{mode: "no-cors"}}).catch(() => 0);
navigator.sendBeacon("http://{other}/beacon");
new WebSocket("ws://{other}/socket");
window.open("http://{other}/window");
alert("dismissed");
</script>"""


class Site(BaseHTTPRequestHandler):
    other = ""
    visits: list[tuple[int, str]]

    def do_GET(self):
        parts = urlsplit(self.path)
        self.visits.append((self.server.server_port, parts.path))
        body, status, headers = "", 200, {}
        if parts.path == "/":
            seen = "cookie" in (self.headers.get("Cookie") or "")
            body, headers = HOME.format(other=self.other) + f"<p>Seen: {seen}</p>", {"Set-Cookie": "cookie=1"}
        elif parts.path == "/green":
            body = "<title>Green</title><p>Price: 3</p>"
        elif parts.path == "/find":
            body = f"<title>Found</title><p>{json.dumps(parse_qs(parts.query))}</p>"
        elif parts.path == "/redirect":
            status, headers = 302, {"Location": f"http://{self.other}/redirected"}
        elif parts.path == "/spin":
            body = "<title>Spin</title><script>while (true) {}</script>"
        self.send_response(status)
        for name, value in (headers | {"Content-Type": "text/html"}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def sites() -> Iterator[tuple[str, str]]:
    """Serve an allowed and another site, and return their hosts."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Site) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    allowed, other = (f"127.0.0.1:{server.server_port}" for server in servers)
    Site.other, Site.visits = other, []
    yield allowed, other
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def browser(sites) -> Iterator[Browser]:
    made = Browser([sites[0]], timeout=10.0)
    yield made
    made.shut_down()


class Visit:
    """One conversation."""

    def __init__(self, browser: Browser):
        self.browser, self.state = browser, browser.open({})

    def __call__(self, action: str, **arguments) -> str:
        return json.dumps(asyncio.run(self.browser.call(self.state, action=action, **arguments)))

    def text(self, selector: str = "body") -> str:
        return self("extract", selector=selector, extract_type="text")

    def close(self) -> None:
        asyncio.run(self.browser.close(self.state))


@needs_browser
def test_actions_and_errors_that_say_what_to_do(browser, sites):
    visit, url = Visit(browser), f"http://{sites[0]}/"
    assert json.loads(visit("navigate", url=url)) == {"url": url, "status": 200}
    visit("type", selector="[name=q]", text="green tea")
    visit("scroll", scroll_amount=10)
    visit("click", selector="button")
    assert "green tea" in visit.text("p")
    for action, arguments, message in (
        ("click", {}, "action click requires selector"),
        ("navigate", {"url": "file:///etc/passwd"}, "Domain not allowed"),
        ("navigate", {"url": f"http://{sites[1]}/"}, f"Must be one of: \\['{sites[0]}'\\]"),
        ("navigate", {"url": f"http://{sites[0]}@example.org/"}, "not allowed"),
        ("navigate", {"url": "http://[1/"}, "not allowed"),
        ("navigate", {"url": "http://127.0.0.1/"}, "not allowed"),
        ("extract", {"selector": "#none", "extract_type": "text"}, "Timeout 5000ms exceeded"),
    ):
        with pytest.raises(ToolError, match=message):
            visit(action, **arguments)
    assert "green tea" in visit.text("p")
    visit.close()


@needs_browser
def test_no_request_reaches_another_host_and_conversations_share_nothing(browser, sites):
    first, second, url = Visit(browser), Visit(browser), f"http://{sites[0]}/"
    seen = []
    for visit in (first, first, second):
        visit("navigate", url=url)
        seen.append("Seen: True" in visit.text())
        with pytest.raises(ToolError, match="not allowed"):
            visit("navigate", url=f"{url}redirect")
    assert seen == [False, True, False]
    first("navigate", url=url)
    first("click", selector="#away")
    first("navigate", url=f"{url}green")
    assert "Price: 3" in first.text()  # the conversation continues
    for visit in (first, second):
        visit.close()
    port = int(sites[1].rpartition(":")[2])
    assert not [path for reached, path in Site.visits if reached == port]
    assert [path for reached, path in Site.visits if path == "/redirect"]


@needs_browser
def test_a_page_that_hangs_and_a_browser_that_dies(sites):
    browser = Browser([sites[0]], timeout=6.0)
    visit, other, green = Visit(browser), Visit(browser), f"http://{sites[0]}/green"
    other("navigate", url=green)
    with pytest.raises(ToolError, match="Timeout 3000ms exceeded"):
        visit("navigate", url=f"http://{sites[0]}/spin")
    visit("navigate", url=green)
    assert "Price: 3" in visit.text() and "Price: 3" in other.text()
    killed = [
        pid for pid in descendants(os.getpid()) if b"--remote-debugging" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="page is lost: navigate to an address again|has been closed"):
        visit.text()
    visit("navigate", url=green)
    assert "Price: 3" in visit.text()
    with pytest.raises(ToolError, match="page is lost"):
        other.text()
    copy = pickle.loads(pickle.dumps(browser))
    assert copy.allowed_hosts == browser.allowed_hosts
    browser.shut_down()
    Visit(browser)("navigate", url=green)  # a later call starts another
    browser.shut_down()


@needs_browser
def test_a_policy_browses(bpe, sites):
    actions = (
        {"action": "navigate", "url": f"http://{sites[0]}/green"},
        {"action": "extract", "selector": "p", "extract_type": "text"},
    )
    calls = [json.dumps({"name": "browser", "arguments": arguments}) for arguments in actions]
    turns = ["\n".join(f"<tool_call>{call}</tool_call>" for call in calls), "3"]

    def script(request, index):
        text = turns["Price: 3" in bpe.decode(request.prompt)]
        return ScriptedTurn([*bpe.encode(text, add_special_tokens=False), bpe.eos_token_id])

    transform = BrowserTransform([sites[0]])
    prompts = load_prompts([{"query": [{"role": "user", "content": "What does green tea cost?"}]}])
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=1, num_generations=2, transforms=[transform], max_turns=4)
    with ScriptedEngine(script) as engine:
        policy = vLLMWrapper(engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 400, "seed": 0})
        rows = LLMCollector(env, policy).collect()
    assert [row[keys.COMPLETION][-1]["content"] for row in rows.unbind(0)] == ["3", "3"]
    assert transform.counts["tools/browser/calls"] == 4 and not transform.counts["tools/browser/failed"]
    env.close()
    assert transform.browser._process is None  # closed with the environment


def test_hosts_are_checked():
    allowed = check_hosts(["Example.org", "*.example.com", "127.0.0.1:8000", "[::1]:8000"])
    for host, port, expected in (
        ("example.org", 443, True),
        ("EXAMPLE.org.", 80, True),
        ("example.org", 8080, False),
        ("www.example.org", 443, False),
        ("a.b.example.com", 443, True),
        ("example.com", 443, False),
        ("badexample.com", 443, False),
        ("127.0.0.1", 8000, True),
        ("127.0.0.1", 80, False),
        ("::1", 8000, True),
    ):
        assert is_allowed(host, port, allowed) == expected, (host, port)
    for wrong in (
        [],
        "example.org",
        ["http://example.org"],
        ["*"],
        ["a b"],
        ["example.org/path"],
        ["a,b"],
        ["<-loopback>"],
    ):
        with pytest.raises(ValueError, match="allowed_hosts="):
            check_hosts(wrong)
    with pytest.raises(FileNotFoundError, match="program='no-such-browser'"):
        Browser(["example.org"], program="no-such-browser")
