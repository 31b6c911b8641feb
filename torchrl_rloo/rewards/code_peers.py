"""Program under test in a separate process; loaded by :mod:`torchrl_rloo.rewards.sandbox_child`.

``serve`` runs in the process of the program, and :mod:`torchrl_rloo.rewards.code_judge` in that of the tests. Calls of
the tests are executed in the process of the program, and only plain values come back: numbers, texts, lists, dicts and
similar. Nothing that the program does to its interpreter affects the tests: not ``sys.exit``, patched ``builtins`` or
an ``__eq__`` that always returns True. No frame or file of that process holds an expected result. Instances of the
program's classes stay there, and the tests hold a proxy for each. The program may write anything to the channel: a
reply is only data.

A message is a line of JSON. A request is ``[operation, arguments, keywords]``. A reply is
``["value", result, arguments]``, with the arguments after the call, or ``["raised", type, text]``.
"""

from __future__ import annotations

import builtins
import io
import json
import operator
import sys
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

CHANNEL = 3  # file descriptor of the socket between both processes
PROGRAM = "candidate"  # module name of the program's classes
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
NUMBERS = {"Fraction": Fraction, "Decimal": Decimal, "complex": complex}
MAPPINGS = {"Counter": Counter, "OrderedDict": OrderedDict, "dict": dict}
DATES = {"datetime": datetime, "date": date, "time": time}  # a datetime is also a date
MUTABLE = (list, dict, set, bytearray, deque, Counter, OrderedDict)
UNARY = ("abs", "invert", "neg", "pos")
BINARY = tuple("add and floordiv lshift matmul mod mul or pow rshift sub truediv xor".split())
ORDER = ("ge", "gt", "le", "lt")


class Proxy:
    """Object that stands for one of the other process."""


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode a value as JSON; ``keep`` returns the index of an object that is not a plain value."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if issubclass(kind, Proxy):
        return ["object", keep(value), None]
    if kind.__module__ == PROGRAM:
        return ["object", keep(value), _encode_plain(value, keep)]
    return _encode_plain(value, keep) or ["object", keep(value), None]


def _encode_plain(value: Any, keep: Callable[[Any], Any]) -> Any:
    kind = type(value)  # ``__class__`` may be a claim
    for name, base in SEQUENCES.items():
        if issubclass(kind, base):
            return [name, *(encode(item, keep) for item in base(value))]
    if issubclass(kind, range):
        return ["range", value.start, value.stop, value.step]
    for name, base in MAPPINGS.items():
        if issubclass(kind, base):
            return [name, *([encode(k, keep), encode(v, keep)] for k, v in dict(value).items())]
    if issubclass(kind, (bytes, bytearray)):
        return [kind.__name__, bytes(value).hex()]
    for name, base in NUMBERS.items():
        if issubclass(kind, base):
            return [name, str(value)]
    for name, base in DATES.items():
        if issubclass(kind, base):
            return [name, base.isoformat(value)]
    if issubclass(kind, timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    for base in (int, float, str):
        if issubclass(kind, base):
            return ["scalar", base.__add__(value, base())]
    return None


def decode(data: Any, restore: Callable[[Any, Any], Any]) -> Any:
    """Decode the result of :func:`encode`; ``restore`` returns the object of an index and an optional plain form."""
    if not isinstance(data, list):
        return data
    kind, *items = data
    if kind in SEQUENCES:
        return SEQUENCES[kind]([decode(item, restore) for item in items])
    if kind in MAPPINGS:
        return MAPPINGS[kind]({decode(key, restore): decode(value, restore) for key, value in items})
    if kind in DATES:
        return DATES[kind].fromisoformat(items[0])
    if kind == "timedelta":
        return timedelta(*items)
    if kind == "range":
        return range(*items)
    if kind in NUMBERS:
        return NUMBERS[kind](items[0])
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind)(bytes.fromhex(items[0]))
    if kind == "scalar":
        return items[0]
    if kind != "object":
        raise ValueError(f"kind={kind!r:.100} is unknown")
    return restore(items[0], decode(items[1], restore))


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
        # A separate object for each NaN: containers that share one would be equal
        return json.loads(line, parse_constant=float) if line.endswith(b"\n") else None


def find_state(value: Any) -> list[Any] | None:
    """Return the class and attributes of an object, None without any or if its class compares by identity."""
    kind = type(value)
    if kind.__eq__ is object.__eq__ or isinstance(value, type):
        return None
    slots = [name for base in kind.__mro__ for name in vars(base).get("__slots__", ()) if hasattr(value, name)]
    attributes = dict(getattr(value, "__dict__", {})) | {name: getattr(value, name) for name in slots}
    return [kind, attributes] if attributes else None


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "plain": lambda value: next(kind(value) for kind in MUTABLE if isinstance(value, kind)),
    "state": find_state,
    "len": len,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "isinstance": type.__instancecheck__,
    "issubclass": type.__subclasscheck__,
    **{name: getattr(operator, f"__{name}__") for name in (*UNARY, *BINARY, *ORDER)},
}


def serve() -> None:
    """Run the program of the task on standard input, then the requests of the tests until these end."""
    stream, task, objects, indices = Stream(), json.load(sys.stdin), [], {}
    sys.stdin = io.StringIO()
    module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
    own: dict[str, Any] = {}

    # Keep values that cannot be sent, and send their number instead
    def keep(value: Any) -> int:
        if id(value) not in indices:
            indices[id(value)] = len(objects)
            objects.append(value)
        return indices[id(value)]

    def answer(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            result = function(*args, **kwargs)
            given = (*args, *kwargs.values())
            return ["value", encode(result, keep), [encode(a, keep) if type(a) in MUTABLE else None for a in given]]
        except BaseException as error:  # SystemExit and KeyboardInterrupt are also failures of the program
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            return ["raised", kinds[0], str(error)[:1000]]

    # Operations on the whole program: run it, and look up names in it
    def load() -> None:
        own.update(load_program(module.__dict__, **task))

    def names(requested: list[str]) -> dict[str, Any]:
        found = vars(module) | own
        return {name: found[name] for name in requested if name in found}

    # Reply first to the program itself, then to each request
    reply = answer(load, [], {})
    while True:
        stream.send(reply)
        if (request := stream.receive()) is None:
            return
        args, kwargs = (decode(part, lambda index, plain: objects[index]) for part in request[1:])
        reply = answer(names if request[0] == "names" else OPERATIONS[request[0]], args, kwargs)


def load_program(namespace: dict[str, Any], prelude: str, program: str, names: list[str]) -> dict[str, Any]:
    """Run the prelude, then the program, and return what the prelude defines and the program cannot replace.

    The prelude's stubs of ``names`` are removed: the program has to define them. A program that is no Python alone
    continues the prelude.
    """
    try:
        own = compile(program, "<program>", "exec")
    except SyntaxError:
        exec(compile(prelude + program, "<program>", "exec"), namespace)
        return {}
    try:
        first = compile(prelude, "<prelude>", "exec")
    except SyntaxError:
        first = ""
    exec(first, namespace)
    for name in names:
        namespace.pop(name, None)
    helpers = {name: value for name, value in namespace.items() if isinstance(value, (type, types.FunctionType))}
    exec(own, namespace)
    return helpers
