"""Tests and the program under test in separate processes; loaded by :mod:`torchrl_rloo.rewards.sandbox_child`.

``serve`` runs in the process of the program, ``judge`` in that of the tests. Calls of the tests are executed in the
process of the program, and only plain values come back: numbers, texts, lists, dicts and similar. Nothing that the
program does to its interpreter affects the tests: not ``sys.exit``, patched ``builtins`` or an ``__eq__`` that always
returns True. No frame or file of that process holds an expected result. Instances of the program's classes stay there,
and the tests hold a :class:`RemoteObject` for each.

A message is a line of JSON. A request is ``[operation, arguments, keywords]``. A reply is
``["value", result, arguments]``, with the arguments after the call, or ``["raised", type, text]``.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import io
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

CHANNEL = 3  # file descriptor of the socket between both processes
PROGRAM = "candidate"  # module name of the program's classes
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
NUMBERS = {"Fraction": Fraction, "Decimal": Decimal, "complex": complex}


class UnsupportedTestError(Exception):
    """Error of a test that passes a value which cannot be sent to another process."""


class ProgramEndedError(Exception):
    """Error of a test whose program has ended."""


class ProgramError(Exception):
    """Error that stands for an exception of the program that is not built in."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value as JSON; ``keep`` returns the index of an object that is not a plain value."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__module__ == PROGRAM:
        return ["object", keep(value), _encode_plain(value, keep)]
    return _encode_plain(value, keep) or ["object", keep(value), None]


def _encode_plain(value: Any, keep: Callable[[Any], Any]) -> Any:
    for name, base in SEQUENCES.items():
        if isinstance(value, base):
            return [name, *(encode(item, keep) for item in base(value))]
    if isinstance(value, dict):
        return ["dict", *([encode(k, keep), encode(v, keep)] for k, v in dict(value).items())]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).hex()]
    for name, base in NUMBERS.items():
        if isinstance(value, base):
            return [name, str(value)]
    for base in (int, float, str):
        if isinstance(value, base):
            return ["scalar", base.__add__(value, base())]
    return None


def decode(data: Any, restore: Callable[[Any, Any], Any]) -> Any:
    """Decode the result of :func:`encode`; ``restore`` returns the object of an index and an optional plain form."""
    if not isinstance(data, list):
        return data
    kind, *items = data
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(item, restore) for item in items)
    if kind == "dict":
        return {decode(key, restore): decode(value, restore) for key, value in items}
    if kind in NUMBERS:
        return NUMBERS[kind](items[0])
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind)(bytes.fromhex(items[0]))
    return items[0] if kind == "scalar" else restore(items[0], decode(items[1], restore))


class Stream:
    """Endpoint of the channel."""

    def __init__(self) -> None:
        sys.set_int_max_str_digits(0) if hasattr(sys, "set_int_max_str_digits") else None
        self.input, self.output = open(CHANNEL, "rb", closefd=False), open(CHANNEL, "wb", closefd=False)

    def send(self, message: list[Any]) -> None:
        self.output.write(json.dumps(message).encode() + b"\n")
        self.output.flush()

    def receive(self) -> list[Any] | None:
        line = self.input.readline()
        return json.loads(line) if line.endswith(b"\n") else None


# ---------------------------------------------------------------------------------------------------------------------
# The program's side
# ---------------------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "eq": lambda a, b: bool(a == b),
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
}


