"""Table of waits, and the sentence about the limit."""

from __future__ import annotations

import math

import pytest

from torchrl_rloo.diagnostics import waiting_table
from torchrl_rloo.diagnostics.waiting import join_entries, name_limit, summarize_waits, trainer_shares


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


def values(entries: list[dict], before: dict | None = None) -> dict[tuple[str, str], str]:
    return {(who, state): value for who, state, value in summarize_waits(entries, before).rows}


def test_shares_of_the_trainer_sum_to_one():
    shares = trainer_shares([entry(1), entry(2, time__step=30.0, time__train=24.0)], 40.0)
    assert shares == pytest.approx({"rows_wait": 0.25, "collect": 0.05, "train": 0.675, "sync": 0.025, "other": 0.0})
    assert sum(shares.values()) == pytest.approx(1.0)


def test_shares_are_weighed_by_the_length_of_the_steps():
    rows = values([entry(1, wait__worker__idle=0.0), entry(2, time__step=30.0, wait__worker__idle=0.8)])
    assert rows["workers", "idle, without a group"] == "60 %"


@pytest.mark.parametrize(("steps", "before"), [((1, 2), None), ((2, 3), entry(1)), ((4, 5, 6), None)])
def test_groups_are_counted_from_the_entry_before(steps, before):
    rows = values([entry(step) for step in steps], before)
    assert rows["groups", "kept, dropped, drawn again"] == "10, 6, 2; 56 % kept"


def test_table():
    text = waiting_table([entry(1), entry(2)])
    assert text.splitlines()[0] == "who waits for whom in steps 1 to 2, 10 s a step"
    for line in ("waits for rows", "50 %", "mean 1 s, p90 2 s, longest 5 s", "the least 40 %", "0: 75 %, 1: 25 %"):
        assert line in text
    assert text.splitlines()[-1].startswith("  Sampling limits: the trainer waited 50 % of the time")
    without = {name: value for name, value in entry(1).items() if not name.startswith("staleness")}
    assert values([without | {"staleness": 0.5}])["tokens", "mean staleness of their rows"] == "0.5"


def test_entries_with_gaps_give_what_they_have():
    assert waiting_table([]) == "" and summarize_waits([{"step": 0, "time/step": 1.0}]) is None
    rows = values([{"step": 3, "time/step": 2.0, "time/train": math.nan, "engine/busy": None}])
    assert rows == {("trainer", "trains"): "0 %", ("trainer", "other"): "100 %"}
    joined = join_entries([{"step": 2, "a": 1}, {"step": 1}], [{"step": 2, "b": 2}])
    assert joined == [{"step": 1}, {"step": 2, "a": 1, "b": 2}]


WAITS = {"rows_wait": 0.6, "train": 0.4}


@pytest.mark.parametrize(
    ("trainer", "worker", "words"),
    [
        (WAITS, {}, ["Sampling limits", "60 %", "add engines or workers"]),
        (WAITS, {"engine": 0.8, "tools": 0.2}, ["80 % of their time on engines", "add engines,"]),
        (WAITS, {"engine": 0.2, "tools": 0.6, "idle": 0.2}, ["75 % of their time on tools"]),
        (WAITS, {"rewards": 0.9}, ["on rewards", "collector.reward_threads"]),
        (WAITS, {"group": 0.9}, ["rest of their group", "collector.min_members"]),
        (WAITS, {"place": 0.9}, ["wait for a place", "collector.max_in_flight"]),
        (WAITS, {"environment": 0.9}, ["on the environment"]),
        (WAITS, {"engine": 0.6, "idle": 0.4}, ["idle 40 %", "collector.max_staleness=1"]),
        ({"rows_wait": 0.1, "train": 0.9}, {"idle": 0.5}, ["Training limits: it took 90 %"]),
        ({"train": 0.3, "sync": 0.7}, {}, ["Weight updates limit", "70 %", "sampler.sync_every"]),
        ({"train": 0.3, "eval": 0.7}, {}, ["Evaluation limits", "eval.every"]),
        ({"train": 0.3, "checkpoint": 0.7}, {}, ["Checkpoints limit", "checkpoint.every"]),
        ({"train": 0.3, "collect": 0.7}, {}, ["Taking rows limits"]),
        ({"train": 0.3, "mine": 0.7}, {}, ["The phase 'mine' limits: it took 70 %"]),
    ],
)
def test_the_sentence_names_the_limit_and_a_remedy(trainer, worker, words):
    sentence = name_limit(trainer, worker)
    assert [word for word in words if word not in sentence] == []
    assert ("max_staleness" in sentence) == ("idle 40 %" in sentence)
