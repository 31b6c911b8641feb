"""Recording of scores on rows, for later steps without the model."""

from __future__ import annotations

from typing import Protocol

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import micro_batches, placeholder_rows, spread_actions, to_lazy_stack, unbind_rows
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.data.share import shares_of
from torchrl_rloo.modules.policies import ScoredActions
from torchrl_rloo.runtime.ranks import Ranks


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
    told = ranks.all_gather([[rows[i][key].cpu() for key in written] for i in mine], "scores")[:: ranks.share_size]
    for share, theirs in zip(shares, told, strict=True):
        for i, values in zip(share, theirs, strict=True):
            for key, value in zip(written, values, strict=True):
                rows[i].set(key, value)
    return rows
