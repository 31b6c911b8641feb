"""Hosts that a browser may connect to, and Chromium's rules for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*(:\d{1,5})?|\[[0-9a-f:]+\](:\d{1,5})?")


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts in lower case.

    Raises:
        ValueError: if there is none, or one is no host.

    Example:
        >>> check_hosts(["Example.org", "*.example.org", "127.0.0.1:8000"])
        ('example.org', '*.example.org', '127.0.0.1:8000')
    """
    if isinstance(hosts, str) or not hosts:
        raise ValueError(f"allowed_hosts={hosts!r} must be a list of at least one host, such as ['example.org']")
    lower = tuple(str(host).lower() for host in hosts)
    if wrong := [host for host in lower if not _HOST.fullmatch(host)]:
        raise ValueError(
            f"allowed_hosts={wrong} must be hosts, such as 'example.org', '*.example.org' or '127.0.0.1:80'"
        )
    return lower


def is_allowed(host: str, port: int, allowed: Sequence[str]) -> bool:
    """Return whether a list of hosts has a host, at a port.

    Example:
        >>> is_allowed("a.example.org", 443, ["*.example.org"]), is_allowed("example.org", 8000, ["example.org"])
        (True, False)
    """
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
