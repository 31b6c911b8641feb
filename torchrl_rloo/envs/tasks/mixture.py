"""Mixture: several tasks as one; each row is drawn, rewarded and evaluated by its task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import stack_rows, to_lazy_stack
from torchrl_rloo.data.sampling import MixtureSampler, PromptSampler
from torchrl_rloo.data.streamed import StreamedPrompts
from torchrl_rloo.envs.tasks.base import Task, TaskBase
from torchrl_rloo.envs.transforms.tools import ToolTransform
from torchrl_rloo.envs.turn_transform import TurnTransform
from torchrl_rloo.rewards.protocol import RewardFunction
from torchrl_rloo.rewards.wrapping import ByTask, ForTask


class Mixture(TaskBase):
    """Weighted mixture of tasks.

    Rows have the columns of all tasks, None where a row's task has no such column, and ``"task"``, the task's name.
    Each reward scores only its task's rows and abstains on the others, so it is logged separately. Each transform
    answers only its task's turns.
    """

    name = "mixture"

    def __init__(
        self,
        tasks: Sequence[Task],
        weights: Sequence[float] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        names = [task.name for task in tasks]
        if len(set(names)) != len(names) or len(names) < 2:
            raise ValueError(f"tasks={names} must be at least two tasks with different names")
        if weights is not None and (len(weights) != len(names) or not all(0 < w < float("inf") for w in weights)):
            raise ValueError(f"weights={weights} must be one positive number for each of {names}")
        if unknown := set(options or {}) - set(names):
            raise ValueError(f"options for unknown tasks {sorted(unknown)}; the tasks are {names}")
        several = [task for task in tasks if task.make_transforms()]
        if rewarded := [task.name for task in several if not task.rewards]:
            raise ValueError(f"tasks {rewarded} are rewarded by their environment and cannot be mixed; remove them")
        limits = {name: {t.name: t.limits.get(name) for t in several} for t in several for name in t.limits}
        self.limits = {name: own.popitem()[1] for name, own in limits.items() if len(set(own.values())) == 1}
        self.different_limits = {name: own for name, own in limits.items() if name not in self.limits}
        self.tasks, self.weights, self.options = list(tasks), weights, dict(options or {})
        own = [[1.0] * len(t.rewards) if t.reward_weights is None else t.reward_weights for t in tasks]
        self.reward_weights = [weight for each in own for weight in each]

    def load(self, source: Any = None, *, eval_size: int = 256, **kwargs: Any) -> tuple[PromptDataset, PromptDataset]:
        """Load training and held-out prompts of all tasks."""
        for name, value in (("source", source), ("eval_source", kwargs.get("eval_source"))):
            if value is not None and (name, value) != ("source", "embedded"):
                raise ValueError(
                    f"{name}={value!r} cannot be that of every task of a mixture; set it in each task's options"
                )
        each = max(1, eval_size // len(self.tasks))
        loaded = {
            task.name: task.load(**({"source": source, "eval_size": each} | kwargs | self.options.get(task.name, {})))
            for task in self.tasks
        }
        train, held_out = ({name: pair[i] for name, pair in loaded.items()} for i in (0, 1))
        return mix_prompts(train), mix_prompts(held_out)

    def make_rewards(self) -> list[RewardFunction]:
        """Return the reward functions of all tasks, each restricted to its task's rows."""
        return [ForTask(task.name, function) for task in self.tasks for function in task.make_rewards()]

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> RewardFunction:
        """Return a scorer that applies to each row its task's metric."""
        return ByTask({task.name: task.make_scorer() for task in self.tasks})

    def make_transforms(self) -> list[Transform]:
        """Return the transforms of all tasks, each restricted to its task's rows."""
        return [TaskTurns(task.name, transform) for task in self.tasks for transform in task.make_transforms()]

    def make_sampler(self, dataset: PromptDataset) -> PromptSampler | None:
        """Return a sampler that draws tasks by weight, and shuffles each task's prompts separately."""
        if self.weights is None:
            return None
        sizes = Counter(row[keys.TASK] for row in dataset.rows)  # in the order of the tasks, as the rows are
        return MixtureSampler(list(sizes.values()), self.weights, names=list(sizes))


