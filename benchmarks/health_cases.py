"""Short runs of the built-in tasks for ``bench_health.py``: healthy ones, and ones with one planted fault each."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
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


# Files that the settings of a run name


def make_template(folder: Path, seed: int) -> Path:
    """Write a chat template that leaves the prompt out."""
    from torchrl_rloo.embedded import build_tokenizer

    file, original = folder / "no_prompt.jinja", build_tokenizer().chat_template
    file.write_text(original.replace("{% else %}{{ message['content']", "{% else %}{{ ''"))
    assert file.read_text() != original
    return file


def train_reward_model(folder: Path, seed: int) -> Path:
    """Train a reward model on pairs of right and wrong completions, for too few steps to learn the sums."""
    run_recipe("reward_model", [f"seed={seed}", "train.steps=30", f"output_dir={folder}/pairs"])
    return folder / "pairs" / "model"


FILES = {"NO_PROMPT": make_template, "REWARD_MODEL": train_reward_model}


def run_recipe(name: str, overrides: list[str], finish: bool = True) -> None:
    """Run a recipe in this process; without ``finish``, the model and the report are not written."""
    from torchrl_rloo.cli.main import recipe_file
    from torchrl_rloo.cli.recipe import import_recipe, parse_args

    module = sys.modules.get(f"recipe_{name}") or import_recipe(recipe_file(name), f"recipe_{name}")
    cfg = parse_args(module.Config, Path(module.__file__), module.__doc__, ["--traceback", *overrides])
    with nullcontext() if finish else mock.patch.object(module, "finish"):
        module.main(cfg)


class Case(NamedTuple):
    """A run: its settings, and a planted fault that no setting plants; or a function that trains and writes a file."""

    overrides: tuple[str, ...] = ()
    fault: Callable[[], Any] | None = None
    train: Callable[[Path], None] | None = None


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


def provoked(seed: int, steps: int) -> dict[str, Case]:
    """Return runs that fail by their settings, without a part that is broken, with frequent evaluations."""
    often = ("data.eval_size=128", "eval.every=5")
    base = (f"seed={seed}", f"plan.steps={steps}", f"generate.max_new_tokens={LIMIT}", *often)
    scorer = f"eval.scorer={REWARD}"
    model = "reward.functions=[{_target_: sequence_classifier, model: REWARD_MODEL, name: reward_model}]"
    rates = {"critic_lr": 0.1, "max_grad_norm": None}
    return {
        "trained_reward_model": Case((*base, "algorithm=rloo", model, scorer, "optimizer.lr=1e-3")),
        "no_kl_high_rate": Case((*base, "algorithm=rloo", "optimizer.lr=2e-3")),
        "entropy_sign": Case(
            (*base, "algorithm=dapo", "optimizer.lr=1e-3", "loss.entropy_coeff=-0.5")
            + ("eval.num_samples=4", "eval.ks=[4]", f"plan.steps={steps + 20}")
        ),
        "critic_rate": Case(train=partial(train_critic, seed=seed, steps=steps, every=5, **rates)),
    }


def train_critic(file: Path, **settings: Any) -> None:
    """Train with PPO, see :func:`health_critic.train`, which needs torch."""
    from health_critic import train

    train(file, **settings)


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


def unseen(seeds: list[int], steps: int, count: int) -> dict[str, Case]:
    """Return ``count`` healthy runs of settings that no limit of a rule was chosen on, each with one of the seeds."""
    variants = {
        "rloo_openrlhf": ("algorithm=rloo_openrlhf",),
        "reinforce_pp": ("algorithm=reinforce_pp",),
        "own_kl": ("algorithm=rloo_openrlhf", "kl.coeff=null"),
        "mixture": (
            "task=mixture",
            "task.mixture={addition: 3, multiple_choice: {weight: 1, source: embedded}, countdown: null}",
        ),
        "cosine": ("schedule.name=cosine",),
        "muon": ("optimizer.name=muon",),
        "lora": ("lora={r: 16, target_modules: all-linear}", "optimizer.lr=3e-3"),
        "four_of_sixteen": ("plan.prompts_per_step=16", "plan.num_generations=4"),
        "two_rewards": ("reward.functions=[boxed_accuracy,think_format]", f"eval.scorer={REWARD}"),
        "budget": (
            "reward.functions=[{_target_: length_budget, function: boxed_accuracy, budget: 24, cost: 0.1}]",
            f"eval.scorer={REWARD}",
        ),
        "dapo_refill": ("algorithm=dapo", "curriculum.refill={}"),
        "calculator_gspo": ("task=calculator", "algorithm=gspo"),
        "calculator_openrlhf": ("task=calculator", "algorithm=rloo_openrlhf"),
        "guessing_grpo": ("task=guessing", "algorithm=grpo"),
        "pass_rate": ("curriculum.pass_rate={}",),
        "stale_tis": (
            "sampler.share_weights=false",
            "sampler.sync_every=2",
            "algorithm=dapo",
            "loss={correction: tis, old_log_probs: proximal}",
        ),
        "cispo_minibatches": ("algorithm=cispo", "plan.minibatches=2"),
        "hot": ("algorithm=dr_grpo", "generate.temperature=1.2"),
        "kl_target": ("kl.coeff=0.05", "kl.target=0.05"),
    }
    cases = {
        f"healthy_{name}": Case((*settings, f"seed={seeds[number % len(seeds)]}", f"plan.steps={steps}"))
        for number, (name, settings) in enumerate(variants.items())
    }
    rates = {"critic_lr": 1e-3, "max_grad_norm": 1.0}
    cases["healthy_ppo"] = Case(train=partial(train_critic, seed=seeds[-1], steps=steps, every=10, **rates))
    return dict(list(cases.items())[-count:]) if count else {}
