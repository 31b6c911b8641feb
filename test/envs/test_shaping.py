"""Shaping transforms in an environment: order, separate functions, statistics, state."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.stepping import step_rows
from torchrl_rloo.envs.transforms import KLRewardTransform, RewardTransform
from torchrl_rloo.envs.transforms.shaping import (
    CalibrateScores,
    ClipRewards,
    NormalizeRewards,
    ShapingTransform,
)
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.replay import MCAdvantage

NAN = math.nan
NAMES = SimpleNamespace(names=["a", "b"], weights=[1.0, 0.5], clip_range=None)  # what shaping reads of rewards


def step(transform: ShapingTransform, scores: Sequence, *, truncated=None, done=None, source=NAMES) -> TensorDictBase:
    """Return the rows of one step after the transform, given the functions' scores."""
    scores = torch.tensor(scores, dtype=torch.float32)
    n = len(scores)
    rows = []
    for row, cut, end in zip(scores, truncated or [False] * n, done or [True] * n, strict=True):
        total = (row * torch.tensor(source.weights)).nansum() if not row.isnan().all() else torch.tensor(NAN)
        if source.clip_range is not None:
            total = total.clamp(*source.clip_range)
        entries = {"rewards": row, "reward": total.reshape(1, 1) if end else torch.zeros(1, 1)}
        rows.append(TensorDict(entries | {"done": torch.tensor([end]), "truncated": torch.tensor([cut])}))
    rows = stack_rows(rows)
    return transform._step(rows, rows)


def returns(rows: TensorDictBase) -> list[float]:
    return rows["reward"].flatten().tolist()


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# one transform


def test_scores_stay_apart_and_the_return_is_combined_again() -> None:
    source = SimpleNamespace(names=["a", "b"], weights=[1.0, 0.5], clip_range=(-1.0, 1.2))
    rows = step(ClipRewards(source, 0.0, 1.0), [[3.0, -2.0], [NAN, 0.5], [NAN, NAN], [0.5, 9.0]], source=source)
    assert rows["rewards"].nan_to_num(-9).tolist() == [[1.0, 0.0], [-9, 0.5], [-9, -9], [0.5, 1.0]]
    assert rows["raw_rewards"].nan_to_num(-9).tolist() == [[3.0, -2.0], [-9, 0.5], [-9, -9], [0.5, 9.0]]
    assert returns(rows)[:2] == [1.0, 0.25] and math.isnan(returns(rows)[2]) and returns(rows)[3] == 1.0
    assert rows["reward"].shape == (4, 1, 1)


def test_chosen_functions_and_finished_rows_only() -> None:
    clip = ClipRewards(NAMES, 0.0, 1.0, functions=["b"])
    rows = step(clip, [[3.0, 4.0], [3.0, 4.0]], done=[True, False])
    assert rows["rewards"].tolist() == [[3.0, 1.0], [3.0, 4.0]] and returns(rows) == [3.5, 0.0]
    assert dict(clip.counts) == {"shaping/b/clipped": 1}


def test_the_first_shaping_saves_what_the_functions_gave() -> None:
    rows = step(ClipRewards(NAMES, 0.0, 1.0), [[3.0, 4.0]])
    rows = CalibrateScores(NAMES, 2.0)._step(rows, rows)
    assert rows["rewards"].tolist() == [[0.5, 0.5]] and rows["raw_rewards"].tolist() == [[3.0, 4.0]]
    assert returns(rows) == [0.75]


@pytest.mark.parametrize("functions", [["c"], "a", []])
def test_unknown_functions(functions) -> None:
    with pytest.raises(ValueError, match="functions="):
        ClipRewards(NAMES, 0.0, 1.0, functions)


def test_a_changed_return_is_not_lost_silently() -> None:
    clip = ClipRewards(NAMES, 0.0, 1.0)
    rows = step(clip, [[0.5, 0.5]])
    rows[0].set("reward", rows[0]["reward"] - 0.1)  # as a KL penalty would
    with pytest.raises(ValueError, match="right after the RewardTransform"):
        clip._step(rows, rows)


