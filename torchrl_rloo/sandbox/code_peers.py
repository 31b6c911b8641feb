"""Program under test in a separate process; loaded by :mod:`torchrl_rloo.sandbox.starter`.

``serve`` runs in the process of the program, and :mod:`torchrl_rloo.sandbox.code_judge` in that of the tests. Calls of
the tests are executed in the process of the program, and data comes back (:mod:`torchrl_rloo.sandbox.code_values`).
Nothing that the program does to its interpreter affects the tests: not ``sys.exit``, patched ``builtins`` or an
``__eq__`` that always returns True. No frame or file of that process holds an expected result. Objects of the program
stay there, and the tests hold a proxy for each. The program may write anything to the channel: a reply is only data.

A message is a line of JSON. A request has the operation, its arguments and keywords, the changed containers, and those
that the tests no longer hold. None instead of the changes leaves them out of the reply. A reply has ``"value"`` or
``"raised"``, that value, the objects and classes that are new, the changed containers, and what the program printed.
"""

from __future__ import annotations

import copy
import io
import json
import random
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

from torchrl_rloo.sandbox.code_values import COPIED, SHARED, Values, find_library, get_fixed, plain_base, take_scalar

ABSTRACT = ("abc", "collections.abc", "numbers")  # modules of the standard library whose classes only compute
DATACLASSES = ("asdict", "astuple", "fields", "replace")  # functions that need the class itself
CHANNEL = 3  # file descriptor of the socket between both processes
PROGRAM = "candidate"  # module name of the program's classes
MAX_PRINTED = 100_000  # characters that a reply has of what the program printed
_ORDER = "eq ne lt le gt ge"
_ARITHMETIC = "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor divmod"
# Special methods that combine an object with another one
BINARY = {f"__{name}__" for name in f"{_ORDER} {_ARITHMETIC} contains".split()}
BINARY |= {f"__{side}{name}__" for name in _ARITHMETIC.split() for side in "ri"}
# Those that turn it into a number or a truth
CONVERSIONS = {
    f"__{name}__" for name in "bool int float complex index round trunc floor ceil abs neg pos invert".split()
}
_FREE = (
    "call iter next len length_hint str repr format bytes hash getitem setitem delitem missing reversed enter exit "
    "fspath aiter anext aenter aexit await"
)
# Methods of an iterator whose end is their exception
ENDING = {"__next__", "__anext__", "send", "throw"}
PROTOCOLS = BINARY | CONVERSIONS | {f"__{name}__" for name in _FREE.split()} | {"send", "throw", "close"}


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


class ProgramValues(Values):
    """Values at the end of the program, which numbers its objects and classes."""

    def __init__(self) -> None:
        super().__init__("p")
        self.numbers: dict[int, int] = {}
        self.news: list[list[Any]] = []  # descriptions of the objects that the tests do not know
        self.lent: dict[int, list[str]] = {}  # names of what the tests have passed of the standard library

    def refer(self, value: Any) -> list[Any]:
        if id(value) in self.lent:
            return ["library", *self.lent[id(value)]]
        number = self._number(value)
        if plain_base(type(value)) in SHARED:
            self.share(value, f"o{number}")
        return ["object", number]

    def resolve(self, kind: str, parts: list[Any]) -> Any:
        if kind == "new":
            kind, *args = map(self.decode, parts or [["library", "builtins", "object"]])
            return kind(*args)
        if kind == "library":
            found = find_library(*parts)
            self.lent[id(found)] = parts
            return found
        return self.objects[parts[0]]

    def _number(self, value: Any) -> int:
        if id(value) not in self.numbers:
            self._describe_class(value) if isinstance(value, type) else self._describe_object(value)
        return self.numbers[id(value)]

    def _keep(self, value: Any) -> int:
        number = self.numbers[id(value)] = len(self.objects)
        self.objects[number] = value
        return number

    def _describe_object(self, value: Any) -> None:
        kind, base, content = type(value), plain_base(type(value)), None  # ``__class__`` may be a claim
        described = self._number(kind)
        if base in COPIED:
            content = [base.__name__, *map(self.encode, COPIED[base][0](value))]
        elif base in SHARED:
            content = [base.__name__, self.encode(get_fixed(value, base))]
        elif base is not None:
            content = ["scalar", take_scalar(value, base)]
        elif issubclass(kind, BaseException):
            attributes = tuple(vars(value).items()) if _is_library(kind) else ()
            # The members of a group must exist before it
            args = (value.message, tuple(value.exceptions)) if hasattr(kind, "exceptions") else tuple(value.args)
            content = ["error", *map(self.encode, (args, attributes, value.__cause__))]
        self.news.append(["object", self._keep(value), described, content])

    def _describe_class(self, kind: type) -> None:
        library = _is_library(kind)
        builtin = library and kind.__module__ == "builtins"
        bases = [] if builtin else [self._number(base) for base in kind.__bases__ if base not in (object, type)]
        meta = None if type(kind) is type or library else self._number(type(kind))
        # Find the methods that it does not have from a type which the tests have
        plain, errors = plain_base(kind), [base for base in kind.__mro__ if base.__module__ == "builtins"]
        anchor = plain or next(base for base in errors if issubclass(base, (BaseException, type)) or base is object)
        known = [plain] if plain else [base for base in kind.__mro__ if base.__module__ in ABSTRACT]
        own = {"__getattr__": True} if hasattr(kind, "__getattr__") else {}
        for name in () if kind is anchor else {name for base in kind.__mro__ for name in vars(base)}:
            method, missing = getattr(kind, name, anchor), getattr(anchor, name, anchor)
            if name not in PROTOCOLS and (name[:2] == "__" or not any(hasattr(base, name) for base in known)):
                continue
            if method is not missing:
                own[name] = method is not None
        names = kind.__name__, kind.__module__, kind.__qualname__
        self.news.append(["class", self._keep(kind), *names, library, bases, meta, issubclass(kind, type), own])


