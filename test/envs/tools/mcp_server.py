"""A server that speaks MCP, for test_mcp.py: over stdio, or over HTTP at the port given as an argument."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp_types import CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents, ToolAnnotations

server = MCPServer("tests", log_level="CRITICAL")
counts: Counter[str | None] = Counter()


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(name="odd/name")
def odd() -> str:
    """A name that is not everybody's."""
    return "odd"


@server.tool()
def refuse() -> CallToolResult:
    """Fails in the server's own words."""
    return CallToolResult(content=[TextContent(type="text", text="no such shelf")], is_error=True)


@server.tool()
def crash() -> str:
    """Raises."""
    raise RuntimeError("inside")


@server.tool()
async def wait(seconds: float) -> str:
    """Sleeps without blocking the server."""
    counts["wait"] += 1
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
async def meet(number: int) -> str:
    """Waits until so many calls of it are there."""
    counts["meet"] += 1
    while counts["meet"] < number:
        await asyncio.sleep(0.005)
    return "met"


@server.tool()
async def arrived(tool: str) -> int:
    """Tells how many calls of wait or of meet have come."""
    return counts[tool]


@server.tool()
async def block() -> str:
    """Blocks the whole server for a long time."""
    time.sleep(600)
    return "never"


@server.tool()
async def die() -> str:
    """Ends the server's process."""
    os._exit(3)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def die_once(marker: str) -> int:
    """Ends the server's process the first time, and gives its id the next."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(3)
    return os.getpid()


@server.tool()
def pid() -> int:
    """The id of the server's process."""
    return os.getpid()


@server.tool()
def variable(key: str) -> str | None:
    """A variable of the server's environment."""
    return os.environ.get(key)


@server.tool()
def header(key: str, ctx: Context) -> str | None:
    """A header of the request."""
    return (ctx.headers or {}).get(key)


@server.tool()
async def increase(ctx: Context) -> int:
    """Counts the calls of a session: that of this process, or that of an HTTP session."""
    session = (ctx.headers or {}).get("mcp-session-id")
    before = counts[session]
    await asyncio.sleep(0.01)  # calls at a time would be lost
    counts[session] = before + 1
    return counts[session]


@server.tool()
async def count(ctx: Context) -> int:
    """What increase counted."""
    return counts[(ctx.headers or {}).get("mcp-session-id")]


@server.tool(structured_output=False)
def several() -> list:
    """Texts, an image, a link and a file."""
    return [
        "one",
        Image(data=b"x" * 30, format="png"),
        ResourceLink(type="resource_link", name="a book", uri="file:///book"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///page", text="a page")),
        "two",
    ]


@server.tool()
def nothing() -> CallToolResult:
    """Gives no content."""
    return CallToolResult(content=[])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