def test_the_temperature_of_a_calibration_file(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"temperature": 2.5, "ece": 0.1}))
    rows = step(CalibrateScores(NAMES, path, functions=["a"]), [[5.0, 1.0]])
    assert rows["rewards"].tolist() == [[2.0, 1.0]]
    rows = step(CalibrateScores(NAMES, str(path), 1.0, sigmoid=True, functions=["a"]), [[-2.5, 1.0]])
    assert rows["rewards"][0, 0] == 0.5
    path.write_text(json.dumps({"scale": 2.5}))
    with pytest.raises(ValueError, match="calibration.json must hold a number under 'temperature'"):
        CalibrateScores(NAMES, path)
    with pytest.raises(ValueError, match="temperature=0"):
        CalibrateScores(NAMES, 0)


# running statistics


def test_scores_are_judged_by_what_came_before_the_last_reset() -> None:
    norm = NormalizeRewards(NAMES, min_count=2, epsilon=1e-9)
    first = step(norm, [[0.0, 10.0], [2.0, NAN]])
    assert first["rewards"].nan_to_num(-9).tolist() == [[0.0, 10.0], [2.0, -9]], "nothing is known yet"
    assert step(norm, [[4.0, 0.0]])["rewards"].tolist() == [[4.0, 0.0]], "nor before a reset"
    assert dict(norm.counts) == {"shaping/a/unnormalized": 3, "shaping/b/unnormalized": 2}
    norm._reset(None, None)
    rows = step(norm, [[3.0, 5.0], [NAN, 20.0]])
    spread = [torch.tensor([0.0, 2.0, 4.0]).std(correction=0).item(), 5.0]
    expected = [[3 / spread[0], 1.0], [NAN, 4.0]]
    torch.testing.assert_close(rows["rewards"], torch.tensor(expected), equal_nan=True)
    assert dict(norm.counts) == {"shaping/a/unnormalized": 3, "shaping/b/unnormalized": 2}


def test_the_order_in_which_rows_end_changes_nothing() -> None:
    scores = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)).tolist()
    together, apart = (NormalizeRewards(NAMES, min_count=2, decay=0.5) for _ in range(2))
    for _ in range(3):
        for norm in (together, apart):
            norm._reset(None, None)
        whole = step(together, scores)["rewards"]
        parts = torch.cat([step(apart, scores[a:b])["rewards"] for a, b in ((7, 12), (0, 3), (3, 7))])
        torch.testing.assert_close(torch.cat([parts[5:8], parts[8:], parts[:5]]), whole, rtol=0, atol=0)
    for a, b in zip(together.moments, apart.moments, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert together.moments.count.tolist() == [18.0, 18.0], "12 and half of 12"


def test_centring_cancels_in_a_group_of_leave_one_out() -> None:
    scores = [[0.1, 1.0], [0.7, 0.0], [0.2, 0.5], [0.9, 0.0]]
    advantages = []
    for center in (False, True):
        norm = NormalizeRewards(NAMES, center=center, min_count=2)
        step(norm, scores)
        norm._reset(None, None)
        rows = [
            TensorDict({keys.GROUP_ID: torch.tensor(0), keys.REWARD: row["reward"]})
            for row in step(norm, scores).unbind(0)
        ]
        advantages.append(MCAdvantage(4).inv(stack_rows(rows))[keys.ADVANTAGE])
    torch.testing.assert_close(*advantages)
    assert advantages[0].abs().max() > 0.1


def test_statistics_survive_a_restart() -> None:
    norm, resumed = (NormalizeRewards(NAMES, min_count=2) for _ in range(2))
    for scores in ([[1.0, 2.0], [3.0, 5.0]], [[0.0, 1.0]]):
        step(norm, scores)
        norm._reset(None, None)
    step(norm, [[7.0, 7.0]])  # not yet in the statistics
    resumed.load_state_dict(through_disk(norm.state_dict()))
    for each in (norm, resumed):
        each._reset(None, None)
    torch.testing.assert_close(
        step(norm, [[4.0, 4.0]])["rewards"], step(resumed, [[4.0, 4.0]])["rewards"], rtol=0, atol=0
    )
    assert norm.counts == resumed.counts
    with pytest.raises(ValueError, match=r"statistics of \['a', 'b'\].*\['a'\]"):
        NormalizeRewards(NAMES, ["a"]).load_state_dict(norm.state_dict())


@pytest.mark.parametrize("settings", [{"decay": 0.0}, {"decay": 1.1}, {"min_count": 1}, {"epsilon": 0.0}], ids=str)
def test_normalisation_settings(settings: dict) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        NormalizeRewards(NAMES, **settings)


# in an environment


def length(completion_ids, **_) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def first_letter(completions, **_) -> list[float | None]:
    texts = [c[-1]["content"] for c in completions]
    return [float(t.startswith("a")) if t else None for t in texts]


@pytest.fixture(scope="module")
def make_env(bpe, prompts) -> Callable[..., DatasetChatEnv]:
    def make(after: Callable[[RewardTransform], list] = lambda r: []) -> DatasetChatEnv:
        rewards = RewardTransform([length, first_letter], weights=[0.1, 1.0], clip_range=(-2.0, 2.0))
        return DatasetChatEnv(
            prompts, bpe, prompts_per_batch=4, num_generations=2, rewards=rewards, after_rewards=after(rewards)
        )

    return make


@pytest.fixture
def policy(random_model, bpe) -> TransformersWrapper:
    return TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6, "seed": 0})


