"""Sources of rows: the hub, a file, or memory; and their values as plain Python values that every later part can save.

The readers of local files name the line of a fault, keep the text of a ``.csv`` ("007" stays "007") and write no
cache, unlike ``datasets.load_dataset``. Text is UTF-8. Two values of one name in an object, or two columns of one name,
are refused. Files are read row by row, but ``.json`` as a whole.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_rloo.images.parts import image_paths
from torchrl_rloo.runtime.lookup import DATA_SUFFIXES, check_path

Located = Iterator[tuple[str, Any]]  # (location for error messages, row)


def read_source(source: Any, split: str | None, name: str | None, streaming: bool = False) -> Located:
    """Read the rows of a source with their locations for error messages; ``streaming`` downloads no hub dataset."""
    described, rows, path = describe_source(source), source, None
    # Resolve a path or hub id
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.path.expanduser(source))
        if os.path.isdir(path):
            rows = _load_directory(path)
        elif not os.path.isfile(path):
            rows, split, name, path = _load_from_hub(os.fspath(source), path, split, name, streaming), None, None, None
    if name is not None:
        raise ValueError(f"name={name!r} requires a hub dataset, got {described}; remove name")

    # Choose the split
    if isinstance(rows, Mapping):
        split = next(iter(rows)) if split is None and len(rows) == 1 else split
        if split not in rows:
            raise ValueError(f"split={split!r} of {described} must be one of {list(rows)}")
        rows = rows[split]
    elif split not in (None, "train"):
        raise ValueError(f"split={split!r} requires a source with splits, got {described}; remove split")
    if rows is source and path is not None:
        return _read_file(path)
    if not isinstance(rows, Iterable) or isinstance(rows, (str, bytes)):
        raise TypeError(
            f"source must be a path, a hub id, a datasets.Dataset or an iterable of mappings, got {described}"
        )
    located = ((f"row {i}", row) for i, row in enumerate(_undecoded(rows)))
    return located if path is None else _readable(path, located)


def _undecoded(rows: Iterable[Any]) -> Iterable[Any]:
    """Return the rows of a dataset with images as the bytes or paths of their files, not decoded."""
    if not _has_images(getattr(rows, "features", None) or {}):
        return rows
    if hasattr(rows, "decode"):  # a streamed dataset
        return rows.decode(False)
    return (row for table in rows.with_format("arrow").iter(_ROWS_AT_ONCE) for row in table.to_pylist())


def _has_images(feature: Any) -> bool:
    """Return whether a feature of a dataset is or contains an image."""
    if isinstance(feature, Mapping):
        return any(map(_has_images, feature.values()))
    return type(feature).__name__ == "Image" or _has_images(getattr(feature, "feature", None) or {})


def source_folder(source: Any) -> Path | None:
    """Return the folder of a local source, which relative paths in its rows start from; None for other sources."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    path = Path(os.path.expanduser(source))
    return path if path.is_dir() else path.parent if path.is_file() else None


def _load_directory(path: Path) -> Any:
    import datasets  # slow to import and not needed for files and iterables

    try:
        return datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        message = f"source={str(path)!r} is a directory but not from save_to_disk; give a {_SUFFIXES} file in it"
        raise FileNotFoundError(message) from error
    except Exception as error:
        raise ValueError(f"source={str(path)!r} is damaged: {_one_line(error)}; save it again") from error


def _load_from_hub(source: str, path: Path, split: str | None, name: str | None, streaming: bool) -> Any:
    check_path("source", source)  # before the slow request to the hub
    import datasets

    try:
        return datasets.load_dataset(source, name, split=split, streaming=streaming)
    except OSError as error:
        raise FileNotFoundError(
            f"source={source!r} is neither a local file or directory (no {str(path.absolute())!r}) nor a reachable hub "
            f"id: {error}"
        ) from error
    except ValueError as error:  # an unknown split or configuration
        raise ValueError(f"hub dataset {source!r} has no split={split!r} with name={name!r}: {error}") from error


def _read_file(path: Path) -> Located:
    if (suffix := path.suffix.lower()) not in _READERS:
        raise ValueError(f"source={str(path)!r} has unknown suffix {suffix!r}; convert it to {_SUFFIXES}")
    yield from _readable(path, _open_rows(path, suffix))


