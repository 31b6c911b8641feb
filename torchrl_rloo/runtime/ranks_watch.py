"""Watch of the ranks: one thread per rank that finds failed, dead and hung ranks, and ends the others.

Each rank has a connection to rank 0. It carries the rank's current call, heartbeats and failures. Rank 0 decides which
failure came first and tells all. The end of a connection is the death of a process, so a kill is seen at once. Missing
heartbeats are a stopped process or a lost machine. The file needs only the standard library.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from threading import Condition, RLock
from typing import NamedTuple

from torchrl_rloo.runtime.threads import PackageThread

EXIT_CODE = 75  # exit status of a rank that ends because another one failed (EX_TEMPFAIL)
_BEATS = 5, 600  # smallest and largest number of heartbeats within the limit
_BEAT_S = 1.0  # preferred time between heartbeats
_SETTLE_S = 0.5  # for reports of other ranks
_REPORT_S = 5.0  # for the blamed rank to print its error
_GRACE_S = 10.0  # for a rank to end by itself
_DRAIN_S = 1.0  # for last messages
_HELLO_S = 10.0  # for the proof of a connection
_TOKEN_BYTES = 32
_ERROR, _LOST, _SILENT, _WAIT = range(4)  # kinds of failures; a smaller one explains the larger ones


class RankError(RuntimeError):
    """Error of another rank, or a wait for one that took too long."""


class Failure(NamedTuple):
    """First failure of a run.

    Attributes:
        rank: rank that failed; None if a call of several ranks failed.
        text: one line for the other ranks.
    """

    rank: int | None
    text: str


class _Report(NamedTuple):
    kind: int
    rank: int
    text: str
    place: str = ""  # call in which or after which an error was raised


class _Peer:
    """Last news from another rank."""

    def __init__(self, connection: Connection):
        self.connection: Connection | None = connection
        self.calls, self.name, self.heard, self.has_left = 0, "the start", time.monotonic(), False


class Watch:
    """Thread that exchanges calls, heartbeats and failures with the other ranks.

    Args:
        rank: number of this rank.
        connections: connections by rank: of rank 0 to all others, of the others to rank 0.
        timeout: seconds without a heartbeat after which a rank counts as hung.

    Attributes:
        failure: first failure of any rank. None while all is well.
        name: last call of this rank.
        is_inside: True while this rank is in a call.
    """

    def __init__(self, rank: int, connections: Mapping[int, Connection], timeout: float):
        self.rank, self.timeout, self.failure = rank, timeout, None
        self._beat_s = min(max(_BEAT_S, timeout / _BEATS[1]), timeout / _BEATS[0])
        self._peers = {other: _Peer(connection) for other, connection in connections.items()}
        self._calls, self.name, self._names_of_main = 0, "the start", {}
        self.is_inside = False
        self._reports: list[_Report] = []
        self._judge_at = self._end_at = self._decided_at = float("inf")
        self._shown = self._closed = False
        self._lock, self._sending = Condition(), RLock()
        self._woken, self._wake = Pipe(duplex=False)
        self._thread = PackageThread(self._run, name="watch of the ranks", stop=self._leave)
        self._thread.start()

    # ------------------------------------------------------------------------------------------- calls of the rank
    def enter(self, name: str) -> None:
        """Tell the others that this rank enters its next call, and wait until rank 0 does so.

        Rank 0 may come hours later, since only it samples and evaluates. The wait ends only with its process.

        Raises:
            RankError: if a rank has failed, or rank 0 enters another call.
        """
        with self._lock:
            self._calls, self.name, number = self._calls + 1, name, self._calls + 1
        self._send_all("at", number, name)
        with self._lock:
            self._lock.wait_for(
                lambda: self.failure or self.rank == 0 or number in self._names_of_main or self._alone()
            )
            theirs = self._names_of_main.pop(number, name)
            if self.failure is not None:
                raise RankError(self.failure.text)
        if theirs != name:
            raise RankError(f"rank {self.rank} is in call {number}, {name}, but rank 0 is in {theirs}")

    def _alone(self) -> bool:
        if self.rank and self._peers[0].has_left:
            raise RankError(f"rank {self.rank} waits in {self.name}, but rank 0 has left")
        return False

    def fail(self, text: str, *, waited: bool = False, show: Callable[[], None] = lambda: None) -> Failure:
        """Report a failure of this rank, and return the first failure of all ranks.

        Args:
            text: the error in one line.
            waited: True if a call of several ranks failed, for which another rank may be to blame.
            show: function that prints the error, called before the others hear of it, if this rank failed first.
        """
        place = f"{'in' if self.is_inside else 'after'} {self.name}"
        report = _Report(_WAIT if waited else _ERROR, self.rank, text, place)
        if self.rank == 0:
            self._add(report)
        else:
            self._send(0, "failed", *report)
        # Wait for the verdict; without rank 0 this rank is the first that failed as far as it knows
        with self._lock:
            self._lock.wait_for(lambda: self.failure, _SETTLE_S + _REPORT_S)
            if self.failure is None:
                self._set_failure(Failure(None, text + self._absent(self.rank)) if waited else Failure(self.rank, text))
        if self.failure.rank == self.rank:
            show()
        # Let the others hear of it before this process ends
        if self.rank == 0:
            self._shown = True
        else:
            self._send(0, "shown")
        self._wake.send_bytes(b"")
        with self._lock:
            self._lock.wait_for(lambda: self._end_at < float("inf"), _REPORT_S)
        return self.failure

    def leave(self) -> None:
        """End the watch of a rank whose work is done."""
        self._leave()
        self._thread.join(2 * _DRAIN_S)

    def _leave(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._send_all("left")
        self._wake.send_bytes(b"")

    # ------------------------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        last_beat = time.monotonic()
        while not self._closed:
            sources = {peer.connection: rank for rank, peer in self._peers.items() if peer.connection is not None}
            ready = wait([self._woken, *sources], self._pause(time.monotonic()))
            now = time.monotonic()
            # A process that was stopped itself has heard no one
            if now - last_beat > 3 * self._beat_s:
                for peer in self._peers.values():
                    peer.heard = now
            if now - last_beat >= self._beat_s:
                self._send_all("beat")
                last_beat = now
            if self._woken in ready:
                self._woken.recv_bytes()
            for connection in ready:
                if connection is not self._woken:
                    self._receive(sources[connection])
            self._check(time.monotonic())
        _drain([peer.connection for peer in self._peers.values() if peer.connection is not None])

    def _pause(self, now: float) -> float:
        return max(0.0, min(self._beat_s, self._judge_at - now, self._end_at - now))

    def _receive(self, rank: int) -> None:
        """Take one message, or note the end of the connection."""
        peer = self._peers[rank]
        try:
            kind, *values = peer.connection.recv()
        except (OSError, EOFError):
            peer.connection.close()
            peer.connection = None
            if not peer.has_left:
                self._add(_Report(_LOST, rank, f"rank {rank} died; its last call was {peer.name}"))
            return
        peer.heard = time.monotonic()
        with self._lock:
            if kind == "at":
                peer.calls, peer.name = values
                if rank == 0:
                    self._names_of_main[peer.calls] = peer.name
            elif kind == "failed":
                self._add(_Report(*values))
            elif kind == "verdict":
                self._set_failure(Failure(*values))
            elif kind == "shown":
                self._shown = True
            elif kind == "left":
                peer.has_left = True
            self._lock.notify_all()

    def _add(self, report: _Report) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self._reports.append(report)
            self._judge_at = min(self._judge_at, time.monotonic() + _SETTLE_S)
        self._wake.send_bytes(b"")

    def _check(self, now: float) -> None:
        """Find hung ranks, decide on the first failure, and end this process if it does not do so by itself."""
        for rank, peer in self._peers.items():
            if peer.connection is not None and not peer.has_left and now - peer.heard > self.timeout:
                text = f"rank {rank} gave no sign of life for {self.timeout:g} s; its last call was {peer.name}"
                peer.connection.close()
                peer.connection = None
                self._add(_Report(_SILENT, rank, text))
        if self.failure is None and now >= self._judge_at and self._reports:
            self._decide(self._first_report())
        if self.failure is not None and self._end_at == float("inf"):
            self._spread(now)
        if now >= self._end_at:
            sys.stderr.flush()
            os._exit(1 if self.failure.rank == self.rank else EXIT_CODE)

    def _first_report(self) -> _Report:
        """Return the report to blame: an error before its consequences, and rank 0's of equal ones."""
        first = min(self._reports, key=lambda report: report.kind)
        return min((r for r in self._reports if r.kind == first.kind and r.text == first.text), key=lambda r: r.rank)

    def _decide(self, report: _Report) -> None:
        text = report.text
        if report.kind == _ERROR:
            text = f"rank {report.rank} failed {report.place}: {text}"
        elif report.kind == _WAIT:
            text += self._absent(report.rank)
        with self._lock:
            self._set_failure(Failure(None if report.kind == _WAIT else report.rank, text))
        # The blamed rank prints its error first
        self._judge_at, self._decided_at = float("inf"), time.monotonic()
        if report.kind == _ERROR and report.rank != self.rank:
            self._send(report.rank, "verdict", *self.failure)
        self._shown = self._shown or report.kind != _ERROR

    def _absent(self, waiter: int) -> str:
        """Return the ranks that did not come to the call in which a rank waited."""
        calls = self._calls if waiter == self.rank else self._peers[waiter].calls
        now, found = time.monotonic(), []
        for rank, peer in self._peers.items():
            silence = now - peer.heard
            if peer.has_left or peer.calls < calls or silence > 3 * self._beat_s:
                found.append(f"rank {rank} ({'has left' if peer.has_left else f'in {peer.name}'}")
                found[-1] += f", no sign of life for {silence:.0f} s)" if silence > 3 * self._beat_s else ")"
        if waiter != self.rank and self._calls < calls:
            found.append(f"rank {self.rank} (in {self.name})")
        return f"; missing: {', '.join(found)}" if found else ""

    def _spread(self, now: float) -> None:
        """Tell all ranks of the failure, once the blamed one has printed it, and print one line unless it is this."""
        if self.rank == 0 and not self._shown and now < self._decided_at + _REPORT_S:
            blamed = self._peers.get(self.failure.rank)
            if blamed is None or blamed.connection is not None:
                self._judge_at = now + 0.05  # look again
                return
        self._send_all("verdict", *self.failure)
        if self.failure.rank != self.rank:
            print(f"error: {self.failure.text}", file=sys.stderr, flush=True)
        with self._lock:
            self._judge_at, self._end_at = float("inf"), now + _GRACE_S
            self._lock.notify_all()

    def _set_failure(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._lock.notify_all()

    def _send_all(self, *message: object) -> None:
        for rank in self._peers if self.rank == 0 or message[0] != "verdict" else ():
            self._send(rank, *message)

    def _send(self, rank: int, *message: object) -> None:
        connection = self._peers[rank].connection
        try:
            with self._sending:
                if connection is not None:
                    connection.send(message)
        except OSError:  # the thread reads the end of the connection and reports it
            return


def _drain(connections: list[Connection]) -> None:
    """Close connections so that their last messages arrive: a close with unread data would discard them."""
    for connection in connections:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_WR)
    until = time.monotonic() + _DRAIN_S
    while connections and time.monotonic() < until:
        for connection in wait(connections, until - time.monotonic()):
            try:
                connection.recv_bytes()
            except (OSError, EOFError):
                connection.close()
                connections.remove(connection)
    for connection in connections:
        connection.close()


