"""Monitor: once, bounded, the same after a resume, open to own rules."""

from __future__ import annotations

import json
import math

import pytest

from support.histories import FAULTS, constant_rule, healthy_history
from torchrl_rloo.diagnostics.health import RULES, Health, Rule
from torchrl_rloo.diagnostics.health.monitor import make_health

HIGH = constant_rule("high", "reward", 0.5, patience=2, recovery=3)


def states(health: Health, rewards: list[float]) -> list[str]:
    return [f"{e.step} {e.state}" for step, r in enumerate(rewards) for e in health.update(step, {"reward": r})]


def test_a_rule_needs_its_patience_and_its_recovery():
    assert states(Health([HIGH], stop_on=()), [1, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1]) == [
        "3 fired",
        "10 cleared",
        "12 fired",
    ]


def test_a_resumed_monitor_fires_as_one_that_never_stopped():
    """The state passes through JSON, so it is plain values, and it ends at any step."""
    history = healthy_history(140, seed=3)
    for step in range(60, 140):
        history[step] |= FAULTS["entropy_growth"](0, {}) | FAULTS["gradient_spikes"](step - 60, {})
    whole = Health()
    expected = [event for step, metrics in enumerate(history) for event in whole.update(step, metrics)]
    assert len(expected) > 1
    for stop in (3, 61, 90):
        first = Health()
        found = [event for step in range(stop) for event in first.update(step, history[step])]
        second = Health()
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += [event for step in range(stop, 140) for event in second.update(step, history[step])]
        assert found == expected and second.state_dict() == whole.state_dict()


def test_memory_is_bounded():
    health, sizes = Health(), []
    for step, metrics in enumerate(healthy_history(300, seed=0)):
        health.update(step, metrics)
        if step in (100, 299):
            sizes.append(
                sum(len(s["window"]) + len(s["first"]) for s in health.state_dict()["history"]["series"].values())
            )
    assert sizes[0] >= sizes[1] - 10 * 8  # held-out metrics come every tenth step


def test_a_rule_that_raises_is_off_and_the_others_stay(caplog):
    def broken(history):
        raise KeyError("no")

    rule = Rule("broken", broken, ("reward",), "x.", "y.")
    assert states(Health([rule, HIGH], stop_on=()), [1, 1]) == ["1 fired"]
    assert caplog.text.count("health rule broken failed at step 0 and is off") == 1


def test_actions():
    health = Health([HIGH], stop_on=["warn"], rollback_on=[])
    event = [e for step in range(2) for e in health.update(step, {"reward": 1.0})][0]
    assert health.action(event) == "stop"
    assert Health([HIGH], stop_on=["high"], rollback_on=["high"]).action(event) == "rollback"
    assert Health([HIGH], stop_on=["info", "stop"]).action(event) is None
    assert event.record()["evidence"] == {"reward": 1.0} and "reward 1" in str(event)


def test_an_event_with_a_value_that_is_not_finite_is_json():
    (event,) = Health().update(4, {"grad_norm": math.inf})
    assert json.loads(json.dumps(event.record(), allow_nan=False)) == {
        "step": 4,
        "rule": "nan",
        "severity": "stop",
        "state": "fired",
        "sentence": event.sentence,
        "remedy": event.remedy,
        "evidence": {"grad_norm": None},
    }


def test_own_rules_by_path_and_ignored_ones():
    names = [rule.name for rule in make_health(["support.histories.HIGH_REWARD"], ignore=["truncation"]).rules]
    assert names[-1] == "high_reward" and "truncation" not in names and len(names) == len(RULES)
    assert make_health(ignore=["nan"]).stop_on == ()
    assert make_health(rollback={"on": ["warn"], "lr_factor": 0.1, "max_rollbacks": 1}).rollback_on == ("warn",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop_on": ["entropy_colapse"]}, "did you mean 'entropy_collapse'"),
        ({"ignore": ["kl_hihg"]}, "did you mean 'kl_high'"),
        ({"rules": ["math.pi"]}, "must be a Rule or a list"),
        ({"rules": ["support.histories.NOTHING"]}, "has no 'NOTHING'"),
        ({"rollback": {"on": ["all"]}}, "is no rule and no severity"),
        ({"rollback": {"on": ["stop"], "lr_factor": 0.0}}, "lr_factor=0.0 must be above 0"),
        ({"rollback": {"on": ["stop"], "max_rollbacks": 0}}, "max_rollbacks=0 must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_health(**arguments)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"severity": "error"}, "severity='error'"),
        ({"metrics": "reward"}, "must be a tuple"),
        ({"patience": 0}, "patience=0"),
        ({"name": "warn"}, "other than"),
    ],
)
def test_a_malformed_rule_is_refused(field, message):
    given = {"name": "a", "condition": lambda history: None, "metrics": ("reward",)}
    given |= {"sentence": "x.", "remedy": "y."}
    with pytest.raises(ValueError, match=message):
        Rule(**given | field)
