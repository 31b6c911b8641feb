"""Process of one Python session: it runs the code that it is sent in one namespace until it is killed.

The policy's code shares the interpreter with it, so nothing here protects anything. A program can break its own session
only.
"""

from __future__ import annotations

import ast
import base64
import errno
import io
import linecache
import os
import random
import sys
import traceback
import types
from collections import deque

CHANNEL = 3  # file descriptor of the socket to the keeper
TOKEN = 8  # bytes that begin a call and its answer
MAX_CODE_BYTES = 1 << 16  # one message on the socket
MAX_ERROR_BYTES = 2000  # of an exception's report
MAX_FRAMES = 8
IMAGE = b"\x1b]image;", b"\x07"  # bytes around the base64 of an image in the output
MIN_FREE_BYTES = 16 << 20  # that the next call needs to run at all
# Status of a call: a letter after the token of the answer, see keepers.py
OK, ERROR, MEMORY, FULL, OUTPUT = b"oemMf"


def serve() -> None:
    """Answer calls until the process ends; each answer repeats its call's token, so a late one is not mistaken."""
    read, write, exit_now = os.read, os.write, os._exit  # kept here: a program may overwrite those of ``os``
    sys.argv, sys.stdin = ["program"], open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    random.seed(0)  # the same calls give the same output, so the same reward
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.display = display
    number, full = 0, bytes([FULL])
    try:
        while packet := read(CHANNEL, TOKEN + MAX_CODE_BYTES):
            number += 1
            try:
                answer = call(packet[TOKEN:].decode(), f"<call {number}>", module.__dict__)
            except MemoryError:  # no memory for the report
                answer = full
            write(CHANNEL, packet[:TOKEN] + answer)
    finally:
        exit_now(1)


def call(code: str, name: str, namespace: dict) -> bytes:
    """Run code and return the answer: a letter, then the report of an exception."""
    status, report = OK, ""
    sys.stdout = sys.__stdout__ = stream(1)
    sys.stderr = sys.__stderr__ = stream(2)
    try:
        execute(code, name, namespace)
    except SystemExit as stop:
        if stop.code:
            status, report = ERROR, describe(stop)
    except BaseException as error:
        full = isinstance(error, OSError) and error.errno == errno.EFBIG
        status = OUTPUT if full else MEMORY if isinstance(error, MemoryError) else ERROR
        report = describe(error)
    # Report a session that has too little memory left for another call, so that the keeper ends it
    try:
        bytes(MIN_FREE_BYTES)
    except MemoryError:
        status = FULL
    text = report.encode(errors="replace")
    return bytes([status]) + (text if len(text) <= MAX_ERROR_BYTES else text[: MAX_ERROR_BYTES - 3] + b"...")


def stream(file: int) -> io.TextIOWrapper:
    """Return an unbuffered standard stream, so that output printed before a kill is not lost."""
    raw = io.FileIO(file, "w", closefd=False)
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", newline="\n", write_through=True)


def execute(code: str, name: str, namespace: dict) -> None:
    """Run code and print the value of its last expression, if it ends with one."""
    linecache.cache[name] = len(code), None, code.splitlines(True), name  # a traceback shows these lines
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
        if value is not None:
            print(repr(value))


def display(image: bytes) -> None:
    """Show an image file to the policy."""
    if not isinstance(image, (bytes, bytearray)):
        raise TypeError(f"display() takes the bytes of an image file, got {type(image).__name__}")
    begin, end = IMAGE
    print((begin + base64.b64encode(image) + end).decode())


def describe(error: BaseException) -> str:
    """Return an exception's message after the innermost traceback lines of the session's own code."""
    try:
        frames = traceback.walk_tb(error.__traceback__)
        own = deque((f for f in frames if f[0].f_code.co_filename.startswith("<call ")), MAX_FRAMES)
        lines = traceback.StackSummary.extract(own).format() if own else []
        return "".join([*lines, *traceback.format_exception_only(type(error), error)]).rstrip()
    except BaseException as second:  # the exception's own code raised, or memory ran out
        return f"{type(error).__name__} (no message: {type(second).__name__})"
