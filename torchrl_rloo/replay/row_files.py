"""Reader of finished rows in a folder, so that rollouts are made now and trained on later, or elsewhere.

A :class:`~torchrl_rloo.replay.row_writer.RolloutWriter` writes a manifest and one file per batch of whole groups
(:mod:`torchrl_rloo.replay.row_format`). A file's name has its time, its writer and a checksum of its header. Files
appear whole and never change. Any number of writers may add files while any number of readers read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from xxhash import xxh3_64_hexdigest

from torchrl_rloo.data.outcomes import group_rows
from torchrl_rloo.data.packed import unpack_rows
from torchrl_rloo.replay.row_format import decode_index, decode_rows, split_header
from torchrl_rloo.runtime.files import SAFE_FLAGS, regular_size

MANIFEST = "manifest.json"
SCHEMA = 1
_NAME = re.compile(r"(\d{20})-([0-9a-f]{8})-([0-9a-f]{16})\.safetensors")
_HEADER_GUESS = 1 << 16  # bytes that are read at first; a longer header takes a second read


class RolloutFileError(ValueError):
    """Error about a file of rollouts that is damaged or does not belong to its folder."""


class StoredGroup(NamedTuple):
    """Index entry of a group.

    Attributes:
        group_id: id of the group.
        rows: number of its rows.
        tokens: number of tokens of all samples.
        oldest: oldest policy version that sampled one of its tokens.
        newest: newest policy version that sampled one of its tokens.
        mean_reward: mean of its returns; None if all rows abstain.
    """

    group_id: int
    rows: int
    tokens: int
    oldest: int
    newest: int
    mean_reward: float | None


class RolloutFile(NamedTuple):
    """File of whole groups.

    Attributes:
        path: path of the file.
        number: time at which it was written, in nanoseconds since the epoch; it grows with each file of a writer.
        writer: id of its writer.
        groups: its groups, in order.
        columns: names of its top-level text entries.
        step: training step that its rows were sampled for; None if the writer was not told.
        notes: what the writer noted, such as the names of the reward functions.
    """

    path: Path
    number: int
    writer: str
    groups: tuple[StoredGroup, ...]
    columns: tuple[str, ...]
    step: int | None = None
    notes: Mapping[str, Any] = MappingProxyType({})


class RolloutFiles:
    """Reader of a folder of rollouts.

    Args:
        folder: folder of a :class:`RolloutWriter`.
        model: name of the model that the rows must be of; None accepts any.
        tokenizer: tokenizer that the rows must be of, or its :func:`vocabulary_hash`; None accepts any.

    Attributes:
        manifest: schema, model and tokenizer of the folder.

    Raises:
        ValueError: if the rows are of another model or tokenizer, or of a newer schema.
        FileNotFoundError: if the folder has no manifest.

    Example:
        ::

            files = RolloutFiles("rollouts", model="Qwen/Qwen3-0.6B", tokenizer=tokenizer)
            for group, rows in files.groups(oldest=3):
                print(group.group_id, group.mean_reward, rows["tokens", "full"])
    """

    def __init__(self, folder: str | os.PathLike, *, model: str | None = None, tokenizer: Any = None):
        self.folder = Path(folder)
        expected = {"model": model, "tokenizer": None if tokenizer is None else vocabulary_hash(tokenizer)}
        self.manifest = read_manifest(self.folder, **expected)
        self._indices: dict[str, RolloutFile] = {}

    def files(self) -> list[RolloutFile]:
        """Return the files that are there now, oldest first, with their indices.

        Raises:
            RolloutFileError: if a header is damaged, or a file belongs to another model or tokenizer.
        """
        found = sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))
        self._indices = {name: self._indices.get(name) or self._read_index(name) for name in found}
        return list(self._indices.values())

    def read(self, file: RolloutFile) -> dict[int, TensorDictBase]:
        """Return the rows of a file by group, in order.

        Raises:
            RolloutFileError: if the file is damaged.
        """
        with _named(file.path):
            groups = group_rows(unpack_rows(decode_rows(read_regular(file.path))))
            if [(group.group_id, group.rows) for group in file.groups] != [(g, len(r)) for g, r in groups.items()]:
                raise ValueError("its groups are not those of its index")
            return groups

    def groups(
        self, *, oldest: int | None = None, newest: int | None = None, step: int | None = None
    ) -> Iterator[tuple[StoredGroup, TensorDictBase]]:
        """Yield groups in the order in which they were stored, with one file in memory at a time.

        Groups that were stored again are yielded once. Files without a chosen group are not read.

        Args:
            oldest: smallest policy version of any token; None sets no limit.
            newest: largest policy version of any token; None sets no limit.
            step: training step that they were sampled for; None takes all.
        """
        seen: set[int] = set()
        for file in self.files():
            if step is not None and file.step != step:
                continue
            chosen = []
            for group in file.groups:
                in_range = (oldest is None or group.oldest >= oldest) and (newest is None or group.newest <= newest)
                if group.group_id not in seen and in_range:
                    chosen.append(group)
                seen.add(group.group_id)
            rows = self.read(file) if chosen else {}
            yield from ((group, rows.pop(group.group_id)) for group in chosen)

    def notes(self) -> Mapping[str, Any]:
        """Return what the writer of the first file noted; empty without files."""
        found = self.files()
        return found[0].notes if found else {}

    def statistics(self) -> dict[str, Any]:
        """Return numbers from the indices, without reading rows.

        Returns:
            ``files``, ``writers``, ``groups`` (distinct), ``repeated_groups``, ``rows``, ``tokens`` and ``bytes``;
            ``versions``, the number of groups by their oldest policy version; ``mean_reward``, the mean over groups.
        """
        files = self.files()
        groups = {group.group_id: group for file in reversed(files) for group in reversed(file.groups)}
        rewards = [group.mean_reward for group in groups.values() if group.mean_reward is not None]
        return {
            "files": len(files),
            "writers": len({file.writer for file in files}),
            "groups": len(groups),
            "repeated_groups": sum(len(file.groups) for file in files) - len(groups),
            "rows": sum(group.rows for group in groups.values()),
            "tokens": sum(group.tokens for group in groups.values()),
            "bytes": sum(file.path.stat().st_size for file in files),
            "versions": dict(sorted(Counter(group.oldest for group in groups.values()).items())),
            "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        }

    def _read_index(self, name: str) -> RolloutFile:
        number, writer, checksum = _NAME.fullmatch(name).groups()
        path = self.folder / name
        with _named(path):
            header = _read_header(path)
            if xxh3_64_hexdigest(header) != checksum:
                raise ValueError("its header does not match its name")
            index = decode_index(header)
            for part in ("model", "tokenizer"):
                if index[part] != self.manifest[part]:
                    raise ValueError(f"its {part}={index[part]!r:.80} differs from {self.manifest[part]!r:.80}")
            groups = tuple(StoredGroup(*group) for group in index["groups"])
            if not all(type(number) is int for group in groups for number in group[:5]):
                raise ValueError("the numbers of its index must be integers")
            step, notes = index.get("step"), index.get("notes", {})
            if not (step is None or type(step) is int) or not isinstance(notes, dict):
                raise ValueError("its step must be an integer, and its notes a mapping")
            return RolloutFile(path, int(number), writer, groups, tuple(map(str, index["columns"])), step, notes)


def read_manifest(folder: Path, *, model: str | None = None, tokenizer: str | None = None) -> dict[str, Any]:
    """Return the manifest of a folder of rollouts.

    Args:
        folder: the folder.
        model: expected name of the model; None accepts any.
        tokenizer: expected :func:`vocabulary_hash`; None accepts any.

    Raises:
        ValueError: if the manifest is damaged, or has another schema, model or tokenizer.
        FileNotFoundError: if there is none.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        found = {name: manifest[name] for name in ("schema", "model", "tokenizer")}
    except FileNotFoundError:
        raise FileNotFoundError(f"folder={os.fspath(folder)} has no {MANIFEST}; store rollouts there first") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}; restore it") from error
    for name, expected in {"schema": SCHEMA, "model": model, "tokenizer": tokenizer}.items():
        if expected is not None and found[name] != expected:
            remedy = "read it with the version that wrote it" if name == "schema" else "use another folder"
            raise ValueError(
                f"folder={os.fspath(folder)} has rollouts of {name}={found[name]!r}, not {expected!r}; {remedy}"
            )
    return found


