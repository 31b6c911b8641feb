"""Prompt datasets: rows from any source, checked once so that nothing downstream has to."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Integral
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.sources import Located, read_source, shown
from torchrl_rloo.data.templates import Messages, encode_prompt

PROMPT_COLUMNS = ("prompt", "query", "question", "problem", "messages", "instruction")

_PLAIN = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)


@dataclass(frozen=True)
class PromptCounts:
    """What became of the rows of a source."""

    read: int
    too_long: int  # dropped, for a prompt longer than max_prompt_length
    duplicates: int  # kept, though their prompt repeats that of an earlier kept row
    kept: int


class PromptDataset(Sequence):
    """An immutable sequence of prompts, at least one, each with the dataset's other columns.

    Made by :func:`load_prompts`, which checks what it holds.

    Attributes:
        rows: ``{"query": messages or text, **columns}`` of plain Python values. Not to be changed: ``dataset[i]`` gives
            a copy that may be.
        counts: what was read, dropped and kept.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], *, too_long: int = 0):
        self.rows = list(rows)
        kept = len(self.rows)
        if not kept:
            raise ValueError("rows is empty, but a prompt dataset needs at least one row")
        distinct = len({_canonical(row[keys.QUERY]) for row in self.rows})
        self.counts = PromptCounts(read=kept + too_long, too_long=too_long, duplicates=kept - distinct, kept=kept)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _plain(self.rows[operator.index(index)])

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns besides ``query``."""
        return tuple(name for name in self.rows[0] if name != keys.QUERY)

    @property
    def conversational(self) -> bool:
        """Whether the prompts are chat messages rather than plain text."""
        return not isinstance(self.rows[0][keys.QUERY], str)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the rows in order, equal in every process: a resumed run can check that it has the same."""
        return hashlib.sha256("\n".join(map(_canonical, self.rows)).encode()).hexdigest()

    def select(self, indices: Iterable[int]) -> PromptDataset:
        """The rows at ``indices``, in that order, as a dataset with counts of its own."""
        return PromptDataset(self.rows[operator.index(i)] for i in indices)

    def __repr__(self) -> str:
        kind = "conversational" if self.conversational else "text"
        return f"PromptDataset({len(self)} {kind} prompts, columns={self.columns}, {self.counts})"


def load_prompts(
    source: str | os.PathLike | Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    split: str | None = "train",
    name: str | None = None,
    row_map: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    prompt_column: str | None = None,
    column_map: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    system_prompt: str | None = None,
    chat: bool | None = None,
    tokenizer=None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_length: int | None = None,
    limit: int | None = None,
) -> PromptDataset:
    """Reads prompts and checks every row of them.

    >>> load_prompts([{"question": "2+2?", "answer": 4}], chat=True)[0]
    {'query': [{'role': 'user', 'content': '2+2?'}], 'answer': 4}

    Args:
        source: a hub id; a ``.jsonl``, ``.json``, ``.parquet`` or ``.csv`` file (the values of a ``.csv`` stay text);
            a directory from ``save_to_disk``; a ``datasets.Dataset`` or ``DatasetDict``; any iterable of mappings.
        split: which split of a hub dataset or ``DatasetDict``; ``None`` where there is only one.
        name: the configuration of a hub dataset.
        row_map: makes the rows out of the source's, where an answer has to be taken out of a text, say.
        prompt_column: the column of prompts, as named after ``column_map``: text, or lists of messages. Default: the
            one of ``PROMPT_COLUMNS`` that is there.
        column_map: new names for columns, ``{name in the source: name in the rows}``.
        columns: the other columns to keep, as named after ``column_map``. Default: all.
        system_prompt: put before conversational prompts that have no system message.
        chat: whether plain-text prompts become a user message. Default: if ``tokenizer`` has a chat template.
        tokenizer: a Hugging Face tokenizer, to try the prompts on and to measure them.
        template_kwargs: passed to the chat template.
        max_prompt_length: in tokens, template included; rows with a longer prompt are dropped and counted.
        limit: read only the first so many rows.

    Raises:
        FileNotFoundError: if ``source`` is neither a local path nor a hub dataset that can be reached.
        TypeError: if ``source`` is nothing to read rows from.
        ValueError: if an argument, a column or a row is not as described, or no prompt is left.
    """
    for argument, value in (("max_prompt_length", max_prompt_length), ("limit", limit)):
        if value is not None and not _is_positive_integer(value):
            raise ValueError(f"{argument} must be a positive integer or None, got {value!r}")
    if tokenizer is None and max_prompt_length is not None:
        raise ValueError(f"max_prompt_length={max_prompt_length} needs the policy's tokenizer: pass it as tokenizer=")
    chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat
    located = islice(read_source(source, split, name), limit)
    located = located if row_map is None else _mapped(located, row_map)
    rows = _rows(located, prompt_column, column_map or {}, columns)
    if not rows:
        raise ValueError(f"{shown(source)} is empty: give at least one row")
    for row in rows:
        row[keys.QUERY] = _as_chat(row[keys.QUERY], system_prompt, chat)
    kept = rows if tokenizer is None else _short_enough(rows, tokenizer, template_kwargs or {}, max_prompt_length)
    dataset = PromptDataset(kept, too_long=len(rows) - len(kept))
    if 1 < len(dataset) == dataset.counts.duplicates + 1:
        same = f"all {len(dataset)} prompts of {shown(source)} are the same, {kept[0][keys.QUERY]!r:.200}"
        raise ValueError(f"{same}: check prompt_column, or give that row once")
    return dataset


