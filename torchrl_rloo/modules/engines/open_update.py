"""The receiving end of a weight update, the same in every engine: buckets in order, whole, and nothing missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchrl_rloo.modules.engines.base import EngineError
from torchrl_rloo.modules.engines.receivers import Receiver
from torchrl_rloo.modules.engines.weight_protocol import TensorInfo, checksum


class OpenUpdate:
    """The receiving end of one update: that its buckets come in order, are whole, and are the whole manifest.

    Args:
        manifest: of ``connect``: what the update will bring.

    Attributes:
        version: of the first bucket, None before it came.
        checksums: of the buckets taken.
        taken: how many tensors of the manifest those brought.
    """

    def __init__(self, manifest: Sequence[TensorInfo]):
        self.manifest = manifest
        self.version: int | None = None
        self.checksums: list[str] = []
        self.taken = 0

    def take(self, info: Mapping[str, Any], receiver: Receiver | None) -> dict[str, torch.Tensor]:
        """Takes the next bucket.

        Args:
            info: ``bucket`` of the protocol.
            receiver: where its tensors come from; None takes its checksum on trust.

        Returns:
            Its tensors by name; none without a receiver.

        Raises:
            EngineError: if it is not the next of this update, its tensors are not those of the manifest, or they do not
                have its checksum.
        """
        first, last = info["first"], info["last"]
        at = f"bucket {info['bucket']} of version {info['version']}"
        if self.version not in (None, info["version"]):
            raise EngineError(f"{at} came within the update to version {self.version}")
        if info["bucket"] != len(self.checksums):
            raise EngineError(f"{at} came where bucket {len(self.checksums)} was due")
        if first != self.taken or not first < last <= len(self.manifest):
            due = f"tensor {self.taken} of {len(self.manifest)} was due"
            raise EngineError(f"{at} brings tensors {first} to before {last}, where {due}")
        tensors = {}
        if receiver is not None:
            infos = self.manifest[first:last]
            received = receiver.receive(infos, info["payload"])
            _compare(at, infos, received, info["checksum"])
            tensors = {i.name: t for i, t in zip(infos, received, strict=True)}
        self.version, self.taken = info["version"], last
        self.checksums.append(info["checksum"])
        return tensors

    def complete(self, version: int) -> None:
        """Raises EngineError unless everything has come, and is of this version."""
        if self.taken != len(self.manifest):
            raise EngineError(
                f"the update to version {version} brought {self.taken} of {len(self.manifest)} tensors: "
                f"{self.manifest[self.taken].name} is the first that did not come"
            )
        if version != self.version:
            raise EngineError(f"the buckets were of version {self.version}, but finish is of version {version}")


def _compare(at: str, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor], expected: str) -> None:
    if len(tensors) != len(infos):
        raise EngineError(f"{at} brought {len(tensors)} tensors, not the {len(infos)} announced")
    for wanted, tensor in zip(infos, tensors, strict=True):
        if (found := TensorInfo.of(wanted.name, tensor)) != wanted:
            raise EngineError(
                f"{at} brought {wanted.name} as {found.dtype} {list(found.shape)}, announced as {wanted.dtype} "
                f"{list(wanted.shape)}"
            )
    if (digest := checksum(tensors)) != expected:
        names = f"{infos[0].name} to {infos[-1].name}"
        raise EngineError(f"{at}, with {names}, is corrupt: its checksum is {digest}, not {expected}")


def read_manifest(info: Mapping[str, Any]) -> list[TensorInfo]:
    """The manifest in ``connect``'s words."""
    return [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in info["manifest"]]
