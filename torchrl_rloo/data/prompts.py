"""Prompt datasets: rows from any source, checked once so that nothing downstream has to."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from numbers import Integral
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.sources import Located, read_source, shown
from torchrl_rloo.data.templates import Messages, encode_prompts
from torchrl_rloo.lookup import import_object

PROMPT_COLUMNS = ("prompt", "query", "question", "problem", "messages", "instruction")

_PLAIN = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)


@dataclass(frozen=True)
class PromptCounts:
    """Counts of a source's rows: read, dropped and kept."""

    read: int
    too_long: int  # dropped, for a prompt longer than max_prompt_length
    duplicates: int  # kept, though their prompt repeats that of an earlier kept row
    kept: int


class PromptDataset(Sequence):
    """An immutable sequence of prompts, at least one, each with the dataset's other columns.

    :func:`load_prompts` makes one and checks its rows.

    Args:
        rows: ``{"query": messages or text, **columns}`` of plain Python values.
        too_long: rows dropped before, for :attr:`counts`.
        chat: whether :meth:`for_tokenizer` makes text prompts a user message; None: if there is a chat template.

    Attributes:
        rows: the rows; do not change them. ``dataset[i]`` returns a copy.
        counts: rows read, dropped and kept.
        chat: the argument.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], *, too_long: int = 0, chat: bool | None = None):
        self.rows, self.chat = list(rows), chat
        self._encoded: tuple[Any, str, list[list[int]]] | None = None  # tokenizer, its settings, ids of each prompt
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
        """Return the rows at ``indices``, in that order, as a dataset with counts of its own."""
        indices = [operator.index(i) for i in indices]
        part = PromptDataset((self.rows[i] for i in indices), chat=self.chat)
        if self._encoded is not None:
            tokenizer, settings, ids = self._encoded
            part._encoded = tokenizer, settings, [ids[i] for i in indices]
        return part

    def for_tokenizer(self, tokenizer) -> PromptDataset:
        """Return the prompts as a policy with this tokenizer reads them.

        Text prompts become one user message if the tokenizer has a chat template, unless ``chat`` says otherwise. The
        log says once which of the two happened.
        """
        if self.conversational or self.chat is False:
            return self
        if self.chat is None:
            has_template = bool(getattr(tokenizer, "chat_template", None))
            notify_once(_CHAT_NOTICE if has_template else _TEXT_NOTICE)
            if not has_template:
                return self
        rows = [row | {keys.QUERY: _as_chat(row[keys.QUERY])} for row in self.rows]
        return PromptDataset(rows, too_long=self.counts.too_long)

    def encode(self, tokenizer, **template_kwargs: Any) -> list[list[int]]:
        """Return the ids of every prompt, ``[P_i]`` each, encoded in one batch and kept for the next call.

        Args:
            tokenizer: a Hugging Face tokenizer.
            **template_kwargs: passed to the chat template.
        """
        if (ids := self.encoded(tokenizer, **template_kwargs)) is None:
            ids = encode_prompts(tokenizer, [row[keys.QUERY] for row in self.rows], **template_kwargs)
            self._encoded = tokenizer, _settings(tokenizer, template_kwargs), ids
        return ids

    def encoded(self, tokenizer, **template_kwargs: Any) -> list[list[int]] | None:
        """Return what :meth:`encode` kept for these arguments, or None."""
        if self._encoded is None or self._encoded[0] is not tokenizer:
            return None
        return self._encoded[2] if self._encoded[1] == _settings(tokenizer, template_kwargs) else None

    def __str__(self) -> str:
        """Say in words how many prompts there are and what became of the others."""
        counts, kind = self.counts, "chat" if self.conversational else "text"
        notes = [
            f"{number:,} {what}"
            for number, what in ((counts.too_long, "too long and dropped"), (counts.duplicates, "repeated"))
            if number
        ]
        columns = f" with {', '.join(self.columns)}" if self.columns else ""
        return f"{len(self):,} {kind} prompts{columns}" + (f" ({', '.join(notes)})" if notes else "")

    def __repr__(self) -> str:
        kind = "conversational" if self.conversational else "text"
        return f"PromptDataset({len(self)} {kind} prompts, columns={self.columns}, {self.counts})"


_CHAT_NOTICE = "text prompts become user messages, since the tokenizer has a chat template (chat=False keeps them text)"
_TEXT_NOTICE = "text prompts stay plain text, since the tokenizer has no chat template (set one to train on messages)"


def _settings(tokenizer, template_kwargs: Mapping[str, Any]) -> str:
    """Text that is equal where the same tokenizer encodes prompts equally."""
    return _canonical([getattr(tokenizer, "chat_template", None), len(tokenizer), dict(template_kwargs)])


def load_prompts(
    source: str | os.PathLike | Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    split: str | None = "train",
    name: str | None = None,
    row_map: Callable[[Mapping[str, Any]], Mapping[str, Any]] | str | None = None,
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
    """Read prompts and check every row.

    >>> load_prompts([{"question": "2+2?", "answer": 4}], chat=True)[0]
    {'query': [{'role': 'user', 'content': '2+2?'}], 'answer': 4}

    Args:
        source: a hub id; a ``.jsonl``, ``.json``, ``.parquet`` or ``.csv`` file (the values of a ``.csv`` stay text);
            a directory from ``save_to_disk``; a ``datasets.Dataset`` or ``DatasetDict``; any iterable of mappings.
        split: which split of a hub dataset or ``DatasetDict``; ``None`` where there is only one.
        name: the configuration of a hub dataset.
        row_map: makes a row out of one of the source's, to take an answer out of a text, say; or its dotted path.
        prompt_column: the column of prompts, as named after ``column_map``: text, or lists of messages. Default: the
            one of ``PROMPT_COLUMNS`` that is there.
        column_map: new names for columns, ``{name in the source: name in the rows}``.
        columns: the other columns to keep, as named after ``column_map``. Default: all.
        system_prompt: put before conversational prompts that have no system message. Makes plain-text prompts
            conversational.
        chat: whether plain-text prompts become a user message. Default: if the policy's tokenizer has a chat template,
            which is decided as soon as it is known, here or in
            :class:`~torchrl_rloo.envs.DatasetChatEnv` (:meth:`PromptDataset.for_tokenizer`).
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
    if system_prompt is not None and chat is None:
        chat = tokenizer is None or bool(getattr(tokenizer, "chat_template", None))
    if isinstance(row_map, str):
        row_map = import_object(row_map, "row_map")
    if row_map is not None and not callable(row_map):
        raise TypeError(f"row_map={row_map!r:.100} must be a function of a row, or its dotted path")
    located = islice(read_source(source, split, name), limit)
    located = located if row_map is None else _mapped(located, row_map)
    rows = _rows(located, prompt_column, column_map or {}, columns)
    if not rows:
        raise ValueError(f"{shown(source)} is empty: give at least one row")
    if chat is False and not isinstance(rows[0][keys.QUERY], str):
        raise ValueError(f"chat=False keeps text prompts text, but those of {shown(source)} are messages: leave it out")
    for row in rows if chat or system_prompt is not None else ():
        row[keys.QUERY] = _as_chat(row[keys.QUERY], system_prompt, bool(chat))
    dataset = PromptDataset(rows, chat=chat)
    if tokenizer is not None:
        dataset = _short_enough(dataset.for_tokenizer(tokenizer), tokenizer, template_kwargs or {}, max_prompt_length)
    if 1 < len(dataset) == dataset.counts.duplicates + 1:
        same = f"all {len(dataset)} prompts of {shown(source)} are the same, {dataset.rows[0][keys.QUERY]!r:.200}"
        raise ValueError(f"{same}: check prompt_column, or give that row once")
    return dataset


