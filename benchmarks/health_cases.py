"""Short runs of the built-in tasks for ``bench_health.py``: healthy ones, and ones with one planted fault each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

LIMIT = 40  # tokens of a completion; a correct one takes at most 25

# Rewards with a fault


def length_bonus(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return a score for every token."""
    return [10.0 * len(ids) / LIMIT for ids in completion_ids]


def boxes(completions: list[str], **_: Any) -> list[float]:
    """Return a score for every box, whatever is in it."""
    return [float(text.count("\\boxed{")) for text in map(final_text, completions)]


def nines(completions: list[str], **_: Any) -> list[float]:
    """Score like a reward model with a flaw: it likes one character, without a bound."""
    return [0.1 * text.count("9") ** 2 for text in map(final_text, completions)]


def half(completions: list[str], **_: Any) -> list[float]:
    """Return the same score for every completion."""
    return [0.5] * len(completions)


def absent(completions: list[str], **_: Any) -> list[float | None]:
    """Return no score for two of three completions, as a scorer with a rate limit does."""
    return [None if hash_of(text) % 3 else float("8" in text) for text in map(final_text, completions)]


def final_text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def hash_of(text: str) -> int:
    return sum(map(ord, text)) % 9973


# Faults of other parts


@contextmanager
def noisy_sync() -> Iterator[None]:
    """Add noise to the sampler's copy of the weights after each update from step 10 on: a broken transport."""
    import torch

    from torchrl_rloo.weight_update import InProcessWeightUpdater

    original, pushes = InProcessWeightUpdater._send, []

    def push(self: Any, version: int) -> None:
        original(self, version)
        pushes.append(None)
        if len(pushes) > 10:
            generator = torch.Generator().manual_seed(len(pushes))
            with torch.no_grad():
                for weight in self.target.parameters():
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.add_(noise * 0.3 * weight.std().nan_to_num())

    with mock.patch.object(InProcessWeightUpdater, "_send", push):
        yield


class Case(NamedTuple):
    """A run: its settings, and a planted fault that no setting plants."""

    overrides: tuple[str, ...]
    fault: Callable[[], Any] | None = None


SIZES = ("plan.prompts_per_step=8", "plan.num_generations=8", "data.eval_size=32", "eval.every=10")
QUIET = ("log.loggers=[]", "log.samples_every=0", "checkpoint.every=0", "log.samples=1")
REWARD = "torchrl_rloo.rewards.boxed_accuracy"
HERE = "health_cases"


def planted(seed: int, steps: int) -> dict[str, Case]:
    """Return the runs with a fault."""
    base = (f"seed={seed}", f"plan.steps={steps}", f"generate.max_new_tokens={LIMIT}")
    scorer = f"eval.scorer={REWARD}"
    copy = "sampler.share_weights=false"
    return {
        "length_bonus": Case((*base, f"reward.functions=[{REWARD},{HERE}.length_bonus]", scorer, "optimizer.lr=2e-3")),
        "format_reward": Case((*base, f"reward.functions=[{HERE}.boxes]", scorer, "optimizer.lr=1e-3")),
        "flawed_reward_model": Case((*base, f"reward.functions=[{HERE}.nines]", scorer, "optimizer.lr=1e-3")),
        "high_rate": Case((*base, "algorithm=rloo", "optimizer.lr=3e-3", "plan.epochs_per_batch=2")),
        "divergence": Case((*base, "optimizer.lr=2e-2", "train.max_grad_norm=null")),
        "entropy_collapse": Case(
            (*base, "algorithm=rloo", "advantage.estimator=reinforce", f"reward.functions=[{REWARD},{HERE}.half]")
            + (scorer, "optimizer.lr=1e-3")
        ),
        "stale_sampler": Case((*base, copy, "sampler.sync_every=25", "algorithm=grpo", "optimizer.lr=2e-3")),
        "broken_sync": Case((*base, copy, "algorithm=grpo", "inference.parity_every=1"), fault=noisy_sync),
        "no_prompt": Case((*base, "model.chat_template=NO_PROMPT")),
        "too_hard": Case((*base, "task=countdown", "data.source=embedded", f"generate.max_new_tokens={LIMIT}")),
        "abstaining_reward": Case((*base, f"reward.functions=[{HERE}.absent]", scorer)),
        "cut_off": Case((*base, "generate.max_new_tokens=10")),
    }


ALGORITHMS = ("rloo_trl", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp_baseline")


def healthy(seeds: list[int], steps: int, count: int) -> dict[str, Case]:
    """Return ``count`` runs without a fault, of several seeds, tasks and algorithms."""
    variants = [(f"algorithm={name}",) for name in ALGORITHMS]
    variants += [
        ("task=calculator",),
        ("kl.coeff=0.05",),
        ("task=guessing",),
        ("algorithm=grpo", "plan.minibatches=2", "plan.epochs_per_batch=2"),
        ("sampler.share_weights=false", "sampler.sync_every=2", "algorithm=grpo"),
        ("task=calculator", "algorithm=grpo"),
        ("curriculum.refill={}",),
        ("generate.temperature=0.8",),
    ]
    random.Random(seeds[0]).shuffle(variants)
    cases = {}
    for number in range(count):
        variant, seed = variants[number % len(variants)], seeds[number % len(seeds)]
        name = "_".join(part.partition("=")[2].strip("{}") or part.partition("=")[0] for part in variant)
        cases[f"healthy_{name}_{number}"] = Case((*variant, f"seed={seed}", f"plan.steps={steps}"))
    return cases