def _open_rows(path: Path, suffix: str) -> Located:
    with path.open("rb") as file:
        yield from ((f"{path}, {place}", row) for place, row in _READERS[suffix](file))


def _readable(path: Path, located: Located) -> Located:
    """Yield rows, and name the file or directory in the error of one that cannot be read."""
    try:
        yield from located
    except (ValueError, RecursionError, OSError, csv.Error) as error:
        kind = f"malformed {path.suffix.lower()} file" if path.suffix else "malformed directory"
        raise ValueError(f"{path}: {kind}: {_one_line(error)}; correct or remove it") from error


def _one_line(error: Exception) -> str:
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())[:500]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        _require_distinct([name for name, _ in pairs])
    return values


def _require_distinct(names: Sequence[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"names {repeated} occur more than once; rename or remove them")


_JSON = json.JSONDecoder(object_pairs_hook=_unique)


def _read_json_lines(lines: Iterable[bytes]) -> Located:
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig")
            if not text or text.isspace():
                continue
            row = _JSON.decode(text)
        except (ValueError, RecursionError) as error:  # drop the error's line number, which counts from this line
            raise ValueError(f"line {number} must be one JSON object ({getattr(error, 'msg', error)})") from error
        yield f"line {number}", row


def _read_json(file: io.BufferedIOBase) -> Located:
    content = file.read()
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):  # a byte order mark may come first
        yield from _read_json_array(content.decode("utf-8-sig"))
    else:
        yield from _read_json_lines(content.splitlines())


