"""Protocol between a trainer and engines: steps of a weight update, their messages, checksums, and errors.

An update consists of ``connect`` (once), ``start``, one ``bucket`` message per bucket, and ``finish``. All messages are
plain JSON, except for the tensors:

- connect: ``{"transport": name, "options": {...}, "manifest": [[name, dtype, shape], ...], "staged": bool, "checksum":
  kind, "frozen": [[name, dtype, shape, xxh3], ...]}``, with a kind of :data:`CHECKSUMS`, ``"xxh3"`` by default, and the
  tensors that will not be sent
- start: ``{"version": int, "verify": bool}``, with ``verify`` if all buckets have a checksum, which is the default
- bucket: ``{"version": int, "bucket": int, "first": int, "last": int, "checksum": str | None, "payload": {...}}``, with
  the tensors ``first`` to ``last - 1`` of the manifest
- finish: ``{"version": int}``, the version of the buckets
- adapter: ``{"version": int, "path": str, "checksum": str}``, with a directory in peft's format and the checksum of its
  tensors sorted by name

The report of ``finish`` is ``{"rank": int, "version": int, "checksums": [str | None, ...], "tensors": int}``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from xxhash import xxh3_64

if TYPE_CHECKING:
    from torchrl_rloo.weight_update.transport import Receiver

InFlight = Literal["finish", "abort", "continue"]
WeightStep = Literal["connect", "start", "bucket", "finish", "abort", "adapter"]
IN_FLIGHT: tuple[InFlight, ...] = ("finish", "abort", "continue")

ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
ALIGNMENT = 64  # bytes; the offset of a view must be a multiple of its element size

_CHUNK = 1 << 22  # words that are hashed at a time, to bound the temporary memory
_POSITION = -7046029254386353131  # odd 64-bit constants of SplitMix64, as signed integers
_MIX = -4658895280553007687
_FOLD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class EngineError(RuntimeError):
    """Failure of one request or step. The engine may still serve others."""


class EngineDeadError(EngineError):
    """Failure of a whole engine. Its ``restart`` starts it again from its checkpoint."""


class EngineTimeoutError(EngineError):
    """No answer from an engine within the time limit."""


class WeightTarget(ABC):
    """Base class of engines that receive weight updates.

    Attributes:
        version: policy version of the current weights. 0 is the checkpoint.
        start_count: number of restarts. A restart loses the connection and all weights sent before.
        in_process: True if the model is in this process, so that tensors may be passed by reference.
        reads_object_store: True if the engine is in an actor that can read Ray's object store.
        node_id: Ray's id of that actor's node; None without an actor.
        context_length: maximum number of tokens of a row; None if the engine does not report it.
        failed_version: version whose update failed halfway, or None. The engine then refuses to sample until an update
            succeeds.
    """

    version: int = 0
    start_count: int = 0
    in_process: bool = False
    reads_object_store: bool = False
    node_id: str | None = None
    context_length: int | None = None
    failed_version: int | None = None

    @abstractmethod
    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Execute one step of a weight update.

        - ``"connect"`` announces the tensors and their transport.
        - ``"start"`` opens an update.
        - ``"bucket"`` sends tensors.
        - ``"finish"`` activates the new weights and their version.
        - ``"abort"`` cancels an open update.
        - ``"adapter"`` loads a LoRA adapter.

        Args:
            step: name of the step.
            info: message of the step, see :mod:`torchrl_rloo.weight_update.protocol`.
            timeout: seconds to wait for the workers.

        Returns:
            One report per worker. The report of ``"finish"`` has the ``version`` and the ``checksums`` of the buckets.

        Raises:
            EngineTimeoutError: if a worker does not answer within ``timeout`` seconds.
            EngineError: if a worker fails, with its error.
        """

    @abstractmethod
    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        """Pause sampling and drop caches of the current weights.

        Args:
            in_flight: treatment of running requests. ``"finish"`` completes them first, ``"abort"`` ends them
                unfinished, and ``"continue"`` freezes them until :meth:`resume` continues them with the weights of
                that time.
            timeout: seconds to wait for running requests.
        """

    @abstractmethod
    def resume(self) -> None:
        """Resume sampling, with frozen and waiting requests first."""


