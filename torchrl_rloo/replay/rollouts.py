"""Writer and reader of finished rows in a folder, so that rollouts are made now and trained on later, or elsewhere.

A :class:`RolloutWriter` writes a manifest and one file per batch of whole groups
(:mod:`torchrl_rloo.replay.row_format`). A file's name has its time, its writer and a checksum of its header. Files
appear whole and never change. Any number of writers may add files while any number of readers read them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from xxhash import xxh3_64_hexdigest

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.outcomes import group_rows
from torchrl_rloo.data.packed import pack_rows, unpack_rows
from torchrl_rloo.data.rows import concatenate, tensor_rows
from torchrl_rloo.replay.row_format import decode_index, decode_rows, encode_rows, split_header
from torchrl_rloo.runtime.files import (
    SAFE_FLAGS,
    TEMPORARIES,
    atomic_write,
    make_folder,
    regular_size,
    write_text,
)

MANIFEST = "manifest.json"
SCHEMA = 1
_NAME = re.compile(r"(\d{20})-([0-9a-f]{8})-([0-9a-f]{16})\.safetensors")
_RUN_ID = "run_id"
_OLD_S = 3600.0  # age of a temporary file that no writer can still be writing
_HEADER_GUESS = 1 << 16  # bytes that are read at first; a longer header takes a second read


class RolloutFileError(ValueError):
    """Error about a file of rollouts that is damaged or does not belong to its folder."""


class StoredGroup(NamedTuple):
    """Index entry of a group."""

    group_id: int  # id of the group
    rows: int  # number of its rows
    tokens: int  # number of tokens of all samples
    oldest: int  # oldest policy version that sampled one of its tokens
    newest: int  # newest policy version that sampled one of its tokens
    mean_reward: float | None  # mean of its returns; None if all rows abstain


class RolloutFile(NamedTuple):
    """File of whole groups."""

    path: Path  # path of the file
    number: int  # time at which it was written, in nanoseconds since the epoch; it grows with each file of a writer
    writer: str  # id of its writer
    groups: tuple[StoredGroup, ...]  # its groups, in order
    step: int | None = None  # training step that its rows were sampled for; None if the writer was not told
    notes: Mapping[str, Any] = MappingProxyType({})  # what the writer noted, such as the names of the reward functions


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
        names = sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))
        self._indices = {name: self._indices.get(name) or self._read_index(name) for name in names}
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
        files = self.files()
        return files[0].notes if files else {}

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
            return RolloutFile(path, int(number), writer, groups, step, notes)


def read_manifest(folder: Path, *, model: str | None = None, tokenizer: str | None = None) -> dict[str, Any]:
    """Return the manifest of a folder of rollouts."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        stored = {name: manifest[name] for name in ("schema", "model", "tokenizer")}
    except FileNotFoundError:
        raise FileNotFoundError(f"folder={os.fspath(folder)} has no {MANIFEST}; store rollouts there first") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}; restore it") from error
    for name, expected in {"schema": SCHEMA, "model": model, "tokenizer": tokenizer}.items():
        if expected is not None and stored[name] != expected:
            remedy = "read it with the version that wrote it" if name == "schema" else "use another folder"
            raise ValueError(
                f"folder={os.fspath(folder)} has rollouts of {name}={stored[name]!r}, not {expected!r}; {remedy}"
            )
    return stored


def vocabulary_hash(tokenizer: Any) -> str:
    """Return the hex SHA-256 of a tokenizer's vocabulary: texts and ids. A hash is returned as it is.

    The chat template is left out, since rows consist of ids.
    """
    if isinstance(tokenizer, str):
        if not re.fullmatch("[0-9a-f]{64}", tokenizer):
            raise ValueError(f"tokenizer={tokenizer!r:.80} must be a tokenizer or its vocabulary_hash; load it first")
        return tokenizer
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an error about the content of a file into one that names the file."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        remedy = "copy it again, or remove it to go on without its groups"
        raise RolloutFileError(f"{path} cannot be read: {error}; {remedy}") from error


