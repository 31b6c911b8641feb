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
import random
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrl_rloo.run.atomic import atomic_write

_log = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"step_(\d{8,})\.pt")
# Exact types: a subclass (np.float64 of float, a namedtuple of tuple) can be saved, but not loaded with weights_only.
_SCALARS = (str, int, float, bool, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, torch.Size)
_MAPPINGS = (dict, OrderedDict)


class Checkpointer:
    """Checkpoint files of one run: ``step_00000040.pt`` and so on.

    Only one process may write to the directory. Others may read at the same time.

    Args:
        directory: directory of the files, created if necessary.
        keep: number of newest checkpoints to keep.

    Raises:
        ValueError: if ``keep`` is less than 1.

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
        self.directory.mkdir(parents=True, exist_ok=True)

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
        """
        if step < 0:
            raise ValueError(f"step={step!r} must be at least 0")
        # Check before writing, so that an invalid state leaves no file
        state = dict(state)
        _check(state, "state")
        path = self._path(step)
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
        for step in self.steps():
            self._path(step).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints in ascending order."""
        matches = (_FILE_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

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
        steps = self.steps()
        if step is not None and step not in steps:
            raise FileNotFoundError(f"step={step} must be one of the checkpoints {steps} in {self.directory}")
        for candidate in [step] if step is not None else reversed(steps):
            try:
                return _read(self._path(candidate))
            except Exception as error:  # the type depends on the place of the damage
                _log.warning("cannot read checkpoint %s: %s", self._path(candidate), error)
        if steps:
            wanted = f"the checkpoint of step {step}" if step is not None else f"any of the checkpoints {steps}"
            raise RuntimeError(
                f"cannot read {wanted} in {self.directory}; see the warnings, and remove damaged files to continue"
            )
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.pt"


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch.load compares no checksums and would accept flipped bits
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of its entry {damaged} is wrong")
    return torch.load(path, map_location="cpu", weights_only=True)


def _check(value: Any, path: str) -> None:
    kind = type(value)
    if kind in _MAPPINGS:
        for key, item in value.items():
            _check_key(key, path)
            _check(item, f"{path}[{key!r}]")
    elif kind in _SEQUENCES:
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
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
