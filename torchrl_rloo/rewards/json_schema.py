"""Reward for completions that are JSON of a given schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from torchrl_rloo.rewards.fences import last_block
from torchrl_rloo.rewards.json_worker import read_schema
from torchrl_rloo.rewards.process_judge import ProcessJudge
from torchrl_rloo.rewards.protocol import final_text


class JSONSchema:
    """Reward of 1.0 where a completion is JSON that a JSON Schema allows, else 0.0.

    The last fenced block of language ``json`` is judged, else the whole completion. NaN, infinities, decimals too large
    for a float (``1e999``) and objects that repeat a name are not JSON. Values that are nested too deeply to check
    score 0.0. References are resolved only within the schema; nothing is fetched. In ``pattern``, ``$`` is the end of
    the text.

    Worker processes read schemas and judge completions, with limits of CPU time and memory
    (:class:`~torchrl_rloo.rewards.process_judge.ProcessJudge`). A schema that exceeds one abstains: it is too large to
    read, or takes too long even for a number. A completion that does so scores 0.0.

    Args:
        schema: schema of all rows, as a mapping or JSON. None requires ``column``.
        column: dataset column of schemas per row, as JSON, since a column of mappings gives each of them the keys of
            all others. None in the column abstains.
        timeout: seconds of CPU time per row.

    Raises:
        ValueError: unless exactly one of ``schema`` and ``column`` is given, or if ``schema`` is not a JSON Schema.
        ImportError: if jsonschema is not installed.

    Example:
        >>> reward = JSONSchema({"type": "object", "required": ["answer"]})
        >>> reward(["?"] * 3, ['{"answer": 85}', '{"result": 85}', "85?"], [[1]] * 3)
        [1.0, 0.0, 0.0]
    """

    __name__ = "json_schema"

    def __init__(
        self,
        schema: Mapping[str, Any] | bool | str | None = None,
        *,
        column: str | None = None,
        timeout: float = 5.0,
    ):
        if find_spec("jsonschema") is None:
            raise ImportError('JSONSchema requires jsonschema: pip install "torchrl_rloo[rewards]"')
        if (schema is None) == (not column):
            raise ValueError(f"schema={schema!r} and column={column!r}: set exactly one of them")
        self.schema, self.column = None if schema is None else _as_json(schema), column
        self.timeout = _shared_judge(timeout).timeout
        if self.schema is not None:
            read_schema(self.schema)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores: 1.0, 0.0, or None where the schema of the row is None or exceeds a limit.

        Raises:
            KeyError: if the dataset does not have ``column``.
            ValueError: if a row's schema is not a JSON Schema, or a schema has an external reference.
        """
        if self.column and self.column not in columns:
            raise KeyError(f"{self.__name__} requires column {self.column!r}; the rows have {sorted(columns)}")
        schemas = columns[self.column] if self.column else [self.schema] * len(completions)
        texts = [last_block(final_text(completion), ("json",)) for completion in completions]
        rows = [(_as_json(s), text) for s, text in zip(schemas, texts, strict=True) if s is not None]
        verdicts = iter(_shared_judge(self.timeout).judge_rows(rows))
        scores = [None if schema is None else next(verdicts) for schema in schemas]
        if errors := [score for score in scores if isinstance(score, str)]:
            raise ValueError(errors[0])
        return [None if score is None else float(score) for score in scores]


def _as_json(schema: Mapping[str, Any] | bool | str) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True)


@cache
def _shared_judge(timeout: float) -> ProcessJudge:
    """Return the judge that the rewards of this process share."""
    return ProcessJudge("json_worker", timeout)
