"""Checks of settings: group and batch sizes, KL, staleness, evaluation, early stop, disk and memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

from torchrl_rloo.diagnostics.checks.base import Facts, Finding

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
    return Finding("error", sentence, "torchrl-rloo plan lists settings that make it fit")


def _name(choice: Any) -> str | None:
    return choice.get("name") if isinstance(choice, Mapping) else choice


def _gb(size: float) -> str:
    return f"{size / GB:,.2f} GB"
