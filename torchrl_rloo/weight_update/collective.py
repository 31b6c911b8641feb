"""Weights by broadcast over a process group of their own, for engines on other machines or other GPUs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchrl_rloo.modules.engines.receivers import broadcast, join_group
from torchrl_rloo.modules.engines.weight_protocol import TensorInfo, pack, packed_size
from torchrl_rloo.weight_update.transports import Transport


class Collective(Transport):
    """Broadcasts each bucket as one packed buffer from the trainer, rank 0, to all workers of all engines.

    Args:
        backend: ``"gloo"`` between CPUs, ``"nccl"`` between GPUs, of which the trainer's is the current device.
        host: an address of this machine that the engines reach.
        port: where they meet on it; 0 takes a free one.

    Raises:
        ValueError: for another backend.
    """

    name = "collective"

    def __init__(self, backend: Literal["gloo", "nccl"] = "gloo", host: str = "127.0.0.1", port: int = 0):
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r} must be 'gloo' or 'nccl'")
        self.backend, self.host, self.port = backend, host, port
        self._groups = 0  # joined so far: each has its own names in the store
        self._sender: _Sender | None = None
        self._buffers: list[torch.Tensor] = []

    def open(self, workers: Sequence[int], nbytes: int, timeout: float) -> list[dict[str, Any]]:
        self.close()
        store = dist.TCPStore(
            self.host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,  # a group that failed may still have the store on this port
        )
        self._groups += 1
        group, world_size = f"weights-{self._groups}", 1 + sum(workers)
        device = torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._sender = _Sender(
            self.backend, dist.PrefixStore(group, store), self.host, world_size, timeout=timeout, device=device
        )
        self._stop = weakref.finalize(self, self._sender.stop)  # its thread would wait for ever
        options = {"backend": self.backend, "host": self.host, "port": store.port, "group": group}
        options |= {"world_size": world_size, "timeout": timeout}
        offsets = accumulate(workers, initial=1)
        return [options | {"rank_offset": offset} for offset, _ in zip(offsets, workers, strict=False)]

    def connected(self) -> None:
        self._sender.wait_joined()

    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        buffer = self._buffers[bucket % 2][: packed_size(infos)]
        pack(tensors, buffer)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()  # the broadcast is on another thread's stream
        self._sender.send(buffer)
        return {}

    def close(self) -> None:
        if self._sender is not None:
            self._stop()
        self._sender, self._buffers = None, []


class _Sender:
    """A daemon thread that has the group to itself: if a peer is lost, the thread hangs until the time-out, alone."""

    def __init__(self, *join: Any, timeout: float, device: torch.device):
        self._timeout = timeout
        self._joined: Future[None] = Future()
        self._failure: Exception | None = None
        self._queue: SimpleQueue[torch.Tensor | None] = SimpleQueue()
        threading.Thread(target=self._run, args=(join, device), name="weight broadcast", daemon=True).start()

    def wait_joined(self) -> None:
        try:
            self._joined.result(self._timeout)
        except TimeoutError as error:
            raise TimeoutError(f"the workers have not joined the trainer's group in {self._timeout:g} s") from error

    def send(self, buffer: torch.Tensor) -> None:
        if self._failure is not None:
            raise self._failure
        self._queue.put(buffer)

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self, join: Sequence[Any], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            backend, store, address, world_size = join
            group = join_group(backend, store, address, 0, world_size, self._timeout)
        except Exception as error:
            self._joined.set_exception(error)
            return
        self._joined.set_result(None)
        try:
            while (buffer := self._queue.get()) is not None:
                broadcast(group, buffer, self._timeout)
        except Exception as error:
            self._failure = error
        finally:
            group.abort()
