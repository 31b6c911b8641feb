"""Collective transport: broadcasts over a separate process group, for engines on other machines or GPUs."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from hmac import compare_digest
from typing import Any, Literal

import torch
import torch.distributed as dist

from torchrl_rloo.weight_update.protocol import TensorInfo, packed_size, unpack
from torchrl_rloo.weight_update.rendezvous import DIGEST_BYTES, RemoteStore, Rendezvous, prove
from torchrl_rloo.weight_update.sender import SenderThread
from torchrl_rloo.weight_update.transport import Link, PackedStorage, Receiver, Transport

_PROOF_SECONDS = 60.0  # limit for the proofs of all members


class CollectiveReceiver(Receiver):
    """Receiver that joins the trainer's group and takes its broadcasts."""

    def __init__(self, options: Mapping[str, Any], device: torch.device, rank: int):
        self.timeout = options["timeout"]
        self.device = device if options["backend"] == "nccl" else torch.device("cpu")
        self.store = RemoteStore(options, self.timeout)
        try:
            self.group = _join_group(
                options["backend"],
                self.store,
                self.store.address,
                rank + 1,  # the trainer is rank 0
                options["world_size"],
                self.timeout,
            )
            _check_members(self.group, bytes.fromhex(options["secret"]), self.device, self.timeout)
        except BaseException:
            self.store.close()
            raise

    def receive(self, infos: Sequence[TensorInfo], payload: Mapping[str, Any]) -> list[torch.Tensor]:
        buffer = torch.empty(packed_size(infos), dtype=torch.uint8, device=self.device)
        _broadcast(self.group, buffer, self.timeout)
        return unpack(buffer, infos)

    def close(self) -> None:
        self.group.abort()
        self.group = None
        self.store.close()


class CollectiveLink(Link):
    """Group of the trainer and the workers of one engine, with a thread that broadcasts."""

    def __init__(self, options: Mapping[str, Any], sender: SenderThread, device: torch.device):
        super().__init__(options)
        self._sender, self._device = sender, device
        self.close = weakref.finalize(self, sender.stop)  # otherwise its thread would never end

    def joined(self) -> None:
        self._sender.wait_joined()

    def send(self, stored: torch.Tensor) -> dict[str, Any]:
        buffer = stored.to(self._device)
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()  # the broadcast is on another thread's stream
        self._sender.send(buffer)
        return {}


class Collective(Transport):
    """Transport that broadcasts each bucket as one packed buffer from the trainer to all workers of an engine.

    Each engine has a group, so that a dead or hung engine does not break the broadcasts to others.

    The trainer listens on ``host`` only. A group has a fresh secret, which the engine's connection carries to its
    workers. A process joins by proofs that it knows the secret, and no weights are sent before all members have shown
    proofs over the group itself. The weights are not encrypted, so ``host`` should be in a private network.

    The sockets of gloo on ``host`` accept anyone while a group forms. A stranger who is faster than a worker gets no
    weights, but fails the update after at most a minute. The next push forms another group.

    Args:
        backend: ``"gloo"`` for CPUs or ``"nccl"`` for GPUs. With NCCL the trainer uses its current device.
        host: address of this machine that engines can reach, or its name.
        port: port on this machine. 0 takes a free one.

    Raises:
        ValueError: if the backend is unknown.
    """

    name, receiver = "collective", CollectiveReceiver

    def __init__(self, backend: Literal["gloo", "nccl"] = "gloo", host: str = "127.0.0.1", port: int = 0):
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r} must be 'gloo' or 'nccl'")
        self.backend, self.host, self.port = backend, host, port
        self._spare: PackedStorage | None = None

    def store(self, version: int, sizes: Sequence[int], keep: bool) -> PackedStorage:
        spare, self._spare = self._spare, None
        window = None if keep else 2
        if spare is not None and spare.sizes == list(sizes) and spare.window == window:
            return spare
        nbytes = sum(sizes) if keep else 2 * max(sizes)
        device = torch.device("cpu") if keep else self._device()  # device memory is scarce
        return PackedStorage(torch.empty(nbytes, dtype=torch.uint8, device=device), sizes, window)

    def release(self, storage: PackedStorage, reusable: bool) -> None:
        self._spare = storage if reusable else None

    def connect(self, workers: int, timeout: float, node_id: str | None = None) -> CollectiveLink:
        group, world_size, device = Rendezvous.open_group(self.host, self.port, timeout), 1 + workers, self._device()

        def join() -> dist.ProcessGroup:
            found = _join_group(self.backend, group.store, group.rendezvous.address, 0, world_size, timeout)
            _check_members(found, group.secret, device, timeout)
            return found

        sender = SenderThread(
            join,
            lambda found, buffer: _broadcast(found, buffer, timeout),
            lambda found: found.abort(),
            group.close,
            device=device,
            timeout=timeout,
        )
        options = {"backend": self.backend, "host": self.host, "world_size": world_size, "timeout": timeout}
        return CollectiveLink(options | group.options(), sender, device)

    def close(self) -> None:
        self._spare = None

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")


def _join_group(
    backend: str, store: dist.Store, address: str, rank: int, world_size: int, timeout: float
) -> dist.ProcessGroup:
    """Join a separate process group: vLLM's worker and a sharded trainer use the default one.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        store: rendezvous of the members.
        address: address of this machine that the other members can reach.
        rank: rank of this process in the group. The trainer is 0.
        world_size: number of members, including the trainer.
        timeout: seconds to wait for the other members.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # Double the time-out: the wait in _broadcast then raises first, and NCCL does not abort the process
        options._timeout = timedelta(seconds=2 * timeout)
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=timeout)
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _check_members(group: dist.ProcessGroup, secret: bytes, device: torch.device, timeout: float) -> None:
    """Raise PermissionError unless every member proves over the group that it knows the secret."""
    rank, limit = group.rank(), min(timeout, _PROOF_SECONDS)
    try:
        nonces = b"".join(_exchange(group, secrets.token_bytes(DIGEST_BYTES), device, limit))
        proofs = _exchange(group, prove(secret, rank.to_bytes(4, "big"), nonces), device, limit)
    except RuntimeError as error:
        raise PermissionError(
            f"no proof from every member of the group within {limit:g} s; another process may have taken a worker's "
            "place: use a private host, and push again"
        ) from error
    wrong = [
        r for r, proof in enumerate(proofs) if not compare_digest(proof, prove(secret, r.to_bytes(4, "big"), nonces))
    ]
    if wrong:
        raise PermissionError(f"rank={wrong[0]} of the group does not know its secret; use a private host")


def _exchange(group: dist.ProcessGroup, mine: bytes, device: torch.device, timeout: float) -> list[bytes]:
    """Return the bytes of every member, which are as many as this one's."""
    found = []
    for root in range(group.size()):
        buffer = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        _broadcast(group, buffer, timeout, root)
        found.append(bytes(buffer.tolist()))
    return found


def _broadcast(group: dist.ProcessGroup, buffer: torch.Tensor, timeout: float, root: int = 0) -> None:
    """Fill ``buffer`` from a rank within ``timeout`` seconds."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([buffer], options).wait(timedelta(seconds=timeout))
