"""Tests of a program in a separate process; loaded by :mod:`torchrl_rloo.rewards.sandbox_child`.

The names of the tests are their own, except those that the task assigns to the program (see
:mod:`torchrl_rloo.rewards.code_names`). These are proxies, which send calls to the process of the program
(:mod:`torchrl_rloo.rewards.code_peers`). Nothing that the program sends is imported, executed or trusted.
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
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

if __package__:
    from torchrl_rloo.rewards.code_peers import BINARY, MUTABLE, ORDER, UNARY, Proxy, Stream, decode, encode
else:  # loaded as a file
    from code_peers import BINARY, MUTABLE, ORDER, UNARY, Proxy, Stream, decode, encode


class UnsupportedTestError(Exception):
    """Error of a test that passes a value which cannot be sent to another process."""


class ProgramEndedError(Exception):
    """Error of a test whose program has ended."""


class ProgramError(Exception):
    """Error that stands for an exception of the program that tests cannot name, or for an unreadable reply."""


class RemoteObject(Proxy):
    """Proxy of an object in the program's process.

    The tests compare it by its data; the object's ``__eq__`` and ``__bool__`` are not asked. An object that is also a
    plain value, such as a named tuple, acts as that value. Two other objects are equal if they are the same, or if
    their class defines an equality and their attributes are equal. Their other operators run in the program, without
    any value of the tests.
    """

    def __init__(self, link: ProgramConnection, index: int, plain: Any):
        self.__dict__.update(_link=link, _index=index, _stored=plain)

    def _plain(self) -> Any:
        """Return the plain value, current if it can change; None without one."""
        return self._link.request("plain", self) if type(self._stored) in MUTABLE else self._stored

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, RemoteObject):
            return self._stored is not None and self._plain() == other
        if self._stored is not None or other._stored is not None:
            return self._stored is not None and other._stored is not None and self._plain() == other._plain()
        return self._index == other._index or self._link.same_state(self, other)

    def __hash__(self) -> int:
        return hash(self._stored)  # one hash for all objects without a plain value: equality decides

    @property
    def __class__(self) -> type:
        return RemoteObject if self._stored is None else type(self._stored)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is RemoteObject and self._link.request("isinstance", self, value) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return type(other) is RemoteObject and self._link.request("issubclass", self, other) is True

    def __bool__(self) -> bool:
        return self._stored is None or bool(self._plain())

    def __index__(self) -> int:
        return operator.index(self._plain())

    def __len__(self) -> int:
        return self._link.request("len", self) if self._stored is None else len(self._plain())

    def __iter__(self) -> Iterator[Any]:
        return self._link.request("iter", self) if self._stored is None else iter(self._plain())

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

    def __next__(self) -> Any:
        return self._link.request("next", self)

    def __str__(self) -> str:
        return self._link.request("str", self)

    def __repr__(self) -> str:
        return self._link.request("repr", self)


def _operator(name: str, reflected: bool = False) -> Callable[..., Any]:
    """Return a method of :class:`RemoteObject` for an operator.

    The program must not see a value of the tests: objects without a plain value only combine with each other.
    """
    function = getattr(operator, f"__{name}__")

    def operate(*operands: Any) -> Any:
        operands = operands[::-1] if reflected else operands
        remote = [value for value in operands if isinstance(value, RemoteObject)]
        if all(value._stored is not None for value in remote):
            return function(*(value._plain() if isinstance(value, RemoteObject) else value for value in operands))
        if len(remote) == len(operands) and all(value._stored is None for value in remote):
            return remote[0]._link.request(name, *remote)
        return NotImplemented

    return operate


for _name in (*UNARY, *BINARY, *ORDER):
    setattr(RemoteObject, f"__{_name}__", _operator(_name))
for _name in BINARY:
    setattr(RemoteObject, f"__r{_name}__", _operator(_name, reflected=True))


class ProgramConnection:
    """Connection from the tests to the program.

    Attributes:
        fault: fatal error that tests must not catch: the program has ended, or a test cannot run. None without one.
    """

    def __init__(self) -> None:
        self.stream, self.fault, self.comparing, self.objects = Stream(), None, set(), {}

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
        return self.receive(operation, (*args, *kwargs.values()))

    def receive(self, operation: str = "load", args: tuple[Any, ...] = ()) -> Any:
        """Read the answer of the program: return its value or raise its exception."""
        try:
            kind, content, rest = self.stream.receive() or ["ended", None, None]
        except (OSError, ValueError, TypeError, RecursionError):  # the program may write anything to the channel
            kind = "ended"
        if kind == "value":
            try:
                result, after = decode(content, self.restore), [decode(data, self.restore) for data in rest]
            except Exception as error:
                raise ProgramError(f"unreadable value: {type(error).__name__}") from None
            for argument, value in zip(args, after, strict=False):
                _assign(argument, value)
            return result
        if kind == "raised":
            raise _build_error(str(content), str(rest), operation)
        self._end()

    def same_state(self, a: RemoteObject, b: RemoteObject) -> bool:
        """Return whether two objects have equal attributes, and a class that defines an equality."""
        pair = (a._index, b._index)
        if pair in self.comparing:
            return True  # a cycle: the outer comparison decides
        self.comparing.add(pair)
        try:
            state = self.request("state", a)
            return state is not None and state == self.request("state", b)
        finally:
            self.comparing.discard(pair)

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
        if type(index) is not int:
            raise ValueError(f"index={index!r:.100} must be an integer")
        return self.objects.setdefault(index, RemoteObject(self, index, plain))


def _build_error(kind: str, text: str, operation: str) -> Exception:
    """Return an exception of the program; one that ends an iteration only comes from ``next``."""
    raised = getattr(builtins, kind, None)
    ends = (StopIteration, StopAsyncIteration)
    if not (isinstance(raised, type) and issubclass(raised, Exception)) or (
        issubclass(raised, ends) and operation != "next"
    ):
        return ProgramError(f"{kind}: {text}")
    for base in raised.__mro__:
        try:
            return base(text)
        except TypeError:  # needs more arguments
            continue
    return ProgramError(f"{kind}: {text}")


def _assign(target: Any, value: Any) -> None:
    if type(target) not in MUTABLE or type(target) is not type(value) or target == value:
        return
    target.clear()
    target.extend(value) if isinstance(target, (list, bytearray, deque)) else target.update(value)


class Judge:
    """Tests of a row, and their names.

    Args:
        task: settings of the tests. ``prelude`` and ``setup`` are texts that run before them. ``program`` lists the
            names of the program. ``candidate`` has the name of the function for ``check`` and calls and the class that
            can have it as a method, or nothing. ``library`` lists triples of a name, a module and its attribute.
            ``tests`` lists ``["assert", text]``, ``["check", text]`` and ``["call", arguments, result]``.

    Raises:
        SyntaxError: if a text is not Python.
    """

    def __init__(self, task: dict[str, Any]):
        self.task, self.link, self.own = task, ProgramConnection(), {}
        others = {name: value for name, value in vars(builtins).items() if name not in task["program"]}
        self.namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": others}
        self.before = [_compile(task["prelude"]), _compile(task["setup"])]
        self.tests = [[kind, *([_compile(rest[0])] if kind != "call" else rest)] for kind, *rest in task["tests"]]

    def prepare(self) -> None:
        """Get the names of the tests, and run what precedes them."""
        self.link.receive()  # raises if loading the program failed
        for name, module, attribute in self.task["library"]:
            source = importlib.import_module(module)
            self.namespace[name] = getattr(source, attribute) if attribute else source
        wanted = [*self.task["program"], *self.task["candidate"]]
        found = self.link.request("names", wanted)
        if type(found) is not dict:
            raise ProgramError("unreadable names")
        self.own = {name: found[name] for name in wanted if name in found}
        prelude, setup = self.before
        self.execute(prelude)
        for name in self.task["candidate"]:
            self.namespace.pop(name, None)  # the prelude's stub
        self.execute(setup)

    def execute(self, code: tuple[Any, Any]) -> None:
        """Run imports, then the rest with the program's names, which no import replaces."""
        imports, rest = code
        exec(imports, self.namespace)
        for name in self.task["program"]:
            self.namespace.pop(name, None)
            if name in self.own:
                self.namespace[name] = self.own[name]
        exec(rest, self.namespace)

    def find_candidate(self) -> Any:
        """Return the function under test, also as a method of a new instance.

        Raises:
            NameError: if the program does not define it.
        """
        name, owner = self.task["candidate"]
        if name in self.own:
            return self.own[name]
        if owner in self.own:
            return getattr(self.own[owner](), name)
        raise NameError(f"name {name!r} is not defined")

    def run(self, test: list[Any]) -> None:
        """Run a test.

        Raises:
            Exception: if the test fails.
        """
        kind, *content = test
        if kind == "call":
            arguments, expected = content
            result = self.find_candidate()(*decode(arguments, self.link.restore))
            result = json.loads(json.dumps(result, default=_plain_form))
            if result != expected and [result] != expected:
                raise AssertionError(f"{result!r:.100}")
            return
        self.execute(content[0])
        if kind == "check":
            self.namespace["check"](self.find_candidate())


