"""Worker process of :class:`~torchrl_rloo.rewards.process_judge.ProcessJudge`: a script whose argument names a judge.

It does not import the toolkit, so it starts in about a second and needs about 60 MB. Requests and replies are lines of
JSON. A request is ``[limit, gold, text]`` with a limit in seconds of CPU time. The first reply tells whether the gold
was read, or is an error. If it was, a second reply tells whether the text fits it. Without a gold, the reply is the
canonical form of the text's answer, or ``""``.

A child process reads and answers. A request over the limit ends the child, within any operation. Its parent replies
``null`` and forks the next child, which takes milliseconds since the libraries are imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    FOLDER = sys.path.pop(0)  # of this script, whose files are not top-level modules

import importlib.util
import json
import os
import resource
import signal
from contextlib import suppress
from typing import Any

MAX_BYTES = 2_000_000_000  # address space: some short texts are numbers of gigabytes


def answer_requests(judge: Any, replies: int) -> None:
    """Answer requests from standard input until it closes; end this process at a request's limit of CPU time."""

    def reply(value: Any) -> None:
        os.write(replies, json.dumps(value).encode() + b"\n")

    while line := _read_line():
        limit, gold, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit)  # its signal ends the process within any operation
        if gold is None:
            reply(judge.form(judge.parse_answer(text)))
        else:
            parsed = judge.parse_gold(gold)
            reply(parsed if isinstance(parsed, str) else bool(parsed))
            if parsed and not isinstance(parsed, str):
                reply(judge.equal(parsed, judge.parse_answer(text)))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read_line() -> bytes:
    """Return the next request; no other follows it before its reply, so no text of another is read."""
    line = bytearray()
    while not line.endswith(b"\n") and (part := os.read(0, 65536)):
        line += part
    return bytes(line)


def main(folder: str, name: str) -> None:
    """Fork processes that answer requests, one at a time, until standard input closes."""
    # Leave Ctrl-C to the training process, and keep the output of libraries out of the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    with suppress(ValueError, OSError):  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)  # the limit of CPU time bounds large numbers
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, f"{name}.py"))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    judge = module.make_judge()
    os.write(replies, b'"ready"\n')
    while (child := os.fork()) > 0:
        if os.waitpid(child, 0)[1] == 0:
            return
        os.write(replies, b"null\n")
    try:
        answer_requests(judge, replies)
    except (MemoryError, RecursionError):
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(FOLDER, sys.argv[1])