def serve() -> None:
    """Run the program from standard input, then the requests of the tests until these end."""
    stream, objects = Stream(), []
    source, sys.stdin = sys.stdin.read(), io.StringIO()
    module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)

    # Keep values that cannot be sent, and send their number instead
    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def answer(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            result = function(*args, **kwargs)
            return ["value", encode(result, keep), [encode(a, keep) if _mutable(a) else None for a in args]]
        except BaseException as error:  # SystemExit and KeyboardInterrupt are also failures of the program
            return ["raised", type(error).__name__, str(error)[:1000]]

    # Operations on the whole program: run it, and look up names in it
    def load() -> None:
        exec(compile(source, "<program>", "exec"), module.__dict__)

    def names(requested: list[str]) -> list[dict[str, Any]]:
        found = {name: vars(module)[name] for name in requested if name in vars(module)}
        library = {name: origin for name, value in found.items() if (origin := _find_origin(value))}
        return [{name: value for name, value in found.items() if name not in library}, library]

    # Reply first to the program itself, then to each request
    reply = answer(load, [], {})
    while True:
        stream.send(reply)
        if (request := stream.receive()) is None:
            return
        args, kwargs = (decode(part, lambda index, plain: objects[index]) for part in request[1:])
        reply = answer(names if request[0] == "names" else OPERATIONS[request[0]], args, kwargs)


def _find_origin(value: Any) -> tuple[str, str] | None:
    """Return the module and name that a value was imported from (name "" for a module), None for other values."""
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module not in sys.modules or module in (PROGRAM, "builtins") or not isinstance(name, str):
        return None
    return (module, name) if getattr(sys.modules[module], name, None) == value else None


def _mutable(value: Any) -> bool:
    return type(value) in (list, dict, set, bytearray)


# ---------------------------------------------------------------------------------------------------------------------
# The tests' side
# ---------------------------------------------------------------------------------------------------------------------


class RemoteObject:
    """Proxy of an object in the program's process.

    It equals a plain value only through its plain form (of a named tuple, for example); its ``__eq__`` is not asked.
    The program compares two of its objects.
    """

    __hash__ = None

    def __init__(self, link: ProgramConnection, index: int, plain: Any):
        self.__dict__.update(_link=link, _index=index, _plain=plain)

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, RemoteObject):
            return self._link.request("eq", self, other)
        return self._plain is not None and self._plain == other

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.request("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._link.request("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.request("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.request("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._link.request("delitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        return self._link.request("iter", self)

    def __next__(self) -> Any:
        return self._link.request("next", self)

    def __len__(self) -> int:
        return self._link.request("len", self)

    def __bool__(self) -> bool:
        return self._link.request("bool", self)

    def __str__(self) -> str:
        return self._link.request("str", self)

    def __repr__(self) -> str:
        return self._link.request("repr", self)


class ProgramConnection:
    """Connection from the tests to the program.

    Attributes:
        fault: fatal error that tests must not catch: the program has ended, or a test cannot run. None without one.
    """

    def __init__(self) -> None:
        self.stream, self.fault = Stream(), None

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Execute an operation in the program's process and copy its changes to mutable arguments.

        Raises:
            Exception: any exception of the program, or the :attr:`fault`.
        """
        if self.fault:
            raise self.fault
        request = [operation, encode(list(args), self.keep), encode(kwargs, self.keep)]
        try:
            self.stream.send(request)
        except OSError:
            self._end()
        return self.receive(args)

    def receive(self, args: tuple[Any, ...] = ()) -> Any:
        """Read the answer of the program: return its value or raise its exception."""
        try:
            kind, *content = self.stream.receive() or ["ended"]
        except (OSError, ValueError, TypeError, RecursionError):  # the program may write anything to the channel
            kind, content = "ended", []
        if kind == "value":
            for argument, after in zip(args, content[1], strict=True):
                after is None or _assign(argument, decode(after, self.restore))
            return decode(content[0], self.restore)
        if kind == "raised":
            raised = getattr(builtins, content[0], None)
            known = isinstance(raised, type) and issubclass(raised, Exception)
            raise raised(content[1]) if known else ProgramError(": ".join(content))
        self._end()

    def _end(self) -> None:
        self.fault = ProgramEndedError("the program ended before its tests")
        raise self.fault

    def keep(self, value: Any) -> int:
        if isinstance(value, RemoteObject):
            return value._index
        self.fault = UnsupportedTestError(
            f"a test passes a {type(value).__name__}, which cannot be sent to another process"
        )
        raise self.fault

    def restore(self, index: int, plain: Any) -> RemoteObject:
        return RemoteObject(self, index, plain)


def _assign(target: Any, value: Any) -> None:
    if target == value or type(target) is not type(value):
        return
    if isinstance(target, (list, bytearray)):
        target[:] = value
    else:
        target.clear()
        target.update(value)


def judge() -> None:
    """Run the tests from standard input and print a JSON line ``[passed, reason]`` for each.

    Print ``{"broken": reason}`` instead if the tests cannot run with any program.
    """
    # Compile all tests first: a syntax error is no failure of the program
    task, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    texts = [task["setup"], *task["tests"]]
    try:
        setup, *tests = (compile(text, "<test>", "exec") for text in texts)
    except (SyntaxError, ValueError) as error:
        print(json.dumps({"broken": f"{type(error).__name__}: {error}"}), file=out)
        return
    link, namespace = ProgramConnection(), {"__name__": "tests"}

    def attempt(step: Callable[..., Any], *args: Any) -> str | None:
        """Run a step and return the reason of its failure, None if it succeeds."""
        try:
            step(*args)
            error = link.fault
        except BaseException as raised:  # SystemExit is also a failure
            error = link.fault or raised
        if isinstance(error, UnsupportedTestError):
            print(json.dumps({"broken": str(error)}), file=out, flush=True)
            os._exit(0)
        return None if error is None else f"{type(error).__name__}: {error}"[:300]

    def prepare() -> None:
        link.receive()  # raises if loading the program failed
        used = {node.id for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        namespace.update(_resolve_names(link.request("names", sorted(used))))
        exec(setup, namespace)

    # Load the program's names, then run the tests in order
    if reason := attempt(prepare):
        print(json.dumps([False, reason]), file=out)
        return
    for test in tests:
        reason = attempt(exec, test, namespace)
        print(json.dumps([reason is None, reason]), file=out)
        if reason is not None and not task["partial"]:
            return


def _resolve_names(content: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the program's names for the tests, except those that would replace built-in or library names."""
    own, library = content
    names = {k: v for k, v in own.items() if not hasattr(builtins, k) and k not in sys.stdlib_module_names}
    for name, (module, attribute) in library.items():
        if module.partition(".")[0] in sys.stdlib_module_names:
            source = importlib.import_module(module)
            names[name] = getattr(source, attribute) if attribute else source
    return names
