"""Keeper process of Python sessions: ``serve`` takes over a process of :mod:`torchrl_rloo.sandbox.starter`.

There are three kinds of process. The keeper knows the calls of all sessions and runs none of their code. The zygote,
which the keeper starts, forks the sessions. It sees no call, so no session inherits data of another. A session holds
its standard streams and a socket to the keeper. It receives code there and sends one packet when the code has run.

A session is stopped between calls, with its threads and timers. Requests and replies are lines of JSON. All processes
end when the trainer's end of the channel closes or the trainer ends in any way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import time
from collections import OrderedDict, deque
from pathlib import Path
from types import ModuleType
from typing import Any

TICK = 0.05  # seconds between checks of the limits of running calls
IDLE = 1.0  # seconds between checks that the trainer lives, while no call runs
FILES, FILES_PER_SESSION = 128, 4  # file descriptors
TOKEN = 8  # bytes that begin a call and its answer
MAX_PACKET_BYTES = TOKEN + 2001  # of an answer: token, letter, report of an exception
# Reasons by the answer's letter. FULL: too little memory is left for another call
FULL = ord("M")
REASONS = {ord("o"): "ok", ord("e"): "error", ord("m"): "memory", FULL: "memory", ord("f"): "output"}


def fork_sessions(requests: socket.socket, containment: Any, cell: ModuleType) -> None:
    """Fork a session for each request and never return; a request carries a socket, an output and an empty input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children without waiting for them
    parent = os.getpid()
    while True:
        _, files, _, _ = socket.recv_fds(requests, 1, 3)
        if not files:
            os._exit(0)
        # Fork, or answer why the system refuses
        answer, handles = "", []
        try:
            pid = os.fork()
        except OSError as error:
            pid, answer = -1, str(error)
        if pid == 0:
            # Restrict the session before it runs any code
            try:
                with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
                    score.write("1000")  # if the machine runs out of memory, kill a session first
                peer, output, empty = files
                containment.restrict_process([empty, output, output], peer, parent)
                cell.serve()
            finally:
                os._exit(1)
        if pid > 0:
            # Send a handle in addition to the pid, which another process may get later
            try:
                answer, handles = str(pid), [os.pidfd_open(pid)]
            except OSError as error:  # for example, it has already ended
                answer = str(error)
        socket.send_fds(requests, [answer.encode()], handles)
        for file in files + handles:
            os.close(file)


class Process:
    """Process of a session.

    Args:
        zygote: socket to the process that forks it.

    Raises:
        OSError: if the system has no process or file descriptor left.
    """

    def __init__(self, zygote: socket.socket):
        self.channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output = self.handle = -1
        empty = -1
        try:
            # Output file and empty input of the session
            self.output = os.memfd_create("output")
            fcntl.fcntl(self.output, fcntl.F_SETFL, os.O_APPEND)  # the sandbox forbids a session to change this
            empty = os.open(os.devnull, os.O_RDONLY)
            # Let the zygote fork, because sessions forked here would inherit the calls of others
            socket.send_fds(zygote, [b"f"], [other.fileno(), self.output, empty])
            answer, handles, _, _ = socket.recv_fds(zygote, 200, 1)
            if not answer:
                os._exit(1)  # the zygote has ended: let the trainer start another keeper
            if not handles:
                raise OSError(answer.decode())
            self.pid, (self.handle,) = int(answer), handles
        except OSError:
            self.end()
            raise
        finally:
            other.close()
            if empty >= 0:
                os.close(empty)
        self.clock = (~self.pid << 3) | 2  # clock of the process's CPU time, see clock_getcpuclockid(3)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def cpu(self) -> float:
        """Return the CPU seconds used so far, or 0 if the process has ended."""
        try:
            return time.clock_gettime(self.clock)
        except OSError:
            return 0.0

    def silent(self) -> bool:
        """Return whether the process lives and no unread packet from it is left."""
        try:
            self.channel.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def end(self) -> None:
        if self.handle >= 0:
            self.signal(signal.SIGKILL)
        self.channel.close()
        for file in (self.output, self.handle):
            if file >= 0:
                os.close(file)


