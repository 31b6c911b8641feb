"""Calls reward functions in a process of its own; run as a script by :mod:`torchrl_rloo.rewards.executor_process`.

Arguments are two file descriptors: a socket for messages, and a file for tracebacks of crashes and hangs. It imports
no torch, so that starting it takes a fraction of a second.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script: its files are no top-level modules

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

DUMP_SIGNAL = signal.SIGUSR2  # asks for the traceback of what is running


def main(messages: int, tracebacks: int) -> None:
    """Serves until the socket closes."""
    for descriptor in (messages, tracebacks):
        os.set_inheritable(descriptor, False)  # a child that outlives this process must not hold its socket open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training process, which may finish its step
    os.dup2(2, 1)  # what a reward prints must not mix with what the training process prints
    faulthandler.enable(tracebacks)
    faulthandler.register(DUMP_SIGNAL, tracebacks)
    connection = Connection(messages)
    try:
        serve(connection)
    except (EOFError, ConnectionError):  # the training process has closed or ended
        os._exit(0)  # threads that a reward has left behind would keep this process


def serve(connection: Connection) -> None:
    """Answers each message with one reply."""
    sys.path[:] = pickle.loads(connection.recv_bytes())
    import cloudpickle

    protocol = import_protocol()
    functions: dict[int, Callable[..., Any]] = {}

    def answer(message: bytes) -> Any:
        try:
            command, key, data = pickle.loads(message)
            content = pickle.loads(data)
            if command == "load":
                functions[key] = content
                return None
        except BaseException as error:
            failure = protocol.RewardFailure.of(error)
            failure.message = f"could not be unpickled in a worker process: {failure.message}"
            return failure
        return protocol.attempt_reward(functions[key], content, BaseException)

    connection.send_bytes(pickle.dumps(None))  # ready
    while True:
        reply = answer(connection.recv_bytes())
        try:
            data = cloudpickle.dumps(reply)
        except Exception as error:  # what it logged cannot be pickled
            data = pickle.dumps(protocol.RewardFailure.of(error, reply.seconds))
        connection.send_bytes(data)


def import_protocol() -> ModuleType:
    """The module ``torchrl_rloo.rewards.protocol`` without its package, whose other rewards take longer to import."""
    name = "torchrl_rloo.rewards.protocol"
    spec = spec_from_file_location(name, Path(__file__).with_name("protocol.py"))
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
