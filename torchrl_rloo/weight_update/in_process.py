"""Updaters of samplers in this process, and of several samplers in order."""

from __future__ import annotations

import torch
from torch import nn

from torchrl_rloo.weight_update.protocol import TensorInfo, plan_buckets
from torchrl_rloo.weight_update.publisher import WeightUpdater
from torchrl_rloo.weight_update.shards import gather, is_sender, is_sharded, reshard

_BUCKET_BYTES = 64 << 20  # gathered at a time


class InProcessWeightUpdater(WeightUpdater):
    """Updater that copies parameters and buffers to a sampler in this process and casts them to its dtype.

    It copies nothing if source and target are the same module. Otherwise, a checkpoint must also contain the target.
    Its weights are older than those of the source if updates are rare. A source that is sharded with ``fully_shard`` is
    gathered bucket by bucket, and only rank 0 needs a target.

    Args:
        source: training model.
        target: model of the sampler, with the same architecture. None on ranks other than 0.

    Raises:
        ValueError: if names or shapes differ, or rank 0 has no target.

    Example:
        >>> source, target = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> InProcessWeightUpdater(source, target).push_weights()
        1
        >>> bool((source.weight == target.weight).all())
        True
    """

    def __init__(self, source: nn.Module, target: nn.Module | None):
        self.source, self.target = source, target
        self.training_model = source
        if target is None:
            if is_sender():
                raise ValueError("target=None requires a rank other than 0; pass the model of the sampler")
            return
        sent, copies = source.state_dict(), target.state_dict()
        if missing := sorted(sent.keys() ^ copies.keys()):
            raise ValueError(f"source and target must have the same tensors, but differ in {missing[:5]}")
        for name in sent:
            if sent[name].shape != copies[name].shape:
                raise ValueError(
                    f"tensor {name!r} must have one shape, but has {list(sent[name].shape)} in source and "
                    f"{list(copies[name].shape)} in target"
                )

    @property
    def filled(self) -> bool:
        """True, since a checkpoint has the sampler's weights."""
        return True

    @property
    def shares_weights(self) -> bool:
        """True if source and target are the same module."""
        return self.source is self.target

    @torch.no_grad()
    def _send(self, version: int) -> None:
        if self.source is self.target:
            return
        if is_sharded(self.source):
            self._gather()
        elif self.target is not None:
            source, target = self.source.state_dict(), self.target.state_dict()
            torch._foreach_copy_(list(target.values()), [source[k] for k in target])

    def _gather(self) -> None:
        """Copy a sharded model bucket by bucket, and tied tensors once."""
        reshard(self.source)
        names: dict[int, list[str]] = {}  # of each tensor, by its id
        tensors = self.source.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        unique = [(tensors[tied[0]].detach(), tied) for tied in names.values()]
        copies = {} if self.target is None else self.target.state_dict()
        for first, last in plan_buckets([TensorInfo.of("", tensor) for tensor, _ in unique], _BUCKET_BYTES):
            whole = gather([tensor for tensor, _ in unique[first:last]])
            if self.target is not None:
                for tensor, (_, tied) in zip(whole, unique[first:last], strict=True):
                    for name in tied:
                        copies[name].copy_(tensor)


class SequentialWeightUpdater(WeightUpdater):
    """Updater that pushes through several updaters in order, for example to a local copy and from it to an engine.

    Args:
        *updaters: one or more updaters.

    Raises:
        ValueError: if there are no updaters.
    """

    def __init__(self, *updaters: WeightUpdater):
        if not updaters:
            raise ValueError("updaters=() must have at least one updater")
        self.updaters = updaters
        self.training_model = updaters[0].training_model
        self.version = max(updater.version for updater in updaters)

    @property
    def current_version(self) -> int:
        """Highest version at the last updater, whose samplers sample."""
        return self.updaters[-1].current_version

    def push_weights(self) -> int:
        """Push through each updater under one version, which none of them has spent.

        Raises:
            RuntimeError: if an updater failed. The later ones keep their old weights.
        """
        self.version = max(self.version, *(updater.version for updater in self.updaters))
        return super().push_weights()

    def _send(self, version: int) -> None:
        # After a failure the later updaters keep their old weights and skip the version
        for updater in self.updaters:
            updater.version = version - 1
            updater.push_weights()

    @property
    def filled(self) -> bool:
        """True if no updater would send anything."""
        return all(updater.filled for updater in self.updaters)

    def initialize(self) -> None:
        """Initialize the samplers of each updater in order."""
        for updater in self.updaters:
            updater.initialize()

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint in all updaters."""
        version = max(version, *(updater.version for updater in self.updaters))
        super().resume_from(version)
        for updater in self.updaters:
            updater.resume_from(version)
