"""New weights for rollout engines: every tensor, to every worker, confirmed, or an error that says what is where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torchrl_rloo.modules.engines.base import (
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    WeightStep,
)
from torchrl_rloo.modules.engines.weight_protocol import TensorInfo, checksum, packed_size, plan_buckets
from torchrl_rloo.weight_update.base import WeightSyncError
from torchrl_rloo.weight_update.direct import Direct
from torchrl_rloo.weight_update.engine_updater import EngineUpdater, is_dead
from torchrl_rloo.weight_update.peers import PeerError, Round
from torchrl_rloo.weight_update.shared_memory import SharedMemory
from torchrl_rloo.weight_update.source import WeightSource, is_sharded
from torchrl_rloo.weight_update.transports import Transport

CLEAN_UP_SECONDS = 10.0  # at most, for engines to leave a failed update


class Push(NamedTuple):
    """Figures of a push.

    Attributes:
        version: of the weights.
        seconds: it took, the pause included.
        bytes: of the tensors, counted once however many engines have them.
        buckets: they went in.
    """

    version: int
    seconds: float
    bytes: int
    buckets: int

    @property
    def bytes_per_second(self) -> float:
        """How fast they went."""
        return self.bytes / self.seconds


class _Bucket(NamedTuple):
    number: int
    first: int
    last: int
    tensors: list[torch.Tensor]


class vLLMUpdater(EngineUpdater):
    """Sends a training model's weights to engines, of vLLM or any other kind.

    A push pauses the engines, sends all tensors in buckets, has every worker confirm the checksum of every bucket, and
    resumes. While the workers take a bucket the next one is gathered and packed. Where the model is sharded, all ranks
    push together: rank 0 sends, the others take part in the gathering, and all of them fail if one engine does.

    Args:
        source: the training model, or a :class:`~torchrl_rloo.weight_update.source.WeightSource` of it.
        engines: one or several. Ranks that do not send need none.
        transport: how tensors travel; ``"auto"`` is :class:`Direct` if all engines are in this process, else
            :class:`SharedMemory`.
        bucket_bytes: most bytes sent at once, where no single tensor has more.
        staged: have workers keep the buckets in host memory until all workers of all engines have all of them, so that
            a failure up to then leaves every engine its old weights. Without, buckets are loaded as they come, which
            needs no memory, and an engine whose update failed half-way refuses to sample until a push succeeds.
        in_flight: what becomes of running requests; see :meth:`Engine.pause`.
        timeout: seconds that any one step may take in any engine: draining its requests, connecting, one bucket, ...
        max_restarts: how many calls of :meth:`restart` are granted; None is no limit.

    Raises:
        ValueError: for no engines, or values out of range.

    Attributes:
        last_push: figures of the last push that succeeded; None before.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.modules.engines.transformers_engine import TransformersEngine
        >>> tokenizer = build_tokenizer()
        >>> engine = TransformersEngine(build_model(tokenizer, seed=0).eval())
        >>> updater = vLLMUpdater(build_model(tokenizer, seed=1), engine, transport=Direct())
        >>> updater.push_weights(1)
        >>> engine.version, updater.last_push.buckets
        (1, 1)
    """

    def __init__(
        self,
        source: nn.Module | WeightSource,
        engines: Engine | Sequence[Engine],
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
        elsewhere = [engine for engine in self.engines if not engine.in_process]
        if transport == "auto":
            transport = SharedMemory() if elsewhere else Direct()
        if elsewhere and isinstance(transport, Direct):
            raise ValueError(
                f"transport=Direct() reaches engines in this process alone, and {type(elsewhere[0]).__name__} is none: "
                "take SharedMemory(), Collective() or Files(directory)"
            )
        self.transport, self.bucket_bytes, self.staged = transport, bucket_bytes, staged
        self.last_push: Push | None = None
        self._connection: tuple | None = None  # manifest and incarnations of the engines; None if there is none

    def push_weights(self, version: int) -> None:
        """Sends the present weights to all engines as ``version``.

        Raises:
            WeightSyncError: if a worker has not confirmed them. Pushing again sends everything anew.
        """
        self._version = version
        manifest = self.source.manifest()
        buckets = plan_buckets(manifest, self.bucket_bytes)
        gathered, failure = self._gather(buckets), None
        if self.source.sends:
            try:
                self._push(version, manifest, buckets, gathered)
            except Exception as error:  # the other ranks hear of it before it is raised
                failure = error
        if self.sharded:
            for _ in gathered:  # all ranks gather all buckets, whatever has happened
                pass
        self._agree(failure)

    def close(self) -> None:
        """Frees what the transport holds. The engines stay open, and a push opens it again."""
        self._connection = None
        self.transport.close()

    def _gather(self, buckets: Sequence[tuple[int, int]]) -> Iterator[_Bucket]:
        for number, (first, last) in enumerate(buckets):
            yield _Bucket(number, first, last, self.source.tensors(first, last))

    def _push(
        self,
        version: int,
        manifest: list[TensorInfo],
        buckets: Sequence[tuple[int, int]],
        gathered: Iterator[_Bucket],
    ) -> None:
        began, failure = monotonic(), None
        try:
            self._each(lambda e: e.pause(self.in_flight, timeout=self.timeout), "pausing").wait()
            self._connect(manifest, buckets)
            self._step("start", {"version": version}, "starting").wait()
            checksums = self._send(version, manifest, gathered)
            reports = self._step("finish", {"version": version}, "loading the new weights")
            self._confirm(reports.wait(), version, checksums)
        except BaseException as error:
            failure = error
            self._give_up()
            if not isinstance(error, Exception):
                raise
            raise WeightSyncError(self._explain(version, error)) from (error.__cause__ or error)
        finally:
            try:
                self._each(lambda e: e.resume(), "resuming").wait()
            except PeerError as error:
                if failure is None:  # else an engine that failed may well not resume
                    raise WeightSyncError(self._explain(version, error)) from error.__cause__
        total = sum(info.nbytes for info in manifest)
        self.last_push = Push(version, monotonic() - began, total, len(buckets))

    def _connect(self, manifest: list[TensorInfo], buckets: Sequence[tuple[int, int]]) -> None:
        """Connects to all engines, unless they are the ones connected and nothing has changed."""
        wanted = manifest, [engine.incarnation for engine in self.engines]
        if self._connection == wanted:
            return
        workers = [len(reports) for reports in self._step("abort", None, "leaving earlier updates").wait()]
        nbytes = max(packed_size(manifest[first:last]) for first, last in buckets)
        options = self.transport.open(workers, nbytes, self.timeout)
        common = {
            "transport": self.transport.name,
            "manifest": [[info.name, info.dtype, list(info.shape)] for info in manifest],
            "staged": self.staged,
        }
        infos = [common | {"options": o} for o in options]
        self._step("connect", infos, f"connecting over {self.transport.name}").wait()
        self.transport.connected()
        self._connection = wanted

    def _send(self, version: int, manifest: list[TensorInfo], gathered: Iterator[_Bucket]) -> list[str]:
        """Sends all buckets; returns their checksums."""
        checksums: list[str] = []
        taking: Round | None = None
        for number, first, last, tensors in gathered:
            checksums.append(checksum(tensors))
            infos = manifest[first:last]
            payload = self.transport.send(version, number, infos, tensors)
            if taking is not None:
                taking.wait()
            info = {"version": version, "bucket": number, "first": first, "last": last, "checksum": checksums[-1]}
            doing = f"bucket {number} ({infos[0].name} to {infos[-1].name})"
            taking = self._step("bucket", info | {"payload": payload}, doing)
        taking.wait()
        return checksums

    def _confirm(self, reports: Sequence[list[dict]], version: int, checksums: list[str]) -> None:
        """Raises a PeerError unless every worker reports the version and the checksums."""
        for peer, workers in zip(self._peers, reports, strict=True):
            found = [(report.get("version"), report.get("checksums")) for report in workers]
            if not found or any(one != (version, checksums) for one in found):
                cause = EngineError(f"its workers report {found}, not version {version} with checksums {checksums}")
                raise PeerError(peer.name, "confirming the new weights") from cause

    def _give_up(self) -> None:
        """Frees workers that wait for tensors, and has all engines leave the update as far as they still answer."""
        self.close()
        seconds = min(self.timeout, CLEAN_UP_SECONDS)
        calls = [lambda e: e.update_weights("abort", timeout=seconds)]
        rounds = [Round([peer], calls, "leaving the update", seconds) for peer in self._peers]
        for each in rounds:
            with suppress(PeerError):  # what matters is the first failure; the next push begins by leaving this one
                each.wait()

    def _step(self, step: WeightStep, info: dict | list[dict] | None, doing: str) -> Round:
        """A step of the update in all engines; ``info`` may be one for each."""
        infos = info if isinstance(info, list) else [info] * len(self._peers)
        calls = [lambda e, i=i: e.update_weights(step, i, timeout=self.timeout) for i in infos]
        return Round(self._peers, calls, doing, self.timeout)

    def _each(self, call: Callable[[Engine], Any], doing: str) -> Round:
        return Round(self._peers, [call] * len(self._peers), doing, self.timeout)

    def _explain(self, version: int, error: Exception) -> str:
        """What failed, in whom and why, what the engines have now, and what to do."""
        cause = error.__cause__ if isinstance(error, PeerError) else error
        where = f"{error.peer} failed at {error.doing}" if isinstance(error, PeerError) else "the trainer failed"
        states = [
            f"{peer.name} has version {peer.engine.version}"
            if peer.engine.torn is None
            else f"{peer.name} has parts of version {peer.engine.torn} and samples nothing"
            for peer in self._peers
        ]
        return (
            f"version {version} of the weights did not arrive: {where}: {type(cause).__name__}: {cause}. "
            f"Now {'; '.join(states)}. {self._remedy(cause)}"
        )

    def _remedy(self, cause: BaseException) -> str:
        if isinstance(cause, EngineDeadError) or any(is_dead(engine) for engine in self.engines):
            return "restart() starts dead engines anew and pushes again"
        if isinstance(cause, EngineTimeoutError):
            return f"Push again; if the engine is alive but slow, raise timeout={self.timeout:g}"
        return "Push again once the cause is mended: everything is sent anew"
