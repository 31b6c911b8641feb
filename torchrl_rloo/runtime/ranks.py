"""Ranks: the processes that train one model together, started by ``torchrun`` or ``torchrl-rloo run --ranks``."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchrl_rloo.runtime.threads import PackageThread

__all__ = ["RANK_TIMEOUT_S", "RankError", "Ranks"]

EXIT_CODE = 75  # exit status of a rank that ends because another one failed (EX_TEMPFAIL)
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}  # variables of the ranks except 0
RANK_TIMEOUT_S = 7200.0  # seconds that a rank waits for the others in one call; rank 0 may sample or evaluate for long
_STORE_S = 5.0  # for an answer of the store, whose process may be stopped

T = TypeVar("T")


class RankError(RuntimeError):
    """Error of another rank, or a wait for one that took too long."""


class Ranks:
    """Processes that train one model together; each has the same rows and the same random numbers.

    Rank 0 samples, evaluates and logs. All ranks train on their share of its rows. Consecutive ranks that split one
    copy of the model or its rows (tensor and context parallelism) have the same share.

    All ranks enter the same calls (:meth:`broadcast`, :meth:`all_gather`, :meth:`call`) in the same order. A wait in a
    call, also for rank 0 that samples, ends after ``timeout`` seconds. The first failure of a rank ends all: it raises
    its error, and each of the others prints one line that names it. The launcher ends those that are not in a call.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        device: device of this process.
        group: group of all ranks on the device's backend; None for a single process.
        control: group of all ranks on the CPU (gloo), for objects; None for a single process.
        tensor_parallel: consecutive ranks that split the matrices of each layer.
        context_parallel: ranks that split the tokens of each pass; each is a group of ``tensor_parallel`` ranks.
        store: store of the ranks, through which they tell each other of calls and failures. None names no ranks.
        timeout: seconds that a rank waits for the others in a call of later groups (:meth:`make_mesh`). None leaves
            torch's default.

    Attributes:
        is_main: True on rank 0.
        share_size: number of ranks with the same share of the rows.
        data_rank, data_size: number of the share of this rank, and number of shares.
        averaged: number of ranks over which DDP and FSDP average the gradients.
        place: current step or phase, which errors name after the call, such as ``"step 7"``.

    Example:
        >>> ranks = Ranks.single()
        >>> ranks.size, ranks.is_main, ranks.broadcast(lambda: 3)
        (1, True, 3)
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        device: torch.device | str = "cpu",
        group: distributed.ProcessGroup | None = None,
        control: distributed.ProcessGroup | None = None,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
        store: distributed.Store | None = None,
        timeout: float | None = None,
    ):
        split = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
        for name, value in split.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.tensor_parallel, self.context_parallel = tensor_parallel, context_parallel
        self.share_size = tensor_parallel * context_parallel
        if size % self.share_size:
            product = " * ".join(f"{name}={value}" for name, value in split.items())
            multiple = f"start a multiple of {self.share_size} ranks"
            raise ValueError(f"{product} must divide the number of ranks, {size}; {multiple}")
        self.data_rank, self.data_size = rank // self.share_size, size // self.share_size
        self.averaged = size // tensor_parallel
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.group, self.control, self.store, self.timeout = group, control, store, timeout
        self.is_main = rank == 0
        self.place = ""
        self._names: list[str] = []  # of the calls that this rank is in, outermost first
        self._calls, self._last = 0, "after the start"  # number of calls, and the last one in words

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> Ranks:
        """Return the ranks of a single process."""
        return cls(device=device)

    @classmethod
    def from_environment(
        cls,
        device: str = "cpu",
        *,
        timeout: float = RANK_TIMEOUT_S,
        group: bool = False,
        tensor_parallel: int = 1,
        context_parallel: int = 1,
    ) -> Ranks:
        """Join the ranks that ``torchrun`` or ``torchrl-rloo run --ranks`` started, or return a single one.

        ``device`` is ``"cpu"``, or ``"cuda"`` for the GPU with the number of the local rank. ``group=True`` forms a
        process group also for a single process without ``torchrun``, as DDP and FSDP require.

        Raises:
            ValueError: if the number of ranks does not fit, or ``timeout`` is not above 0.
            RankError: if not all ranks come within ``timeout``.
        """
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        split = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
        alone = "WORLD_SIZE" not in os.environ
        cls(size=int(os.environ.get("WORLD_SIZE", 1)), **split)  # check before the ranks wait for each other
        if alone and not group:
            return cls.single(device)
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
            torch.cuda.set_device(device)
        # Join; errors of the store name neither ranks nor limits
        backend = "nccl" if device.startswith("cuda") else "gloo"
        limit = timedelta(seconds=timeout)
        try:
            store, rank, size = distributed.HashStore(), 0, 1
            if not alone:
                store, rank, size = next(distributed.rendezvous("env://", timeout=limit))
            prefixed = distributed.PrefixStore("groups", store)
            distributed.init_process_group(backend, store=prefixed, rank=rank, world_size=size, timeout=limit)
        except distributed.DistError as error:
            wanted = f"rank {os.environ.get('RANK')} waited {timeout:g} s for {os.environ['WORLD_SIZE']} ranks to start"
            raise RankError(f"{wanted}: {_line(error)}") from error
        world = distributed.group.WORLD
        control = world if backend == "gloo" else distributed.new_group(backend="gloo", timeout=limit)
        store = store if size > 1 else None
        return cls(rank, size, device=device, group=world, control=control, store=store, timeout=timeout, **split)

    def make_mesh(self, **shape: int) -> DeviceMesh:
        """Arrange all ranks in a mesh of dimensions, the outermost first, whose groups have the ranks' time-out."""
        mesh = init_device_mesh(self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if self.timeout is not None:
            for group in mesh.get_all_groups():
                group.set_timeout(timedelta(seconds=self.timeout))
        return mesh

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Name a call that all ranks make together, for errors.

        An error of a collective inside becomes a :class:`RankError` that names the first failure, or the missing ranks.
        The name is equal on all ranks, such as ``"gradient, pass 3 of 4"``.
        """
        started = time.monotonic()
        self._names.append(name)
        where = ", ".join(filter(None, [*self._names, self.place]))
        self._calls, self._last = self._calls + 1, f"in {where}"
        if self.store is not None:
            with suppress(RuntimeError):  # without a store the ranks end in the collective
                self.store.set(f"call/{self.rank}", f"{self._calls} {where}")
        try:
            yield
            self._last = f"after {where}"
        except RuntimeError as error:
            if self.store is None or not _is_collective(error):
                raise
            raise RankError(self._blame(error, f"waited {time.monotonic() - started:.0f} s")) from None
        finally:
            self._names.pop()

    def broadcast(self, function: Callable[[], Any], name: str = "broadcast") -> Any:
        """Call a function on rank 0 and return its result, which can be pickled, on all ranks.

        Raises:
            RankError: on the other ranks, if the function raises on rank 0. Rank 0 raises the error itself.
        """
        if self.size == 1:
            return function()
        result, error = None, None
        if self.is_main:
            try:
                result = function()
            except BaseException as raised:
                error = raised
        with self.call(name):
            message = [_dump((result, None if error is None else f"{type(error).__name__}: {error}"))]
            distributed.broadcast_object_list(message, src=0, group=self.control)
            if error is not None:
                raise error
            if not self.is_main:
                result, text = pickle.loads(message[0])
                if text is not None:
                    raise RankError(f"rank 0 failed {self._last}: {text}")
        return result

    def on_main(self, function: Callable[[], T], name: str = "broadcast") -> T | None:
        """Call a function on rank 0 while the other ranks wait; return its result there and None on these."""
        result: list[T] = []
        self.broadcast(lambda: result.append(function()), name)
        return result[0] if result else None

    def log(self, text: str) -> None:
        """Print a text on rank 0."""
        if self.is_main:
            print(text, flush=True)

    def all_gather(self, value: Any, name: str = "all_gather") -> list[Any]:
        """Return the value of each rank, which can be pickled, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.call(name):
            distributed.all_gather_object(values, _dump(value), group=self.control)
        return [pickle.loads(told) for told in values]

    def close(self) -> None:
        """Leave the process group, after all ranks have come to their end."""
        if self.store is not None:  # rank 0 may hold the store, and the others use it in their last call
            with self.call("the end"):
                distributed.barrier(group=self.control)
        if self.group is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Leave the ranks; after an error, tell the others of it.

        Raises:
            SystemExit: with the code 75, if another rank failed first. One line about it has been printed.
        """
        if self.store is None or error is None or (isinstance(error, SystemExit) and not error.code):
            try:
                return self.close()
            except RankError as failed:  # another rank ends with an error
                error = failed
        if _is_collective(error):
            first = self._blame(error, "waited")
        else:
            own = f"rank {self.rank} failed {self._last}: {type(error).__name__}: {_line(error)}"
            first = self._first_failure(own)
            if first == own:
                return
        print(f"error: {first}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None

    def _blame(self, error: BaseException, waited: str) -> str:
        """Return the first failure of all ranks as a line, after an error of a collective on this one."""
        if isinstance(error, RankError):
            return str(error)
        missing = self._ask(self._find_missing, "")
        return self._first_failure(f"rank {self.rank} {waited} {self._last}: {_line(error)}{missing}")

    def _find_missing(self) -> str:
        """Return the ranks that did not come to the call of this rank, with their own last calls."""
        found = []
        for rank in set(range(self.size)) - {self.rank}:
            told = self.store.get(key).decode() if self.store.check([key := f"call/{rank}"]) else "0 none"
            calls, _, last = told.partition(" ")
            if int(calls) < self._calls:
                found.append(f"rank {rank} (last call: {last})")
        return f"; missing: {', '.join(found)}" if found else ""

    def _first_failure(self, text: str) -> str:
        """Return the first failure of any rank: that of this one, if the others know of none."""
        return self._ask(lambda: self.store.compare_set("failure", "", text).decode(), text)

    def _ask(self, question: Callable[[], str], default: str) -> str:
        """Return an answer of the store, or the default if the process that holds it has ended or hangs."""
        answers = [default]

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        # No call of a store has a limit that holds while its process is stopped
        thread = PackageThread(ask, name="store of the ranks")
        thread.start()
        thread.join(_STORE_S)
        return answers[-1]


class _Pickler(pickle.Pickler):
    """Pickler that writes the bytes of a tensor; torch's own takes 0.2 ms for each and writes the whole storage."""

    def reducer_override(self, value: Any) -> Any:
        plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested
        if not plain or value.device.type != "cpu" or value.requires_grad or value.is_quantized:
            return NotImplemented
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _restore_tensor, (data, value.dtype, tuple(value.shape))


def _restore_tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _dump(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(value)
    return stream.getvalue()


def _is_collective(error: BaseException) -> bool:
    """Return whether an error is about the ranks: another one may be to blame."""
    named = isinstance(error, RuntimeError) and re.search(r"gloo|nccl|Connection (closed|reset) by", str(error))
    return bool(named) or isinstance(error, RankError | distributed.DistError)


def _line(error: BaseException) -> str:
    """Return the first line of an error, without the C++ file that raised it and gloo's advice."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] |\. This is typically caused.*", "", lines[0])
