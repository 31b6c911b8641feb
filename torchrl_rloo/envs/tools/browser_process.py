"""Process of Chromium, and the page of one conversation in it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from torchrl_rloo.envs.tools.browser_hosts import proxy_bypass
from torchrl_rloo.runtime.event_loop import EventLoop

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
