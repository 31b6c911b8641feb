"""Metrics of rows, against plain loops and values recorded by TRL."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_rloo.data import stack_rows
from torchrl_rloo.diagnostics import DEFINITIONS, completion_metrics

CASES = json.loads((Path(__file__).parents[1] / "conformance" / "trl_cases.json").read_text())["cases"]
ADVANTAGE_CASES = [case for case in CASES if case["kind"] == "advantage"]
# TRL computes this after the KL penalty, which hides groups without signal; ours is before it
DIFFERENT = {"frac_reward_zero_std"}


def rows_of(inputs: dict):
    """Build the rows of a recorded case, with prompts of two tokens."""
    scores = torch.tensor([[math.nan if r is None else r for r in f] for f in inputs["rewards_per_function"]]).T
    n, size = len(scores), inputs["num_generations"]
    lengths = inputs.get("completion_lengths", [3] * n)
    truncated = inputs.get("truncated", [False] * n)
    rows = []
    for i, length in enumerate(lengths):
        mask = torch.tensor([False, False] + [True] * length)
        old, ref = (inputs.get(k, [[0.0] * 3] * n)[i][:length] for k in ("old", "ref"))
        row = {
            "group_id": torch.tensor(i // size),
            "num_turns": torch.tensor(1),
            "tokens": {"full": torch.arange(2 + length)},
            "masks": {"all_assistant_mask": mask},
            "log_probs": {"full": torch.tensor([0.0, 0.0, *old])},
            "next": {"rewards": scores[i], "truncated": torch.tensor([truncated[i]])},
        }
        if "ref" in inputs:
            row["next"]["ref_log_probs"] = {"full": torch.tensor([0.0, 0.0, *ref])}
        rows.append(TensorDict(row, []))
    return stack_rows(rows)


@pytest.mark.parametrize("case", ADVANTAGE_CASES, ids=lambda c: c["name"])
def test_recorded_metrics(case):
    inputs = case["inputs"]
    names = [f"r{k}" for k in range(len(inputs["rewards_per_function"]))]
    weights = inputs.get("reward_weights", [1.0] * len(names))
    masked = inputs.get("mask_truncated_completions", False)
    ours = completion_metrics(rows_of(inputs), names, weights, mask_truncated_completions=masked)
    recorded = {k: v for k, v in case["outputs"]["metrics"].items() if k not in DIFFERENT or "beta" not in inputs}
    assert len(recorded) > 10
    for name, value in recorded.items():
        assert ours[name] == pytest.approx(value, abs=1e-5), name


def test_dead_groups_are_counted_before_kl_and_whatever_the_order():
    inputs = {"rewards_per_function": [[1.0, 1.0, 0.0, 1.0, 0.5, 0.5]], "num_generations": 2}
    inputs |= {"old": [[-1.0] * 3] * 6, "ref": [[-float(i)] * 3 for i in range(6)], "beta": 1.0}
    rows = rows_of(inputs)
    assert completion_metrics(rows, ["r"], [1.0])["frac_reward_zero_std"] == pytest.approx(2 / 3)
    shuffled = stack_rows([rows[i] for i in (4, 0, 3, 5, 1, 2)])
    assert completion_metrics(shuffled, ["r"], [1.0]) == pytest.approx(completion_metrics(rows, ["r"], [1.0]))


def test_entropy_is_of_all_rows_whatever_their_rewards():
    """The sampler's estimate covers every action token, even if the loss reads only rows with a signal."""
    rows = {"rewards_per_function": [[1.0, 1.0]], "num_generations": 2, "completion_lengths": [2, 1]}
    rows["old"] = [[-0.5, -1.5], [-4.0]]
    assert completion_metrics(rows_of(rows), ["f"], [1.0])["entropy"] == pytest.approx((0.5 + 1.5 + 4.0) / 3)


def test_every_metric_is_defined():
    inputs = {
        "rewards_per_function": [[1.0, 0.0]],
        "num_generations": 2,
        "old": [[0.0] * 3] * 2,
        "ref": [[0.0] * 3] * 2,
    }
    patterns = [re.sub(r"<(.*?)>", lambda m: f"({m[1]})" if "|" in m[1] else "[^/]+", name) for name in DEFINITIONS]
    for name in completion_metrics(rows_of(inputs), ["r"], [1.0]):
        assert sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1, name
