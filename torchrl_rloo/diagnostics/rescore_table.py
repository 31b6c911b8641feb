"""Comparison of two rewards of the same rows: means, advantages, groups without signal, and ranking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torchrl_rloo.functional.advantages import ESTIMATORS
from torchrl_rloo.functional.statistics import group_ranges, has_signal, nanstd
from torchrl_rloo.runtime.lookup import resolve

MAX_LISTED = 10  # groups that change most


@dataclass(frozen=True)
class RewardSummary:
    """Numbers of one reward.

    Attributes:
        reward: mean over the rows that have one.
        reward_std: unbiased standard deviation over these rows.
        abstained: rows without a reward.
        dead_groups: groups without training signal: fewer than two rewards, or all equal.
        mean_advantage: mean absolute advantage over all rows.
        functions: mean score of each reward function.
    """

    reward: float
    reward_std: float
    abstained: int
    dead_groups: int
    mean_advantage: float
    functions: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardComparison:
    """Old and new rewards of the same rows.

    Attributes:
        rows: number of rows.
        groups: number of groups.
        estimator: name of the advantage estimator.
        old: numbers of the old rewards.
        new: numbers of the new rewards.
        changed_rewards: rows whose reward differs.
        changed_signs: rows whose advantage has another sign, or is 0 with only one of the rewards.
        newly_dead: groups that lose their signal.
        revived: groups that gain one.
        rank_agreement: Kendall's tau-b of the rows of a group, mean over the groups with a signal in both; 1 for the
            same order, -1 for the reverse. None without such a group.
        same_best: share of these groups that keep a best row.
        most_changed: ids of the groups whose advantages change most, largest change first.
        failures: failed samples by function and kind.
    """

    rows: int
    groups: int
    estimator: str
    old: RewardSummary
    new: RewardSummary
    changed_rewards: int
    changed_signs: int
    newly_dead: int
    revived: int
    rank_agreement: float | None
    same_best: float | None
    most_changed: list[int]
    failures: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain values, without NaN."""
        return _without_nan(asdict(self))

    def table(self) -> str:
        """Return the comparison as a table of text."""
        old, new = self.old, self.new
        lines = [f"{self.rows:,} rows in {self.groups:,} groups, advantages: {self.estimator}", ""]
        lines.append(f"{'':<34}{'old':>10}{'new':>10}{'change':>10}")
        lines.append(_line("reward", old.reward, new.reward))
        for name in dict.fromkeys([*old.functions, *new.functions]):
            lines.append(_line(f"  {name}", old.functions.get(name), new.functions.get(name)))
        lines.append(_line("standard deviation of the reward", old.reward_std, new.reward_std))
        lines.append(_line("rows without a reward", old.abstained, new.abstained))
        lines.append(_line("groups without signal", old.dead_groups, new.dead_groups))
        lines.append(_line("mean size of an advantage", old.mean_advantage, new.mean_advantage))
        lines.append("")
        lines.append(f"rewards that differ: {_share(self.changed_rewards, self.rows)} rows")
        lines.append(f"advantages with another sign: {_share(self.changed_signs, self.rows)} rows")
        lines.append(f"groups that lose their signal: {self.newly_dead:,}; that gain one: {self.revived:,}")
        if self.rank_agreement is None:
            lines.append("ranking: no group has a signal in both")
        else:
            lines.append(
                f"ranking within groups: Kendall's tau {self.rank_agreement:.3f}; best row kept in "
                f"{100 * self.same_best:.1f} % of the groups with a signal in both"
            )
        if self.most_changed:
            lines.append(f"groups that change most: {', '.join(map(str, self.most_changed))}")
        if self.failures:
            counted = ", ".join(f"{name} {count:,}" for name, count in sorted(self.failures.items()))
            lines.append(f"samples that functions failed on, and abstained: {counted}")
        return "\n".join(lines)


