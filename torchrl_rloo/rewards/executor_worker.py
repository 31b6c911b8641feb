"""Worker process that calls reward functions; a script started by :mod:`torchrl_rloo.rewards.executors`.

Its arguments are the id of the training process, the limit on private memory, and two file descriptors: a socket for
messages, and a file for tracebacks of crashes and hangs. It does not import torch, so it starts within a fraction of a
second.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose files are not top-level modules

import faulthandler
import os
import pickle
import signal
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

DUMP_SIGNAL = signal.SIGUSR2  # requests a traceback of the running code


def main(trainer: int, memory: int, messages: int, tracebacks: int) -> None:
    """Serve requests until the socket closes."""
    # Continue in a fork, whose parent ends all processes that a reward leaves
    processes = import_file("torchrl_rloo.runtime.processes", Path(__file__).parents[1] / "runtime" / "processes.py")
    processes.limit_process(data=memory)
    processes.reap(trainer)
    # A child that outlives this process must not hold the socket open. Ctrl-C is left to the training process, which
    # may finish its step. The output of a reward must not mix with that of the training process
    for descriptor in (messages, tracebacks):
        os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    faulthandler.enable(tracebacks)
    faulthandler.register(DUMP_SIGNAL, tracebacks)
    connection = Connection(messages)
    try:
        serve(connection)
    except (EOFError, ConnectionError):  # the training process has closed or ended
        os._exit(0)  # exit even if a reward left threads behind


def serve(connection: Connection) -> None:
    """Answer each message with one reply."""
    # Import from the same places as the training process, before a function is unpickled
    sys.path[:] = pickle.loads(connection.recv_bytes())
    import cloudpickle

    protocol = import_file("torchrl_rloo.rewards.protocol", Path(__file__).with_name("protocol.py"))
    functions: dict[int, Callable[..., Any]] = {}

    def answer(message: bytes) -> Any:
        try:
            command, key, data = pickle.loads(message)
            content = pickle.loads(data)
            if command == "load":
                functions[key] = content
                return None
        except BaseException as error:
            failure = protocol.RewardFailure.from_exception(error)
            failure.message = f"could not be unpickled in a worker process: {failure.message}"
            return failure
        return protocol.attempt_reward(functions[key], content, BaseException)

    # Confirm the start, then send one reply to each message, even if a result cannot be pickled
    connection.send_bytes(pickle.dumps(None))  # ready
    while True:
        reply = answer(connection.recv_bytes())
        try:
            data = cloudpickle.dumps(reply)
        except Exception as error:  # a logged value cannot be pickled
            data = pickle.dumps(protocol.RewardFailure.from_exception(error, reply.seconds))
        connection.send_bytes(data)


def import_file(name: str, path: Path) -> ModuleType:
    """Import a module without its package, which takes longer to import."""
    spec = spec_from_file_location(name, path)
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
