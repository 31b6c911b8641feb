"""Fork server: a process with heavy imports that forks one child per script.

An interpreter that imports torch, transformers and this package takes about ten CPU seconds; a fork takes none. As with
``subprocess``, a child has a separate session, working directory, environment, files and exit code. It receives signals
and exits as an interpreter does. Two things differ: all children of a server share one hash seed, and modules imported
before the fork do not see the child's environment. So each script also has a test in a new interpreter, and tests of
imports and of the interpreter's exit use only new interpreters.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "hydra",
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
    "torchrl.record.loggers.tensorboard",
    "transformers.models.qwen2.modeling_qwen2",
    *(f"torchrl_rloo.{name}" for name in ("embedded", "run", "diagnostics", "collectors", "envs", "objectives")),
)


class ForkedProcess:
    """A script in a child of the server, with the interface of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket, output: Path) -> None:
        self._connection, self._lines, self._output = connection, connection.makefile("r"), output
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._finish(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; a negative one names the signal that ended the process."""
        if self._finish(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.returncode

    def _finish(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if selector.select(timeout):
                    self.returncode = int(self._lines.readline())
                    self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, without its children."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process and everything that it started."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def stdout(self) -> str:
        """Standard output of the process so far."""
        return self._output.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        """Standard error of the process so far."""
        return self._output.with_suffix(".err").read_text()


class ForkServer:
    """Client of the server, which starts with the first request.

    Args:
        folder: folder for the output of the processes.
        imports: modules that are imported before the fork.
        python: interpreter of the server. None is this one.
        path: folders to import from, in addition to those of the interpreter. None takes those of this process.
    """

    def __init__(
        self,
        folder: Path,
        imports: Sequence[str] = IMPORTED,
        *,
        python: Path | None = None,
        path: Sequence[str] | None = None,
    ) -> None:
        self._folder, self._imports, self._count, self._server = folder, imports, 0, None
        self._python, self._path = str(python or sys.executable), path

    def start(
        self,
        script: Path | str,
        arguments: Sequence[str] = (),
        *,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess:
        """Run a script in a new process.

        Args:
            script: file, or Python source for ``python -c``.
            arguments: arguments of the script.
            cwd: working directory; None takes this process's.
            environment: environment variables; None takes this process's.
        """
        self._count += 1
        output = self._folder / f"process{self._count}"
        request = {
            "script": str(script),
            "is_file": isinstance(script, Path),
            "arguments": list(map(str, arguments)),
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        ours, theirs = socket.socketpair()
        with open(output.with_suffix(".out"), "wb") as out, open(output.with_suffix(".err"), "wb") as err, theirs:
            files = (theirs.fileno(), out.fileno(), err.fileno())
            message = json.dumps(request).encode()
            server = self._connected()
            socket.send_fds(server, [len(message).to_bytes(8, "big")], files)
            server.sendall(message)
        return ForkedProcess(ours, output)

    def run(self, script: Path | str, arguments: Sequence[str] = (), *, timeout: float = 300.0, **kwargs: Any):
        """Run a script to its end, with the arguments of :meth:`start` and the result of ``subprocess.run``."""
        process = self.start(script, arguments, **kwargs)
        try:
            process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            [str(script), *arguments], process.returncode, process.stdout, process.stderr
        )

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._socket.close()
            self._server.wait()

    def _connected(self) -> socket.socket:
        if self._server is None:
            self._socket, theirs = socket.socketpair()
            path = filter(None, sys.path if self._path is None else self._path)
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
            command = [self._python, __file__, str(theirs.fileno()), *self._imports]
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
            theirs.close()
        return self._socket


# ----------------------------------------------------------------------------------------------------------- the server
def serve(requests: socket.socket) -> None:
    """Fork a child per request and report its exit code, until the client closes the connection."""
    selector, clients = selectors.DefaultSelector(), {}
    selector.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:  # a child has ended
                pid, client = clients.pop(key.fileobj)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                with client:
                    _tell(client, status)
                continue
            size, files, _, _ = socket.recv_fds(requests, 8, 3)
            if not size:
                for pid, _ in clients.values():
                    _kill(pid)
                return
            request = json.loads(_receive(requests, int.from_bytes(size, "big")))
            client = socket.socket(fileno=files[0])
            sys.stdout.flush()
            if (pid := os.fork()) == 0:
                os.setsid()
                _tell(client, os.getpid())  # from now on the client may kill the group
                selector.close()
                for other in (requests, client, *(other for _, other in clients.values())):
                    other.close()
                _become(request, *files[1:])
            for file in files[1:]:
                os.close(file)
            clients[ended := os.pidfd_open(pid)] = (pid, client)
            selector.register(ended, selectors.EVENT_READ)


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group yet, and so no children
        os.kill(pid, signal.SIGKILL)


def _tell(client: socket.socket, number: int) -> None:
    try:
        client.sendall(f"{number}\n".encode())
    except OSError:  # the client has closed the connection
        return


def _receive(connection: socket.socket, size: int) -> bytes:
    data = io.BytesIO()
    while data.tell() < size:
        data.write(connection.recv(size - data.tell()))
    return data.getvalue()


def _become(request: dict[str, Any], out: int, err: int) -> None:
    """Turn this child into the requested process, and never return."""
    with open(os.devnull, "rb") as nothing:
        for source, target in ((nothing.fileno(), 0), (out, 1), (err, 2)):
            os.dup2(source, target)
    os.close(out), os.close(err)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have made the server ignore it
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    _reseed()
    code = 0
    try:
        _run(request)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, (int, type(None))):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        code = 1
    # Exit as an interpreter does, without finalizing objects of the server
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _run(request: dict[str, Any]) -> None:
    script, arguments = request["script"], request["arguments"]
    if request["is_file"]:
        sys.argv = [script, *arguments]
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
        return
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(script, "<string>", "exec"), vars(main))


def _reseed() -> None:
    """Give random generators a state that no other child has, as in a new interpreter."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _prepare(imports: Sequence[str]) -> None:
    """Import modules; only threads of memory allocators, which survive a fork, may start."""
    for name in imports:
        importlib.import_module(name)
    importlib.import_module("support.hermetic").refuse_remote_connections()
    running = [thread.name for thread in threading.enumerate()]
    assert running == ["MainThread"], f"imports started the threads {running}"


if __name__ == "__main__":
    _prepare(sys.argv[2:])
    gc.freeze()  # or the first garbage collection of each child copies all pages
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # without libraries' reports of supposed leaks