class TaskTurns(TurnTransform):
    """Turn transform that gives another one only the rows of its task."""

    def __init__(self, task: str, inner: Transform):
        super().__init__()
        if not isinstance(inner, TurnTransform) or hasattr(inner, "play"):
            raise ValueError(f"task {task!r} has a {type(inner).__name__}, which cannot act on the turns of one task")
        self.task, self.inner, self.counts = task, inner, inner.counts

    def _own(self, *batches: TensorDictBase) -> list[TensorDictBase]:
        """Return the rows of the task of each batch; the rows of the last one know their task."""
        own = [i for i, row in enumerate(batches[-1].unbind(0)) if row[keys.TASK] == self.task]
        self.inner.__dict__["_parent"] = self.parent
        return [stack_rows([batch[i] for i in own]) for batch in batches] if own else []

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None:
            return None
        rows = to_lazy_stack(tensordict)
        for own in self._own(rows):
            self.inner._reset_env_preprocess(own)  # changes its rows in place
        for row in rows.unbind(0) if getattr(self.inner, "show_schemas", False) else ():
            if keys.TOOLS not in row.keys():
                row.set(keys.TOOLS, NonTensorData(None))
        return rows

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if own := self._own(tensordict, tensordict_reset):
            self.inner._reset(*own)
        for row in tensordict_reset.unbind(0) if isinstance(self.inner, ToolTransform) else ():
            if keys.NUM_TOOL_CALLS not in row.keys():
                row.set(keys.NUM_TOOL_CALLS, torch.tensor(0))
        return tensordict_reset

    async def process_turn(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        if row[keys.TASK] == self.task:
            self.inner.__dict__["_parent"] = self.parent
            await self.inner.process_turn(row, next_row)
        elif isinstance(self.inner, ToolTransform) and keys.NUM_TOOL_CALLS not in next_row.keys():
            next_row.set(keys.NUM_TOOL_CALLS, row[keys.NUM_TOOL_CALLS])

    async def release(self, trajectory_id: int) -> None:
        await self.inner.release(trajectory_id)

    def reset_failure(self, trajectory_id: int) -> str | None:
        return self.inner.reset_failure(trajectory_id)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        self.inner.__dict__["_parent"] = self.parent
        return self.inner.transform_observation_spec(observation_spec)

    def close(self) -> None:
        self.inner.close()


def mix_prompts(datasets: Mapping[str, PromptDataset]) -> PromptDataset:
    """Concatenate datasets, with the name of each in the column ``"task"``."""
    if streams := [name for name, dataset in datasets.items() if isinstance(dataset, StreamedPrompts)]:
        raise ValueError(
            f"streaming of {streams} cannot be combined with a mixture, which needs all rows; set it to null"
        )
    kinds = {name: dataset.conversational for name, dataset in datasets.items()}
    if len(set(kinds.values())) > 1:
        raise ValueError(f"prompts are messages in some datasets and text in others ({kinds}); set chat= for all")
    for name, dataset in datasets.items():
        if keys.TASK in dataset.columns:
            raise ValueError(f"dataset {name!r} has a column {keys.TASK!r}, which the mixture writes; rename it")
    columns = list(dict.fromkeys(column for dataset in datasets.values() for column in dataset.columns))
    empty = dict.fromkeys(columns)
    rows = [
        {keys.QUERY: row[keys.QUERY], keys.TASK: name, **empty, **{k: v for k, v in row.items() if k != keys.QUERY}}
        for name, dataset in datasets.items()
        for row in dataset.rows
    ]
    counts = [dataset.counts for dataset in datasets.values()]
    too_long, unreadable = sum(c.too_long for c in counts), sum(c.unreadable for c in counts)
    return PromptDataset(rows, too_long=too_long, unreadable=unreadable)
