"""Checkpoints that survive a kill at any time, and the state of random generators and parts.

A checkpoint is a nested dict of tensors and plain values. It is loaded with ``weights_only=True``, so loading never
runs code from the file.

Example:
    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 2)
    >>> checkpointer = Checkpointer(tempfile.mkdtemp(), keep=2)
    >>> path = checkpointer.save(10, {"step": 10, "rng": rng_state(), "parts": gather_state(model=model)})
    >>> state = checkpointer.load()
    >>> restore_state(state["parts"], model=model)
    >>> set_rng_state(state["rng"])
    >>> state["step"]
    10
"""

from __future__ import annotations

import logging
import os
import random
import re
import secrets
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrl_rloo.files import atomic_write, make_folder
from torchrl_rloo.run.lock import DirectoryLock

_log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})\.pt")
# Exact types: a subclass (np.float64 of float, a namedtuple of tuple) can be saved, but not loaded with weights_only.
_SCALARS = (str, int, float, bool, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, torch.Size)
_MAPPINGS = (dict, OrderedDict)


class Checkpointer:
    """Checkpoint files of one run: ``step_00000040.pt`` and so on.

    The first :meth:`save` or :meth:`clear` locks the directory for this process, until :meth:`close` or the end of the
    object. Other processes may read at the same time. Folders and links with names of checkpoints are no checkpoints.

    Args:
        directory: directory of the files, created if necessary.
        keep: number of newest checkpoints to keep.

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

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep!r} must be at least 1")
        self.directory = Path(directory)
        self.keep = keep
        self._lock: DirectoryLock | None = None
        make_folder(self.directory)

    def lock(self) -> None:
        """Lock the directory for writing, if this object has not done so.

        Raises:
            DirectoryInUseError: if another process writes to the directory.
        """
        if self._lock is None or not self._lock.held:
            self._lock = DirectoryLock(self.directory)

    def close(self) -> None:
        """Release the lock; the next save takes it again."""
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
            Path of the file.

        Raises:
            TypeError: if the state contains any other type. The message gives its place, and nothing is written.
            ValueError: if ``step`` is negative.
            OSError: if the file cannot be written, such as on a full disk. Older checkpoints stay as they are.
            DirectoryInUseError: if another process writes to the directory.
        """
        if not 0 <= step < 10**18:
            raise ValueError(f"step={step!r} must be at least 0 and below 10**18")
        # Check before writing, so that an invalid state leaves no file
        state = dict(state)
        check_state(state, "state")
        self.lock()
        path = self._path(step)
        _move_folder_away(path)
        with atomic_write(path) as file:
            torch.save(state, file)
        # Remove other checkpoints only now that this one is complete
        steps = self.steps()
        later = [other for other in steps if other > step]
        if later:
            _log.warning(
                "saved step %d in %s and removed the checkpoints of later steps %s", step, self.directory, later
            )
        kept = [other for other in steps if other <= step][-self.keep :]
        for other in set(steps) - set(kept):
            self._path(other).unlink(missing_ok=True)
        return path

    def clear(self) -> None:
        """Remove all checkpoints, so that a run that starts over is not resumed from the previous one."""
        self.lock()
        for step in self.steps():
            self._path(step).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in ascending order."""
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        return sorted(int(match[1]) for match in map(_FILE_NAME.fullmatch, names) if match)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Load a checkpoint with all tensors on the CPU.

        Args:
            step: step of the checkpoint. None loads the newest one that is readable and warns of damaged ones.

        Returns:
            The saved state, or None if ``step`` is None and there is no checkpoint.

        Raises:
            FileNotFoundError: if there is no checkpoint of ``step``.
            RuntimeError: if the checkpoint of ``step`` is damaged, or if all are.
        """
        if step is None:
            newest = self.newest()
            return None if newest is None else newest[1]
        if step not in (steps := self.steps()):
            raise FileNotFoundError(f"step={step} must be one of the checkpoints {steps} in {self.directory}")
        try:
            return read_state(self._path(step))
        except Exception as error:  # the type depends on the place of the damage
            path = self._path(step)
            raise RuntimeError(
                f"cannot read the checkpoint of step {step}, {path}: {_line(error)}; load another of {steps}"
            ) from error

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return file and state of the newest checkpoint that is readable; warn of damaged ones.

        Returns:
            None if there is no checkpoint.

        Raises:
            RuntimeError: if all checkpoints are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._path(step), read_state(self._path(step))
            except Exception as error:  # the type depends on the place of the damage
                _log.warning("cannot read checkpoint %s, the one before it is used: %s", self._path(step), _line(error))
        if steps:
            raise RuntimeError(
                f"cannot read any of the checkpoints {steps} in {self.directory}; see the warnings, and restore one or "
                "remove the damaged files to start over"
            )
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.pt"


