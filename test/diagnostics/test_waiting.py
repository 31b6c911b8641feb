"""Table of waits, the sentence about the limit, and the timeline of a step."""

from __future__ import annotations

import math

import pytest

from torchrl_rloo.diagnostics import choose_step, plot_timeline, waiting_table, write_report
from torchrl_rloo.diagnostics.waiting import join_entries, name_limit, summarize_waits, waiting_rows
from torchrl_rloo.envs.activity import STATES, Profile


def entry(step: int, **changes) -> dict:
    values = {
        "step": step,
        "time/step": 10.0,
        "time/collect": 6.0,
        "time/collect/wait": 5.0,
        "time/train": 3.0,
        "time/sync": 0.5,
        "wait/worker/engine": 0.6,
        "wait/worker/tools": 0.1,
        "wait/worker/idle": 0.3,
        "time/engine/mean": 1.0,
        "time/engine/p90": 2.0,
        "time/engine/max": 3.0 + step,
        "time/reward/math/p50": 7.0,
        "engine/busy": 0.5,
        "engine/busy_min": 0.4,
        "engine/in_flight": 8.0,
        "queue/finished_groups": 1.5,
        "count/ledger/drawn": 10 * step,
        "count/ledger/requeued": step,
        "count/ledger/acknowledged": 8 * step,
        "count/collector/cancelled_groups": 0,
        "count/zero_signal/all_wrong": 3 * step,
        "count/zero_signal/kept": 5 * step,
        "staleness/tokens_0": 0.75,
        "staleness/tokens_1": 0.25,
    }
    return values | {name.replace("__", "/"): value for name, value in changes.items()}


def test_shares_of_the_trainer_sum_to_one():
    summary = summarize_waits([entry(1), entry(2, time__step=30.0, time__train=24.0)])
    assert summary.steps == (1, 2) and summary.seconds == 20.0
    expected = {"rows_wait": 10 / 40, "collect": 2 / 40, "train": 27 / 40, "sync": 1 / 40, "other": 0.0}
    assert summary.trainer == pytest.approx(expected)
    assert sum(summary.trainer.values()) == pytest.approx(1.0)
    assert summary.latency == {"engine": (1.0, 2.0, 5.0)}


def test_shares_are_weighed_by_the_length_of_the_steps():
    summary = summarize_waits([entry(1, wait__worker__idle=0.0), entry(2, time__step=30.0, wait__worker__idle=0.8)])
    assert summary.worker["idle"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("steps", "before", "numbers"),
    [((1, 2), None, (10, 6, 2)), ((2, 3), entry(1), (10, 6, 2)), ((4, 5, 6), None, (10, 6, 2))],
)
def test_groups_are_counted_from_the_entry_before(steps, before, numbers):
    groups = summarize_waits([entry(step) for step in steps], before).groups
    assert tuple(groups.values()) == numbers


def test_table():
    text = waiting_table([entry(1), entry(2)])
    assert text.splitlines()[0] == "who waits for whom in steps 1 to 2, 10 s a step"
    for line in ("waits for rows", "50 %", "mean 1 s, p90 2 s, longest 5 s", "10, 6, 2", "0: 75 %, 1: 25 %"):
        assert line in text
    assert text.splitlines()[-1].startswith("  Sampling limits: the trainer waited 50 % of the time")
    without = {name: value for name, value in entry(1).items() if not name.startswith("staleness")}
    assert ("tokens", "mean staleness of their rows", "0.5") in waiting_rows([without | {"staleness": 0.5}])


def test_entries_with_gaps_give_what_they_have():
    assert waiting_table([]) == "" and summarize_waits([{"step": 0, "time/step": 1.0}]) is None
    summary = summarize_waits([{"step": 3, "time/step": 2.0, "time/train": math.nan, "engine/busy": None}])
    assert summary.trainer == {"train": 0.0, "other": 1.0} and not summary.engine and not summary.groups
    assert join_entries([{"step": 2, "a": 1}, {"step": 1}], [{"step": 2, "b": 2}]) == [
        {"step": 1},
        {"step": 2, "a": 1, "b": 2},
    ]


