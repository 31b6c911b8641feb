"""Browser: pages as text, actions, private contexts, allowed hosts, and a browser that dies."""

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
from torchrl_rloo.envs.tools.tool import ToolTimeoutError
from torchrl_rloo.envs.transforms import BrowserTransform
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.runtime.processes import descendants

needs_browser = pytest.mark.skipif(not any(map(shutil.which, PROGRAMS)), reason="requires Chromium or Chrome")

HOME = """<!doctype html><title>Home</title><body>
<h1>Shop</h1><p>Two   <b>kinds</b> of tea.</p><p style="display:none">secret</p><script>var hidden = 1</script>
<ul><li><a href="/green" target="_blank">Green</a></li><li><a href="http://{other}/away">Elsewhere</a></li></ul>
<form action="/find"><input name="q" placeholder="Search"><select name="size"><option>small<option>large</select>
<input type="checkbox" name="organic"><input type="password" name="pin" value="1234"><button>Find</button></form>
<a href="/redirect">Redirect</a> <a href="/long">Long</a> <a href="/spin">Spin</a>
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
        elif parts.path == "/long":
            body = "<title>Long</title>" + "".join(f"<p>line {i:03}</p>" for i in range(100))
        elif parts.path == "/menu":
            body = """<title>Menu</title><button onclick="this.hidden = true; more.hidden = false">More</button>
                <a id="more" href="/green" hidden>Green</a>"""
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
    made = Browser([sites[0]], timeout=10.0, page_chars=400)
    yield made
    made.shut_down()


class Visit:
    """One conversation."""

    def __init__(self, browser: Browser):
        self.browser, self.state = browser, browser.open({})

    def __call__(self, action: str, **arguments) -> str:
        return asyncio.run(self.browser.call(self.state, action, **arguments))

    def close(self) -> None:
        asyncio.run(self.browser.close(self.state))


@needs_browser
def test_a_page_is_text_with_numbers_to_act_on(browser, sites):
    visit, url = Visit(browser), f"http://{sites[0]}/"
    shown = visit("open", url=url)
    assert shown.startswith("Home") and "# Shop\nTwo kinds of tea." in shown and "Seen: " in shown
    for item in ("[1] link Green", "[2] link Elsewhere", "[3] field Search", "[4] choice size: *small | large"):
        assert item in shown
    assert "[5] field organic: off" in shown and "[7] button" in shown and "(image: a cup)" in shown
    assert "secret" not in shown and "1234" not in shown and "hidden" not in shown
    # The link would open another window
    assert visit("click", item=1) == f"Green\n{url}green\n\nPrice: 3"
    assert visit("back").startswith("Home")
    visit("type", item=3, text='"tea" & more')
    visit("type", item=4, text="large")
    visit("click", item=5)
    found = visit("type", item=3, text="cups", submit=True)
    assert found.startswith("Found") and '"q": ["cups"], "size": ["large"], "organic": ["on"]' in found
    visit.close()


@needs_browser
def test_long_pages_have_parts_and_errors_say_what_to_do(browser, sites):
    visit = Visit(browser)
    shown = visit("open", url=f"http://{sites[0]}/long")
    assert shown.startswith("Long (part 1 of 3)") and "line 000" in shown and "line 099" not in shown
    assert "line 099" in visit("read", part=3)
    for action, arguments, message in (
        ("read", {"part": 4}, "part 4 must be between 1 and 3"),
        ("click", {"item": 9}, "there is no item 9 on the page"),
        ("click", {}, "action click requires item"),
        ("back", {"item": 1}, "action back takes no item"),
        ("open", {"url": "file:///etc/passwd"}, "must begin with http"),
        ("open", {"url": f"http://{sites[1]}/"}, f"'{sites[1]}' is not allowed: use {sites[0]}"),
        ("open", {"url": f"http://{sites[0]}@example.org/"}, "is not allowed"),
        ("open", {"url": "http://[1/"}, "is no address"),
        ("open", {"url": "http://127.0.0.1/"}, "'127.0.0.1' is not allowed"),
    ):
        with pytest.raises(ToolError, match=message.replace("[", r"\[")):
            visit(action, **arguments)
    visit("open", url=f"http://{sites[0]}/")
    with pytest.raises(ToolError, match="'huge' is not an option: choose one of"):
        visit("type", item=4, text="huge")
    with pytest.raises(ToolError, match="a checkbox takes no text"):
        visit("type", item=5, text="x")
    visit.close()


@needs_browser
def test_numbers_are_those_of_the_last_reading(browser, sites):
    visit = Visit(browser)
    assert "[1] button More" in visit("open", url=f"http://{sites[0]}/menu")
    assert visit("click", item=1).endswith("[1] link Green")
    assert visit("click", item=1).startswith("Green")  # and not the button, which is hidden now
    visit.close()


@needs_browser
def test_no_request_reaches_another_host(browser, sites):
    visit = Visit(browser)
    for _ in range(2):
        visit("open", url=f"http://{sites[0]}/")
        with pytest.raises(ToolError, match="not allowed"):
            visit("open", url=f"http://{sites[0]}/redirect")
    visit("open", url=f"http://{sites[0]}/")
    with pytest.raises(ToolError, match="not allowed"):
        visit("click", item=2)
    assert "Price: 3" in visit("open", url=f"http://{sites[0]}/green")  # the conversation continues
    visit.close()
    port = int(sites[1].rpartition(":")[2])
    assert not [path for reached, path in Site.visits if reached == port]
    assert [path for reached, path in Site.visits if path == "/redirect"]


@needs_browser
def test_conversations_share_nothing(browser, sites):
    first, second = Visit(browser), Visit(browser)
    url = f"http://{sites[0]}/"
    seen = [visit("open", url=url) for visit in (first, first, second)]
    assert ["Seen: True" in text for text in seen] == [False, True, False]
    for visit in (first, second):
        visit.close()


@needs_browser
def test_a_page_that_hangs_and_a_browser_that_dies(sites):
    browser = Browser([sites[0]], timeout=6.0)
    visit, other = Visit(browser), Visit(browser)
    other("open", url=f"http://{sites[0]}/green")
    with pytest.raises(ToolTimeoutError, match="took longer than 6 s and the page was closed"):
        visit("open", url=f"http://{sites[0]}/spin")
    assert "Price: 3" in visit("open", url=f"http://{sites[0]}/green") and "Price: 3" in other("read")
    killed = [
        pid for pid in descendants(os.getpid()) if b"--remote-debugging" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert killed
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="page is lost: open an address again"):
        visit("read")
    assert "Price: 3" in visit("open", url=f"http://{sites[0]}/green")
    with pytest.raises(ToolError, match="page is lost"):
        other("read")
    copy = pickle.loads(pickle.dumps(browser))
    assert copy.allowed_hosts == browser.allowed_hosts
    browser.shut_down()
    assert "Price: 3" in Visit(browser)("open", url=f"http://{sites[0]}/green")  # a later call starts another
    browser.shut_down()


@needs_browser
def test_a_policy_browses(bpe, sites):
    call = {"name": "browser", "arguments": {"action": "open", "url": f"http://{sites[0]}/green"}}
    turns = [f"<tool_call>{json.dumps(call)}</tool_call>", "3"]

    def script(request, index):
        text = turns["Price: 3" in bpe.decode(request.prompt)]
        return ScriptedTurn([*bpe.encode(text, add_special_tokens=False), bpe.eos_token_id])

    transform = BrowserTransform([sites[0]])
    prompts = load_prompts([{"query": [{"role": "user", "content": "What does green tea cost?"}]}])
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=1, num_generations=2, transforms=[transform], max_turns=4)
    with ScriptedEngine(script) as engine:
        policy = vLLMWrapper(engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 200, "seed": 0})
        rows = LLMCollector(env, policy).collect()
    assert [row[keys.COMPLETION][-1]["content"] for row in rows.unbind(0)] == ["3", "3"]
    assert transform.counts["tools/browser/calls"] == 2 and not transform.counts["tools/browser/failed"]
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
