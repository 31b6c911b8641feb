"""Checkpoints that survive a kill at any instant, and the state that goes into them.

A checkpoint is a nested dict of tensors and plain values. It is read with ``weights_only=True``, so opening one never
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
# Exact types: a subclass (np.float64 is a float, a namedtuple a tuple) can be saved, but not loaded weights_only.
_SCALARS = (str, int, float, bool, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, torch.Size)
_MAPPINGS = (dict, OrderedDict)


class Checkpointer:
    """Writes and finds the checkpoints of one run, ``step_00000040.pt`` and so on.

    One process writes to the directory; others may read from it at the same time.

    Args:
        directory: where they lie; made if it does not exist.
        keep: how many of the newest to keep.

    Raises:
        ValueError: if ``keep`` is less than 1.
    """

    def __init__(self, directory: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep!r}.")
        self.directory = Path(directory)
        self.keep = keep
        self.directory.mkdir(parents=True, exist_ok=True)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Writes a checkpoint; when this returns, it is on the disk and older ones than the newest ``keep`` are gone.

        Checkpoints of later steps are removed as well: the run went back behind them, so they belong to no run, and
        :meth:`load` must not return to them.

        Args:
            step: the step after which the state was taken, 0 or more.
            state: tensors, str, int, float, bool and None in any nesting of dicts, lists and tuples.

        Returns:
            The file.

        Raises:
            TypeError: if the state holds anything else; the message gives its place. Nothing is written.
            ValueError: if ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"step must be 0 or more, got {step!r}.")
        state = dict(state)
        _check(state, "state")
        path = self._path(step)
        with atomic_write(path) as file:
            torch.save(state, file)
        steps = self.steps()
        later = [other for other in steps if other > step]
        if later:
            _log.warning("Saved step %d in %s and removed the later steps %s.", step, self.directory, later)
        kept = [other for other in steps if other <= step][-self.keep :]
        for other in set(steps) - set(kept):
            self._path(other).unlink(missing_ok=True)
        return path

    def clear(self) -> None:
        """Removes every checkpoint: a run that starts over must not be resumed from the one before."""
        for step in self.steps():
            self._path(step).unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """The steps that there is a checkpoint of, in ascending order."""
        matches = (_FILE_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def load(self, step: int | None = None) -> dict[str, Any] | None:
        """Reads a checkpoint; tensors come back on the CPU.

        Args:
            step: which one; ``None`` for the newest that can be read. A damaged one is passed over with a warning.

        Returns:
            The state as it was saved, or ``None`` if there is no checkpoint and no ``step`` was asked for.

        Raises:
            FileNotFoundError: if there is no checkpoint of ``step``.
            RuntimeError: if the one asked for, or every one that there is, is damaged.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            raise FileNotFoundError(f"No checkpoint of step {step} in {self.directory}; there are steps {steps}.")
        for candidate in [step] if step is not None else reversed(steps):
            try:
                return _read(self._path(candidate))
            except Exception as error:  # what a damaged file raises depends on where the damage is
                _log.warning("Cannot read checkpoint %s: %s", self._path(candidate), error)
        if steps:
            wanted = f"the checkpoint of step {step}" if step is not None else f"any of the checkpoints {steps}"
            raise RuntimeError(
                f"Cannot read {wanted} in {self.directory}: the warnings say why. Remove the damaged files to go on."
            )
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}.pt"


def _read(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:  # torch.load does not compare checksums, so flipped bits would pass
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of {damaged} in it is wrong")
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
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot go into a checkpoint. Allowed are "
            "tensors, str, int, float, bool and None in dicts, lists and tuples."
        )


def _check_key(key: Any, path: str) -> None:
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _SCALARS for part in parts):
        raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be str, int or tuples.")


def gather_state(**parts: Any) -> dict[str, Any]:
    """``{name: part.state_dict()}`` of every part; put it into the checkpoint under a key of its own.

    Raises:
        TypeError: if a part has no ``state_dict``.
    """
    for name, part in parts.items():
        if not hasattr(part, "state_dict"):
            raise TypeError(f"Part {name!r} is a {type(part).__name__}, which has no state_dict().")
    return {name: part.state_dict() for name, part in parts.items()}


def restore_state(state: Mapping[str, Any], **parts: Any) -> None:
    """Gives every part the state that :func:`gather_state` took from the part of that name.

    Raises:
        KeyError: if the names in ``state`` and those of ``parts`` differ; nothing is restored then.
    """
    missing = sorted(set(parts) - set(state))
    unexpected = sorted(set(state) - set(parts))
    if missing or unexpected:
        raise KeyError(
            f"The saved state does not fit the parts: {missing} missing from the state, {unexpected} in the state but "
            "not among the parts."
        )
    for name, part in parts.items():
        part.load_state_dict(state[name])


def rng_state() -> dict[str, Any]:
    """The state of the global random generators of Python, NumPy, torch on the CPU and every CUDA device."""
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
    """Sets what :func:`rng_state` returned, so that the generators go on with the very same numbers.

    With fewer or more CUDA devices than were saved, those that exist on both sides are set, with a warning.
    """
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
    torch.set_rng_state(state["torch"])
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices != len(state["cuda"]):
        _log.warning(
            "Random state of %d CUDA devices saved, %d are here: the run will not go on with the same random numbers.",
            len(state["cuda"]),
            devices,
        )
    for device, device_state in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(device_state, device)