WAITS = {"rows_wait": 0.6, "train": 0.4}


@pytest.mark.parametrize(
    ("trainer", "worker", "engine", "words"),
    [
        (WAITS, {}, {}, ["Sampling limits", "60 %", "add engines or workers"]),
        (WAITS, {"engine": 0.8, "tools": 0.2}, {"busy": 0.9}, ["80 % of their time on engines", "add engines,"]),
        (WAITS, {"engine": 0.8, "idle": 0.2}, {"busy": 0.1}, ["busy only 12 % of that", "pauses"]),
        (WAITS, {"engine": 0.2, "tools": 0.6, "idle": 0.2}, {"busy": 0.2}, ["75 % of their time on tools"]),
        (WAITS, {"rewards": 0.9}, {}, ["on rewards", "collector.reward_threads"]),
        (WAITS, {"group": 0.9}, {}, ["rest of their group", "collector.min_members"]),
        (WAITS, {"place": 0.9}, {}, ["wait for a place", "collector.max_in_flight"]),
        (WAITS, {"environment": 0.9}, {}, ["on the environment"]),
        (WAITS, {"engine": 0.6, "idle": 0.4}, {"busy": 0.6}, ["idle 40 %", "collector.max_staleness=1"]),
        (
            {"rows_wait": 0.1, "train": 0.9},
            {"idle": 0.5},
            {"busy": 0.4},
            ["Training limits: it took 90 %", "40 %"],
        ),
        ({"train": 0.3, "sync": 0.7}, {}, {}, ["Weight updates limit", "70 %", "sampler.sync_every"]),
        ({"train": 0.3, "eval": 0.7}, {}, {}, ["Evaluation limits", "eval.every"]),
        ({"train": 0.3, "checkpoint": 0.7}, {}, {}, ["Checkpoints limit", "checkpoint.every"]),
        ({"train": 0.3, "collect": 0.7}, {}, {}, ["Taking rows limits"]),
        ({"train": 0.3, "mine": 0.7}, {}, {}, ["The phase 'mine' limits: it took 70 %"]),
    ],
)
def test_the_sentence_names_the_limit_and_a_remedy(trainer, worker, engine, words):
    sentence = name_limit(trainer, worker, engine)
    assert [word for word in words if word not in sentence] == []
    assert ("max_staleness" in sentence) == ("idle 40 %" in sentence)


def test_the_step_of_the_picture_is_a_usual_one():
    plain, long = (0.0, 2.0, [("train", 0.0, 1.0)]), (2.0, 9.0, [("train", 2.0, 3.0)])
    evaluated = (9.0, 12.0, [("eval", 9.0, 12.0)])
    assert choose_step([long, plain, evaluated]) == long
    assert choose_step([evaluated]) == evaluated and choose_step([]) is None


def test_timeline_and_table_are_part_of_the_report(tmp_path):
    profile = Profile()
    profile.add(100.0, 104.0, [3 if state == "engine" else 0 for state in STATES])
    step = (100.0, 110.0, [("collect", 100.0, 105.0), ("train", 105.0, 110.0)])
    picture = plot_timeline(step, [profile, Profile()], tmp_path / "timeline.png")
    assert plot_timeline(step, [], tmp_path / "empty.png").read_bytes() != picture.read_bytes()
    history = [{"step": 1, "reward": 0.5}]
    page = write_report(
        tmp_path, history=history, summary={}, timings=[entry(1)], figures={"Timeline of a step": picture}
    ).read_text()
    assert "Who waits for whom" in page and "Sampling limits" in page and "Timeline of a step" in page
    assert "Who waits" not in write_report(tmp_path, history=history, summary={}).read_text()
