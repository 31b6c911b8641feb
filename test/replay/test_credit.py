"""MCAdvantage beyond leave-one-out of whole trajectories: other methods, turns, tokens, KL, whitening."""

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

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.functional.advantages import ESTIMATORS, EstimatorRecipe, group_centred, leave_one_out
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.baseline import RunningBaseline

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
    """One row: two prompt tokens, then turns of action tokens with the given rewards, a feedback token after each."""
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
    """Each row's advantages at its action tokens, or its one advantage, by ``ident``."""
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
    close(written(rows_of(groups), 3, credit="turn", discount=discount), expected)


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
    close(written(rows_of(groups), 3, credit="token", discount=discount), expected)


def test_a_turn_that_one_member_reached_gets_what_the_estimator_gives_it():
    rows = [make_row(0, [[1.0], [0.0, 5.0]], ident=0), make_row(0, [[2.0]], ident=1)]
    assert written(rows, 2, credit="turn") == {0: [4.0, 0.0, 0.0], 1: [-4.0]}
    assert written(rows, 2, credit="turn", estimator="reinforce") == {0: [6.0, 5.0, 5.0], 1: [2.0]}


@pytest.mark.parametrize("estimator", ["rloo", "dr_grpo", "reinforce"])
def test_one_reward_at_the_end_gives_the_same_by_trajectory_turn_and_token(estimator):
    rows = [[[0.0, 0.0, 1.0]], [[0.0, 0.25]], [[0.0]]]
    each = {
        credit: written([make_row(0, r, ident=i) for i, r in enumerate(rows)], 3, credit=credit, estimator=estimator)
        for credit in ("trajectory", "turn", "token")
    }
    assert each["turn"] == each["token"]
    for i, row in enumerate(rows):
        assert each["turn"][i] == each["trajectory"][i] * len(row[0])


def test_equal_returns_by_different_tokens_give_exactly_zero():
    rows = [make_row(0, [[1000.1, 0.1, 0.2]], ident=0), make_row(0, [[0.2, 1000.1, 0.1]], ident=1)]
    assert {v[0] for v in written(rows, 2, credit="turn").values()} == {0.0}


# KL at each token


