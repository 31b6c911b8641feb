"""Reward for completions that are JSON of a given schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from torchrl_rloo.rewards.fences import last_block
from torchrl_rloo.rewards.protocol import final_text


class JSONSchema:
    """Reward of 1.0 where a completion is JSON that a JSON Schema allows, else 0.0.

    The last fenced block of language ``json`` is judged, else the whole completion. NaN, infinities and decimals too
    large for a float (``1e999``) are not JSON. Values that are nested too deeply to check score 0.0. References are
    resolved only within the schema; nothing is fetched. Regular expressions with nested repetitions in a schema can
    take very long. Use a process executor with a time limit for them.

    Args:
        schema: schema of all rows, as a mapping or JSON. None requires ``column``.
        column: dataset column of schemas per row, as JSON, since a column of mappings gives each of them the keys of
            all others. None in the column abstains.

    Raises:
        ValueError: unless exactly one of ``schema`` and ``column`` is given, or if ``schema`` is not a JSON Schema.
        ImportError: if jsonschema is not installed.

    Example:
        >>> reward = JSONSchema({"type": "object", "required": ["answer"]})
        >>> reward(["?"] * 3, ['{"answer": 85}', '{"result": 85}', "85?"], [[1]] * 3)
        [1.0, 0.0, 0.0]
    """

    __name__ = "json_schema"

    def __init__(self, schema: Mapping[str, Any] | bool | str | None = None, *, column: str | None = None):
        if find_spec("jsonschema") is None:
            raise ImportError('JSONSchema requires jsonschema: pip install "torchrl_rloo[rewards]"')
        if (schema is None) == (not column):
            raise ValueError(f"schema={schema!r} and column={column!r}: set exactly one of them")
        self.schema, self.column = None if schema is None else _as_json(schema), column
        if self.schema is not None:
            _validator(self.schema)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores: 1.0, 0.0, or None where the schema of the row is None.

        Raises:
            KeyError: if the dataset does not have ``column``.
            ValueError: if a row's schema is not a JSON Schema, or a schema has an external reference.
        """
        if self.column and self.column not in columns:
            raise KeyError(f"{self.__name__} requires column {self.column!r}; the rows have {sorted(columns)}")
        schemas = columns[self.column] if self.column else [self.schema] * len(completions)
        return [
            None if schema is None else float(_allows(_as_json(schema), final_text(completion)))
            for completion, schema in zip(completions, schemas, strict=True)
        ]


def _allows(schema: str, text: str) -> bool:
    from referencing.exceptions import Unresolvable

    validator = _validator(schema)
    try:
        return validator.is_valid(json.loads(last_block(text, ("json",)), parse_constant=_finite, parse_float=_finite))
    except Unresolvable as error:
        raise ValueError(f"schema must contain its reference {error.ref!r}: nothing is fetched") from error
    except (ValueError, OverflowError, RecursionError):  # not JSON, too large for a float, nested too deeply
        return False


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not finite")
    return value


def _as_json(schema: Mapping[str, Any] | bool | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """Create the validator of a schema in JSON."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        parsed = json.loads(schema)
        kind = validator_for(parsed, default=Draft202012Validator)
        kind.check_schema(parsed)
    except (SchemaError, ValueError, TypeError, RecursionError) as error:
        reason = error.message if isinstance(error, SchemaError) else error
        raise ValueError(f"schema={schema:.200} must be a JSON Schema: {reason}") from error
    return kind(parsed, registry=Registry())  # the default registry would fetch external references
