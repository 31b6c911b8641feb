"""Section of the recipes' configurations about evaluation: the held-out prompts, and further sets by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from torchrl_rloo.cli.config import check_ks
from torchrl_rloo.cli.schema import parse_section
from torchrl_rloo.runtime.lookup import check_path

# First words of metric names eval/<word> that are not sets
RESERVED = ("tasks", "greedy", "sampled", "failed", "abstained")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,39}", re.ASCII)


@dataclass
class EvalSetConfig:
    """Further set of held-out prompts; null takes the setting of the run's own."""

    task: str | None = None  # task of the prompts, with its rewards and turns; null: the run's
    source: str | None = None  # hub id, file or embedded; null: the held-out prompts of task
    split: str | None = None  # split of source; null: train, or the task's
    name: str | None = None  # configuration of a hub dataset; null: its default
    size: int = 256  # largest number of prompts
    prompt_column: str | None = None  # column with the prompt, text or messages; null: prompt, query or messages
    column_map: dict[str, str] = field(default_factory=dict)  # columns to rename: {target: answer} gives answer
    row_map: str | None = None  # dotted path of a function from a row to a row with a prompt; null: the task's
    system_prompt: str | None = None  # system message for prompts without one; null: the task's
    scorer: Any = None  # scorer, given like a reward; null: eval.scorer with the run's task, else the task's
    num_samples: int | None = None  # sampled completions of each prompt; null: eval.num_samples
    ks: list[int] | None = None  # values of k for pass@k and maj@k; null: eval.ks


@dataclass
class EvalConfig:
    """Evaluation on held-out prompts."""

    scorer: Any = None  # scorer of held-out completions, given like a reward; null: the task's, or your rewards
    every: int = 20  # steps between evaluations; 0: only before the first and after the last step
    batch_size: int = 256  # conversations per batch
    num_samples: int = 1  # sampled completions of each prompt, for eval/sampled
    ks: list[int] = field(default_factory=list)  # values of k for pass@k and maj@k, at most num_samples
    rewards: bool = False  # also score with each reward function of training, as eval/<function>/*
    sets: dict[str, Any] = field(default_factory=dict)  # further sets: {hard: {source: hard.jsonl, size: 100}}

    def __post_init__(self):
        check_ks(self.ks, self.num_samples)
        self.sets = {name: self._parse_set(name, values) for name, values in self.sets.items()}

    def _parse_set(self, name: str, values: Any) -> EvalSetConfig:
        """Return a set with its own number of samples and values of k."""
        where = f"eval.sets.{name}"
        if not _NAME.fullmatch(str(name)) or name in RESERVED or name.endswith(("_low", "_high")):
            raise ValueError(
                f"{where}: the name must have letters, digits, '_', '-' and '.', at most 40, and cannot be one of "
                f"{', '.join(RESERVED)} or end in _low or _high; rename the set"
            )
        found = parse_section(EvalSetConfig, values or {}, where)
        if found.task is None and found.source is None:
            raise ValueError(f"{where} has the run's own held-out prompts; set {where}.source or {where}.task")
        found.num_samples = self.num_samples if found.num_samples is None else found.num_samples
        found.ks = [k for k in self.ks if k <= found.num_samples] if found.ks is None else found.ks
        check_path(f"{where}.source", found.source or "")
        if found.size < 1:
            raise ValueError(f"{where}.size={found.size} must be at least 1")
        if found.num_samples < 0:
            raise ValueError(f"{where}.num_samples={found.num_samples} must be at least 0")
        check_ks(found.ks, found.num_samples, where)
        return found


def check_set_names(sets: dict[str, EvalSetConfig], scorers: list[str]) -> None:
    """Raise ``ValueError`` if a set has the name of a scorer, whose metrics are also ``eval/<name>/...``.

    Args:
        sets: further sets.
        scorers: names of the scorers of the run's own held-out prompts.
    """
    for name in sets:
        if name in scorers:
            raise ValueError(
                f"eval.sets.{name} has the name of a scorer, so eval/{name}/greedy is both; rename the set"
            )
