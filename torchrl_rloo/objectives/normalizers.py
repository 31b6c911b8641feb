"""Normalizers of an optimizer step and weights of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import placeholder_rows, unbind_rows
from torchrl_rloo.objectives.ranks import mean_over_ranks
from torchrl_rloo.objectives.signal import notify_without_tokens


@dataclass(frozen=True)
class Normalizers:
    """Numbers shared by all micro-batches of an optimizer step, computed once from all its rows.

    Attributes:
        num_rows: rows of the step (pairs for paired losses), including rows without a gradient.
        num_tokens: action tokens of the step that the loss covers.
        entropy_threshold: smallest entropy, in nats, of a token with a policy gradient. None sets no threshold.
        reference_point: KTO's ``z_0`` in nats. None for other losses.
        mean_reward: weighted mean score of all completions. None if no term needs it.
    """

    num_rows: float
    num_tokens: float = 0.0
    entropy_threshold: float | None = None
    reference_point: float | None = None
    mean_reward: float | None = None


def multiplicity(rows: TensorDictBase) -> torch.Tensor:
    """Return how many identical rows each row stands for, ``[B]`` float32."""
    if not len(rows):
        return torch.zeros(0)
    given = rows.get(keys.MULTIPLICITY, None)
    return torch.ones(len(rows)) if given is None else given.reshape(-1).float()


def row_weights(rows: TensorDictBase) -> torch.Tensor:
    """Return the factor of each row's loss, ``sample_weight`` times ``multiplicity``, ``[B]`` float32."""
    given = rows.get(keys.SAMPLE_WEIGHT, None) if len(rows) else None
    return multiplicity(rows) if given is None else multiplicity(rows) * given.reshape(-1).float()


def zero_loss(score: Callable[[TensorDictBase], torch.Tensor]) -> torch.Tensor:
    """Return a loss of 0 with zero gradients for a step, or a rank, without rows.

    It runs a row of two tokens, so that a rank without rows takes part in every call of DDP and FSDP.

    Args:
        score: function from rows ``[1]`` to a tensor that depends on all trained parameters.
    """
    return score(placeholder_rows()).sum() * 0.0


def _is_counted(row: TensorDictBase, mask_truncated_completions: bool) -> bool:
    return not mask_truncated_completions or not bool(row[keys.TRUNCATED])


def row_normalizers(
    rows: TensorDictBase, *, mask_truncated_completions: bool = False, process_group=None
) -> Normalizers:
    """Count the rows and action tokens of a step.

    Args:
        rows: all rows of an optimizer step on this rank.
        mask_truncated_completions: True excludes the tokens of truncated rows.
        process_group: group whose ranks share the step. Counts are averaged over them, so gradients must be averaged
            as well, as ``DistributedDataParallel`` and FSDP do. None counts this rank only.

    Returns:
        Normalizers with ``num_rows`` and ``num_tokens``.
    """
    weights = multiplicity(rows).double().cpu()
    lengths = [
        float(row[keys.ACTION_MASK].sum()) * _is_counted(row, mask_truncated_completions) for row in unbind_rows(rows)
    ]
    totals = torch.stack([weights.sum(), (weights * weights.new_tensor(lengths)).sum()])
    normalizers = Normalizers(*mean_over_ranks(totals, process_group).tolist())
    notify_without_tokens(rows, normalizers.num_tokens)
    return normalizers


def entropy_threshold(
    rows: TensorDictBase, fraction: float, *, mask_truncated_completions: bool = False, process_group=None
) -> float:
    """Return the entropy that ``fraction`` of the action tokens of a step reach.

    Args:
        rows: all rows of an optimizer step on this rank, with recorded entropies.
        fraction: share of the tokens, in (0, 1].
        mask_truncated_completions: True excludes the tokens of truncated rows.
        process_group: group whose ranks share the step. None counts this rank only.

    Returns:
        The threshold in nats; 0 without tokens.

    Raises:
        KeyError: if the rows have no recorded entropies.
    """
    if len(rows) and keys.PROXIMAL_ENTROPY not in rows.keys(True):
        raise KeyError(f"rows require {keys.PROXIMAL_ENTROPY}; record it with record_log_probs(entropy=...)")
    # Repeat the entropies of a merged row for each row that it stands for
    times = multiplicity(rows).long().tolist()
    values = [
        row[keys.PROXIMAL_ENTROPY][row[keys.ACTION_MASK]].cpu().repeat(n)
        for row, n in zip(unbind_rows(rows), times, strict=True)
        if _is_counted(row, mask_truncated_completions)
    ]
    # Gather those of all ranks, so every rank finds the same threshold
    values = torch.cat([torch.zeros(0), *values])
    if process_group is not None:
        gathered = [None] * torch.distributed.get_world_size(process_group)
        torch.distributed.all_gather_object(gathered, values, group=process_group)
        values = torch.cat(gathered)
    if not len(values):
        return 0.0
    return float(values.topk(max(1, round(fraction * len(values)))).values[-1])
