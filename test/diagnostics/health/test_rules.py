"""Each rule fires on a history with its fault, and not on a healthy one."""

from __future__ import annotations

import math
import random
import re

import pytest

from support.histories import FAULTS, healthy_history
from torchrl_rloo.diagnostics import DEFINITIONS
from torchrl_rloo.diagnostics.health import RULES, Health


def fired(history: list[dict[str, float]], **kwargs) -> dict[str, list]:
    """Return the events of a history by rule."""
    health, events = Health(**kwargs), {}
    for step, metrics in enumerate(history):
        for event in health.update(step, metrics):
            events.setdefault(event.rule, []).append(event)
    return events


@pytest.mark.parametrize("seed", range(5))
def test_no_rule_fires_on_a_healthy_run(seed):
    assert fired(healthy_history(300, seed)) == {}


@pytest.mark.parametrize("name", [rule.name for rule in RULES])
def test_a_rule_fires_once_with_its_evidence_and_clears(name):
    """A healthy run has the fault from step 60 to 199, and is healthy again; one without progress has it at once."""
    history, begin = healthy_history(400, seed=0), 0 if name == "no_progress" else 60
    for step in range(begin, 200):
        history[step] |= FAULTS[name](step - begin, history[step])
    events = fired(history)[name]
    rule = next(rule for rule in RULES if rule.name == name)
    assert events[0].state == "fired" and begin <= events[0].since <= events[0].step < 200
    assert events[0].evidence and events[0].sentence.endswith(".") and events[0].remedy.endswith(".")
    assert [event.state for event in events][:2] == ["fired", "cleared"][: len(events)]
    assert events[0].step - events[0].since >= 0 and events[0].severity == rule.severity
    if name != "gradient_spikes":
        assert len([event for event in events if event.state == "fired"]) == 1


def test_every_metric_of_a_rule_is_defined():
    defined = [re.sub(r"<(.*?)>", lambda m: f"({m[1]})" if "|" in m[1] else "[^/]+", name) for name in DEFINITIONS]
    for rule in RULES:
        for metric in rule.metrics:
            if "*" not in metric:
                assert any(re.fullmatch(pattern, metric) for pattern in defined), (rule.name, metric)


def test_settings_that_remedies_name_exist():
    from support.recipes import load_recipe
    from torchrl_rloo.cli.fields import known_settings

    known = {*known_settings(load_recipe("rloo").Config)}
    free = ("loss", "task.mixture", "lora")
    for rule in RULES:
        for name in re.findall(r"\b(?:[a-z]+\.)[a-z_]+\b", rule.remedy):
            assert name in known or name.startswith(free) or name == "quarantine.jsonl", (rule.name, name)


def test_values_that_are_not_finite_do_not_enter_the_statistics():
    history = healthy_history(100, seed=1)
    for step in range(20, 100, 7):
        history[step] |= {"reward": math.nan, "completions/mean_length": math.inf}
    assert fired(history) == {}


def test_steps_without_some_metrics():
    """Rules wait for their metrics; a step without signal has no metrics of the loss."""
    random.seed(0)
    history = [
        {name: value for name, value in metrics.items() if random.random() < 0.8} for metrics in healthy_history(200, 2)
    ]
    assert fired(history) == {}


def test_a_critic_that_diverged_at_once_is_found_without_a_larger_loss():
    """Its loss is large from the start, and falls; it explains less than a constant does."""
    history = healthy_history(60, seed=0)
    for step, metrics in enumerate(history):
        metrics |= {"loss_critic": 5.0 / (1 + step), "explained_variance": -0.02 - 3.0 / (1 + step)}
    (event,) = fired(history)["value_divergence"]
    assert event.state == "fired" and event.step < 30


def test_the_highest_reward_of_a_noisy_plateau_is_not_what_it_gained():
    """A mean of 64 rewards of 0 or 1 varies by about 0.09; the highest median of a run is well above its plateau."""
    alarms = 0
    for seed in range(20):
        rng = random.Random(seed)
        rewards = [0.45 + 0.25 * min(1.0, step / 20) + rng.gauss(0.0, 0.09) for step in range(100)]
        alarms += "reward_drop" in fired([{"reward": reward, "reward_std": 0.5} for reward in rewards])
    assert alarms <= 1
