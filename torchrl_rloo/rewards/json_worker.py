"""Checks of JSON against a JSON Schema; a module that :mod:`torchrl_rloo.rewards.judge_loop` runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

# Parts of a pattern: an escaped character, a class up to its end, and the end of the text
_PATTERN_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*|\$", re.DOTALL)
_EXAMPLES = (None, True, 1, "a", [], {})  # a schema that takes long for each of them does so for all values


class Judge(NamedTuple):
    """Functions that read a schema and a completion, and check one by the other."""

    parse_gold: Callable[[str], Any]
    parse_answer: Callable[[str], str]
    equal: Callable[[Any, str], bool | str]


def make_judge() -> Judge:
    """Return the functions, which have no time limits."""
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
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is no JSON, repeats a name in an object, or has a number that no float can hold.
    """
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
    """Return the validator of a schema in JSON.

    Raises:
        ValueError: if it is not a JSON Schema.
    """
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
