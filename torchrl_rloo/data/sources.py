"""Sources of rows: the hub, a file, or memory.

The readers of local files name the line of a fault, keep the text of a ``.csv`` ("007" stays "007") and write no
cache, unlike ``datasets.load_dataset``.
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

Located = Iterator[tuple[str, Any]]  # (location for error messages, row)


def read_source(source: Any, split: str | None, name: str | None) -> Located:
    """Read the rows of a source with their locations for error messages.

    Args:
        source: see :func:`~torchrl_rloo.data.load_prompts`.
        split: split of a hub dataset or of a mapping of splits.
        name: configuration of a hub dataset.

    Returns:
        An iterator of ``(location, row)``.

    Raises:
        FileNotFoundError: if the file or dataset does not exist.
        TypeError: if the source is neither a path nor iterable.
        ValueError: if ``split`` or ``name`` does not fit the source, or if a file is malformed.
    """
    described, rows = describe_source(source), source
    # Resolve a path or hub id
    if isinstance(source, (str, os.PathLike)):
        path = Path(source).expanduser()
        if path.is_dir():
            rows = _load_directory(path)
        elif not path.is_file():
            rows, split, name = _load_from_hub(os.fspath(source), path, split, name), None, None
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
    if isinstance(rows, (str, os.PathLike)):
        return _read_file(path)
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"source must be a path, a hub id, a datasets.Dataset or an iterable of mappings, got {described}"
        )
    return ((f"row {i}", row) for i, row in enumerate(rows))


def _load_directory(path: Path) -> Any:
    import datasets  # slow to import and not needed for files and iterables

    try:
        return datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        message = f"source={str(path)!r} is a directory but not from save_to_disk; give a {_SUFFIXES} file in it"
        raise FileNotFoundError(message) from error


def _load_from_hub(source: str, path: Path, split: str | None, name: str | None) -> Any:
    check_path("source", source)  # before the slow request to the hub
    import datasets

    try:
        return datasets.load_dataset(source, name, split=split)
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
            except ValueError as error:  # drop the error's line number, which counts from this line
                raise ValueError(f"line {number} must be one JSON object ({getattr(error, 'msg', error)})") from error


def _read_json(file: io.BufferedIOBase) -> Located:
    content = file.read()
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):  # a byte order mark may come first
        return ((f"row {i}", row) for i, row in enumerate(json.loads(content)))
    return _read_json_lines(content.splitlines())


def _read_csv(file: io.BufferedIOBase) -> Located:
    reader = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    for row in reader:
        if None in row or None in row.values():  # DictReader marks surplus and missing values with None
            raise ValueError(f"line {reader.line_num} must have one value for each of the columns {reader.fieldnames}")
        yield f"line {reader.line_num}", row


def _read_parquet(file: io.BufferedIOBase) -> Located:
    from pyarrow.parquet import ParquetFile  # comes with datasets

    rows = (row for batch in ParquetFile(file).iter_batches() for row in batch.to_pylist())
    return ((f"row {i}", row) for i, row in enumerate(rows))


_READERS = dict(zip(DATA_SUFFIXES, (_read_json_lines, _read_json, _read_parquet, _read_csv), strict=True))
_SUFFIXES = " or ".join(_READERS)


def describe_source(source: Any) -> str:
    """Describe a source in an error message."""
    return (
        f"source={os.fspath(source)!r}"
        if isinstance(source, (str, os.PathLike))
        else f"source of type {type(source).__name__}"
    )
