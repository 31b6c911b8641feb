"""Trained ids are sampled ids, once each, however agents call and lose connections; crowds leave nothing behind."""

from __future__ import annotations

import pytest

from support.agent_crowd import run_crowd
from support.agent_sessions import CUTS, TEMPLATES, run_sessions


@pytest.mark.parametrize("template", TEMPLATES)
def test_trained_ids_are_sampled_ids(template: str) -> None:
    found = run_sessions(template, 10, in_flight=10)
    counts, cuts = found["counts"], found["cuts"]
    assert found["rows"] == 10 and found["samples"] > 30 and set(CUTS) <= set(cuts) and len(found["formats"]) == 6
    # Replies that were cut while they arrived are trained on once, or not at all
    assert found["trained"] - found["read"] == found["unread_but_trained"] <= cuts["waiting"]
    assert found["trained"] == counts["agent/calls"] - counts.get("agent/orphans", 0) > 60
    assert counts["endpoint/retried"] >= cuts["retried"] + cuts["repeated"] > 10 and counts["endpoint/unread_replies"]
    assert counts["agent/rewritten"]
    assert found["ratio_error"] <= 1e-5


def test_a_crowd_with_crashes_and_disconnections_leaves_nothing_behind() -> None:
    found = run_crowd(40, calls=3, fault_share=0.2, faults=("crash", "disconnect"), latency=0.01, max_seconds=None)
    assert found["failed"] == 4 and 4 <= found["calls"] - 3 * 32 - 2 * 4 <= 8
