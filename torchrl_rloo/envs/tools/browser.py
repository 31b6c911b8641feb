"""Browser for the policy: pages of allowed hosts as text with numbered items, over Playwright and a system Chromium."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

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


class Tab:
    """Context and page of one conversation."""

    def __init__(self) -> None:
        self.context: Any = None
        self.page: Any = None
        self.process: BrowserProcess | None = None
        self.browser: Any = None

    async def prepare(self, browser: Any, process: BrowserProcess, limit: float) -> bool:
        """Open the page if there is none, and return whether one was lost."""
        if self.context is not None and self.browser is browser:
            return False
        lost = self.browser is not None
        self.process, self.browser = process, browser
        self.context = await browser.new_context(accept_downloads=False, service_workers="block")
        self.context.set_default_timeout(1000 * limit)
        await self.empty()
        return lost

    async def empty(self) -> None:
        """Go on with an empty page, whose history is empty as well."""
        before, self.page = self.page, None
        page = await self.context.new_page()
        page.on("popup", lambda other: asyncio.ensure_future(other.close()))  # another window
        if before is not None and not before.is_closed():
            await before.close()
        self.page = page

    async def close(self) -> None:
        """Close context and page."""
        context, self.context, self.page = self.context, None, None
        if context is not None and self.browser.is_connected():
            await context.close()


class BrowserProcess:
    """One process of Chromium with a thread for its messages."""

    def __init__(self, program: str, hosts: Sequence[str], sandbox: bool, start: float):
        self.program, self.sandbox, self.hosts, self.start = program, sandbox, hosts, start
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
                    timeout=1000 * self.start,
                    args=["--force-webrtc-ip-handling-policy=disable_non_proxied_udp"],
                )
            return self._browser

    async def is_connected(self) -> bool:
        """Return whether the browser still answers."""
        return self._browser is not None and self._browser.is_connected()

    def close(self) -> None:
        """End the browser and its thread."""

        async def stop() -> None:
            if self._browser is not None:
                await self._browser.close()
            if self._playwright is not None:
                await self._playwright.stop()

        try:
            self._loop.run(asyncio.wait_for(stop(), self.start))
        finally:
            self._loop.close()
            self._closed_port.close()


START_S = 30.0  # limit of the browser's start
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_ARGUMENTS = {  # of the actions: those that must be given, and the others
    "open": (("url",), ()),
    "click": (("item",), ()),
    "type": (("item", "text"), ("submit",)),
    "back": ((), ()),
    "read": ((), ("part",)),
}
# Text of a page: blocks on lines, and links, buttons and fields with numbers that a later action can name
_READ = """
() => {
  const skipped = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "SVG", "HEAD", "IFRAME", "OBJECT"]);
  const out = [];
  let items = 0;
  const name = (e) => (e.getAttribute("aria-label") || e.getAttribute("placeholder") || e.name || "").trim();
  const number = (e, what) => {
    e.setAttribute("data-browser-item", ++items);
    return `[${items}] ${what} `;
  };
  const walk = (node) => {
    if (node.nodeType === 3) out.push(node.textContent.replace(/\\s+/g, " "));
    if (node.nodeType !== 1 || skipped.has(node.tagName.toUpperCase()) || !node.checkVisibility()) return;
    const tag = node.tagName;
    if (tag === "INPUT" || tag === "TEXTAREA") {
      if (node.type === "hidden") return;
      const chosen = node.type === "checkbox" || node.type === "radio";
      const button = node.type === "submit" || node.type === "button";
      const value = chosen ? (node.checked ? "on" : "off") : node.type === "password" ? "" : node.value;
      out.push(number(node, button ? "button" : "field") + name(node) + (value ? `: ${value}` : "") + " ");
      return;
    }
    if (tag === "SELECT") {
      const options = [...node.options].map((o) => (o.selected ? `*${o.text}` : o.text));
      out.push(number(node, "choice") + name(node) + `: ${options.join(" | ")} `);
      return;
    }
    if (tag === "BR") out.push("\\n");
    if (tag === "IMG" && node.alt) out.push(`(image: ${node.alt})`);
    const block = !getComputedStyle(node).display.startsWith("inline");
    if (block) out.push("\\n");
    if (tag === "A" && node.hasAttribute("href")) out.push(number(node, "link"));
    if (tag === "BUTTON") out.push(number(node, "button") + name(node));
    if (/^H[1-6]$/.test(tag)) out.push("#".repeat(Number(tag[1])) + " ");
    node.childNodes.forEach(walk);
    if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
    if (tag === "TD" || tag === "TH") out.push(" ");
    if (block) out.push("\\n");
  };
  const item = "data-browser-item";
  document.querySelectorAll(`[${item}]`).forEach((e) => e.removeAttribute(item));  // of an earlier reading
  if (document.body) walk(document.body);
  return [document.title, out.join("").replace(/ +/g, " ").replace(/ ?\\n[ \\n]*/g, "\\n").trim()];
}
"""


class Browser(Tool):
    """Tool ``browser``, which opens pages of allowed hosts and shows them as text.

    Each conversation has a private browser context, with separate cookies, storage and page. Links, buttons
    and fields have numbers, by which the policy clicks and types. All conversations share one process of Chromium. If
    it dies, the next call of each conversation starts again with an empty page, and says so.

    The browser connects to ``allowed_hosts`` only, for pages, redirects, scripts, images and sockets alike: for any
    other host, it has a proxy that nothing answers. Addresses of files are refused, downloads are dropped, dialogs
    dismissed, and new windows closed.

    Args:
        allowed_hosts: hosts, as ``"example.org"``, ``"*.example.org"`` for all below it, or ``"127.0.0.1:8000"`` for
            one port. A host without a port has the default ports of http and https only.
        program: Chromium or Chrome; None finds it.
        timeout: limit of an action, in seconds. The start of the browser may take 30 s more.
        page_chars: characters of a page that one call shows; ``read`` shows the other parts.
        sandbox: whether Chromium isolates its pages by its own sandbox. None uses it unless this process is root, for
            whom Chromium has none.

    Raises:
        ImportError: if Playwright is not installed.
        FileNotFoundError: if there is no such program.
        ValueError: if a host or a limit is malformed.

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
        page_chars: int = 4000,
        sandbox: bool | None = None,
    ):
        self.allowed_hosts = check_hosts(allowed_hosts)
        if page_chars < 100:
            raise ValueError(f"page_chars={page_chars} must be at least 100")
        found = next(filter(None, map(shutil.which, PROGRAMS if program is None else [program])), None)
        if found is None:
            raise FileNotFoundError(
                f"program={program!r}: there is no Chromium or Chrome; install one or give its path"
            )
        try:
            import playwright  # noqa: F401
        except ImportError as error:
            raise ImportError("Browser requires playwright: pip install 'torchrl_rloo[browser]'") from error
        texts = {
            "url": "For open: address, such as https://example.org/page.",
            "text": "For type: text to put into the field, or the option to choose.",
        }
        properties: dict[str, Any] = {
            "action": {"type": "string", "enum": list(_ARGUMENTS), "description": "What to do."},
            **{name: {"type": "string", "description": text} for name, text in texts.items()},
            "item": {"type": "integer", "description": "For click and type: number of a link, button or field."},
            "submit": {"type": "boolean", "description": "For type: whether to press Enter afterwards."},
            "part": {"type": "integer", "description": "For read: part of a long page, from 1."},
        }
        super().__init__(
            "browser",
            "Shows web pages as text. open an address, click on a numbered item, type into a field, go back, or read "
            f"the page or another part of it. Hosts: {', '.join(self.allowed_hosts)}.",
            {"type": "object", "properties": properties, "required": ["action"]},
            timeout=timeout + START_S,
        )
        self.program, self.limit, self.page_chars = os.path.abspath(found), timeout, page_chars
        self.sandbox = os.geteuid() != 0 if sandbox is None else sandbox
        self._process: BrowserProcess | None = None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        # Another process starts another browser
        return self.__dict__ | {"_process": None, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"_lock": threading.Lock(), "_owner": os.getpid()})

    def open(self, columns: Mapping[str, Any]) -> Tab:
        """Open the state of a conversation; its page opens at its first action."""
        return Tab()

    async def call(self, state: Tab, /, action: str, **arguments: Any) -> str:
        """Do one action, and return the page's text."""
        required, optional = _ARGUMENTS[action]
        if missing := [name for name in required if name not in arguments]:
            raise ToolError(f"action {action} requires {', '.join(missing)}: add what is missing")
        if other := [name for name in arguments if name not in required + optional]:
            raise ToolError(f"action {action} takes no {', '.join(other)}: leave it out, or use another action")
        if action == "open":
            self._check_url(arguments["url"])
        return await self._running().run(self._act(state, action, arguments))

    async def close(self, state: Tab) -> None:
        """Close the conversation's context."""
        if state.context is not None and state.process is self._process and self._process is not None:
            await self._process.run(state.close())

    def shut_down(self) -> None:
        """End the browser's process; a later call starts another."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.close()

    def _running(self) -> BrowserProcess:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._process, self._owner = (
                    BrowserProcess(self.program, self.allowed_hosts, self.sandbox, START_S),
                    os.getpid(),
                )
            return self._process

    def _check_url(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ToolError(f"{url!r:.200} is no address: use one such as https://{self.allowed_hosts[0]}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ToolError(f"{url!r:.200} must begin with http:// or https:// and a host")
        if not is_allowed(parts.hostname, port or {"http": 80, "https": 443}[parts.scheme], self.allowed_hosts):
            raise ToolError(f"{parts.netloc!r:.200} is not allowed: use {', '.join(self.allowed_hosts)}")

    async def _act(self, tab: Tab, action: str, arguments: dict[str, Any]) -> str:
        from playwright.async_api import Error, TimeoutError

        process = self._process

        async def act() -> str:
            lost = await tab.prepare(browser, process, self.limit)
            if lost and action != "open":
                raise ToolError("the browser was restarted and the page is lost: open an address again")
            return await self._do(tab, action, arguments)

        try:
            browser = await process.browser()  # its start has a separate limit
            return await asyncio.wait_for(act(), self.limit)
        except (asyncio.TimeoutError, TimeoutError):
            await tab.close()
            raise ToolTimeoutError(
                f"action {action} took longer than {self.limit:g} s and the page was closed: open an address again"
            ) from None
        except Error as error:
            if not await process.is_connected():
                raise ToolError("the browser ended and the page is lost: open an address again") from None
            await tab.empty()  # the failed page might still arrive
            raise ToolError(self._reason(error.message)) from None

    async def _do(self, tab: Tab, action: str, arguments: dict[str, Any]) -> str:
        page = tab.page
        if action == "open":
            await page.goto(arguments["url"])
        elif action == "back":
            await page.go_back()
        elif action in ("click", "type"):
            item = page.locator(f'[data-browser-item="{arguments["item"]}"]').first
            if not await item.count():
                raise ToolError(f"there is no item {arguments['item']} on the page: use a number that the page shows")
            if action == "click":
                await item.evaluate("e => e.removeAttribute('target')")
                await item.click()
            else:
                await _type(item, arguments["text"])
                if arguments.get("submit"):
                    await item.press("Enter")
            await page.wait_for_load_state()
        # A page that fails to load, or leads elsewhere, is not shown
        if page.url.startswith("chrome-error:"):
            await tab.empty()
            raise ToolError("the page could not be loaded, or its host is not allowed: open another address")
        title, text = await page.evaluate(_READ)
        return self._shown(page.url, title, text, arguments.get("part", 1))

    def _shown(self, url: str, title: str, text: str, part: int) -> str:
        size = self.page_chars
        parts = max(1, -(-len(text) // size))
        if not 1 <= part <= parts:
            raise ToolError(f"part {part} must be between 1 and {parts}, the parts of this page")
        place = f" (part {part} of {parts})" if parts > 1 else ""
        return f"{title or 'Page without a title'}{place}\n{url}\n\n{text[(part - 1) * size : part * size]}".rstrip()

    def _reason(self, message: str) -> str:
        if "ERR_PROXY_CONNECTION_FAILED" in message:
            return f"the page leads to a host that is not allowed: use {', '.join(self.allowed_hosts)}"
        return message.splitlines()[0].partition(": ")[2] or message.splitlines()[0]


async def _type(item: Any, text: str) -> None:
    kind = await item.evaluate("e => e.tagName === 'SELECT' ? 'choice' : e.type")
    if kind == "choice":
        options = await item.evaluate("e => [...e.options].map(o => o.text)")
        if text not in options:
            raise ToolError(f"{text!r:.100} is not an option: choose one of {options}")
        await item.select_option(label=text)
    elif kind in ("checkbox", "radio", "submit", "button", "file"):
        raise ToolError(f"a {kind} takes no text: click on it")
    else:
        await item.fill(text)
