"""Embedded tasks, and the resolution of model and task names that may be embedded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchrl_rloo.embedded.addition import addition_prompts
from torchrl_rloo.embedded.calculator import calculator_prompts
from torchrl_rloo.embedded.guessing import RangedGuessNumber, guessing_prompts
from torchrl_rloo.embedded.shapes import shapes_prompts
from torchrl_rloo.embedded.warm_start import TEACHERS, warm_start
from torchrl_rloo.envs.tasks import Task, TaskBase, load_task
from torchrl_rloo.envs.tasks.base import EMBEDDED
from torchrl_rloo.envs.tasks.mixture import Mixture
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.envs.text.adapters import wrap
from torchrl_rloo.envs.text.transform import TextEnvTransform
from torchrl_rloo.envs.tools.calculator import calculator
from torchrl_rloo.envs.tools.parsers import RegexParser
from torchrl_rloo.envs.transforms.tools import ToolTransform
from torchrl_rloo.modules import local_model
from torchrl_rloo.rewards.matching import last_boxed

ANSWER_AFTER_THOUGHT = {"_target_": "exact_match", "where": ["</think>"]}

ADDITION = Task(
    name="addition",
    # All problems, in the same order for every seed
    synthetic_rows=lambda split, size=None, seed=0: addition_prompts(split, size=size),
    rewards=("boxed_accuracy",),
    scorer="boxed_accuracy",
    extract_answer=last_boxed,
)
CALCULATOR = Task(
    name="calculator",
    synthetic_rows=lambda split, size=None, seed=0: calculator_prompts(split, size=size),
    rewards=("boxed_accuracy",),
    scorer="boxed_accuracy",
    extract_answer=last_boxed,
    transforms=lambda: [
        ToolTransform(
            [calculator],
            RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator"),
            show_schemas=False,  # the tokenizer's template has no place for them
        )
    ],
    limits={"max_turns": 2},
)
GUESSING = Task(
    name="guessing",
    synthetic_rows=lambda split, size=None, seed=0: guessing_prompts(split, size=size),
    rewards=(),  # the game gives the reward: 1 for finding the number
    scorer=None,
    transforms=lambda: [TextEnvTransform(wrap(RangedGuessNumber))],
)
SHAPES = Task(
    name="shapes",
    synthetic_rows=lambda split, size=None, seed=0: shapes_prompts(split, size=size),
    rewards=(ANSWER_AFTER_THOUGHT,),
    scorer=ANSWER_AFTER_THOUGHT,
)
EMBEDDED_TASKS = {task.name: task for task in (ADDITION, CALCULATOR, GUESSING, SHAPES)}


def resolve_model(
    name: str | os.PathLike, seed: int, task: str = ADDITION.name, log: Callable[[str], None] | None = None
) -> str | os.PathLike:
    """Resolve ``"embedded"`` to the directory of the warm-started model, and a GGUF file to that of its conversion.

    The first use builds the warm start (:func:`~torchrl_rloo.embedded.warm_start`), or converts the file
    (:func:`~torchrl_rloo.modules.local_model`).

    Args:
        name: hub id, local directory, GGUF file, name of a packaged model, or ``"embedded"``.
        seed: seed of the embedded model and its warm start.
        task: name of the task to train on. The warm start is on it if it is an embedded task, otherwise on addition.
        log: function called with lines of progress. None is silent.
    """
    if name != EMBEDDED:
        return local_model(name, log)
    return warm_start(seed, task if task in TEACHERS else ADDITION.name, log=log)


def resolve_task(name: str = ADDITION.name, mixture: Mapping[str, Mapping[str, Any] | float] | None = None) -> TaskBase:
    """Return the task of a name, or a mixture of tasks.

    Args:
        name: name in ``EMBEDDED_TASKS`` or ``torchrl_rloo.envs.tasks.registry.TASKS``, a dotted path
            (:func:`~torchrl_rloo.envs.tasks.load_task`), or ``"mixture"``.
        mixture: ``weight`` (default 1) and arguments of :meth:`Task.load`, such as ``source``, for each task of a
            mixture. A number is the weight, and None leaves the task out. ``task`` names the task of a part that has
            another name, ``rewards`` and ``scorer`` (by default the first reward) replace those of the task.

    Raises:
        ValueError: if the name is unknown, or only one of ``name="mixture"`` and ``mixture`` is given.

    Example:
        >>> train, held_out = resolve_task("addition").load(eval_size=10)
        >>> held_out[0]["query"][1]["role"]
        'user'
        >>> resolve_task("mixture", {"addition": 3, "countdown": {"weight": 1, "limit": 100}}).weights
        [3, 1]
    """
    if (name == Mixture.name) != (mixture is not None):
        raise ValueError(
            f"task name={name!r} cannot be combined with mixture={mixture!r}: set both name={Mixture.name!r} and "
            "mixture, or neither"
        )
    if mixture is None:
        return load_task(name, EMBEDDED_TASKS | TASKS)
    mixture = {part: setting for part, setting in mixture.items() if setting is not None}
    options = [dict(s) if isinstance(s, Mapping) else {"weight": s} for s in mixture.values()]
    weights = [option.pop("weight", 1.0) for option in options]
    tasks = [_resolve_part(part, option) for part, option in zip(mixture, options, strict=True)]
    return Mixture(tasks, weights, dict(zip((task.name for task in tasks), options, strict=True)))


def _resolve_part(name: str, option: dict[str, Any]) -> TaskBase:
    """Return the task of a part of a mixture, and take what is not of its data out of ``option``."""
    base, rewards, scorer = option.pop("task", None), option.pop("rewards", None), option.pop("scorer", None)
    task = resolve_task(base or name)
    changes = {"rewards": rewards, "reward_weights": None} if rewards else {}
    changes |= {"scorer": scorer or rewards[0]} if scorer or rewards else {}
    changes |= {"name": name} if base else {}
    if changes and not isinstance(task, Task):
        raise ValueError(
            f"task.mixture.{name}: {sorted(changes)} of {type(task).__name__} cannot be changed; remove them"
        )
    return replace(task, **changes) if changes else task
