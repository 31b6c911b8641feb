"""What ``embedded`` stands for where a model is asked for, and the names of the embedded tasks where a task is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_rloo.embedded.addition import addition_prompts
from torchrl_rloo.embedded.calculator import calculator_prompts
from torchrl_rloo.embedded.guessing import RangedGuessNumber, guessing_prompts
from torchrl_rloo.embedded.warm_start import TEACHERS, warm_start
from torchrl_rloo.envs.tasks import EMBEDDED, TASKS, Mixture, Task, TaskBase, load_task
from torchrl_rloo.envs.text.transform import TextEnvTransform
from torchrl_rloo.envs.text.wrapping import wrap
from torchrl_rloo.envs.tools.calculator import calculator
from torchrl_rloo.envs.tools.parsers import RegexParser
from torchrl_rloo.envs.transforms.tools import ToolTransform
from torchrl_rloo.rewards.boxed import last_boxed

ADDITION = Task(
    name="addition",
    synthetic_rows=lambda split, size=None, seed=0: addition_prompts(
        split, size=size
    ),  # as many as there are, in one order
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
    rewards=(),  # the game rewards, and its return, 1 for a number found, is what counts
    scorer=None,
    transforms=lambda: [TextEnvTransform(wrap(RangedGuessNumber))],
)
EMBEDDED_TASKS = {task.name: task for task in (ADDITION, CALCULATOR, GUESSING)}


def resolve_model(
    name: str | os.PathLike, seed: int, task: str = ADDITION.name, log: Callable[[str], None] | None = None
) -> str | os.PathLike:
    """The directory of the embedded model's warm start for ``"embedded"``, built on first use; other names as they are.

    Args:
        name: a hub id, a local directory, or ``"embedded"``.
        seed: of the embedded model and its warm start.
        task: what it is to be trained on; the model is warmed up on that if it is an embedded task, else on addition.
        log: called with lines of progress.
    """
    if name != EMBEDDED:
        return name
    return warm_start(seed, task if task in TEACHERS else ADDITION.name, log=log)


def resolve_task(name: str = ADDITION.name, mixture: Mapping[str, Mapping[str, Any] | float] | None = None) -> TaskBase:
    """Return a task, or a mixture of several.

    Args:
        name: in ``EMBEDDED_TASKS`` or :data:`~torchrl_rloo.envs.tasks.TASKS`, or a dotted path
            (:func:`~torchrl_rloo.envs.tasks.load_task`); ``"mixture"`` for a mixture.
        mixture: for each task of a mixture its ``weight``, and arguments of its own :meth:`Task.load` (``source``); a
            number alone is the weight, and None leaves the task out.

    Raises:
        ValueError: for an unknown name, or a mixture under another name.

    Example:
        >>> train, held_out = resolve_task("addition").load(eval_size=10)
        >>> held_out[0]["query"][1]["role"]
        'user'
        >>> resolve_task("mixture", {"addition": 3, "countdown": {"weight": 1, "limit": 100}}).weights
        [3, 1]
    """
    if (name == Mixture.name) != (mixture is not None):
        raise ValueError(
            f"task name={name!r} with mixture={mixture!r}: a mixture is named {Mixture.name!r}, and nothing else"
        )
    if mixture is None:
        return load_task(name, EMBEDDED_TASKS | TASKS)
    mixture = {part: given for part, given in mixture.items() if given is not None}
    tasks = [resolve_task(part) for part in mixture]
    options = [dict(given) if isinstance(given, Mapping) else {"weight": given} for given in mixture.values()]
    weights = [given.pop("weight", 1.0) for given in options]
    return Mixture(tasks, weights, dict(zip((task.name for task in tasks), options, strict=True)))
