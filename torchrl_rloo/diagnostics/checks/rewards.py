"""Checks of the rewards on constructed completions: right, wrong, empty and hostile."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean

from torchrl_rloo.diagnostics.checks.base import Facts, Finding, Probe

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
    sampled = defaultdict(list)
    for sample in facts.samples:
        sampled[sample.prompt_id].append(sample)
    values = [[p.value for p in probes if p.value is not None] for probes in prompts]
    values += [[s.value for s in each if s.value is not None] for each in sampled.values()]
    values = [each for each in values if len(each) > 1]
    if not values or any(max(each) - min(each) > MARGIN for each in values):
        return None
    known = any(probe.kind == "right" for probe in facts.probes)
    if not known and all(value == 0 for each in values for value in each):
        return None  # a reward that nothing has earned yet, of a task whose right completions are unknown
    names, number = ", ".join(facts.functions), sum(map(len, values))
    sentence = f"reward {names} gives all completions of a prompt the same, {number} of them ({values[0][0]:g} each)"
    remedy = "make it read the completion (argument completions or completion_ids)"
    return Finding("error", f"{sentence}: it ignores the completion", remedy)


def _by_prompt(probes: Sequence[Probe]) -> list[list[Probe]]:
    found: dict[int, list[Probe]] = defaultdict(list)
    for probe in probes:
        found[probe.prompt_id].append(probe)
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
