"""From one loss value per action token to the scalar that is minimised.

Every normaliser is a number that is given, never a count of the tensor at hand. A step's gradient is therefore the same
however its rows are split into micro-batches or over ranks, and however they are padded or
packed. Numbers in parentheses are those of arXiv.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Aggregation = Callable[[torch.Tensor, torch.Tensor, float, float, "float | None"], torch.Tensor]


def sequence_sum(values, mask, num_rows, num_tokens, constant):
    r""":math:`\frac{1}{N} \sum_i \sum_t m_{it} \ell_{it}`: a sequence is one action (RLOO, 2402.14740)."""
    return torch.where(mask, values, 0.0).sum() / num_rows


def sequence_mean(values, mask, num_rows, num_tokens, constant):
    r""":math:`\frac{1}{N} \sum_i \frac{1}{L_i} \sum_t m_{it} \ell_{it}`: of each sequence (GRPO, 2402.03300)."""
    sums = torch.where(mask, values, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() / num_rows


def token_mean(values, mask, num_rows, num_tokens, constant):
    r""":math:`\frac{1}{\sum_i L_i} \sum_i \sum_t m_{it} \ell_{it}`: all tokens weigh the same (DAPO, 2503.14476)."""
    return torch.where(mask, values, 0.0).sum() / num_tokens


def constant_length(values, mask, num_rows, num_tokens, constant):
    r""":math:`\frac{1}{N C} \sum_i \sum_t m_{it} \ell_{it}`, with a fixed length ``C`` (Dr. GRPO, 2503.20783)."""
    return torch.where(mask, values, 0.0).sum() / (num_rows * constant)


AGGREGATIONS: dict[str, Aggregation] = {
    "sequence_sum": sequence_sum,
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": constant_length,
}


def aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: str | Aggregation,
    *,
    num_rows: float | None = None,
    num_tokens: float | None = None,
    constant: float | None = None,
) -> torch.Tensor:
    """Sums per-token losses under the normaliser that ``mode`` names.

    Args:
        values: ``[B, A]``, one loss value per action token.
        mask: ``[B, A]`` bool, True on the tokens that count.
        mode: a name in :data:`AGGREGATIONS`, or a function ``(values, mask, num_rows, num_tokens, constant)``.
        num_rows: rows of the whole optimizer step, over all ranks; default ``B``.
        num_tokens: tokens that count of the whole optimizer step, over all ranks; default those of ``mask``.
        constant: the length ``C`` of ``"constant"``.

    Returns:
        A scalar.

    Example:
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> values = torch.tensor([[1.0, 3.0], [2.0, 0.0]])
        >>> [float(aggregate(values, mask, mode)) for mode in ("sequence_sum", "sequence_mean", "token_mean")]
        [3.0, 2.0, 2.0]
    """
    function = AGGREGATIONS[mode] if isinstance(mode, str) else mode
    num_rows = len(values) if num_rows is None else num_rows
    num_tokens = int(mask.sum()) if num_tokens is None else num_tokens
    return function(values, mask, max(num_rows, 1e-12), max(num_tokens, 1e-12), constant)
