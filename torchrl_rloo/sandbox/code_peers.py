"""Program under test in a separate process, and the values that cross to its tests and back.

``serve`` runs in the process of the program, and :mod:`torchrl_rloo.sandbox.code_judge` in that of the tests. Calls of
the tests are executed in the process of the program, and data comes back. Nothing that the program does to its
interpreter affects the tests: not ``sys.exit``, patched ``builtins`` or an ``__eq__`` that always returns True. No
frame or file of that process holds an expected result. The program may write anything to the channel: a reply is only
data.

Plain values are copied: numbers, texts, tuples, dates and similar. Mutable containers, such as lists and dicts, are
shared: both ends have one, with the same number, and a message says which have changed. So a returned argument is the
argument, and what the tests append to a list of the program is in that list. All other objects have a number and stay
where they are; the tests hold a proxy for each (:mod:`torchrl_rloo.sandbox.code_proxies`).

A message is a line of JSON. A request has the operation, its arguments and keywords, the changed containers, and those
that the tests no longer hold. None instead of the changes leaves them out of the reply. A reply has ``"value"`` or
``"raised"``, that value, the objects and classes that are new, the changed containers, and what the program printed.
"""

from __future__ import annotations

import copy
import importlib
import io
import json
import random
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from operator import is_not
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any

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

# Values

SCALARS = (bool, int, float, str)
_VIEWS = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}


def _clock(value: datetime | time) -> tuple[Any, ...]:
    """Return the text, time zone and fold of a time."""
    return type(value).isoformat(value.replace(tzinfo=None)), value.tzinfo, value.fold