class Session:
    """Session of a trajectory: its process if it has one, its running call, and the calls that wait for it."""

    def __init__(self) -> None:
        self.process: Process | None = None
        self.waiting: deque[dict[str, Any]] = deque()
        self.request: dict[str, Any] | None = None
        self.token = b""  # of the running call
        self.new = False  # True if the running call started the process
        self.began = self.cpu = 0.0  # clock and CPU seconds at the start of the running call


class Keeper:
    """Supervisor that starts, watches and ends the processes of sessions.

    Args:
        channel: socket to the trainer.
        zygote: socket to the process that forks sessions.
        host: the module ``starter``.
        settings: ``timeout`` and ``cpu_seconds`` of a call, ``max_output`` (bytes of its output that are shown) and
            ``max_sessions`` (processes at a time), and ``trainer`` (its process id).
    """

    def __init__(self, channel: socket.socket, zygote: socket.socket, host: ModuleType, settings: dict[str, Any]):
        self.channel, self.zygote, self.host, self.settings = channel, zygote, host, settings
        self.sessions: dict[int, Session] = {}
        self.busy: dict[int, Session] = {}  # by the file descriptor of the session's channel
        self.idle: OrderedDict[int, Session] = OrderedDict()  # by the same, least recently used first
        self.ready: deque[Session] = deque()  # may have a call to start
        self.starved: deque[Session] = deque()  # have a call to start, but no process
        self.poll = select.epoll()
        for end in (channel, zygote):
            self.poll.register(end.fileno(), select.EPOLLIN)

    def run(self) -> None:
        """Serve the sessions until the trainer ends, the channel closes or the zygote ends."""
        trainer, text, checked, more = self.settings["trainer"], b"", 0.0, False
        while os.getppid() == trainer:
            # Take requests from the trainer and answers from sessions
            for file, _ in self.poll.poll(0 if more else TICK if self.busy else IDLE):
                if file == self.channel.fileno():
                    if not (part := self.channel.recv(1 << 16)):
                        return
                    *lines, text = (text + part).split(b"\n")
                    for line in lines:
                        self.take(json.loads(line))
                elif file == self.zygote.fileno():
                    return
                elif session := self.busy.get(file):
                    self.hear(session)
                elif session := self.idle.pop(file, None):  # no idle session may send anything
                    self.end(session)

            # Kill calls that exceed a limit
            if time.monotonic() >= checked + TICK:
                checked = time.monotonic()
                for session in list(self.busy.values()):
                    if reason := self.excess(session):
                        self.finish(session, reason, ended=True)

            # Start one call per round, so that running calls stay watched
            if more := bool(self.ready or (self.starved and self.make_room())):
                self.advance((self.ready or self.starved).popleft())

    def take(self, request: dict[str, Any]) -> None:
        """Queue the call of a request ``{"session", "call", "code"}``, or close the session of ``{"session"}``."""
        session = self.sessions.setdefault(request["session"], Session())
        if "code" in request:
            session.waiting.append(request)
            self.ready.append(session)
            return

        # Answer the calls of a closed session, then end its process
        del self.sessions[request["session"]]
        for waiting in session.waiting:
            self.reply(waiting["call"], reason="closed", ended=True)
        session.waiting.clear()
        if session in self.starved:
            self.starved.remove(session)
        if session.request is not None:
            self.finish(session, "closed", ended=True)
        elif session.process is not None:
            del self.idle[session.process.channel.fileno()]
            self.end(session)

    def advance(self, session: Session) -> None:
        """Start the next waiting call of a session, unless one runs."""
        if session.request is not None or not session.waiting or session in self.starved:
            return

        # Replace a process that was killed from outside, or that sent something while idle
        if session.process is not None and not session.process.silent():
            del self.idle[session.process.channel.fileno()]
            self.end(session)
        session.new = session.process is None
        if session.new and not self.make_room():
            self.starved.append(session)
            return

        # Send the code with a token that only the answer to this call can repeat
        session.request = session.waiting.popleft()
        try:
            if session.new:
                session.process = Process(self.zygote)
                self.poll.register(session.process.channel.fileno(), select.EPOLLIN)
            else:
                del self.idle[session.process.channel.fileno()]
            process = session.process
            self.busy[process.channel.fileno()] = session
            os.ftruncate(process.output, 0)
            session.began, session.cpu = time.monotonic(), process.cpu()
            session.token = os.urandom(TOKEN)
            process.channel.send(session.token + session.request["code"].encode(), socket.MSG_DONTWAIT)
            process.signal(signal.SIGCONT)
        except OSError as error:
            self.finish(session, "unavailable", f"{type(error).__name__}: {error}", ended=True)

    def make_room(self) -> bool:
        """Return whether another process may start; end the longest idle one if that makes room."""
        if len(self.busy) + len(self.idle) < self.settings["max_sessions"]:
            return True
        if not self.idle:
            return False
        self.end(self.idle.popitem(last=False)[1])
        return True

    def hear(self, session: Session) -> None:
        """Finish a running call with the packet that its process sent, or kill a process that forged one or ended."""
        try:
            packet = session.process.channel.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        letter = packet[TOKEN] if len(packet) > TOKEN and packet.startswith(session.token) else None
        if letter not in REASONS:
            self.finish(session, "killed", ended=True)
        else:
            report = packet[TOKEN + 1 :].decode(errors="replace")
            self.finish(session, REASONS[letter], report, ended=letter == FULL)

    def excess(self, session: Session) -> str | None:
        """Return the limit that a running call exceeds, or None."""
        if time.monotonic() - session.began > self.settings["timeout"]:
            return "timed_out"
        if session.process.cpu() - session.cpu > self.settings["cpu_seconds"]:
            return "cpu"
        return "threads" if self.host.count_threads(session.process.pid) > self.host.MAX_THREADS else None

    def finish(self, session: Session, reason: str, error: str = "", *, ended: bool) -> None:
        """Reply to a session's running call and stop or end its process."""
        output, process, call = "", session.process, session.request["call"]
        session.request = None
        if process is not None:
            process.signal(signal.SIGKILL if ended else signal.SIGSTOP)
            output = self.shown(process.output)
            file = process.channel.fileno()
            self.busy.pop(file, None)
            if ended:
                self.end(session)
            else:
                self.idle[file] = session
        self.reply(call, reason=reason, output=output, error=error, new=session.new, ended=ended)
        self.ready.append(session)

    def end(self, session: Session) -> None:
        """End the process of a session; its next call starts another."""
        self.poll.unregister(session.process.channel.fileno())
        session.process.end()
        session.process = None

    def shown(self, output: int) -> str:
        """Return the printed output, without its middle if it is too long."""
        size, limit = os.fstat(output).st_size, self.settings["max_output"]
        if size <= limit:
            return os.pread(output, limit, 0).decode(errors="replace")
        head = os.pread(output, limit - limit // 2, 0).decode(errors="replace")
        tail = os.pread(output, limit // 2, size - limit // 2).decode(errors="replace")
        return f"{head}\n[{size - limit} bytes of output are left out here]\n{tail}"

    def reply(self, call: int, **result: Any) -> None:
        self.channel.sendall(json.dumps({"call": call} | result).encode() + b"\n")


def serve(host: ModuleType, channel: socket.socket, containment: Any, settings: dict[str, Any]) -> None:
    """Serve sessions until the trainer's end of the channel closes.

    Args:
        host: the module ``starter``.
        channel: socket to the trainer.
        containment: prepared containment of the sessions.
        settings: settings of :class:`Keeper`.
    """
    cell = host.load(str(Path(__file__).with_name("python_cell")))
    host.kernel.limit_starter(FILES + FILES_PER_SESSION * settings["max_sessions"])

    # Fork the zygote before any call arrives, so that it knows none
    zygote, requests = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            host.kernel.die_with_parent()
            channel.close()
            zygote.close()
            if os.getppid() == parent:
                fork_sessions(requests, containment, cell)
        finally:
            os._exit(1)
    requests.close()
    Keeper(channel, zygote, host, settings).run()
