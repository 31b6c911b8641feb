"""Checks of rewards, of the start model's completions and of settings, and the table of all checks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import comb, sqrt
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any

from torchrl_rloo.diagnostics.checks.base import Check, Facts, Finding, Probe, Sample
from torchrl_rloo.diagnostics.checks.prompts import (
    check_answers,
    check_beginning,
    check_duplicates,
    check_overlap,
    check_stop_ids,
    check_template,
)

PLAIN = ("right", "wrong", "empty")  # kinds of completions that are not hostile
MARGIN = 1e-6  # differences of returns up to this are rounding


def check_reward_failures(facts: Facts) -> Iterator[Finding]:
    """Report reward functions that fail on a constructed completion; their samples would abstain."""
    kinds, messages = defaultdict(Counter), {}
    for probe in facts.probes:
        for name, message in probe.failures.items():
            kinds[name][probe.kind] += 1
            messages.setdefault(name, message)
    for name, counts in kinds.items():
        number = sum(counts.values())
        always = number == len(facts.probes)
        where = "every completion" if always else f"{_list(counts)} completions"
        sentence = f"reward {name} fails on {where} ({messages[name]:.120})"
        remedy = "correct it: a failed sample abstains, so the policy is not taught to avoid such completions"
        remedy = facts.form_hints.get(name, remedy)
        yield Finding("error" if always or set(counts) & {"right", "wrong"} else "warn", sentence, remedy)
    if facts.probes and not kinds:
        yield Finding("ok", f"no reward fails on {len(facts.probes)} right, wrong, empty and hostile completions")


def check_reward_order(facts: Facts) -> Finding | None:
    """Check that the right answer earns more than a wrong one, an empty text or a hostile one."""
    prompts = _by_prompt(facts.probes)
    if not prompts:
        return None
    failed = {name for probe in facts.probes for name in probe.failures}
    for name in facts.form_hints.keys() - failed:
        return Finding("error", f"reward {name} gives all completions the same", facts.form_hints[name])
    if (constant := _constant(facts, prompts)) is not None:
        return constant
    if not any(probe.kind == "right" for probe in facts.probes):
        return _judge_without_answers(facts, prompts)
    # Take the best format of the right answer, since its format is the task's choice
    best = [max(_values(probes, "right"), default=None) for probes in prompts]
    wrong = [max(_values(probes, "wrong"), default=None) for probes in prompts]
    pairs = [(r, w) for r, w in zip(best, wrong, strict=True) if r is not None and w is not None]
    told_apart = sum(right > other + MARGIN for right, other in pairs)
    if told_apart * 2 < len(pairs):
        sentence = f"the right answer earns more than a wrong one for only {told_apart} of {len(pairs)} prompts"
        return Finding("warn", sentence, "check that the reward reads the answer, and finds it in the completion")
    # Whatever else earns as much is what the policy would learn
    for kind in dict.fromkeys(probe.kind for probe in facts.probes if probe.kind not in ("right", "wrong")):
        others = [max(_values(probes, kind), default=None) for probes in prompts]
        pairs = [(r, o) for r, o in zip(best, others, strict=True) if r is not None and o is not None]
        if pairs and all(other >= right - MARGIN for right, other in pairs):
            sentence = f"{_describe(kind)} earns {pairs[0][1]:g}, as much as the right answer ({pairs[0][0]:g})"
            remedy = "make the reward stricter; the policy finds the cheapest completion that earns it"
            return Finding("error" if kind == "empty" else "warn", sentence, remedy)
    bare = [next((probe.value for probe in probes if probe.kind == "right"), None) for probes in prompts]
    sentence = f"the right answer earns {_mean(best):g}, without any other text {_mean(bare):g}"
    return Finding("ok", f"{sentence}; wrong, empty and hostile completions earn less")


def _judge_without_answers(facts: Facts, prompts: Sequence[Sequence[Probe]]) -> Finding:
    """Compare empty completions with those of the start model, as nothing is known to be right."""
    empty = [value for probes in prompts for value in _values(probes, "empty")]
    sampled = [sample.value for sample in facts.samples if sample.value is not None]
    if empty and sampled and fmean(empty) > max(sampled):
        sentence = f"an empty completion earns {fmean(empty):g}, more than any of the start model's {len(sampled)}"
        return Finding("warn", sentence, "make the reward require content")
    return Finding("ok", f"empty completions earn {fmean(empty) if empty else 0.0:g}; no column states a right answer")


def _constant(facts: Facts, prompts: Sequence[Sequence[Probe]]) -> Finding | None:
    """Report rewards that do not depend on the completion."""
    groups = [*prompts, *_by_prompt(facts.samples)]
    values = [each for group in groups if len(each := [item.value for item in group if item.value is not None]) > 1]
    if not values or any(max(each) - min(each) > MARGIN for each in values):
        return None
    known = any(probe.kind == "right" for probe in facts.probes)
    if not known and all(value == 0 for each in values for value in each):
        return None  # a reward that nothing has earned yet, of a task whose right completions are unknown
    names, number = ", ".join(facts.functions), sum(map(len, values))
    sentence = f"reward {names} gives all completions of a prompt the same, {number} of them ({values[0][0]:g} each)"
    remedy = "make it read the completion (argument completions or completion_ids)"
    return Finding("error", f"{sentence}: it ignores the completion", remedy)


def _by_prompt(items: Sequence[Probe | Sample]) -> list[list[Any]]:
    """Group probes or samples by their prompts."""
    found: dict[int, list[Any]] = defaultdict(list)
    for item in items:
        found[item.prompt_id].append(item)
    return list(found.values())


def _values(probes: Sequence[Probe], kind: str) -> list[float]:
    return [probe.value for probe in probes if probe.kind == kind and probe.value is not None]


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else 0.0


def _describe(kind: str) -> str:
    return "an empty completion" if kind == "empty" else f"a hostile completion ({kind})"


def _list(counts: Counter[str]) -> str:
    names = [kind if kind in PLAIN else f"hostile ({kind})" for kind in counts]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# Completions of the start model


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
        values: ``n`` returns of a prompt's completions; fewer than two have probability 0.
        size: size of a group, ``G``.

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
    groups = [[s.value for s in group] for group in _by_prompt([s for s in facts.samples if s.value is not None])]
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


# Settings


LEAST_GROUP = 4  # members; the baseline of a smaller group is the mean of one or two others
LEAST_ROWS = 32  # rows of an optimizer step
HELD_OUT_PROMPTS = 50
EVAL_STEPS = 100  # steps between evaluations, at most
GB = 1e9


def check_sizes(facts: Facts) -> Finding:
    """Judge the sizes of groups and of an optimizer step's batch."""
    plan = facts.plan
    rows = plan.rows_per_step // plan.minibatches
    sentence = (
        f"{plan.prompts_per_step} prompts x {plan.num_generations} completions in a step, {rows} rows in an optimizer "
        "step"
    )
    if facts.temperature == 0 and plan.num_generations > 1:
        same = f"generate.temperature=0 makes the {plan.num_generations} completions of a prompt equal"
        return Finding("error", same, "set generate.temperature=1.0; equal completions have no advantage")
    if plan.num_generations < LEAST_GROUP:
        others = plan.num_generations - 1
        small = f"the baseline of a completion is the mean of {others} {'other' if others == 1 else 'others'}"
        return Finding("warn", f"{sentence}: {small}", "set plan.num_generations=8; 4 is a practical least")
    if rows < LEAST_ROWS:
        remedy = "raise plan.prompts_per_step (large models: 256 prompts), or lower plan.minibatches"
        return Finding("warn", f"{sentence}, so gradients are noisy", remedy)
    return Finding("ok", sentence)


