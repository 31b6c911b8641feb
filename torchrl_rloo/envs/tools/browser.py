"""Browser for the policy: TorchRL's actions on pages of allowed hosts, over Playwright and a system Chromium.

TorchRL's ``BrowserTransform`` opens one page for all rows, and compares hosts at ``navigate`` only. Here each
conversation has a private context, and no request of a page reaches another host.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import os
import re
import shutil
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torchrl.envs.llm.transforms.browser import BROWSER_SCHEMA, BrowserTransform

from torchrl_rloo.envs.tools.tool import Tool, ToolError, ToolTimeoutError
from torchrl_rloo.runtime.event_loop import EventLoop

_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:\d{1,5})?|\[[0-9a-f:]+\](:\d{1,5})?")


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts in lower case."""
    if isinstance(hosts, str) or not hosts:
        raise ValueError(f"allowed_hosts={hosts!r} must be a list of at least one host, such as ['example.org']")
    lower = tuple(str(host).lower() for host in hosts)
    if wrong := [host for host in lower if not _HOST.fullmatch(host)]:
        raise ValueError(
            f"allowed_hosts={wrong} must be hosts, such as 'example.org', '*.example.org' or '127.0.0.1:80'"
        )
    return lower


def is_allowed(host: str, port: int, allowed: Sequence[str]) -> bool:
    """Return whether a list of hosts has a host, at a port."""
    host = host.lower().rstrip(".")
    if ":" in host:
        host = f"[{host}]"
    for entry in allowed:
        name, given = _split(entry)
        fits = host.endswith(name[1:]) and host != name[1:] if name.startswith("*.") else host == name
        if fits and port in ((80, 443) if given is None else (given,)):
            return True
    return False


def _split(entry: str) -> tuple[str, int | None]:
    name, _, port = entry.rpartition(":") if re.search(r"[^:]:\d+$|\]:\d+$", entry) else (entry, "", "")
    return name, int(port) if port else None


def proxy_bypass(hosts: Sequence[str]) -> list[str]:
    """Return Chromium's rules for hosts that need no proxy."""
    rules = ["<-loopback>"]  # a loopback address is a host like any other
    for host in hosts:
        name, port = _split(host)
        rules += [f"{name}:{p}" for p in ((80, 443) if port is None else (port,))]
    return rules


T = TypeVar("T")
START_S = 30.0  # limit of the browser's start
_ANSWER_S = 1.0  # time in which a page that works tells its title
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class BrowserProcess:
    """One process of Chromium with a thread for its messages."""

    def __init__(self, program: str, hosts: Sequence[str], sandbox: bool):
        self.program, self.sandbox, self.hosts = program, sandbox, hosts
        self._loop = EventLoop("browser")
        self._closed_port = socket.socket()  # bound, so that nothing else listens there, and never listening
        self._closed_port.bind(("127.0.0.1", 0))
        self._playwright = self._browser = None
        self._starting = asyncio.Lock()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the browser's loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop.loop))

    async def browser(self) -> Any:
        """Return the browser, started if it is not connected."""
        from playwright.async_api import async_playwright

        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                if self._playwright is None:
                    self._playwright = await async_playwright().start()
                proxy = {
                    "server": f"http://127.0.0.1:{self._closed_port.getsockname()[1]}",
                    "bypass": ",".join(proxy_bypass(self.hosts)),
                }
                self._browser = await self._playwright.chromium.launch(
                    executable_path=self.program,
                    chromium_sandbox=self.sandbox,
                    proxy=proxy,
                    timeout=1000 * START_S,
                    args=["--force-webrtc-ip-handling-policy=disable_non_proxied_udp"],
                )
            return self._browser

    def close(self) -> None:
        """End the browser and its thread."""

        async def stop() -> None:
            if self._browser is not None:
                await self._browser.close()
            if self._playwright is not None:
                await self._playwright.stop()

        try:
            self._loop.run(asyncio.wait_for(stop(), START_S))
        finally:
            self._loop.close()
            self._closed_port.close()


