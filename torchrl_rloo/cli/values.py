"""Ranges and choices of settings, checked by recipes before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torchrl_rloo.runtime.lookup import did_you_mean

AT_LEAST = {
    0: (
        "checkpoint.every",
        "collector.ahead",
        "collector.max_staleness",
        "curriculum.refill.max_age",
        "eval.every",
        "eval.num_samples",
        "generate.temperature",
        "inference.parity_every",
        "kl.coeff",
        "log.samples",
        "log.samples_every",
        "optimizer.weight_decay",
        "reference.sync_every",
        "sampler.sync_every",
        "schedule.warmup_steps",
    ),
    1: (
        "check.prompts",
        "checkpoint.keep",
        "collector.max_batch_size",
        "collector.max_consecutive_failures",
        "collector.max_failed_pushes",
        "collector.min_members",
        "collector.reward_threads",
        "curriculum.cache.capacity",
        "curriculum.refill.max_batches",
        "data.eval_size",
        "data.limit",
        "data.max_length",
        "data.max_prompt_length",
        "environment.max_tokens",
        "environment.max_turn_tokens",
        "environment.max_turns",
        "eval.batch_size",
        "eval.bins",
        "generate.max_new_tokens",
        "generate.top_k",
        "inference.replicas",
        "plan.epochs_per_batch",
        "plan.micro_batch_size",
        "plan.minibatches",
        "plan.num_generations",
        "plan.prompts_per_step",
        "plan.steps",
        "reward.executor.rows_per_call",
        "reward.executor.workers",
        "reward.max_consecutive_failures",
        "stop_after",
        "threads",
        "train.context_parallel",
        "train.micro_batch_size",
        "train.micro_batch_tokens",
        "train.pairs_per_step",
        "train.steps",
        "train.tensor_parallel",
    ),
}
ABOVE_0 = (
    "environment.max_seconds",
    "generate.repetition_penalty",
    "generate.top_p",
    "kl.clip",
    "kl.target",
    "optimizer.lr",
    "reference.share",
    "reward.executor.timeout",
    "train.max_grad_norm",
)
AT_MOST_1 = ("generate.min_p", "generate.top_p", "reference.share", "schedule.final_fraction")
DTYPES = ("float32", "bfloat16", "float16", "float64")
CHOICES = {
    "algorithm": (  # objectives.PRESETS without those that train a critic
        "rloo",
        "rloo_trl",
        "rloo_openrlhf",
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "cispo",
        "reinforce_pp",
        "reinforce_pp_baseline",
    ),
    "check.mode": ("warn", "stop", "off"),
    "collector.on_failure": ("abstain", "replace"),
    "collector.on_stale": ("mask", "baseline", "requeue", "wait"),
    "environment.on_rewrite": ("keep", "split"),
    "environment.on_time_limit": ("score", "abstain"),
    "format": ("parquet", "jsonl"),
    "kl.estimator": ("k1", "k2", "k3"),
    "kl.where": ("reward", "token", "loss"),
    "log.loggers": ("tensorboard", "wandb", "mlflow", "trackio"),
    "model.dtype": DTYPES,
    "model.quantization": ("nf4",),
    "optimizer.name": (  # training.OPTIMIZERS
        "adamw",
        "adamw_8bit",
        "muon",
        "adadelta",
        "adafactor",
        "adagrad",
        "adam",
        "adamax",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    ),
    "resume": ("auto", "extend", "never"),
    "reward.executor.mode": ("inline", "thread", "process"),
    "sampler.dtype": DTYPES,
    "schedule.name": (  # training.SCHEDULES
        "linear",
        "cosine",
        "constant",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "StepLR",
    ),
    "train.offload": ("activations", "optimizer", "parameters"),
    "train.packing": ("none", "packed", "shared_prefix"),
    "train.precision": ("float32", "bfloat16"),
    "train.parallel": ("none", "ddp", "fsdp"),
    "train.reduce": ("last_pass", "every_pass"),
}
REMEDIES = {"algorithm=ppo": "it needs a critic, which recipes do not train; use tutorials/ppo.py"}


def check_values(config: Any) -> None:
    """Raise on the first setting that is out of range or not one of its choices.

    Raises:
        ValueError: with the name, the value and the valid values.
    """
    for name, value in _values(config):
        low = next((low for low, names in AT_LEAST.items() if name in names), None)
        if low is not None and not value >= low:
            raise ValueError(f"{name}={value} must be at least {low}")
        if name in ABOVE_0 and not value > 0:
            raise ValueError(f"{name}={value} must be above 0")
        if name in AT_MOST_1 and not 0 <= value <= 1:
            raise ValueError(f"{name}={value} must be between 0 and 1")
        if name == "resume" and type(value) is int:
            if value < 0:
                raise ValueError(f"resume={value} must be a step of at least 0, or one of: {', '.join(CHOICES[name])}")
            continue
        for choice in (value if isinstance(value, list) else [value]) if name in CHOICES else ():
            if choice not in CHOICES[name]:
                valid = f"valid: {', '.join(CHOICES[name])}"
                remedy = REMEDIES.get(f"{name}={choice}", f"unknown{did_you_mean(choice, CHOICES[name])}; {valid}")
                raise ValueError(f"{name}={choice}: {remedy}")


def _values(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of all settings that are not null."""
    for f in fields(section):
        value = getattr(section, f.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{f.name}.")
        elif value is not None:
            yield f"{prefix}{f.name}", value
