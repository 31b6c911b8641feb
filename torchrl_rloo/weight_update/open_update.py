"""OpenUpdate: an engine's view of one weight update, for any transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrl_rloo.runtime.lookup import import_object
from torchrl_rloo.weight_update.checksums import CHECKSUMS
from torchrl_rloo.weight_update.collective import Collective
from torchrl_rloo.weight_update.files import Files
from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.target import EngineError
from torchrl_rloo.weight_update.transport import Direct, Receiver, Transport
from torchrl_rloo.weight_update.vllm_ipc import VLLMIPC
from torchrl_rloo.weight_update.vllm_nccl import VLLMNCCL

TRANSPORTS: tuple[type[Transport], ...] = (Direct, SharedMemory, Collective, Files, VLLMNCCL, VLLMIPC)
RECEIVERS: dict[str, type[Receiver]] = {transport.name: transport.receiver for transport in TRANSPORTS}
ELSEWHERE = {"object_store": "torchrl_rloo.ray.object_store.ObjectStoreReceiver"}  # imported at the first use


class StaleStepError(EngineError):
    """Step of an update that is not open. It has no effect on the open one."""


def receiver_class(transport: str) -> type[Receiver]:
    """Return the receiving end of a transport, or raise EngineError if there is none of that name."""
    if transport in ELSEWHERE:
        return import_object(ELSEWHERE[transport], "receiver")
    if transport not in RECEIVERS:
        raise EngineError(f"transport={transport!r} must be one of {sorted(RECEIVERS | ELSEWHERE)}")
    return RECEIVERS[transport]


class OpenUpdate:
    """One weight update, whose buckets must arrive in order and uncorrupted, and contain the whole manifest.

    Args:
        manifest: tensors announced by ``connect``.
        version: version announced by ``start``.
        verify: whether ``start`` announced checksums. Without them, names, shapes and counts are checked.
        kind: kind of the checksums, as announced by ``connect``.

    Raises:
        EngineError: if the kind is unknown.

    Attributes:
        checksums: checksums of the buckets so far; None for a bucket without one.
        num_received: number of tensors in those buckets.
    """

    def __init__(self, manifest: Sequence[TensorInfo], version: int, *, verify: bool = True, kind: str = "xxh3"):
        if kind not in CHECKSUMS:
            raise EngineError(f"checksum={kind!r} must be one of {sorted(CHECKSUMS)}")
        self.manifest, self.version, self.verify, self.kind = manifest, version, verify, kind
        self.checksums: list[str | None] = []
        self.num_received = 0

    def take(self, info: Mapping[str, Any], receiver: Receiver | None) -> dict[str, torch.Tensor]:
        """Take the next bucket.

        Args:
            info: message of ``bucket``.
            receiver: source of the bucket's tensors. None trusts its checksum.

        Returns:
            The tensors by name; empty without a receiver.

        Raises:
            EngineError: if the bucket is not the next one of this update, or its tensors differ from the manifest or
                from its checksum.
        """
        first, last = info["first"], info["last"]
        at = f"bucket {info['bucket']} of version {info['version']}"
        # Check that it is the next bucket
        if self.version != info["version"]:
            raise EngineError(f"{at} arrived during the update to version {self.version}")
        if info["bucket"] != len(self.checksums):
            raise EngineError(f"{at} arrived, expected bucket {len(self.checksums)}")
        if first != self.num_received or not first < last <= len(self.manifest):
            due = f"tensor {self.num_received} of {len(self.manifest)}"
            raise EngineError(f"{at} has tensors {first} to {last - 1}, expected {due} next")

        if self.verify != (info["checksum"] is not None):
            raise EngineError(f"{at} has checksum={info['checksum']}, but start announced verify={self.verify}")

        # Receive its tensors and compare them with the manifest
        tensors = {}
        if receiver is not None:
            infos = self.manifest[first:last]
            received = receiver.receive(infos, info["payload"])
            _check_tensors(at, infos, received)
            if self.verify and (found := CHECKSUMS[self.kind](received)) != info["checksum"]:
                names = f"{infos[0].name} to {infos[-1].name}"
                raise EngineError(f"{at} ({names}) is corrupt: its checksum is {found}, expected {info['checksum']}")
            tensors = {i.name: t for i, t in zip(infos, received, strict=True)}
        self.num_received = last
        self.checksums.append(info["checksum"])
        return tensors

    def report(self) -> dict[str, Any]:
        """Return what a worker reports of the update."""
        return {"version": self.version, "checksums": self.checksums, "tensors": self.num_received}

    def complete(self) -> None:
        """Raise EngineError unless all tensors arrived."""
        if self.num_received != len(self.manifest):
            raise EngineError(
                f"the update to version {self.version} has {self.num_received} of {len(self.manifest)} tensors; "
                f"{self.manifest[self.num_received].name} is the first missing one"
            )


def require_open(update: OpenUpdate | None, info: Mapping[str, Any]) -> OpenUpdate:
    """Return the open update of a ``bucket`` or ``finish``, or raise StaleStepError if it is not open."""
    if update is None or update.version != info["version"]:
        open_one = "none" if update is None else f"one to version {update.version}"
        raise StaleStepError(f"no update to version {info['version']} is open ({open_one} is); start one first")
    return update


def _check_tensors(at: str, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) != len(infos):
        raise EngineError(f"{at} has {len(tensors)} tensors, but {len(infos)} were announced")
    for wanted, tensor in zip(infos, tensors, strict=True):
        if (found := TensorInfo.of(wanted.name, tensor)) != wanted:
            raise EngineError(
                f"{at} has {wanted.name} as {found.dtype} {list(found.shape)}, but {wanted.dtype} "
                f"{list(wanted.shape)} was announced"
            )
