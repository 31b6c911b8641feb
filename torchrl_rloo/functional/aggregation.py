"""Aggregations of one loss value per action token to the scalar that the optimizer minimizes.

An aggregation is called with ``(values [B, A], mask [B, A], num_rows, num_tokens)``. The caller passes the two
normalizers, so the gradient of a step does not depend on micro-batches, ranks, padding or packing. In the equations
``l_it`` is the loss of token ``t`` in row ``i`` and ``m_it`` its mask. Row ``i`` has ``L_i`` tokens, and ``N`` is
``num_rows``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchrl_rloo.functional.choices import Choice, number_field, resolve

Aggregation = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]


def sequence_sum(values, mask, num_rows, num_tokens) -> torch.Tensor:
    """Sum over tokens, average over rows: ``1/N sum_i sum_t m_it l_it`` (RLOO, arXiv 2402.14740)."""
    return torch.where(mask, values, 0.0).sum() / num_rows


def sequence_mean(values, mask, num_rows, num_tokens) -> torch.Tensor:
    """Average over tokens, then over rows: ``1/N sum_i 1/L_i sum_t m_it l_it`` (GRPO, arXiv 2402.03300)."""
    sums = torch.where(mask, values, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() / num_rows


def token_mean(values, mask, num_rows, num_tokens) -> torch.Tensor:
    """Average over all tokens: ``1/num_tokens sum_i sum_t m_it l_it`` (DAPO, arXiv 2503.14476)."""
    return torch.where(mask, values, 0.0).sum() / num_tokens


@dataclass(frozen=True)
class ConstantLength(Choice):
    """Division by a fixed length ``C``: ``1/(N C) sum_i sum_t m_it l_it`` (Dr. GRPO, arXiv 2503.20783).

    Args:
        length: ``C`` in tokens, e.g. ``max_new_tokens``.
    """

    length: float = number_field(above=True)

    def __call__(self, values, mask, num_rows, num_tokens) -> torch.Tensor:
        return torch.where(mask, values, 0.0).sum() / (num_rows * self.length)


AGGREGATIONS: dict[str, Aggregation | type] = {
    "sequence_sum": sequence_sum,
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": ConstantLength,
}


def aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: str | Aggregation,
    *,
    num_rows: float | None = None,
    num_tokens: float | None = None,
) -> torch.Tensor:
    """Reduce per-token losses to a scalar.

    Args:
        values: ``[B, A]``, one loss value per action token.
        mask: ``[B, A]`` bool, True on the tokens that count.
        mode: choice from :data:`AGGREGATIONS`, see :func:`~torchrl_rloo.functional.choices.resolve`.
        num_rows: rows of the whole optimizer step over all ranks. None takes ``B``.
        num_tokens: counted tokens of the whole optimizer step over all ranks. None takes those of ``mask``.

    Returns:
        A scalar.

    Raises:
        ValueError: if ``mode`` is unknown.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> values = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
        >>> [float(aggregate(values, mask, mode)) for mode in ("sequence_sum", "sequence_mean", "token_mean")]
        [3.0, 2.0, 2.0]
    """
    num_rows = len(values) if num_rows is None else num_rows
    num_tokens = int(mask.sum()) if num_tokens is None else num_tokens
    return resolve("aggregation", mode, AGGREGATIONS)(values, mask, max(num_rows, 1e-12), max(num_tokens, 1e-12))
