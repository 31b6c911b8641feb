"""References for a KL term: scorers whose weights no optimizer changes.

Like a scoring policy, each has ``score(rows)``, ``generate`` (False) and ``distribution``. Scores have no gradient.
:func:`record_log_probs` writes the scores of any scorer to rows, for later steps without the model.
"""

from __future__ import annotations

import copy
import threading
from typing import Any, Protocol

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import shares_of
from torchrl_rloo.data.rows import micro_batches, placeholder_rows, spread_actions, to_lazy_stack, unbind_rows
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.modules.policies import ScoredActions, TransformersWrapper, adapter_disabled
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update.four_bit import copy_four_bit, four_bit_layers


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


class Scorer(Protocol):
    """Scorer of the action tokens of rows, such as a policy with ``generate=False`` or a reference."""

    def score(self, rows: TensorDictBase) -> ScoredActions:
        """Return log-probs and entropies of the rows' action tokens."""


@torch.no_grad()
def record_log_probs(
    scorer: Scorer,
    rows: TensorDictBase,
    *,
    log_probs: NestedKey = keys.PROXIMAL_LOG_PROBS,
    entropy: NestedKey | None = None,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    ranks: Ranks | None = None,
    split: bool = True,
) -> TensorDictBase:
    """Score rows without gradient and write the log-prob of each action token, 0 on other tokens.

    Before the first update on a batch, the training model gives the log-probs of the proximal policy
    (``keys.PROXIMAL_LOG_PROBS``). A reference gives those of the KL term (``keys.REF_LOG_PROBS``).

    Args:
        scorer: scorer of the rows.
        rows: rows of any lengths, batch size ``[B]``; a lazy stack is written in place.
        log_probs: key of the log-probs, ``[T]`` float32 per row.
        entropy: key of the entropies of the sampled distribution, ``[T]`` per row, e.g. ``keys.PROXIMAL_ENTROPY``; None
            records none.
        micro_batch_size: largest number of rows per forward pass; None disables the limit.
        max_tokens: largest number of tokens per forward pass, as the scorer's packing counts them; None disables the
            limit.
        ranks: ranks that score together, each of which may hold only a part of the model. None scores alone.
        split: True if each rank passes the same rows, which are split among the ranks, and gets all scores. False if
            each passes its own rows, of which there may be none.

    Returns:
        The rows in the same order, batch size ``[B]``.

    Raises:
        ValueError: if a row has earlier segments, which the scores would not cover.

    Example::

        scorer = policy.get_new_version(generate=False)
        rows = record_log_probs(scorer, rows, micro_batch_size=8)
        rows[0]["proximal_log_probs", "full"]  # [T]
    """
    rows = to_lazy_stack(rows) if len(rows) else rows
    for row in unbind_rows(rows):
        refuse_segments(row, "record_log_probs")
    together = ranks is not None and ranks.data_size > 1
    if not len(rows) and (split or not together):
        return rows
    packing, mine = getattr(scorer, "packing", "none"), list(range(len(rows)))
    if together and split:
        shares = shares_of(rows, ranks.data_size, packing)
        mine = shares[ranks.data_rank]
    # Score this rank's rows, in as many passes as the other ranks, whose sharded weights this rank holds parts of
    limits = {"max_tokens": max_tokens, "packing": packing}
    parts = list(micro_batches(rows[mine], micro_batch_size, **limits)) if mine else []
    passes = max(ranks.all_gather(len(parts), "passes of scoring")) if together else len(parts)
    for part in parts:
        scored = scorer.score(part)
        for key, values in ((log_probs, scored.log_probs), (entropy, scored.entropy)):
            if key is not None:
                for row, full in zip(part.unbind(0), spread_actions(values, part, scored.actions), strict=True):
                    row.set(key, full)
    for _ in range(passes - len(parts)):
        scorer.score(placeholder_rows())
    if not together or not split:
        return rows
    # Exchange the scores
    written = [key for key in (log_probs, entropy) if key is not None]
    exchanged = ranks.all_gather([[rows[i][key].cpu() for key in written] for i in mine], "scores")[:: ranks.share_size]
    for share, theirs in zip(shares, exchanged, strict=True):
        for i, values in zip(share, theirs, strict=True):
            for key, value in zip(written, values, strict=True):
                rows[i].set(key, value)
    return rows
