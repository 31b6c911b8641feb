"""Aggregations: from one loss value per action token to the scalar that is minimized.

An aggregation is called with ``(values [B, A], mask [B, A], num_rows, num_tokens)``. The two normalizers are given
numbers, never counts of the tensors: a step's gradient is then the same however its rows are split into micro-batches
or over ranks, padded or packed. (Numbers in parentheses are arXiv ids.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchrl_rloo.functional.choices import Choice, number, resolve

Aggregation = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]


def sequence_sum(values, mask, num_rows, num_tokens) -> torch.Tensor:
    r"""Take a sequence as one action: :math:`\frac{1}{N} \sum_i \sum_t m_{it} \ell_{it}` (RLOO, 2402.14740)."""
    return torch.where(mask, values, 0.0).sum() / num_rows


def sequence_mean(values, mask, num_rows, num_tokens) -> torch.Tensor:
    r"""Average each sequence: :math:`\frac{1}{N} \sum_i \frac{1}{L_i} \sum_t m_{it} \ell_{it}` (GRPO, 2402.03300)."""
    sums = torch.where(mask, values, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() / num_rows


def token_mean(values, mask, num_rows, num_tokens) -> torch.Tensor:
    r"""Weigh all tokens alike: :math:`\frac{1}{\sum_i L_i} \sum_i \sum_t m_{it} \ell_{it}` (DAPO, 2503.14476)."""
    return torch.where(mask, values, 0.0).sum() / num_tokens


@dataclass(frozen=True)
class ConstantLength(Choice):
    r"""Divide by a fixed length :math:`C`: :math:`\frac{1}{N C} \sum_i \sum_t m_{it} \ell_{it}` (Dr. GRPO, 2503.20783).

    Args:
        length: :math:`C` in tokens, e.g. ``max_new_tokens``.
    """

    length: float = number(above=True)

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
    """Sum per-token losses under the normalizer that ``mode`` names.

    Args:
        values: ``[B, A]``, one loss value per action token.
        mask: ``[B, A]`` bool, True on the tokens that count.
        mode: a choice from :data:`AGGREGATIONS`, see :func:`~torchrl_rloo.functional.choices.resolve`.
        num_rows: rows of the whole optimizer step, over all ranks; default ``B``.
        num_tokens: tokens that count of the whole optimizer step, over all ranks; default those of ``mask``.

    Returns:
        A scalar.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> values = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
        >>> [float(aggregate(values, mask, mode)) for mode in ("sequence_sum", "sequence_mean", "token_mean")]
        [3.0, 2.0, 2.0]
    """
    num_rows = len(values) if num_rows is None else num_rows
    num_tokens = int(mask.sum()) if num_tokens is None else num_tokens
    return resolve("aggregation", mode, AGGREGATIONS)(values, mask, max(num_rows, 1e-12), max(num_tokens, 1e-12))
