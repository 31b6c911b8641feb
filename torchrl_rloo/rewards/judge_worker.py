"""Worker process of judges: a script whose argument is ``math`` or ``json``.

It does not import the toolkit, so it starts in about a second and needs about 60 MB. Requests and replies are lines of
JSON. A request is ``[limit, gold, text]`` with a limit in seconds of CPU time. The first reply tells whether the gold
was read, or is an error. If it was, a second reply tells whether the text fits it. Without a gold, the reply is the
canonical form of the text's answer, or ``""``.

A child process reads and answers. A request over the limit ends the child, within any operation: short texts such as
``9^{9^{9}}`` keep SymPy in one endless multiplication, which no exception can interrupt. Its parent replies ``null``
and forks the next child, which takes milliseconds since the libraries are imported.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script, whose files are not top-level modules

import json
import logging
import math
import os
import re
import resource
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

MAX_BYTES = 2_000_000_000  # address space: some short texts are numbers of gigabytes


class Judge(NamedTuple):
    """Functions without time limits: they read golds and texts, compare both, and write the form of an answer."""

    parse_gold: Callable[[str], Any]
    parse_answer: Callable[[str], Any]
    equal: Callable[[Any, Any], bool | str]
    form: Callable[[Any], str] | None = None


def main(kind: str) -> None:
    """Fork processes that answer requests, one at a time, until standard input closes."""
    # Leave Ctrl-C to the training process, and keep the output of libraries out of the replies
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)
    with suppress(ValueError, OSError):  # macOS has no limit of address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)  # the limit of CPU time bounds large numbers
    judge = make_math_judge() if kind == "math" else make_json_judge()
    os.write(replies, b'"ready"\n')
    while (child := os.fork()) > 0:
        if os.waitpid(child, 0)[1] == 0:
            return
        with suppress(BrokenPipeError):  # the trainer has ended
            os.write(replies, b"null\n")
    try:
        answer_requests(judge, replies)
    except (MemoryError, RecursionError):
        os._exit(1)
    os._exit(0)


def answer_requests(judge: Judge, replies: int) -> None:
    """Answer requests from standard input until it closes; end this process at a request's limit of CPU time."""

    def reply(value: Any) -> None:
        os.write(replies, json.dumps(value).encode() + b"\n")

    while line := _read_line():
        limit, gold, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limit)  # its signal ends the process within any operation
        if gold is None:
            reply(judge.form(judge.parse_answer(text)))
        else:
            parsed = judge.parse_gold(gold)
            reply(parsed if isinstance(parsed, str) else bool(parsed))
            if parsed and not isinstance(parsed, str):
                reply(judge.equal(parsed, judge.parse_answer(text)))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read_line() -> bytes:
    """Return the next request; no other follows it before its reply, so no text of another is read."""
    line = bytearray()
    while not line.endswith(b"\n") and (part := os.read(0, 65536)):
        line += part
    return bytes(line)


# JSON Schema

# Parts of a pattern: an escaped character, a class up to its end, and the end of the text
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*|\$", re.DOTALL)
_EXAMPLES = (None, True, 1, "a", [], {})  # a schema that takes long for each of them does so for all values


def make_json_judge() -> Judge:
    """Return functions that read a schema and a completion, and check one by the other."""
    read = lru_cache(maxsize=64)(read_schema)

    def parse_gold(schema: str) -> Any:
        try:
            validator = read(schema)
            for example in _EXAMPLES:
                _is_valid(validator, example)
        except ValueError as error:
            return str(error)
        except RecursionError:  # it refers to itself without end
            return None
        return validator

    def equal(validator: Any, text: str) -> bool | str:
        try:
            value = read_json(text)
        except (ValueError, RecursionError):  # not JSON, too large for a float, nested too deeply
            return False
        try:
            return _is_valid(validator, value)
        except ValueError as error:
            return str(error)
        except RecursionError:
            return False

    parse_gold("{}")  # so that no child has to import
    return Judge(parse_gold, lambda text: text, equal)


def _is_valid(validator: Any, value: Any) -> bool:
    from referencing.exceptions import Unresolvable

    try:
        return validator.is_valid(value)
    except Unresolvable as error:
        raise ValueError(f"schema must contain its reference {error.ref!r}: nothing is fetched") from error
    except OverflowError:
        return False


def read_json(text: str) -> Any:
    """Return the value of a JSON text without repeated names and with numbers that a float can hold."""
    return json.loads(
        text, parse_constant=_finite, parse_float=_finite, parse_int=_integer, object_pairs_hook=_distinct
    )


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number:.20} is not finite")
    return value


def _integer(number: str) -> int:
    if len(number) > 4000:
        raise ValueError(f"an integer of {len(number)} digits is too large")
    return int(number)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("an object repeats a name")
    return found


