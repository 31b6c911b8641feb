"""Isolation of tests: no remote connections, and no access to caches of the user."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any


def refuse_remote_connections() -> None:
    """Reject connections of this process to addresses other than loopback."""
    if getattr(socket.socket.connect, "guarded", False):
        return
    for name in ("connect", "connect_ex"):
        setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))


def _guarded(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        internet = self.family in (socket.AF_INET, socket.AF_INET6) and self.type & socket.SOCK_STREAM
        if internet and not _is_loopback(address[0]):
            raise RuntimeError(f"connection to {address} refused: tests use loopback addresses only")
        return connect(self, address)

    guarded.guarded = True
    return guarded


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "")
    return address.is_loopback or address.is_unspecified
