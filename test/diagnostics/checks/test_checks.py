"""Checks before a run: their verdicts on constructed facts, and probes of real rewards."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics import TrainingPlan
from torchrl_rloo.diagnostics.checks import (
    CHECKS,
    Facts,
    Finding,
    Probe,
    Sample,
    probe_rewards,
    run_checks,
    signal_probability,
    summarize,
)
from torchrl_rloo.diagnostics.checks.probes import TEXT, beginning_losses
from torchrl_rloo.embedded import addition_prompts, build_model
from torchrl_rloo.embedded.tokenizer import CHAT_TEMPLATE, build_tokenizer
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.rewards.executors import ThreadExecutor

PLAN = {
    "steps": 10,
    "prompts_per_step": 16,
    "num_generations": 8,
    "minibatches": 1,
    "epochs_per_batch": 1,
    "micro_batch_size": None,
    "train_prompts": 100,
    "eval_prompts": 100,
    "max_prompt_tokens": 40,
    "max_new_tokens": 32,
    "context_length": 2048,
}
LOSS = {"ratio": "none"}


def facts(*, plan: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """Return facts of a healthy run without samples, with changes."""
    values = {
        "plan": TrainingPlan(**PLAN | (plan or {})),
        "train": load_prompts(addition_prompts("train", size=20)),
        "held_out": load_prompts(addition_prompts("test", size=20)),
        "tokenizer": build_tokenizer(),
        "eval_every": 20,
        "loss": LOSS,
    }
    values["stop_ids"] = (values["tokenizer"].eos_token_id,)
    return Facts(**values | changes)


def judge(name: str, found: Facts) -> list[Finding]:
    return run_checks(found, {name: CHECKS[name]})


def only(name: str, found: Facts) -> Finding:
    (finding,) = judge(name, found)
    return finding


def samples(*groups: list[float | None], truncated: bool = False) -> list[Sample]:
    return [Sample(i, "text", value, truncated, 8) for i, group in enumerate(groups) for value in group]


def test_facts_of_a_healthy_run_have_no_finding():
    assert {finding.level for finding in run_checks(facts(), CHECKS)} == {"ok"}


# ------------------------------------------------------------------------------------------------------------- signal
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=7), st.integers(1, 7))
def test_signal_probability_is_that_of_all_subsets(values, size):
    if size > len(values):
        return
    groups = list(combinations(values, size))
    share = sum(len(set(group)) > 1 for group in groups) / len(groups)
    assert signal_probability(values, size) == pytest.approx(share)


def test_signal_probability_beyond_the_samples_is_binomial():
    p = 0.25
    assert signal_probability([1.0, 0.0, 0.0, 0.0], 9) == pytest.approx(1 - p**9 - (1 - p) ** 9)
    assert signal_probability([1.0], 8) == 0.0


def test_few_groups_with_signal_name_the_group_size_that_helps():
    found = facts(samples=samples(*[[1.0] + [0.0] * 15] * 3, *[[0.0] * 16] * 7), plan={"num_generations": 4})
    finding = only("signal", found)
    assert finding.level == "warn" and "about 1.2 of 16 groups have a signal" in finding.sentence  # 3/10 of 4/16
    rare = facts(samples=samples(*[[1.0, 0.0]] * 2, *[[0.0, 0.0]] * 8), plan={"num_generations": 8})
    assert "raise plan.num_generations" not in only("signal", rare).remedy  # two prompts in ten, at any size
    many = facts(samples=samples(*[[1.0] + [0.0] * 15] * 10), plan={"num_generations": 4})
    assert "raise plan.num_generations to 8, where about 50% have one" in only("signal", many).remedy


def test_equal_returns_are_an_error_either_way():
    hard = only("signal", facts(samples=samples([0.0] * 8, [0.0] * 8, truncated=True)))
    assert hard.level == "error" and "pass rate is likely below 18.8%, and a limit cut off 16 of them" in hard.sentence
    easy = only("signal", facts(samples=samples([1.0] * 8, [1.0] * 8)))
    assert easy.level == "error" and "harder prompts" in easy.remedy


def test_abstained_failed_and_slow_rewards_are_reported():
    found = facts(
        samples=samples([None] * 6 + [0.0, 1.0]),
        failures={"graded": (6, "IndexError: 0")},
        functions=["graded"],
        reward_seconds=30.0,
        sample_seconds=2.0,
    )
    assert only("returns", found).level == "error"
    failed, slow = judge("rewards", found)
    assert failed.level == "error" and "graded fails on 6 of 8" in failed.sentence and "IndexError" in failed.sentence
    assert slow.level == "warn" and "rewards take 30 s per step, sampling 2 s" in slow.sentence
    large = facts(samples=samples([0.0, 100.0]))
    assert "standard deviation of 50" in only("rewards", large).sentence
    assert not judge("rewards", facts(samples=large.samples, normalized=True))


# ------------------------------------------------------------------------------------------------------------ settings
@pytest.mark.parametrize(
    ("name", "changes", "level", "words"),
    [
        ("sizes", {"plan": {"num_generations": 2, "prompts_per_step": 64}}, "warn", "the mean of 1 other"),
        ("sizes", {"plan": {"minibatches": 8}}, "warn", "16 rows in an optimizer step, so gradients are noisy"),
        ("KL", {"learned_reward": True}, "warn", "a learned reward without a KL"),
        ("KL", {"learned_reward": True, "kl_coeff": 0.05, "kl_target": 0.1}, "ok", "holds 0.1 nats"),
        ("staleness", {"plan": {"minibatches": 2}}, "warn", "2 updates per batch, and loss.ratio=none"),
        ("staleness", {"staleness": 2, "loss": {"ratio": {"name": "token"}}}, "ok", "loss.ratio=token corrects"),
        ("staleness", {"sync_every": 0}, "warn", "never updates the sampler"),
        ("turns in flight", {"staleness": 2, "in_flight": "finish"}, "warn", "makes turns in flight finish, so"),
        ("turns in flight", {"staleness": 2, "in_flight": "continue"}, "ok", "in flight continue"),
        ("evaluation", {"eval_every": 500}, "warn", "evaluated every 500 steps"),
        ("evaluation", {"plan": {"eval_prompts": 30}}, "warn", "known to within 18 points"),
        ("early stop", {"stop_rules": ()}, "warn", "no rule ends a run"),
        ("early stop", {"stop_rules": ("nan",)}, "ok", "stops early on nan"),
        ("disk", {"checkpoint_bytes": 10**9, "checkpoints": 3, "free_bytes": 2 * 10**9}, "error", "need 3.00 GB"),
        ("memory", {"peak_bytes": 90 * 10**9, "device_bytes": 80 * 10**9}, "error", "take 90.00 GB"),
    ],
)
def test_settings_are_judged(name, changes, level, words):
    finding = only(name, facts(**changes))
    assert finding.level == level and words in finding.sentence
    assert bool(finding.remedy) == (level != "ok")


# ------------------------------------------------------------------------------------------------------------ template
@pytest.mark.parametrize(
    ("old", "new", "name", "level", "words"),
    [
        (
            "message['content'] + '<|im_end|>' }}{% endgen",
            "message['content'] }}{% endgen",
            "stop ids",
            "warn",
            "nothing",
        ),
        ("{% if add_generation_prompt %}", "{% if true %}", "template", "warn", "ignores add_generation_prompt"),
        (
            "{% for message in messages %}",
            "{% for message in messages[1:] %}",
            "template",
            "warn",
            "the system message",
        ),
        ("{{ message['content'] + '<", "{{ message['content'][:7] + '<", "template", "error", "the user message"),
    ],
)
def test_faults_of_a_template_are_named(old, new, name, level, words):
    tokenizer = build_tokenizer()
    assert old in CHAT_TEMPLATE
    tokenizer.chat_template = CHAT_TEMPLATE.replace(old, new)
    findings = judge(name, facts(tokenizer=tokenizer))
    assert any(finding.level == level and words in finding.sentence for finding in findings), findings


def test_prompts_without_the_beginning_of_text_token_that_the_model_needs():
    found = only("beginning", facts(beginning_losses=(6.3, 2.4)))
    assert found.level == "error" and "6.30 nats a token as prompts begin, and 2.40 after" in found.sentence
    assert "set model.chat_template to one that begins with {{ bos_token }}" in found.remedy
    assert only("beginning", facts(beginning_losses=(2.5, 2.4))).level == "ok"
    assert not judge("beginning", facts())


def test_the_losses_of_both_beginnings_are_those_of_the_same_tokens():
    tokenizer = build_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token
    model, bos = build_model(tokenizer, seed=0), tokenizer.bos_token_id
    text = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    expected = []
    for ids in (text, [bos, *text]):  # the loss of each token after the first of the text, one at a time
        losses = []
        for i in range(len(ids) - len(text) + 1, len(ids)):
            logits = model(input_ids=torch.tensor([ids[:i]])).logits[0, -1].double()
            losses.append(-logits.log_softmax(-1)[ids[i]].item())
        expected.append(sum(losses) / len(losses))
    assert beginning_losses(model, tokenizer, text) == pytest.approx(expected, abs=1e-5)
    assert beginning_losses(model, tokenizer, [bos, *text]) is None
    tokenizer.bos_token = None
    assert beginning_losses(model, tokenizer, text) is None


def test_plain_text_needs_no_template():
    prompts = load_prompts([{"prompt": f"Count to {i}:"} for i in range(4)], chat=False)
    found = facts(train=prompts, held_out=prompts)
    assert only("template", found).level == only("stop ids", found).level == "ok"
    assert only("stop ids", facts(train=prompts, held_out=prompts, stop_ids=())).level == "error"


# ------------------------------------------------------------------------------------------------------------- rewards
@pytest.mark.parametrize("task", ["countdown", "gsm8k", "multiple_choice", "instructions"])
def test_rewards_of_tasks_pass(task):
    task = TASKS[task]
    train, _ = task.load("embedded", chat=True)
    functions = task.make_rewards()
    found = facts(train=train, probes=probe_rewards(functions, train, build_tokenizer()), functions=["reward"])
    assert [f.level for name in ("reward failures", "reward order") for f in judge(name, found)] == ["ok", "ok"]


def test_a_reward_that_hangs_is_called_a_few_times_only():
    def hangs(completions, **columns):
        time.sleep(60)

    train = load_prompts(addition_prompts("train", size=20))
    start = time.perf_counter()
    probes = probe_rewards([hangs], train, build_tokenizer(), executor=ThreadExecutor(workers=40, timeout=0.05))
    assert time.perf_counter() - start < 30 and {probe.failures["hangs"] for probe in probes} == {
        "no answer within 0.05 s"
    }
    finding = only("reward failures", facts(probes=probes))
    assert finding.level == "error" and "reward hangs fails on every completion (no answer" in finding.sentence


def test_a_reward_is_not_judged_by_what_is_unknown():
    probes = [Probe(0, "empty", 0.0), Probe(0, "gibberish", 0.0)]  # no answer is known, and nothing has earned yet
    assert only("reward order", facts(probes=probes)).level == "ok"
    constant = [Probe(0, kind, 0.5) for kind in ("empty", "gibberish")]
    assert "ignores the completion" in only("reward order", facts(probes=constant)).sentence
    generous = facts(probes=[Probe(0, "empty", 2.0), Probe(0, "gibberish", 0.0)], samples=samples([0.0, 1.0]))
    assert "an empty completion earns 2, more than any" in only("reward order", generous).sentence


def test_weights_and_bounds_apply():
    def harsh(completions, **columns):
        return [-5.0] * len(completions)

    train = load_prompts(addition_prompts("train", size=8))
    settings = {"weights": [1.0, 0.5], "clip_range": (-1.0, 1.0)}
    probes = probe_rewards([boxed_accuracy, harsh], train, build_tokenizer(), **settings)
    assert {probe.value for probe in probes} == {-1.0}  # 1 - 2.5 and 0 - 2.5


# --------------------------------------------------------------------------------------------------------------- table
def test_a_check_of_a_user_may_fail_or_give_several():
    def fails(facts):
        raise KeyError("no column")

    several = lambda facts: [Finding("ok", "one"), Finding("error", "two", "mend it")]  # noqa: E731
    findings = run_checks(facts(), {"mine": fails, "several": several, "none": lambda facts: None})
    assert [str(finding) for finding in findings] == [
        "warn  mine: the check itself failed, KeyError: 'no column'; correct the check, or remove it",
        "ok    several: one",
        "error several: two; mend it",
    ]
    assert summarize(findings) == "1 check passed, 1 warning, 1 error"
    with pytest.raises(ValueError, match="level='bad' must be one of"):
        Finding("bad", "sentence")
