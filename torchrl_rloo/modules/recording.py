"""Recording of scores on rows, for later steps without the model."""

from __future__ import annotations

from typing import Protocol

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import micro_batches, spread_actions, to_lazy_stack
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.modules.policies import ScoredActions


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

    Returns:
        The rows in the same order, batch size ``[B]``.

    Raises:
        ValueError: if a row has earlier segments, which the scores would not cover.

    Example::

        scorer = policy.get_new_version(generate=False)
        rows = record_log_probs(scorer, rows, micro_batch_size=8)
        rows[0]["proximal_log_probs", "full"]  # [T]
    """
    rows = to_lazy_stack(rows)
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
