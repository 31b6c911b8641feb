"""Writer of finished rows to a folder; :mod:`torchrl_rloo.replay.row_files` reads them."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from xxhash import xxh3_64_hexdigest

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.outcomes import group_rows
from torchrl_rloo.data.packed import pack_rows
from torchrl_rloo.data.rows import concatenate, tensor_rows
from torchrl_rloo.replay.row_files import MANIFEST, SCHEMA, RolloutFiles, StoredGroup, read_manifest, vocabulary_hash
from torchrl_rloo.replay.row_format import encode_rows, split_header
from torchrl_rloo.runtime.files import TEMPORARIES, atomic_write, make_folder, write_text

_OLD_S = 3600.0  # age of a temporary file that no writer can still be writing
_RUN_ID = "run_id"


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
        own = [path for path in sorted(self.folder.glob(f"*-{self.id}-*.safetensors")) if path.is_file()]
        self._files: deque[tuple[Path, int]] = deque((path, path.stat().st_size) for path in own)
        self._last = int(own[-1].name.partition("-")[0]) if own else 0

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
            "columns": sorted({key for key in packed.columns if isinstance(key, str)}),
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