# Immutable types: name, type, their parts, and how they are made of the parts
_COPIED: list[tuple[type, Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = [
    (tuple, lambda v: tuple(tuple.__iter__(v)), lambda *parts: parts),
    (frozenset, lambda v: tuple(frozenset.__iter__(v)), lambda *parts: frozenset(parts)),
    (bytes, lambda v: (bytes.hex(v),), bytes.fromhex),
    (complex, lambda v: complex.__getnewargs__(v), complex),
    (range, lambda v: (v.start, v.stop, v.step), range),
    (slice, lambda v: (v.start, v.stop, v.step), slice),
    (Fraction, lambda v: (v.numerator, v.denominator), Fraction),
    (Decimal, lambda v: (Decimal.__str__(v),), Decimal),
    (datetime, _clock, lambda text, zone, fold: datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)),
    (date, lambda v: (date.isoformat(v),), date.fromisoformat),
    (time, _clock, lambda text, zone, fold: time.fromisoformat(text).replace(tzinfo=zone, fold=fold)),
    (timedelta, lambda v: (v.days, v.seconds, v.microseconds), timedelta),
    (timezone, lambda v: v.__getinitargs__(), timezone),
    *((kind, lambda v: (str(v),), kind) for kind in (PosixPath, PurePosixPath, PureWindowsPath)),
    (MappingProxyType, lambda v: (dict(v),), MappingProxyType),
    (_VIEWS["keys"], tuple, lambda *parts: dict.fromkeys(parts).keys()),
    (_VIEWS["values"], tuple, lambda *parts: dict(enumerate(parts)).values()),
    (_VIEWS["items"], tuple, lambda *parts: dict(parts).items()),
]
COPIED = {kind: (take, make) for kind, take, make in _COPIED}


def _refill(kind: type, extend: Callable[[Any, list[Any]], None]) -> Callable[[Any, list[Any]], None]:
    def fill(value: Any, parts: list[Any]) -> None:
        kind.clear(value)
        extend(value, parts)

    return fill


def _fill_mapping(kind: type) -> Callable[[Any, list[Any]], None]:
    def extend(value: Any, parts: list[Any]) -> None:
        half = len(parts) // 2
        for key, item in zip(parts[:half], parts[half:], strict=True):
            kind.__setitem__(value, key, item)

    return _refill(kind, extend)


def _iterate(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(kind.__iter__(value))


def _take_mapping(value: Any) -> tuple[Any, ...]:
    return (*dict.keys(value), *dict.values(value))


def _take_ordered(value: Any) -> tuple[Any, ...]:
    return (*OrderedDict.keys(value), *OrderedDict.values(value))


# Mutable types: their parts, how they take new ones, and what is fixed when they are made
SHARED: dict[type, tuple[Callable[[Any], tuple[Any, ...]], Callable[[Any, list[Any]], None], str]] = {
    list: (_iterate(list), lambda v, parts: list.__setitem__(v, slice(None), parts), ""),
    set: (_iterate(set), _refill(set, set.update), ""),
    deque: (_iterate(deque), _refill(deque, deque.extend), "maxlen"),
    bytearray: (_iterate(bytearray), lambda v, parts: bytearray.__setitem__(v, slice(None), bytes(parts)), ""),
    array: (
        lambda v: tuple(array.tolist(v)),
        lambda v, parts: array.__setitem__(v, slice(None), array(v.typecode, parts)),
        "typecode",
    ),
    defaultdict: (_take_mapping, _fill_mapping(dict), "default_factory"),
    OrderedDict: (_take_ordered, _fill_mapping(OrderedDict), ""),
    **{kind: (_take_mapping, _fill_mapping(dict), "") for kind in (dict, Counter)},
}
PLAIN = {kind.__name__: kind for kind in (*COPIED, *SHARED)}
# Immutable types whose modules take long to import: module and parts
_LATE = {"UUID": ("uuid", lambda v: (v.hex,)), "ZoneInfo": ("zoneinfo", lambda v: (v.key,))}
_CONSTANTS = {"Ellipsis": ..., "NotImplemented": NotImplemented}


def add_late(name: str, module: str) -> bool:
    """Add an immutable type whose module was not imported with this one; return whether there is one."""
    if module != _LATE.get(name, ("",))[0]:
        return False
    kind = PLAIN[name] = getattr(importlib.import_module(module), name)
    COPIED[kind] = (_LATE[name][1], kind)
    return True


def plain_base(kind: type) -> type | None:
    """Return the plain type that a class derives from, None without one."""
    return next((base for base in kind.__mro__ if base in COPIED or base in SHARED or base in SCALARS), None)


def take_scalar(value: Any, base: type) -> Any:
    """Return the number or text of an instance of a subclass."""
    return base.__add__(value, base())


def get_fixed(value: Any, base: type) -> Any:
    """Return what is fixed of a container of type ``base`` or a subclass, such as the ``maxlen`` of a deque."""
    name = SHARED[base][2]
    return getattr(value, name) if name else None


def make_empty(base: type, kind: type, fixed: Any) -> Any:
    """Return an empty instance of ``kind``, a container of type ``base`` or a subclass."""
    if base is array:
        return array.__new__(kind, fixed)
    value = base.__new__(kind)
    if base is deque:
        deque.__init__(value, (), fixed)
    return value


class Values:
    """Writer and reader of the values at one end."""

    def __init__(self, prefix: str):
        self.prefix, self.count = prefix, 0  # of the keys of the containers that this end shares first
        self.objects: dict[int, Any] = {}  # by number; that with number 5 has the key ``o5`` if it is a container
        self.shared: dict[str, Any] = {}  # containers that both ends have, by their keys
        self.keys: dict[int, str] = {}
        self.known: dict[str, tuple[Any, ...]] = {}  # the parts that the other end has

    def refer(self, value: Any) -> list[Any]:
        """Return the name of an object that is not plain."""
        raise NotImplementedError

    def resolve(self, kind: str, parts: list[Any]) -> Any:
        """Return the object of a name."""
        raise NotImplementedError

    def encode(self, value: Any) -> Any:
        """Return a value as JSON."""
        kind = type(value)
        if value is None or kind in SCALARS:
            return value
        if kind in SHARED:
            return ["shared", self.share(value)]
        if kind in COPIED:
            return [kind.__name__, *map(self.encode, COPIED[kind][0](value))]
        if value is Ellipsis or value is NotImplemented:
            return ["constant", str(value)]
        return self.encode(value) if add_late(kind.__name__, kind.__module__) else self.refer(value)

    def decode(self, data: Any) -> Any:
        """Return the value of :meth:`encode`."""
        if data is None or type(data) in SCALARS:
            return data
        name, *parts = data
        if name == "shared":
            return self.shared[parts[0]]
        if name == "constant":
            return _CONSTANTS[parts[0]]
        if name in PLAIN or (name in _LATE and add_late(name, _LATE[name][0])):
            return COPIED[PLAIN[name]][1](*map(self.decode, parts))
        return self.resolve(name, parts)

    def share(self, value: Any, key: str | None = None) -> str:
        """Return the key of a container; the next :meth:`changes` have its content."""
        if id(value) not in self.keys:
            self.count += key is None
            self.adopt(key or f"{self.prefix}{self.count}", value)
        return self.keys[id(value)]

    def adopt(self, key: str, value: Any) -> None:
        """Give a container its key."""
        self.shared[key], self.keys[id(value)] = value, key

    def forget(self, keys: Iterator[str] | list[str]) -> None:
        """Stop sharing containers."""
        for key in keys:
            self.known.pop(key, None)
            self.keys.pop(id(self.shared.pop(key, None)), None)

    def changes(self) -> dict[str, list[Any]]:
        """Return the containers that have changed since the last message, and those that are new."""
        updates, known, done = {}, {}, 0
        while done < len(self.shared):  # a content can have further containers
            for key in list(self.shared)[done:]:
                done += 1
                value = self.shared[key]
                base = plain_base(type(value))
                parts, old = SHARED[base][0](value), self.known.get(key)
                if old is None or len(old) != len(parts) or any(map(is_not, old, parts)):
                    fixed = self.encode(get_fixed(value, base))
                    updates[key] = [base.__name__, fixed, *map(self.encode, parts)]
                    known[key] = parts
        self.known |= known  # only now: an error leaves all unsent
        return updates

    def create(self, updates: dict[str, list[Any]]) -> None:
        """Make the containers that are new, without content."""
        for key, (name, fixed, *_) in updates.items():
            if key not in self.shared and key[0] != "o":
                self.adopt(key, make_empty(PLAIN[name], PLAIN[name], fixed))

    def apply(self, updates: dict[str, list[Any]]) -> None:
        """Make the changes of the other end."""
        for key, (name, fixed, *parts) in updates.items():
            take, fill, _ = SHARED[PLAIN[name]]
            if key not in self.shared:
                self.adopt(key, self.objects[int(key[1:])])
            value = self.shared[key]
            if name == "defaultdict":
                value.default_factory = self.decode(fixed)
            fill(value, [self.decode(part) for part in parts])
            self.known[key] = take(value)


def find_library(module: str, name: str) -> Any:
    """Return what a module of the standard library that is already loaded has under a dotted name, None without it."""
    found = sys.modules.get(module) if module.partition(".")[0] in sys.stdlib_module_names else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


# Process of the program


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
