"""Checks of the start model's completions: groups with a signal, truncation, failed and slow rewards."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import comb
from statistics import fmean, pstdev

from torchrl_rloo.diagnostics.checks.base import Facts, Finding

SIGNAL_SHARE = 0.3  # groups with a signal; below it, most of the sampling teaches nothing
GROUP_SIZES = (4, 8, 16, 32, 64)  # sizes to advise
TRUNCATED_SHARE, ALL_TRUNCATED = 0.2, 0.9
FAILED_SHARE = 0.5
SLOW_REWARD = 1.0  # seconds of rewards per step that are worth a word
REWARD_SCALE = 10.0  # standard deviation of returns from which clipping or scaling matters


def signal_probability(values: Sequence[float], size: int) -> float:
    r"""Return the probability that a group of ``size`` completions of a prompt has returns that are not all equal.

    Of ``n`` sampled returns, ``m_v`` have the value ``v``. Up to ``n``, the estimate is unbiased:
    :math:`1 - \sum_v \binom{m_v}{G} / \binom{n}{G}`. Beyond it, the shares are taken for the probabilities:
    :math:`1 - \sum_v (m_v / n)^G`, for two values the binomial :math:`1 - p^G - (1 - p)^G`.

    Args:
        values: ``n`` returns of a prompt's completions.
        size: size of a group, ``G``.

    Returns:
        The probability, 0 for fewer than two returns.

    Example:
        >>> signal_probability([1.0, 0.0, 0.0, 0.0], 2), signal_probability([1.0, 0.0], 4)
        (0.5, 0.875)
    """
    n, counts = len(values), Counter(values).values()
    if n < 2:
        return 0.0
    if size <= n:
        return 1.0 - sum(comb(m, size) for m in counts) / comb(n, size)
    return 1.0 - sum((m / n) ** size for m in counts)


def check_signal(facts: Facts) -> Finding | None:
    """Estimate how many groups of a step will have different returns, which alone teach."""
    groups = _returns_by_prompt(facts)
    if not groups:
        return None
    size, prompts = facts.plan.num_generations, facts.plan.prompts_per_step
    values = [value for group in groups for value in group]
    share = fmean(signal_probability(group, size) for group in groups)
    spread = f"mean {fmean(values):.3g}, standard deviation {pstdev(values):.3g}, {len(values)} completions"
    sentence = f"the start model's returns: {spread}; about {share * prompts:.1f} of {prompts} groups have a signal"
    if len(set(values)) == 1:
        return _no_signal(facts, values)
    if share >= SIGNAL_SHARE:
        return Finding("ok", sentence)
    enough = [g for g in GROUP_SIZES if g > size and _share(groups, g) >= SIGNAL_SHARE]
    remedy = "choose prompts by curriculum.pass_rate={}, or give partial scores"
    if enough:
        share = _share(groups, enough[0])
        remedy = f"raise plan.num_generations to {enough[0]}, where about {share:.0%} have one, or {remedy}"
    return Finding("warn", sentence, remedy)


def check_truncation(facts: Facts) -> Finding | None:
    """Count completions that a limit cut off."""
    if not facts.samples:
        return None
    lengths = [sample.tokens for sample in facts.samples]
    share = fmean(sample.truncated for sample in facts.samples)
    sentence = f"a limit cuts off {share:.0%} of the start model's completions (mean {fmean(lengths):.0f} tokens)"
    if share <= TRUNCATED_SHARE:
        return Finding("ok", sentence)
    level = "error" if share >= ALL_TRUNCATED else "warn"
    remedy = f"raise generate.max_new_tokens={facts.plan.max_new_tokens}, and check that a stop id ends turns"
    return Finding(level, sentence, remedy)


def check_sampled_rewards(facts: Facts) -> Iterator[Finding]:
    """Report rewards that fail on the start model's completions, take long, or have a large scale."""
    for name, (number, message) in facts.failures.items():
        level = "error" if number >= FAILED_SHARE * len(facts.samples) else "warn"
        sentence = f"reward {name} fails on {number} of {len(facts.samples)} sampled completions ({message:.120})"
        yield Finding(level, sentence, "correct it; failed samples abstain and teach nothing")
    if facts.reward_seconds is not None and facts.functions:
        yield _judge_time(facts.reward_seconds, facts.sample_seconds)
    values = [sample.value for sample in facts.samples if sample.value is not None]
    if len(values) > 1 and pstdev(values) > REWARD_SCALE and not facts.normalized:
        sentence = f"returns have a standard deviation of {pstdev(values):.3g}, which multiplies the gradient"
        yield Finding("warn", sentence, "scale or clip them: reward.clip_range, reward.shaping or advantage.normalize")


def check_abstained(facts: Facts) -> Finding | None:
    """Count trajectories without a return."""
    missing = sum(sample.value is None for sample in facts.samples)
    if missing <= FAILED_SHARE * len(facts.samples):
        return None
    sentence = f"{missing} of {len(facts.samples)} sampled trajectories have no return, so they teach nothing"
    return Finding("error", sentence, "read the log above: rewards abstain, or conversations fail")


def _judge_time(seconds: float, sampling: float | None) -> Finding:
    compared = "" if sampling is None else f", sampling {sampling:.2g} s"
    sentence = f"rewards take {seconds:.2g} s per step{compared}"
    if seconds <= max(SLOW_REWARD, sampling or 0.0):
        return Finding("ok", sentence)
    remedy = "score in parallel: reward.executor.mode=process (or thread, for rewards that wait)"
    return Finding("warn", sentence, f"{remedy}, and collector.reward_threads")


def _no_signal(facts: Facts, values: Sequence[float]) -> Finding:
    """Report that all completions earn the same."""
    number, prompts = len(values), len({sample.prompt_id for sample in facts.samples})
    sentence = f"all {number} completions of {prompts} prompts by the start model earn {values[0]:g}"
    if values[0] > 0:
        return Finding("error", f"{sentence}, so no group has a signal", "use harder prompts, or check the reward")
    rarely = f"the pass rate is likely below {3 / number:.1%}"  # rule of three: 95 % confidence
    cut = sum(sample.truncated for sample in facts.samples)
    truncated = f", and a limit cut off {cut} of them" if cut else ""
    remedy = "use easier prompts, partial scores or a better start model; read a prompt and its completion first"
    return Finding("error", f"{sentence} ({rarely}{truncated}), so no group has a signal", remedy)


def _share(groups: Sequence[Sequence[float]], size: int) -> float:
    return fmean(signal_probability(group, size) for group in groups)


def _returns_by_prompt(facts: Facts) -> list[list[float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for sample in facts.samples:
        if sample.value is not None:
            found[sample.prompt_id].append(sample.value)
    return list(found.values())