def _compile(text: str) -> tuple[Any, Any]:
    """Compile the imports of a text and the rest."""
    imports, rest = ast.Module([], []), ast.parse(text, "<test>")
    imports.body = [node for node in rest.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    rest.body = [node for node in rest.body if node not in imports.body]
    return compile(imports, "<test>", "exec"), compile(rest, "<test>", "exec")


def _plain_form(value: Any) -> Any:
    plain = value._plain() if isinstance(value, RemoteObject) else None
    if plain is None:
        raise TypeError(f"result {type(value).__name__} is not JSON")
    return plain


def _describe(error: BaseException) -> str:
    """Describe an error, whose text can be an object of the program."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException as other:
        return f"{type(error).__name__}, whose text raises {type(other).__name__}"


def judge() -> None:
    """Run the tests from standard input and print a JSON line ``[passed, reason]`` for each.

    Print ``{"broken": reason}`` instead if the tests cannot run with any program.
    """
    # Compile all tests first: a syntax error is no failure of the program
    task, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w", buffering=1)
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    try:
        tests = Judge(task)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        print(json.dumps({"broken": f"{type(error).__name__}: {error}"}), file=out)
        return

    def attempt(step: Callable[..., Any], *args: Any) -> str | None:
        """Run a step and return the reason of its failure, None if it succeeds."""
        try:
            step(*args)
            error = tests.link.fault
        except BaseException as raised:  # SystemExit is also a failure
            error = tests.link.fault or raised
        if isinstance(error, UnsupportedTestError):
            print(json.dumps({"broken": str(error)}), file=out, flush=True)
            os._exit(0)
        return None if error is None else _describe(error)

    # Load the program's names, then run the tests in order
    if reason := attempt(tests.prepare):
        print(json.dumps([False, reason]), file=out)
        return
    for test in tests.tests:
        reason = attempt(tests.run, test)
        print(json.dumps([reason is None, reason]), file=out)
        if reason is not None and not task["partial"]:
            return
