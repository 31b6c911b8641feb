"""Where rows come from: the hub, a file, or memory.

Local files have plain readers: unlike ``datasets.load_dataset`` these name the line of a fault, leave the text of a
``.csv`` as it is ("007" stays "007"), and write no cache.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchrl_rloo.lookup import DATA_SUFFIXES, check_path

Located = Iterator[tuple[str, Any]]  # rows, each after the words that tell a user where it is


def read_source(source: Any, split: str | None, name: str | None) -> Located:
    """The rows of a source, each after the words that tell a user where it is.

    Args:
        source: see :func:`~torchrl_rloo.data.load_prompts`.
        split: of a hub dataset or a mapping of splits.
        name: configuration of a hub dataset.

    Raises:
        FileNotFoundError: if there is no such file or dataset.
        TypeError: if the source is nothing to read rows from.
        ValueError: if ``split`` or ``name`` does not fit the source, or a file is malformed.
    """
    described, rows = shown(source), source
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if path.is_dir():
            rows = _load_directory(path)
        elif not path.is_file():
            rows, split, name = _load_from_hub(os.fspath(source), path, split, name), None, None
    if name is not None:
        raise ValueError(
            f"name={name!r} chooses a configuration of a hub dataset, which {described} is not: leave it out"
        )
    if isinstance(rows, Mapping):
        split = next(iter(rows)) if split is None and len(rows) == 1 else split
        if split not in rows:
            raise ValueError(f"split={split!r} is not in {described}: set split to one of {list(rows)}")
        rows = rows[split]
    elif split not in (None, "train"):
        raise ValueError(
            f"split={split!r} of {described}, which has no splits: leave split out, or give that split itself"
        )
    if isinstance(rows, (str, os.PathLike)):
        return _read_file(path)
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"source must be a path, a hub id, a datasets.Dataset or an iterable of mappings, got {described}"
        )
    return ((f"row {i}", row) for i, row in enumerate(rows))


def _load_directory(path: Path) -> Any:
    import datasets  # slow to import, and not needed for files and iterables

    try:
        return datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        message = f"source {str(path)!r} is a directory that no save_to_disk wrote: give a file in it, {_SUFFIXES}"
        raise FileNotFoundError(message) from error


def _load_from_hub(source: str, path: Path, split: str | None, name: str | None) -> Any:
    check_path("source", source)  # asking the hub would only take time
    import datasets

    try:
        return datasets.load_dataset(source, name, split=split)
    except OSError as error:
        raise FileNotFoundError(
            f"source={source!r} is neither a local file or directory (no {str(path.absolute())!r}) nor a hub id that "
            f"can be reached: {error}"
        ) from error
    except ValueError as error:  # an unknown split or configuration
        raise ValueError(f"hub dataset {source!r} cannot give split={split!r} with name={name!r}: {error}") from error


def _read_file(path: Path) -> Located:
    if (suffix := path.suffix.lower()) not in _READERS:
        raise ValueError(f"source {str(path)!r} has suffix {suffix!r}, which is unsupported: convert it to {_SUFFIXES}")
    with path.open("rb") as file:
        try:
            yield from ((f"{path}, {place}", row) for place, row in _READERS[suffix](file))
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}: malformed {suffix} file: {error}") from error


def _read_json_lines(lines: Iterable[bytes]) -> Located:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:  # an error's own line number would count from this line
                raise ValueError(f"line {number} is not one JSON object ({getattr(error, 'msg', error)})") from error


def _read_json(file: io.BufferedIOBase) -> Located:
    content = file.read()
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):  # a byte order mark may come first
        return ((f"row {i}", row) for i, row in enumerate(json.loads(content)))
    return _read_json_lines(content.splitlines())


def _read_csv(file: io.BufferedIOBase) -> Located:
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    for row in reader:
        if None in row or None in row.values():  # what DictReader puts in for surplus and for lack
            raise ValueError(f"line {reader.line_num} has more or fewer values than the header's {reader.fieldnames}")
        yield f"line {reader.line_num}", row


def _read_parquet(file: io.BufferedIOBase) -> Located:
    from pyarrow.parquet import ParquetFile  # comes with datasets

    rows = (row for batch in ParquetFile(file).iter_batches() for row in batch.to_pylist())
    return ((f"row {i}", row) for i, row in enumerate(rows))


_READERS = dict(zip(DATA_SUFFIXES, (_read_json_lines, _read_json, _read_parquet, _read_csv), strict=True))
_SUFFIXES = " or ".join(_READERS)


def shown(source: Any) -> str:
    return (
        f"source {os.fspath(source)!r}"
        if isinstance(source, (str, os.PathLike))
        else f"source of type {type(source).__name__}"
    )