def slow_kl(row: TensorDictBase, name: str, clip: float | None) -> list[float]:
    policy = row.get(keys.PROXIMAL_LOG_PROBS, None)
    policy = (row[keys.LOG_PROBS] if policy is None else policy)[row[keys.ACTION_MASK]].tolist()
    values = []
    for p, q in zip(policy, row[keys.REF_LOG_PROBS][row[keys.ACTION_MASK]].tolist(), strict=True):
        kl = {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": math.exp(q - p) - 1 - (q - p)}[name]
        values.append(kl if clip is None else min(max(kl, -clip), clip))
    return values


@pytest.mark.parametrize(
    ("name", "clip", "discount"), [("k1", None, 1.0), ("k1", 0.1, 0.9), ("k2", 0.05, 0.5), ("k3", 0.1, 0.0)]
)
@pytest.mark.parametrize("proximal", [False, True])
def test_token_kl_is_added_to_go_after_the_baseline(name, clip, discount, proximal):
    turns = [[[0.0, 1.0], [0.0]], [[0.0, 0.0, 0.0, 0.5]], [[2.0]], [[1.0, 1.0]]]
    rows = [make_row(i // 2, t, ident=i, proximal=proximal) for i, t in enumerate(turns)]
    plain = written([row.clone() for row in rows], 2)
    expected = {
        i: [plain[i][0] + g for g in to_go([-0.3 * kl for kl in slow_kl(row, name, clip)], discount)]
        for i, row in enumerate(rows)
    }
    actual = written(rows, 2, token_kl_coeff=0.3, kl_estimator=name, kl_clip=clip, discount=discount)
    close(actual, expected, 1e-6)


def test_token_kl_goes_with_turn_and_token_credit_and_leaves_abstaining_rows_at_zero():
    rows = [make_row(0, [[1.0, 0.5], [2.0]], ident=i, reward=NAN if i == 2 else None) for i in range(3)]
    for credit in ("turn", "token"):
        plain = written([r.clone() for r in rows], 3, credit=credit)
        actual = written([r.clone() for r in rows], 3, credit=credit, token_kl_coeff=0.5)
        expected = {
            i: [
                a + g for a, g in zip(plain[i], to_go([-0.5 * kl for kl in slow_kl(row, "k1", None)], 1.0), strict=True)
            ]
            for i, row in enumerate(rows[:2])
        }
        close(actual, expected | {2: [0.0] * 3})


def test_a_coefficient_that_adapts_is_read_at_each_use():
    class Coefficient:
        value = 0.0

        def __float__(self) -> float:
            return self.value

    coefficient = Coefficient()
    buffer, _ = make_buffer(2, token_kl_coeff=coefficient)
    buffer.extend(stack_rows([make_row(0, ident=i) for i in range(2)]))
    coefficient.value = 1.0
    buffer.extend(stack_rows([make_row(1, ident=2 + i) for i in range(2)]))
    found = contents(buffer)
    assert found[0] == [0.0, 0.0] and found[2][0] != 0


# whitening


def slow_whiten(values: Sequence[float]) -> list[float]:
    mean, std = statistics.fmean(values), statistics.stdev(values)
    return [(v - mean) / (std + 1e-4) for v in values]


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_the_methods_that_whiten_do_so_by_name(name):
    earned = [1.0, 0.0, 5.0, 2.0, -3.0, 0.5]
    rows = [make_row(i // 2, ident=i, reward=r) for i, r in enumerate(earned)]
    plain = [r - statistics.fmean(earned[i // 2 * 2 : i // 2 * 2 + 2]) for i, r in enumerate(earned)]
    expected = slow_whiten(plain if name == "reinforce_pp_baseline" else earned)
    close(written(rows, 2, estimator=name, whiten_groups=3), {i: [a] for i, a in enumerate(expected)})
    unwhitened = written([r.clone() for r in rows], 2, estimator=name, whiten="none")
    assert unwhitened == {i: [a] for i, a in enumerate(plain if name == "reinforce_pp_baseline" else earned)}


@pytest.mark.parametrize("mode", ["mean", "std", "mean_std"])
def test_whitening_of_rows_leaves_out_those_without_signal(mode):
    """As TRL normalises RLOO's advantages: rows that abstain, or are left alone, are out of the moments and stay 0."""
    earned = [1.0, 0.0, 4.0, NAN, 3.0, NAN, NAN, 1.0, 2.5]
    rows = [make_row(i // 3, ident=i, reward=r) for i, r in enumerate(earned)]
    raw = {0: 1 - 2.0, 1: 0 - 2.5, 2: 4 - 0.5, 7: -1.5, 8: 1.5}
    mean, std = statistics.fmean(raw.values()), statistics.stdev(raw.values())
    center, scale = mean if "mean" in mode else 0.0, std + 1e-4 if "std" in mode else 1.0
    expected = {i: [(raw[i] - center) / scale if i in raw else 0.0] for i in range(9)}
    close(written(rows, 3, whiten=mode, whiten_groups=3), expected)


@pytest.mark.parametrize(("mode", "center", "scale"), [("mean", 1, 0), ("std", 0, 1), ("mean_std", 1, 1)])
def test_each_mode_of_whitening_does_what_its_name_says(mode, center, scale):
    earned = [1.0, 0.0, 5.0, 2.0]
    rows = [make_row(i // 2, ident=i, reward=r) for i, r in enumerate(earned)]
    divisor = statistics.stdev(earned) + 1e-4 if scale else 1.0
    expected = {i: [(r - center * 2.0) / divisor] for i, r in enumerate(earned)}
    close(written(rows, 2, estimator="reinforce", whiten=mode, whiten_groups=2), expected)


def test_whitening_after_token_kl_goes_over_all_action_tokens():
    turns = [[[0.0] * 5 + [1.0]], [[0.0]], [[0.5], [0.25, 0.0]], [[2.0]]]
    rows = [make_row(i // 2, t, ident=i, reward=NAN if i == 1 else None) for i, t in enumerate(turns)]
    settings = dict(estimator="reinforce_pp", token_kl_coeff=0.2)
    plain = written([r.clone() for r in rows], 2, whiten="none", **settings)
    assert plain[1] == [0.0]
    flat = iter(slow_whiten([a for i in (0, 2, 3) for a in plain[i]]))
    expected = {i: [next(flat) for _ in plain[i]] for i in (0, 2, 3)} | {1: [0.0]}
    close(written(rows, 2, whiten_groups=2, **settings), expected)


@pytest.mark.parametrize("settings", [{}, {"credit": "turn"}, {"credit": "token"}])
def test_rewards_that_differ_by_rounding_become_no_signal(settings):
    rewards = torch.full((7,), 1000.1)
    rewards[::3] = torch.nextafter(rewards[::3], torch.tensor(2000.0))
    rows = [make_row(0, [[r]], ident=i) for i, r in enumerate(rewards.tolist())]
    assert any(a != [0.0] for a in written([r.clone() for r in rows], 7, **settings).values())
    found = written(rows, 7, whiten="mean_std", whiten_groups=1, **settings)
    assert found == dict.fromkeys(range(7), [0.0])


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "reinforce_pp"},
        {"estimator": "rloo", "whiten": "mean_std", "token_kl_coeff": 0.1},
        {"credit": "turn", "whiten": "std"},
        {"rewards": "normalize_then_sum", "reward_weights": [1.0, 0.5]},
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
            buffer, transform = make_buffer(2, whiten_groups=3, **settings)
            for start in range(0, 12, step):
                buffer.extend(stack_rows([rows[i].clone() for i in order[start : start + step]]))
            assert transform.pending_rows == transform.waiting_groups == 0 and transform.counts["groups"] == 6
            results.append(contents(buffer))
    for result in results[1:]:
        close(result, results[0])


def test_complete_groups_wait_until_there_are_enough():
    buffer, transform = make_buffer(2, estimator="reinforce_pp", whiten_groups=2)
    buffer.extend(stack_rows([make_row(0, ident=0), make_row(1, ident=1), make_row(0, ident=2)]))
    assert (len(buffer), transform.pending_rows, transform.waiting_groups) == (0, 1, 1)
    buffer.extend(stack_rows([make_row(0, ident=9), make_row(1, ident=3), make_row(2, ident=4), make_row(2, ident=5)]))
    assert set(contents(buffer)) == {0, 1, 2, 3} and transform.waiting_groups == 1
    assert transform.counts == {"groups": 2, "rows": 4, "late_rows": 1}


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
    settings = dict(rewards="normalize_then_sum", reward_weights=weights)
    close(written([r.clone() for r in rows], 3, whiten_groups=2, **settings), expected)
    close(written(rows, 3, whiten="none", **settings), {i: [a] for i, a in enumerate(sums)})


# estimators of other kinds


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_every_estimator_in_the_table_works_by_its_name(name):
    rewards = [1.0, 0.0, 0.0, NAN, 2.0, 2.0]
    rows = [make_row(i // 3, ident=i, reward=r) for i, r in enumerate(rewards)]
    expected = ESTIMATORS[name](torch.tensor(rewards), torch.tensor([0, 0, 0, 1, 1, 1])).tolist()
    close(written(rows, 3, estimator=name, whiten="none"), {i: [a] for i, a in enumerate(expected)})


def test_a_function_or_recipe_of_ones_own():
    rows = [make_row(i // 2, ident=i, reward=float(i * i)) for i in range(4)]
    plain = written([r.clone() for r in rows], 2, estimator=lambda rewards, groups: rewards + groups)
    assert plain == {0: [0.0], 1: [1.0], 2: [5.0], 3: [10.0]}
    recipe = EstimatorRecipe(group_centred, whiten="mean_std")
    named = written([r.clone() for r in rows], 2, estimator="reinforce_pp_baseline", whiten_groups=2)
    assert written([r.clone() for r in rows], 2, estimator=recipe, whiten_groups=2) == named
    by_token = written(rows, 2, estimator=EstimatorRecipe(leave_one_out), credit="token")
    assert set(by_token) == {0, 1, 2, 3}


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_pp", RunningBaseline(decay=0.5, initial=1.0)])
def test_one_generation_is_enough_for_methods_without_groups(estimator):
    settings = {"whiten_groups": 3} if estimator == "reinforce_pp" else {}
    rows = [make_row(i, ident=i, reward=float(i), prompt=i % 2) for i in range(3)]
    found = written(rows, 1, estimator=estimator, **settings)
    if estimator == "reinforce":
        assert found == {0: [0.0], 1: [1.0], 2: [2.0]}
    elif estimator == "reinforce_pp":
        close(found, {i: [a] for i, a in enumerate(slow_whiten([0.0, 1.0, 2.0]))})
    else:
        assert found == {0: [-1.0], 1: [0.0], 2: [1.5]}


@pytest.mark.parametrize("name", ["rloo", "grpo", "dr_grpo", "maxrl", "reinforce_pp_baseline"])
def test_one_generation_is_refused_for_methods_that_compare(name):
    with pytest.raises(ValueError, match=f"num_generations=1: estimator='{name}' compares"):
        MCAdvantage(1, estimator=name, **({"whiten_groups": 1} if name == "reinforce_pp_baseline" else {}))


# restarts


@pytest.mark.parametrize("stop", range(7))
@pytest.mark.parametrize("method", ["running baseline", "whitened KL"])
def test_a_restart_in_the_middle_changes_nothing(method, stop):
    def build() -> tuple[ReplayBuffer, MCAdvantage]:
        if method == "running baseline":
            return make_buffer(2, estimator=RunningBaseline(decay=0.8), whiten="std", whiten_groups=2)
        return make_buffer(2, token_kl_coeff=0.1, whiten="mean_std", whiten_groups=2)

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
        ({"rewards": "normalize_then_sum", "reward_weights": [1.0], "whiten": "none"}, keys.REWARDS, "RewardTransform"),
        ({"credit": "turn"}, keys.TOKEN_REWARDS, "credit='trajectory'"),
        ({"credit": "token"}, keys.ACTION_MASK, "masks"),
        ({"estimator": RunningBaseline()}, keys.PROMPT_ID, "DataLoadingPrimer"),
        ({"token_kl_coeff": 0.1}, keys.REF_LOG_PROBS, "KLRewardTransform"),
        ({"token_kl_coeff": 0.1}, keys.LOG_PROBS, "log-probs"),
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
    with pytest.raises(ValueError, match="no action token"):
        buffer.extend(stack_rows([row]))
    buffer, _ = make_buffer(2, rewards="normalize_then_sum", reward_weights=[1.0, 2.0], whiten="none")
    with pytest.raises(ValueError, match=r"\[1.0, 2.0\] for rows with 3 rewards"):
        buffer.extend(stack_rows([make_row(0, rewards=[1.0, 2.0, 3.0])]))
    assert transform.pending_rows == 0


GDPO = {"rewards": "normalize_then_sum", "reward_weights": [1.0], "whiten": "none"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"whiten": "std"}, "whiten_groups=None with whiten='std'"),
        ({"estimator": "reinforce_pp"}, "whiten_groups=None with whiten='mean_std'"),
        ({"rewards": "normalize_then_sum", "reward_weights": [1.0]}, "whiten_groups=None with whiten='mean_std'"),
        ({"whiten_groups": 4}, "whiten_groups=4 with whiten='none'"),
        ({"whiten": "std", "whiten_groups": 0}, "whiten_groups=0"),
        ({"whiten": "batch"}, "whiten='batch' must be one of"),
        ({"rewards": "sum"}, "rewards='sum' must be one of"),
        ({"credit": "step"}, "credit='step' must be one of"),
        ({"token_kl_coeff": 0.1, "kl_estimator": "k4"}, "kl_estimator='k4' must be one of"),
        ({"token_kl_coeff": -0.1}, "token_kl_coeff=-0.1"),
        ({"token_kl_coeff": 0.1, "kl_clip": 0.0}, "kl_clip=0.0"),
        ({"kl_clip": 1.0}, "kl_clip=1.0 has no use"),
        ({"credit": "turn", "discount": 1.1}, "discount=1.1"),
        ({"discount": 0.9}, "discount=0.9 has no use"),
        ({"credit": "turn", "discount": 0.9, "token_kl_coeff": 0.1}, "discount=0.9 would be of turns"),
        ({"reward_weights": [1.0]}, "reward_weights=.* has no use"),
        ({"rewards": "normalize_then_sum"}, "reward_weights=None"),
        ({**GDPO, "reward_weights": [NAN]}, "must be finite"),
        ({**GDPO, "credit": "turn"}, "one reward of each function"),
        ({**GDPO, "estimator": RunningBaseline()}, "RunningBaseline.*one baseline for each prompt"),
        ({"credit": "turn", "estimator": RunningBaseline()}, "RunningBaseline.*one baseline for each prompt"),
        ({"credit": "token", "estimator": "grpo"}, "estimator='grpo' divides"),
        ({"credit": "token", "estimator": lambda rewards, groups: rewards}, "does not say `divides = False`"),
        ({"process_group": object()}, "process_group has no use"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        MCAdvantage(2, **settings)
