"""MCP server of test_mcp.py, over stdio, or over HTTP at the port given as an argument."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from collections import Counter

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image
from mcp_types import CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents, ToolAnnotations
from PIL import Image as Picture

server = MCPServer("tests", log_level="CRITICAL")
counts: Counter[str | None] = Counter()


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(name="odd/name")
def odd() -> str:
    """Has a name that other tools may not have."""
    return "odd"


@server.tool()
def refuse() -> CallToolResult:
    """Fails with the server's own message."""
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
    """Waits until ``number`` calls of it have arrived."""
    counts["meet"] += 1
    while counts["meet"] < number:
        await asyncio.sleep(0.005)
    return "met"


@server.tool()
async def arrived(tool: str) -> int:
    """Counts the calls of wait or of meet that have arrived."""
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
    """Ends the server's process at the first call, and returns its id afterwards."""
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(3)
    return os.getpid()


@server.tool()
def pid() -> int:
    """Returns the id of the server's process."""
    return os.getpid()


@server.tool()
def variable(key: str) -> str | None:
    """Returns a variable of the server's environment."""
    return os.environ.get(key)


@server.tool()
def header(key: str, ctx: Context) -> str | None:
    """Returns a header of the request."""
    return (ctx.headers or {}).get(key)


@server.tool()
async def increase(ctx: Context) -> int:
    """Counts the calls of a session: this process, or an HTTP session."""
    session = (ctx.headers or {}).get("mcp-session-id")
    before = counts[session]
    await asyncio.sleep(0.01)  # concurrent calls would lose counts
    counts[session] = before + 1
    return counts[session]


@server.tool()
async def count(ctx: Context) -> int:
    """Returns what increase counted."""
    return counts[(ctx.headers or {}).get("mcp-session-id")]


def drawing() -> bytes:
    buffer = io.BytesIO()
    Picture.new("RGB", (20, 10)).save(buffer, "PNG")
    return buffer.getvalue()


@server.tool(structured_output=False)
def several() -> list:
    """Returns texts, an image, a link and a file."""
    return [
        "one",
        Image(data=drawing(), format="png"),
        ResourceLink(type="resource_link", name="a book", uri="file:///book"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///page", text="a page")),
        "two",
    ]


@server.tool()
def nothing() -> CallToolResult:
    """Returns no content."""
    return CallToolResult(content=[])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
