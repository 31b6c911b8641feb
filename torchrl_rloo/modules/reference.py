"""References for a KL term: scorers whose weights no optimizer moves.

Each has ``score(rows)``, ``generate`` (False) and ``distribution``, like a scoring policy; scores carry no gradient.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper


def frozen_reference(
    policy: TransformersWrapper, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> TransformersWrapper:
    """Copy a policy's current model into a scorer of the same distribution, in evaluation mode.

    Args:
        policy: generates or scores; an adapter of its model is copied as well.
        dtype: of the copy's parameters; None for that of the model.
        device: of the copy; None for that of the model.
    """
    return policy.get_new_version(model=frozen_copy(policy.model, dtype, device), generate=False)


def frozen_copy(
    model: torch.nn.Module, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.nn.Module:
    """Copy a model without gradients, e.g. to sample with in another precision.

    Args:
        model: the model to copy.
        dtype: of the copy's parameters; None for that of the model. Buffers keep theirs: rotary frequencies rounded to
            bfloat16 would shift late positions.
        device: of the copy; None for that of the model.
    """
    memo: dict[int, Any] = {}  # one by one: the source device never holds a second model
    for p in model.parameters():
        copied = p.detach().to(device=device, dtype=dtype if p.is_floating_point() else None, copy=True)
        memo[id(p)] = torch.nn.Parameter(copied, requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device=device, copy=True)
    return copy.deepcopy(model, memo).eval()


class AdapterReference:
    """Reference that scores with a policy's adapter switched off, so that the base model needs no copy.

    Args:
        policy: its model is a peft ``PeftModel`` in evaluation mode.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is not a ``PeftModel``.
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
        """Return the distribution that log-probs are of."""
        return self.scorer.distribution

    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Score the rows' action tokens under the base model; the adapter is restored."""
        parameters = [(p, p.requires_grad) for p in self.scorer.model.parameters()]
        try:
            with self.scorer.model.disable_adapter():
                return self.scorer.score(rows)
        finally:  # peft makes the whole adapter trainable when it is switched on again
            for p, required in parameters:
                p.requires_grad_(required)
