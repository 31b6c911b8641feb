"""Several tasks at once: each row knows its task, and is drawn, rewarded and judged by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.sampling import MixtureSampler, PromptSampler
from torchrl_rloo.envs.tasks.base import Task, TaskBase
from torchrl_rloo.rewards.by_task import ByTask
from torchrl_rloo.rewards.protocol import RewardFunction
from torchrl_rloo.rewards.tasks import ForTask


class Mixture(TaskBase):
    """Tasks with weights, as one task.

    Its rows have the columns of all tasks, None where a row's task has no such column, and ``"task"``, the name of the
    task. Each reward is given its own task's rows alone and abstains on the others, so that it is logged by itself.

    Args:
        tasks: the tasks, of different names.
        weights: shares of the prompts drawn, positive; None: in proportion to the tasks' numbers of prompts.
        options: by name, further arguments of the task's own :meth:`Task.load`, ``source`` among them.

    Raises:
        ValueError: for fewer than two tasks, two of one name, weights that are not one positive number each, options
            of none of the tasks, or a task of several turns: what makes its turns would act on the others' rows, too.
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
            raise ValueError(f"a mixture needs two tasks or more, of different names, got {names}")
        if weights is not None and (len(weights) != len(names) or not all(0 < w < float("inf") for w in weights)):
            raise ValueError(f"weights={weights} must be one positive number for each of {names}")
        if unknown := set(options or {}) - set(names):
            raise ValueError(f"options are given for {sorted(unknown)}, which are not among the tasks {names}")
        if turns := [task.name for task in tasks if task.make_transforms() or task.limits]:
            raise ValueError(f"tasks {turns} have turns of their own, which a mixture cannot share out: leave them out")
        self.tasks, self.weights, self.options = list(tasks), weights, dict(options or {})
        own = [[1.0] * len(t.rewards) if t.reward_weights is None else t.reward_weights for t in tasks]
        self.reward_weights = [weight for each in own for weight in each]

    def load(self, source: Any = None, *, eval_size: int = 256, **kwargs: Any) -> tuple[PromptDataset, PromptDataset]:
        """Training and held-out prompts of all tasks.

        Args:
            source: None: each task's own; ``"embedded"``: their generated rows. Give other sources in ``options``.
            eval_size: held-out prompts of all tasks together, the same number of each.
            **kwargs: see :meth:`Task.load`.

        Raises:
            ValueError: for a source of another kind, or tasks of which some have text prompts and some messages.
        """
        for name, value in (("source", source), ("eval_source", kwargs.get("eval_source"))):
            if value is not None and (name, value) != ("source", "embedded"):
                raise ValueError(f"{name}={value!r} cannot be that of every task of a mixture: give each task its own")
        each = max(1, eval_size // len(self.tasks))
        loaded = {
            task.name: task.load(**({"source": source, "eval_size": each} | kwargs | self.options.get(task.name, {})))
            for task in self.tasks
        }
        train, held_out = ({name: pair[i] for name, pair in loaded.items()} for i in (0, 1))
        return mix_prompts(train), mix_prompts(held_out)

    def make_rewards(self) -> list[RewardFunction]:
        """The reward functions of all tasks, each for the rows of its own."""
        return [ForTask(task.name, function) for task in self.tasks for function in task.make_rewards()]

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> RewardFunction:
        """Return a scorer that judges each row by its own task's metric."""
        return ByTask({task.name: task.make_scorer() for task in self.tasks})

    def make_sampler(self, dataset: PromptDataset) -> PromptSampler | None:
        """Draws tasks by their weights, and each task's prompts in an order of their own."""
        if self.weights is None:
            return None
        sizes = Counter(row[keys.TASK] for row in dataset.rows)  # in the order of the tasks, as the rows are
        return MixtureSampler(list(sizes.values()), self.weights, names=list(sizes))


def mix_prompts(datasets: Mapping[str, PromptDataset]) -> PromptDataset:
    """Datasets end to end, with the name of each in the column ``"task"``.

    Raises:
        ValueError: if one has a column of that name, or prompts are text in some and messages in others.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> a, b = load_prompts([{"prompt": "1+1?", "answer": "2"}]), load_prompts([{"prompt": "Hi!", "n": 3}])
        >>> mix_prompts({"sums": a, "chat": b})[1]
        {'query': 'Hi!', 'task': 'chat', 'answer': None, 'n': 3}
    """
    kinds = {name: dataset.conversational for name, dataset in datasets.items()}
    if len(set(kinds.values())) > 1:
        raise ValueError(f"prompts are messages in some datasets and text in others ({kinds}): set chat= for all")
    for name, dataset in datasets.items():
        if keys.TASK in dataset.columns:
            raise ValueError(f"dataset {name!r} has a column {keys.TASK!r}, which the mixture writes: rename it")
    columns = list(dict.fromkeys(column for dataset in datasets.values() for column in dataset.columns))
    empty = dict.fromkeys(columns)
    rows = [
        {keys.QUERY: row[keys.QUERY], keys.TASK: name, **empty, **{k: v for k, v in row.items() if k != keys.QUERY}}
        for name, dataset in datasets.items()
        for row in dataset.rows
    ]
    return PromptDataset(rows, too_long=sum(dataset.counts.too_long for dataset in datasets.values()))