def read_schema(schema: str) -> Any:
    """Return the validator of a schema in JSON; raise ``ValueError`` if it is not a JSON Schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import extend, validator_for
    from referencing import Registry

    try:
        parsed = json.loads(schema)
        kind = validator_for(parsed, default=Draft202012Validator)
        kind.check_schema(parsed)
    except (SchemaError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = error.message if isinstance(error, SchemaError) else error
        raise ValueError(f"schema={schema:.200} must be a JSON Schema: {reason}") from error
    kind = extend(kind, {"uniqueItems": _unique_items, "pattern": _pattern})
    return kind(parsed, registry=Registry())  # the default registry would fetch external references


def _unique_items(validator: Any, unique: bool, value: Any, schema: Any) -> Iterator[Any]:
    """Check in linear time that no items are equal; jsonschema compares each with each."""
    from jsonschema.exceptions import ValidationError

    if unique and validator.is_type(value, "array") and len({_form(item) for item in value}) < len(value):
        yield ValidationError("the items must be unique")


def _form(value: Any) -> Any:
    """Return a hashable form that is equal for equal JSON values: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((name, _form(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(map(_form, value))
    return (bool, value) if isinstance(value, bool) else value  # no list has a type


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[Any]:
    """Search a pattern whose ``$`` is the end of the text, as JSON Schema has it; Python's allows a line break."""
    from jsonschema.exceptions import ValidationError

    if validator.is_type(value, "string") and not re.search(_ended(pattern), value):
        yield ValidationError("the text must match its pattern")


@lru_cache(maxsize=256)
def _ended(pattern: str) -> str:
    return _PATTERN_PART.sub(lambda part: r"\Z" if part[0] == "$" else part[0], pattern)


# Mathematical answers

_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
# Delimiters, several lines, GSM8K's marker, and notations that only the parser of plain expressions reads
_NO_FORMULA = re.compile(
    r"(?<!\\)\$|\\[(\[]|\\boxed|\n|####|[\u00a3\u20ac\u00a5\u20b9\u221a]|\*\*|(?<![_^])(?<!frac)(?<!frac )[0-9]\s+[0-9]"
)


def wrap_formula(gold: str) -> str | None:
    """Wrap a gold that is bare LaTeX in dollar signs; return None for other golds.

    math-verify reads LaTeX only between delimiters. Without them it would take the 2 or the 10 of ``2^{10}``.

    >>> wrap_formula("1.5e3"), wrap_formula("2^{10}"), wrap_formula("42 apples")
    ('$1.5\\\\times 10^{3}$', '$2^{10}$', None)
    """
    gold = re.sub(r"(?<=[0-9])[eE]([-+]?[0-9]+)", r"\\times 10^{\1}", gold)
    gold = re.sub(r"\b([0-9]+)\s+([0-9]+)/([0-9]+)\b", r"\1\\frac{\2}{\3}", gold)
    if _NO_FORMULA.search(gold) or re.search(r"[^\W\d_]{2}", _COMMAND.sub(" ", gold)):
        return None
    return "$" + re.sub(r"(?<!\\)%", r"\%", gold) + "$"


_THIN_SPACE = re.compile(r"(?<=[0-9])(?:\\[,;:!]|[~\u00a0\u2009\u202f ])\s?(?=[0-9]{3}(?![0-9]))")  # between thousands
_BARE_PERCENT = re.compile(r"(?<!\\)%")
_LAST_DOT = re.compile(r"(?<=[0-9A-Za-z)}])\.(?=\s?\})")
_BASE = re.compile(r"(?<=[0-9])_(?:\{\s*\(?)?([0-9]{1,2})(?![0-9])")  # of a number, such as 101_2
_BASE_WORD = re.compile(r"(?<=[0-9])_\s?(\{\s?)?\\(?:text|textbf|mathrm|mbox)\s?\{\s?([a-z]+)\s?\}(?(1)\s?\})")
_BASES = {name: n for n, name in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)}
_DEGREE = re.compile(r"\\circ|\\degree|\u00b0")
_PERCENTAGE = re.compile(r"(?<![0-9.])([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))\s?\\?%")


def make_math_judge() -> Judge:
    """Import the libraries and return the functions, which have no time limits."""
    logging.disable(logging.WARNING)  # math-verify warns that its time limits are disabled
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True, malformed_operators=True),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )

    @lru_cache(maxsize=64)  # the rows of a group share a gold
    def parse_gold(gold: str) -> list[Any]:
        gold = _BASE_WORD.sub(_write_base, gold)
        plain = _end_of_equation(parse(gold, parsing_timeout=None))
        if (latex := wrap_formula(gold)) is None:
            return plain
        formula = _end_of_equation(parse(latex, parsing_timeout=None))
        # Accept both readings of a percentage: 5% is 0.05 as plain text, and math-verify reads 5\% as 5
        return plain + formula if "%" in gold else formula or plain

    def parse_answer(text: str) -> list[Any]:
        text = _LAST_DOT.sub("", _BARE_PERCENT.sub(r"\\%", _THIN_SPACE.sub("", _BASE_WORD.sub(_write_base, text))))
        found = parse(text, extraction_config=[config], extraction_mode="first_match", parsing_timeout=None)
        return _end_of_equation(found)

    def equal(gold: list[Any], answer: list[Any]) -> bool:
        if len({_bases(values) for values in (gold, answer)} - {()}) > 1:
            return False
        answer = [value for value in answer if not _is_false(value)]
        pairs = [(g, a) for g in gold for a in answer if isinstance(g, str) == isinstance(a, str)]
        return any(
            (_describe(_unwrap(g)) == _describe(_unwrap(a)) or verify(g, a, timeout_seconds=None)) and _may_equal(g, a)
            for g, a in pairs
        )

    def form(answer: list[Any]) -> str:
        return "_".join([_describe(_unwrap(answer[0])), *_bases(answer)]) if answer else ""

    equal(parse_gold(r"\frac{1}{2}"), parse_answer(r"\boxed{0.5}"))  # so that no child has to set up
    return Judge(parse_gold, parse_answer, equal, form)