def split_prompts(dataset: PromptDataset, eval_size: int | float, seed: int) -> tuple[PromptDataset, PromptDataset]:
    """Divides a dataset into ``(train, eval)``; rows with the same prompt stay together.

    Which prompts are held out depends on the prompts and the seed, not on the order of the rows, which both parts keep.

    Args:
        dataset: has at least two distinct prompts.
        eval_size: how many distinct prompts to hold out (int), or what fraction of them (float).
        seed: another seed, another division.

    Raises:
        ValueError: if either part would have no prompt.
    """
    prompts = [_canonical(row[keys.QUERY]) for row in dataset.rows]
    distinct = sorted(set(prompts), key=lambda prompt: hashlib.sha256(f"{seed}\n{prompt}".encode()).digest())
    held_out = eval_size
    if isinstance(eval_size, float) and 0 < eval_size < 1:
        held_out = round(eval_size * len(distinct))
    elif not _is_positive_integer(eval_size):
        raise ValueError(f"eval_size must be a positive integer or a fraction between 0 and 1, got {eval_size!r}")
    if not 0 < held_out < len(distinct):
        part, remedy = ("eval", "raise") if held_out == 0 else ("train", "lower")
        outcome = f"of {len(distinct)} distinct prompts leaves no {part} prompt"
        raise ValueError(f"eval_size={eval_size} {outcome}: {remedy} it or add prompts")
    chosen = set(distinct[:held_out])
    train = dataset.select(i for i, prompt in enumerate(prompts) if prompt not in chosen)
    return train, dataset.select(i for i, prompt in enumerate(prompts) if prompt in chosen)


def _mapped(located: Located, row_map: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Located:
    for where, row in located:
        try:
            yield where, row_map(row)
        except Exception as error:
            has = f"it has the columns {list(row)}" if isinstance(row, Mapping) else f"it is {row!r:.200}"
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"{where} is not in the format expected: {why}; {has}") from error