def _read_header(path: Path) -> bytes:
    with _open(path) as file:
        start = file.read(_HEADER_GUESS)
        missing = 8 + int.from_bytes(start[:8], "little") - len(start)
        if 0 < missing <= os.fstat(file.fileno()).st_size:
            start += file.read(missing)
        return split_header(start)


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; a link or a device is refused."""
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


class RolloutWriter:
    """Writer of finished rows, usable as ``postproc`` or ``replay_buffer`` of a collector.

    As ``postproc`` it also stores text. As ``replay_buffer`` it receives rows without text.

    A crash at any instant leaves whole files of whole groups. A writer that starts again takes a new id. Several
    writers of one folder need disjoint group ids, as one ledger or one
    :class:`~torchrl_rloo.ray.RayDataLoadingPrimer` draws them. A group that a resumed run stores again is
    read once.

    Args:
        folder: folder of the files, created if missing.
        model: name of the model that samples, such as its path or its name on the hub.
        tokenizer: its tokenizer, or the result of :func:`vocabulary_hash`.
        groups_per_file: limit of groups in a file. It bounds the memory of readers. None writes one file per batch.
        text: whether to store text and conversations; False stores what a loss needs.
        notes: JSON values to store with each file, such as the names of the reward functions. None stores none.
        max_bytes: largest total size of this writer's files. Beyond it, the oldest are removed; the newest always
            stays. None sets no limit.
        writer: id of the writer, 8 hexadecimal digits, such as :func:`run_id`. None draws a new one.

    Attributes:
        step: training step of the rows to come, stored with each file. None stores none.
        counts: ``"storage/files"``, ``"storage/groups"``, ``"storage/rows"`` and ``"storage/bytes"`` written, and
            ``"storage/removed_files"`` beyond ``max_bytes``.

    Raises:
        ValueError: if the folder has rows of another model or tokenizer, or an argument is out of range.
        OSError: if the folder cannot be written.

    Example:
        ::

            writer = RolloutWriter("rollouts", model="Qwen/Qwen3-0.6B", tokenizer=tokenizer)
            collector = LLMCollector(env, policy, postproc=writer)
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        model: str,
        tokenizer: Any,
        groups_per_file: int | None = None,
        text: bool = True,
        notes: Mapping[str, Any] | None = None,
        max_bytes: int | None = None,
        writer: str | None = None,
    ):
        for name, value in (("groups_per_file", groups_per_file), ("max_bytes", max_bytes)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be None or at least 1")
        self.id = _checked_id(secrets.token_hex(4) if writer is None else writer)
        self.folder, self.groups_per_file, self.text = Path(folder), groups_per_file, text
        self.identity = {"model": str(model), "tokenizer": vocabulary_hash(tokenizer)}
        self.notes, self.max_bytes, self.step = dict(notes or {}), max_bytes, None
        self.counts: Counter[str] = Counter()
        make_folder(self.folder)
        _remove_old_temporaries(self.folder)
        manifest = self.folder / MANIFEST
        if not manifest.exists():
            write_text(manifest, json.dumps({"schema": SCHEMA, **self.identity}, indent=2) + "\n")
        read_manifest(self.folder, **self.identity)
        # Files of an earlier process with the same id, oldest first, with their sizes
        earlier = [path for path in sorted(self.folder.glob(f"*-{self.id}-*.safetensors")) if path.is_file()]
        self._files: deque[tuple[Path, int]] = deque((path, path.stat().st_size) for path in earlier)
        self._last = int(earlier[-1].name.partition("-")[0]) if earlier else 0

    def rewind(self, step: int) -> None:
        """Remove this writer's files of steps after ``step``: a run that resumes from there stores them again.

        Args:
            step: last step to keep; 0 removes all files of the writer.

        Raises:
            ValueError: if the folder has files of another writer, whose groups have the same ids.
            RolloutFileError: if the header of a file is damaged.
        """
        files = RolloutFiles(self.folder).files()
        if others := sorted({file.writer for file in files} - {self.id}):
            raise ValueError(
                f"folder={os.fspath(self.folder)} has rows of another run (writer {others[0]}); set another folder, or "
                "remove it"
            )
        for file in files:
            if file.step is None or file.step > step:
                file.path.unlink()
                self._files = deque(entry for entry in self._files if entry[0] != file.path)

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        """Store rows and return them, as the ``postproc`` of a collector."""
        self.extend(rows)
        return rows

    def extend(self, rows: TensorDictBase) -> None:
        """Store whole groups; they are on disk when the call returns.

        Args:
            rows: ``[B]`` finished rows of whole groups.

        Raises:
            ValueError: if a group is incomplete, or an entry cannot be stored.
            KeyError: if rows lack tokens, masks, policy version or group id.
            OSError: if a file cannot be written; the files before it remain.
        """
        groups = group_rows(rows if self.text else tensor_rows(rows))
        for group_id, members in groups.items():
            size = members[0].get(keys.GROUP_SIZE, None)
            if size is not None and len(members) != int(size):
                raise ValueError(f"group {group_id} has {len(members)} of {int(size)} rows; store whole groups")
        chosen, step = list(groups.items()), self.groups_per_file or max(len(groups), 1)
        for start in range(0, len(chosen), step):
            self._write(dict(chosen[start : start + step]))

    def _write(self, groups: Mapping[int, TensorDictBase]) -> None:
        packed = pack_rows(concatenate(list(groups.values())))
        index = {
            **self.identity,
            "groups": [_index(group_id, members) for group_id, members in groups.items()],
            "step": self.step,
            "notes": self.notes,
        }
        content = encode_rows(packed, index)
        self._last = max(self._last + 1, time.time_ns())
        header = xxh3_64_hexdigest(split_header(content))
        path = self.folder / f"{self._last:020d}-{self.id}-{header}.safetensors"
        with atomic_write(path) as file:
            file.write(content)
        self._files.append((path, len(content)))
        self._remove_oldest()
        numbers = {"files": 1, "groups": len(groups), "rows": len(packed.layout_of_row), "bytes": len(content)}
        self.counts.update({f"storage/{name}": number for name, number in numbers.items()})

    def _remove_oldest(self) -> None:
        """Remove the oldest files beyond the limit on their size."""
        total = sum(size for _, size in self._files)
        while self.max_bytes is not None and total > self.max_bytes and len(self._files) > 1:
            path, size = self._files.popleft()
            path.unlink(missing_ok=True)
            total -= size
            self.counts["storage/removed_files"] += 1


def run_id(directory: str | os.PathLike) -> str:
    """Return the id of a run's writer, which is kept in the run's directory; the first call draws it.

    Raises:
        ValueError: if the file of the id is damaged.
        OSError: if it cannot be written.
    """
    path = Path(directory) / _RUN_ID
    if not path.is_file():
        make_folder(path.parent)
        write_text(path, secrets.token_hex(4) + "\n")
    return _checked_id(path.read_text("utf-8").strip(), f"{path}: ")


def _checked_id(writer: str, place: str = "") -> str:
    if not re.fullmatch("[0-9a-f]{8}", writer):
        raise ValueError(f"{place}writer={writer!r:.40} must be 8 hexadecimal digits")
    return writer


def _index(group_id: int, members: TensorDictBase) -> StoredGroup:
    metadata = list(metadata_of(members).unbind(0))
    versions = torch.cat([row[keys.VERSION_COUNTS][:, 0] for row in metadata])
    if not len(versions):  # no row has an action token
        versions = torch.stack([row[keys.POLICY_VERSION] for row in metadata])
    rewards = [row.get(keys.REWARD, None) for row in metadata]
    returns = torch.tensor([float("nan") if reward is None else float(reward.sum()) for reward in rewards])
    mean = None if returns.isnan().all() else float(returns.nanmean())
    tokens = sum(int(row[keys.TOKEN_COUNT]) for row in metadata)
    return StoredGroup(group_id, len(metadata), tokens, int(versions.min()), int(versions.max()), mean)


def _remove_old_temporaries(folder: Path) -> None:
    """Remove temporary files of killed writers, but not those of writers that may be alive."""
    for path in folder.glob(TEMPORARIES):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _OLD_S:
                path.unlink()
