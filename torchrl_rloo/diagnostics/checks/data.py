"""Checks of the prompts: duplicates, overlap with held-out prompts, missing answers."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.diagnostics.checks.base import Facts, Finding

DUPLICATE_SHARE = 0.1  # copies up to this share of the rows change the weights of prompts little
ERROR_SHARE = 0.5


def normalize_text(text: str) -> str:
    """Return a text without differences of case, width, white space, quotes around it and punctuation at its end.

    Signs inside the text stay, because ``1+2`` and ``1-2`` are different prompts.

    Example:
        >>> normalize_text("  What is\\n1+2 ?") == normalize_text("what is 1+2?")
        True
        >>> normalize_text("1+2") == normalize_text("1-2")
        False
    """
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).strip("\"'`").rstrip(".?!:;, ").strip("\"'`")


def prompt_text(query: Any) -> str:
    """Return what distinguishes a prompt: its text, or its messages without the system's."""
    if isinstance(query, str):
        return query
    return "\n".join(str(message["content"]) for message in query if message["role"] != "system")


def check_duplicates(facts: Facts) -> Finding:
    """Count rows that repeat an earlier one: the same prompt, up to case and spaces, with the same answer.

    Only the columns that rewards require are compared, or all if the environment rewards, as in a game.
    """
    columns = facts.answer_columns if facts.functions else facts.train.columns
    seen = {(_task_and_text(row), repr([row[name] for name in columns])) for row in facts.train.rows}
    total = len(facts.train)
    copies = total - len(seen)
    if copies <= DUPLICATE_SHARE * total:
        return Finding("ok", f"{copies} of {total:,} training rows repeat another")
    level = "error" if copies >= ERROR_SHARE * total else "warn"
    sentence = f"{copies:,} of {total:,} training rows repeat another, up to case and spaces"
    return Finding(level, sentence, "remove them: their prompts are drawn more often, and split over train and test")


def check_overlap(facts: Facts) -> Finding:
    """Count held-out prompts that are also trained on."""
    trained = {_task_and_text(row) for row in facts.train.rows}
    exact = {prompt_text(row[keys.QUERY]) for row in facts.train.rows}
    held_out = facts.held_out.rows
    shared = [row for row in held_out if _task_and_text(row) in trained]
    if not shared:
        return Finding("ok", f"none of {len(held_out):,} held-out prompts is trained on")
    verbatim = sum(prompt_text(row[keys.QUERY]) in exact for row in shared)
    sentence = f"{len(shared):,} of {len(held_out):,} held-out prompts are also trained on, {verbatim:,} word for word"
    example = f", such as {prompt_text(shared[0][keys.QUERY])!r:.80}"
    level = "error" if len(shared) >= ERROR_SHARE * len(held_out) else "warn"
    return Finding(level, sentence + example, "remove them from data.source, or set another data.eval_source")


def check_answers(facts: Facts) -> list[Finding]:
    """Count rows without a value in a column that the rewards require."""
    found, names = [], []
    for column in facts.answer_columns:
        rows = [row for row in _rows_of_column(facts.train, column)]
        empty = sum(_is_empty(row[column]) for row in rows)
        if not empty:
            names.append(column)
            continue
        level = "error" if empty >= ERROR_SHARE * len(rows) else "warn"
        sentence = f"column {column!r}, which the rewards read, is empty in {empty:,} of {len(rows):,} training rows"
        found.append(Finding(level, sentence, "fill it, rename a column (data.column_map), or remove these rows"))
    if names and not found:
        return [Finding("ok", f"no value is missing in {', '.join(names)}")]
    return found


def _rows_of_column(dataset: PromptDataset, column: str) -> Sequence[dict[str, Any]]:
    """Return the rows that have a column; in a mixture those of the tasks that fill it."""
    tasks = {row.get(keys.TASK) for row in dataset.rows if row.get(column) is not None}
    return [row for row in dataset.rows if row.get(keys.TASK) in tasks] if tasks else dataset.rows


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or (hasattr(value, "__len__") and not value)


def _task_and_text(row: dict[str, Any]) -> tuple[Any, str]:
    return row.get(keys.TASK), normalize_text(prompt_text(row[keys.QUERY]))