def longest_prompt(tokenizer, datasets: Iterable[PromptDataset], **template_kwargs: Any) -> int:
    """Return the length in tokens of the longest prompt; the datasets keep the ids for the environment."""
    return max(len(ids) for dataset in datasets for ids in dataset.encode(tokenizer, **template_kwargs))


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


def _as_chat(query: str | Messages, system_prompt: str | None = None, chat: bool = True) -> str | Messages:
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


def _short_enough(
    dataset: PromptDataset, tokenizer, template_kwargs: Mapping[str, Any], limit: int | None
) -> PromptDataset:
    """Return the prompts of at most ``limit`` tokens; without a limit, try the template on the first alone."""
    if limit is None:
        encode_prompts(tokenizer, [dataset.rows[0][keys.QUERY]], **template_kwargs)
        return dataset
    lengths = [len(ids) for ids in dataset.encode(tokenizer, **template_kwargs)]
    if min(lengths) > limit:
        spread = f"the shortest has {min(lengths)} tokens, the longest {max(lengths)}"
        raise ValueError(f"all {len(dataset)} prompts exceed max_prompt_length={limit}: {spread}. Raise it")
    kept = dataset.select(i for i, length in enumerate(lengths) if length <= limit)
    kept.counts = replace(kept.counts, read=len(dataset), too_long=len(dataset) - len(kept))
    return kept


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
