"""Held-out prompts of a run: its own and further sets by name, and their evaluation at intervals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torchrl_rloo.cli.config import LogConfig
from torchrl_rloo.cli.fields import non_null_fields
from torchrl_rloo.cli.rloo_config import RLOOConfig
from torchrl_rloo.cli.rloo_sections import EvalSetConfig
from torchrl_rloo.collectors import SharedSource
from torchrl_rloo.data import PromptDataset
from torchrl_rloo.diagnostics import TrainingPlan
from torchrl_rloo.embedded import resolve_task
from torchrl_rloo.envs.tasks import TaskBase
from torchrl_rloo.envs.tasks.base import EMBEDDED
from torchrl_rloo.envs.tasks.registry import conversation_settings
from torchrl_rloo.evaluation import Evaluation, EvaluationResult, write_evaluation_transcripts
from torchrl_rloo.modules import TurnPolicy
from torchrl_rloo.rewards import load_reward
from torchrl_rloo.run import Run
from torchrl_rloo.weight_update.rotary import depends_on_length


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


def longest_conversation(plan: TrainingPlan, sets: Mapping[str, EvalSet], model: Any) -> int | None:
    """Return the tokens of the longest conversation in training and evaluation; None takes the engine's own limit.

    Args:
        plan: sizes of the run, with the longest prompt of all sets.
        sets: held-out sets by name; the first has the turns and limits of training.
        model: model to sample, whose rotary frequencies may depend on the engine's limit.
    """
    # The length of feedback is unknown, so conversations of several turns count up to their limit
    limits = [each.chat.get("max_tokens") for each in sets.values() if each.make_transforms()]
    return None if None in limits or depends_on_length(model) else max([plan.longest_row, *limits])


def _load_set(
    cfg: RLOOConfig, asked: EvalSetConfig, name: str, own: EvalSet, tokenizer: Any, context: int | None
) -> EvalSet:
    """Load the prompts of a further set with its task's turns, limits and scorer; null takes those of the run."""
    task = own.task if asked.task is None else resolve_task(asked.task)
    template = {"template_kwargs": cfg.data.template_kwargs}
    given = ("prompt_column", "row_map", "system_prompt", "name", "split", "column_map")
    options = {"tokenizer": tokenizer} | template | {n: getattr(asked, n) for n in given if getattr(asked, n)}
    options |= {"chat": False} if cfg.data.examples else {}
    size = asked.size + cfg.data.examples  # the set shows its own examples, and is not scored on them
    try:
        if asked.source in (None, EMBEDDED):
            prompts = task.load(asked.source, eval_size=size, seed=cfg.seed, **options)[1]
        else:
            prompts = task.load_held_out(asked.source, eval_size=size, **options)
        (prompts,) = cfg.data.show_examples(tokenizer, prompts)
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
    return EvalSet(prompts, task, scorer, make_transforms, chat | template, asked.num_samples, asked.ks)


class HeldOutEvaluation:
    """Evaluation of all held-out sets with the policy's current weights, on all ranks together.

    Args:
        sets: sets by name; the run's own has the name ``""``.
        policy: policy of rank 0; None on the others, which wait for it.
        source: source of the run, which puts the sampler's weights where it samples.
        log: tables and transcripts.
        **options: further arguments of :class:`~torchrl_rloo.evaluation.Evaluation`.

    Example::

        evaluation = HeldOutEvaluation(sets, policy, source, cfg.log)
        evaluation.run(run)  # logs eval/greedy, eval/<set>/greedy, ...
    """

    def __init__(
        self, sets: Mapping[str, EvalSet], policy: TurnPolicy | None, source: SharedSource, log: LogConfig, **options
    ):
        self.source, self.log = source, log
        self.evaluations = {
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
            for name, each in (sets.items() if policy is not None else ())
        }

    def run(self, run: Run) -> None:
        """Evaluate each set; log its metrics at the step of the weights, and a table of its greedy completions."""
        with run.time("eval"):
            results = self.source.on_main(partial(self._evaluate, run), "evaluation")
            for name, result in (results or {}).items():  # none on the other ranks
                run.log(result.metrics_of_set(name))
                if self.log.samples:
                    page = f"transcripts/{_page(name, run.step)}" if self.log.transcripts else None
                    run.log_table(f"held-out completions{_of(name)}", result.table(self.log.samples, page=page))

    def _evaluate(self, run: Run) -> dict[str, EvaluationResult]:
        """Evaluate each set on rank 0, and write a page of its transcripts."""
        pages, version = self.log.transcripts, self.source.source.collector.policy_version
        results = {name: each.run(keep_rows=pages, policy_version=version) for name, each in self.evaluations.items()}
        for name, result in results.items() if pages else ():
            file, title = run.directory / "transcripts" / _page(name, run.step), f"Evaluation{_of(name)}"
            tokenizer = self.evaluations[name].policy.tokenizer
            write_evaluation_transcripts(file, result, tokenizer, title=f"{title} after step {run.step}")
        return results


def _of(name: str) -> str:
    return f" of {name}" if name else ""


def _page(name: str, step: int) -> str:
    return f"step_{step:06d}{f'_{name}' if name else ''}.html"
