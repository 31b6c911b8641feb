"""EngineUpdater: sends all weights of a training model to engines and confirms them by checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torchrl_rloo.weight_update.base import WeightSyncError
from torchrl_rloo.weight_update.peers import EngineUpdaterBase, PeerError, Round
from torchrl_rloo.weight_update.protocol import TensorInfo, checksum, packed_size, plan_buckets
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource, is_sharded
from torchrl_rloo.weight_update.target import (
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    WeightStep,
    WeightTarget,
    is_dead,
)
from torchrl_rloo.weight_update.transport import Direct, Transport

ABORT_SECONDS = 10.0  # limit for engines to cancel a failed update


class Push(NamedTuple):
    """Measurements of a push.

    Attributes:
        version: policy version of the weights.
        seconds: duration, including the pause.
        bytes: size of the tensors, counted once for any number of engines.
        buckets: number of buckets.
    """

    version: int
    seconds: float
    bytes: int
    buckets: int

    @property
    def bytes_per_second(self) -> float:
        """Throughput of the push in bytes per second."""
        return self.bytes / self.seconds


class EngineUpdater(EngineUpdaterBase):
    """Updater that sends all weights of a training model to engines, in place of TorchRL's ``vLLMUpdater``.

    A push pauses the engines, sends all tensors in buckets, checks that every worker confirms the checksum of every
    bucket, and resumes the engines. The updater gathers and packs one bucket while the workers receive the previous
    one. All ranks of a sharded model push together: rank 0 sends, the others help to gather, and all fail if one engine
    fails.

    Args:
        source: training model, or its :class:`~torchrl_rloo.weight_update.source.WeightSource`.
        engines: one or more engines. Ranks that do not send need none.
        transport: transport of the tensors. ``"auto"`` takes :class:`Direct` if all engines are in this process, and
            otherwise :class:`SharedMemory`.
        bucket_bytes: largest size of a bucket. A larger tensor is a bucket by itself.
        staged: if True, workers keep all buckets in host memory until every worker has all of them. A failure before
            then leaves all engines with their old weights. If False, workers load each bucket at once, which needs no
            extra memory. An engine whose update failed halfway then refuses to sample until a push succeeds.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        timeout: seconds that one step may take in one engine: draining its requests, connecting, one bucket, ...
        max_restarts: largest number of :meth:`restart` calls. None disables the limit.

    Raises:
        ValueError: if there are no engines or an argument is out of range.

    Attributes:
        last_push: measurements of the last successful push. None before the first.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.engines.transformers_engine import TransformersEngine
        >>> tokenizer = build_tokenizer()
        >>> engine = TransformersEngine(build_model(tokenizer, seed=0).eval())
        >>> updater = EngineUpdater(build_model(tokenizer, seed=1), engine, transport=Direct())
        >>> updater.push_weights(1)
        >>> engine.version, updater.last_push.buckets
        (1, 1)
    """

    def __init__(
        self,
        source: nn.Module | WeightSource,
        engines: WeightTarget | Sequence[WeightTarget],
        *,
        transport: Literal["auto"] | Transport = "auto",
        bucket_bytes: int = 64 << 20,
        staged: bool = True,
        in_flight: InFlight = "finish",
        timeout: float = 120.0,
        max_restarts: int | None = None,
    ):
        self.source = WeightSource(source) if isinstance(source, nn.Module) else source
        super().__init__(
            engines,
            sends=self.source.sends,
            sharded=is_sharded(self.source.model),
            in_flight=in_flight,
            timeout=timeout,
            max_restarts=max_restarts,
        )
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        if transport != "auto" and not isinstance(transport, Transport):
            raise ValueError(f"transport={transport!r} must be 'auto' or a Transport, such as SharedMemory()")
        # Choose a transport that reaches all engines
        elsewhere = [engine for engine in self.engines if not engine.in_process]
        if transport == "auto":
            transport = SharedMemory() if elsewhere else Direct()
        if elsewhere and isinstance(transport, Direct):
            raise ValueError(
                f"transport=Direct() requires engines in this process, but {type(elsewhere[0]).__name__} is in "
                "another; use SharedMemory(), Collective() or Files(directory)"
            )
        self.transport, self.bucket_bytes, self.staged = transport, bucket_bytes, staged
        self.last_push: Push | None = None
        self._connection: tuple | None = None  # manifest and start counts of the engines; None if not connected

    def push_weights(self, version: int) -> None:
        """Send the current weights to all engines as ``version``.

        Raises:
            WeightSyncError: if a worker did not confirm them. The next push sends everything again.
        """
        self._version = version
        manifest = self.source.manifest()
        buckets = plan_buckets(manifest, self.bucket_bytes)
        gathered = (self.source.tensors(*bucket) for bucket in buckets)  # one bucket at a time, as it is sent
        failure = None
        if self.source.sends:
            try:
                self._push(version, manifest, buckets, gathered)
            except Exception as error:  # raised after the other ranks have been told
                failure = error
        if self.sharded:
            for _ in gathered:  # all ranks gather all buckets, even after a failure
                pass
        self._agree(failure)

    def close(self) -> None:
        """Close the transport. The engines stay open, and a push opens it again."""
        self._connection = None
        self.transport.close()

    def _push(
        self,
        version: int,
        manifest: list[TensorInfo],
        buckets: Sequence[tuple[int, int]],
        gathered: Iterator[list[torch.Tensor]],
    ) -> None:
        began, failure = monotonic(), None
        try:
            # Wait for all engines at every step: none may activate weights before all of them have all buckets
            self._call_all(lambda e: e.pause(self.in_flight, timeout=self.timeout), "pausing").wait()
            self._connect(manifest, buckets)
            self._start_step("start", {"version": version}, "starting").wait()
            checksums = self._send(version, manifest, buckets, gathered)
            reports = self._start_step("finish", {"version": version}, "loading the new weights")
            self._confirm(reports.wait(), version, checksums)
        except BaseException as error:
            failure = error
            self._abort()
            if not isinstance(error, Exception):
                raise
            raise WeightSyncError(self._explain(version, error)) from (error.__cause__ or error)
        finally:
            try:
                self._call_all(lambda e: e.resume(), "resuming").wait()
            except PeerError as error:
                if failure is None:  # otherwise report the first failure
                    raise WeightSyncError(self._explain(version, error)) from error.__cause__
        total = sum(info.nbytes for info in manifest)
        self.last_push = Push(version, monotonic() - began, total, len(buckets))

    def _connect(self, manifest: list[TensorInfo], buckets: Sequence[tuple[int, int]]) -> None:
        """Connect to all engines, unless the connection still fits them and the manifest."""
        wanted = manifest, [engine.start_count for engine in self.engines]
        if self._connection == wanted:
            return
        workers = [len(reports) for reports in self._start_step("abort", None, "aborting earlier updates").wait()]
        nbytes = max(packed_size(manifest[first:last]) for first, last in buckets)
        options = self.transport.open(workers, nbytes, self.timeout)
        common = {
            "transport": self.transport.name,
            "manifest": [[info.name, info.dtype, list(info.shape)] for info in manifest],
            "staged": self.staged,
        }
        infos = [common | {"options": o} for o in options]
        self._start_step("connect", infos, f"connecting over {self.transport.name}").wait()
        self.transport.connected()
        self._connection = wanted

    def _send(
        self,
        version: int,
        manifest: list[TensorInfo],
        buckets: Sequence[tuple[int, int]],
        gathered: Iterator[list[torch.Tensor]],
    ) -> list[str]:
        """Send all buckets and return their checksums."""
        # Send each bucket while the workers still receive the previous one
        checksums: list[str] = []
        pending: Round | None = None
        for number, ((first, last), tensors) in enumerate(zip(buckets, gathered, strict=True)):
            checksums.append(checksum(tensors))
            infos = manifest[first:last]
            payload = self.transport.send(version, number, infos, tensors)
            if pending is not None:
                pending.wait()
            info = {"version": version, "bucket": number, "first": first, "last": last, "checksum": checksums[-1]}
            purpose = f"bucket {number} ({infos[0].name} to {infos[-1].name})"
            pending = self._start_step("bucket", info | {"payload": payload}, purpose)
        pending.wait()
        return checksums

    def _confirm(self, reports: Sequence[list[dict]], version: int, checksums: list[str]) -> None:
        """Raise ``PeerError`` unless every worker reports the version and the checksums."""
        for peer, workers in zip(self._peers, reports, strict=True):
            found = [(report.get("version"), report.get("checksums")) for report in workers]
            if not found or any(one != (version, checksums) for one in found):
                cause = EngineError(f"its workers report {found}, not version {version} with checksums {checksums}")
                raise PeerError(peer.name, "confirming the new weights") from cause

    def _abort(self) -> None:
        """Release workers that wait for tensors, and cancel the update in all engines that answer."""
        self.close()
        seconds = min(self.timeout, ABORT_SECONDS)
        calls = [lambda e: e.update_weights("abort", timeout=seconds)]
        rounds = [Round([peer], calls, "aborting the update", seconds) for peer in self._peers]
        for each in rounds:
            with suppress(PeerError):  # report the first failure; the next push aborts again
                each.wait()

    def _start_step(self, step: WeightStep, info: dict | list[dict] | None, purpose: str) -> Round:
        """Start a step in all engines; a list of ``info`` has one entry per engine."""
        infos = info if isinstance(info, list) else [info] * len(self._peers)
        calls = [lambda e, i=i: e.update_weights(step, i, timeout=self.timeout) for i in infos]
        return Round(self._peers, calls, purpose, self.timeout)

    def _call_all(self, call: Callable[[WeightTarget], Any], purpose: str) -> Round:
        return Round(self._peers, [call] * len(self._peers), purpose, self.timeout)

    def _explain(self, version: int, error: Exception) -> str:
        """Return an error message with the failed step, the engine, the cause, the current versions and the fix."""
        cause = error.__cause__ if isinstance(error, PeerError) else error
        where = f"{error.peer} failed at {error.purpose}" if isinstance(error, PeerError) else "the trainer failed"
        states = [
            f"{peer.name} has version {peer.engine.version}"
            if peer.engine.failed_version is None
            else f"{peer.name} has parts of version {peer.engine.failed_version} and refuses to sample"
            for peer in self._peers
        ]
        return (
            f"version {version} of the weights did not arrive: {where}: {type(cause).__name__}: {cause}. "
            f"Now {'; '.join(states)}. {self._remedy(cause)}"
        )

    def _remedy(self, cause: BaseException) -> str:
        if isinstance(cause, EngineDeadError) or any(is_dead(engine) for engine in self.engines):
            return "Call restart() to restart dead engines and push again"
        if isinstance(cause, EngineTimeoutError):
            return f"Push again; if the engine is alive but slow, raise timeout={self.timeout:g}"
        return "Push again after fixing the cause; the push sends all tensors"
