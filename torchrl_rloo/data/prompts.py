"""Prompt datasets: rows from the hub, a file or memory, checked once so that nothing downstream has to.

Local files have plain readers: unlike ``datasets.load_dataset`` these name the line of a fault, leave the text of a
``.csv`` as it is ("007" stays "007"), and write no cache.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import hashlib
import io
import json
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages, encode_prompt

PROMPT_COLUMNS = ("prompt", "query", "question", "problem", "messages", "instruction")

# What environment, policy and collector write: a dataset's column of that name would be overwritten or mistaken for it.
RESERVED_COLUMNS = frozenset(
    {key if isinstance(key, str) else key[0] for name, key in vars(keys).items() if name.isupper()}
    | {key[1] for key in (keys.REWARD, keys.DONE, keys.TERMINATED, keys.TRUNCATED)}
    | {"history", "text"}
)

_PLAIN = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)

_Located = Iterator[tuple[str, Any]]  # rows, each after the words that tell a user where it is


@dataclass(frozen=True)
class PromptCounts:
    """What became of the rows of a source.

    Attributes:
        read: rows read.
        too_long: rows dropped because their prompt exceeds ``max_prompt_length``.
        duplicates: kept rows whose prompt repeats that of an earlier kept row.
        kept: rows in the dataset.
    """

    read: int
    too_long: int
    duplicates: int
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
        kind, c = "conversational" if self.conversational else "text", self.counts
        fates = f"read={c.read}, too_long={c.too_long}, duplicates={c.duplicates}"
        return f"PromptDataset({c.kept} {kind} prompts, columns={self.columns}, {fates})"


def load_prompts(
    source: str | os.PathLike | Iterable[Mapping[str, Any]] | Mapping[str, Iterable[Mapping[str, Any]]],
    *,
    split: str | None = "train",
    name: str | None = None,
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
            a directory written by ``save_to_disk``; a ``datasets.Dataset`` or ``DatasetDict``; any iterable of mappings.
        split: which split of a hub dataset or ``DatasetDict``; ``None`` where there is only one.
        name: the configuration of a hub dataset.
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
    _check_positive("max_prompt_length", max_prompt_length)
    _check_positive("limit", limit)
    if tokenizer is None and max_prompt_length is not None:
        raise ValueError(f"max_prompt_length={max_prompt_length} needs the policy's tokenizer: pass it as tokenizer=")
    if chat is None:
        chat = bool(getattr(tokenizer, "chat_template", None))
    rows = _rows(islice(_read(source, split, name), limit), prompt_column, column_map or {}, columns)
    if not rows:
        raise ValueError(f"{_shown(source)} is empty: give at least one row")
    for row in rows:
        row[keys.QUERY] = _as_chat(row[keys.QUERY], system_prompt, chat)
    kept = rows if tokenizer is None else _short_enough(rows, tokenizer, template_kwargs or {}, max_prompt_length)
    dataset = PromptDataset(kept, too_long=len(rows) - len(kept))
    if 1 < len(dataset) == dataset.counts.duplicates + 1:
        raise ValueError(
            f"all {len(dataset)} prompts of {_shown(source)} are the same: {kept[0][keys.QUERY]!r:.200}. Check "
            "prompt_column, or give one such row alone"
        )
    return dataset


def split_prompts(dataset: PromptDataset, eval_size: int | float, seed: int) -> tuple[PromptDataset, PromptDataset]:
    """Divides a dataset into train and eval; rows with the same prompt stay together.

    Which prompts are held out depends on the prompts and the seed, not on the order of the rows, which both parts keep.

    Args:
        dataset: has at least two distinct prompts.
        eval_size: how many distinct prompts to hold out (int), or what fraction of them (float).
        seed: another seed, another division.

    Returns:
        ``(train, eval)``.

    Raises:
        ValueError: if either part would have no prompt.
    """
    prompts = [_canonical(row[keys.QUERY]) for row in dataset.rows]
    distinct = sorted(set(prompts), key=lambda prompt: hashlib.sha256(f"{seed}\n{prompt}".encode()).digest())
    held_out = eval_size
    if isinstance(eval_size, float) and 0 < eval_size < 1:
        held_out = round(eval_size * len(distinct))
    elif isinstance(eval_size, bool) or not isinstance(eval_size, Integral) or eval_size < 1:
        raise ValueError(f"eval_size must be a positive integer or a fraction between 0 and 1, got {eval_size!r}")
    if not 0 < held_out < len(distinct):
        part, remedy = ("eval", "raise") if held_out == 0 else ("train", "lower")
        total = f"{len(distinct)} distinct prompts"
        raise ValueError(f"eval_size={eval_size} of {total} leaves no {part} prompt: {remedy} it or add prompts")
    chosen = set(distinct[:held_out])
    train = dataset.select(i for i, prompt in enumerate(prompts) if prompt not in chosen)
    return train, dataset.select(i for i, prompt in enumerate(prompts) if prompt in chosen)


# Sources: where rows come from.


def _read(source: Any, split: str | None, name: str | None) -> _Located:
    shown, rows = _shown(source), source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if path.is_dir():
            rows = _load_directory(path)
        elif not path.is_file():
            rows, split, name = _load_from_hub(os.fspath(source), path, split, name), None, None
    if name is not None:
        raise ValueError(f"name={name!r} chooses a configuration of a hub dataset, which {shown} is not: leave it out")
    if isinstance(rows, Mapping):
        if split is None and len(rows) == 1:
            (split,) = rows
        if split not in rows:
            raise ValueError(f"split={split!r} is not in {shown}: set split to one of {list(rows)}")
        rows = rows[split]
    elif split not in (None, "train"):
        raise ValueError(f"split={split!r} of {shown}, which has no splits: leave split out, or give that split itself")
    if isinstance(rows, (str, os.PathLike)):
        return _read_file(path)
    if not isinstance(rows, Iterable):
        raise TypeError(f"source must be a path, a hub id, a datasets.Dataset or an iterable of mappings, got {shown}")
    return ((f"row {i}", row) for i, row in enumerate(rows))


def _load_directory(path: Path) -> Any:
    import datasets  # slow to import, and not needed for files and iterables

    try:
        return datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        message = f"source {str(path)!r} is a directory that no save_to_disk wrote: give a file in it ({_SUFFIXES})"
        raise FileNotFoundError(message) from error


def _load_from_hub(source: str, path: Path, split: str | None, name: str | None) -> Any:
    message = f"source {source!r} is neither a local file or directory (no {str(path.absolute())!r}) nor "
    if source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix.lower() in _READERS:
        raise FileNotFoundError(message + "a hub id: correct the path")  # clearly a path, so no use asking the hub
    import datasets

    try:
        return datasets.load_dataset(source, name, split=split)
    except OSError as error:
        raise FileNotFoundError(message + f"a hub id that can be reached: {error}") from error
    except ValueError as error:  # an unknown split or configuration
        raise ValueError(f"hub dataset {source!r} has no split={split!r} with name={name!r}: {error}") from error


def _read_file(path: Path) -> _Located:
    if (suffix := path.suffix.lower()) not in _READERS:
        raise ValueError(
            f"source {str(path)!r} has the unsupported suffix {suffix!r}: convert it to one of {_SUFFIXES}"
        )
    with path.open("rb") as file:
        try:
            yield from ((f"{path}, {place}", row) for place, row in _READERS[suffix](file))
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}: malformed {suffix} file: {error}") from error


def _read_json_lines(lines: Iterable[bytes]) -> _Located:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:  # an error's own line number would count from this line
                raise ValueError(f"line {number} is not one JSON object ({getattr(error, 'msg', error)})") from error
            yield f"line {number}", row


def _read_json(file: io.BufferedIOBase) -> _Located:
    content = file.read()
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):  # a byte order mark may come first
        return ((f"row {i}", row) for i, row in enumerate(json.loads(content)))
    return _read_json_lines(content.splitlines())


def _read_csv(file: io.BufferedIOBase) -> _Located:
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    for row in reader:
        if None in row or None in row.values():  # what DictReader puts in for surplus and for lack
            raise ValueError(f"line {reader.line_num} has more or fewer values than the header's {reader.fieldnames}")
        yield f"line {reader.line_num}", row


def _read_parquet(file: io.BufferedIOBase) -> _Located:
    from pyarrow.parquet import ParquetFile  # comes with datasets

    rows = (row for batch in ParquetFile(file).iter_batches() for row in batch.to_pylist())
    return ((f"row {i}", row) for i, row in enumerate(rows))


_READERS: dict[str, Callable[[Any], _Located]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
_SUFFIXES = ", ".join(_READERS)


# Rows: what each must be.


def _rows(
    located: _Located, prompt_column: str | None, column_map: Mapping[str, str], columns: Sequence[str] | None
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
        query = _check_query(_plain_column(where, prompt, row[prompt]), where, column_map.get(prompt, prompt))
        if rows and type(query) is not type(rows[0][keys.QUERY]):
            kinds = f"{_KINDS[type(query)]}, that of {first} is {_KINDS[type(rows[0][keys.QUERY])]}"
            raise ValueError(f"the prompt of {where} is {kinds}: make all prompts of a dataset of one kind")
        rows.append(
            {keys.QUERY: query} | {ours: _plain_column(where, name, row[name]) for name, ours in others.items()}
        )
    return rows


_KINDS = {str: "plain text", list: "chat messages"}


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
            raise ValueError(
                f"prompt_column must be set: of the columns {ours}, any of {candidates} may be the prompt's"
            )
        prompt_column = candidates[0]
    if prompt_column not in ours:
        raise ValueError(f"prompt_column={prompt_column!r} is not among the columns {ours}")
    others = [name for name in ours if name != prompt_column]
    if isinstance(columns, str) or not set(columns or ()) <= set(others):
        raise ValueError(f"columns={columns!r} must be a list of names among the columns besides the prompt, {others}")
    kept = others if columns is None else list(columns)
    if clash := [name for name in kept if name in RESERVED_COLUMNS]:
        renamed = {source_name[name]: f"dataset_{name}" for name in clash}
        raise ValueError(
            f"columns {clash} have names that rows use for something else: rename them, e.g. column_map={renamed}, or "
            "leave them out of `columns`"
        )
    return source_name[prompt_column], {source_name[name]: name for name in kept}


def _check_query(query: Any, where: str, column: str) -> str | Messages:
    if not isinstance(query, (str, list)) or not query:
        raise ValueError(f"{where}: prompt column {column!r} must hold text or messages, got {query!r:.200}")
    if isinstance(query, str):
        contents = [query]
    else:
        for k, message in enumerate(query):
            if not isinstance(message, dict) or not all(isinstance(message.get(f), str) for f in ("role", "content")):
                needed = "must be a mapping with text under 'role' and 'content'"
                raise ValueError(f"{where}: message {k} of prompt column {column!r} {needed}, got {message!r:.200}")
        contents = [message["content"] for message in query if message["role"] != "system"]
        if column == "messages" and query[-1]["role"] == "assistant":
            raise ValueError(
                f"{where}: the last of the column 'messages' is the assistant's, which is an answer, not a prompt: drop "
                "it, or set prompt_column; for the policy to continue it, set column_map={'messages': 'prompt'}"
            )
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
        raise ValueError(
            f"system_prompt={system_prompt!r:.80} needs chat messages, and prompts are plain text: {remedy}"
        )
    has_system = any(message["role"] == "system" for message in query)
    return query if has_system else [{"role": "system", "content": system_prompt}, *query]


def _short_enough(rows: list[dict], tokenizer, template_kwargs: Mapping[str, Any], limit: int | None) -> list[dict]:
    """The rows whose prompt has at most ``limit`` tokens; the first is encoded anyway, to try the template on it."""
    measured = rows[:1] if limit is None else rows
    lengths = [len(encode_prompt(tokenizer, row[keys.QUERY], **template_kwargs)) for row in measured]
    if limit is None:
        return rows
    if min(lengths) > limit:
        spread = f"the shortest has {min(lengths)} tokens, the longest {max(lengths)}"
        raise ValueError(f"all {len(rows)} prompts exceed max_prompt_length={limit}: {spread}. Raise max_prompt_length")
    return [row for row, length in zip(rows, lengths, strict=True) if length <= limit]


def _plain_column(where: str, column: str, value: Any) -> Any:
    try:
        return _plain(value)
    except TypeError as error:
        raise ValueError(
            f"{where}: column {column!r} holds {error}: convert it, or leave it out of `columns`"
        ) from error


def _plain(value: Any) -> Any:
    """A copy made of plain Python values only: arrays, tensors and tuples become lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"a mapping with keys that are not text, {list(value)!r:.100}")
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if not isinstance(value, _PLAIN):
        raise TypeError(f"a {type(value).__name__}, which is not a plain Python value")
    return value


def _canonical(value: Any) -> str:
    """Text that is equal for equal plain values, in every process."""
    return json.dumps(value, sort_keys=True, default=repr)


def _check_positive(argument: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
        raise ValueError(f"{argument} must be a positive integer, got {value!r}")


def _shown(source: Any) -> str:
    return f"source {os.fspath(source)!r}" if isinstance(source, (str, os.PathLike)) else f"a {type(source).__name__}"
