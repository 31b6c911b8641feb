"""Strangers at the sockets of the collective transport: they neither join, nor delay, nor end an update."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from support.waiting import PATIENCE
from torchrl_rloo.weight_update import rendezvous
from torchrl_rloo.weight_update.collective import Collective, CollectiveReceiver
from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.rendezvous import Group, RemoteStore, Rendezvous, TrainerStore, _answer

CPU = torch.device("cpu")
SECONDS = 20.0
WEIGHTS = torch.arange(64, dtype=torch.float32)


def listeners() -> set[tuple[str, int]]:
    """Return the addresses on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {tuple(c.laddr[:2]) for c in found if c.status == psutil.CONN_LISTEN}


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as probe:
        return probe.getsockname()[1]


def deliver(link: Any) -> None:
    """Join as the only worker, and receive a bucket."""
    with ThreadPoolExecutor() as pool:
        future = pool.submit(CollectiveReceiver, link.options, CPU, 0)
        link.joined()
        receiver = future.result(PATIENCE)
    link.send(WEIGHTS.view(torch.uint8))
    (received,) = receiver.receive([TensorInfo.of("w", WEIGHTS)], {})
    assert torch.equal(received, WEIGHTS)
    receiver.close()


@contextmanager
def connected(transport: Collective, timeout: float = SECONDS) -> Iterator[Any]:
    link = transport.connect(1, timeout)
    try:
        yield link
    finally:
        link.close()


def group_of(link: Any) -> Group:
    return Rendezvous._open[os.getpid(), "127.0.0.1", 0]._groups[bytes.fromhex(link.options["group"])]


def dial(link: Any) -> socket.socket:
    return socket.create_connection((link.options["host"], link.options["port"]), timeout=PATIENCE)


@pytest.mark.parametrize("fixed", [False, True], ids=["free port", "fixed port"])
@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.3", "127.0.0.3"), ("::1", "::1"), ("localhost", None)],
)
def test_listens_on_the_given_address_only(host: str, address: str | None, fixed: bool):
    if address is None:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][4][0]
    before = listeners()
    port = free_port(address if ":" not in address else "127.0.0.1") if fixed else 0
    transport = Collective(host=host, port=port)
    with connected(transport) as link, connected(transport):  # the second group shares the port
        assert port in (0, link.options["port"])
        deliver(link)
        assert {found for found, _ in listeners() - before} <= {address}, "the sockets of gloo included"
        if host == "127.0.0.1":
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", link.options["port"]), timeout=PATIENCE)


def test_a_port_closes_with_its_last_group():
    transport = Collective(port=free_port())
    for _ in range(2):
        for _ in range(5):  # at once
            with connected(transport) as link:
                dial(link).close()
        deadline = time.monotonic() + PATIENCE
        while (transport.host, transport.port) in listeners():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "0x0", "::0.0.0.0"])
def test_all_interfaces_are_refused(host: str):
    before = listeners()
    with pytest.raises(ValueError, match=f"host='{host}' must be one address of this machine"):
        Collective(host=host).connect(1, 1.0)
    assert listeners() == before


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error_that_names_it(host: str):
    with pytest.raises(OSError, match=f"host='{host}' port=0.*set an address of this machine"):
        Collective(host=host).connect(1, 1.0)


def test_a_client_of_a_plain_store_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_SECONDS", 0.5)
    with connected(Collective()) as link, pytest.raises((RuntimeError, dist.DistError)):
        store = dist.TCPStore(
            link.options["host"], link.options["port"], is_master=False, timeout=timedelta(seconds=1),
            wait_for_workers=False,
        )  # fmt: skip
        store.set("weights-1/0/1", "an address of mine")
        store.get("weights-1/0/1")


def hello(link: Any, secret: bytes, label: bytes = b"worker", name: bytes | None = None) -> socket.socket:
    """Do the worker's side of the handshake."""
    connection, ours = dial(link), secrets.token_bytes(32)
    connection.sendall((bytes.fromhex(link.options["group"]) if name is None else name) + ours)
    theirs = connection.recv(64, socket.MSG_WAITALL)
    connection.sendall(hmac.digest(secret, label + theirs[:32] + ours, "sha256"))
    return connection


