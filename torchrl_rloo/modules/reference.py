"""References for a KL term: scorers with frozen weights.

Like a scoring policy, each has ``score(rows)``, ``generate`` (False) and ``distribution``. Scores have no gradient.
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
        policy: policy that generates or scores; an adapter of its model is also copied.
        dtype: dtype of the copy's parameters; None keeps the model's.
        device: device of the copy; None keeps the model's.

    Returns:
        A scorer with the policy's sampling distribution.
    """
    return policy.get_new_version(model=frozen_copy(policy.model, dtype, device), generate=False)


def frozen_copy(
    model: torch.nn.Module, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> torch.nn.Module:
    """Copy a model without gradients, e.g. to sample in another precision.

    Args:
        model: model to copy.
        dtype: dtype of the copy's parameters; None keeps the model's. Buffers always keep theirs, since rotary
            frequencies rounded to bfloat16 would shift late positions.
        device: device of the copy; None keeps the model's.

    Returns:
        The copy, in evaluation mode.
    """
    # Move tensors one by one: the source device then never holds a second model
    memo: dict[int, Any] = {}
    for p in model.parameters():
        copied = p.detach().to(device=device, dtype=dtype if p.is_floating_point() else None, copy=True)
        memo[id(p)] = torch.nn.Parameter(copied, requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device=device, copy=True)
    return copy.deepcopy(model, memo).eval()


class AdapterReference:
    """Reference that scores with the policy's adapter disabled, without a copy of the base model.

    Args:
        policy: policy whose model is a peft ``PeftModel`` in evaluation mode.

    Raises:
        ImportError: if peft is not installed.
        TypeError: if the model is not a ``PeftModel``.

    Example::

        reference = AdapterReference(policy)
        log_probs = reference.score(rows).log_probs  # [B, A], of the base model
    """

    generate = False

    def __init__(self, policy: TransformersWrapper):
        try:
            from peft import PeftModel
        except ImportError as error:
            raise ImportError("AdapterReference requires peft: pip install 'torchrl_rloo[peft]'") from error
        if not isinstance(policy.model, PeftModel):
            raise TypeError(
                f"policy.model={type(policy.model).__name__} must be a peft PeftModel; use frozen_reference(policy)"
            )
        self.scorer = policy.get_new_version(generate=False)

    @property
    def distribution(self) -> SamplingDistribution:
        """Sampled distribution, which log-probs refer to."""
        return self.scorer.distribution

    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Score the rows' action tokens with the base model, then enable the adapter again."""
        parameters = [(p, p.requires_grad) for p in self.scorer.model.parameters()]
        try:
            with self.scorer.model.disable_adapter():
                return self.scorer.score(rows)
        finally:  # peft makes the whole adapter trainable when it enables it again
            for p, required in parameters:
                p.requires_grad_(required)
