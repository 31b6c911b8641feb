"""Tests of bounded staleness: admission, the choice of groups, and tokens beyond the bound."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from support.collecting import Bump, G, Gate, groups_of, in_state
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.collectors.ledger import GroupLedger, GroupState
from torchrl_rloo.collectors.scheduler import LateGroups
from torchrl_rloo.collectors.staleness import AgeTable, limit_staleness, token_staleness
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.engines.scripted import ScriptedTurn
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.replay import MCAdvantage


def heavy_tailed(seed: int) -> Callable[..., ScriptedTurn]:
    """Return a script whose turns mostly take 1 ms, and some 20 times longer."""
    rng = random.Random(seed)
    return lambda request, index: ScriptedTurn([40 + i for i in range(6)], latency=rng.choice([0.001] * 9 + [0.02]))


@pytest.mark.parametrize("on_stale", ["wait", "mask"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_token_is_staler_than_the_bound(bound: int, on_stale: str, scripted: Callable) -> None:
    """With an update after each batch no group is sampled twice or waits for ever, whatever the latencies."""
    kwargs = {"max_staleness": bound, "on_stale": on_stale, "groups_per_batch": 3}
    collector = scripted(Gate(turns=2), play=heavy_tailed(bound), updater=Bump, **kwargs)
    seen, staleness, delays = [], [], []
    for batch in range(30):
        rows = collector.collect()
        staleness += token_staleness(rows, collector.policy_version).tolist()
        seen += (groups := groups_of(rows)[::G])
        delays += [batch - group // 3 for group in groups]
        collector.update_policy_weights_()
    assert min(staleness) >= 0 and max(staleness) == bound
    assert len(set(seen)) == len(seen) == 90 and not collector.counts.get("staleness/requeued_groups")
    if on_stale == "wait":
        assert max(delays) <= bound and not collector.counts.get("staleness/masked_tokens")


@pytest.mark.parametrize("on_stale", ["requeue", "mask", "baseline"])
def test_more_updates_than_batches(on_stale: str, scripted: Callable) -> None:
    """Tokens beyond the bound are sampled again or leave the loss. Rewards stay, and nothing hangs."""
    collector = scripted(
        Gate(turns=3), play=heavy_tailed(7), updater=Bump, max_staleness=1, on_stale=on_stale, groups_per_batch=2
    )
    seen: Counter[int] = Counter()
    rng = random.Random(0)
    for _ in range(25):
        rows = collector.collect()
        seen.update(groups_of(rows)[::G])
        for row in rows.unbind(0):
            mask, versions = row[keys.ACTION_MASK], row[keys.ACTION_VERSIONS]
            assert int(mask.sum()) == len(versions) and (collector.policy_version - versions <= 1).all()
            assert not row[keys.LOG_PROBS][~mask].any() and row[keys.REWARD].isfinite().all()
        for _ in range(rng.choice([0, 1, 2, 3])):
            collector.update_policy_weights_()
    assert set(seen.values()) == {1}
    counts = collector.counts
    if on_stale == "requeue":
        assert counts["staleness/requeued_groups"] > 0
    else:
        assert counts["staleness/masked_rows"] > 0 and not counts.get("staleness/requeued_groups")


# Tokens beyond the bound


def make_row(versions: list[int], previous: list[int] = ()) -> TensorDictBase:
    """Return a row of one prompt token before each action, with an earlier sample of versions ``previous``."""

    def sample(versions: list[int]) -> tuple[torch.Tensor, ...]:
        mask = torch.tensor([False, True] * len(versions), dtype=torch.bool)
        return torch.arange(len(mask)), mask, torch.where(mask, -1.0, 0.0), torch.tensor(versions)

    tokens, mask, log_probs, action_versions = sample(versions)
    row = TensorDict({}, [])
    for key, value in (
        (keys.TOKENS, tokens),
        (keys.ATTENTION_MASK, torch.ones_like(mask)),
        (keys.ACTION_MASK, mask),
        (keys.LOG_PROBS, log_probs),
        (keys.ACTION_VERSIONS, action_versions),
        (keys.REWARD, torch.ones(1, 1)),
    ):
        row.set(key, value)
    if previous:
        tokens, mask, log_probs, before = sample(previous)
        entries = {"tokens": tokens, "mask": mask, "log_probs": log_probs, "versions": before}
        row.set(keys.PREVIOUS_SEGMENTS, TensorDict(entries | {"sizes": torch.tensor([len(tokens)])}, []))
    return row


@pytest.mark.parametrize("credit", ["turn", "token"])
@pytest.mark.parametrize("on_stale", ["mask", "baseline"])
def test_rewards_of_stale_turns_stay_in_returns_and_baselines(on_stale: str, credit: str) -> None:
    """Three turns of one token: the advantage of each is that of a row without stale tokens, on those that are left."""
    rows = [make_row([3, 5, 5]), make_row([5, 5, 5])]
    for row, earned in zip(rows, ([0.5, 0.0, 1.0], [0.0, 1.0, 1.0]), strict=True):
        rewards = torch.zeros(6)
        rewards[1::2] = torch.tensor(earned)
        row.set(keys.TOKEN_REWARDS, rewards)
        row.set(keys.REWARD, rewards.sum().reshape(1, 1))
        row.set(keys.GROUP_ID, torch.tensor(0))

    def advantages(rows: list[TensorDictBase]) -> list[torch.Tensor]:
        written = MCAdvantage(2, credit=credit).inv(stack_rows([row.copy() for row in rows]))
        return [row[keys.ADVANTAGE][:, 0] for row in written.unbind(0)]

    whole = advantages(rows)
    limited = limit_staleness(rows, 5, 1, on_stale, Counter())
    left = limited[0][keys.ACTION_MASK]
    assert left.nonzero()[:, 0].tolist() == ([3, 5] if on_stale == "mask" else [])
    masked = advantages(limited)
    assert torch.equal(masked[0], torch.where(left, whole[0], 0.0)) and torch.equal(masked[1], whole[1])
    assert torch.equal(masked[0][left], whole[0][left]) and whole[0].any() and whole[1].any()


@pytest.mark.parametrize("on_stale", ["mask", "baseline"])
def test_stale_tokens_leave_the_loss_in_all_samples_of_a_row(on_stale: str) -> None:
    row, fresh, counts = make_row([3, 5, 2], previous=[1, 4]), make_row([4, 5]), Counter()
    limited, untouched = limit_staleness([row, fresh], 5, 1, on_stale, counts)
    if on_stale == "mask":
        assert limited[keys.POLICY_VERSION].item() == 4, "the oldest version that is left, of all samples"
    assert untouched is fresh and row[keys.ACTION_MASK].sum() == 3, "the given rows do not change"
    last, before = limited[keys.ACTION_VERSIONS].tolist(), limited[keys.PREVIOUS_SEGMENTS]
    masked = on_stale == "mask"
    assert (last, before["versions"].tolist()) == (([5], [4]) if masked else ([], []))
    expected = [[False, False, False, True, False, False], [False, False, False, True]]
    masks = (limited[keys.ACTION_MASK], before["mask"])
    for mask, log_probs, kept in zip(masks, (limited[keys.LOG_PROBS], before["log_probs"]), expected, strict=True):
        assert mask.tolist() == (kept if masked else [False] * len(kept))
        assert (log_probs != 0).tolist() == mask.tolist()
    assert before["sizes"].tolist() == [4] and limited[keys.REWARD].item() == 1
    assert counts == {"staleness/masked_tokens": 3 if masked else 5, "staleness/masked_rows": 1}


# Choice of groups


def in_time(ages: Sequence[int], per_batch: int, bound: int) -> bool:
    """Search all orders in which groups may be delivered, one batch after each update."""
    orders = permutations([age for age in ages if age <= bound])
    return any(all(age + 1 + i // per_batch <= bound for i, age in enumerate(order)) for order in orders)


def ledger_of(groups: int) -> GroupLedger:
    rows = [{"prompt": f"{i}"} for i in range(groups)]
    return GroupLedger(DataLoadingPrimer(load_prompts(rows), num_generations=1))


def choice(complete: list[int], running: list[int], needed: int = 1, bound: int = 1) -> list[int] | None:
    """Return the ages of the groups that a table chooses, of groups of these ages at version 10."""
    ledger = ledger_of(9)
    for lease, age in zip(ledger.lease(len(complete) + len(running)), (*complete, *running), strict=True):
        ledger.begin(lease.group_id, 0, 10 - age)
        if lease.group_id < len(complete):
            ledger.complete(lease.group_id, 0, [], oldest=10 - age)
    chosen = AgeTable(ledger).choose(needed, needed, 10, bound)
    return None if chosen is None else [10 - group.oldest for group in chosen]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=4), st.lists(st.integers(0, 4), max_size=2), st.data())
def test_groups_left_behind_are_in_time_if_any_choice_allows_it(complete, running, data) -> None:
    needed, bound = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 3))
    chosen = choice(complete, running, needed, bound)
    possible = any(
        in_time([*(Counter(complete) - Counter(some)).elements(), *running], needed, bound)
        for some in combinations(complete, needed)
    )
    if chosen is None:
        assert not possible and running
        return
    left = [*(Counter(complete) - Counter(chosen)).elements(), *running]
    assert len(chosen) == needed and in_time(left, needed, bound) == possible
    oldest = sorted(complete, reverse=True)[:needed]
    if in_time([*(Counter(complete) - Counter(oldest)).elements(), *running], needed, bound):
        assert chosen == oldest, "the oldest, whatever the order of draws"


def test_the_most_urgent_groups_are_chosen_or_waited_for() -> None:
    assert choice([0], [1]) is None, "a running group would be late"
    assert choice([1], [1]) == [1], "one of them is late in any case"
    assert choice([1, 1, 1], [], needed=2) == [1, 1], "waiting does not help"
    assert choice([5, 0], []) == [5], "beyond the bound, but there is time"
    assert choice([5, 1], []) == [1], "others would be late"
    assert choice([5], [1]) is None
    assert choice([0], [5]) == [0], "waiting cannot help a group beyond the bound"


@pytest.mark.parametrize("seed", range(5))
def test_a_table_that_is_kept_chooses_as_a_new_one_does(seed: int) -> None:
    rng, ledger, version = random.Random(seed), ledger_of(200), 0
    table, outcomes = AgeTable(ledger), Counter()
    for _ in range(150):
        kind = rng.choice(["lease", "begin", "complete", "requeue", "update"])
        leased, complete = ledger.of(GroupState.LEASED), ledger.of(GroupState.COMPLETE)
        if kind == "lease" and len(leased) < 6 and (not ledger.groups or max(ledger.groups) < 190):
            ledger.lease(rng.randint(1, 3))
        elif kind == "begin" and leased:
            ledger.begin((g := rng.choice(leased)).group_id, g.attempt, version)
        elif kind == "complete" and leased:
            g = rng.choice(leased)
            ledger.complete(
                g.group_id, g.attempt, [], oldest=rng.choice([None, rng.randint(max(0, version - 3), version)])
            )
        elif kind == "requeue" and complete:
            ledger.requeue([rng.choice(complete).group_id])
        elif kind == "update":
            version += 1
        if len(ledger.of(GroupState.COMPLETE)) >= 2:
            everything = SimpleNamespace(groups=ledger.groups, of=ledger.of, take_changed=lambda: set(ledger.groups))
            expected, chosen = (each.choose(2, 2, version, 2) for each in (AgeTable(everything), table))
            assert chosen == expected
            outcomes[expected is None] += 1
            if expected is not None and rng.random() < 0.5:
                ledger.deliver([g.group_id for g in expected])
    assert outcomes[False] and outcomes[True]


def test_the_oldest_late_groups_are_cut_once() -> None:
    ledger, cut = ledger_of(5), []
    leases = ledger.lease(4)
    late = LateGroups(ledger, SimpleNamespace(cut_stragglers=cut.append))
    for group_id in (3, 1, 2, 1, 4, 99):
        late.add(group_id)
    late.cut(1)
    late.cut(1)
    assert cut == [1]
    ledger.requeue([2])
    late.cut(2)
    assert cut == [1, 3]  # the second one runs no more
    ledger.complete(1, 0, list(leases[1].rows.unbind(0)))
    late.remove(1, 0)
    ledger.lease(1)
    late.add(2)
    late.cut(2)
    assert cut == [1, 3, 2]


def test_an_update_during_a_wait_requeues_what_became_stale(scripted: Callable) -> None:
    gate = Gate(closed={1})
    collector = scripted(gate, updater=Bump, max_staleness=0, on_stale="requeue")
    collecting = in_thread(collector.collect)
    wait_until(lambda: in_state(collector, "complete") == {0} and gate.waiting == {1})
    collector.update_policy_weights_()
    gate.closed.clear()
    rows = collecting.result(PATIENCE)
    assert groups_of(rows) == [0, 0, 1, 1] and set(rows[keys.POLICY_VERSION].tolist()) == {1}
    assert collector.counts["staleness/requeued_groups"] == 2
