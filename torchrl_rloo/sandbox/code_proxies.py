"""Objects of the program as the tests see them; loaded by :mod:`torchrl_rloo.sandbox.starter`.

Each class of the program has a local class with just the special methods that it has, and each object an instance of
that. The methods run in the process of the program (:mod:`torchrl_rloo.sandbox.code_peers`). Nothing that the program
sends is imported, executed or trusted: a class that pretends is one that fails its tests.

An object that is also a plain value, such as a named tuple or a subclass of ``list``, is a real one here. What it says
otherwise counts only if the tests name its class.
"""

from __future__ import annotations

import builtins
import os
import random
import sys
import threading
import types
import warnings
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torchrl_rloo.sandbox.code_peers import (
    ABSTRACT,
    BINARY,
    CONVERSIONS,
    COPIED,
    DATACLASSES,
    ENDING,
    PLAIN,
    PROTOCOLS,
    SHARED,
    Stream,
    Values,
    find_library,
    make_empty,
    plain_base,
)

MAX_SHARED = 2000  # items of containers that both processes compare with each request; more are copied
_FOREIGN = {(kind.__module__, kind.__qualname__): kind for kind in vars(types).values() if isinstance(kind, type)}
_ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
_SETTABLE = ("__traceback__", "__cause__", "__context__", "__suppress_context__", "__notes__")
# Methods with which a text, a set or a number answers a test: other objects have no say there
_PREDICATES = {
    name for kind in (str, bytes, set, float) for name in dir(kind) if name[:2] == "is" or name.endswith("with")
}


class UnsupportedTestError(Exception):
    """Error of a test that needs what its process lacks, or passes a value that cannot be sent to another process."""


class ProgramEndedError(Exception):
    """Error of a test whose program has ended."""


class ProgramError(Exception):
    """Error that stands for an exception of the program that tests cannot name, or for an unreadable reply."""


def is_remote(value: Any) -> bool:
    """Return whether a value is an object or class of the program."""
    return isinstance(value, RemoteClass) or isinstance(type(value), RemoteClass)


