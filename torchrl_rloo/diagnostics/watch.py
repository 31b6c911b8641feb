"""Server of the live page: on this machine only, behind a secret address, for reading only."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from torchrl_rloo.diagnostics.watch_page import LivePage, live_text, page_title
from torchrl_rloo.diagnostics.watch_run import TRANSCRIPT
from torchrl_rloo.diagnostics.watch_series import LARGEST_STEP
from torchrl_rloo.runtime.files import SAFE_FLAGS

_HOSTS = ("127.0.0.1", "localhost", "[::1]")  # a page of another site reaches this server by another name
_LARGEST_FILE = 1 << 28  # bytes of a page of transcripts
_LONGEST_QUERY = 60_000  # characters
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FOREIGN_POLICY = (  # of pages that the run wrote: a separate origin, which cannot ask this server
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


class LiveServer(ThreadingHTTPServer):
    """HTTP server of the live page on the loopback interface.

    All addresses begin with a random secret, and the name of the host must be that of this machine. It answers GET
    requests for the page, its data, and pages of transcripts; it writes nothing.

    Args:
        folders: folders of runs, or folders that have them below.
        port: port to listen on; 0 takes a free one.

    Attributes:
        url: address of the page, with the secret.

    Raises:
        FileNotFoundError: if a folder does not exist.
        OSError: if the port is in use.

    Example:
        >>> import tempfile
        >>> with LiveServer([tempfile.mkdtemp()]) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """

    daemon_threads = True
    allow_reuse_address = False  # where it is set, a second server may share the port

    def __init__(self, folders: Sequence[str | Path], port: int = 0):
        self.page = LivePage([Path(folder) for folder in folders])
        self.secret = secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"port={port} is unavailable: {reason}; choose another one, or 0 for any") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.secret}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed its connection; report everything else."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30  # seconds for which a silent client keeps a thread
    server_version, sys_version = "torchrl-rloo", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        try:
            content, kind, policy = self._find()
        except _RefusedError as refused:
            return self._answer(refused.status, f"{refused.status.phrase}\n".encode(), "text/plain; charset=utf-8")
        self._answer(HTTPStatus.OK, content, kind, policy)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: addresses have the secret."""

    def _find(self) -> tuple[bytes, str, str]:
        """Return body, content type and content security policy of the answer."""
        self._check_host()
        try:
            address = urlsplit(self.path)
            parts = unquote(address.path, errors="strict").split("/")
        except ValueError:
            raise _RefusedError(HTTPStatus.BAD_REQUEST) from None
        if len(parts) < 3 or parts[0] or not hmac.compare_digest(parts[1].encode(), self.server.secret.encode()):
            raise _RefusedError(HTTPStatus.NOT_FOUND)
        if parts[2:] == [""]:
            return live_text(page_title(self.server.page)).encode(), "text/html; charset=utf-8", ""
        if parts[2:] == ["data"]:
            data = json.dumps(self._data(address.query), allow_nan=False, separators=(",", ":"))
            return data.encode(), "application/json", "default-src 'none'; sandbox"
        if parts[2] == "runs" and len(parts) in (5, 6):
            return _read_page(self._run_file(parts[3:])), "text/html; charset=utf-8", _FOREIGN_POLICY
        raise _RefusedError(HTTPStatus.NOT_FOUND)

    def _check_host(self) -> None:
        """Refuse a request that a foreign site sends by a name which it has pointed to this machine."""
        host = self.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        navigates = self.headers.get("Sec-Fetch-Mode") == "navigate"
        if name not in _HOSTS or (foreign and not navigates):
            raise _RefusedError(HTTPStatus.FORBIDDEN)

    def _data(self, query: str) -> dict[str, Any]:
        try:
            text = parse_qs(query[:_LONGEST_QUERY], strict_parsing=True).get("known", ["{}"])[0] if query else "{}"
            known = json.loads(text)
        except (ValueError, RecursionError):
            raise _RefusedError(HTTPStatus.BAD_REQUEST) from None
        if not isinstance(known, dict):
            raise _RefusedError(HTTPStatus.BAD_REQUEST)
        if "low" not in known:
            return self.server.page.update(known)
        low, high = known["low"], known.get("high")
        if not (type(low) is type(high) is int and -LARGEST_STEP <= low <= high <= LARGEST_STEP):
            raise _RefusedError(HTTPStatus.BAD_REQUEST)
        return self.server.page.detail(low, high)

    def _run_file(self, parts: list[str]) -> Path:
        """Return the page of transcripts, or the report, that an address names; no other file is reachable."""
        number, *folders, name = parts
        runs = self.server.page.runs
        if not number.isdecimal() or len(number) > 6 or int(number) >= len(runs) or not TRANSCRIPT.fullmatch(name):
            raise _RefusedError(HTTPStatus.NOT_FOUND)
        if folders not in ([], ["transcripts"]) or (not folders and name not in ("transcripts.html", "report.html")):
            raise _RefusedError(HTTPStatus.NOT_FOUND)
        folder = runs[int(number)].directory.joinpath(*folders)
        if folders and folder.is_symlink():
            raise _RefusedError(HTTPStatus.NOT_FOUND)
        return folder / name

    def _answer(self, status: HTTPStatus, content: bytes, kind: str, policy: str = "") -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), **_HEADERS}
        for name, value in (headers | ({"Content-Security-Policy": policy} if policy else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


class _RefusedError(Exception):
    def __init__(self, status: HTTPStatus):
        super().__init__(status)
        self.status = status


def _read_page(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    except OSError:
        raise _RefusedError(HTTPStatus.NOT_FOUND) from None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_FILE:
            raise _RefusedError(HTTPStatus.NOT_FOUND)
        return file.read()