def _write_base(found: re.Match[str]) -> str:
    return f"_{{{_BASES[found[2]]}}}" if found[2] in _BASES else found[0]


def _bases(values: list[Any]) -> tuple[str, ...]:
    """Return the bases of the numbers in an answer, which the parser drops."""
    texts = (value.rpartition("=")[2] for value in values if isinstance(value, str))
    return tuple(sorted({base for text in texts for base in _BASE.findall(text)}))


def _end_of_equation(values: list[Any]) -> list[Any]:
    """Return an answer such as ``101_2 = 5`` without its left side, where the parser drops bases and degrees."""
    from math_verify.grader import is_equation, take_last_relation

    equation, *texts = values or [None]
    if (
        not is_equation(equation)
        or equation.free_symbols
        or not any(_BASE.search(t) or _DEGREE.search(t) for t in texts)
    ):
        return values
    return [take_last_relation(equation).rhs, *texts]


def _may_equal(gold: Any, answer: Any) -> bool:
    """Return False for pairs that math-verify takes for equal though they are different answers."""
    import sympy
    from math_verify.grader import is_equation, take_first_relation

    # x=5 is not y=5, and 2x+3y=6 is not 6
    if is_equation(gold) and is_equation(answer):
        names = {str(first.lhs) for first in map(take_first_relation, (gold, answer)) if first.lhs.is_Symbol}
        return len(names) < 2
    gold, answer = _unwrap(gold), _unwrap(answer)
    if is_equation(answer) and not take_first_relation(answer).lhs.is_Symbol:
        return False
    # Numbers are rounded to six decimals, also small ones
    if all(isinstance(value, sympy.Expr) and value.is_number and value.is_finite for value in (gold, answer)):
        first, second = (complex(sympy.N(value)) for value in (gold, answer))
        return abs(first - second) <= 1e-3 * max(abs(first), abs(second))
    # A pair and an interval are not a set of two
    sets = [isinstance(value, sympy.FiniteSet) and len(value) > 1 for value in (gold, answer)]
    ordered = (sympy.Interval, sympy.Tuple, sympy.logic.boolalg.Boolean)
    return not (sets[0] and isinstance(answer, ordered) or sets[1] and isinstance(gold, ordered))


def _unwrap(value: Any) -> Any:
    """Return the right-hand side of ``x=5`` or ``2+3=5``; a line such as ``y=5`` remains an equation, and ``6=5``."""
    from math_verify.grader import is_assignment_relation, is_equation, take_first_relation, take_last_relation

    if _is_false(value):
        return value
    if is_assignment_relation(value) or is_equation(value) and not value.free_symbols:
        name, last = str(take_first_relation(value).lhs), take_last_relation(value).rhs
        return value if name == "y" and not last.free_symbols else last
    return value


def _is_false(value: Any) -> bool:
    """Return whether a value is an equation, or a chain such as ``x=6=5``, whose sides are different numbers."""
    import sympy
    from math_verify.grader import is_equation

    if not is_equation(value):
        return False
    relations = getattr(value, "_unsorted_args", (value,))
    sides = [relations[0].lhs, *(relation.rhs for relation in relations)]
    try:
        numbers = [side for side in sides if side.is_number]
        first, *others = (complex(sympy.N(side)) for side in numbers)  # large ones are infinite
        # Decimals may be rounded or cut, as in 2/3=0.66 and 3*1.67=5
        units = [10.0 ** Decimal(repr(float(side))).as_tuple().exponent for side in numbers if side.is_Float]
    except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):
        return False
    relative = 1e-2 if any(side.has(sympy.Float) for side in numbers) else 1e-9
    return any(abs(value - first) > max([relative * min(abs(value), abs(first)), *units]) for value in others)