class RemoteClass(ABCMeta):
    """Class of the program. Its local base classes are those that the tests also have."""

    __link: ProgramConnection  # mangled, so that no attribute of the program has its name

    @staticmethod
    def connect(link: ProgramConnection) -> None:
        """Set the connection of all classes."""
        RemoteClass.__link = link

    def __new__(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        cls.__link.refuse(f"a test derives {name} from a class of the program")

    def __call__(cls, /, *args: Any, **kwargs: Any) -> Any:
        return cls.__link.request("call", cls, *args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return cls.__link.request("getattr", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        if name in ("__abstractmethods__", "_abc_impl"):  # of the machinery of abstract classes
            type.__setattr__(cls, name, value)
        else:
            cls.__link.request("setattr", cls, name, value)

    def __delattr__(cls, name: str) -> None:
        cls.__link.request("delattr", cls, name)

    def __instancecheck__(cls, value: Any) -> bool:
        return type.__instancecheck__(cls, value) or cls.__link.ask(cls, "isinstance", value)

    def __subclasscheck__(cls, other: type) -> bool:
        return type.__subclasscheck__(cls, other) or cls.__link.ask(cls, "issubclass", other)

    def __dir__(cls) -> list[str]:
        return cls.__link.request("dir", cls)

    # Names that a type has and that mean something else in the program
    __doc__ = property(lambda cls: cls.__link.request("getattr", cls, "__doc__"))
    __annotations__ = property(lambda cls: cls.__link.request("getattr", cls, "__annotations__"))
    register = property(lambda cls: cls.__link.request("getattr", cls, "register"))


class RemoteAttribute:
    """Attribute of a class that the program defines and a plain base class also has."""

    def __init__(self, link: ProgramConnection, name: str):
        self.link, self.name = link, name

    def __get__(self, value: Any, owner: type) -> Any:
        if value is None:  # also while the class is made
            return self.link.request("getattr", owner, self.name) if id(owner) in self.link.numbers else self
        found = self.link.request("getattr", value, self.name)
        if self.link.trusts(owner) or not is_remote(found) or plain_base(owner) is None:
            return found
        return getattr(plain_base(owner), self.name).__get__(value)


class ProgramConnection(Values):
    """Connection from the tests to the program."""

    def __init__(self) -> None:
        super().__init__("t")
        self.stream, self.lock, self.applying = Stream(), threading.RLock(), False
        self.fault: Exception | None = None  # that tests must not catch: the program has ended, or a test cannot run
        self.numbers: dict[int, int] = {}
        self.asking: set[int] = set()  # classes whose metaclass knows further instances
        self.lent: dict[tuple[str, str], Any] = {}  # what the tests have passed of the standard library
        self.raised: list[BaseException] = []  # exceptions of the program
        self.named: set[int] = set()  # classes that the tests name, whose objects have a say in the tests
        self.surroundings = _surroundings()
        RemoteClass.connect(self)

    # Requests

    def request(self, operation: str, /, *args: Any, **kwargs: Any) -> Any:
        """Execute an operation in the program's process; raise its exceptions, or the fault."""
        with self.lock:
            if self.fault:
                raise self.fault
            if _surroundings() != self.surroundings:
                self.refuse("a test replaces the input, the environment or the warnings of the program")
            sharing = not self.applying  # a request while a reply is read must leave the containers alone
            changes, forgotten = (self.changes(), self.drop_unused()) if sharing else (None, [])
            content = [self.encode(arg) for arg in args], {name: self.encode(arg) for name, arg in kwargs.items()}
            changes = changes | self.changes() if sharing else None
            try:
                self.stream.send([operation, *content, changes, forgotten])
            except OSError:
                self.end()
            return self.receive(args[1] if operation == "method" else operation)

    def receive(self, operation: str = "load") -> Any:
        """Read the answer of the program: return its value or raise its exception."""
        try:
            kind, content, news, changes, printed = self.stream.receive() or [None] * 5
        except (OSError, ValueError, TypeError, RecursionError):  # the program may write anything to the channel
            kind = None
        if kind not in ("value", "raised"):
            self.end()
        applying, self.applying = self.applying, True
        try:
            self.create(changes)
            for entry in news:
                self.register(*entry)
            self.apply(changes)
            value = self.decode(content)
            sys.stdout.write(printed) if printed else None
        except Exception as error:
            unreadable = ProgramError(f"unreadable value: {type(error).__name__}")
            self.raised.append(unreadable)
            raise self.fault or unreadable from None
        finally:
            self.applying = applying
        if kind == "value":
            return value
        if not isinstance(value, BaseException) or (isinstance(value, _ENDS) and operation not in ENDING):
            value = ProgramError(f"{type(value).__name__}: {value}")
        self.raised.append(value)
        raise value

    def end(self) -> None:
        """Raise the fault of an ended program."""
        self.fault = ProgramEndedError("the program ended before its tests")
        raise self.fault

    def refuse(self, reason: str) -> None:
        """Raise the fault of a test that cannot run."""
        self.fault = UnsupportedTestError(reason)
        raise self.fault

    # Values

    def drop_unused(self) -> list[str]:
        """Stop sharing the containers that the tests no longer hold, and the largest ones; return their keys."""
        large = sum(map(len, self.shared.values())) > MAX_SHARED
        dropped = []
        for key in list(self.shared):
            mirror = key.startswith("o")
            if (large and not mirror) or sys.getrefcount(self.shared[key]) <= 2 + mirror:
                dropped.append(key)
                self.forget([key])
        return dropped

    def refer(self, value: Any) -> list[Any] | None:
        if id(value) in self.numbers:
            number = self.numbers[id(value)]
            if plain_base(type(value)) in SHARED:
                self.share(value, f"o{number}")
            return ["object", number]
        if isinstance(value, types.TracebackType):
            return None
        if type(value) is object:
            return ["new"]
        if isinstance(value, BaseException) and type(value).__module__ != "__main__":
            return ["new", self.refer(type(value)), *map(self.encode, value.args)]
        module, name = (getattr(value, part, None) for part in ("__module__", "__qualname__"))
        if name is not None:
            module = module or "builtins"  # methods of its types have no module
            if find_library(module, name) is value:
                self.lent[module, name] = value
                return ["library", module, name]
        base = plain_base(type(value))
        if base in COPIED and type(value).__module__ != "__main__":
            return [base.__name__, *map(self.encode, COPIED[base][0](value))]
        self.refuse(f"a test passes a {type(value).__name__}, which cannot be sent to another process")

    def resolve(self, kind: str, parts: list[Any]) -> Any:
        return self.objects[parts[0]] if kind == "object" else self.lent[tuple(parts)]

    def register(self, kind: str, number: int, *description: Any) -> None:
        """Build the local object or class of one of the program."""
        build = {"class": self.build_class, "object": self.build_object}[kind]
        value = self.objects[number] = build(number, *description)
        self.numbers[id(value)] = number

    def build_object(self, number: int, kind: int, content: list[Any] | None) -> Any:
        kind = self.objects[kind]
        if content is None:
            return object.__new__(kind)
        name, *parts = content
        if name == "error":
            return _build_error(kind, *map(self.decode, parts))
        if name == "scalar":
            return type(parts[0]).__new__(kind, parts[0])
        base = PLAIN[name]
        if base in SHARED:
            value = make_empty(base, kind, self.decode(parts[0]))
            self.adopt(f"o{number}", value)
            return value
        value = COPIED[base][1](*map(self.decode, parts))
        parts = value.__getnewargs__() if hasattr(value, "__getnewargs__") else value.__reduce__()[1]
        return base.__new__(kind, *parts)

    def build_class(self, number: int, name: str, module: str, qualified: str, library: bool, *shape: Any) -> type:
        """Build a local class with the special methods of one of the program."""
        if library and (found := find_shared_class(module, qualified)):
            return found
        bases, meta, is_meta, own = shape  # numbers of classes, whether it is a metaclass, its methods
        space: dict[str, Any] = {"__module__": module, "__qualname__": qualified}
        methods = {
            method: self.forward(method) if own[method] else None
            for method in PROTOCOLS.intersection(own)
            if not (is_meta and method in ("__eq__", "__ne__", "__hash__", "__call__"))
        }
        if is_meta:
            return type(name, (RemoteClass,), {"__module__": module, **methods})
        plain = {method: RemoteAttribute(self, method) for method in own if method[:2] != "__"}
        local = tuple(self.objects[base] for base in bases) or (object,)
        space |= self.common_methods(own.get("__getattr__", False)) | plain | methods
        if not any(plain_base(base) for base in local) and {"__len__", "__bool__"} & {*own}:
            space["__bool__"] = self.forward_truth()
        if foreign := _FOREIGN.get((module, qualified)) or (library and find_library(module, qualified)):
            space["__class__"] = property(lambda value: foreign if type(value) is kind else type(value))
        maker = RemoteClass if meta is None else self.objects[meta]
        kind = ABCMeta.__new__(maker, name, local, space)
        type.__setattr__(kind, "__abstractmethods__", frozenset())
        if meta is not None:
            self.asking.add(id(kind))
        return kind

    # Methods of local classes

    def ask(self, kind: type, operation: str, value: Any) -> bool:
        """Ask the program whether a value is an instance or a subclass, if its class decides that."""
        asked = id(kind) in self.asking and (is_remote(value) or self.trusts(kind))
        return asked and self.request(operation, value, kind) is True

    def trusts(self, kind: type) -> bool:
        """Return whether the tests name a class or one that it derives from."""
        return any(id(base) in self.named for base in kind.__mro__)

    def common_methods(self, universal: bool) -> dict[str, Any]:
        """Return what all local classes have."""

        def read(value: Any, name: str) -> Any:
            trusted, found = self.trusts(type(value)), self.request("getattr", value, name)
            if trusted or not is_remote(found):
                return found
            # An object that has a method of any name has none
            if name in _PREDICATES or universal and is_remote(self.request("getattr", value, _decoy(""))):
                raise AttributeError(f"{type(value).__name__!r} object, whose class no test names, has no {name!r}")
            return found

        def write(value: Any, name: str, new: Any) -> None:
            if name in _SETTABLE and isinstance(value, BaseException):
                BaseException.__setattr__(value, name, new)
            else:
                self.request("setattr", value, name, new)

        return {
            "__getattr__": read,
            "__setattr__": write,
            "__delattr__": lambda value, name: self.request("delattr", value, name),
            "__dir__": lambda value: self.request("dir", value),
            "__copy__": lambda value: self.request("copy", value),
            "__deepcopy__": lambda value, memo: self.request("deepcopy", value),
            "__reduce_ex__": lambda value, protocol: self.refuse(f"a test pickles a {type(value).__name__}"),
            "__dict__": property(lambda value: self.request("getattr", value, "__dict__")),
            "__doc__": property(lambda value: self.request("getattr", value, "__doc__")),
        }

    def forward(self, name: str) -> Callable[..., Any]:
        """Return a special method that runs in the program.

        Without a class that the tests name, it must not see a value of the tests, nor decide what is a number.
        """

        def method(value: Any, /, *args: Any, **kwargs: Any) -> Any:
            kind = type(value)
            trusted = self.trusts(value if isinstance(value, RemoteClass) else kind)
            if not trusted:
                base = plain_base(kind)
                if base is not None and hasattr(base, name):
                    return getattr(base, name)(value, *args, **kwargs)
                if name == "__missing__":
                    raise KeyError(*args)
                if base is not None and name == "__bool__":
                    return not hasattr(base, "__len__") or len(value) > 0
                if name == "__contains__" and hasattr(kind, "__iter__"):
                    return any(item is args[0] or item == args[0] for item in value)
                if name in CONVERSIONS or (name == "__contains__" and not is_remote(args[0])):
                    raise TypeError(f"{name} of a {kind.__name__}, whose class no test names, does not count")
                if name in BINARY and not is_remote(args[0]):
                    return NotImplemented
            if name == "__exit__" and isinstance(args[1], AssertionError):
                self.request("method", value, name, None, None, None)
                return False  # a program does not suppress the failure of a test
            found = self.request("method", value, name, *args, **kwargs)
            if name in ("__eq__", "__ne__") and found is (name == "__eq__"):
                # An object that equals anything equals nothing
                try:
                    if self.request("method", value, name, _decoy(args[0])) is found:
                        return not found
                except Exception as error:
                    if error is self.fault:
                        raise
            return found

        return method

    def forward_truth(self) -> Callable[[Any], bool]:
        """Return a method ``__bool__`` that is only believed to be False if the tests name the class."""

        def truth(value: Any) -> bool:
            if self.request("truth", value) is True:
                return True
            if not self.trusts(type(value)):
                raise TypeError(f"truth of a {type(value).__name__}, whose class no test names, does not count")
            return False

        return truth


def find_shared_class(module: str, name: str) -> type | None:
    """Return a class of the standard library that the tests and the program both use, None if it is not one."""
    found = find_library(module, name)
    if not isinstance(found, type):
        return None
    if issubclass(found, BaseException):
        return None if module.startswith("unittest") else found  # some of its exceptions end a test without failure
    # A class that is not abstract has instances, which are the program's
    if module in ABSTRACT and getattr(found, "__abstractmethods__", None):
        return found
    if PLAIN.get(name) is found or found in (object, bool, int, float, str):
        return found
    return None


def _build_error(
    kind: type, args: tuple[Any, ...], attributes: tuple[tuple[str, Any], ...], cause: BaseException | None
) -> BaseException:
    """Return an exception, whose constructor may take other arguments than the base class."""
    base = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    error = base.__new__(kind, *args)
    if isinstance(kind, RemoteClass) or kind is not base:
        BaseException.__init__(error, *args)
    else:
        error.__init__(*args)
    if not isinstance(kind, RemoteClass):
        vars(error).update(attributes)
    error.__cause__ = cause
    return error


def _surroundings() -> tuple[Any, ...]:
    """Return what tests may change in their process, and what does not reach the program."""
    return sys.stdin, builtins.input, dict(os.environ), warnings._showwarnmsg_impl


def _decoy(like: Any) -> Any:
    """Return a value like another one that equals no other."""
    number = int.from_bytes(os.urandom(7), "big")
    return type(like)(number) if type(like) in (int, float) else f"v{number}"


def forward_library(link: ProgramConnection) -> None:
    """Let functions of the standard library work on objects of the program, and on its random numbers.

    Patches of modules, which would not reach the program, are refused.
    """

    def forwarding(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, /, *args: Any, **kwargs: Any) -> Any:
            return link.request(name, value, *args, **kwargs) if is_remote(value) else function(value, *args, **kwargs)

        return call

    if dataclasses := sys.modules.get("dataclasses"):
        for name in DATACLASSES:
            setattr(dataclasses, name, forwarding(name, getattr(dataclasses, name)))
    seed = random.seed

    def seed_both(*args: Any) -> None:
        seed(*args)
        link.request("seed", *args)

    random.seed = seed_both
    if mock := sys.modules.get("unittest.mock"):
        enter = mock._patch.__enter__

        def check_target(patcher: Any) -> Any:
            if not is_remote(patcher.getter()) and patcher.attribute not in ("stdout", "stderr"):
                link.refuse(f"a test patches {patcher.attribute}, which is not that of the program")
            return enter(patcher)

        mock._patch.__enter__ = check_target
