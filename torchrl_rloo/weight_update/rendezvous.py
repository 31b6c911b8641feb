"""Rendezvous: a store on one address of the trainer, which admits only workers with the secret of their group."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from torchrl_rloo.runtime.threads import PackageThread

DIGEST_BYTES = 32  # of nonces and proofs
_NAME_BYTES = 16
_HANDSHAKE_SECONDS = 10.0
_MAX_PENDING = 64  # connections without a proof; a further one replaces the oldest
_MAX_MESSAGE = 1 << 20  # bytes
_RETRY_SECONDS = 0.1
_POLL_SECONDS = 0.002


def prove(secret: bytes, *parts: bytes) -> bytes:
    """Return the proof that its sender has the secret, for parts of which the receiver chose one at random."""
    return hmac.digest(secret, b"".join(parts), "sha256")


class Group:
    """Store of the trainer and the workers of one engine, with a fresh name and a fresh secret.

    Args:
        rendezvous: listener that admits the workers.
        timeout: seconds to wait for a key.

    Attributes:
        name: public name of the group.
        secret: key of the proofs.
        store: store of the trainer.
    """

    def __init__(self, rendezvous: Rendezvous, timeout: float):
        self.rendezvous = rendezvous
        self.name, self.secret = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(DIGEST_BYTES)
        self.store = TrainerStore(timeout)
        self.sockets: set[socket.socket] = set()

    def options(self) -> dict[str, Any]:
        """Return what a worker needs to join, as plain JSON."""
        return {"port": self.rendezvous.port, "group": self.name.hex(), "secret": self.secret.hex()}

    def close(self) -> None:
        """Close the store and the connections of the workers. The last group of a listener closes it."""
        self.store.closed = True
        self.rendezvous.remove(self)


class Rendezvous:
    """Listener on one address. A process has one per address and port, for all its groups.

    A connection must prove within seconds that it knows the secret of a group, and gets a proof in return. Any number
    of others changes nothing: they are closed, the oldest first.

    Args:
        host: address or name of this machine. A name stands for the first address that it resolves to.
        port: port; 0 takes a free one.

    Raises:
        OSError: if the address is not of this machine, or the port is in use.
        ValueError: if the address stands for all interfaces.
    """

    _open: dict[tuple[int, str, int], Rendezvous] = {}  # by process, host and port
    _lock = threading.RLock()

    def __init__(self, host: str, port: int):
        self._key = os.getpid(), host, port
        self._listener = _listen(host, port)
        self.address, self.port = self._listener.getsockname()[:2]
        self._groups: dict[bytes, Group] = {}
        self._pending: deque[socket.socket] = deque()

    def _start(self) -> None:
        PackageThread(self._accept, name="weight rendezvous", stop=partial(_shut, self._listener)).start()

    @classmethod
    def open_group(cls, host: str, port: int, timeout: float) -> Group:
        """Return a new group of this process's listener on an address."""
        with cls._lock:
            key = os.getpid(), host, port
            if key not in cls._open:
                cls._open[key] = cls(host, port)
                cls._open[key]._start()
            rendezvous = cls._open[key]
            group = Group(rendezvous, timeout)
            rendezvous._groups[group.name] = group
            return group

    def remove(self, group: Group) -> None:
        """Close the connections of a group, and close the listener without groups."""
        with self._lock:
            if self._groups.pop(group.name, None) is None:
                return
            ended = list(group.sockets)
            if not self._groups:
                del self._open[self._key]
                ended += self._pending
                _shut(self._listener)  # wakes the thread that accepts
                self._listener.close()
        for connection in ended:
            _shut(connection)

    def _accept(self) -> None:
        while self._open.get(self._key) is self:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors
                time.sleep(_RETRY_SECONDS)
                continue
            with self._lock:
                self._pending.append(connection)
                if len(self._pending) > _MAX_PENDING:
                    _shut(self._pending.popleft())
            stop = partial(_shut, connection)
            PackageThread(self._serve, connection, name="weight rendezvous", stop=stop).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the calls of one worker, if it is one."""
        with connection, suppress(OSError, EOFError, ValueError):
            try:
                group = self._admit(connection)
            finally:
                with self._lock, suppress(ValueError):
                    self._pending.remove(connection)
            if group is None:
                return
            try:
                connection.settimeout(None)
                channel = Connection(os.dup(connection.fileno()))
                with channel:
                    while True:
                        channel.send_bytes(_answer(group.store, channel.recv_bytes(_MAX_MESSAGE)))
            finally:
                group.sockets.discard(connection)

    def _admit(self, connection: socket.socket) -> Group | None:
        """Return the group of a worker, after both sides have proven that they know its secret."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        name = _receive(connection, _NAME_BYTES, deadline)
        theirs, ours = _receive(connection, DIGEST_BYTES, deadline), secrets.token_bytes(DIGEST_BYTES)
        group = self._groups.get(name)
        secret = group.secret if group is not None else secrets.token_bytes(DIGEST_BYTES)  # names stay hidden
        connection.sendall(ours + prove(secret, b"trainer", theirs, ours))
        proof = _receive(connection, DIGEST_BYTES, deadline)
        if not hmac.compare_digest(proof, prove(secret, b"worker", ours, theirs)):
            return None
        with self._lock:
            if name not in self._groups:
                return None
            group.sockets.add(connection)
        return group