def _is_library(kind: type) -> bool:
    return find_library(kind.__module__, kind.__qualname__) is kind


def _call_dataclasses(name: str, /, *args: Any, **kwargs: Any) -> Any:
    return getattr(sys.modules["dataclasses"], name)(*args, **kwargs)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "method": lambda value, name, /, *args, **kwargs: getattr(type(value), name)(value, *args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "dir": dir,
    "truth": bool,
    "seed": random.seed,
    **{name: getattr(copy, name) for name in ("copy", "deepcopy")},
    **{name: partial(_call_dataclasses, name) for name in DATACLASSES},
}


def serve() -> None:
    """Run the program of the task on standard input, then the requests of the tests until these end."""
    stream, task, values = Stream(), json.load(sys.stdin), ProgramValues()
    sys.stdin = io.StringIO()
    printed = sys.stdout = io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape", "\n", write_through=True)
    module = sys.modules[PROGRAM] = types.ModuleType(PROGRAM)
    own: dict[str, Any] = {}

    def answer(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        try:
            return reply("value", function(*args, **kwargs))
        except BaseException as error:  # SystemExit and KeyboardInterrupt are also failures of the program
            try:
                return reply("raised", error)
            except BaseException as other:  # of the description of an error
                return reply("raised", RuntimeError(f"{type(error).__name__}, then {type(other).__name__}"))

    def reply(kind: str, value: Any) -> list[Any]:
        content, changes = values.encode(value), values.changes() if sharing else {}
        news, values.news = values.news, []
        text = printed.buffer.getvalue().decode("utf-8", "surrogateescape")
        printed.buffer.seek(0)
        printed.buffer.truncate()
        return [kind, content, news, changes, text[:MAX_PRINTED]]

    # Operations on the whole program: run it, and look up names in it
    def load() -> None:
        own.update(load_program(module.__dict__, **task))

    def names(*requested: str) -> tuple[Any, ...]:
        found = vars(module) | own
        return tuple((name, found[name]) for name in requested if name in found)

    # Reply first to the program itself, then to each request
    sharing = True
    message = answer(load, [], {})
    while True:
        stream.send(message)
        if (request := stream.receive()) is None:
            return
        operation, args, kwargs, changes, forgotten = request
        sharing = changes is not None
        values.create(changes or {})
        values.apply(changes or {})
        values.forget(forgotten)
        args, kwargs = map(values.decode, args), {name: values.decode(value) for name, value in kwargs.items()}
        message = answer(names if operation == "names" else OPERATIONS[operation], list(args), kwargs)


def load_program(namespace: dict[str, Any], prelude: str, program: str, names: list[str]) -> dict[str, Any]:
    """Run the prelude, then the program, and return what the prelude defines and the program cannot replace.

    The prelude's stubs of ``names`` are removed: the program has to define them. A program that is no Python alone
    continues the prelude.
    """
    try:
        own = compile(program, "<program>", "exec", dont_inherit=True)
    except SyntaxError:
        exec(compile(prelude + program, "<program>", "exec", dont_inherit=True), namespace)
        return {}
    try:
        first = compile(prelude, "<prelude>", "exec", dont_inherit=True)
    except SyntaxError:
        first = ""
    exec(first, namespace)
    for name in names:
        namespace.pop(name, None)
    helpers = {name: value for name, value in namespace.items() if isinstance(value, (type, types.FunctionType))}
    exec(own, namespace)
    return helpers