def _rows(
    located: Located, prompt_column: str | None, column_map: Mapping[str, str], columns: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Each row as ``{"query": ..., **columns}``, checked. The first row says which columns there are."""
    rows: list[dict[str, Any]] = []
    for where, row in located:
        if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
            raise ValueError(f"{where} must be a mapping from column names to values, got {row!r:.200}")
        if not rows:
            first, given = where, set(row)
            prompt, others = _choose_columns(list(row), prompt_column, column_map, columns)
        if odd := given ^ set(row) if columns is None else {prompt, *others} - set(row):
            remedy = "give all rows the same columns, or list in `columns` those to keep"
            raise ValueError(f"{where} and {first} differ in the columns {sorted(odd)}: {remedy}")
        values = {name: _plain(row[name], f"{where}: column {name!r}") for name in (prompt, *others)}
        query = _check_query(values[prompt], where, column_map.get(prompt, prompt))
        if rows and type(query) is not type(rows[0][keys.QUERY]):
            raise ValueError(f"one of {first} and {where} is plain text, the other chat messages: use one kind for all")
        rows.append({keys.QUERY: query} | {ours: values[name] for name, ours in others.items()})
    return rows


def _choose_columns(
    available: list[str], prompt_column: str | None, column_map: Mapping[str, str], columns: Sequence[str] | None
) -> tuple[str, dict[str, str]]:
    """The source's name of the prompt column, and of the others to keep ``{source's name: ours}``."""
    if unknown := [name for name in column_map if name not in available]:
        raise ValueError(f"column_map renames {unknown}, but the columns are {available}")
    source_name = {column_map.get(name, name): name for name in available}
    ours = list(source_name)
    if len(ours) < len(available):
        raise ValueError(f"column_map={dict(column_map)} gives two of the columns {available} the same name")
    if prompt_column is None:
        candidates = [name for name in ours if name in PROMPT_COLUMNS]
        if len(candidates) != 1:
            raise ValueError(f"set prompt_column: of the columns {ours}, {candidates or 'none'} look like prompts")
        prompt_column = candidates[0]
    if prompt_column not in ours:
        raise ValueError(f"prompt_column={prompt_column!r} is not among the columns {ours}")
    others = [name for name in ours if name != prompt_column]
    if isinstance(columns, str) or not set(columns or ()) <= set(others):
        raise ValueError(f"columns={columns!r} must be a list of names among the columns besides the prompt, {others}")
    kept = others if columns is None else list(columns)
    if clash := [name for name in kept if name in keys.RESERVED]:
        renamed = {source_name[name]: f"dataset_{name}" for name in clash}
        raise ValueError(f"names {clash} are reserved: set column_map={renamed}, say, or leave them out of `columns`")
    return source_name[prompt_column], {source_name[name]: name for name in kept}


def _check_query(query: Any, where: str, column: str) -> str | Messages:
    if not isinstance(query, (str, list)) or not query:
        raise ValueError(f"{where}: prompt column {column!r} must hold text or messages, got {query!r:.200}")
    if isinstance(query, str):
        contents = [query]
    else:
        for k, message in enumerate(query):
            if not isinstance(message, dict) or not all(isinstance(message.get(f), str) for f in ("role", "content")):
                needed = "must have text under 'role' and 'content'"
                raise ValueError(f"{where}: message {k} of prompt column {column!r} {needed}, got {message!r:.200}")
        contents = [message["content"] for message in query if message["role"] != "system"]
        if column == "messages" and query[-1]["role"] == "assistant":
            remedy = "drop it or set prompt_column (to have it continued, set column_map={'messages': 'prompt'})"
            raise ValueError(f"{where}: column 'messages' ends with an assistant message, the answer: {remedy}")
        # Where messages differ in optional fields, Arrow fills them with None, which templates take for present.
        query = [{field: value for field, value in message.items() if value is not None} for message in query]
    if not any(content.strip() for content in contents):
        raise ValueError(f"{where}: prompt column {column!r} is blank, {query!r:.200}: fill it or remove the row")
    return query


def _as_chat(query: str | Messages, system_prompt: str | None, chat: bool) -> str | Messages:
    if isinstance(query, str) and chat:
        query = [{"role": "user", "content": query}]
    if system_prompt is None:
        return query
    if isinstance(query, str):
        remedy = "set chat=True, or pass a tokenizer that has a chat template"
        raise ValueError(f"system_prompt={system_prompt!r:.80} has no place in plain-text prompts: {remedy}")
    return (
        query
        if any(message["role"] == "system" for message in query)
        else [{"role": "system", "content": system_prompt}, *query]
    )


def _short_enough(rows: list[dict], tokenizer, template_kwargs: Mapping[str, Any], limit: int | None) -> list[dict]:
    """The rows whose prompt has at most ``limit`` tokens; the first is encoded anyway, to try the template on it."""
    measured = rows[:1] if limit is None else rows
    lengths = [len(encode_prompt(tokenizer, row[keys.QUERY], **template_kwargs)) for row in measured]
    if limit is None:
        return rows
    if min(lengths) > limit:
        spread = f"the shortest has {min(lengths)} tokens, the longest {max(lengths)}"
        raise ValueError(f"all {len(rows)} prompts exceed max_prompt_length={limit}: {spread}. Raise it")
    return [row for row, length in zip(rows, lengths, strict=True) if length <= limit]


def _plain(value: Any, where: str = "") -> Any:
    """A copy made of plain Python values only: arrays, tensors and tuples become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(entry, where) for entry in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry, where) for key, entry in value.items()}
    if not isinstance(value, _PLAIN):
        odd = f"keys {list(value)!r:.80}" if isinstance(value, Mapping) else f"a value of type {type(value).__name__}"
        raise ValueError(f"{where} holds {odd}, not plain text-keyed data: convert it, or leave it out of `columns`")
    return value


def _canonical(value: Any) -> str:
    """Text that is equal for equal plain values, in every process."""
    return json.dumps(value, sort_keys=True, default=repr)


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and value > 0
