"""Checks of a collector's arguments, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.conversation import ON_FAILURE
from torchrl_rloo.collectors.staleness import ON_STALE
from torchrl_rloo.envs.stepping import transforms_of
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.weight_update import WeightUpdater

_MINIMA = {"ahead": 0, "max_staleness": 0}  # 1 for all other numbers
_CHOICES = {"on_stale": ON_STALE, "on_failure": ON_FAILURE}


def check_arguments(*, weight_updater: Any, total_dialog_turns: int, **arguments: Any) -> None:
    """Refuse arguments of :class:`~torchrl_rloo.collectors.LLMCollector` that are out of range or do not go together.

    Args:
        weight_updater: sender of weights, or None.
        total_dialog_turns: limit on turns, -1 for none.
        **arguments: numbers and choices of the collector; None is always valid.

    Raises:
        ValueError: with the argument's name, value and valid values.
        TypeError: if ``weight_updater`` is not a :class:`WeightUpdater`.
    """
    for name, value in arguments.items():
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"{name}={value!r} must be one of {list(_CHOICES[name])}")
        elif value is not None and value < (minimum := _MINIMA.get(name, 1)):
            raise ValueError(f"{name}={value} must be at least {minimum}")
    if total_dialog_turns != -1 and total_dialog_turns < 1:
        raise ValueError(f"total_dialog_turns={total_dialog_turns} must be -1 (no limit) or at least 1")
    ahead, max_staleness = arguments["ahead"], arguments["max_staleness"]
    if ahead and max_staleness is not None:
        raise ValueError(f"ahead={ahead} cannot be combined with max_staleness={max_staleness}; set only one")
    if weight_updater is not None and not isinstance(weight_updater, WeightUpdater):
        kind = getattr(weight_updater, "__name__", type(weight_updater).__name__)
        raise TypeError(
            f"weight_updater={kind} must be a torchrl_rloo.weight_update.WeightUpdater, "
            "whose pushes have a version; use WeightPublisher or InProcessWeightUpdater"
        )
    if arguments["sync_every"] is not None and weight_updater is None:
        raise ValueError(f"sync_every={arguments['sync_every']} requires a weight_updater")
    # Sampling ahead runs during training, so the optimizer must not change the sampler's weights
    if weight_updater is not None and weight_updater.shares_weights and (ahead or max_staleness):
        setting = f"ahead={ahead}" if ahead else f"max_staleness={max_staleness}"
        raise ValueError(
            f"{setting} samples while the loop trains and cannot be combined with a weight_updater whose source is "
            "its target; sample from a copy (torchrl_rloo.modules.frozen_copy) or set it to 0"
        )


def find_primer(env: EnvBase, min_members: int | None) -> DataLoadingPrimer:
    """Return the environment's primer.

    Raises:
        ValueError: if it does not have exactly one, or if ``min_members`` exceeds the members of a group.
    """
    primers = [t for t in transforms_of(env) if isinstance(t, DataLoadingPrimer)]
    if len(primers) != 1:
        raise ValueError(
            f"the environment has {len(primers)} DataLoadingPrimers, but LLMCollector requires one; use DatasetChatEnv"
        )
    if min_members is not None and min_members > (members := primers[0].num_generations):
        raise ValueError(f"min_members={min_members} must be at most num_generations={members} of the environment")
    return primers[0]


def default_seed(policy: Callable[[TensorDictBase], TensorDictBase]) -> int:
    """Return the seed in the policy's ``generate_kwargs``, or torch's initial seed."""
    seed = getattr(getattr(policy, "config", None), "seed", None)
    return torch.initial_seed() if seed is None else seed
