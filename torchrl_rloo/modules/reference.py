"""References for a KL term: scorers whose weights no optimizer moves.

Each has ``score(rows)``, ``generate`` (always False) and ``distribution``, like a policy that scores; no score carries
a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper


def frozen_reference(
    policy: TransformersWrapper, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> TransformersWrapper:
    """A policy's model as it is now, for good: a copy in evaluation mode that scores under the same distribution.

    Args:
        policy: generates or scores; an adapter on its model is copied along.
        dtype: of the copy's parameters; default those of the model.
        device: where to put the copy; default beside the model.
    """
    return policy.get_new_version(model=frozen_copy(policy.model, dtype, device), generate=False)


def frozen_copy(
    model: torch.nn.Module, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.nn.Module:
    """A copy of a model without gradients, e.g. to sample with in another precision.

    Args:
        model: what to copy.
        dtype: of the copy's parameters; None for those of the model. Buffers keep theirs: a rotary frequency that was
            rounded to bfloat16 would shift positions, the more the later.
        device: where to put the copy; None for beside the model.
    """
    memo: dict[int, Any] = {}  # copied one by one, so that no second model of the first one's size and place exists
    for p in model.parameters():
        copied = p.detach().to(device=device, dtype=dtype if p.is_floating_point() else None, copy=True)
        memo[id(p)] = torch.nn.Parameter(copied, requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device=device, copy=True)
    return copy.deepcopy(model, memo).eval()


class AdapterReference:
    """The base model under a policy's adapter, without a copy: each score is taken with the adapter switched off.

    Args:
        policy: its model is a peft ``PeftModel``; in evaluation mode, as a policy should be, the scores are those of
            the base model exactly.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is no ``PeftModel``.
    """

    generate = False

    def __init__(self, policy: TransformersWrapper):
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ImportError("AdapterReference needs peft: pip install 'torchrl_rloo[peft]'") from error
        if not isinstance(policy.model, PeftModel):
            raise TypeError(
                f"policy.model is a {type(policy.model).__name__}, not a peft PeftModel: use frozen_reference(policy)"
            )
        self.scorer = policy.get_new_version(generate=False)

    @property
    def distribution(self) -> SamplingDistribution:
        """The distribution that log-probs are of."""
        return self.scorer.distribution

    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Log-probs and entropies of the rows' action tokens under the base model. The adapter is left as it was."""
        parameters = [(p, p.requires_grad) for p in self.scorer.model.parameters()]
        try:
            with self.scorer.model.disable_adapter():
                return self.scorer.score(rows)
        finally:  # switching the adapter on again makes all of it trainable, what was frozen included
            for p, required in parameters:
                p.requires_grad_(required)


class MovingReference:
    """A reference that follows the training weights at a distance: one copy of them.

    Call :meth:`update` after each optimizer step. With ``decay`` the copy is their exponential moving average, with
    ``every`` it is replaced by the present weights at every so many updates. Give exactly one of the two.

    Args:
        policy: holds the training model, and the distribution to score under.
        decay: share of the copy that an update keeps, from 0 to below 1.
        every: updates from one replacement to the next.
        dtype: of the copy's parameters; default those of the model. An average needs float32: the steps of a slow one
            are lost in the rounding of bfloat16.
        device: where to put the copy; default beside the model.
    """

    generate = False

    def __init__(
        self,
        policy: TransformersWrapper,
        *,
        decay: float | None = None,
        every: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if (decay is None) == (every is None):
            raise ValueError(f"decay={decay}, every={every}: give exactly one of the two")
        if decay is not None and not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must be at least 0 and below 1")
        if every is not None and every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.decay, self.every, self.num_updates = decay, every, 0
        self._training = policy.model
        self.scorer = frozen_reference(policy, dtype=dtype, device=device)

    @property
    def distribution(self) -> SamplingDistribution:
        """The distribution that log-probs are of."""
        return self.scorer.distribution

    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Log-probs and entropies of the rows' action tokens under the copy."""
        return self.scorer.score(rows)

    @torch.no_grad()
    def update(self) -> None:
        """Moves the copy after an optimizer step."""
        self.num_updates += 1
        if self.every is not None and self.num_updates % self.every:
            return
        ours, theirs = self.scorer.model, self._training
        for mine, new in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.lerp_(new.to(mine), 1 - (self.decay or 0.0))
        for mine, new in zip(ours.buffers(), theirs.buffers(), strict=True):
            mine.copy_(new)

    def state_dict(self) -> dict[str, Any]:
        """The copy's weights, and the number of updates."""
        return {"model": self.scorer.model.state_dict(), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores :meth:`state_dict`."""
        self.scorer.model.load_state_dict(state["model"])
        self.num_updates = int(state["num_updates"])
