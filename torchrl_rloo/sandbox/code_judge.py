"""Tests of a program in a separate process; loaded by :mod:`torchrl_rloo.sandbox.starter`.

The names of the tests are their own, except those that the task assigns to the program (see
:mod:`torchrl_rloo.rewards.code_names`). These are proxies, which send calls to the process of the program
(:mod:`torchrl_rloo.sandbox.code_proxies`).
"""

from __future__ import annotations

import ast
import builtins
import errno
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from torchrl_rloo.sandbox.code_proxies import ProgramConnection, ProgramError, UnsupportedTestError, forward_library

_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS)  # by the sandbox


class Judge:
    """Tests of a row, and their names.

    In a task, ``prelude`` and ``setup`` are texts that run before the tests. ``program`` lists the names of the
    program. ``candidate`` has the name of the function for ``check`` and calls and the class that can have it as a
    method, or nothing. ``library`` lists triples of a name, a module and its attribute. ``tests`` lists
    ``["assert", text]``, ``["check", text]`` and ``["call", arguments, result]``.
    """

    def __init__(self, task: dict[str, Any]):
        self.task, self.link, self.own = task, ProgramConnection(), {}
        others = {name: value for name, value in vars(builtins).items() if name not in task["program"]}
        main = sys.modules["__main__"] = types.ModuleType("__main__")  # where unittest.main finds tests
        self.namespace = vars(main)
        self.namespace |= {"__name__": "tests", "__builtins__": others}
        self.before = [_compile(task["prelude"]), _compile(task["setup"])]
        self.tests = [[kind, *([_compile(rest[0])] if kind != "call" else rest)] for kind, *rest in task["tests"]]
        # Find out first what the tests cannot import: it is no failure of the program
        for imports, _ in [*self.before, *(test[1] for test in self.tests if test[0] != "call")]:
            if imports.co_names:
                exec(imports, {"__name__": "tests"})

    def prepare(self) -> None:
        """Get the names of the tests, and run what precedes them."""
        forward_library(self.link)
        self.link.receive()  # raises if loading the program failed
        for name, module, attribute in self.task["library"]:
            source = importlib.import_module(module)
            self.namespace[name] = getattr(source, attribute) if attribute else source
        wanted = [*self.task["program"], *self.task["candidate"]]
        found = self.link.request("names", *wanted)
        if type(found) is not tuple:
            raise ProgramError("unreadable names")
        self.own = {name: value for name, value in found if name in wanted}
        self.link.named = {id(value) for name, value in self.own.items() if is_class_name(name)}
        prelude, setup = self.before
        self.execute(prelude)
        for name in self.task["candidate"]:
            self.namespace.pop(name, None)  # the prelude's stub
        self.execute(setup)
        self.namespace["__name__"] = "__main__"

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
        """Return the function under test, also as a method of a new instance."""
        name, owner = self.task["candidate"]
        if name in self.own:
            return self.own[name]
        if owner in self.own:
            return getattr(self.own[owner](), name)
        raise NameError(f"name {name!r} is not defined")

    def run(self, test: list[Any]) -> None:
        """Run a test, which raises if it fails."""
        kind, *content = test
        if kind == "call":
            arguments, expected = content
            result = json.loads(json.dumps(self.find_candidate()(*arguments)))
            if result != expected and [result] != expected:
                raise AssertionError(f"{result!r:.100}")
            return
        self.execute(content[0])
        if kind == "check":
            self.namespace["check"](self.find_candidate())


def is_class_name(name: str) -> bool:
    """Return whether tests use a name as that of a class under test: it is capitalized, and no mere container."""
    return name.lstrip("_")[:1].isupper() and "_" not in name.strip("_") and name != "Solution"


def _compile(text: str) -> tuple[Any, Any]:
    """Compile the imports of a text and the rest."""
    imports, rest = ast.Module([], []), ast.parse(text, "<test>")
    imports.body = [node for node in rest.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    rest.body = [node for node in rest.body if node not in imports.body]
    return tuple(compile(part, "<test>", "exec", dont_inherit=True) for part in (imports, rest))


def _limit(error: BaseException, raised: list[BaseException]) -> str:
    """Return what a test needs and its process lacks, "" if the program has failed."""
    seen: list[BaseException] = []
    while error is not None and not any(error is other for other in seen):
        seen.append(error)
        if any(error is other for other in raised):
            return ""
        refused = isinstance(error, OSError) and (error.errno in _REFUSED or "temporary directory" in str(error))
        if refused or isinstance(error, ImportError):
            return f"a test needs what the sandbox lacks: {_describe(error)}"
        error = error.__cause__ or error.__context__
    return ""


def _describe(error: BaseException) -> str:
    """Describe an error, whose text can be an object of the program."""
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException as other:
        return f"{type(error).__name__}, whose text raises {type(other).__name__}"


def judge() -> None:
    """Run the tests from standard input and print a JSON line ``[passed, reason]`` for each.

    Print ``{"broken": reason}`` instead if the tests cannot run with any program. What else is printed goes elsewhere.
    """
    # Compile all tests first: a syntax error is no failure of the program
    task, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.stdin, sys.stdout = io.StringIO(), io.StringIO()
    try:
        tests = Judge(task)
    except Exception as error:
        print(json.dumps({"broken": f"{type(error).__name__}: {error}"}), file=out)
        return

    def attempt(step: Callable[..., Any], *args: Any) -> str | None:
        """Run a step and return the reason of its failure, None if it succeeds."""
        error, raised = None, tests.link.raised
        try:
            step(*args)
        except SystemExit as end:  # unittest.main
            error = end if end.code or any(end is other for other in raised) else None
        except BaseException as other:
            error = other
        error = tests.link.fault or error
        limit = str(error) if isinstance(error, UnsupportedTestError) else error and _limit(error, raised)
        if limit:
            print(json.dumps({"broken": limit}), file=out, flush=True)
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
