"""Values that cross between the tests of a program and the program, which runs in another process.

Plain values are copied: numbers, texts, tuples, dates and similar. Mutable containers, such as lists and dicts, are
shared: both ends have one, with the same number, and a message says which have changed. So a returned argument is the
argument, and what the tests append to a list of the program is in that list. All other objects have a number and stay
where they are. Each end says how it writes and reads those.
"""

from __future__ import annotations

import importlib
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from operator import is_not
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any

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
