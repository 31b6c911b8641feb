"""Stored rows again: other rewards and their comparison with the old ones, or the log-probs of another model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import final_return
from torchrl_rloo.data.rows import concatenate, ragged, stack_rows, unbind_rows
from torchrl_rloo.data.stop_reasons import abstains, stop_reason
from torchrl_rloo.envs.transforms.reward import make_reward_batch
from torchrl_rloo.functional.advantages import ESTIMATORS
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.statistics import group_ranges, has_signal, nanstd
from torchrl_rloo.images.parts import image_paths
from torchrl_rloo.modules.reference import Scorer, record_log_probs
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.rollouts import RolloutFiles, RolloutWriter
from torchrl_rloo.rewards.executors import Executor
from torchrl_rloo.rewards.protocol import RewardBatch, TrainerState
from torchrl_rloo.rewards.registry import RewardSpec
from torchrl_rloo.rewards.runner import RewardRunner
from torchrl_rloo.runtime.lookup import resolve

MAX_LISTED = 10  # groups that change most


# Numbers of each reward, and their names in the table
_NUMBERS = {
    "reward_std": "standard deviation of the reward",
    "abstained": "rows without a reward",
    "dead_groups": "groups without signal",
    "mean_advantage": "mean size of an advantage",
}


@dataclass(frozen=True)
class RewardComparison:
    """Old and new rewards of the same rows; ``old`` and ``new`` have ``reward``, ``functions`` and numbers by name."""

    rows: int
    groups: int
    estimator: str
    old: dict[str, Any]
    new: dict[str, Any]
    changed_rewards: int
    changed_signs: int
    newly_dead: int
    revived: int
    rank_agreement: float | None  # mean of Kendall's tau over the groups with a signal in both
    same_best: float | None  # share of these groups that keep a best row
    most_changed: list[int]
    failures: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain values, without NaN."""
        return _without_nan(asdict(self))

    def table(self) -> str:
        """Return the comparison as a table of text."""
        old, new = self.old, self.new
        names = dict.fromkeys([*old["functions"], *new["functions"]])
        lines = [
            f"{self.rows:,} rows in {self.groups:,} groups, advantages: {self.estimator}",
            "",
            f"{'':<34}{'old':>10}{'new':>10}{'change':>10}",
            _line("reward", old["reward"], new["reward"]),
            *(_line(f"  {name}", old["functions"].get(name), new["functions"].get(name)) for name in names),
            *(_line(title, old[name], new[name]) for name, title in _NUMBERS.items()),
            "",
            f"rewards that differ: {_share(self.changed_rewards, self.rows)} rows",
            f"advantages with another sign: {_share(self.changed_signs, self.rows)} rows",
            f"groups that lose their signal: {self.newly_dead:,}; that gain one: {self.revived:,}",
            "ranking: no group has a signal in both"
            if self.rank_agreement is None
            else f"ranking within groups: Kendall's tau {self.rank_agreement:.3f}; best row kept in "
            f"{100 * self.same_best:.1f} % of the groups with a signal in both",
        ]
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
    functions: Sequence[Mapping[str, float]] = ({}, {}),
    failures: Mapping[str, int] | None = None,
) -> RewardComparison:
    """Compare two rewards ``[N]`` of the same rows, NaN where a row abstains; ``functions`` are means by function.

    Example:
        >>> ids = torch.tensor([5, 5, 6, 6])
        >>> compared = compare_rewards(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, 1.0, 1.0]), ids)
        >>> compared.changed_signs, compared.rank_agreement, compared.old["dead_groups"], compared.most_changed
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
    numbers = [
        {
            "reward": float(rewards.nanmean()),
            "reward_std": float(nanstd(rewards)),
            "abstained": int(rewards.isnan().sum()),
            "dead_groups": int((~alive[k]).sum()),
            "mean_advantage": float(advantages[k].abs().mean()),
            "functions": dict(functions[k]),
        }
        for k, rewards in enumerate((old, new))
    ]
    return RewardComparison(
        rows=len(old),
        groups=len(ids),
        estimator=estimator,
        old=numbers[0],
        new=numbers[1],
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
    """Return Kendall's tau-b of two rankings ``[n]`` of the same items, neither all equal; it corrects for ties.

    Kendall 1945, "The treatment of ties in ranking problems": the sum of the products of the signs of all pairwise
    differences, over the geometric mean of their squares.

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


