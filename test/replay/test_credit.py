"""MCAdvantage with other estimators, turn and token credit, KL and normalization."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys, load_prompts, stack_rows
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.functional.advantages import EstimatorSpec, RewardStd, Whiten, group_centered
from torchrl_rloo.objectives import KL
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.credit import NormalizeThenSum, RunningBaseline, TokenCredit, TurnCredit

NAN = float("nan")


def make_row(
    group: int,
    turns: Sequence[Sequence[float]] = ((0.0, 1.0),),
    *,
    ident: int = 0,
    reward: float | None = None,
    prompt: int = 0,
    rewards: Sequence[float] = (),
    proximal: bool = False,
) -> TensorDictBase:
    """Make a row of two prompt tokens, then turns of action tokens with given rewards and a feedback token each."""
    action, earned = [False] * 2, [0.0] * 2
    for turn in turns:
        action += [*[True] * len(turn), False]
        earned += [*turn, 0.0]
    mask, noise = torch.tensor(action), torch.Generator().manual_seed(ident)

    def log_probs() -> LogProbs:
        return LogProbs(full=torch.where(mask, -torch.rand(len(mask), generator=noise), 0.0))

    total = math.fsum(r for turn in turns for r in turn) if reward is None else reward
    row = TensorDict(
        {
            keys.GROUP_ID: torch.tensor(group),
            keys.PROMPT_ID: torch.tensor(prompt),
            keys.REWARD: torch.tensor([[total]]),
            keys.REWARDS: torch.tensor(rewards, dtype=torch.float32),
            keys.TOKEN_REWARDS: torch.tensor(earned),
        }
    )
    row.set("tokens", Tokens(full=torch.arange(len(mask)) + 100 * ident))
    row.set("masks", Masks(all_assistant_mask=mask, all_attention_mask=torch.ones_like(mask)))
    row.set("log_probs", log_probs()).set(("next", "ref_log_probs"), log_probs())
    return row.set("proximal_log_probs", log_probs()) if proximal else row


def make_buffer(num_generations: int, **settings) -> tuple[ReplayBuffer, MCAdvantage]:
    transform = MCAdvantage(num_generations, **settings)
    return ReplayBuffer(storage=LazyStackStorage(256), transform=transform), transform


def contents(buffer: ReplayBuffer) -> dict[int, list[float]]:
    """Return each row's advantages at its action tokens, or its one advantage, by ``ident``."""
    found = {}
    for row in buffer[:].unbind(0) if len(buffer) else ():
        advantage, mask = row[keys.ADVANTAGE], row[keys.ACTION_MASK]
        assert advantage.dtype == torch.float32
        if advantage.shape != (1, 1):
            assert advantage.shape == (len(mask), 1) and (advantage[~mask] == 0).all()
            advantage = advantage[mask]
        found[int(row[keys.TOKENS][0]) // 100] = advantage.flatten().tolist()
    return found


def written(rows: Sequence[TensorDictBase], num_generations: int, **settings) -> dict[int, list[float]]:
    buffer, _ = make_buffer(num_generations, **settings)
    buffer.extend(stack_rows(rows))
    return contents(buffer)


def close(actual: dict[int, list[float]], expected: dict[int, list[float]], tolerance: float = 1e-5) -> None:
    assert set(actual) == set(expected)
    for ident, values in expected.items():
        assert actual[ident] == pytest.approx(values, abs=tolerance), ident


# turns and tokens


def to_go(rewards: Sequence[float], discount: float) -> list[float]:
    return [sum(discount ** (s - t) * r for s, r in enumerate(rewards) if s >= t) for t in range(len(rewards))]


def slow_loo(value: float, others: Sequence[float]) -> float:
    return value - statistics.fmean(others) if others else 0.0


token_rewards = st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=3)
trajectories = st.tuples(st.lists(token_rewards, min_size=1, max_size=3), st.booleans())
groups_of_three = st.lists(st.lists(trajectories, min_size=3, max_size=3), min_size=1, max_size=3)


