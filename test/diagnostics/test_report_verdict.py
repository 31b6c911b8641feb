"""Verdict, health events, facts and Markdown of a report: pure functions of a run's metrics."""

from __future__ import annotations

import math
import re

import pytest

from torchrl_rloo.diagnostics.curves import Series, choose_panels, panel_names
from torchrl_rloo.diagnostics.report import duration, escape_markdown, markdown_report, measure, package_versions
from torchrl_rloo.diagnostics.verdict import (
    difference_interval,
    evaluation_changes,
    read_events,
    reward_change,
    verdict,
)
from torchrl_rloo.functional.statistics import Interval


def made(rows: list[dict]) -> Series:
    return Series(rows)


def evaluated(step: int, mean: float, half: float = 0.05) -> dict:
    name = "eval/greedy"
    return {"step": step, name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


@pytest.mark.parametrize(
    ("last", "word"), [(0.6, "Learned: "), (0.32, "No change shown: "), (0.1, "Got worse: "), (0.3, "No change")]
)
def test_learned_is_what_the_interval_says(last: float, word: str):
    learned, _ = verdict(made([evaluated(0, 0.3), evaluated(10, 0.9), evaluated(20, last)]))
    assert learned.startswith(word) and "95 % interval" in learned and f"{last:.3g} at step 20" in learned


def test_the_interval_of_a_difference_is_wider_than_either():
    mean, low, high = difference_interval(Interval(0.2, 0.1, 0.35), Interval(0.6, 0.55, 0.65))
    assert mean == pytest.approx(0.4)
    assert (low, high) == (pytest.approx(0.4 - math.hypot(0.05, 0.15)), pytest.approx(0.4 + math.hypot(0.05, 0.1)))


def test_without_an_interval_or_an_evaluation_it_does_not_claim():
    assert verdict(made([{"step": 0, "eval/x": 0.1}, {"step": 1, "eval/x": 0.9}]))[0].startswith("Unsure: eval/x rose")
    rising = made([{"step": i, "reward": i / 20 + 0.01 * (i % 3)} for i in range(20)])
    assert verdict(rising)[0].startswith("Not evaluated on held-out prompts: the training reward rose")
    noise = made([{"step": i, "reward": float(i % 2)} for i in range(40)])
    assert "shows no change" in verdict(noise)[0] and reward_change(noise).direction == 0
    assert verdict(made([{"step": 1, "reward": 0.5}]))[0].startswith("Too early to tell: 1 steps")
    assert verdict(made([]))[0].startswith("Too early") and evaluation_changes(made([])) == []


def test_the_second_sentence_names_what_limited_the_run():
    fired = {"step": 3, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It fell"}
    fired["remedy"] = "Add KL."
    stop = fired | {"rule": "nan", "severity": "stop", "sentence": "The loss is NaN."}
    flat = made([{"step": i, "reward": 0.01, "frac_reward_zero_std": 0.9} for i in range(30)])
    cut = made([{"step": i, "reward": 0.5, "completions/clipped_ratio": 0.4} for i in range(30)])
    rising = made([{"step": i, "reward": i / 30} for i in range(30)])
    quiet = made([{"step": i, "reward": 0.5 + 0.1 * (i % 2)} for i in range(30)])
    assert verdict(quiet, read_events([fired, stop]))[1] == "Look at nan (1 more below): The loss is NaN. Add KL."
    assert verdict(flat)[1].startswith("The signal was the limit: 90% of the last groups")
    assert verdict(cut)[1].startswith("The length was the limit: 40%")
    assert verdict(rising)[1].startswith("The number of steps was the limit")
    assert verdict(quiet, limit="Sampling limits the run.")[1] == "Sampling limits the run."
    over = read_events([fired, fired | {"step": 5, "state": "cleared"}])
    assert verdict(quiet, over)[1].startswith("Nothing stands out at the end; 1 warnings")
    assert verdict(quiet)[1].startswith("Nothing stands out")


def test_events_pair_and_survive_other_forms():
    line = {"step": 2, "rule": "a", "severity": "warn", "state": "fired", "evidence": {"x": 1, "y": None}}
    other = [{}, {"step": "2", "rule": "a"}, {"step": 1, "rule": 3}, {"step": 1, "rule": "b", "evidence": [1]}]
    events = read_events([*other, line, line | {"step": 4}, line | {"rule": "c", "severity": "?", "step": 9}])
    assert [(e.rule, e.step, e.severity, e.cleared) for e in events] == [("a", 2, "warn", None), ("c", 9, "info", None)]


def test_constant_metrics_have_no_panel_but_evaluation_and_reward_do():
    names = ["reward", "eval/greedy", "entropy", "clip_ratio/low_mean", "grad_norm"]
    panels = choose_panels(names, None, constant=set(names) - {"grad_norm"})
    assert [p.title.split()[0] for p in panels] == ["Mean", "Held-out", "Gradient"]


def test_lengths_of_held_out_completions_are_no_scores():
    names = ["eval/greedy_length", "eval/sampled", "eval/greedy", "completions/mean_length", "eval/own"]
    panels = {panel.title: panel_names(names, panel) for panel in choose_panels(names, None)}
    assert panels == {
        "Held-out evaluation": ["eval/greedy", "eval/sampled", "eval/own"],
        "Mean completion length": ["completions/mean_length", "eval/greedy_length"],
    }
    series = made(
        [{"step": s, "eval/greedy_length": 9.0, "eval/greedy_clipped_ratio": 0.0, "eval/x": s} for s in (0, 1)]
    )
    assert [change.name for change in evaluation_changes(series)] == ["eval/x"]


def test_facts():
    series = made([{"step": i, "time/step": 2.0, "cpu_seconds": 5.0 * i, "tokens_per_second": 100.0} for i in range(9)])
    assert measure(series) == {"wall": 18.0, "step": 2.0, "cpu": 40.0, "rate": 100.0}
    assert duration(3600) == "1 h 0 min" and "torch" in package_versions()


def test_markdown_of_hostile_texts_stays_text():
    attack = "a|b\n# c <script> [x](javascript:y) ![i](z) `code` @team $1$"
    text = markdown_report(attack, {attack: attack}, [attack, attack], [], [], [[attack, "transcripts/a b.html"]])
    assert "<script" not in text and "\n# c" not in text
    assert re.findall(r"(?<!\\)\]\(.*?\)", text) == ["](transcripts/a%20b.html)"]  # an escaped bracket is no link
    assert escape_markdown("x\u202ey") == "x y"
