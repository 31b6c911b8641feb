"""Tokens whose log-prob and advantage vary together: their updates lower the entropy most.

Cui et al. 2025 (arXiv 2505.22617) measure the covariance of token ``t`` over all ``N`` action tokens of a step::

    Cov_t = (log pi(a_t) - 1/N sum_j log pi(a_j)) * (A_t - 1/N sum_j A_j)

Here ``pi`` is the policy before the update, so that the choice of tokens does not depend on micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchrl_rloo.runtime.lookup import Choice, number_field

Limits = tuple[float, float, float]  # of a step: mean log-prob, mean advantage, smallest rank of a chosen token


class _Covariance(Choice):
    """Base of rules that treat a ``share`` of the tokens in another way: those of the highest rank."""

    def _rank(self, log_probs: torch.Tensor, advantages: torch.Tensor, mean: float, advantage: float) -> torch.Tensor:
        log_probs = log_probs.double()
        return self._ranks((log_probs - mean) * (advantages.double() - advantage), log_probs)

    def limits(self, log_probs: torch.Tensor, advantages: torch.Tensor) -> Limits:
        """Return the limits of a step from all its ``N > 0`` tokens; shapes ``[N]``, ``[N]``."""
        means = float(log_probs.double().mean()), float(advantages.double().mean())
        ranks = self._rank(log_probs, advantages, *means)
        return (*means, float(ranks.topk(max(1, int(self.share * len(ranks)))).values[-1]))

    def chosen(self, log_probs: torch.Tensor, advantages: torch.Tensor, limits: Limits) -> torch.Tensor:
        """Return bool ``[B, A]``: tokens at or above the limit."""
        ranks = self._rank(log_probs, advantages, *limits[:2])
        return (ranks >= limits[2]) & ranks.isfinite()


@dataclass(frozen=True)
class ClipCov(_Covariance):
    """Clip-Cov: remove the gradient of some tokens whose covariance is between ``low`` and ``high``.

    The paper draws them at random. Here the trailing digits of their log-probs choose, the same in every split.
    """

    share: float = number_field(2e-4, above=True, high=1)  # share of all tokens
    low: float = number_field(1.0)  # bounds of the covariance
    high: float = number_field(5.0)

    def _ranks(self, covariance: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        inside = (covariance > self.low) & (covariance < self.high)
        return torch.where(inside, (log_probs * 1e7).remainder(1.0), -torch.inf)

    def __call__(self, losses: torch.Tensor, log_ratio: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return torch.where(chosen, 0.0, losses)


@dataclass(frozen=True)
class KLCov(_Covariance):
    """KL-Cov: add ``coeff * |log rho_t|`` to the loss of the tokens of the largest covariance."""

    share: float = number_field(2e-3, above=True, high=1)  # share of all tokens
    coeff: float = number_field(1.0, above=True)  # coefficient of the penalty

    def _ranks(self, covariance: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        return covariance

    def __call__(self, losses: torch.Tensor, log_ratio: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return losses + torch.where(chosen, self.coeff * log_ratio.abs(), 0.0)


COVARIANCES: dict[str, type] = {"clip": ClipCov, "kl": KLCov}