def rows_of(groups) -> list[TensorDictBase]:
    return [
        make_row(g, turns, ident=3 * g + i, reward=NAN if abstains else None)
        for g, group in enumerate(groups)
        for i, (turns, abstains) in enumerate(group)
    ]


@settings(deadline=None, max_examples=40)
@given(groups_of_three, st.sampled_from([1.0, 0.5]))
def test_turn_credit_compares_the_same_turn_of_the_groups_members(groups, discount):
    expected = {}
    for g, group in enumerate(groups):
        returns = [to_go([math.fsum(turn) for turn in turns], discount) for turns, _ in group]
        for i, (turns, abstains) in enumerate(group):
            values = []
            for k, turn in enumerate(turns):
                others = [r[k] for j, r in enumerate(returns) if j != i and not group[j][1] and k < len(r)]
                values += [0.0 if abstains else slow_loo(returns[i][k], others)] * len(turn)
            expected[3 * g + i] = values
    close(written(rows_of(groups), 3, credit=TurnCredit(discount)), expected)


@settings(deadline=None, max_examples=40)
@given(groups_of_three, st.sampled_from([1.0, 0.5]))
def test_token_credit_is_the_tokens_return_less_the_trajectorys_baseline(groups, discount):
    expected = {}
    for g, group in enumerate(groups):
        returns = [to_go([r for turn in turns for r in turn], discount) for turns, _ in group]
        for i, (_, abstains) in enumerate(group):
            others = [r[0] for j, r in enumerate(returns) if j != i and not group[j][1]]
            silent = abstains or not others
            expected[3 * g + i] = [0.0 if silent else slow_loo(r, others) for r in returns[i]]
    close(written(rows_of(groups), 3, credit=TokenCredit(discount)), expected)


def test_equal_returns_by_different_tokens_give_exactly_zero():
    rows = [make_row(0, [[1000.1, 0.1, 0.2]], ident=0), make_row(0, [[0.2, 1000.1, 0.1]], ident=1)]
    assert {v[0] for v in written(rows, 2, credit="turn").values()} == {0.0}


@pytest.mark.parametrize("credit", ["turn", "token"])
def test_a_row_with_one_unknown_token_reward_abstains(credit):
    rows = [[[1.0], [0.0, NAN]], [[0.5], [1.0]], [[0.0], [0.25]]]

    def write(rewards: list[float]) -> dict[int, list[float]]:
        made = [
            make_row(0, row, ident=i, reward=reward) for i, (row, reward) in enumerate(zip(rows, rewards, strict=True))
        ]
        return written(made, 3, credit=credit, kl=KL("token", 0.2))

    found = write([1.0, 1.5, 0.25])
    assert found[0] == [0.0] * 3, "its reward is known, but not what each token earned; so it has no KL either"
    assert found == write([NAN, 1.5, 0.25]) and any(found[1])


# KL at each token


