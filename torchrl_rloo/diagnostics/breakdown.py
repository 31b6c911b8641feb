"""Metrics of parts of a batch: rows by outcome and by task, spread within groups, and diversity of completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import TOKEN_STATISTICS, token_statistics
from torchrl_rloo.functional.statistics import distinct_share, group_ranges, overlap

SOLVED = 1.0  # reward of a solved row, as in PassRatePool
_ROUNDING = 1e-6


class RowStatistics(NamedTuple):
    """Numbers about ``B`` rows that all metrics of a batch read.

    Attributes:
        rewards: ``[B]``, NaN where a row abstains.
        groups: ``[B]`` int64, index of the row's group.
        lengths: ``[B]`` action tokens.
        truncated: ``[B]`` bool.
        sums: entries of :func:`~torchrl_rloo.data.metadata.token_statistics` that all rows have; ``[B]``, or a list of
            ``B`` tensors if their sizes differ.
    """

    rewards: torch.Tensor
    groups: torch.Tensor
    lengths: torch.Tensor
    truncated: torch.Tensor
    sums: Mapping[str, torch.Tensor | list[torch.Tensor]]


def row_statistics(rows: TensorDictBase, rewards: torch.Tensor) -> RowStatistics:
    """Return the numbers about rows, or about their metadata.

    Args:
        rows: ``[B]`` finished rows or metadata.
        rewards: ``[B]`` reward of each row, NaN where it abstains.
    """
    split = rows.unbind(0)
    if keys.ACTION_COUNT in rows.keys():
        found = [{name: row[name] for name in TOKEN_STATISTICS if name in row.keys()} for row in split]
    else:
        found = [token_statistics(row) for row in split]
    columns = {name: [each[name] for each in found] for name in TOKEN_STATISTICS if all(name in e for e in found)}
    sums = {name: col if name == keys.NGRAM_SKETCH else torch.stack(col) for name, col in columns.items()}
    groups = rows[keys.GROUP_ID].unique(return_inverse=True)[1]
    return RowStatistics(rewards, groups, sums[keys.ACTION_COUNT].float(), rows[keys.TRUNCATED].reshape(-1), sums)


def part_metrics(statistics: RowStatistics, part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return share, mean length, truncation, entropy and KL of some rows; only the share if there are none.

    Args:
        statistics: numbers about all ``B`` rows.
        part: ``[B]`` bool, True for the rows of the part.
    """
    metrics = {"share": part.float().mean()}
    if not part.any():
        return metrics
    lengths = statistics.lengths[part]
    metrics |= {"mean_length": lengths.mean(), "clipped_ratio": statistics.truncated[part].float().mean()}
    for name, key in (("entropy", keys.SURPRISAL), ("kl", keys.KL_TO_REF)):
        if key in statistics.sums:
            metrics[name] = statistics.sums[key][part].sum() / lengths.sum().clamp(min=1)
    return metrics


def outcome_metrics(statistics: RowStatistics) -> dict[str, torch.Tensor]:
    """Return the metrics of solved and of unsolved rows; rows that abstained are in neither part."""
    rewards = statistics.rewards
    parts = {"solved": rewards >= SOLVED - _ROUNDING, "unsolved": rewards < SOLVED - _ROUNDING}
    return {
        f"outcome/{outcome}/{name}": value
        for outcome, part in parts.items()
        for name, value in part_metrics(statistics, part).items()
    }


def named_metrics(statistics: RowStatistics, kind: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the metrics of each task of a mixture, or of each role.

    Args:
        statistics: numbers about all ``B`` rows.
        kind: first part of the metrics' names: ``"tasks"`` or ``"roles"``.
        names: ``B`` names.
    """
    metrics = {}
    for name in sorted(set(names)):
        mine = torch.tensor([other == name for other in names])
        found = part_metrics(statistics, mine) | {
            "reward": statistics.rewards[mine].nanmean(),
            "frac_reward_zero_std": share_of_equal_groups(statistics.rewards[mine], statistics.groups[mine]),
        }
        metrics |= {f"{kind}/{name}/{metric}": value for metric, value in found.items()}
    return metrics


def group_metrics(statistics: RowStatistics) -> dict[str, torch.Tensor]:
    """Return the spread of rewards and lengths within groups, and the correlation of the two.

    Groups with fewer than two scored rows are left out. The correlation is absent if one of the two never varies.
    """
    given = ~statistics.rewards.isnan()
    groups = statistics.groups[given]
    if not len(groups):
        return {}
    counts = torch.bincount(groups)

    def centered(values: torch.Tensor) -> torch.Tensor:
        values = values[given].double()
        return values - (torch.zeros(len(counts)).double().index_add_(0, groups, values) / counts.clamp(min=1))[groups]

    def mean_std(deviations: torch.Tensor) -> torch.Tensor:
        squares = torch.zeros(len(counts)).double().index_add_(0, groups, deviations.square())
        return (squares[counts > 1] / (counts[counts > 1] - 1)).sqrt().mean()

    if not (counts > 1).any():
        return {}
    rewards, lengths = centered(statistics.rewards), centered(statistics.lengths)
    metrics = {"group/reward_std": mean_std(rewards), "group/length_std": mean_std(lengths)}
    scale = (rewards.square().sum() * lengths.square().sum()).sqrt()
    if scale > _ROUNDING:
        metrics["group/length_correlation"] = (rewards * lengths).sum() / scale
    return metrics


def diversity_metrics(statistics: RowStatistics) -> dict[str, float | torch.Tensor]:
    """Return how different the completions of a group are, and how much they repeat themselves."""
    sums = statistics.sums
    metrics: dict[str, float | torch.Tensor] = {"diversity/repetition": sums[keys.REPETITION].float().mean()}
    several = [members for members in _members(statistics.groups) if len(members) > 1]
    if several:
        hashes, sketches = sums[keys.COMPLETION_HASH], sums[keys.NGRAM_SKETCH]
        distinct = [distinct_share(hashes[members].tolist()) for members in several]
        shared = [overlap([sketches[i] for i in members]) for members in several]
        metrics["diversity/distinct"] = sum(distinct) / len(distinct)
        metrics["diversity/ngram_overlap"] = sum(shared) / len(shared)
    return metrics


def answer_metrics(statistics: RowStatistics, answers: Sequence[str | None]) -> dict[str, float]:
    """Return how different the answers of a group are; nothing if no group has two rows.

    Args:
        statistics: numbers about all ``B`` rows.
        answers: ``B`` extracted answers; None, where a completion has none, counts as one answer.
    """
    several = [members for members in _members(statistics.groups) if len(members) > 1]
    shares = [distinct_share([answers[i] for i in members]) for members in several]
    return {"diversity/distinct_answers": sum(shares) / len(shares)} if shares else {}


def share_of_equal_groups(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the share of groups with at least two scored rows, all of equal reward.

    Args:
        rewards: ``[B]``, NaN where a row abstains.
        groups: ``[B]`` int64, any number per group.
    """
    low, high, answered = group_ranges(rewards, groups.unique(return_inverse=True)[1])
    return ((answered > 1) & (low == high)).float().mean()


def _members(groups: torch.Tensor) -> Iterator[list[int]]:
    """Yield the rows of each group."""
    found: dict[int, list[int]] = {}
    for row, group in enumerate(groups.tolist()):
        found.setdefault(group, []).append(row)
    yield from found.values()