def check_kl(facts: Facts) -> Finding:
    """Check that a learned reward has a KL to the initial model, with a target."""
    if facts.kl_coeff and facts.kl_target is not None:
        return Finding("ok", f"the KL coefficient starts at {facts.kl_coeff:g} and holds {facts.kl_target:g} nats")
    if not facts.learned_reward:
        state = f"constant KL coefficient {facts.kl_coeff:g}" if facts.kl_coeff else "no KL to the initial model"
        return Finding("ok", f"{state}; the rewards are programs, which are harder to exploit than a model")
    if facts.kl_coeff:
        sentence = f"a learned reward with a constant KL coefficient of {facts.kl_coeff:g}"
        return Finding("ok", f"{sentence}; kl.target would adapt it")
    sentence = "a learned reward without a KL to the initial model, which the policy can exploit"
    return Finding("warn", sentence, "set kl.coeff=0.05, and kl.target to hold the KL")


def check_staleness(facts: Facts) -> Finding:
    """Check that the loss corrects for rows that older weights sampled."""
    updates = facts.plan.minibatches * facts.plan.epochs_per_batch
    corrects = _name(facts.loss.get("ratio")) != "none" or facts.loss.get("correction") is not None
    if facts.sync_every == 0:
        sentence = "sampler.sync_every=0 never updates the sampler, so no improvement reaches it"
        return Finding("warn", sentence, "set sampler.sync_every=1, unless this run is a control")
    how = f"loss.ratio={_name(facts.loss.get('ratio'))}"
    if (correction := facts.loss.get("correction")) is not None:
        how += f" and loss.correction={_name(correction)}"
    if facts.staleness == 0 and updates == 1:
        return Finding("ok", "every optimizer step is on-policy")
    stale = f"rows may be {facts.staleness} weight updates old" if facts.staleness else f"{updates} updates per batch"
    if corrects:
        return Finding("ok", f"{stale}; {how} corrects for it")
    level = "error" if facts.staleness else "warn"
    remedy = "set loss.correction=tis, or an algorithm with a ratio (rloo_trl, grpo)"
    return Finding(level, f"{stale}, and loss.ratio=none takes them for on-policy, so the gradient is biased", remedy)