def _read_json_array(text: str) -> Located:
    """Read the rows one by one, to name the row of a fault."""
    place, number = _skip(text, text.index("[") + 1), 0
    while number or text[place : place + 1] != "]":
        try:
            row, place = _JSON.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"row {number}: {error}") from error
        yield f"row {number}", row
        place, number = _skip(text, place), number + 1
        if text[place : place + 1] != ",":
            break
        place = _skip(text, place + 1)
    # Require the end of the array, and of the file
    if text[place : place + 1] != "]":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
    if (end := _skip(text, place + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _skip(text: str, place: int) -> int:
    return _SPACE.match(text, place).end()


_SPACE = re.compile(r"[ \t\r\n]*")


def _read_csv(file: io.BufferedIOBase) -> Located:
    reader = csv.DictReader(_decode_lines(file), strict=True)
    _require_distinct(reader.fieldnames or [])
    try:
        for row in reader:
            if None in row or None in row.values():  # DictReader marks surplus and missing values with None
                raise ValueError(
                    f"line {reader.line_num} must have one value for each of the columns {reader.fieldnames}"
                )
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def _decode_lines(file: io.BufferedIOBase) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error


_ROWS_AT_ONCE = 256  # of rows that may hold images


def _read_parquet(file: io.BufferedIOBase) -> Located:
    from pyarrow.parquet import ParquetFile  # comes with datasets

    table = ParquetFile(file)
    _require_distinct(table.schema_arrow.names)
    size = _ROWS_AT_ONCE if "binary" in str(table.schema_arrow) else 65_536
    rows = (row for batch in table.iter_batches(size) for row in batch.to_pylist())
    yield from ((f"row {i}", row) for i, row in enumerate(rows))


_READERS = dict(zip(DATA_SUFFIXES, (_read_json_lines, _read_json, _read_parquet, _read_csv), strict=True))
_SUFFIXES = " or ".join(_READERS)


def describe_source(source: Any) -> str:
    """Describe a source in an error message."""
    return (
        f"source={os.fspath(source)!r}"
        if isinstance(source, (str, os.PathLike))
        else f"source of type {type(source).__name__}"
    )


MAX_DEPTH = 64  # nested lists and mappings in a column
MAX_DIGITS = 4000  # of an integer: Python refuses to print or parse longer ones

_SCALARS = (str, bytes, bool, int, float, type(None), decimal.Decimal, datetime.date, datetime.time, datetime.timedelta)
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_MAX_INTEGER = 10**MAX_DIGITS


class PlainRow(Mapping):
    """View of a source row that converts a column with :func:`plain_value` when it is read.

    Columns that are never read may hold anything.
    """

    def __init__(self, row: Mapping[str, Any]):
        self._row = row

    def __getitem__(self, name: str) -> Any:
        return plain_value(self._row[name], f"column {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def plain_value(value: Any, where: str = "a value", depth: int = MAX_DEPTH) -> Any:
    """Copy a value as plain Python values: arrays, tensors and tuples become lists."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        value = value.tolist()
    if isinstance(value, (list, tuple, Mapping)):
        if depth == 0:
            raise ValueError(f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it or set columns")
        if isinstance(value, Mapping):
            return {_key(key, where): plain_value(entry, where, depth - 1) for key, entry in value.items()}
        return [plain_value(entry, where, depth - 1) for entry in value]
    if isinstance(value, str):
        return _text(value, where)
    if not isinstance(value, _SCALARS):
        kind = type(value).__name__
        raise ValueError(
            f"{where} has a value of type {kind}, but requires plain values with text keys; convert it or set columns"
        )
    if isinstance(value, int) and not -_MAX_INTEGER < value < _MAX_INTEGER:
        raise ValueError(f"{where} has an integer of more than {MAX_DIGITS} digits; store it as text or set columns")
    return value


def check_query(query: Any, where: str, column: str) -> str | list[dict[str, Any]]:
    """Return a prompt, text or messages, without message fields that are None.

    The content of a message is text, or a list of text and image parts. Without images in the messages it becomes text.
    """
    if not isinstance(query, (str, list)) or not query:
        raise ValueError(f"{where}: prompt column {column!r} must contain text or messages, got {query!r:.200}")
    if isinstance(query, str):
        contents = [query]
    else:
        parts = False
        for k, message in enumerate(query):
            place = f"{where}: message {k} of prompt column {column!r}"
            if not isinstance(message, dict) or not all(isinstance(message.get(f), str) for f in ("role", "content")):
                _check_parts(message, place)
                parts = True
            if not _ROLE.fullmatch(message["role"]):  # a template writes the role outside of the content
                raise ValueError(f"{place} has role {message['role']!r:.80}, which must be one word; correct it")
        if parts and not image_paths(query):
            texts = ["".join(p["text"] for p in c) if isinstance(c := m["content"], list) else c for m in query]
            query = [{**message, "content": text} for message, text in zip(query, texts, strict=True)]
        contents = [message["content"] for message in query if message["role"] != "system"]
        if column == "messages" and query[-1]["role"] == "assistant":
            remedy = "drop it or set prompt_column; use column_map={'messages': 'prompt'} to let the policy continue it"
            raise ValueError(f"{where}: column 'messages' must not end with an assistant message; {remedy}")
        # Drop None: Arrow adds it for optional fields that a message lacks, and templates take it for a value
        query = [{field: value for field, value in message.items() if value is not None} for message in query]
    if not any(isinstance(content, list) or content.strip() for content in contents):
        raise ValueError(f"{where}: prompt column {column!r} must not be blank, got {query!r:.200}; remove the row")
    return query


def _check_parts(message: Any, place: str) -> None:
    """Raise ``ValueError`` unless the content of a message is a list of text, and of images in a store."""
    content = message.get("content") if isinstance(message, dict) and isinstance(message.get("role"), str) else None
    if not isinstance(content, list) or not content:
        raise ValueError(f"{place} must have text as 'role' and 'content', got {message!r:.200}")
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _PART_FIELDS or not isinstance(part.get(_PART_FIELDS[kind]), str):
            forms = "{'type': 'text', 'text': ...} or {'type': 'image', 'image': ...}"
            raise ValueError(f"{place}: part {k} of its content must be {forms}, got {part!r:.200}")


_PART_FIELDS = {"text": "text", "image": "url"}  # what a part of each type must have


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{where} has a key {key!r:.80}, but requires plain values with text keys; convert it")
    return _text(key, where)


def _text(value: str, where: str) -> str:
    """Return text that UTF-8 can encode: no tokenizer takes lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        surrogate = f"{ascii(value[error.start])} at character {error.start}"
        raise ValueError(f"{where} has invalid Unicode, a lone surrogate {surrogate}; repair or remove it") from None
    return str(value)
