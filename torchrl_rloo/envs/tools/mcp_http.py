"""Transport of an MCP server over HTTP: replies have a size limit, and errors and logs show no secret of a request."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from torchrl_rloo.envs.tools.mcp_relay import MAX_LINE_BYTES
from torchrl_rloo.runtime.http import Redactor

_LOGGERS = ("mcp", "client", "httpx2", "httpcore2")  # of the SDK and its HTTP client, and below


class HTTPTransport:
    """Function that opens the SDK's transport to an endpoint.

    Args:
        url: URL of the endpoint.
        headers: headers of each request.

    Attributes:
        redact: function that masks the secrets of the URL and of the headers in a message.

    Raises:
        ValueError: if ``url`` is not an HTTP URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str]):
        self._url, self._headers = url, dict(headers)
        self.redact = Redactor(url, self._headers)
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.redact(url)!r} must start with http:// or https://")

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Any]:
        """Open the transport."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        settings = {
            "headers": {**self._headers, "Accept-Encoding": "identity"},
            "timeout": httpx2.Timeout(30.0, read=300.0),  # for silent streams; each call has a separate limit
            "event_hooks": {"response": [_limit]},
        }
        with _redacted_logs(self.redact):
            async with (
                httpx2.AsyncClient(**settings) as client,
                streamable_http_client(self._url, http_client=client, max_sse_event_size=MAX_LINE_BYTES) as streams,
            ):
                yield streams


async def _limit(response: Any) -> None:
    """Limit the body of a reply. The SDK limits each event of a stream, which may have no end."""
    response.headers.pop("Content-Encoding", None)  # never unpack: the request names no encoding
    if not response.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
        response.stream = _limited(response.stream)


def _limited(stream: Any) -> Any:
    import httpx2

    class Limited(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in stream:
                size += len(chunk)
                if size > MAX_LINE_BYTES:
                    raise httpx2.StreamError(f"the reply has more than the limit of {MAX_LINE_BYTES} bytes; send less")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Limited()


@contextmanager
def _redacted_logs(redact: Redactor) -> Iterator[None]:
    """Mask secrets in the records of the SDK, which quote replies and URLs."""

    def clean(record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[1]
        text = f"{record.getMessage()}: {type(error).__name__}: {error}" if error else record.getMessage()
        record.msg, record.args, record.exc_info, record.exc_text = redact.line(text), None, None, None
        return True

    known = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOGGERS]
    loggers = [logging.getLogger(name) for name in known]
    for logger in loggers:
        logger.addFilter(clean)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(clean)
