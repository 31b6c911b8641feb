"""State of a run, nested dicts of tensors and plain values: its contents, its files, and random generators."""

from __future__ import annotations

import copy
import logging
import os
import random
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_log = logging.getLogger(__name__)

# Exact types: a subclass (np.float64 of float, a namedtuple of tuple) can be saved, but not loaded with weights_only.
_SCALARS = (str, int, float, bool, type(None))
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (list, tuple, torch.Size)
_MAPPINGS = (dict, OrderedDict)
_MAX_DEPTH = 100
_MAX_GROWTH = 10  # by copying what is shared, such as tied weights, beyond the numbers of values and bytes in _FREE
_FREE = (1_000_000, 2**26)


def read_state(path: Path) -> dict[str, Any]:
    """Load a checkpoint file, or raise if it is not exactly as :meth:`Checkpointer.save` writes one.

    Entries are stored without compression and cannot overlap, so a file takes no more memory than its own size. An
    error has any type, which depends on the place of the damage.
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


def one_line(error: BaseException) -> str:
    """Return an error as one line of at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:300]} ..."


def check_state(value: Any, path: str) -> None:
    """Raise an error that names the place of a value that a checkpoint must not contain.

    Raises:
        TypeError: if a value or key has another type.
        ValueError: if the state is nested too deeply or contains itself. Also if so much of it is shared that a copy,
            which those who restore it make, would be far larger than its file.
    """
    visit = _Visit()
    copied = visit.size(value, path, _MAX_DEPTH)
    for name, size, kept, free in zip(("values", "bytes"), copied, visit.kept(), _FREE, strict=True):
        if size > free + _MAX_GROWTH * kept:
            raise ValueError(f"a copy of {path} would have {size} {name}, but {path} has {kept}; share less in it")


class _Visit:
    """Visit of a state, once to each container and tensor."""

    def __init__(self):
        self._sizes: dict[int, tuple[int, int] | None] = {}  # None for containers around the present one
        self._lengths = 0
        self._storages: dict[int, int] = {}

    def kept(self) -> tuple[int, int]:
        """Return the numbers of values and of bytes of tensors that were visited."""
        return self._lengths, sum(self._storages.values())

    def size(self, value: Any, path: str, depth: int) -> tuple[int, int]:
        """Check a value, and return the numbers of values and of bytes of tensors that a copy would have."""
        kind = type(value)
        if kind in _SCALARS:
            return 1, 0
        if id(value) in self._sizes:
            if (known := self._sizes[id(value)]) is None:
                raise ValueError(f"{path} contains itself")
            return known
        if kind in _TENSORS:
            found = (1, self._tensor_bytes(value))
        elif kind not in _MAPPINGS and kind not in _SEQUENCES:
            raise TypeError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, but a checkpoint must contain only tensors, str, "
                "int, float, bool and None in dicts, lists and tuples"
            )
        elif not depth:
            raise ValueError(f"{path:.200} is nested deeper than {_MAX_DEPTH} levels")
        else:
            self._sizes[id(value)] = None
            found = self._container_size(value, path, depth)
        self._sizes[id(value)] = found
        return found

    def _container_size(self, value: Any, path: str, depth: int) -> tuple[int, int]:
        if type(value) in _MAPPINGS:
            for key in value:
                _check_key(key, path)
        self._lengths += len(value)
        values, size = len(value), 0
        for key, item in value.items() if type(value) in _MAPPINGS else enumerate(value):
            if type(item) not in _SCALARS:  # most are; paths take time
                inner = self.size(item, f"{path}[{key!r}]", depth - 1)
                values, size = values + inner[0], size + inner[1]
        return values, size

    def _tensor_bytes(self, value: torch.Tensor) -> int:
        if value.layout is not torch.strided:  # it has no single storage
            return 0
        storage = value.untyped_storage()
        self._storages[storage._cdata] = storage.nbytes()
        return value.numel() * value.element_size()


def _check_key(key: Any, path: str) -> None:
    parts = key if type(key) is tuple else (key,)
    if not all(type(part) in _SCALARS for part in parts):
        raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be str, int or tuples")


def rebuild(value: Any, replace: Callable[[Any, tuple], Any], path: tuple = ()) -> Any:
    """Copy nested dicts, lists and tuples, and replace some of their values.

    ``replace`` returns the new value of a value and its path of keys and indices. None keeps it, or continues with its
    items.
    """
    if (new := replace(value, path)) is not None:
        return new
    if type(value) in _MAPPINGS:
        copied = copy.copy(value)  # with the versions of modules, an attribute of their OrderedDict
        copied.update((key, rebuild(item, replace, (*path, key))) for key, item in value.items())
        return copied
    if type(value) in (list, tuple):
        return type(value)(rebuild(item, replace, (*path, index)) for index, item in enumerate(value))
    return value


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