class Page(BrowserTransform):
    """TorchRL's browser for one conversation: a context and a page in the shared process."""

    def __init__(self, hosts: Sequence[str], limit: float):
        super().__init__(allowed_domains=list(hosts), timeout=limit)
        self.context_of: Any = None  # browser that has the context

    def _validate_url(self, url: str) -> bool:
        try:
            parts = urlsplit(url)
            port, default = parts.port, {"http": 80, "https": 443}[parts.scheme]
        except (ValueError, KeyError):
            return False
        return is_allowed(parts.hostname or "", port or default, self.allowed_domains)

    async def prepare(self, browser: Any) -> bool:
        """Open the page if there is none, and return whether one was lost with its process."""
        if self.page is not None and self.context_of is browser:
            return False
        lost, self.page = self.page is not None, None
        self.context_of = browser
        self.context = await browser.new_context(accept_downloads=False, service_workers="block")
        self.context.set_default_timeout(500 * self.timeout)  # an action that fails leaves time for another page
        await self._open_page()
        return lost

    async def _open_page(self) -> None:
        before, self.page = self.page, await self.context.new_page()
        self.page.on("popup", lambda other: asyncio.ensure_future(other.close()))  # another window
        if before is not None:
            await before.close()

    async def _init_browser(self) -> None:
        """Do nothing: :meth:`prepare` has opened the page."""

    async def _navigate(self, url: str) -> dict[str, Any]:
        # In a new page, which no earlier one interrupts that hangs or still arrives
        if self._validate_url(url):
            await self._open_page()
        done = await super()._navigate(url)
        if "Timeout" not in done.get("error", ""):
            return done
        # TorchRL waits until the network is idle, which some pages never are
        try:
            await asyncio.wait_for(self.page.title(), _ANSWER_S)
        except asyncio.TimeoutError:
            return done
        return {"success": True, "result": {"url": self.page.url, "status": None}}

    async def act(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Do one of TorchRL's actions, or take a screenshot, and return the result."""
        if arguments["action"] == "screenshot":
            png = await self.page.screenshot(type="png")
            return {"type": "image", "url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}
        try:
            done = await self._execute_browser_action_async(**arguments)
        except KeyError as error:
            raise ToolError(f"action {arguments['action']} requires {error.args[0]}: add it") from None
        if done["success"]:
            return done["result"]
        reason = done["error"].partition("\n")[0]
        if "ERR_PROXY_CONNECTION_FAILED" in reason:
            reason = f"the page leads to a host that is not allowed: use {', '.join(self.allowed_domains)}"
        raise ToolError(reason)

    async def leave(self) -> None:
        """Close the context; the next action opens another."""
        context, self.context, self.page = self.context, None, None
        if context is not None and self.context_of.is_connected():
            await context.close()


class Browser(Tool):
    """Tool ``browser`` with TorchRL's actions on pages of allowed hosts: navigate, click, type, scroll and extract.

    Each conversation has a private browser context, with separate cookies, storage and page. All share one process of
    Chromium. If it dies, the next call of each conversation starts again with an empty page, and says so.

    The browser connects to ``allowed_hosts`` only, for pages, redirects, scripts, images and sockets alike: for any
    other host, it has a proxy that nothing answers. Addresses of files are refused, downloads are dropped, dialogs
    dismissed, and new windows closed.

    Args:
        allowed_hosts: hosts, as ``"example.org"``, ``"*.example.org"`` for all below it, or ``"127.0.0.1:8000"`` for
            one port. A host without a port has the default ports of http and https only.
        program: Chromium or Chrome; None finds it.
        timeout: limit of an action, in seconds. The start of the browser may take 30 s more.
        sandbox: whether Chromium isolates its pages by its own sandbox. None uses it unless this process is root, for
            whom Chromium has none.
        screenshots: whether the policy may also take a screenshot, an image of the visible part of the page.

    Raises:
        ImportError: if Playwright is not installed.
        FileNotFoundError: if there is no such program.
        ValueError: if a host is malformed.

    Example::

        browser = Browser(["en.wikipedia.org"])
        env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=8, transforms=[ToolTransform([browser])])
    """

    def __init__(
        self,
        allowed_hosts: Sequence[str],
        *,
        program: str | None = None,
        timeout: float = 20.0,
        sandbox: bool | None = None,
        screenshots: bool = False,
    ):
        self.allowed_hosts = check_hosts(allowed_hosts)
        found = next(filter(None, map(shutil.which, PROGRAMS if program is None else [program])), None)
        if found is None:
            raise FileNotFoundError(
                f"program={program!r}: there is no Chromium or Chrome; install one or give its path"
            )
        try:
            import playwright  # noqa: F401
        except ImportError as error:
            raise ImportError("Browser requires playwright: pip install 'torchrl_rloo[browser]'") from error
        parameters = copy.deepcopy(BROWSER_SCHEMA["parameters"])
        if not screenshots:
            parameters["properties"]["action"]["enum"].remove("screenshot")
        description = f"{BROWSER_SCHEMA['description']}. Hosts: {', '.join(self.allowed_hosts)}."
        super().__init__("browser", description, parameters, timeout=timeout + START_S)
        self.program, self.limit, self.returns_images = os.path.abspath(found), timeout, screenshots
        self.sandbox = os.geteuid() != 0 if sandbox is None else sandbox
        self._process: BrowserProcess | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # Another process starts another browser
        return self.__dict__ | {"_process": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_lock": threading.Lock(), "_owner": os.getpid()})

    def open(self, columns: Mapping[str, Any]) -> Page:
        """Open the state of a conversation; its page opens at its first action."""
        return Page(self.allowed_hosts, self.limit)

    async def call(self, state: Page, /, **arguments: Any) -> dict[str, Any]:
        """Do one action, and return its result."""
        process = self._running()
        return await process.run(self._act(process, state, arguments))

    async def _act(self, process: BrowserProcess, page: Page, arguments: dict[str, Any]) -> dict[str, Any]:
        browser, action = await process.browser(), arguments["action"]  # its start has a separate limit

        async def act() -> dict[str, Any]:
            if await page.prepare(browser) and action != "navigate":
                raise ToolError("the browser was restarted and the page is lost: navigate to an address again")
            return await page.act(arguments)

        try:
            return await asyncio.wait_for(act(), self.limit)
        except (asyncio.TimeoutError, TimeoutError):
            await page.leave()
            raise ToolTimeoutError(
                f"action {action} took longer than {self.limit:g} s and the page was closed: navigate again"
            ) from None

    async def close(self, state: Page) -> None:
        """Close the conversation's context."""
        process = self._process
        if process is not None and state.context is not None:
            await process.run(state.leave())

    def shut_down(self) -> None:
        """End the browser's process; a later call starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.close()

    def _running(self) -> BrowserProcess:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process = BrowserProcess(self.program, self.allowed_hosts, self.sandbox)
                self._owner = os.getpid()
            return self._process
