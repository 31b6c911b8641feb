"""Metrics of rows, against plain loops and values recorded by TRL."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.diagnostics import DEFINITIONS, completion_metrics, staleness_metrics

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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", [c for c in ADVANTAGE_CASES if "ref" in c["inputs"]][:2], ids=lambda c: c["name"])
def test_metadata_give_the_metrics_of_their_rows(case, masked):
    rows = rows_of(case["inputs"])
    for i, row in enumerate(rows.unbind(0)):
        row.set("policy_version", torch.tensor(0)).set("task", "sums" if i % 2 else "words")
        row.set(("next", "stop_reason"), torch.tensor(i % 3)).set("num_tool_calls", torch.tensor(i))
    names = [f"r{k}" for k in range(len(case["inputs"]["rewards_per_function"]))]
    arguments = (names, [1.0] * len(names))
    found, expected = (
        completion_metrics(given, *arguments, mask_truncated_completions=masked) for given in (metadata_of(rows), rows)
    )
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    assert {"kl", "entropy", "tasks/sums/mean_length", "num_tool_calls"} <= set(found)


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


def test_metrics_by_outcome_and_spread_within_groups():
    """Two groups of two: rewards 1, 0 and 1, 1, and lengths 3, 1 and 2, 2; all tokens of a row have one log-prob."""
    rows = {"rewards_per_function": [[1.0, 0.0, 1.0, 1.0]], "num_generations": 2, "completion_lengths": [3, 1, 2, 2]}
    rows |= {"old": [[-1.0] * 3, [-4.0] * 3, [-2.0] * 3, [-2.0] * 3], "truncated": [False, True, False, False]}
    found = completion_metrics(rows_of(rows), ["f"], [1.0])
    expected = {
        "outcome/solved/share": 3 / 4,
        "outcome/solved/entropy": (3 + 4 + 4) / 7,
        "outcome/solved/mean_length": 7 / 3,
        "outcome/unsolved/entropy": 4.0,
        "outcome/unsolved/clipped_ratio": 1.0,
        "group/reward_std": 0.5**0.5 / 2,
        "group/length_std": 2**0.5 / 2,
        "group/length_correlation": 1.0,
        "diversity/distinct": 1 / 2,
        "diversity/ngram_overlap": 1 / 2,
        "diversity/repetition": 0.0,
        "reward_max": 1.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_rows_without_a_reward_are_neither_solved_nor_unsolved():
    rows = {"rewards_per_function": [[None, 0.0]], "num_generations": 2, "old": [[-1.0] * 3] * 2}
    found = completion_metrics(rows_of(rows), ["f"], [1.0])
    assert (found["outcome/solved/share"], found["outcome/unsolved/share"]) == (0.0, 0.5)
    assert "outcome/solved/entropy" not in found and "group/reward_std" not in found


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


def versioned_row(versions: list[int], oldest: int) -> TensorDict:
    """Build a row of two prompt tokens and one action token per version."""
    row = {
        "policy_version": torch.tensor(oldest),
        "tokens": {"full": torch.arange(2 + len(versions))},
        "masks": {"all_assistant_mask": torch.tensor([False, False] + [True] * len(versions))},
    }
    return TensorDict(row, []).set(keys.ACTION_VERSIONS, torch.tensor(versions))


def test_histogram_of_staleness_counts_tokens_and_not_rows():
    versions = [[3, 3, 5], [5, 5, 5, 5, 5], [4, 5]]
    rows = stack_rows([versioned_row(v, min(v)) for v in versions])
    ages = [5 - version for row in versions for version in row]
    expected = {f"staleness/tokens_{age}": ages.count(age) / len(ages) for age in range(3)}
    expected["staleness"] = sum(5 - min(row) for row in versions) / 3
    for given in (rows, metadata_of(rows)):
        assert staleness_metrics(given, 5) == pytest.approx(expected)


def test_staleness_of_rows_without_versions_of_tokens_is_that_of_the_row():
    row = versioned_row([4, 4], 4).exclude(keys.ACTION_VERSIONS)
    assert staleness_metrics(stack_rows([row]), 6) == {
        "staleness": 2.0,
        "staleness/tokens_0": 0.0,
        "staleness/tokens_1": 0.0,
        "staleness/tokens_2": 1.0,
    }
    masked = TensorDict(row.clone(), []).set(("masks", "all_assistant_mask"), torch.zeros(4, dtype=torch.bool))
    assert staleness_metrics(stack_rows([masked]), 6) == {"staleness": 2.0}


def test_distinct_answers_are_counted_within_groups():
    """Different texts with the same answer count once, and so do completions without an answer."""
    rows = rows_of({"rewards_per_function": [[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]], "num_generations": 3})
    texts = ["so 4", "it is 4", "5", "none", "nothing", "7"]
    rows = stack_rows([row.set_non_tensor("completion", text) for row, text in zip(rows.unbind(0), texts, strict=True)])
    digits = lambda text: next((c for c in text if c.isdigit()), None)  # noqa: E731
    found = completion_metrics(rows, ["f"], [1.0], extract=digits)
    assert found["diversity/distinct_answers"] == 0.5 and "diversity/distinct_answers" in DEFINITIONS
    assert "diversity/distinct_answers" not in completion_metrics(rows, ["f"], [1.0])


def test_the_return_is_logged_where_it_is_not_the_reward():
    rows = rows_of({"rewards_per_function": [[1.0, 0.0, 1.0, None]], "num_generations": 2})
    for row, value in zip(rows.unbind(0), (1.0, 0.0, 1.0, math.nan), strict=True):
        row.set(keys.REWARD, torch.full((1, 1), value))
    assert "return" not in completion_metrics(rows, ["r"], [1.0])
    rows[0].set(keys.REWARD, torch.full((1, 1), 0.25))  # less a penalty
    metrics = completion_metrics(rows, ["r"], [1.0])
    assert metrics["return"] == pytest.approx(1.25 / 3) and metrics["reward"] == pytest.approx(2 / 3)
