"""Whether a completion is JSON of the form asked for."""

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
    """1.0 where a completion is JSON that a JSON Schema allows, else 0.0.

    The content of the last block fenced as `````json`` counts, or the whole completion if it has none. NaN, infinities
    and numbers too large for a float are no JSON, and what is nested too deeply to be checked scores 0.0. References
    are followed within the schema only: nothing is fetched. Regular expressions in a schema can take very long on some
    texts: with patterns of nested repetitions use an executor with a time-out.

    Args:
        schema: of all rows, as a mapping or JSON.
        column: the dataset's column of schemas, if each row has its own; as JSON, since datasets give each mapping
            the keys of all others. None abstains.

    Raises:
        ValueError: unless exactly one of both is given; if ``schema`` is no JSON Schema.
        ImportError: if jsonschema is not installed.

    Example:
        >>> reward = JSONSchema({"type": "object", "required": ["answer"]})
        >>> reward(["?"] * 3, ['{"answer": 85}', '{"result": 85}', "85?"], [[1]] * 3)
        [1.0, 0.0, 0.0]
    """

    __name__ = "json_schema"

    def __init__(self, schema: Mapping[str, Any] | bool | str | None = None, *, column: str | None = None):
        if find_spec("jsonschema") is None:
            raise ImportError('jsonschema is not installed: pip install "torchrl_rloo[rewards]"')
        if (schema is None) == (not column):
            raise ValueError(f"give either a schema or the column of schemas, not schema={schema!r}, column={column!r}")
        self.schema, self.column = None if schema is None else _as_json(schema), column
        if self.schema is not None:
            _validator(self.schema)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """``B`` scores: 1.0, 0.0, or None where the row's schema is None.

        Raises:
            KeyError: if the rows have no column of schemas.
            ValueError: if a row's schema is no JSON Schema, or a schema refers to what it does not contain.
        """
        if self.column and self.column not in columns:
            raise KeyError(f"{self.__name__} needs the column {self.column!r}; the rows have {sorted(columns)}")
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
        raise ValueError(f"the schema refers to {error.ref!r}, which it does not contain: none is fetched") from error
    except (ValueError, OverflowError, RecursionError):  # no JSON; numbers that no float holds; nested too deeply
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
    """The validator of a schema in JSON."""
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
        raise ValueError(f"schema {schema:.200} is no JSON Schema: {reason}") from error
    return kind(parsed, registry=Registry())  # an empty one: the default would fetch what it lacks