class TargetGroup(ABC):
    """Base class of changing sets of engines, whose members are filled with weights one by one.

    A publisher attaches itself once. From then on no member samples before it was filled, neither at the start nor
    after a restart.
    """

    @abstractmethod
    def targets(self) -> list[WeightTarget]:
        """Return the engines that can take part in a push now. Dead, suspect and starting ones cannot."""

    @abstractmethod
    def attach(self, fill: Callable[[WeightTarget], None]) -> None:
        """Make all members wait for weights; only one publisher may be attached.

        After each restart the group calls ``fill`` on a thread, which gives one engine the latest weights. The engine
        samples once it has returned.
        """

    @abstractmethod
    def mark_filled(self, engine: WeightTarget, version: int) -> None:
        """Let an engine sample, since it has the weights of ``version``."""

    @abstractmethod
    def mark_failed(self, engine: WeightTarget, error: Exception) -> None:
        """Stop an engine from sampling, since a push failed in it. The group restarts it if needed, and refills it."""


def check_in_flight(in_flight: str) -> None:
    """Raise ValueError unless ``in_flight`` is one of :data:`IN_FLIGHT`."""
    if in_flight not in IN_FLIGHT:
        raise ValueError(f"in_flight={in_flight!r} must be one of {IN_FLIGHT}")


class TensorInfo(NamedTuple):
    """Name, dtype (such as ``"bfloat16"``) and shape of a tensor to send."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorInfo:
        """Describe a tensor, as it is or cast to ``dtype``."""
        return cls(name, str(dtype or tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype as a ``torch.dtype``."""
        return getattr(torch, self.dtype)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


def read_manifest(info: Mapping[str, Any]) -> list[TensorInfo]:
    """Return the manifest in the message of ``connect``."""
    return [TensorInfo(name, dtype, tuple(shape)) for name, dtype, shape in info["manifest"]]


def read_frozen(info: Mapping[str, Any]) -> list[tuple[TensorInfo, str]]:
    """Return the tensors that will not be sent, with their checksums, in the message of ``connect``."""
    return [
        (TensorInfo(name, dtype, tuple(shape)), checksum) for name, dtype, shape, checksum in info.get("frozen") or ()
    ]


def check_frozen(frozen: Sequence[tuple[TensorInfo, str]], own: Callable[[str], torch.Tensor]) -> None:
    """Raise EngineError unless the engine's tensors, by name, are those that the trainer does not send."""
    for info, expected in frozen:
        if (checksum := xxh3([own(info.name).to(info.torch_dtype)])) != expected:
            raise EngineError(
                f"the frozen tensor {info.name} has checksum {checksum} in the engine, but {expected} in the trainer; "
                "start the engine with the trainer's checkpoint and dtype, or send all tensors with train_vision=True"
            )


def plan_buckets(manifest: Sequence[TensorInfo], bucket_bytes: int) -> list[tuple[int, int]]:
    """Split a manifest into buckets ``(first, last)`` of at most ``bucket_bytes`` each; a larger tensor is a bucket."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
    if not manifest:
        raise ValueError("manifest=[] must have at least one tensor")
    buckets, first, filled = [], 0, 0
    for i, info in enumerate(manifest):
        size = _align(info.nbytes)
        if i > first and filled + size > bucket_bytes:
            buckets.append((first, i))
            first, filled = i, 0
        filled += size
    return [*buckets, (first, len(manifest))]


def packed_size(infos: Sequence[TensorInfo]) -> int:
    """Return the number of bytes that :func:`pack` needs."""
    return sum(_align(info.nbytes) for info in infos)


def pack(tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy tensors one after the other into ``buffer`` (uint8, ``[nbytes]``), which may be on another device."""
    infos = [TensorInfo.of("", t) for t in tensors]
    for view, tensor in zip(unpack(buffer, infos), tensors, strict=True):
        view.copy_(tensor)