# Other rewards


class Rescorer:
    """Reward functions that score finished rows again, from their text and dataset columns.

    Args:
        functions: reward functions, as for :class:`~torchrl_rloo.envs.transforms.RewardTransform`.
        weights: one weight per function; None means 1 each.
        clip_range: bounds of the weighted sum; None disables clipping.
        executor: executor of the functions; None runs them inline.

    Raises:
        ValueError: if the number of weights differs from that of the functions, or a function is unknown.

    Example:
        >>> Rescorer(["boxed_accuracy", "think_format"], weights=[1.0, 0.2]).notes()["rewards"]
        ['boxed_accuracy', 'think_format']
    """

    def __init__(
        self,
        functions: RewardSpec | Sequence[RewardSpec],
        *,
        weights: Sequence[float] | None = None,
        clip_range: Sequence[float] | None = None,
        executor: Executor | None = None,
    ):
        self.runner = RewardRunner(functions, executor=executor, max_consecutive_failures=None)
        self.names, self.counts = self.runner.names, self.runner.counts
        self.weights = [1.0] * len(self.names) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(self.names):
            raise ValueError(f"weights={self.weights} must have one number for each of {len(self.names)} functions")
        if clip_range is not None and not (len(clip_range) == 2 and clip_range[0] < clip_range[1]):
            raise ValueError(f"clip_range={clip_range} must be (low, high) with low < high")
        self.clip_range = None if clip_range is None else (float(clip_range[0]), float(clip_range[1]))

    def scores(self, rows: TensorDictBase, step: int | None = None) -> torch.Tensor:
        """Return the scores ``[B, F]`` of finished rows with text; ``step`` is the training step that functions see.

        NaN stands where a function abstained or failed, and for rows that abstain themselves (a failed or cancelled
        conversation), which no function sees.
        """
        found = torch.full((len(rows), len(self.names)), math.nan)
        given = [i for i, row in enumerate(unbind_rows(rows)) if not abstains_itself(row)]
        if given and self.names:
            scored = self.runner(reward_batch([rows[i] for i in given], step)).scores
            found[given] = torch.tensor([[math.nan if s is None else s for s in column] for column in scored]).T
        return found

    def combine(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the weighted and clipped sum ``[B]`` of scores ``[B, F]``."""
        return combine_rewards(scores, self.weights, self.clip_range)

    def notes(self) -> dict[str, Any]:
        """Return what a writer stores about the rewards."""
        clip = None if self.clip_range is None else list(self.clip_range)
        return {"rewards": self.names, "weights": self.weights, "clip_range": clip}

    def close(self) -> None:
        """Stop the workers of the executor."""
        self.runner.close()


def reward_batch(rows: Sequence[TensorDictBase], step: int | None = None) -> RewardBatch:
    """Return finished rows as reward functions see them."""
    for name in (keys.QUERY, keys.COMPLETION):
        if any(name not in row.keys() for row in rows):
            raise ValueError(f"rows without {name!r} cannot be scored; store them with RolloutWriter(text=True)")
    truncated = [keys.TRUNCATED in row.keys(True) and bool(row[keys.TRUNCATED].any()) for row in rows]
    state = TrainerState(global_step=max((step or 1) - 1, 0))
    return make_reward_batch(rows, rows, map(sampled_ids, rows), truncated, state)


def sampled_ids(row: TensorDictBase) -> torch.Tensor:
    """Return the action tokens ``[A]`` of a finished row, over all its samples."""
    ids, previous = row[keys.TOKENS][row[keys.ACTION_MASK]], row.get(keys.PREVIOUS_SEGMENTS, None)
    return ids if previous is None else torch.cat([previous["tokens"][previous["mask"]], ids])


def abstains_itself(row: TensorDictBase) -> bool:
    """Return whether a finished row abstained before a reward function saw it."""
    reason = stop_reason(row) if keys.STOP_REASON in row.keys(True) else None
    if reason is not None and abstains(reason):
        return True
    ended_unscored = reason == "time" and keys.REWARD in row.keys(True) and bool(row[keys.REWARD].isnan().any())
    return ended_unscored or not len(sampled_ids(row))


def old_returns(rows: TensorDictBase, notes: Mapping[str, Any]) -> torch.Tensor:
    """Return the returns ``[B]`` that stored rows were compared by: combined scores, without environment and KL."""
    weights, clip = notes.get("weights"), notes.get("clip_range")
    if not weights or keys.REWARDS not in rows[0].keys(True):
        return final_return(rows)
    return combine_rewards(torch.stack(ragged(rows, keys.REWARDS)), weights, None if clip is None else tuple(clip))


def rescore_rows(rows: TensorDictBase, scores: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> TensorDictBase:
    """Return rows with new scores ``[B, F]``, given old and new combined scores ``[B]``.

    The environment's own reward and a KL stay in the return. The rows share all other entries with the old ones.
    """
    written = []
    for i, row in enumerate(rows.unbind(0)):
        rest = (row[keys.REWARD] - old[i]).nan_to_num(0.0)
        ended = TensorDict(dict(row["next"].items()), batch_size=[])
        ended.update({"rewards": scores[i].clone(), "reward": rest + new[i]})
        copied = TensorDict(dict(row.items()), batch_size=[])
        written.append(copied.set("next", ended.exclude(keys.RAW_REWARDS[1])))
    return stack_rows(written)


def rescore(
    files: RolloutFiles,
    rescorer: Rescorer,
    *,
    estimator: str = "rloo",
    step: int | None = None,
    output: str | Path | None = None,
) -> RewardComparison:
    """Score stored rows with other reward functions, and compare rewards, advantages, dead groups and ranking.

    One file is in memory at a time.

    Args:
        files: stored rows.
        rescorer: new reward functions.
        estimator: advantage estimator, a name in :data:`~torchrl_rloo.functional.advantages.ESTIMATORS`.
        step: training step to score; None scores all.
        output: new folder for the rows with their new rewards, in the same files and order. None writes none.

    Returns:
        Comparison; ``print(result.table())`` shows it.

    Raises:
        ValueError: if there are no rows, rows have no text, or ``output`` has rows already.

    Example::

        result = rescore(RolloutFiles("rollouts"), Rescorer("my_rewards.stricter"))
        print(result.table())
    """
    writer = None
    if output is not None:
        identity = {name: files.manifest[name] for name in ("model", "tokenizer")}
        writer = RolloutWriter(output, **identity, notes=rescorer.notes())
        if RolloutFiles(output).files():
            raise ValueError(f"output={output} has rows already; name a new folder")
    old, new, groups, names, scores = [], [], [], [], []
    for rows, notes, at in _parts(files, step):
        each, before = rescorer.scores(rows, at), old_returns(rows, notes)
        old.append(before)
        new.append(rescorer.combine(each))
        groups.append(rows[keys.GROUP_ID].reshape(-1))
        scores.append((_stored_scores(rows), each))
        names = names or list(notes.get("rewards", []))
        if writer is not None:
            writer.step = at
            writer.extend(rescore_rows(rows, each, before, new[-1]))
    if not old:
        raise ValueError(f"folder={files.folder} has no rows{'' if step is None else f' of step {step}'} to score")
    # Average the scores of each function, of the old ones if all files have them
    functions = [
        {},
        dict(zip(rescorer.names, torch.cat([each for _, each in scores]).nanmean(0).tolist(), strict=True)),
    ]
    if {stored.shape[1] for stored, _ in scores} == {len(names)} and names:
        means = torch.cat([stored for stored, _ in scores]).nanmean(0).tolist()
        functions[0] = dict(zip(names, means, strict=True))
    failures = {name: count for name, count in rescorer.counts.items() if not name.endswith("/duplicates")}
    joined = (torch.cat(old), torch.cat(new), torch.cat(groups))
    return compare_rewards(*joined, estimator=estimator, functions=functions, failures=failures)


def _parts(files: RolloutFiles, step: int | None) -> Iterator[tuple[TensorDictBase, Mapping[str, Any], int | None]]:
    """Yield rows, notes and step of each file, without groups that were stored before."""
    seen: set[int] = set()
    for file in files.files():
        chosen = [group.group_id for group in file.groups if group.group_id not in seen]
        if (step is None or file.step == step) and chosen:
            read = files.read(file)
            yield concatenate([read[group_id] for group_id in chosen]), file.notes, file.step
        seen.update(chosen)


def _stored_scores(rows: TensorDictBase) -> torch.Tensor:
    """Return the stored scores ``[B, F]``; ``[B, 0]`` if there are none."""
    stored = keys.REWARDS in rows[0].keys(True)
    return torch.stack(ragged(rows, keys.REWARDS)) if stored else torch.zeros(len(rows), 0)


# Another model


@dataclass(frozen=True)
class ReplayedRows:
    """Rows ``[B]`` with ``PROXIMAL_LOG_PROBS`` of a model and ``ADVANTAGE``."""

    rows: TensorDictBase

    def table(self, limit: int | None = None) -> str:
        """Return a line per row, with the mean and the largest change of a log-prob."""
        lines = [f"{'group':>8}{'reward':>9}{'advantage':>11}{'tokens':>8}{'mean change':>13}  largest change"]
        for row in unbind_rows(self.rows)[:limit]:
            (places,) = row[keys.ACTION_MASK].nonzero(as_tuple=True)
            old, new = row[keys.LOG_PROBS][places], row[keys.PROXIMAL_LOG_PROBS][places]
            change = (new - old).abs()
            reward, advantage = (float(row[key].float().mean()) for key in (keys.REWARD, keys.ADVANTAGE))
            mean, largest = 0.0, "-"
            if len(places):
                mean, at = float(change.mean()), int(change.argmax())
                largest = f"token {int(places[at])}: {float(old[at]):.4f} -> {float(new[at]):.4f}"
            group = int(row[keys.GROUP_ID])
            lines.append(f"{group:>8}{reward:>9.3f}{advantage:>+11.3f}{len(places):>8}{mean:>13.5f}  {largest}")
        if limit is not None and len(self.rows) > limit:
            lines.append(f"and {len(self.rows) - limit} more rows")
        return "\n".join(lines)


def image_folder(files: RolloutFiles, step: int | None = None) -> Path | None:
    """Return the folder of the images of stored rows, by the prompts of their first group; None without images."""
    _, rows = next(iter(files.groups(step=step)), (None, None))
    prompts = [] if rows is None or keys.QUERY not in rows[0].keys() else [row[keys.QUERY] for row in unbind_rows(rows)]
    paths = [path for prompt in prompts if not isinstance(prompt, str) for path in image_paths(prompt)]
    return Path(paths[0]).parent if paths else None


def replay_groups(
    files: RolloutFiles,
    scorer: Scorer,
    *,
    groups: Sequence[int] | None = None,
    step: int | None = None,
    estimator: str = "rloo",
    micro_batch_size: int | None = 16,
) -> ReplayedRows:
    """Score stored groups with a model.

    Example::

        scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        print(replay_groups(RolloutFiles("rollouts"), scorer, groups=[17]).table())
    """
    found: dict[int, TensorDictBase] = {}
    for group, rows in files.groups(step=step):
        if groups is None or group.group_id in groups:
            found[group.group_id] = rows
        if groups is None and step is None:
            break
    where = f"folder={files.folder}" + ("" if step is None else f", step {step},")
    if missing := sorted(set(groups or ()) - set(found)):
        raise ValueError(f"{where} has no group {missing[0]}; choose another")
    if not found:
        raise ValueError(f"{where} has no rows")
    # Copy the rows, whose tensors are views of the file's
    rows = stack_rows([row.copy() for row in concatenate(list(found.values())).unbind(0)])
    record_log_probs(scorer, rows, micro_batch_size=micro_batch_size)
    for row in unbind_rows(rows):
        row.set(keys.PROXIMAL_LOG_PROBS, row[keys.PROXIMAL_LOG_PROBS].cpu())  # where stored rows are
    return ReplayedRows(MCAdvantage(estimator=estimator).inv(rows))
