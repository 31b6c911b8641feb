"""Histories of metrics: a healthy run, and the change of each fault that a health rule finds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

Metrics = dict[str, float]


def healthy_history(steps: int, seed: int) -> list[Metrics]:
    """Return the metrics of a run whose reward rises from 0.2 to 0.7, with the noise of 64 rows."""
    rng = random.Random(seed)
    return [_healthy_step(step, rng) for step in range(steps)]


def _healthy_step(step: int, rng: random.Random) -> Metrics:
    progress = min(1.0, step / 100)
    solved = min(1.0, max(0.0, 0.2 + 0.5 * progress + rng.gauss(0, 0.05)))
    metrics = {
        "reward": solved,
        "reward_std": (solved * (1 - solved)) ** 0.5,
        "reward_max": 1.0,
        "frac_reward_zero_std": rng.uniform(0.1, 0.35),
        "frac_abstained": 0.0,
        "outcome/solved/share": solved,
        "outcome/unsolved/share": 1 - solved,
        "outcome/unsolved/entropy": 0.6 - 0.2 * progress + rng.gauss(0, 0.03),
        "entropy": 0.5 - 0.3 * progress + rng.gauss(0, 0.03),
        "kl": 0.05 * progress + abs(rng.gauss(0, 0.002)) + 1e-4,
        "kl_coeff": 0.05,
        "kl_approx": 0.002,
        "ESS": 0.95,
        "kept": 0.99,
        "log_ratio_max": 1.0,
        "clip_ratio/region_mean": 0.01,
        "loss": rng.gauss(0, 0.05),
        "grad_norm": rng.uniform(0.3, 0.9),
        "loss_critic": 0.5 - 0.2 * progress,
        "explained_variance": 0.3,
        "completions/mean_length": 24 + 4 * progress + rng.gauss(0, 1),
        "completions/clipped_ratio": 0.02,
        "group/length_correlation": rng.uniform(-0.2, 0.3),
        "diversity/distinct": 0.5 - 0.2 * progress,
        "diversity/repetition": 0.02,
        "parity/mean": 1e-3,
        "staleness": 1.0,
        "stop/failed": 0.0,
        "pool/ready": 2.0,
        "pool/members": 2.0,
        "tasks/sums/share": 0.5,
        "tasks/sums/frac_reward_zero_std": 0.2,
        "count/advantage/rows": 64.0 * step,
        "count/rewards/exact/raised": 0.0,
        "count/weights/failed_pushes": 0.0,
        "count/tools/python/calls": 50.0 * step,
        "count/tools/python/failed": 2.0 * step,
    }
    if step % 10 == 0:
        score = 0.2 + 0.5 * progress
        metrics |= {"eval/sampled": score, "eval/sampled_low": score - 0.08, "eval/sampled_high": score + 0.08}
        metrics |= {"eval/failed": 0.0}
    return metrics


def _set(**values: float) -> Callable[[int, Metrics], Metrics]:
    return lambda since, metrics: {name.replace("__", "/"): value for name, value in values.items()}


def _evaluated(score: float, **values: float) -> Callable[[int, Metrics], Metrics]:
    scores = {"eval/sampled": score, "eval/sampled_low": score - 0.08, "eval/sampled_high": score + 0.08}

    def change(since: int, metrics: Metrics) -> Metrics:
        return values | (scores if "eval/sampled" in metrics else {})

    return change


def _grown(rate: float, name: str) -> Callable[[int, Metrics], Metrics]:
    return lambda since, metrics: {name: metrics[name] + rate * since}


_UNSOLVED = {"outcome__solved__share": 0.3, "outcome__unsolved__share": 0.7}
FAULTS: dict[str, Callable[[int, Metrics], Metrics]] = {
    "nan": lambda since, metrics: {"loss": math.nan} if since < 40 else {},
    "entropy_collapse": _set(**_UNSOLVED, outcome__unsolved__entropy=0.01),
    "mode_collapse": _set(**_UNSOLVED, diversity__distinct=0.02),
    "entropy_growth": _set(entropy=1.6),
    "kl_high": _set(kl=3.0),
    "kl_runaway": _set(kl=3.0),
    "clip_share": _set(**{"clip_ratio/region_mean": 0.4}),
    "gradient_spikes": lambda since, metrics: {"grad_norm": 50.0} if since % 6 == 0 and since < 60 else {},
    "sampler_gap": _set(kl_approx=0.4),
    "parity": _set(**{"parity/mean": 0.5}),
    "effective_sample_size": _set(ESS=0.1),
    "log_ratio": _set(log_ratio_max=9.0),
    "few_tokens_kept": _set(kept=0.3),
    "sampler_not_updated": _set(kl=0.0),
    "value_divergence": _set(loss_critic=4.0, explained_variance=-0.5),
    "too_hard": _set(frac_reward_zero_std=1.0, outcome__solved__share=0.0),
    "no_signal": _set(frac_reward_zero_std=1.0, outcome__solved__share=0.5),
    "solved": _set(frac_reward_zero_std=0.95, outcome__solved__share=0.98),
    "little_signal": _set(frac_reward_zero_std=0.6),
    "task_without_signal": _set(**{"tasks/sums/frac_reward_zero_std": 1.0}),
    "no_progress": _set(reward=0.2),
    "reward_drop": _set(reward=0.1),
    "proxy_gap": _evaluated(0.2, reward=1.0),
    "held_out_drop": _evaluated(0.1),
    "exploited_reward": _set(reward=5.0, reward_max=9.0),
    "length_hacking": _set(**{"completions/mean_length": 60.0, "group/length_correlation": 0.8}),
    "repetition": _set(**{"diversity/repetition": 0.6}),
    "truncation": _set(**{"completions/clipped_ratio": 0.9}),
    "short_completions": _set(**{"completions/mean_length": 3.0}, **_UNSOLVED),
    "abstentions": _set(frac_abstained=0.4),
    "failing_rewards": _grown(20.0, "count/rewards/exact/raised"),
    "failed_evaluation": lambda since, metrics: {"eval/failed": 3.0} if "eval/sampled" in metrics else {},
    "staleness": _set(staleness=12.0),
    "failed_pushes": _grown(1.0, "count/weights/failed_pushes"),
    "missing_engines": _set(**{"pool/ready": 1.0}),
    "tool_failures": _grown(30.0, "count/tools/python/failed"),
    "failed_conversations": _set(**{"stop/failed": 0.2}),
}


def constant_rule(name: str, metric: str, limit: float, **kwargs: Any) -> Any:
    """Return a rule that holds while a metric is above a limit."""
    from torchrl_rloo.diagnostics.health import Rule

    def condition(history: Any) -> Metrics | None:
        value = history.now(metric)
        return {metric: value} if value is not None and value > limit else None

    return Rule(name, condition, (metric,), "It is high.", "Lower it.", **kwargs)


HIGH_REWARD = constant_rule("high_reward", "reward", 0.5, severity="stop")
