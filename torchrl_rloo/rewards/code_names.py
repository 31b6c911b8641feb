"""Names in the tests of a program: those of the program under test, and those that the tests own.

Tests and program run in separate processes (:mod:`torchrl_rloo.sandbox.code_peers`). Only the texts of a row decide
whose a name is. A program can therefore not replace a name of the tests by any definition or import.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import keyword
import symtable
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

# Modules that tests may use without importing them: they only compute
PURE = frozenset(
    "array bisect calendar cmath collections copy dataclasses datetime decimal enum fractions functools "
    "heapq itertools json math operator random re statistics string sys textwrap time typing unicodedata".split()
)
# Names that tests may use without importing them, and their modules
_BORROWED = {
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "deepcopy",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "math": "inf isclose isnan nan pi tau",
}
BORROWED = {name: module for module, names in _BORROWED.items() for name in names.split()}


class BrokenTestsError(ValueError):
    """Error of tests that cannot run with any program."""


@dataclass(frozen=True)
class TestNames:
    """Owners of the names in the tests of a row.

    The names of the ``program`` must be in it. Of these, the prelude gives ``instances`` to the program, since it
    defines a class. The ``library`` are names from pure modules, as ``(name, module, attribute)``, where "" means the
    module. Tests that use functions of the ``prelude`` also run it.
    """

    __test__ = False

    program: tuple[str, ...]
    instances: tuple[str, ...]
    library: tuple[tuple[str, str, str], ...]
    prelude: bool


@dataclass(frozen=True)
class TextNames:
    """Global names of a Python text: those it defines, imports and reads."""

    defined: frozenset[str]
    imported: frozenset[str]
    read: frozenset[str]


@lru_cache(maxsize=256)
def resolve_names(
    tests: tuple[str, ...], setup: str, prelude: str, given: tuple[str, ...], candidate: str = ""
) -> TestNames:
    """Resolve the names in the tests of a row; raise ``BrokenTestsError`` if a text reads a name that nothing gives.

    The functions of the ``prelude`` are the tests' own, except stubs without a body. If it defines a class, all its
    names are the program's, whose process holds the instances. Without ``given`` names under test, they are the names
    that nothing else gives. In a test without any, it is the function that the test calls first, even if that has the
    name of a built-in. The ``candidate`` is the function that is passed to ``check``, inside of which the name of a
    built-in remains the built-in.
    """
    texts = [read_names(text) for text in (setup, *tests)]
    helpers, instances = _prelude_names(prelude)
    # What the tests have without the program
    defined = frozenset().union(helpers, *(text.defined for text in texts)) - {*given, candidate}
    imported = frozenset().union(*(text.imported for text in texts))
    read = {name for text in texts for name in text.read if not _is_dunder(name)} - defined
    bare = _bare_names((setup, *tests))
    ambient = {
        name
        for name in read
        if name in imported or hasattr(builtins, name) or name in BORROWED or (name in PURE and name not in bare)
    }
    # What the program has to give
    program = set(given) | (instances & read) | ({candidate} & read - ambient)
    if given or candidate:
        ambient |= {name for name in read if name in PURE}
    else:
        program |= read - ambient
        program.update(_sole_functions(tests, texts, program, defined))
    if unknown := sorted(read - ambient - program):
        raise BrokenTestsError(f"tests read names={unknown}, which nothing defines: add them to the entry point")
    needed = sorted(ambient - program - imported)
    library = [(n, n, "") if n in PURE else (n, BORROWED[n], n) for n in needed if n in PURE or n in BORROWED]
    borrows = any(helpers & text.read for text in texts)
    return TestNames(tuple(sorted(program)), tuple(sorted(instances - {*given, candidate})), tuple(library), borrows)


def check_names(names: Sequence[str]) -> None:
    """Raise ``BrokenTestsError`` unless all ``names`` are identifiers that a program can define."""
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or _is_dunder(name):
            raise BrokenTestsError(f"name={name!r:.100} under test must be an identifier that a program can define")


@lru_cache(maxsize=1024)
def read_names(text: str) -> TextNames:
    """Return the global names of a text; raise ``BrokenTestsError`` if it is not Python."""
    try:
        module = symtable.symtable(text, "<test>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BrokenTestsError(f"{type(error).__name__}: {error}") from None
    defined, imported, read = set(), set(_starred(text)), set()
    scopes = [module]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if scope is not module and not symbol.is_global():
                continue
            defined.update([symbol.get_name()] if symbol.is_assigned() else [])
            imported.update([symbol.get_name()] if symbol.is_imported() else [])
            read.update([symbol.get_name()] if symbol.is_referenced() else [])
    return TextNames(frozenset(defined), frozenset(imported), frozenset(read))


def reference_names(code: str, tests: str) -> tuple[list[str], str]:
    """Return the names of a reference solution that its tests read, and its imports for those tests.

    >>> reference_names("import math\\ndef half(x): return x / 2", "assert math.isclose(half(1), 0.5)")
    (['half'], 'import math')
    """
    try:
        defined, read = read_names(code).defined, read_names(tests).read
    except BrokenTestsError:
        return [], ""
    imports = [
        ast.unparse(node)
        for node in ast.parse(code).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and _module_of(node) in sys.stdlib_module_names
        and any((alias.asname or alias.name).partition(".")[0] in read for alias in node.names)
    ]
    return sorted(name for name in defined & read if not _is_dunder(name)), "\n".join(imports)


def _module_of(node: ast.Import | ast.ImportFrom) -> str:
    name = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
    return name.partition(".")[0]


def _starred(text: str) -> Iterator[str]:
    """Yield the names that star imports of pure modules give."""
    if "*" not in text or "import" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in PURE:
            yield from (name for name in vars(importlib.import_module(node.module)) if name[0] != "_")


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _bare_names(texts: Sequence[str]) -> set[str]:
    """Return names that are read other than for an attribute: a module is only read so."""
    trees = [ast.parse(text) for text in texts if any(module in text for module in PURE)]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    dotted = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in dotted}


def _sole_functions(
    tests: Sequence[str], texts: Sequence[TextNames], program: set[str], defined: frozenset[str]
) -> Iterator[str]:
    """Yield the function under test of each test that reads no name of the program or of another text."""
    for test, names in zip(tests, texts[1:], strict=True):
        if names.read & (program | (defined - names.defined)):
            continue
        called = [name for name in _calls(ast.parse(test)) if name not in names.defined]
        # Constructors of arguments, such as range, are rarely under test
        functions = [name for name in called if not isinstance(getattr(builtins, name, None), type)]
        yield from (functions or called)[:1]


def _calls(node: ast.AST) -> Iterator[str]:
    """Yield the names of the called functions, in the order in which the calls complete."""
    for child in ast.iter_child_nodes(node):
        yield from _calls(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id


@lru_cache(maxsize=256)
def _prelude_names(prelude: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a prelude gives to the tests, and those that it gives to the program."""
    try:
        names, tree = read_names(prelude), ast.parse(prelude)
    except BrokenTestsError:  # the beginning of a function
        return frozenset(), frozenset()
    stubs = {node.name for node in tree.body if hasattr(node, "name") and _is_stub(node)}
    given = (names.defined | names.imported) - stubs
    if any(isinstance(node, ast.ClassDef) and not _is_stub(node) for node in tree.body):
        return frozenset(), given - names.imported
    return given, frozenset()


def _is_stub(node: ast.AST) -> bool:
    """Return whether a definition has no body but a docstring, ``pass``, ``...`` or ``raise``."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return all(_is_stub(part) for part in node.body)
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, (ast.Pass, ast.Raise))