def test_a_step_of_an_environment(make_env: Callable, policy) -> None:
    env = make_env(lambda r: [ClipRewards(r, 0.0, 5.0), NormalizeRewards(r, min_count=2)])
    assert env.reward_spec["raw_rewards"].shape == (8, 2)
    first = step_rows(env, policy(env.reset()))
    assert first[keys.REWARDS][:, 0].max() == 5.0 < first[keys.RAW_REWARDS][:, 0].max()
    assert first[keys.RAW_REWARDS][:, 0].tolist() == [float(m.sum()) for m in ragged(first["next"], keys.ACTION_MASK)]
    state = through_disk(env.state_dict())
    second = step_rows(env, policy(env.reset()))
    assert not torch.equal(second[keys.REWARDS], second[keys.RAW_REWARDS]), "normalized from the second batch on"

    resumed = make_env(lambda r: [ClipRewards(r, 0.0, 5.0), NormalizeRewards(r, min_count=2)])
    resumed.load_state_dict(state)
    rows = policy(resumed.reset())
    for row, done in zip(rows.unbind(0), second.unbind(0), strict=True):  # the same samples
        row.set("tokens", done["tokens"].clone()).set("masks", done["masks"].clone())
        row.set("log_probs", done["log_probs"].clone()).set(keys.RESPONSE_TRUNCATED, done[keys.RESPONSE_TRUNCATED])
    again = step_rows(resumed, rows)
    assert torch.equal(again[keys.REWARD].nan_to_num(-9), second[keys.REWARD].nan_to_num(-9))


def test_the_kl_comes_after_shaping_and_its_clip(make_env: Callable, policy, make_model, bpe) -> None:
    ref = TransformersWrapper(make_model(bpe, seed=1, end_bias=6.0), tokenizer=bpe, generate=False)

    def shaping(rewards: RewardTransform) -> list:
        return [CalibrateScores(rewards, 0.02, functions=["length"]), ClipRewards(rewards, 0.0, 150.0)]

    rows = LLMCollector(make_env(lambda r: [*shaping(r), KLRewardTransform(ref, 0.3)]), policy).collect()
    expected = []
    for row in rows.unbind(0):
        shaped = row[keys.REWARDS]
        assert row[keys.RAW_REWARDS][0] == int(row[keys.ACTION_MASK].sum())
        assert "raw_rewards" not in row.keys()
        assert shaped[0] == min(150.0, int(row[keys.ACTION_MASK].sum()) / 0.02)
        kl = (row[keys.LOG_PROBS] - row[keys.REF_LOG_PROBS])[row[keys.ACTION_MASK]].sum()
        expected.append((0.1 * shaped[0] + shaped[1].nan_to_num(0)).clamp(-2, 2) - 0.3 * kl)
    torch.testing.assert_close(rows[keys.REWARD].flatten(), torch.stack(expected))

    wrong = make_env(lambda r: [KLRewardTransform(ref, 0.3), *shaping(r)])
    with pytest.raises(ValueError, match="right after the RewardTransform"):
        LLMCollector(wrong, policy).collect()