def check_in_flight(facts: Facts) -> Finding | None:
    """Check that weight updates do not wait for long turns, if stale tokens are allowed anyway."""
    if not facts.staleness or facts.in_flight is None:
        return None
    sentence = f"an update of the engine's weights makes turns in flight {facts.in_flight}"
    if facts.in_flight == "continue":
        return Finding("ok", sentence)
    remedy = "set inference.updater.in_flight=continue, since tokens of older weights are allowed"
    return Finding("warn", f"{sentence}, so engines wait or sample again at each update", remedy)


def check_evaluation(facts: Facts) -> Finding:
    """Check that there are enough held-out prompts, evaluated often enough."""
    prompts, every = facts.plan.eval_prompts, facts.eval_every
    error = 1.96 * sqrt(0.25 / max(1, prompts))
    known = f"an accuracy of 50 % is known to within {100 * error:.0f} points"
    sentence = f"{prompts} held-out prompts ({known}), every {every} steps"
    if prompts < HELD_OUT_PROMPTS:
        return Finding("warn", sentence, f"set data.eval_size to at least {HELD_OUT_PROMPTS}")
    if every == 0 or every > EVAL_STEPS:
        often = f"{prompts} held-out prompts, evaluated " + (f"every {every} steps" if every else "only at the end")
        return Finding("warn", often, "set eval.every=50; exploited rewards show there first")
    return Finding("ok", sentence)


def check_stop_rules(facts: Facts) -> Finding | None:
    """Check that some rule ends a run that goes wrong."""
    if facts.stop_rules is None:
        return None
    if not facts.stop_rules:
        return Finding("warn", "no rule ends a run that goes wrong", "set health.stop_on=[nan]")
    return Finding("ok", f"the run stops early on {', '.join(map(str, facts.stop_rules))}")


def check_disk(facts: Facts) -> Finding | None:
    """Check that all checkpoints fit on the disk."""
    if facts.checkpoint_bytes is None or facts.free_bytes is None:
        return None
    needed = facts.checkpoint_bytes * facts.checkpoints
    sentence = (
        f"{facts.checkpoints} checkpoints of about {_gb(facts.checkpoint_bytes)} need {_gb(needed)}; "
        f"{_gb(facts.free_bytes)} are free"
    )
    if needed <= facts.free_bytes:
        return Finding("ok", sentence)
    remedy = "free space, lower checkpoint.keep, or set another output_dir"
    return Finding("error", sentence, remedy)


def check_memory(facts: Facts) -> Finding | None:
    """Check that the planned memory fits the device."""
    if facts.peak_bytes is None:
        return None
    if facts.device_bytes is None or facts.peak_bytes <= facts.device_bytes:
        limit = "" if facts.device_bytes is None else f" of {_gb(facts.device_bytes)}"
        return Finding("ok", f"a training step is planned to take {_gb(facts.peak_bytes)}{limit} of memory")
    sentence = f"a training step is planned to take {_gb(facts.peak_bytes)}, and {_gb(facts.device_bytes)} are there"
    return Finding("error", sentence, "torchrl-rloo plan shows what takes the memory")


def _name(choice: Any) -> str | None:
    return choice.get("name") if isinstance(choice, Mapping) else choice


def _gb(size: float) -> str:
    return f"{size / GB:,.2f} GB"


# Table


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "answers": check_answers,
        "duplicates": check_duplicates,
        "overlap": check_overlap,
        "template": check_template,
        "beginning": check_beginning,
        "stop ids": check_stop_ids,
        "reward failures": check_reward_failures,
        "reward order": check_reward_order,
        "signal": check_signal,
        "truncation": check_truncation,
        "rewards": check_sampled_rewards,
        "returns": check_abstained,
        "sizes": check_sizes,
        "KL": check_kl,
        "staleness": check_staleness,
        "turns in flight": check_in_flight,
        "evaluation": check_evaluation,
        "early stop": check_stop_rules,
        "disk": check_disk,
        "memory": check_memory,
    }
)