def slow_kl(row: TensorDictBase, name: str, clip: float | None) -> list[float]:
    policy = row.get(keys.PROXIMAL_LOG_PROBS, None)
    policy = (row[keys.LOG_PROBS] if policy is None else policy)[row[keys.ACTION_MASK]].tolist()
    values = []
    for p, q in zip(policy, row[keys.REF_LOG_PROBS][row[keys.ACTION_MASK]].tolist(), strict=True):
        kl = {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": math.exp(q - p) - 1 - (q - p)}[name]
        values.append(kl if clip is None else min(max(kl, -clip), clip))
    return values


@pytest.mark.parametrize(("name", "clip"), [("k1", None), ("k1", 0.1), ("k2", 0.05), ("k3", 0.1)])
@pytest.mark.parametrize("proximal", [False, True])
def test_token_kl_is_added_to_go_after_the_baseline(name, clip, proximal):
    turns = [[[0.0, 1.0], [0.0]], [[0.0, 0.0, 0.0, 0.5]], [[2.0]], [[1.0, 1.0]]]
    rows = [make_row(i // 2, t, ident=i, proximal=proximal) for i, t in enumerate(turns)]
    plain = written([row.clone() for row in rows], 2)
    expected = {
        i: [plain[i][0] + g for g in to_go([-0.3 * kl for kl in slow_kl(row, name, clip)], 1.0)]
        for i, row in enumerate(rows)
    }
    actual = written(rows, 2, kl=KL("token", 0.3, name, clip))
    close(actual, expected, 1e-6)


def test_token_kl_goes_with_turn_and_token_credit_and_leaves_abstaining_rows_at_zero():
    rows = [make_row(0, [[1.0, 0.5], [2.0]], ident=i, reward=NAN if i == 2 else None) for i in range(3)]
    for credit, discount in (("turn", 1.0), (TurnCredit(0.5), 1.0), ("token", 1.0), (TokenCredit(0.5), 0.5)):
        plain = written([r.clone() for r in rows], 3, credit=credit)
        actual = written([r.clone() for r in rows], 3, credit=credit, kl=KL("token", 0.5))
        expected = {
            i: [
                a + g
                for a, g in zip(plain[i], to_go([-0.5 * kl for kl in slow_kl(row, "k1", None)], discount), strict=True)
            ]
            for i, row in enumerate(rows[:2])
        }
        close(actual, expected | {2: [0.0] * 3})


# whitening


def slow_whiten(values: Sequence[float]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + 1e-4) for v in values]


MODES = {"mean": {"scale": False}, "std": {"center": False}, "mean_std": {}}


@pytest.mark.parametrize("mode", ["mean", "std", "mean_std"])
def test_whitening_of_rows_leaves_out_those_without_signal(mode):
    """Rows that abstain or have no other to compare with stay 0 and out of the moments, as in TRL's RLOO."""
    earned = [1.0, 0.0, 4.0, NAN, 3.0, NAN, NAN, 1.0, 2.5]
    rows = [make_row(i // 3, ident=i, reward=r) for i, r in enumerate(earned)]
    raw = {0: 1 - 2.0, 1: 0 - 2.5, 2: 4 - 0.5, 7: -1.5, 8: 1.5}
    mean, std = statistics.fmean(raw.values()), statistics.stdev(raw.values())
    center, scale = mean if "mean" in mode else 0.0, std + 1e-4 if "std" in mode else 1.0
    expected = {i: [(raw[i] - center) / scale if i in raw else 0.0] for i in range(9)}
    close(written(rows, 3, normalize=Whiten(3, **MODES[mode])), expected)


def test_whitening_after_token_kl_goes_over_all_action_tokens():
    turns = [[[0.0] * 5 + [1.0]], [[0.0]], [[0.5], [0.25, 0.0]], [[2.0]]]
    rows = [make_row(i // 2, t, ident=i, reward=NAN if i == 1 else None) for i, t in enumerate(turns)]
    settings = dict(estimator="reinforce", kl=KL("token", 0.2))
    plain = written([r.clone() for r in rows], 2, **settings)
    assert plain[1] == [0.0]
    flat = iter(slow_whiten([a for i in (0, 2, 3) for a in plain[i]]))
    expected = {i: [next(flat) for _ in plain[i]] for i in (0, 2, 3)} | {1: [0.0]}
    close(written(rows, 2, normalize=Whiten(2), **settings), expected)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("settings", [{}, {"credit": "turn"}, {"credit": "token"}])
def test_rewards_that_differ_by_rounding_become_no_signal(settings, sign):
    rewards = torch.full((7,), 1000.1)
    rewards[::3] = torch.nextafter(rewards[::3], torch.tensor(2000.0))
    rewards *= sign
    rows = [make_row(0, [[r]], ident=i) for i, r in enumerate(rewards.tolist())]
    assert any(a != [0.0] for a in written([r.clone() for r in rows], 7, **settings).values())
    found = written(rows, 7, normalize=Whiten(1), **settings)
    assert found == dict.fromkeys(range(7), [0.0])


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "reinforce", "normalize": Whiten(3)},
        {"normalize": Whiten(3), "kl": KL("token", 0.1)},
        {"credit": "turn", "normalize": Whiten(3, center=False)},
        {"credit": NormalizeThenSum([1.0, 0.5]), "normalize": Whiten(3)},
        {"estimator": "dr_grpo", "normalize": RewardStd(3)},
    ],
)
def test_arrival_changes_no_whitened_advantage(settings):
    rows = {
        i: make_row(
            i // 2, [[0.5 * i, 1.0]] * (1 + i % 3), ident=i, rewards=[i % 3, -i], reward=NAN if i == 5 else None
        )
        for i in range(12)
    }
    orders = [list(range(12)), [3, 2, 0, 5, 1, 4, 9, 6, 11, 8, 7, 10], [4, 0, 2, 5, 1, 3, 11, 10, 9, 8, 7, 6]]
    results = []
    for order in orders:  # in each the first three groups are complete before any of the others
        for step in (1, 5, 12):
            buffer, transform = make_buffer(2, **settings)
            for start in range(0, 12, step):
                buffer.extend(stack_rows([rows[i].clone() for i in order[start : start + step]]))
            assert transform.pending_rows == transform.waiting_groups == 0 and transform.counts["advantage/groups"] == 6
            results.append(contents(buffer))
    for result in results[1:]:
        close(result, results[0])


def test_complete_groups_wait_until_there_are_enough():
    buffer, transform = make_buffer(2, estimator="reinforce", normalize={"name": "whiten", "groups": 2})
    buffer.extend(stack_rows([make_row(0, ident=0), make_row(1, ident=1), make_row(0, ident=2)]))
    assert (len(buffer), transform.pending_rows, transform.waiting_groups) == (0, 1, 1)
    buffer.extend(stack_rows([make_row(0, ident=9), make_row(1, ident=3), make_row(2, ident=4), make_row(2, ident=5)]))
    assert set(contents(buffer)) == {0, 1, 2, 3} and transform.waiting_groups == 1
    assert transform.counts == {"advantage/groups": 2, "advantage/rows": 4, "advantage/late_rows": 1}


# several reward functions


def test_gdpo_normalises_each_function_and_then_the_batch():
    table = [[1.0, 100.0], [0.0, 300.0], [NAN, 50.0], [2.0, NAN], [0.0, 7.0], [NAN, NAN]]
    weights = [1.0, 2.0]
    sums = []
    for i, row in enumerate(table):
        group = table[i // 3 * 3 : i // 3 * 3 + 3]
        total = 0.0
        for k, weight in enumerate(weights):
            others = [r[k] for r in group if not math.isnan(r[k])]
            if not math.isnan(row[k]) and len(others) > 1:
                total += weight * (row[k] - statistics.fmean(others)) / (statistics.stdev(others) + 1e-4)
        sums.append(total)
    rows = [make_row(i // 3, ident=i, rewards=r, reward=-99.0) for i, r in enumerate(table)]
    expected = {i: [a] for i, a in enumerate(slow_whiten(sums[:5]))} | {5: [0.0]}
    credit = NormalizeThenSum(weights)
    close(written([r.clone() for r in rows], 3, credit=credit, normalize=Whiten(2)), expected)
    close(written(rows, 3, credit=credit), {i: [a] for i, a in enumerate(sums)})


@pytest.mark.parametrize(
    "settings", [{"credit": NormalizeThenSum([1.0])}, {"estimator": "grpo"}, {"estimator": "dr_grpo"}], ids=str
)
def test_rows_with_nothing_to_compare_to_stay_out_of_the_whitening(settings):
    """The second group has one row with a reward, which does not affect the first group."""
    rewards = [1.0, 0.0, 1.0, 0.0, 3.0, NAN, NAN, NAN]
    rows = [make_row(i // 4, ident=i, rewards=[r], reward=r) for i, r in enumerate(rewards)]
    both = written([r.clone() for r in rows], 4, normalize=Whiten(2), **settings)
    alone = written(rows[:4], 4, normalize=Whiten(1), **settings)
    close(both, alone | {i: [0.0] for i in range(4, 8)})


def test_reward_std_is_that_of_all_rewards_of_the_batch():
    """The result is that of TRL's ``scale_rewards="batch"``: ``(r - group mean) / (batch std + 1e-4)``."""
    rewards = [1.0, 0.0, 5.0, 5.0, NAN, 2.0]
    rows = [make_row(i // 2, ident=i, reward=r) for i, r in enumerate(rewards)]
    divisor = statistics.stdev([1.0, 0.0, 5.0, 5.0, 2.0]) + 1e-4
    expected = {0: [0.5 / divisor], 1: [-0.5 / divisor], 2: [0.0], 3: [0.0], 4: [0.0], 5: [0.0]}
    close(written(rows, 2, estimator="dr_grpo", normalize=RewardStd(3)), expected)


# custom estimators


def test_a_function_or_spec_of_ones_own():
    rows = [make_row(i // 2, ident=i, reward=float(i * i)) for i in range(4)]
    plain = written([r.clone() for r in rows], 2, estimator=lambda rewards, groups: rewards + groups)
    assert plain == {0: [0.0], 1: [1.0], 2: [5.0], 3: [10.0]}
    named = written([r.clone() for r in rows], 2, estimator="dr_grpo", credit="token")
    assert written(rows, 2, estimator=EstimatorSpec(group_centered), credit="token") == named


@pytest.mark.parametrize("given", [torch.zeros(3), torch.zeros(4, 1), [0.0] * 4])
def test_an_estimator_that_returns_something_else_is_named(given):
    def short(rewards, groups):
        return given

    buffer, _ = make_buffer(2, estimator=short)
    with pytest.raises(ValueError, match=r"estimator=short returned .* for rewards of shape \(4,\): return one"):
        buffer.extend(stack_rows([make_row(i // 2, ident=i) for i in range(4)]))


@pytest.mark.parametrize("estimator", ["reinforce", RunningBaseline(decay=0.5, initial=1.0)])
def test_one_generation_is_enough_for_methods_without_groups(estimator):
    rows = [make_row(i, ident=i, reward=float(i), prompt=i % 2) for i in range(3)]
    found = written(rows, 1, estimator=estimator)
    assert found == ({0: [0.0], 1: [1.0], 2: [2.0]} if estimator == "reinforce" else {0: [-1.0], 1: [0.0], 2: [1.5]})


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl"])
def test_one_generation_is_refused_for_methods_that_compare(name):
    with pytest.raises(ValueError, match=f"num_generations=1: estimator='{name}' compares"):
        MCAdvantage(1, estimator=name)


# restarts


@pytest.mark.parametrize("stop", range(7))
@pytest.mark.parametrize("method", ["running baseline", "whitened KL"])
def test_a_restart_in_the_middle_changes_nothing(method, stop):
    def build() -> tuple[ReplayBuffer, MCAdvantage]:
        if method == "running baseline":
            return make_buffer(2, estimator=RunningBaseline(decay=0.8), normalize=Whiten(2, center=False))
        return make_buffer(2, kl=KL("token", 0.1), normalize=Whiten(2))

    groups = [0, 1, 0, 2, 1, 2, 3, 3, 4, 5, 5, 4]
    rows = [make_row(g, ident=i, reward=float(i % 5), prompt=g % 2, proximal=g > 2) for i, g in enumerate(groups)]
    batches = [rows[i : i + 2] for i in range(0, 12, 2)]
    (whole, _), (first, before), (second, after) = build(), build(), build()
    for batch in batches:
        whole.extend(stack_rows([row.clone() for row in batch]))
    for batch in batches[:stop]:
        first.extend(stack_rows([row.clone() for row in batch]))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    for batch in batches[stop:]:
        second.extend(stack_rows([row.clone() for row in batch]))
    assert contents(first) | contents(second) == contents(whole) and len(whole) == 12
    assert after.waiting_groups == after.pending_rows == 0
    for row in second[:].unbind(0) if len(second) else ():
        assert type(row["tokens"]) is Tokens and type(row["next", "ref_log_probs"]) is LogProbs


# bad input


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        ({}, keys.GROUP_ID, "DataLoadingPrimer"),
        ({}, keys.REWARD, "RewardTransform"),
        ({"credit": NormalizeThenSum([1.0])}, keys.REWARDS, "RewardTransform"),
        ({"credit": "turn"}, keys.TOKEN_REWARDS, "credit='trajectory'"),
        ({"credit": "token"}, keys.ACTION_MASK, "masks"),
        ({"estimator": RunningBaseline()}, keys.PROMPT_ID, "DataLoadingPrimer"),
        ({"kl": KL("token", 0.1)}, keys.REF_LOG_PROBS, "KLRewardTransform"),
        ({"kl": KL("token", 0.1)}, keys.LOG_PROBS, "log-probs"),
    ],
)
def test_a_missing_entry_is_named_before_any_row_is_taken_in(settings, key, remedy):
    buffer, transform = make_buffer(2, **settings)
    good, bad = make_row(0, rewards=[1.0]), make_row(0, ident=1, rewards=[1.0])
    del bad[key]
    with pytest.raises(KeyError) as error:
        buffer.extend(stack_rows([good, bad]))
    assert str(key) in str(error.value) and remedy in str(error.value)
    assert transform.pending_rows == 0 and not transform.counts and len(buffer) == 0


def test_rewards_that_would_be_lost_are_refused():
    row = make_row(0)
    row[keys.TOKEN_REWARDS][-1] = 1.0  # the feedback token after the only turn
    buffer, transform = make_buffer(2, credit="turn")
    with pytest.raises(ValueError, match="not an action"):
        buffer.extend(stack_rows([row]))
    buffer, _ = make_buffer(2, credit=NormalizeThenSum([1.0, 2.0]))
    with pytest.raises(ValueError, match=r"\[1.0, 2.0\] for rows with 3 rewards"):
        buffer.extend(stack_rows([make_row(0, rewards=[1.0, 2.0, 3.0])]))
    assert transform.pending_rows == 0


GDPO = NormalizeThenSum([1.0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalize": "whiten"}, r"normalize='whiten' requires \['groups'\]"),
        ({"normalize": "whitten"}, r"normalize='whitten' is unknown \(did you mean 'whiten'\?\)"),
        ({"credit": "step"}, "credit='step' is unknown"),
        ({"credit": "trun"}, "did you mean 'turn'"),
        ({"credit": {"name": "turn", "discount": 1.1}}, "TurnCredit: discount=1.1"),
        ({"credit": {"name": "trajectory", "discount": 0.9}}, "credit='trajectory': unknown field 'discount'"),
        ({"credit": "normalize_then_sum"}, r"requires \['weights'\]"),
        ({"credit": {"name": "normalize_then_sum", "weights": [NAN]}}, "must be finite"),
        ({"credit": GDPO, "estimator": RunningBaseline()}, "RunningBaseline.*one baseline for each prompt"),
        ({"credit": "turn", "estimator": RunningBaseline()}, "RunningBaseline.*one baseline for each prompt"),
        ({"credit": "token", "estimator": "grpo"}, "estimator='grpo' rescales"),
        ({"credit": "token", "estimator": lambda rewards, groups: rewards}, "does not say rescales=False"),
        ({"kl": KL("loss", 0.1)}, "kl=KL.*where='token'"),
        ({"process_group": object()}, "process_group has no effect without normalize"),
    ],
)
def test_what_has_no_effect_or_meaning_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MCAdvantage(2, **settings)


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