def _move_folder_away(path: Path) -> None:
    """Rename a folder that has the name of the checkpoint to save."""
    if path.is_dir() and not path.is_symlink():
        other = path.with_name(f"{path.name}.folder-{secrets.token_hex(4)}")
        _log.warning("renamed the folder %s to %s, because a checkpoint gets its name", path, other.name)
        path.rename(other)


def read_state(path: Path) -> dict[str, Any]:
    """Load a checkpoint file, or raise if it is not exactly as :meth:`Checkpointer.save` writes one.

    Entries are stored without compression and cannot overlap, so a file takes no more memory than its own size.

    Raises:
        Exception: of any type, which depends on the place of the damage.
    """
    with open(path, "rb") as file:
        # torch.load compares no checksums and would accept flipped bits
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise ValueError("an entry is compressed or encrypted")
            if any(entry.filename.endswith("constants.pkl") for entry in entries):
                raise ValueError("it is a TorchScript archive")
            if len({entry.filename for entry in entries}) < len(entries):
                raise ValueError("two entries have the same name")
            if sum(entry.file_size for entry in entries) > os.fstat(file.fileno()).st_size:
                raise ValueError("its entries are larger than the file")
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"the checksum of its entry {damaged} is wrong")
        file.seek(0)
        if file.read(4) != b"PK\3\4":
            raise ValueError("it does not begin with its archive")
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
    if type(state) not in _MAPPINGS:
        raise TypeError(f"the state is a {type(state).__name__}, but must be a dict")
    check_state(state, "state")
    return state


def _line(error: Exception) -> str:
    """Return an error as one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def check_state(value: Any, path: str) -> None:
    """Raise a ``TypeError`` that names the place of a value that a checkpoint must not contain."""
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            _check_key(key, path)
            check_state(item, f"{path}[{key!r}]")
    elif kind in _SEQUENCES:
        for index, item in enumerate(value):
            check_state(item, f"{path}[{index}]")
    elif kind not in _SCALARS and kind not in _TENSORS:
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, but a checkpoint must contain only tensors, str, int, "
            "float, bool and None in dicts, lists and tuples"
        )


def _check_key(key: Any, path: str) -> None:
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _SCALARS for part in parts):
        raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be str, int or tuples")


def gather_state(**parts: Any) -> dict[str, Any]:
    """Return ``{name: part.state_dict()}`` of all parts, to save under one key of the checkpoint.

    Raises:
        TypeError: if a part has no ``state_dict``.
    """
    for name, part in parts.items():
        if not hasattr(part, "state_dict"):
            raise TypeError(f"part {name!r} is a {type(part).__name__}, but must have state_dict()")
    return {name: part.state_dict() for name, part in parts.items()}


def restore_state(state: Mapping[str, Any], **parts: Any) -> None:
    """Restore the state that :func:`gather_state` saved for each part.

    Raises:
        KeyError: if the names in ``state`` and in ``parts`` differ. No part is restored then.
    """
    missing = sorted(set(parts) - set(state))
    unexpected = sorted(set(state) - set(parts))
    if missing or unexpected:
        raise KeyError(
            f"the saved state must have the names of the parts: {missing} missing from the state, {unexpected} in the "
            "state but not among the parts"
        )
    for name, part in parts.items():
        part.load_state_dict(state[name])


def rng_state() -> dict[str, Any]:
    """Return the state of the global random generators of Python, NumPy and torch (the CPU and all CUDA devices)."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the state from :func:`rng_state`, so that the generators continue with the same numbers.

    If the number of CUDA devices differs, only the common devices are restored, with a warning.
    """
    # Generators of Python and NumPy
    random.setstate(state["python"])
    numpy_state = state["numpy"]
    np.random.set_state(
        (
            "MT19937",
            numpy_state["key"].numpy().astype(np.uint32),
            numpy_state["pos"],
            numpy_state["has_gauss"],
            numpy_state["gauss"],
        )
    )
    # Generators of torch, for the devices that both processes have
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices != len(state["cuda"]):
        _log.warning(
            "the checkpoint has the random state of %d CUDA devices, this process has %d: random numbers will differ",
            len(state["cuda"]),
            devices,
        )
    for device, device_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(device_state, device)