def _describe(value: Any) -> str:
    """Return a text that is equal for equal values, and for those alone."""
    import sympy
    from sympy.core.relational import Relational

    if isinstance(value, str):
        percentage = _PERCENTAGE.fullmatch(value.strip())
        return f"{Fraction(percentage[1])}%" if percentage else value.strip()
    if isinstance(value, sympy.MatrixBase):
        return f"matrix{value.shape}" + _describe_all(value.flat())
    if isinstance(value, Relational):
        return _describe_relation(value)
    if isinstance(value, sympy.FiniteSet):
        return _describe_set(value)
    if isinstance(value, sympy.Interval):
        start, end = "[("[bool(value.left_open)], "])"[bool(value.right_open)]
        return f"{start}{_describe(value.start)}, {_describe(value.end)}{end}"
    if isinstance(value, sympy.Tuple):
        return f"({_describe_all(value.args)})"
    if isinstance(value, sympy.Set | sympy.logic.boolalg.BooleanFunction) and value.args:
        return f"{value.func.__name__}({', '.join(sorted(map(_describe, value.args)))})"
    return _describe_expression(value)


def _describe_all(values: Any) -> str:
    return ", ".join(map(_describe, values))


def _describe_set(value: Any) -> str:
    # Of equations, keep the names of different variables
    names = {str(element.lhs) for element in value.args if hasattr(element, "lhs")}
    elements = sorted({_describe(element if len(names) > 1 else _unwrap(element)) for element in value.args})
    return elements[0] if len(elements) == 1 else "{" + ", ".join(elements) + "}"


def _describe_relation(value: Any) -> str:
    import sympy

    if not value.free_symbols:
        return f"{_describe_expression(value.lhs)} {value.rel_op} {_describe_expression(value.rhs)}"
    difference, sign = sympy.expand(value.lhs - value.rhs), value.rel_op
    if sign in (">", ">="):
        difference, sign = -difference, sign.replace(">", "<")
    # Divide by the coefficient of one term; inequalities keep their direction
    terms = sorted(difference.as_coefficients_dict().items(), key=lambda term: str(term[0]))
    scale = next((number for term, number in terms if term.free_symbols), 1)
    scale = scale if sign in ("==", "!=") else abs(scale)
    return f"{_describe_expression(difference / scale)} {sign} 0"


def _describe_expression(value: Any) -> str:
    import sympy

    name = "".join("e" if part is sympy.E else str(part) for part in value.args or [value]).casefold()
    if value.is_Symbol and name.isdecimal():
        return str(int(name))  # \text{5}
    if (value.is_Symbol or value.is_Mul and name.isalpha()) and (len(name) > 2 or name == "no"):
        return name  # a word, such as \text{yes} or yes
    try:
        # Expressions in variables are equal where their values at two points are
        value = sympy.nsimplify(value, rational=True) if value.free_symbols and value.has(sympy.Float) else value
        signs = (1, -1) if value.free_symbols else (1,)
        return " ".join(dict.fromkeys(_describe_number(_at_point(value, sign)) for sign in signs))
    except (TypeError, ValueError, AttributeError, ArithmeticError, NotImplementedError):
        return str(value)


def _at_point(value: Any, sign: int) -> Any:
    import sympy

    points = {s: sympy.Rational(sign * (2003 + zlib.crc32(str(s).encode()) % 5003), 1009) for s in value.free_symbols}
    return value.xreplace(points).doit()


def _describe_number(value: Any) -> str:
    import sympy

    if value.is_Rational:
        return str(Fraction(value.p, value.q))
    if not value.is_finite:
        return str(value)
    real, imaginary = (sympy.N(part, 30, chop=True) for part in value.as_real_imag())
    digits = "" if real == 0 and imaginary else _round(Fraction(str(real)), value.is_Float)
    return digits + (f" + {_round(Fraction(str(imaginary)), False)}i" if imaginary else "")


def _round(value: Fraction, is_decimal: bool) -> str:
    """Return a number with six decimals, small ones with four digits; 0.333333 is 1/3, but 0.33 is not."""
    if value.denominator > 99_999:
        places = 6 if abs(value) >= 1e-3 else 3 - math.floor(math.log10(abs(value)))
        value = round(value, places)
        simple = value.limit_denominator(100)  # two such fractions differ in the first four decimals
        value = simple if is_decimal and abs(value) >= 1e-3 and round(simple, 6) == value else value
    return str(value)


if __name__ == "__main__":
    main(sys.argv[1])
