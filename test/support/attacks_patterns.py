"""Every regular expression of the package, and texts made from its own parts that could cost it more than linear time.

:func:`slow_text` needs no list of patterns or texts: it finds the patterns of a package, compiled and inline, and
builds texts from each pattern's parse tree. They repeat, nest, alternate and never close its parts.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_FUNCTIONS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "sub", "subn", "split"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_FILLERS = "a1 \n\\Z-."  # characters that classes may hold, in addition to the pattern's own
_MOST_FILLERS, _MOST_TEXTS = 24, 500  # of a pattern
_SHORT = 5_000  # characters
_NEGLIGIBLE_S = 0.002  # at the short size, where quadratic time takes 5 ms or more
_MOST = 25  # ratio for ten times the size; quadratic time has 100
_LIMIT_S = 1.0  # of CPU time: a text that takes longer is slow, whatever its ratio


class _LimitError(Exception):
    """Limit of CPU time."""


def seconds(call: Callable[[str], Any], text: str) -> float:
    """Return the CPU time of a call in the main thread; infinity above a limit, at which the call is ended."""

    def end(*_: Any) -> None:
        raise _LimitError

    before = signal.signal(signal.SIGVTALRM, end)
    start = time.thread_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, _LIMIT_S)
    try:
        call(text)
        return time.thread_time() - start
    except _LimitError:
        return float("inf")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def is_slow(call: Callable[[str], Any], make: Callable[[int], str], short: int = _SHORT, scale: float = 1.0) -> bool:
    """Return whether ten times the text takes far more than ten times the CPU time.

    Args:
        call: reader of texts.
        make: function that makes a text of about a number of characters.
        short: smaller size.
        scale: factor of the time that is negligible at the smaller size.
    """
    for _ in range(3):  # a cold cache or a busy neighbor spoils one measurement, not three
        small = seconds(call, make(short))
        if small < _NEGLIGIBLE_S * scale:
            return False
        if (large := seconds(call, make(10 * short))) < _MOST * small:
            return False
        if large == float("inf"):
            return True
    return True


def patterns(package: ModuleType, objects: Iterable[Any] = ()) -> Iterator[tuple[str, re.Pattern[Any], set[str]]]:
    """Yield place, pattern and the names of the methods by which it is called, for each pattern of a package.

    Found are compiled patterns in modules, also in their containers and objects, and literals given to functions of
    ``re``. In literals with parts that only a call knows, these parts are the letter ``a``.

    Args:
        package: package, all of whose modules are imported.
        objects: objects whose attributes may be further patterns.
    """
    for value in objects:
        for path, pattern in _compiled(type(value).__name__, value):
            yield path, pattern, {"search"}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        spec = importlib.util.find_spec(info.name)
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
        called: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = getattr(node.func.value, "id", getattr(node.func.value, "attr", ""))
                called.setdefault(name, set()).add(node.func.attr)
                if name == "re" and node.func.attr in _FUNCTIONS and (pattern := _literal(node)) is not None:
                    yield f"{info.name}:{node.lineno}", pattern, {node.func.attr} - {"compile"}
        for name, value in vars(importlib.import_module(info.name)).items():
            for path, pattern in _compiled(name, value):
                yield f"{info.name}.{path}", pattern, called.get(path.rpartition(".")[2], set())


def _literal(node: ast.Call) -> re.Pattern[Any] | None:
    source = node.args[0]
    if isinstance(source, ast.JoinedStr):
        text: Any = "".join(part.value if isinstance(part, ast.Constant) else "a" for part in source.values)
    elif isinstance(source, ast.Constant):
        text = source.value
    else:
        return None
    flags = 0
    for flag in [*node.args[1:], *(keyword.value for keyword in node.keywords)]:
        named = (getattr(re, part.attr, 0) for part in ast.walk(flag) if isinstance(part, ast.Attribute))
        flags |= sum(value for value in named if isinstance(value, re.RegexFlag))
    return re.compile(text, flags)


def _compiled(path: str, value: Any, depth: int = 3) -> Iterator[tuple[str, re.Pattern[Any]]]:
    if isinstance(value, re.Pattern):
        yield path, value
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _compiled(f"{path}[{key!r}]", item, depth - 1)
    elif depth and isinstance(value, list | tuple | set | frozenset):
        for i, item in enumerate(value):
            yield from _compiled(f"{path}[{i}]", item, depth - 1)
    elif depth and not isinstance(value, type | ModuleType) and type(value).__module__.startswith("torchrl_rloo"):
        for name, item in getattr(value, "__dict__", {}).items():
            yield from _compiled(f"{path}.{name}", item, depth - 1)


def hostile_parts(pattern: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    """Return head, part and tail of each hostile text for a pattern: the part is repeated."""
    source = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    tree = re._parser.parse(
        source, pattern.flags & ~re.DEBUG & (~re.UNICODE if isinstance(pattern.pattern, bytes) else ~0)
    )
    literals = [chr(value) for value in _literals(tree)]
    found: dict[tuple[str, str, str], None] = {}
    for filler in list(dict.fromkeys([*_FILLERS, *literals]))[:_MOST_FILLERS]:
        whole = _sample(tree, filler)
        for head, part in dict.fromkeys([*_repeated(tree, filler, ""), ("", filler), ("", whole), ("", whole[:-1])]):
            texts = ((head, part, "\0"), ("", head + part, ""), ("", part, "\0"), (head + part, filler, ""))
            found |= dict.fromkeys(text for text in texts if text[1])
    pieces = list(dict.fromkeys([*_runs(tree), *literals]))[:12]
    found |= dict.fromkeys((a, b, "") for a in pieces for b in pieces)
    found |= dict.fromkeys(("", a + b, "") for a in pieces for b in pieces)
    return list(found)[:: len(found) // _MOST_TEXTS + 1]


def _nodes(argument: Any) -> Iterator[Any]:
    """Yield the sequences inside the argument of a node."""
    if isinstance(argument, re._parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _nodes(part)


def _literals(tree: Any) -> list[int]:
    found = []
    for op, argument in tree:
        if str(op) in ("LITERAL", "NOT_LITERAL"):
            found.append(argument)
        elif str(op) == "IN":
            found += [value for kind, value in argument if str(kind) == "LITERAL"]
        for inner in _nodes(argument):
            found += _literals(inner)
    return list(dict.fromkeys(found))


def _runs(tree: Any) -> Iterator[str]:
    """Yield the runs of literals of a tree."""
    run = ""
    for op, argument in tree:
        if str(op) == "LITERAL":
            run += chr(argument)
            continue
        yield from [run] * (len(run) > 1)
        run = ""
        for inner in _nodes(argument):
            yield from _runs(inner)
    yield from [run] * (len(run) > 1)


def _sample(tree: Any, filler: str) -> str:
    """Return a text that the tree matches, nearly: with the filler in every class that holds it."""
    return "".join(_sample_node(op, argument, filler) for op, argument in tree)


def _sample_node(op: Any, argument: Any, filler: str) -> str:
    name = str(op)
    if name == "LITERAL":
        return chr(argument)
    if name in ("IN", "NOT_LITERAL", "ANY", "CATEGORY"):
        return _member(op, argument, filler)
    if name in _REPEATS:
        return _sample(argument[2], filler) * max(1, min(argument[0], 3))
    if name == "BRANCH":
        return max((_sample(branch, filler) for branch in argument[1]), key=lambda text: (filler in text, len(text)))
    if name in ("SUBPATTERN", "ATOMIC_GROUP"):
        return "".join(_sample(inner, filler) for inner in _nodes(argument))
    return ""  # assertions, places and references to groups


def _member(op: Any, argument: Any, filler: str) -> str:
    """Return the filler if the class holds it, else another of its characters."""
    data = re._parser.State()
    data.str = ""
    compiled = re._compiler.compile(re._parser.SubPattern(data, [(op, argument)]))
    candidates = [filler, *_FILLERS, *map(chr, range(32, 127)), "\u3040", "\xe9"]
    return next((character for character in candidates if compiled.fullmatch(character)), "")


def _repeated(tree: Any, filler: str, head: str) -> Iterator[tuple[str, str]]:
    """Yield each repeated part of a tree, and a text that leads to it."""
    for op, argument in tree:
        if str(op) in _REPEATS and int(argument[1]) > 1:
            yield head, _sample(argument[2], filler)
            if len(argument[2]) == 1 and str(argument[2][0][0]) == "SUBPATTERN":
                for branch_op, branch in argument[2][0][1][-1]:
                    if str(branch_op) == "BRANCH":
                        yield from ((head, _sample(each, filler)) for each in branch[1])
        for inner in _nodes(argument):
            yield from _repeated(inner, filler, head)
        head += _sample_node(op, argument, filler)


def slow_text(pattern: re.Pattern[Any], methods: set[str]) -> tuple[str, str, str] | None:
    """Return a hostile text on which a pattern takes more than linear time, None without one.

    Args:
        pattern: pattern.
        methods: names of the methods that are called; a pattern that is only matched at one place is not searched.
    """
    encode = (lambda text: text.encode("latin-1", "replace")) if isinstance(pattern.pattern, bytes) else str
    matched = bool(methods) and methods <= {"match", "fullmatch"}
    calls = (
        [getattr(pattern, name) for name in methods]
        if matched
        else [lambda text: sum(1 for _ in pattern.finditer(text))]
    )
    for head, part, tail in hostile_parts(pattern):

        def make(size: int, head=head, part=part, tail=tail) -> str:
            return head + part * (size // len(part)) + tail

        if any(is_slow(lambda text, call=call: call(encode(text)), make) for call in calls):
            return head, part, tail
    return None