class GroupStore(dist.Store):
    """Store of a group. Values are bytes, or text of their Latin-1 characters within :meth:`call`.

    Args:
        timeout: seconds to wait for a key.
    """

    def __init__(self, timeout: float):
        super().__init__()
        self.seconds = timeout

    def call(self, name: str, *args: Any) -> Any:
        """Make one call that does not wait."""
        raise NotImplementedError

    def clone(self) -> GroupStore:
        """Return this store, which threads may share."""
        return self

    def has_extended_api(self) -> bool:
        """Return False: there are no calls for several keys."""
        return False

    def set(self, key: str, value: bytes | str) -> None:
        self.call("set", key, _to_text(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.call("get", key).encode("latin-1")

    def add(self, key: str, value: int) -> int:
        return self.call("add", key, value)

    def check(self, keys: Sequence[str]) -> bool:
        return self.call("check", *keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):  # polls, so that a closed store ends it
            if time.monotonic() > deadline:
                raise TimeoutError(f"the group's store has no {list(keys)} after timeout={seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self.call("compare_set", key, _to_text(expected), _to_text(desired)).encode("latin-1")

    def delete_key(self, key: str) -> bool:
        return self.call("delete_key", key)

    def num_keys(self) -> int:
        return self.call("num_keys")


class TrainerStore(GroupStore):
    """Store in the trainer's memory.

    Attributes:
        closed: True to end the calls that wait, and to refuse others.
    """

    closed = False

    def __init__(self, timeout: float):
        super().__init__(timeout)
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *args: Any) -> Any:
        """Make one call that does not wait."""
        if self.closed:
            raise RuntimeError("the group was closed")
        with self._lock:
            return _CALLS[name](self._values, *args)


def _add(values: dict[str, str], key: str, number: int) -> int:
    values[key] = str(int(values.get(key, "0")) + number)
    return int(values[key])


def _compare_set(values: dict[str, str], key: str, expected: str, desired: str) -> str:
    if values.get(key, "") == expected:
        values[key] = desired
    return values.get(key, expected)


_CALLS: dict[str, Callable[..., Any]] = {
    "set": lambda values, key, value: values.update({key: value}),
    "get": lambda values, key: values[key],
    "add": _add,
    "check": lambda values, *keys: all(key in values for key in keys),
    "compare_set": _compare_set,
    "delete_key": lambda values, key: values.pop(key, None) is not None,
    "num_keys": len,
}


class RemoteStore(GroupStore):
    """Store of a group, over a worker's connection to its :class:`Rendezvous`.

    Args:
        options: options of :meth:`Group.options`, with the ``host``.
        timeout: seconds to wait for the trainer, and for a key.

    Attributes:
        address: address of this machine on the route to the trainer.

    Raises:
        PermissionError: if the process at the address does not know the secret.
        TimeoutError: if no trainer answers in time.
    """

    def __init__(self, options: dict[str, Any], timeout: float):
        super().__init__(timeout)
        self._lock = threading.Lock()
        connection = _join(options, timeout)
        self.address = connection.getsockname()[0]
        connection.settimeout(None)
        self._channel = Connection(connection.detach())

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def call(self, name: str, *args: Any) -> Any:
        """Make one call of the trainer's store."""
        with self._lock:
            self._channel.send_bytes(json.dumps([name, *args]).encode())
            if not self._channel.poll(self.seconds):
                raise TimeoutError(f"no answer from the trainer's store within timeout={self.seconds:g} s")
            result, error = json.loads(self._channel.recv_bytes(_MAX_MESSAGE))
        if error is not None:
            raise RuntimeError(error)
        return result


def _answer(store: TrainerStore, message: bytes) -> bytes:
    """Make one call of a worker to the store."""
    try:
        name, *args = json.loads(message)
        reply = [store.call(name, *args), None]
    except Exception as error:  # the worker's
        reply = [None, f"{type(error).__name__}: {error}"]
    return json.dumps(reply).encode()


def _to_text(value: bytes | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")


def _join(options: dict[str, Any], timeout: float) -> socket.socket:
    """Return a connection to the trainer, after both sides have proven that they know the secret."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _try_to_join(options, deadline)
        except PermissionError:
            raise
        except OSError as error:  # not reachable yet, or pushed out by other connections
            if time.monotonic() + _RETRY_SECONDS > deadline:
                place = f"host={options['host']!r} port={options['port']}"
                raise TimeoutError(f"no trainer at {place} within timeout={timeout:g} s: {error}") from error
        time.sleep(_RETRY_SECONDS)


def _try_to_join(options: dict[str, Any], deadline: float) -> socket.socket:
    secret, ours = bytes.fromhex(options["secret"]), secrets.token_bytes(DIGEST_BYTES)
    place = options["host"], options["port"]
    limit = min(deadline, time.monotonic() + _HANDSHAKE_SECONDS)
    connection = socket.create_connection(place, timeout=max(_RETRY_SECONDS, limit - time.monotonic()))
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(bytes.fromhex(options["group"]) + ours)
        theirs = _receive(connection, DIGEST_BYTES, limit)
        if not hmac.compare_digest(_receive(connection, DIGEST_BYTES, limit), prove(secret, b"trainer", ours, theirs)):
            raise PermissionError(f"host={place[0]!r} port={place[1]} does not know the group's secret; check the port")
        connection.sendall(prove(secret, b"worker", theirs, ours))
        return connection
    except BaseException:
        connection.close()
        raise


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ip_address(address[0]).is_unspecified:
            raise ValueError(f"host={host!r} must be one address of this machine, which engines can reach")
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        raise OSError(
            f"cannot listen on host={host!r} port={port}: {error}; set an address of this machine and a free port"
        ) from error


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Return exactly ``size`` bytes, or raise OSError at the deadline."""
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionError("the connection was closed during the handshake")
        received += part
    return received


def _shut(connection: socket.socket) -> None:
    """Wake the thread that uses a socket, which then closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
