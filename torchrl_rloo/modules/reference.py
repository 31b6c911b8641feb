"""References for a KL term: scorers whose weights no optimizer changes.

Like a scoring policy, each has ``score(rows)``, ``generate`` (False) and ``distribution``. Scores have no gradient.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.four_bit import copy_four_bit, four_bit_layers
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
            frequencies rounded to bfloat16 would shift late positions. Weights in 4 bits keep their bits, and
            ``dtype`` is that of their products.
        device: device of the copy; None keeps the model's.

    Returns:
        The copy, in evaluation mode.
    """
    # Move tensors one by one: the source device then never holds a second model
    memo: dict[int, Any] = {}
    for layer in four_bit_layers(model).values():
        memo[id(layer.weight)] = copy_four_bit(layer.weight, device, memo)
    for p in (p for p in model.parameters() if id(p) not in memo):
        copied = p.detach().to(device=device, dtype=dtype if p.is_floating_point() else None, copy=True)
        memo[id(p)] = torch.nn.Parameter(copied, requires_grad=False)
    for b in model.buffers():
        memo[id(b)] = b.detach().to(device=device, copy=True)
    result = copy.deepcopy(model, memo).eval()
    for layer in four_bit_layers(result).values():
        layer.compute_dtype = dtype or layer.compute_dtype
    return result


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
        with adapter_disabled(self.scorer.model):
            return self.scorer.score(rows)


class MovingReference:
    """Reference that each :meth:`update` moves towards the training model.

    ``reference = share * model + (1 - share) * reference``, of all weights (Gorbatovski et al. 2024, arXiv 2404.09656).
    A share of 1 replaces the reference by the model. Save ``scorer.model`` in checkpoints.

    Args:
        scorer: scorer of a copy of the model, such as :func:`frozen_reference`, distributed like the model.
        model: training model.
        share: share of the model's weights, above 0 and at most 1.

    Raises:
        ValueError: if ``share`` is out of range.

    Example::

        reference = MovingReference(frozen_reference(policy), policy.model, share=0.6)
        if step % 64 == 0:
            reference.update()
    """

    generate = False

    def __init__(self, scorer: TransformersWrapper, model: torch.nn.Module, share: float = 0.6):
        if not 0 < share <= 1:
            raise ValueError(f"share={share} must be above 0 and at most 1")
        self.scorer, self.share, self._training = scorer, share, model
        self._lock = threading.Lock()  # a collector that samples ahead scores while the loop trains

    @property
    def distribution(self) -> SamplingDistribution:
        """Sampled distribution, which log-probs refer to."""
        return self.scorer.distribution

    @torch.no_grad()
    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Score the rows' action tokens with the reference's current weights."""
        with self._lock:
            return self.scorer.score(rows)

    @torch.no_grad()
    def update(self) -> None:
        """Move the reference towards the current weights of the model."""
        with self._lock:
            for mine, new in zip(self.scorer.model.parameters(), self._training.parameters(), strict=True):
                mine.lerp_(new.to(mine), self.share)


@contextmanager
def adapter_disabled(model: torch.nn.Module) -> Iterator[None]:
    """Make a ``PeftModel`` compute with its base model within the context."""
    parameters = [(p, p.requires_grad) for p in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:  # peft makes the whole adapter trainable when it enables it again
        for p, required in parameters:
            p.requires_grad_(required)
