from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.replay.baseline import RunningBaseline

NAN = float("nan")


def slow_run(draws: list[tuple[int, list[float]]], decay: float, initial: float) -> list[list[float]]:
    """Compute the advantages of groups ``(prompt, rewards)`` one after another."""
    baselines: dict[int, float] = {}
    advantages = []
    for prompt, rewards in draws:
        baseline = baselines.get(prompt, initial)
        advantages.append([0.0 if math.isnan(r) else r - baseline for r in rewards])
        answered = [r for r in rewards if not math.isnan(r)]
        if answered:
            baselines[prompt] = decay * baseline + (1 - decay) * math.fsum(answered) / len(answered)
    return advantages


def call(baseline: RunningBaseline, draws: list[tuple[int, list[float]]]) -> list[float]:
    rewards = torch.tensor([r for _, group in draws for r in group], dtype=torch.float64)
    groups = torch.repeat_interleave(torch.tensor([len(group) for _, group in draws], dtype=torch.int64))
    prompts = torch.tensor([prompt for prompt, group in draws for _ in group], dtype=torch.int64)
    return baseline(rewards, groups, prompts).tolist()


reward = st.one_of(st.floats(-10, 10, width=32), st.just(NAN))
histories = st.lists(st.tuples(st.integers(0, 3), st.lists(reward, min_size=1, max_size=4)), max_size=12)


@settings(deadline=None, max_examples=60)
@given(histories, st.sampled_from([0.0, 0.5, 0.9]), st.floats(-1, 1), st.data())
def test_it_equals_a_slow_loop_however_calls_are_split_and_over_a_restart(draws, decay, initial, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(draws)), max_size=3)))
    baseline, actual = RunningBaseline(decay=decay, initial=initial), []
    for start, stop in zip([0, *cuts], [*cuts, len(draws)], strict=True):
        actual += call(baseline, draws[start:stop])
        state, baseline = baseline.state_dict(), RunningBaseline(decay=decay, initial=initial)
        baseline.load_state_dict(state)
    expected = [a for group in slow_run(draws, decay, initial) for a in group]
    assert actual == pytest.approx(expected, abs=1e-9)


def test_a_group_does_not_see_its_own_reward_in_its_baseline():
    baseline = RunningBaseline(decay=0.5, initial=2.0)
    assert call(baseline, [(7, [4.0, 8.0])]) == [2.0, 6.0]
    assert call(baseline, [(7, [4.0]), (7, [4.0]), (8, [1.0])]) == [0.0, 0.0, -1.0]
    assert baseline.baselines == {7: 4.0, 8: 1.5}


def test_a_saved_state_does_not_change_with_what_follows():
    baseline = RunningBaseline(decay=0.5)
    call(baseline, [(1, [2.0])])
    state = baseline.state_dict()
    call(baseline, [(1, [2.0])])
    assert state == {"baselines": {1: 1.0}}


@pytest.mark.parametrize("decay", [-0.1, 1.0, NAN])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ValueError, match="decay="):
        RunningBaseline(decay=decay)


def test_a_primer_gives_each_prompt_one_id_in_every_epoch(tokenizer):
    data = load_prompts([{"prompt": f"a{i}", "place": i} for i in range(5)])
    env = DatasetChatEnv(data, tokenizer, prompts_per_batch=5, num_generations=2, seed=1)
    seen = set()
    for _ in range(3):
        rows = env.reset()
        assert rows[keys.PROMPT_ID].dtype == torch.int64 and rows[keys.PROMPT_ID].shape == (10,)
        places = [row["place"] for row in rows.unbind(0)]
        assert rows[keys.PROMPT_ID].tolist() == places and sorted(set(places)) == list(range(5))
        seen.add(tuple(places))
    assert len(seen) == 3 and env.full_state_spec[keys.PROMPT_ID].dtype == torch.int64