def compare_rewards(
    old: torch.Tensor,
    new: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    estimator: str = "rloo",
    old_scores: torch.Tensor | None = None,
    new_scores: torch.Tensor | None = None,
    old_names: Sequence[str] = (),
    new_names: Sequence[str] = (),
    failures: Mapping[str, int] | None = None,
) -> RewardComparison:
    """Compare two rewards of the same rows.

    Args:
        old: ``[N]`` old rewards, NaN where a row abstains.
        new: ``[N]`` new rewards.
        group_ids: ``[N]`` int64.
        estimator: name in :data:`~torchrl_rloo.functional.advantages.ESTIMATORS`.
        old_scores: ``[N, F]`` scores of the old functions; None if they are unknown.
        new_scores: ``[N, F']`` scores of the new functions; None if they are unknown.
        old_names: their names.
        new_names: their names.
        failures: failed samples by function and kind.

    Example:
        >>> ids = torch.tensor([5, 5, 6, 6])
        >>> compared = compare_rewards(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 1.0]), ids)
        >>> compared.changed_signs, compared.rank_agreement, compared.old.dead_groups, compared.most_changed
        (2, -1.0, 1, [5])
    """
    estimate = resolve("estimator", estimator, ESTIMATORS)
    ids, groups = group_ids.unique(return_inverse=True)
    advantages = [estimate(rewards.float(), groups) for rewards in (old, new)]
    alive = [has_signal(group_ranges(rewards, groups)) for rewards in (old, new)]
    sums = torch.zeros(len(ids)).index_add(0, groups, (advantages[1] - advantages[0]).abs().float())
    order = sums.argsort(descending=True, stable=True)[:MAX_LISTED]
    differs = (old != new) & ~(old.isnan() & new.isnan())
    tau, best = _ranking(old, new, groups, alive[0] & alive[1])
    return RewardComparison(
        rows=len(old),
        groups=len(ids),
        estimator=estimator,
        old=_summary(old, advantages[0], alive[0], old_scores, old_names),
        new=_summary(new, advantages[1], alive[1], new_scores, new_names),
        changed_rewards=int(differs.sum()),
        changed_signs=int((advantages[0].sign() != advantages[1].sign()).sum()),
        newly_dead=int((alive[0] & ~alive[1]).sum()),
        revived=int((alive[1] & ~alive[0]).sum()),
        rank_agreement=tau,
        same_best=best,
        most_changed=[int(ids[i]) for i in order if sums[i] > 0],
        failures=dict(failures or {}),
    )


def kendall_tau(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return Kendall's tau-b of two rankings of the same items, which corrects for ties.

    Kendall 1945, "The treatment of ties in ranking problems": the sum of the products of the signs of all pairwise
    differences, over the geometric mean of their squares.

    Args:
        x: ``[n]``, not all equal.
        y: ``[n]``, not all equal.

    Example:
        >>> kendall_tau(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0]))
        0.3333333333333333
    """
    a, b = ((values[:, None] - values[None]).sign().double() for values in (x, y))
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def _ranking(
    old: torch.Tensor, new: torch.Tensor, groups: torch.Tensor, both: torch.Tensor
) -> tuple[float | None, float | None]:
    """Return the mean of Kendall's tau, and the share of groups that keep a best row."""
    taus, kept = [], []
    order = groups.argsort(stable=True)
    for group, members in enumerate(order.split(torch.bincount(groups, minlength=len(both)).tolist())):
        if not both[group]:
            continue
        members = members[~old[members].isnan() & ~new[members].isnan()]
        x, y = old[members], new[members]
        if len(members) > 1 and bool(x.min() < x.max()) and bool(y.min() < y.max()):
            taus.append(kendall_tau(x, y))
            kept.append(bool(((x == x.max()) & (y == y.max())).any()))
    return (sum(taus) / len(taus), sum(kept) / len(kept)) if taus else (None, None)


def _summary(
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    alive: torch.Tensor,
    scores: torch.Tensor | None,
    names: Sequence[str],
) -> RewardSummary:
    known = scores is not None and scores.shape[1] == len(names)
    means = scores.nanmean(0).tolist() if known and len(names) else []
    return RewardSummary(
        reward=float(rewards.nanmean()),
        reward_std=float(nanstd(rewards)),
        abstained=int(rewards.isnan().sum()),
        dead_groups=int((~alive).sum()),
        mean_advantage=float(advantages.abs().mean()),
        functions=dict(zip(names, means, strict=True)) if means else {},
    )


def _line(name: str, old: float | None, new: float | None) -> str:
    def text(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign}.4f}"

    change = None if old is None or new is None else new - old
    return f"{name:<34}{text(old):>10}{text(new):>10}{text(change, '+'):>10}"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / max(total, 1):.1f} %)"


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and value != value else value
