"""Ranks: the processes that train one model together, started by ``torchrun`` or ``torchrl-rloo run --ranks``."""

from __future__ import annotations

import atexit
import io
import os
import pickle
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchrl_rloo.runtime.ranks_watch import EXIT_CODE, RankError, Watch, connect

__all__ = ["RANK_TIMEOUT_S", "RankError", "Ranks"]

RANK_TIMEOUT_S = 1800.0  # seconds that a rank waits for the others in one call
_POLL_S = 0.1  # between attempts to reach rank 0

T = TypeVar("T")


class Ranks:
    """Processes that train one model together; each has the same rows and the same random numbers.

    Rank 0 samples, evaluates and logs. All ranks train on their share of its rows. Consecutive ranks that split one
    copy of the model or its rows (tensor and context parallelism) have the same share.

    All ranks enter the same calls (:meth:`broadcast`, :meth:`all_gather`, :meth:`call`) in the same order. The others
    wait for rank 0 without a limit, because it may sample or evaluate for hours; they notice its end at once. Every
    other wait ends after ``timeout`` seconds. The first failure of a rank ends all: it prints its traceback, and each
    of the others one line that names it. This covers errors, kills, stopped processes and lost machines.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        device: device of this process.
        group: group of all ranks on the device's backend. None for a single process.
        control: group of all ranks on the CPU (gloo), for objects and waits. None for a single process.
        tensor_parallel: consecutive ranks that split the matrices of each layer.
        context_parallel: ranks that split the tokens of each pass; each is a group of ``tensor_parallel`` ranks.
        watch: exchange of calls and failures with the other ranks. None only fails by the time-outs of the groups.
        timeout: seconds that a rank waits for the others in a call of later groups (:meth:`make_mesh`). None leaves
            torch's default.

    Raises:
        ValueError: if ``tensor_parallel * context_parallel`` is below 1 or does not divide ``size``.

    Attributes:
        is_main: True on rank 0.
        share_size: number of ranks with the same share of the rows.
        data_rank: number of the share of this rank.
        data_size: number of shares.
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
        watch: Watch | None = None,
        timeout: float | None = None,
    ):
        for name, value in (("tensor_parallel", tensor_parallel), ("context_parallel", context_parallel)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if size % (tensor_parallel * context_parallel):
            raise ValueError(
                f"tensor_parallel={tensor_parallel} * context_parallel={context_parallel} must divide the number of "
                f"ranks, {size}; start a multiple of {tensor_parallel * context_parallel} ranks"
            )
        self.tensor_parallel, self.context_parallel = tensor_parallel, context_parallel
        self.share_size = tensor_parallel * context_parallel
        self.data_rank, self.data_size = rank // self.share_size, size // self.share_size
        self.averaged = size // tensor_parallel
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.group, self.control, self.watch, self.timeout = group, control, watch, timeout
        self.is_main = rank == 0
        self.place = ""
        self._names: list[str] = []  # of the calls that this rank is in, outermost first

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

        Args:
            device: ``"cpu"``, or ``"cuda"`` for one GPU per rank, the one with the number of the local rank.
            timeout: seconds that a rank waits for the others in one call.
            group: form a process group also for a single process without ``torchrun``, as DDP and FSDP require.
            tensor_parallel: ranks that split the matrices of each layer.
            context_parallel: ranks that split the tokens of each pass.

        Raises:
            ValueError: if the variables of ``torchrun`` are incomplete, the number of ranks does not fit, or
                ``timeout`` is not above 0.
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
        if os.environ.get("RANK", "0") != "0":
            _await_rank_0(timeout)
        try:
            store = {"store": distributed.HashStore(), "rank": 0, "world_size": 1} if alone else {}
            distributed.init_process_group(backend, timeout=limit, **store)
        except distributed.DistError as error:
            wanted = f"rank {os.environ.get('RANK')} waited {timeout:g} s for {os.environ['WORLD_SIZE']} ranks to start"
            raise RankError(f"{wanted}: {_line(error)}") from error
        world, rank, size = distributed.group.WORLD, distributed.get_rank(), distributed.get_world_size()
        control = world if backend == "gloo" else distributed.new_group(backend="gloo", timeout=limit)
        ranks = cls(rank, size, device=device, group=world, control=control, timeout=timeout, **split)
        # Watch the other ranks, on one machine by its loopback address
        if size > 1:
            local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
            connections = connect(rank, size, ranks._share, None if local else os.environ["MASTER_ADDR"], timeout)
            ranks.watch = Watch(rank, connections, timeout)
            atexit.register(ranks._close_at_exit)
        return ranks

    def make_mesh(self, **shape: int) -> DeviceMesh:
        """Arrange all ranks in a device mesh, whose groups have the time-out of the ranks; a collective call.

        Args:
            **shape: size of each dimension by its name, the outermost first. Their product is the number of ranks.
        """
        mesh = init_device_mesh(self.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        if self.timeout is not None:
            for group in mesh.get_all_groups():
                group.set_timeout(timedelta(seconds=self.timeout))
        return mesh

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Name a call that all ranks make together, for errors, and wait until rank 0 makes it.

        An error of a collective inside becomes a :class:`RankError` that names the call and the missing ranks.

        Args:
            name: name of the call, equal on all ranks, such as ``"gradient, pass 3 of 4"``.

        Raises:
            RankError: if another rank failed, did not come, or came to another call.
        """
        started = time.monotonic()
        self._names.append(name)
        try:
            if self.watch is not None:
                self.watch.enter(self._where())
                self.watch.is_inside = True
            yield
        except RuntimeError as error:
            if self.watch is None or not _is_collective(error):
                raise
            raise RankError(self._blame(error, time.monotonic() - started)) from None
        finally:
            self._names.pop()
            if self.watch is not None and not sys.exc_info()[0]:
                self.watch.is_inside = bool(self._names)

    def broadcast(self, function: Callable[[], Any], name: str = "broadcast") -> Any:
        """Call a function on rank 0 and return its result on all ranks, which wait for it without a limit.

        Args:
            function: function without arguments, whose result can be pickled.
            name: name of the call in errors.

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
            result, text = self._share((result, None if error is None else f"{type(error).__name__}: {error}"))
            if error is not None:
                raise error
            if text is not None:
                raise RankError(f"rank 0 failed in {self._where()}: {text}")
        return result

    def on_main(self, function: Callable[[], T], name: str = "broadcast") -> T | None:
        """Call a function on rank 0 while the other ranks wait; return its result there and None on these.

        Args:
            function: function without arguments.
            name: name of the call in errors.

        Raises:
            RankError: on the other ranks, if the function raises on rank 0. Rank 0 raises the error itself.
        """
        result: list[T] = []
        self.broadcast(lambda: result.append(function()), name)
        return result[0] if result else None

    def log(self, text: str) -> None:
        """Print a text on rank 0."""
        if self.is_main:
            print(text, flush=True)

    def all_gather(self, value: Any, name: str = "all_gather") -> list[Any]:
        """Return the value of each rank, in the order of the ranks.

        Args:
            value: value of this rank, which can be pickled.
            name: name of the call in errors.

        Raises:
            RankError: if another rank failed or did not come.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.call(name):
            distributed.all_gather_object(values, _dump(value), group=self.control)
        return [pickle.loads(told) for told in values]

    def close(self) -> None:
        """Leave the other ranks and the process group."""
        if self.watch is not None:
            atexit.unregister(self._close_at_exit)
            self.watch.leave()
        if self.group is not None and distributed.is_initialized():
            distributed.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Leave the ranks; after an error, end them all.

        Raises:
            SystemExit: with the code 75, if another rank failed first. One line about it has been printed.
        """
        finished = error is None or isinstance(error, SystemExit) and not error.code
        if finished or self.watch is None:
            return self.close()
        atexit.unregister(self._close_at_exit)
        if self._report(error).rank != self.rank:
            raise SystemExit(EXIT_CODE) from None
        _print_once(error)

    def _report(self, error: BaseException):
        """Tell the other ranks of an error, and print it if this rank failed first; return the first failure."""
        if isinstance(error, RankError) and self.watch.failure is not None:
            return self.watch.fail(str(error), waited=True)
        if _is_collective(error):
            waited = f"rank {self.rank} waited in vain after {self.watch.name}: {_line(error)}"
            return self.watch.fail(str(error) if isinstance(error, RankError) else waited, waited=True)
        silent = isinstance(error, SystemExit)  # its raiser has printed the reason
        text = f"{type(error).__name__}: {_line(error)}"
        return self.watch.fail(text, show=lambda: None if silent else traceback.print_exception(error))

    def _blame(self, error: RuntimeError, seconds: float) -> str:
        """Return the first failure of all ranks as a line, after an error of a collective."""
        waited = f"rank {self.rank} waited {seconds:.0f} s in {self._where()}: {_line(error)}"
        return self.watch.fail(str(error) if isinstance(error, RankError) else waited, waited=True).text

    def _where(self) -> str:
        return ", ".join([*self._names, *([self.place] if self.place else [])])

    def _share(self, value: Any) -> Any:
        """Return the value of rank 0 on all ranks."""
        message = [_dump(value) if self.is_main else None]
        distributed.broadcast_object_list(message, src=0, group=self.control)
        return value if self.is_main else pickle.loads(message[0])

    def _close_at_exit(self) -> None:
        """Leave the ranks at the end of a process that did not, after an error that Python printed as a failure."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.watch.fail(f"{type(error).__name__}: {_line(error)}")
        self.watch.leave()


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


def _print_once(error: BaseException) -> None:
    """Keep Python from printing the traceback of an error again."""
    hook = sys.excepthook
    sys.excepthook = lambda kind, value, trace: None if value is error else hook(kind, value, trace)


def _await_rank_0(timeout: float) -> None:
    """Wait until the store of rank 0 listens. The client of torch would try for up to three times its limit.

    Raises:
        RankError: if it does not within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:  # torch names a missing one
        left = max(_POLL_S, deadline - time.monotonic())
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), left).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                waited = f"rank {os.environ['RANK']} waited {timeout:g} s for rank 0 to start"
                raise RankError(f"{waited}: {error}") from error
        time.sleep(_POLL_S)


def _is_collective(error: BaseException) -> bool:
    """Return whether an error is about the ranks: another one may be to blame."""
    if isinstance(error, RankError | distributed.DistError):
        return True
    return (
        isinstance(error, RuntimeError) and re.search(r"gloo|nccl|Connection (closed|reset) by", str(error)) is not None
    )


def _line(error: BaseException) -> str:
    """Return the first line of an error, without the C++ file that raised it."""
    lines = str(error).strip().splitlines() or [""]
    return re.sub(r"^\[[^]]*\.(cc|cpp|h):\d+\] ", "", lines[0])
