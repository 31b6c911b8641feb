"""WeightPublisher: sends all weights to engines in buckets, which each engine confirms by checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal, NamedTuple

import torch
from torch import nn

from torchrl_rloo.weight_update.delivery import Deliveries, Delivery, Snapshot
from torchrl_rloo.weight_update.protocol import (
    CHECKSUMS,
    EngineError,
    InFlight,
    TargetGroup,
    TensorInfo,
    WeightTarget,
    packed_size,
    plan_buckets,
)
from torchrl_rloo.weight_update.publisher import Publisher
from torchrl_rloo.weight_update.source import GatherOrder, WeightSource, store_buckets
from torchrl_rloo.weight_update.transport import Storage, Transport, find_transport


class Push(NamedTuple):
    """Measurements of a push.

    Attributes:
        version: policy version of the weights.
        seconds: duration from the begin of staging to the last resume.
        bytes: size of the tensors, counted once for any number of engines.
        buckets: number of buckets.
        still_seconds: time that each engine stood still, from its pause to its resume.
    """

    version: int
    seconds: float
    bytes: int
    buckets: int
    still_seconds: tuple[float, ...]

    @property
    def bytes_per_second(self) -> float:
        """Throughput of the push in bytes per second."""
        return self.bytes / self.seconds


@dataclass(eq=False, kw_only=True)
class WeightSnapshot(Snapshot):
    """Buckets of a version in the storage of a transport."""

    manifest: list[TensorInfo]
    frozen: list[tuple[TensorInfo, str]]
    buckets: list[tuple[int, int]]
    transport: Transport
    storage: Storage
    verify: bool
    sends_now: bool  # True if the buckets are staged while they are stored; False if each engine loads them later
    checksums: list[str | None] = field(default_factory=list)


class WeightPublisher(Publisher):
    """Updater that sends all weights of a training model to engines, in place of TorchRL's ``vLLMUpdater``.

    A push has two phases. The publisher gathers each bucket once, stores it in a snapshot, and stages it in all engines
    while they sample. Then each engine pauses, loads what it has staged, confirms every bucket, drops its caches, and
    resumes. The snapshot stays until the next version is in use, so that :meth:`fill` can give it to one engine.

    All ranks of a sharded model make one updater each and the same calls. Rank 0 sends. With :class:`SharedMemory` and
    ``ObjectStore``, every rank on its machine writes its share of the snapshot; with other transports, the others send
    theirs to rank 0 bucket by bucket. Only rank 0 needs engines.

    Args:
        source: training model, or its :class:`~torchrl_rloo.weight_update.source.WeightSource`.
        engines: one or more engines, or a :class:`~torchrl_rloo.weight_update.protocol.TargetGroup` such as an
            ``EnginePool``. Other ranks pass ``[]``.
        transport: transport of the tensors. ``"auto"`` takes :class:`Direct` if all engines are in this process,
            ``ObjectStore`` if all are in Ray actors, and otherwise :class:`SharedMemory`.
        bucket_bytes: largest size of a bucket. A larger tensor is a bucket by itself.
        staged: if True, workers keep all buckets until they load them at once. Engines sample in the first phase, and
            a failure in it leaves them with their old weights. If False, engines pause first and load each
            bucket as it arrives, which needs no memory in the workers. An engine that fails halfway then refuses to
            sample until a push succeeds.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        timeout: seconds that one step may take in one engine: draining its requests, connecting, one bucket, ...
        checksum: ``"xxh3"`` hashes on the host. ``"device"`` sums on the device of each tensor, which spares copies of
            GPU tensors to the host.
        verify_every: number of pushes of which one carries checksums. The others check names, shapes and counts.

    Raises:
        ValueError: if there are no engines or an argument is out of range.

    Attributes:
        last_push: measurements of the last successful push. None before the first.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.engines.transformers_engine import TransformersEngine
        >>> tokenizer = build_tokenizer()
        >>> engine = TransformersEngine(build_model(tokenizer, seed=0).eval())
        >>> publisher = WeightPublisher(build_model(tokenizer, seed=1), engine)
        >>> publisher.push_weights()
        1
        >>> engine.version, publisher.last_push.buckets
        (1, 1)
    """

    def __init__(
        self,
        source: nn.Module | WeightSource,
        engines: WeightTarget | Sequence[WeightTarget] | TargetGroup,
        *,
        transport: Literal["auto"] | Transport = "auto",
        bucket_bytes: int = 64 << 20,
        staged: bool = True,
        in_flight: InFlight = "finish",
        timeout: float = 120.0,
        checksum: Literal["xxh3", "device"] = "xxh3",
        verify_every: int = 1,
    ):
        self.source = WeightSource(source) if isinstance(source, nn.Module) else source
        super().__init__(
            self.source.model,
            engines,
            sends=self.source.sends,
            in_flight=in_flight,
            timeout=timeout,
        )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        if checksum not in CHECKSUMS:
            raise ValueError(f"checksum={checksum!r} must be one of {sorted(CHECKSUMS)}")
        if verify_every < 1:
            raise ValueError(f"verify_every={verify_every} must be at least 1")
        self.transport, self.bucket_bytes, self.staged = self._choose(transport), bucket_bytes, staged
        self.checksum, self.verify_every = checksum, verify_every
        self.last_push: Push | None = None
        self._pushes = 0
        if self.group is not None and self.sends:
            self.group.attach(self.fill)

    def _choose(self, transport: Literal["auto"] | Transport) -> Transport:
        """Return a transport that reaches all engines."""
        if transport != "auto" and not isinstance(transport, Transport):
            raise ValueError(f"transport={transport!r} must be 'auto' or a Transport, such as SharedMemory()")
        known = self.engines if self.group is None or not self.sends else self.group.targets()
        elsewhere = [engine for engine in known if not engine.in_process]
        without_store = [engine for engine in known if not engine.reads_object_store]
        if transport == "auto":
            if known and not without_store:
                return find_transport("object_store")()
            return find_transport("shared_memory" if elsewhere or (self.sends and not known) else "direct")()
        if without_store and transport.name == "object_store":
            raise ValueError(
                f"transport=ObjectStore() requires engines that are a RayEngine on one node, but one is a "
                f"{type(without_store[0]).__name__}; use SharedMemory(), Files(directory) or a transport of vLLM"
            )
        if elsewhere and transport.name == "direct":
            raise ValueError(
                f"transport=Direct() requires engines in this process, but {type(elsewhere[0]).__name__} is in "
                "another; use SharedMemory() or Files(directory)"
            )
        return transport

    def close(self) -> None:
        """Release the snapshot, its files and the connections. A push connects again."""
        super().close()
        if self.sends:  # the directory of files is that of all ranks
            self.transport.close()

    def _new_snapshot(self, version: int, keep: bool) -> WeightSnapshot:
        manifest = self.source.manifest()
        buckets = plan_buckets(manifest, self.bucket_bytes)
        if self.group is None:
            self._release_current()  # the new snapshot reuses its memory
        storage = self.transport.store(version, [packed_size(manifest[a:b]) for a, b in buckets], keep)
        verify = self._pushes % self.verify_every == 0
        self._pushes += 1
        return WeightSnapshot(
            version,
            storage.kept,
            manifest=manifest,
            frozen=self.source.frozen,
            buckets=buckets,
            transport=self.transport,
            storage=storage,
            verify=verify,
            sends_now=self.staged or not keep,
        )

    def _gather(self, snapshot: WeightSnapshot, deliveries: Deliveries) -> None:
        """Store all buckets, and stage each as soon as it is stored."""
        storage, steps = snapshot.storage, []  # steps[number] is the step at which each engine has that bucket

        def wait(number: int) -> None:
            if storage.window is not None and number >= storage.window:
                deliveries.wait_for_steps(steps[number - storage.window])

        def stage(number: int, tensors: list[torch.Tensor]) -> None:
            snapshot.checksums.append(CHECKSUMS[self.checksum](tensors) if snapshot.verify else None)
            if snapshot.sends_now:
                steps.append([self._add_bucket(delivery, snapshot, number) for delivery in deliveries.active])

        for delivery in deliveries.active:
            self._add_connect(delivery, snapshot)
            if snapshot.sends_now:
                if not self.staged:
                    delivery.add_pause(self.in_flight)
                self._add_start(delivery, snapshot)
        order = GatherOrder(snapshot.buckets, storage.opener())
        self._tell(True, order)
        store_buckets(self.source, storage, order, self.ranks, wait, stage)

    def _help(self, order: GatherOrder) -> None:
        store_buckets(self.source, None, order, self.ranks)

    def _add_staging(self, delivery: Delivery, snapshot: WeightSnapshot) -> None:
        self._add_connect(delivery, snapshot)
        if self.staged:
            self._add_update(delivery, snapshot)

    def _add_load(self, delivery: Delivery, snapshot: WeightSnapshot) -> None:
        if not delivery.is_open:
            self._add_update(delivery, snapshot)

        def finish(engine: WeightTarget) -> None:
            reports = engine.update_weights("finish", {"version": snapshot.version}, timeout=self.timeout)
            expected = (snapshot.version, snapshot.checksums, len(snapshot.manifest))
            confirmed = [(report.get("version"), report.get("checksums"), report.get("tensors")) for report in reports]
            if not confirmed or any(one != expected for one in confirmed):
                raise EngineError(
                    f"its workers report versions, checksums and numbers of tensors {confirmed}, not version "
                    f"{expected[0]} with {expected[1:]}"
                )

        delivery.add("loading the new weights", finish)

    def _release(self, snapshot: WeightSnapshot) -> None:
        snapshot.transport.release(snapshot.storage, reusable=not snapshot.tainted)

    def _note_push(self, deliveries: Deliveries) -> None:
        snapshot, seconds = deliveries.snapshot, monotonic() - deliveries.began
        total = sum(info.nbytes for info in snapshot.manifest)
        still = tuple(delivery.still_seconds for delivery in deliveries.active)
        self.last_push = Push(snapshot.version, seconds, total, len(snapshot.buckets), still)

    def _add_connect(self, delivery: Delivery, snapshot: WeightSnapshot) -> None:
        """Connect to an engine, unless its connection still fits."""
        transport, peer = snapshot.transport, delivery.peer

        def connect(engine: WeightTarget) -> None:
            tensors = (snapshot.manifest, snapshot.frozen)
            wanted = (transport, *tensors, self.staged, self.checksum, engine.start_count)
            if peer.connected_to == wanted:
                return
            peer.disconnect()
            workers = len(engine.update_weights("abort", timeout=self.timeout))
            link = transport.connect(workers, self.timeout, engine.node_id)
            info = {
                "transport": transport.name,
                "manifest": [[info.name, info.dtype, list(info.shape)] for info in snapshot.manifest],
                "staged": self.staged,
                "checksum": self.checksum,
                "frozen": [[*info, checksum] for info, checksum in snapshot.frozen],
            }
            try:
                link.open(
                    lambda options: engine.update_weights("connect", info | {"options": options}, timeout=self.timeout)
                )
            except BaseException:
                link.close()
                raise
            with delivery.changed:
                if delivery.abandoned:  # a later push may have connected on another thread
                    link.close()
                else:
                    peer.link, peer.connected_to = link, wanted

        delivery.add(f"connecting over {transport.name}", connect)

    def _add_update(self, delivery: Delivery, snapshot: WeightSnapshot) -> None:
        self._add_start(delivery, snapshot)
        for number in range(len(snapshot.buckets)):
            self._add_bucket(delivery, snapshot, number)

    def _add_start(self, delivery: Delivery, snapshot: WeightSnapshot) -> None:
        delivery.is_open = True
        info = {"version": snapshot.version, "verify": snapshot.verify}
        delivery.add("starting", lambda engine: engine.update_weights("start", info, timeout=self.timeout))

    def _add_bucket(self, delivery: Delivery, snapshot: WeightSnapshot, number: int) -> int:
        (first, last), version = snapshot.buckets[number], snapshot.version
        info = {"version": version, "bucket": number, "first": first, "last": last}
        info["checksum"] = snapshot.checksums[number]

        def send(engine: WeightTarget) -> None:
            delivery.peer.link.deliver(
                snapshot.storage.get(number),
                lambda payload: engine.update_weights("bucket", info | {"payload": payload}, timeout=self.timeout),
            )

        names = f"{snapshot.manifest[first].name} to {snapshot.manifest[last - 1].name}"
        return delivery.add(f"bucket {number} ({names})", send)
