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


@torch.no_grad()
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
    sampler, trainer = sampler_log_probs.double(), trainer_log_probs.double()
    difference = trainer - sampler
    # Log-ratios of tokens, and of rows that have action tokens
    token_log_ratios = difference[mask]
    row_log_ratios = torch.where(mask, difference, 0.0).sum(-1)[mask.any(-1)]
    # Size of the gap per token, and the tokens that leave the expected range of ratios
    ratio = token_log_ratios.exp()
    inside = (ratio >= RATIO_BOUNDS[0]) & (ratio <= RATIO_BOUNDS[1])
    size = token_log_ratios.abs()
    return LogProbGap(
        mean=size.mean(),
        max=size.max() if size.numel() else size.new_tensor(torch.nan),
        k3=k3(sampler[mask], trainer[mask]).mean(),
        token_ess=effective_sample_size(token_log_ratios),
        row_ess=effective_sample_size(row_log_ratios),
        outside_share=(~inside).double().mean(),
        surprisal=-sampler[mask].mean(),
        tokens=mask.sum().double(),
    )
