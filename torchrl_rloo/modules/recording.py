"""Scores recorded on rows, for later steps that do not have the model."""

from __future__ import annotations

from typing import Protocol

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import as_lazy, micro_batches, spread_actions
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.modules.policies import ScoredActions


class Scorer(Protocol):
    """Anything that scores the action tokens of rows: a policy with ``generate=False``, or a reference."""

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
) -> TensorDictBase:
    """Score rows without gradient and write the score of each action token, 0 on other tokens.

    The training model before its first update of a batch gives the log-probs of the proximal policy
    (``keys.PROXIMAL_LOG_PROBS``); a reference gives those of the KL (``keys.REF_LOG_PROBS``).

    Args:
        scorer: scores the rows.
        rows: batch size ``[B]``, any lengths; a lazy stack is written in place.
        log_probs: key of the log-probs, ``[T]`` float32 on each row.
        entropy: key of the entropies of the sampled distribution, ``[T]``, e.g. ``keys.PROXIMAL_ENTROPY``; None for no
            entropies.
        micro_batch_size: rows of one forward pass; None for any number.
        max_tokens: tokens of one forward pass, as the scorer's packing counts them; None for any number.

    Returns:
        The rows, in their order.
    """
    rows = as_lazy(rows)
    for row in rows.unbind(0):
        refuse_segments(row, "record_log_probs")
    packing = getattr(scorer, "packing", "none")
    for part in micro_batches(rows, micro_batch_size, max_tokens=max_tokens, packing=packing) if len(rows) else ():
        scored = scorer.score(part)
        for key, values in ((log_probs, scored.log_probs), (entropy, scored.entropy)):
            if key is not None:
                for row, full in zip(part.unbind(0), spread_actions(values, part, scored.actions), strict=True):
                    row.set(key, full)
    return rows