def vocabulary_hash(tokenizer: Any) -> str:
    """Return the hex SHA-256 of a tokenizer's vocabulary: texts and ids. A hash is returned as it is.

    The chat template is left out, since rows consist of ids.

    Raises:
        ValueError: if a text is not a hash.
    """
    if isinstance(tokenizer, str):
        if not re.fullmatch("[0-9a-f]{64}", tokenizer):
            raise ValueError(f"tokenizer={tokenizer!r:.80} must be a tokenizer or its vocabulary_hash; load it first")
        return tokenizer
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


class _named:
    """Context that turns an error about content into one that names the file."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (ValueError, LookupError, TypeError, RuntimeError)):
            remedy = "copy it again, or remove it to go on without its groups"
            raise RolloutFileError(f"{self.path} cannot be read: {error}; {remedy}") from error


def _read_header(path: Path) -> bytes:
    with _open(path) as file:
        start = file.read(_HEADER_GUESS)
        missing = 8 + int.from_bytes(start[:8], "little") - len(start)
        if 0 < missing <= os.fstat(file.fileno()).st_size:
            start += file.read(missing)
        return split_header(start)


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; a link or a device is refused.

    Raises:
        OSError: if it cannot be read.
    """
    with _open(path) as file:
        return file.read()


def _open(path: Path):
    descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    try:
        regular_size(descriptor)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
