"""Tests of normalized rewards in a collector, whose groups reset and end at their own times."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch

from support.collecting import Gate, words
from support.waiting import in_thread, wait_until
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.engines.scripted import ScriptedTurn
from torchrl_rloo.envs.transforms import NormalizeRewards, RewardTransform

BATCHES, GROUPS = 4, 4


def build(scripted: Callable, seed: int, *tools: Gate) -> LLMCollector:
    """Make a collector whose latencies depend on ``seed``, and whose tokens depend on the prompt only."""
    rng = random.Random(seed)

    def play(request, index) -> ScriptedTurn:
        ids = [30 + (sum(request.prompt) * (k + 3)) % 60 for k in range(1 + sum(request.prompt) % 5)]
        return ScriptedTurn(ids, latency=rng.choice([0.0, 0.0, 0.003, 0.01]))

    rewards = RewardTransform([words], weights=[0.1])
    shaping = NormalizeRewards(rewards, min_count=2, decay=0.9, center=True)
    sizes = {"prompts_per_batch": GROUPS, "groups_per_batch": GROUPS}
    return scripted(*tools, play=play, rewards=rewards, after=(shaping,), **sizes)


def shaped(collector: LLMCollector, batches: int) -> list[torch.Tensor]:
    return [collector.collect()[keys.REWARD].flatten() for _ in range(batches)]


def test_normalized_rewards_do_not_depend_on_the_order_of_groups(scripted: Callable) -> None:
    runs = [torch.cat(shaped(build(scripted, seed), BATCHES)) for seed in range(4)]
    assert runs[0].unique().numel() > 4
    for run in runs[1:]:
        assert torch.equal(run, runs[0])


def test_normalized_rewards_resume(scripted: Callable) -> None:
    """A state in the middle of a batch counts none of its scores, since its groups run again."""
    expected = shaped(build(scripted, 0, Gate(turns=0)), BATCHES)
    collector = build(scripted, 1, gate := Gate(turns=0))
    shaped(collector, 2)
    between = copy.deepcopy(collector.state_dict())
    gate.closed = {2 * GROUPS}
    collecting = in_thread(collector.collect)
    wait_until(lambda: len(collector.runner.ended_counts) == GROUPS - 1 and not collector.runner._thread_work)
    within = copy.deepcopy(collector.state_dict())
    gate.closed = set()
    assert torch.equal(collecting.result(60)[keys.REWARD].flatten(), expected[2])
    for state in (between, within):
        resumed = build(scripted, 2, Gate(turns=0))
        resumed.load_state_dict(state)
        assert torch.equal(torch.cat(shaped(resumed, 2)), torch.cat(expected[2:]))
