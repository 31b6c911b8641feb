r"""How far the log-probs of a sampler and of a trainer lie apart, on tokens that the sampler drew.

Both are to be of one distribution under the same weights: what remains between them is rounding, old weights, or a
distribution that one of the two does not apply.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchrl_rloo.functional.kl import k3
from torchrl_rloo.functional.statistics import effective_sample_size

RATIO_BOUNDS = (0.9, 1.1)


class LogProbGap(NamedTuple):
    r"""What :func:`log_prob_gap` measures, float64 scalars; all but ``tokens`` are NaN where there is no token.

    Attributes:
        mean: of :math:`|\log \pi(a_t) - \log \mu(a_t)|` over the action tokens, in nats.
        max: the largest of them.
        k3: mean k3 estimate of :math:`KL(\mu \| \pi)` per action token, in nats.
        token_ess: effective sample size of the tokens' importance ratios :math:`\pi / \mu`, as a share of the tokens.
        row_ess: the same of whole rows, whose ratio is the product of their tokens', as a share of the rows.
        outside: share of the tokens whose ratio is outside :data:`RATIO_BOUNDS`.
        surprisal: mean of :math:`-\log \mu(a_t)`, in nats, which estimates the sampler's entropy: what a gap is small
            or large beside.
        tokens: number of action tokens.
    """

    mean: torch.Tensor
    max: torch.Tensor
    k3: torch.Tensor
    token_ess: torch.Tensor
    row_ess: torch.Tensor
    outside: torch.Tensor
    surprisal: torch.Tensor
    tokens: torch.Tensor


@torch.no_grad()
def log_prob_gap(sampler_log_probs: torch.Tensor, trainer_log_probs: torch.Tensor, mask: torch.Tensor) -> LogProbGap:
    r"""Compares :math:`\log \mu`, by which tokens were sampled, with :math:`\log \pi`, by which they are trained.

    All figures are of all tokens (or rows) at once, so those of several batches are those of the rows put together,
    padded to one width; there is nothing to average. Rows without action tokens do not count. A difference that is NaN
    makes the mean and the largest NaN, and counts as outside.

    Args:
        sampler_log_probs: ``[B, A]`` in nats; anything outside the mask.
        trainer_log_probs: ``[B, A]`` of the same tokens, in nats.
        mask: ``[B, A]`` bool, True on action tokens.

    Example:
        >>> gap = log_prob_gap(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2).bool())
        >>> gap.mean.item(), gap.max.item(), gap.outside.item()
        (0.25, 0.5, 0.5)
    """
    sampler, trainer = sampler_log_probs.double(), trainer_log_probs.double()
    difference = trainer - sampler
    of_tokens = difference[mask]
    of_rows = torch.where(mask, difference, 0.0).sum(-1)[mask.any(-1)]
    ratio = of_tokens.exp()
    inside = (ratio >= RATIO_BOUNDS[0]) & (ratio <= RATIO_BOUNDS[1])
    size = of_tokens.abs()
    return LogProbGap(
        mean=size.mean(),
        max=size.max() if size.numel() else size.new_tensor(torch.nan),
        k3=k3(sampler[mask], trainer[mask]).mean(),
        token_ess=effective_sample_size(of_tokens),
        row_ess=effective_sample_size(of_rows),
        outside=(~inside).double().mean(),
        surprisal=-sampler[mask].mean(),
        tokens=mask.sum().double(),
    )
