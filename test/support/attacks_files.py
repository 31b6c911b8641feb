"""Attacks on files that a run reads: checkpoints with damaged, forged or hostile contents.

Nothing may run code, crash the process, or pass as a state or score that was not saved.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import random
import resource
import shutil
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.run import Checkpointer

MAX_MEMORY_KB = 300_000  # growth of the process in one attack, far above that of any file here


def saved_state(step: int) -> dict[str, Any]:
    """Return a state in which every value is recognizable."""
    weights = {"w": torch.arange(200, dtype=torch.float32) + step, "b": torch.full((7,), step, dtype=torch.int64)}
    return {"step": step, "parts": {"model": weights, "note": [1, 2.5, "text", None, True]}, "seed": 2**70}


class Executes:
    """Object whose pickle makes a folder when it is loaded."""

    marker = ""

    def __init__(self, call: int):
        self.call = call

    def __reduce__(self):
        code = f"import os; os.mkdir({self.marker!r})"
        calls = [
            (os.mkdir, (self.marker,)),
            (os.system, (f"mkdir {self.marker}",)),
            (exec, (code,)),
            (eval, (f"__import__('os').mkdir({self.marker!r})",)),
            (getattr, ("text", "upper")),
            (pickle.loads, (pickle.dumps(OrderedDict(a=1)),)),
            (torch.jit.load, (self.marker,)),
            (print, ("loaded",)),
        ]
        return calls[self.call % len(calls)]


class Forged:
    """Tensor with any header, for a pickle in the format of ``torch.save``."""

    def __init__(self, *header: Any):
        self.header = header

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, (*self.header, False, OrderedDict())


class StorageName(tuple):
    """Name of a storage in a forged header."""


class Forger(pickle.Pickler):
    """Pickler that writes names of storages as the format has them."""

    def persistent_id(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, StorageName) else None


def forge(state: Any, data: dict[str, bytes]) -> bytes:
    """Return a checkpoint of any content, with correct checksums."""
    pickled, file = io.BytesIO(), io.BytesIO()
    Forger(pickled, protocol=2).dump(state)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", "little")
        for name, content in data.items():
            archive.writestr(f"archive/data/{name}", content)
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


def flip(content: bytes, rng: random.Random) -> bytes:
    """Flip up to eight bits."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    """Cut the file, at its end or in the middle."""
    a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:a] if rng.random() < 0.5 else content[:a] + content[b:]


def splice(content: bytes, rng: random.Random) -> bytes:
    """Insert, overwrite or repeat a piece."""
    a, size = rng.randrange(len(content)), rng.choice((1, 4, 64, 4096))
    piece = rng.choice((bytes(size), b"\xff" * size, content[:size], rng.randbytes(size)))
    return content[:a] + piece + content[a + (len(piece) if rng.random() < 0.5 else 0) :]


def executes(content: bytes, rng: random.Random) -> bytes:
    """Put code into the pickle: in an archive, as a legacy file, or before the archive."""
    call = Executes(rng.randrange(8))
    evil = pickle.dumps(rng.choice((call, {"step": 3, "parts": call}, [call] * 3)), protocol=2)
    legacy = io.BytesIO()
    torch.save({"step": 3, "parts": call}, legacy, _use_new_zipfile_serialization=False)
    return rng.choice((forge({"step": call}, {}), evil, legacy.getvalue(), evil + content, legacy.getvalue() + content))


def rewrite(content: bytes, rng: random.Random) -> bytes:
    """Write the archive again: compressed, with other entries, with an entry twice or under another name."""
    file, how = io.BytesIO(), rng.randrange(5)
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w") as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an entry twice
        for entry in old.namelist():
            data = bytes(30_000_000) if how == 0 and entry.endswith("/data/0") else old.read(entry)
            name = entry.replace("archive", "../x") if how == 1 else entry
            new.writestr(name, data, zipfile.ZIP_DEFLATED if how in (0, 2) else zipfile.ZIP_STORED)
            if how == 3 and "data.pkl" in entry:
                new.writestr(name, pickle.dumps({"step": -1}, protocol=2))
        if how == 4:
            new.writestr(rng.choice(("code/a.py", "constants.pkl", "archive/constants.pkl", "/x", "../../x")), b"x")
    return file.getvalue()


def bad_header(content: bytes, rng: random.Random) -> bytes:
    """Write tensors whose header does not fit their data."""
    number = lambda: rng.choice((0, 1, 7, 8, 9, 10**6, 2**40, 2**62, -1, 2**80))  # noqa: E731
    kind = rng.choice((torch.FloatStorage, torch.LongStorage, torch.BoolStorage))
    storage = StorageName(
        ("storage", kind, rng.choice(("0", "1", "../0", "")), rng.choice(("cpu", "meta", "cuda:9")), number())
    )
    dims = rng.randrange(4)
    tensor = Forged(storage, number(), tuple(number() for _ in range(dims)), tuple(number() for _ in range(dims)))
    return forge({"step": 3, "parts": {"model": tensor}}, {"0": bytes(rng.choice((0, 32, 4096)))})


def bad_types(content: bytes, rng: random.Random) -> bytes:
    """Save values that no state may contain, or no dict at all."""
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: Any = 1
    for _ in range(150):
        deep = [deep]
    sparse = torch.eye(3).to_sparse()
    value = rng.choice(
        (cycle, deep, {1, 2}, b"bytes", 1j, torch.float32, torch.device("cpu"), sparse, torch.empty(9, device="meta"))
    )
    file = io.BytesIO()
    torch.save(
        rng.choice((value, {"step": 3, "parts": value}, [value], {value if value.__hash__ else "k": value})), file
    )
    return file.getvalue()


CRAFTED = (executes, rewrite, bad_header, bad_types)
CHECKPOINT_ATTACKS = (flip, flip, cut, splice, *CRAFTED)


def same(first: Any, second: Any) -> bool:
    """Return whether two states are equal, in types and bits."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def attack_checkpoint(folder: Path, content: bytes, way: Callable[[bytes, random.Random], bytes]) -> str | None:
    """Load an attacked checkpoint, and return what went wrong, if anything did.

    Args:
        folder: folder with checkpoints 1 and 2, the second of which is replaced.
        content: bytes of the attacked checkpoint.
        way: attack that made them. Only the untouched state may come from one that changes bytes.
    """
    checkpointer = Checkpointer(folder)
    path = folder / "step_00000002.pt"
    path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        state = checkpointer.load(2)
    except RuntimeError as error:
        text = str(error)
        if str(path) not in text or "load another of" not in text or "\n" in text:
            return f"unclear error: {text}"
        if not same(checkpointer.load(), saved_state(1)):
            return "the checkpoint before it was not loaded"
    except BaseException as error:
        return f"{type(error).__name__} instead of a RuntimeError: {error}"
    else:
        if way in (flip, cut, splice) and not same(state, saved_state(2)):
            return f"another state: {str(state)[:200]}"
        if way in (executes, bad_types) and not isinstance(state, dict):
            return f"wrong types: {str(state)[:200]}"
        if way is bad_header and sum(t.untyped_storage().nbytes() for t in state["parts"].values()) > len(content):
            return f"memory that the file does not have: {str(state)[:200]}"
    if Path(Executes.marker).exists():
        return "code was executed"
    if (grown := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > MAX_MEMORY_KB:
        return f"{grown} kB of memory"
    return None


def attack(count: int, seed: int) -> dict[str, Any]:
    """Try seeded mutations of checkpoints.

    Args:
        count: number of attacks.
        seed: seed of all of them.

    Returns:
        ``tried`` and ``contained``, and ``failures`` with way, seed and fault of each.
    """
    failures, rng = [], random.Random(seed)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # each attack is a warning
    folder = Path(tempfile.mkdtemp())
    try:
        # Build the files to attack
        Executes.marker = str(folder / "executed")
        checkpointer = Checkpointer(folder / "checkpoints")
        for step in (1, 2):
            checkpointer.save(step, saved_state(step))
        checkpoint = (folder / "checkpoints" / "step_00000002.pt").read_bytes()
        # Attack them
        for number in range(count):
            way = rng.choice(CHECKPOINT_ATTACKS)
            fault = attack_checkpoint(checkpointer.directory, way(checkpoint, rng), way)
            if fault is not None:
                failures.append({"way": way.__name__, "number": number, "seed": seed, "fault": fault})
    finally:
        logging.disable(disabled)
        shutil.rmtree(folder)
    return {"tried": count, "contained": count - len(failures), "failures": failures}
