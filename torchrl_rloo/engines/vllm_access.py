"""Key of vLLM servers, and the ASGI middleware that wants it on all paths."""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import socket
import stat
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

KEY = "VLLM_API_KEY"  # environment variable, also vLLM's own
HOSTS = "TORCHRL_RLOO_SERVER_HOSTS"  # environment variable
MIDDLEWARE = "torchrl_rloo.engines.vllm_access.ServerAccess"
_HOST = re.compile(r"(?:\[([^][]+)]|([^][:@]+))(?::\d{0,5})?")  # an address in brackets, or a name, and a port
_OPEN_PATHS = frozenset({"/health", "/ping"})


def server_key() -> str:
    """Return the key of this user's servers, which only this user may read; others raise ``PermissionError``.

    It is the environment variable ``VLLM_API_KEY``. Otherwise it is the content of ``server.key`` in
    ``$TORCHRL_RLOO_CACHE``, else in ``$XDG_CACHE_HOME/torchrl_rloo`` or ``~/.cache/torchrl_rloo``. The first call makes
    this file.
    """
    if key := os.environ.get(KEY):
        return key
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchrl_rloo"
    path = Path(os.environ.get("TORCHRL_RLOO_CACHE") or default) / "server.key"
    try:
        if not os.path.lexists(path):
            _make_key(path)
        return _read_key(path)
    except OSError as error:
        raise type(error)(f"{path}: {error.strerror or error}; remove it, or set {KEY}") from error


def client_key(url: str) -> str:
    """Return the key for a server that a client has no key of: ``VLLM_API_KEY``, or on this machine :func:`server_key`.

    A server on another machine must not learn this one's key. The host is on this machine if it is one of its IP
    addresses, ``localhost`` or its name. No other name counts, since a name server decides about it.
    """
    from yarl import URL  # as aiohttp reads it

    host = str(URL(url).raw_host).lower()
    if not os.environ.get(KEY) and not _is_here(host):
        raise ValueError(f"host={host!r} is no IP address of this machine; set api_key, or {KEY} as at the server")
    return server_key()


def _is_here(host: str) -> bool:
    """Return whether an address or name is certainly of this machine."""
    try:
        address = ip_address(host)
    except ValueError:
        return host in _own_names()
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # sends nothing: the route to an own address begins at this address
        except OSError:
            return False
        return address.is_loopback or ip_address(probe.getsockname()[0]) == address


def _own_names() -> set[str]:
    return {"localhost", socket.gethostname().lower()}


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent)  # for this user only
    try:
        with open(handle, "w") as file:
            file.write(secrets.token_urlsafe(32))
        with suppress(FileExistsError):  # another process was faster
            os.link(made, path)
    finally:
        os.unlink(made)


def _read_key(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.geteuid():
            raise PermissionError(
                f"uid={found.st_uid} mode={found.st_mode:o} must be a file of this user with mode 600"
            )
        if len(key := file.read(1000).strip()) < 32:
            raise PermissionError(f"a key of {len(key)} characters must have at least 32")
        return key


class ServerAccess:
    """ASGI middleware that wants the key of :func:`server_key` as a bearer token on all paths but health checks.

    ``GET`` and ``HEAD`` of ``/health`` and ``/ping`` are open. Requests with an ``Origin``, which are of web pages, are
    refused. So is each ``Host`` other than an IP address, ``localhost``, this machine's name, or a name in the
    environment variable ``TORCHRL_RLOO_SERVER_HOSTS``, with commas between names. The key is not
    encrypted, so use HTTPS or a private network.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]):
        key = os.environ.get(KEY, "")
        if not key:
            raise ValueError(f"{KEY} is not set; start the server with server_environment()")
        self.app, self._token = app, key.encode()
        self._hosts = _own_names() | {
            name.strip().lower() for name in os.environ.get(HOSTS, "").split(",") if name.strip()
        }

    async def __call__(self, scope: Mapping[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Pass a request on, or refuse it."""
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": refusal[1]})
        else:
            status, reason = refusal
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"error": reason}).encode()})

    def _refusal(self, scope: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return the status and reason of a refusal; None lets the request pass."""
        values: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            values.setdefault(name.lower(), []).append(value)
        if b"origin" in values:
            return 403, "requests of web pages are refused"
        if len(hosts := values.get(b"host", [])) != 1 or not self._knows(hosts[0].decode("latin-1")):
            return 403, f"unknown Host; use an IP address, or add the name to {HOSTS}"
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in _OPEN_PATHS:
            return None
        given = values.get(b"authorization", [b""])
        scheme, _, token = given[0].partition(b" ")
        if len(given) != 1 or scheme.lower() != b"bearer" or not hmac.compare_digest(token, self._token):
            return 401, f"wrong or no key; set {KEY} as at the server, or api_key"
        return None

    def _knows(self, host: str) -> bool:
        """Return whether no other party's name server decides about a host."""
        if (parts := _HOST.fullmatch(host)) is None:
            return False
        address, name = parts.groups()
        with suppress(ValueError):
            return ip_address(address or name) is not None
        return address is None and name.lower() in self._hosts