def reflected(link: Any) -> socket.socket:
    """Return the trainer's own proof as the worker's."""
    connection = dial(link)
    connection.sendall(bytes.fromhex(link.options["group"]) + bytes(32))
    connection.sendall(connection.recv(64, socket.MSG_WAITALL)[32:])
    return connection


def sent(data: bytes) -> Callable[[Any], socket.socket]:
    def attack(link: Any) -> socket.socket:
        connection = dial(link)
        connection.sendall(data)
        return connection

    return attack


def dripped(link: Any) -> socket.socket:
    connection = dial(link)
    for byte in bytes.fromhex(link.options["group"])[:3]:
        connection.sendall(bytes([byte]))
        time.sleep(0.01)
    return connection


def reset(link: Any) -> socket.socket:
    connection = dial(link)
    connection.sendall(bytes.fromhex(link.options["group"]))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return connection


def half_closed(link: Any) -> socket.socket:
    connection = sent(bytes.fromhex(link.options["group"]) + bytes(32))(link)
    connection.shutdown(socket.SHUT_WR)
    return connection


def replayed(link: Any) -> socket.socket:
    """Send what a worker sent in an earlier handshake."""
    ours, proofs = bytes(32), []
    for _ in range(2):
        connection = dial(link)
        connection.sendall(bytes.fromhex(link.options["group"]) + ours)
        theirs = connection.recv(64, socket.MSG_WAITALL)[:32]
        proofs.append(hmac.digest(bytes.fromhex(link.options["secret"]), b"worker" + theirs + ours, "sha256"))
    connection.sendall(proofs[0])
    return connection


STRANGERS: dict[str, Callable[[Any], socket.socket]] = {
    "silent": sent(b""),
    "garbage": sent(os.urandom(4096)),
    "zeros": sent(bytes(1 << 16)),
    "http": sent(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "tls": sent(bytes.fromhex("16030100750100007103034b") + bytes(100)),
    "store query": sent(b"\x00" + b"\x3c\x85\xf7\xce" + bytes(64)),
    "huge length": sent(struct.pack("!i", 0x7FFFFFFF) * 30),
    "dripped": dripped,
    "reset": reset,
    "half closed": half_closed,
    "reflected": reflected,
    "replayed": replayed,
    "wrong secret": lambda link: hello(link, bytes(32)),
    "empty secret": lambda link: hello(link, b""),
    "name as secret": lambda link: hello(link, bytes.fromhex(link.options["group"])),
    "unknown group": lambda link: hello(link, bytes.fromhex(link.options["secret"]), name=bytes(16)),
    "other role": lambda link: hello(link, bytes.fromhex(link.options["secret"]), b"trainer"),
}
CALL = b'["set", "0/1", "an address of mine"]'


@pytest.mark.parametrize("attack", STRANGERS)
def test_strangers_do_not_join_and_delay_nobody(attack: str):
    began = time.process_time()
    with ExitStack() as held, connected(Collective()) as link:
        strangers = [held.enter_context(STRANGERS[attack](link)) for _ in range(5)]
        group = group_of(link)
        for stranger in strangers:
            try:
                stranger.sendall(struct.pack("!i", len(CALL)) + CALL)
            except OSError:  # closed already
                pass
        deliver(link)
        assert not group.store.check(["0/1"]) or b"mine" not in group.store.get("0/1")
    assert time.process_time() - began < PATIENCE


def test_a_crowd_that_holds_its_connections_locks_nobody_out():
    with ExitStack() as held, connected(Collective()) as link:
        for _ in range(300):
            held.enter_context(dial(link))
        deliver(link)
        threads = [t for t in threading.enumerate() if t.name == "weight rendezvous"]
        assert len(threads) < 100, "old ones make room for new ones"


def test_a_crowd_that_keeps_coming_locks_nobody_out():
    ended = threading.Event()

    def knock(link: Any) -> None:
        while not ended.is_set():
            with dial(link) as connection:
                connection.sendall(os.urandom(80))

    with connected(Collective()) as link:
        crowd = [threading.Thread(target=knock, args=(link,)) for _ in range(3)]
        for thread in crowd:
            thread.start()
        try:
            deliver(link)
        finally:
            ended.set()
            for thread in crowd:
                thread.join(PATIENCE)


@pytest.mark.parametrize("tail", [b"", os.urandom(500), b"\xff" * 500], ids=["silent", "garbage", "ones"])
def test_one_who_takes_a_place_in_the_group_gets_no_weights(tail: bytes):
    """Connect to the trainer's socket of gloo before the worker does, as each of its first peers."""
    before = listeners()
    with ExitStack() as held, connected(Collective(), timeout=3.0) as link:
        deadline = time.monotonic() + PATIENCE
        while not (found := {p for p in listeners() - before if p[1] != link.options["port"]}):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (place,) = found
        thieves = [held.enter_context(socket.create_connection(place)) for _ in range(200)]
        for number, thief in enumerate(thieves):
            thief.sendall(struct.pack("<q", number) + tail)
        time.sleep(0.2)
        try:
            deliver(link)  # the random bytes may have failed the attack
        except (PermissionError, ValueError, dist.DistError, TimeoutError):
            link.send(WEIGHTS.view(torch.uint8))
        taken = b""
        for thief in thieves:
            thief.setblocking(False)
            try:
                taken += thief.recv(1 << 16)
            except OSError:
                pass
        assert WEIGHTS.numpy().tobytes() not in taken
        assert len(taken) < 150, "nonces and proofs at most"


def test_a_worker_refuses_a_trainer_without_the_secret():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        options = {"host": "127.0.0.1", "port": impostor.getsockname()[1], "group": "ab" * 16, "secret": "cd" * 32}

        def answer() -> None:
            connection, _ = impostor.accept()
            with connection:
                connection.recv(48, socket.MSG_WAITALL)
                connection.sendall(os.urandom(64))
                assert connection.recv(1) == b""  # it gets no proof

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PermissionError, match="does not know the group's secret"):
            CollectiveReceiver(options | {"backend": "gloo", "world_size": 2, "timeout": PATIENCE}, CPU, 0)
        thread.join(PATIENCE)


