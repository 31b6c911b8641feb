"""Held-out prompts of a run, by its settings: the run's own and further sets, their evaluation, and its log."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_rloo.cli.config import LogConfig
from torchrl_rloo.cli.eval_config import EvalSetConfig, check_set_names
from torchrl_rloo.cli.rloo_config import RLOOConfig
from torchrl_rloo.cli.schema import non_null_fields
from torchrl_rloo.data import PromptDataset
from torchrl_rloo.embedded import resolve_task
from torchrl_rloo.envs.tasks import EMBEDDED, TaskBase, conversation_settings
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.evaluation import Evaluation, EvaluationResult, write_evaluation_transcripts
from torchrl_rloo.evaluation.evaluation import name_scorers
from torchrl_rloo.modules import TurnPolicy
from torchrl_rloo.rewards import load_reward, reward_name
from torchrl_rloo.run import Run


class EvalSet(NamedTuple):
    """Held-out prompts, how they are answered and scored.

    Attributes:
        prompts: held-out prompts.
        task: their task.
        scorer: scorer, or several by name.
        make_transforms: function that builds the transforms that answer the policy's turns.
        chat: arguments of every environment: limits and template.
        num_samples: sampled completions of each prompt.
        ks: values of k for pass@k and maj@k.
    """

    prompts: PromptDataset
    task: TaskBase
    scorer: Any
    make_transforms: Callable[[], list]
    chat: dict[str, Any]
    num_samples: int
    ks: list[int]


def make_scorers(cfg: RLOOConfig, task: TaskBase, rewards: RewardTransform) -> dict[str, Any]:
    """Return the scorers of the run's held-out prompts.

    Raises:
        ValueError: if a further set has the name of one.
    """
    own = None if cfg.reward.functions is None else rewards.functions
    scorers = task.make_scorer(own) if cfg.eval.scorer is None else load_reward(cfg.eval.scorer)
    named = name_scorers(scorers)
    if cfg.eval.rewards:
        named |= {reward_name(f): f for f in rewards.functions if reward_name(f) not in named}
    check_set_names(cfg.eval.sets, list(named))
    return named


def load_eval_sets(
    cfg: RLOOConfig, own: EvalSet, train_set: PromptDataset, tokenizer: Any, context: int | None
) -> dict[str, EvalSet]:
    """Return the run's held-out prompts as ``""`` and the further sets of the settings by name.

    Args:
        cfg: settings of the run.
        own: the run's held-out prompts.
        train_set: prompts of training; those that a further set has too are counted and printed.
        tokenizer: tokenizer of the model.
        context: longest conversation of the model in tokens; None if it has no limit.

    Raises:
        ValueError: if a set cannot be loaded; the error names it. ``OSError`` likewise.
    """
    sets, trained = {"": own}, {str(row["query"]) for row in train_set.rows}
    for name, settings in cfg.eval.sets.items():
        sets[name] = _load_set(cfg, settings, name, own, tokenizer, context)
        shared = sum(str(row["query"]) in trained for row in sets[name].prompts.rows)
        if shared:
            total = len(sets[name].prompts)
            print(f"eval.sets.{name}: {shared} of {total} prompts are also trained on", file=sys.stderr)
    return sets


def _load_set(
    cfg: RLOOConfig, asked: EvalSetConfig, name: str, own: EvalSet, tokenizer: Any, context: int | None
) -> EvalSet:
    """Load the prompts of a further set with its task's turns, limits and scorer; null takes those of the run."""
    task = own.task if asked.task is None else resolve_task(asked.task)
    options = {"tokenizer": tokenizer, "template_kwargs": cfg.data.template_kwargs}
    given = ("prompt_column", "row_map", "system_prompt", "name", "split", "column_map")
    options |= {n: getattr(asked, n) for n in given if getattr(asked, n)}
    try:
        if asked.source in (None, EMBEDDED):
            prompts = task.load(asked.source, eval_size=asked.size, seed=cfg.seed, **options)[1]
        else:
            prompts = task.load_held_out(asked.source, eval_size=asked.size, **options)
        if asked.scorer is not None:
            scorer = load_reward(asked.scorer)
        else:
            scorer = own.scorer if asked.task is None else task.make_scorer()
    except (ValueError, OSError) as error:
        raise type(error)(f"eval.sets.{name}: {error}") from error
    make_transforms, chat = own.make_transforms, own.chat
    if asked.task is not None:
        limits = non_null_fields(cfg.environment, "transforms")
        make_transforms, chat = conversation_settings(task, None, limits, context)
    return EvalSet(prompts, task, scorer, make_transforms, dict(chat), asked.num_samples, asked.ks)


def make_evaluations(sets: Mapping[str, EvalSet], policy: TurnPolicy, **options: Any) -> dict[str, Evaluation]:
    """Build the evaluation of each set.

    Args:
        sets: sets by name.
        policy: policy to evaluate.
        **options: further arguments of :class:`~torchrl_rloo.evaluation.Evaluation`.
    """
    return {
        name: Evaluation(
            policy,
            each.prompts,
            each.scorer,
            num_samples=each.num_samples,
            ks=each.ks,
            extract=each.task.extract_answer,
            make_transforms=each.make_transforms,
            env_kwargs=each.chat,
            **options,
        )
        for name, each in sets.items()
    }


def run_evaluations(
    evaluations: Mapping[str, Evaluation], step: int, *, pages: Path | None, policy_version: int | None = None
) -> dict[str, EvaluationResult]:
    """Evaluate each set, and write a page of its transcripts.

    Args:
        evaluations: evaluations by the name of the set.
        step: step of the weights.
        pages: folder of the pages; None writes none.
        policy_version: version of the weights, for the transcripts; None leaves it out.
    """
    results = {
        name: each.run(keep_rows=pages is not None, policy_version=policy_version) for name, each in evaluations.items()
    }
    for name, result in results.items() if pages is not None else ():
        title, tokenizer = f"Evaluation{_of(name)} after step {step}", evaluations[name].policy.tokenizer
        write_evaluation_transcripts(pages / _page(name, step), result, tokenizer, title=title)
    return results


def log_evaluation(run: Run, results: dict[str, EvaluationResult], log: LogConfig) -> None:
    """Log metrics of each set at the step of the weights, and a table of its greedy completions."""
    for name, result in results.items():
        run.log(result.metrics_of_set(name))
        if log.samples:
            page = f"transcripts/{_page(name, run.step)}" if log.transcripts else None
            run.log_table(f"held-out completions{_of(name)}", result.table(log.samples, page=page))


def _of(name: str) -> str:
    return f" of {name}" if name else ""


def _page(name: str, step: int) -> str:
    return f"step_{step:06d}{f'_{name}' if name else ''}.html"
