"""Checkpoints that survive a kill at any time.

A checkpoint is a nested dict of tensors and plain values. Without sharded tensors it is one file, which is loaded with
``weights_only=True``; with them it is a folder of :mod:`torchrl_rloo.run.shards`. Loading never runs code from either.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.run.lock import DirectoryLock
from torchrl_rloo.run.shards import STATE, agree, copy_to_cpu, detach_shards, read_folder, with_own_group, write_folder
from torchrl_rloo.run.state import check_state, one_line, read_state
from torchrl_rloo.runtime.files import atomic_write, explained, make_folder, sync_directory, temporary_name
from torchrl_rloo.runtime.ranks import Ranks

_log = logging.getLogger(__name__)

_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})(\.pt)?")


class Checkpointer:
    """Checkpoints of one run: the files ``step_00000040.pt`` and so on, or folders ``step_00000040`` of sharded ones.

    The first :meth:`save` or :meth:`clear` locks the directory for this process, until :meth:`close` or the end of the
    object. Other processes may read at the same time. Other things with names of checkpoints are no checkpoints.

    With several ranks, all make the same calls. Rank 0 locks, and its values are saved; of sharded tensors, each rank
    writes its shards. All ranks must see the same directory.

    Args:
        directory: directory of the checkpoints, created if necessary.
        keep: number of newest checkpoints to keep.
        ranks: ranks that train the model together. None is a single process.
        asynchronous: if True, :meth:`save` copies the state to CPU memory, and a thread writes the copy. The next call
            of :meth:`save`, :meth:`wait` or :meth:`close` waits for its end and raises its error.

    Raises:
        ValueError: if ``keep`` is less than 1.
        OSError: if the directory cannot be created.

    Example:
        >>> import tempfile
        >>> checkpointer = Checkpointer(tempfile.mkdtemp(), keep=1)
        >>> paths = [checkpointer.save(step, {"step": step}) for step in (10, 20)]
        >>> checkpointer.steps(), checkpointer.load()
        ([20], {'step': 20})
    """

    def __init__(
        self, directory: str | Path, *, keep: int = 2, ranks: Ranks | None = None, asynchronous: bool = False
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep!r} must be at least 1")
        self.directory = Path(directory)
        self.keep = keep
        self.ranks = ranks or Ranks.single()
        self._lock: DirectoryLock | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None  # the last asynchronous save; Python waits for it at its exit
        self._writers: Ranks | None = None  # the ranks, in a group of the thread
        make_folder(self.directory)

    def lock(self) -> None:
        """Lock the directory for writing on rank 0, if this object has not done so."""
        if self.ranks.is_main and (self._lock is None or not self._lock.held):
            self._lock = DirectoryLock(self.directory)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the last asynchronous save, and raise its error; after ``timeout`` leave it to itself."""
        pending, self._pending = self._pending, None
        if pending is not None and pending in futures.wait([pending], timeout).done:
            pending.result()

    @property
    def failed(self) -> bool:
        """True if the last asynchronous save has failed, so that :meth:`wait` will raise."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """Wait for the last save and release the lock; the next save takes it again."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.close()

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint durably to disk, and then remove all but the newest ``keep``.

        Checkpoints of later steps are also removed. The run was resumed before them, so :meth:`load` must not return
        them.

        Args:
            step: step after which the state was taken, at least 0.
            state: tensors, str, int, float, bool and None in nested dicts, lists and tuples.

        Returns:
            Path of the file or folder. With ``asynchronous=True`` it may not yet be there.

        Raises:
            TypeError: if the state contains any other type. The message gives its place, and nothing is written.
            ValueError: if ``step`` is negative, or the state is nested deeply or contains itself.
            OSError: if the file cannot be written, such as on a full disk. Older checkpoints stay as they are.
            DirectoryInUseError: if another process writes to the directory.
        """
        if not 0 <= step < 10**18:
            raise ValueError(f"step={step!r} must be at least 0 and below 10**18")
        self.wait()
        # Check before writing, so that an invalid state leaves no file
        state, shards = detach_shards(state)

        def prepare() -> None:
            check_state(state, "state")
            self.lock()

        self.ranks.broadcast(prepare)
        path = self.directory / (f"step_{step:08d}" if shards else f"step_{step:08d}.pt")
        if self._executor is None:
            self._write(path, state, shards, self.ranks)
            return path
        # The thread needs its own group, because the main thread's collective calls run at the same time
        if self._writers is None:
            self._writers = with_own_group(self.ranks)
        whole = copy_to_cpu(state) if self.ranks.is_main else {}
        self._pending = self._executor.submit(self._write, path, whole, copy_to_cpu(shards), self._writers)
        return path

    def clear(self, *, after: int = -1) -> None:
        """Remove all checkpoints of steps above ``after``, so that a run that starts over is not resumed from them."""

        def clear() -> None:
            self.lock()
            later = [(step, path) for step, path in _list(self.directory) if step > after]
            if later and after >= 0:
                _log.warning("removed the checkpoints of later steps %s", [str(path) for _, path in later])
            for _, path in later:
                _remove(path)

        self.ranks.broadcast(clear)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in ascending order."""
        return saved_steps(self.directory)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Load a checkpoint with all tensors on the CPU.

        Args:
            step: step of the checkpoint. None loads the newest one that is readable and warns of damaged ones.

        Returns:
            The saved state, or None if ``step`` is None and there is no checkpoint. Sharded tensors are read when a
            part is restored, whose layout they get; here they are a ``SavedTensor``.

        Raises:
            FileNotFoundError: if there is no checkpoint of ``step``.
            RuntimeError: if the checkpoint of ``step`` is damaged, or if all are.
        """
        found = self.newest() if step is None else self.read(step)
        return None if found is None else found[1]

    def read(self, step: int) -> tuple[Path, dict[str, Any]]:
        """Return path and state of the checkpoint of a step; see :meth:`load`."""
        paths = dict(self.ranks.broadcast(lambda: _list(self.directory)))
        if step not in paths:
            raise FileNotFoundError(f"step={step} must be one of the checkpoints {sorted(paths)} in {self.directory}")
        try:
            return paths[step], self._read(paths[step])
        except Exception as error:  # the type depends on the place of the damage
            raise RuntimeError(
                f"cannot read the checkpoint of step {step}, {paths[step]}: {one_line(error)}; load another of "
                f"{sorted(paths)}"
            ) from error

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return path and state of the newest checkpoint that is readable, or None; see :meth:`load`."""
        paths = dict(self.ranks.broadcast(lambda: _list(self.directory)))
        for step in sorted(paths, reverse=True):
            try:
                return paths[step], self._read(paths[step])
            except Exception as error:  # the type depends on the place of the damage
                _log.warning("cannot read checkpoint %s, the one before it is used: %s", paths[step], one_line(error))
        if paths:
            raise RuntimeError(
                f"cannot read any of the checkpoints {sorted(paths)} in {self.directory}; see the warnings, and "
                "restore one or remove the damaged files to start over"
            )
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        if path.suffix:
            return agree(self.ranks, lambda: read_state(path))
        return read_folder(path, self.ranks)

    def _write(self, path: Path, state: dict[str, Any], shards: dict[str, torch.Tensor], ranks: Ranks) -> None:
        """Write a checkpoint under a temporary name, give it its name, and remove the others only then."""
        if shards:
            folder = ranks.broadcast(lambda: _make_temporary(path))
            try:
                write_folder(folder, state, shards, ranks)
                ranks.broadcast(lambda: self._place(folder, path))
            finally:
                if ranks.is_main:
                    shutil.rmtree(folder, ignore_errors=True)
        else:
            ranks.broadcast(lambda: self._write_file(path, state))

    def _write_file(self, path: Path, state: dict[str, Any]) -> None:
        with atomic_write(path) as file:
            torch.save(state, file)
        self._rotate(path)

    def _place(self, folder: Path, path: Path) -> None:
        if (path / STATE).is_file():
            _remove(path)
        with explained(path):
            os.replace(folder, path)
            sync_directory(self.directory)
        self._rotate(path)

    def _rotate(self, path: Path) -> None:
        """Remove the checkpoints that the one at ``path`` replaces."""
        step, found = int(path.stem.removeprefix("step_")), _list(self.directory)
        if later := [other for other, _ in found if other > step]:
            _log.warning(
                "saved step %d in %s and removed the checkpoints of later steps %s", step, self.directory, later
            )
        kept = sorted({other for other, _ in found if other <= step})[-self.keep :]
        for other, other_path in found:
            if other not in kept or (other == step and other_path != path):
                _remove(other_path)


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in a directory in ascending order; none if there is no directory."""
    return sorted({step for step, _ in _list(directory)}) if directory.is_dir() else []


def _list(directory: Path) -> list[tuple[int, Path]]:
    """Return step and path of all checkpoints in ascending order."""
    with os.scandir(directory) as entries:
        found = [(match, entry) for entry in entries if (match := _NAME.fullmatch(entry.name))]
        return sorted((int(match[1]), directory / entry.name) for match, entry in found if _is_checkpoint(entry))


def _is_checkpoint(entry: os.DirEntry) -> bool:
    """Return whether an entry with the name of a checkpoint is one, and no link or foreign thing."""
    if entry.name.endswith(".pt"):
        return entry.is_file(follow_symlinks=False)
    return entry.is_dir(follow_symlinks=False) and (Path(entry) / STATE).is_file()


def _remove(path: Path) -> None:
    """Remove a checkpoint; a folder loses its name first, so that no part of it counts as one."""
    if path.suffix:
        path.unlink(missing_ok=True)
        return
    removed = temporary_name(path)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def _make_temporary(path: Path) -> Path:
    folder = temporary_name(path)
    with explained(path):
        folder.mkdir()
    return folder