CALLS = ["null", "[]", "[[]]", '["set"]', '["get", "absent"]', '["add", "a", "b"]', '{"set": 1}', "\xff", "[" * 100_000]


@pytest.mark.parametrize("call", [*(f'["{n}"]' for n in ("close", "__class__", "call", "wait", "list_keys")), *CALLS])
def test_a_bad_call_of_a_member_is_an_error_of_that_call(call: str):
    store = TrainerStore(1.0)
    store.set("a", b"x")
    assert b"Error: " in _answer(store, call.encode("latin-1")) and store.get("a") == b"x"


def test_stores_do_what_those_of_torch_do():
    with connected(Collective()) as link:
        group = group_of(link)
        worker = RemoteStore(link.options, SECONDS)
        stores = [dist.HashStore(), group.store, worker]
        for store in stores[:1] + stores[2:]:
            store.set("k", bytes(range(256)))
            assert (store.get("k"), store.add("n", 2), store.add("n", 3)) == (bytes(range(256)), 2, 5)
            assert (store.check(["k", "n"]), store.check(["k", "absent"])) == (True, False)
            assert store.compare_set("k", "other", "new") == bytes(range(256))
            assert store.compare_set("new", "", "made") == b"made" and store.num_keys() >= 3
            assert store.delete_key("k") and not store.delete_key("k")
            with pytest.raises(Exception, match="imeout"):
                store.wait(["k"], timedelta(seconds=0.05))
        assert group.store.get("new") == b"made"
        worker.close()


def test_a_closed_link_ends_its_threads_before_anyone_joined():
    before = set(threading.enumerate())
    with connected(Collective(), timeout=10 * PATIENCE):
        started = set(threading.enumerate()) - before
        assert started
    for thread in started:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_secrets_are_fresh_and_in_no_message(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG), connected(Collective()) as one, connected(Collective()) as other:
        deliver(one)
        assert one.options["secret"] != other.options["secret"] and len(one.options["secret"]) == 64
        group = group_of(one)
        shown = caplog.text + repr(one) + repr(group) + str(vars(Rendezvous)) + " ".join(psutil.Process().cmdline())
        assert one.options["secret"] not in shown