def connect(
    rank: int, size: int, share: Callable[[tuple | None], tuple], address: str | None, timeout: float
) -> dict[int, Connection]:
    """Connect all ranks to rank 0.

    Args:
        rank: number of this rank.
        size: number of ranks.
        share: function that gives rank 0's value to all ranks.
        address: address of rank 0's machine. None if all ranks are on one machine.
        timeout: seconds for all ranks to connect.

    Returns:
        On rank 0 a connection to each other rank; on the others, one to rank 0.

    Raises:
        RankError: if a rank does not connect in time.
    """
    deadline, connections = time.monotonic() + timeout, {}
    if rank:
        port, token = share(None)
        end = socket.create_connection((address or "127.0.0.1", port), timeout)
        end.sendall(token + rank.to_bytes(4, "big"))
        return {0: _framed(end)}
    # The listener is open only until all ranks have proven that they belong to the run
    with socket.create_server(("" if address else "127.0.0.1", 0), backlog=size) as listener:
        token = secrets.token_bytes(_TOKEN_BYTES)
        share((listener.getsockname()[1], token))
        while len(connections) < size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                end, _ = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, size)) - set(connections))
                raise RankError(f"rank_timeout={timeout:g}: ranks {missing} did not connect to rank 0") from None
            end.settimeout(min(_HELLO_S, max(0.01, deadline - time.monotonic())))
            hello = _receive_exactly(end, _TOKEN_BYTES + 4)
            other = int.from_bytes(hello[_TOKEN_BYTES:], "big")
            if hmac.compare_digest(hello[:_TOKEN_BYTES], token) and 0 < other < size:
                connections[other] = _framed(end)
            else:
                end.close()
    return connections


def _framed(end: socket.socket) -> Connection:
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(end.detach())


def _receive_exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    with suppress(OSError):
        while len(data) < size and (part := end.recv(size - len(data))):
            data += part
    return data
