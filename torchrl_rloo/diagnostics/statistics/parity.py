r"""Gap between the log-probs of a sampler and a trainer, on tokens that the sampler drew.

Both should be log-probs of one distribution under the same weights. A gap comes from rounding, from stale weights, or
from sampling settings that only one of the two applies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchrl_rloo.functional.kl import k3
from torchrl_rloo.functional.statistics import effective_sample_size

RATIO_BOUNDS = (0.9, 1.1)


class LogProbGap(NamedTuple):
    r"""Result of :func:`log_prob_gap`, float64 scalars; all except ``tokens`` are NaN without action tokens.

    Attributes:
        mean: mean of :math:`|\log \pi(a_t) - \log \mu(a_t)|` over the action tokens, in nats.
        max: maximum of :math:`|\log \pi(a_t) - \log \mu(a_t)|` over the action tokens, in nats.
        k3: mean k3 estimate of :math:`KL(\mu \| \pi)` per action token, in nats.
        token_ess: effective sample size of the tokens' importance ratios :math:`\pi / \mu`, as a share of the tokens.
        row_ess: effective sample size of the rows' ratios, products over their tokens, as a share of the rows.
        outside_share: share of the tokens whose ratio is outside :data:`RATIO_BOUNDS`.
        surprisal: mean of :math:`-\log \mu(a_t)`, in nats, which estimates the sampler's entropy. Compare gaps to it.
        tokens: number of action tokens.
    """

    mean: torch.Tensor
    max: torch.Tensor
    k3: torch.Tensor
    token_ess: torch.Tensor
    row_ess: torch.Tensor
    outside_share: torch.Tensor
    surprisal: torch.Tensor
    tokens: torch.Tensor


class RowGaps(NamedTuple):
    r"""Gap on each row, ``[B]`` float64 each; those of several batches may be concatenated.

    Attributes:
        tokens: number of action tokens.
        size: sum of :math:`|\log \pi(a_t) - \log \mu(a_t)|`.
        largest: maximum of it; 0 without action tokens.
        k3: sum of the k3 estimates.
        outside: number of tokens whose ratio is outside :data:`RATIO_BOUNDS`.
        surprisal: sum of :math:`-\log \mu(a_t)`.
        log_ratio: sum of :math:`\log \pi(a_t) - \log \mu(a_t)`.
        ratios: logarithm of the sum of the tokens' ratios.
        squares: logarithm of the sum of their squares.
    """

    tokens: torch.Tensor
    size: torch.Tensor
    largest: torch.Tensor
    k3: torch.Tensor
    outside: torch.Tensor
    surprisal: torch.Tensor
    log_ratio: torch.Tensor
    ratios: torch.Tensor
    squares: torch.Tensor


@torch.no_grad()
def row_gaps(sampler_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor, mask: torch.Tensor) -> RowGaps:
    """Compare the log-probs of each row; the arguments are those of :func:`log_prob_gap`."""
    sampler, trainer = sampler_log_probs.double(), trainer_log_probs.double()
    difference = torch.where(mask, trainer - sampler, 0.0)
    size, ratio = difference.abs(), difference.exp()
    inside = (ratio >= RATIO_BOUNDS[0]) & (ratio <= RATIO_BOUNDS[1])
    log_ratios = difference.masked_fill(~mask, -torch.inf)
    return RowGaps(
        tokens=mask.sum(1).double(),
        size=size.sum(1),
        largest=torch.cat([size.new_zeros(len(size), 1), size], 1).amax(1),
        k3=torch.where(mask, k3(sampler, trainer), 0.0).sum(1),
        outside=(mask & ~inside).sum(1).double(),
        surprisal=-torch.where(mask, sampler, 0.0).sum(1),
        log_ratio=difference.sum(1),
        ratios=log_ratios.logsumexp(1),
        squares=(2 * log_ratios).logsumexp(1),
    )


def total_gap(gaps: RowGaps) -> LogProbGap:
    """Return the gap on all rows together."""
    tokens = gaps.tokens.sum()
    token_ess = (2 * gaps.ratios.logsumexp(0) - gaps.squares.logsumexp(0) - tokens.log()).exp()
    return LogProbGap(
        mean=gaps.size.sum() / tokens,
        max=gaps.largest.max() if tokens else tokens.new_tensor(torch.nan),
        k3=gaps.k3.sum() / tokens,
        token_ess=token_ess,
        row_ess=effective_sample_size(gaps.log_ratio[gaps.tokens > 0]),
        outside_share=gaps.outside.sum() / tokens,
        surprisal=gaps.surprisal.sum() / tokens,
        tokens=tokens,
    )


def log_prob_gap(sampler_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor, mask: torch.Tensor) -> LogProbGap:
    r"""Compare the sampler's log-probs :math:`\log \mu` with the trainer's :math:`\log \pi` of the same tokens.

    All values are over all tokens or rows. To measure several batches, concatenate them padded to one width; averages
    over batches would differ. Rows without action tokens are ignored. A NaN difference makes ``mean`` and ``max`` NaN,
    and counts as outside.

    Args:
        sampler_log_probs: ``[B, A]`` in nats; ignored outside the mask.
        trainer_log_probs: ``[B, A]`` in nats; ignored outside the mask.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        Float64 scalars.

    Example:
        >>> gap = log_prob_gap(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2).bool())
        >>> gap.mean.item(), gap.max.item(), gap.outside_share.item()
        (0.25, 0.5, 0.5)
    """
    return total_gap(row_gaps(sampler_log_probs, trainer_log_probs, mask))