def unpack(buffer: torch.Tensor, infos: Sequence[TensorInfo]) -> list[torch.Tensor]:
    """Return views of the tensors in a packed buffer (uint8, ``[nbytes]``)."""
    views, offset = [], 0
    for info in infos:
        views.append(buffer[offset : offset + info.nbytes].view(info.torch_dtype).view(info.shape))
        offset += _align(info.nbytes)
    return views


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def xxh3(tensors: Sequence[torch.Tensor]) -> str:
    """Return the XXH3-64 of the tensors' bytes in order; copying GPU tensors takes far longer than the hash."""
    digest = xxh3_64()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def device_sum(tensors: Sequence[torch.Tensor]) -> str:
    """Return a checksum of the tensors' bytes in order, computed on the device of each tensor.

    Each word is mixed with its position before the words are summed in 64-bit integers. The sum therefore does not
    depend on the device or on the order of the addition, and a moved or changed word changes it.
    """
    sums = [_sum_words(tensor.detach()) for tensor in tensors]
    # Copy the sums of each device to the host at once, since each copy waits for the device
    totals: list[int] = [0] * len(sums)
    for device in {one.device for one in sums}:
        places = [i for i, one in enumerate(sums) if one.device == device]
        values = torch.stack([sums[i] for i in places]).tolist()
        for i, value in zip(places, values, strict=True):
            totals[i] = value
    digest = 0
    for total, tensor in zip(totals, tensors, strict=True):
        digest = (digest * _FOLD + total + tensor.nbytes + 1) & _MASK
    return f"{digest:016x}"


def _sum_words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed words of a tensor, ``[]`` in int64."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4 == 0:
        if data.storage_offset() % 4:
            data = data.clone()
        data = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, data.numel(), _CHUNK):
        words = data[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start + 1, start + 1 + words.numel(), dtype=torch.int64, device=tensor.device)
        words += positions.mul_(_POSITION)
        words ^= words >> 31
        words *= _MIX
        words ^= words >> 29
        total += words.sum()
    return total


CHECKSUMS: dict[str, Callable[[Sequence[torch.Tensor]], str]] = {"xxh3": xxh3, "device": device_sum}


class StaleStepError(EngineError):
    """Step of an update that is not open. It has no effect on the open one."""


class OpenUpdate:
    """An engine's view of one weight update: buckets must arrive in order, intact, and cover the whole manifest.

    Without ``verify``, names, shapes and counts are checked, but no checksums.
    """

    def __init__(self, manifest: Sequence[TensorInfo], version: int, *, verify: bool = True, kind: str = "xxh3"):
        if kind not in CHECKSUMS:
            raise EngineError(f"checksum={kind!r} must be one of {sorted(CHECKSUMS)}")
        self.manifest, self.version, self.verify, self.kind = manifest, version, verify, kind
        self.checksums: list[str | None] = []  # of the buckets so far
        self.num_received = 0  # tensors in those buckets

    def take(self, info: Mapping[str, Any], receiver: Receiver | None) -> dict[str, torch.Tensor]:
        """Return the tensors of the next bucket by name; without a receiver, trust its checksum and return none."""
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
            if self.verify and (checksum := CHECKSUMS[self.kind](received)) != info["checksum"]:
                names = f"{infos[0].name} to {infos[-1].name}"
                raise EngineError(f"{at} ({names}) is corrupt: its checksum is {checksum}, expected {info['checksum']}")
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
    for announced, tensor in zip(infos, tensors, strict=True):
        if (received := TensorInfo.of(announced.name, tensor)) != announced:
            raise EngineError(
                f"{at} has {announced.name} as {received.dtype} {list(received.shape)}, but {announced.dtype} "
                f"{list(announced.shape)} was announced"
            )
