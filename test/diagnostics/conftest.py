"""Headless browser for tests of HTML pages."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE = 120.0  # seconds, ample for a busy machine
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""


class Browser:
    """Page in a headless browser, driven over the DevTools protocol."""

    def __init__(self, program: str, profile: Path):
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1400,900", "about:blank"]
        self.process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.loop, self.ids = asyncio.new_event_loop(), itertools.count(1)
        self.events: list[dict[str, Any]] = []
        try:
            self.loop.run_until_complete(self._connect(profile / "DevToolsActivePort"))
        except BaseException:
            self.process.kill()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        self("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    async def _connect(self, port_file: Path) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert time.monotonic() < deadline and self.process.poll() is None, "the browser did not start"
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json"
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        async with self.session.get(address) as response:
            page = next(target for target in await response.json() if target["type"] == "page")
        self.socket = await self.session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        return self.loop.run_until_complete(asyncio.wait_for(self._send(method, params), PATIENCE))

    async def _send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self.ids)
        await self.socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = json.loads((await self.socket.receive()).data)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(
        self,
        page: Path | str,
        address: str = "",
        *,
        width: int = 1400,
        height: int = 900,
        dark: bool = False,
        ready: str = "document.querySelector('#transcript .token')",
    ) -> None:
        """Load a file or an address from scratch, and wait for the condition ``ready``."""
        self.events.clear()
        url = page if isinstance(page, str) else page.as_uri()
        self.own = ("file:", "about:", "data:image/png;", *([page] if isinstance(page, str) else []))
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=url + address)
        self.wait(f"location.protocol !== 'about:' && document.readyState === 'complete' && {ready}")

    def js(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        deadline = time.monotonic() + PATIENCE
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition} did not come true"
            time.sleep(0.02)

    def mouse(self, selector: str, *kinds: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.js(f"(({{x, y}}) => [x, y])(document.querySelector({json.dumps(selector)}).getClientRects()[0])")
        for kind in kinds:
            button = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {}
            self("Input.dispatchMouseEvent", type=kind, x=box[0] + 3, y=box[1] + 4, **button)

    def click(self, selector: str) -> None:
        self.mouse(selector, "mouseMoved", "mousePressed", "mouseReleased")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self("Input.dispatchKeyEvent", type="keyUp", key=key)

    def fill(self, selector: str, text: str) -> None:
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot")["data"]))

    def complaints(self) -> list[Any]:
        """Return errors since the page was opened: exceptions, console messages, violations, requests."""
        bad = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        found = [event for event in self.events if event["method"] in bad]
        requests = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        found += [url for url in requests if not url.startswith(self.own)]
        return found + self.js("violations") + ([True] if self.js("'pwned' in window") else [])

    def close(self) -> None:
        self.loop.run_until_complete(self.session.close())
        self.loop.close()
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Browser that CHROME names, or the first of BROWSERS that is installed."""
    program = os.environ.get("CHROME") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed, and CHROME names none")
    browser = Browser(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
