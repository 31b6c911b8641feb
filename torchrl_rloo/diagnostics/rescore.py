"""New reward functions for stored rows: their scores, rows that carry them, and a comparison with the old rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import final_return
from torchrl_rloo.data.rows import concatenate, ragged, stack_rows, unbind_rows
from torchrl_rloo.data.stop_reasons import abstains, stop_reason
from torchrl_rloo.diagnostics.rescore_table import RewardComparison, compare_rewards
from torchrl_rloo.envs.transforms.reward import make_reward_batch
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.replay.rollouts import RolloutFiles, RolloutWriter
from torchrl_rloo.rewards.executors import Executor
from torchrl_rloo.rewards.protocol import RewardBatch, TrainerState
from torchrl_rloo.rewards.registry import RewardSpec
from torchrl_rloo.rewards.runner import RewardRunner


class Rescorer:
    """Reward functions that score finished rows again, from their text and dataset columns.

    Args:
        functions: reward functions, as for :class:`~torchrl_rloo.envs.transforms.RewardTransform`.
        weights: one weight per function; None means 1 each.
        clip_range: bounds of the weighted sum; None disables clipping.
        executor: executor of the functions; None runs them inline.

    Attributes:
        names: names of the functions.
        counts: numbers of failed samples and of duplicates, as in :class:`~torchrl_rloo.rewards.RewardRunner`.

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
        """Return the scores ``[B, F]`` of finished rows.

        NaN stands where a function abstained or failed, and for rows that abstain themselves (a failed or cancelled
        conversation), which no function sees.

        Args:
            rows: ``[B]`` rows with text.
            step: training step of the rows, which functions see as ``trainer_state``. None is the first.

        Raises:
            ValueError: if the rows have no text.
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
    """Return finished rows as reward functions see them.

    Args:
        rows: rows with text.
        step: training step of the rows; None is the first.

    Raises:
        ValueError: if a row has no text.
    """
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
    """Return the returns ``[B]`` that stored rows were compared by: their combined scores, without environment and KL.

    Args:
        rows: stored rows.
        notes: notes of their file. Without weights, the final returns are taken.
    """
    weights, clip = notes.get("weights"), notes.get("clip_range")
    if not weights or keys.REWARDS not in rows[0].keys(True):
        return final_return(rows)
    return combine_rewards(torch.stack(ragged(rows, keys.REWARDS)), weights, None if clip is None else tuple(clip))


def rescore_rows(rows: TensorDictBase, scores: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> TensorDictBase:
    """Return rows with new scores. The environment's own reward and a KL stay in the return.

    Args:
        rows: ``[B]`` stored rows, which stay as they are.
        scores: ``[B, F]`` new scores.
        old: ``[B]`` old combined scores.
        new: ``[B]`` new combined scores.

    Returns:
        ``[B]`` rows that share all other entries.
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
        files: the stored rows.
        rescorer: the new reward functions.
        estimator: advantage estimator, a name in :data:`~torchrl_rloo.functional.advantages.ESTIMATORS`.
        step: training step to score; None scores all.
        output: new folder for the rows with their new rewards, in the same files and order. None writes none.

    Returns:
        The comparison, also as a table: ``print(result.table())``.

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
    for number, (rows, notes, at) in enumerate(_parts(files, step)):
        each, before = rescorer.scores(rows, at), old_returns(rows, notes)
        old.append(before)
        new.append(rescorer.combine(each))
        groups.append(rows[keys.GROUP_ID].reshape(-1))
        scores.append((_stored_scores(rows), each))
        if number == 0:
            names = list(notes.get("rewards", []))
        if writer is not None:
            writer.step = at
            writer.extend(rescore_rows(rows, each, before, new[-1]))
    if not old:
        raise ValueError(f"folder={files.folder} has no rows{'' if step is None else f' of step {step}'} to score")
    same_functions = len({stored.shape[1] for stored, _ in scores}) == 1
    return compare_rewards(
        torch.cat(old),
        torch.cat(new),
        torch.cat(groups),
        estimator=estimator,
        old_scores=torch.cat([stored for stored, _ in scores]) if same_functions else None,
        new_scores=torch.cat([each for _, each in scores]),
        old_names=names,
        new_names=rescorer.names,
        failures={name: count for name, count in rescorer.counts.items() if not name.endswith("/duplicates")},
    )


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
