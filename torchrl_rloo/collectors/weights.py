"""PolicyWeights: the weights that a collector's policy samples with, and their version."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from tensordict import is_tensor_collection
from torch import nn

from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.weight_update import WeightSyncError, WeightUpdater

BATCHES_WITHOUT_UPDATE = 10  # number of batches without any weight update that causes a notice

_LOGGER = logging.getLogger(__name__)


class PolicyWeights:
    """Updates of a policy's weights that may fail, up to a limit.

    Args:
        updater: sender of the weights; None for a policy whose weights never change.
        exclusive: function that returns a context in which the policy uses no weights of this process.
        max_failed_pushes: number of consecutive failed updates that raises.

    Attributes:
        version: version of the newest weights that reached the policy.
        counts: ``"weights/failed_pushes"``.
    """

    def __init__(
        self,
        updater: WeightUpdater | None,
        exclusive: Callable[[], AbstractContextManager[None]],
        max_failed_pushes: int,
    ):
        self.updater, self.exclusive, self.max_failed_pushes = updater, exclusive, max_failed_pushes
        self.version = 0
        self.counts: Counter[str] = Counter()
        self._failed_pushes, self._initialized = 0, False
        self._batches = 0  # sampled so far

    @property
    def spent_version(self) -> int:
        """Last version that was spent, also by a failed update."""
        return self.version if self.updater is None else self.updater.version

    def initialize(self) -> None:
        """Give samplers that have no weights of this process the current ones, before the first batch.

        Raises:
            WeightSyncError: if the weights did not arrive.
        """
        if self.updater is not None:
            if not self._initialized and not self.updater.filled:
                with self.exclusive():
                    self.updater.initialize()
            self.version = self.updater.current_version  # also that of an update that was interrupted
        self._initialized, self._batches = True, self._batches + 1
        if self._batches == BATCHES_WITHOUT_UPDATE and self.updater is not None:
            if not self.updater.version and not self.updater.shares_weights:
                notify_once(
                    f"{self._batches} batches are sampled with the initial weights, since weight_updater has sent no "
                    "others; call collector.update_policy_weights_() after training, or set sync_every"
                )

    def update(self, weights: Any = None) -> None:
        """Send the current weights under a new version; ``weights`` may only be those of the training model.

        Raises:
            RuntimeError: if there is no updater.
            ValueError: if ``weights`` are others.
            WeightSyncError: if too many updates in a row have failed.
        """
        if self.updater is None:
            raise RuntimeError("weight_updater=None; pass LLMCollector(weight_updater=...) to update weights")
        if weights is not None and not _belong_to(weights, self.updater.training_model):
            raise ValueError(
                "weights must be those of the training model that weight_updater sends: the model or its "
                "state_dict(); load others into that model before"
            )
        try:
            with self.exclusive():
                self.updater.push_weights()
        except WeightSyncError as error:
            self.counts["weights/failed_pushes"] += 1
            self._failed_pushes += 1
            if self._failed_pushes >= self.max_failed_pushes:
                raise
            _LOGGER.warning("sampling continues with version %d: %s", self.updater.current_version, error)
        else:
            self._failed_pushes, self._initialized = 0, True
        finally:
            self.version = self.updater.current_version  # some engines may have it after a failure

    def resume_from(self, version: int, spent_version: int) -> None:
        """Continue the versions of a checkpoint; the samplers count as without weights."""
        self.version, self._initialized = version, False
        if self.updater is not None:
            self.updater.resume_from(spent_version)


def _belong_to(weights: Any, model: nn.Module | None) -> bool:
    """Return whether all tensors of a module, state dict or TensorDict share memory with those of a model."""
    if model is None:
        return False
    own = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    weights = weights.state_dict() if isinstance(weights, nn.Module) else weights
    tensors = list(weights.values(True, True) if is_tensor_collection(weights) else weights.values())
    return bool(tensors) and all(t.untyped_storage().data_ptr() in own for t in tensors)
