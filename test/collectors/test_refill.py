"""Tests of RefillingCollector in a loop with the embedded model, uninterrupted and resumed."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.collectors.refill import RefillingCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.outcomes import final_return
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.data.sampling import DeferredRerolls, PassRatePool
from torchrl_rloo.embedded import addition_prompts, build_model
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import DatasetExhaustedError
from torchrl_rloo.functional.statistics import group_ranges, has_signal
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.replay.cache import FIRST_CACHED_GROUP, GroupCache
from torchrl_rloo.replay.filters import ZeroSignalFilter
from torchrl_rloo.weight_update import InProcessWeightUpdater

GROUPS, SIZE = 4, 3


def odd(completion_ids, **_) -> list[float]:
    """Reward an odd first id, which a model with random weights samples in about half of the completions."""
    return [float(ids[0] % 2) for ids in completion_ids]


@pytest.fixture
def make(tokenizer) -> Callable[..., SimpleNamespace]:
    """Make all parts of a run. A run with another seed and without a state is another run."""

    def make(seed: int = 0, *, cached: bool = True, epochs: int | None = None, **kwargs) -> SimpleNamespace:
        model = build_model(tokenizer, seed=0)
        prompts = load_prompts(addition_prompts("train", size=12))
        pool = PassRatePool(len(prompts), floor=0.2, window=2)
        sampler = DeferredRerolls(pool, delay=6)
        env = DatasetChatEnv(
            prompts,
            tokenizer,
            prompts_per_batch=GROUPS,
            num_generations=SIZE,
            rewards=odd,
            seed=seed,
            **({"sampler": sampler} if epochs is None else {"epochs": epochs}),
        )
        settings = {"max_new_tokens": 6, "seed": seed}
        policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=settings)
        trainer = policy.get_new_version(generate=False)
        collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
        observers = () if epochs else (pool.update, sampler.update)
        refill = RefillingCollector(collector, ZeroSignalFilter(), GROUPS, **{"observers": observers} | kwargs)
        buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=MCAdvantage(SIZE))
        cache = GroupCache(6, trainer, max_uses=2) if cached else None
        run = SimpleNamespace(model=model, collector=collector, refill=refill, cache=cache, buffer=buffer)
        run.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.loss_fn, run.pool, run.rerolls = RLOOLoss(trainer), pool, sampler
        run.stateful = {k: getattr(run, k) for k in ("model", "collector", "refill", "optimizer")}
        run.stateful |= {} if cache is None else {"cache": cache}
        return run

    return make


def train(run: SimpleNamespace, steps: int) -> list[TensorDictBase]:
    """Run some steps of the loop, and return the batches that were trained on."""
    batches = []
    for _ in range(steps):
        given = run.refill.collect().rows
        rows = given if run.cache is None else run.cache.fill(given, GROUPS, run.collector.policy_version)
        run.buffer.extend(rows)
        batch = run.buffer[:]
        run.loss_fn(batch).loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.buffer.empty()
        if run.cache is not None and given is not None:
            run.cache.add(given)
        run.collector.update_policy_weights_()
        batches.append(batch)
    return batches


def save(run: SimpleNamespace) -> dict:
    file = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in run.stateful.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_batches_are_full_of_groups_with_a_signal(make: Callable) -> None:
    run = make(max_batches=8)
    for batch in train(run, 5):
        assert len(batch) == GROUPS * SIZE
        _, groups, sizes = batch[keys.GROUP_ID].unique(return_inverse=True, return_counts=True)
        assert sizes.tolist() == [SIZE] * GROUPS
        assert has_signal(group_ranges(final_return(batch), groups)).all()
        assert (batch[keys.ADVANTAGE].abs().sum() > 0).all()
    refill, signal = run.refill.counts, run.refill.signal.counts
    assert refill["refill/batches"] > 5 and refill["refill/groups"] == 5 * GROUPS
    assert refill["refill/missing_groups"] == refill["refill/stale_groups"] == 0
    dropped = sum(n for name, n in signal.items() if name != "zero_signal/kept")
    assert dropped > 0 and dropped + signal["zero_signal/kept"] == GROUPS * refill["refill/batches"]
    assert signal["zero_signal/kept"] == refill["refill/groups"] + run.refill.surplus_groups, "none is thrown away"
    assert run.pool.counts["pool/target_draws"] and run.rerolls.counts["rerolls/drawn"]


def test_no_group_is_trained_on_twice(make: Callable) -> None:
    run = make(cached=False)
    ids = [set(batch[keys.GROUP_ID].tolist()) for batch in train(run, 5)]
    assert len(set.union(*ids)) == sum(map(len, ids)) == 5 * GROUPS


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_run_ends_at_the_same_weights(stop: int, make: Callable) -> None:
    whole = make(max_batches=2)
    train(whole, stop)
    state = save(whole)
    assert stop == 1 or whole.refill.surplus_groups + len(whole.cache), "there is something to restore"
    expected = train(whole, 3)
    resumed = make(seed=7, max_batches=2)
    for name, part in resumed.stateful.items():
        part.load_state_dict(state[name])
    for ours, theirs in zip(train(resumed, 3), expected, strict=True):
        assert ours[keys.GROUP_ID].tolist() == theirs[keys.GROUP_ID].tolist()
        for key in (keys.TOKENS, keys.LOG_PROBS, keys.ADVANTAGE):
            assert all(torch.equal(a, b) for a, b in zip(ragged(ours, key), ragged(theirs, key), strict=True))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for part in ("refill", "cache", "pool", "rerolls"):
        assert getattr(whole, part).counts == getattr(resumed, part).counts


def test_missing_groups_are_counted(make: Callable) -> None:
    run = make(max_batches=2, cached=False)
    run.refill.signal.tolerance = 5.0  # an impossible difference
    given = run.refill.collect()
    assert given.rows is None and len(given.sampled) == 2 * GROUPS * SIZE
    assert run.refill.counts == {
        "refill/batches": 2,
        "refill/groups": 0,
        "refill/missing_groups": GROUPS,
        "refill/short_batches": 1,
        "refill/stale_groups": 0,
    }


def test_surplus_is_given_first_without_sampling_and_not_when_too_old(make: Callable) -> None:
    run = make(cached=False, max_batches=8)
    run.refill.groups_per_batch, run.refill.max_age = 1, 2
    first = run.refill.collect()
    surplus = run.refill.surplus_groups
    assert surplus >= 1
    second = run.refill.collect()
    assert second.sampled is None and run.refill.surplus_groups == surplus - 1
    assert first.rows[keys.GROUP_ID].unique() < second.rows[keys.GROUP_ID].unique()
    run.refill.groups_per_batch = GROUPS
    run.collector.weights.updater.version = 2
    run.collector.update_policy_weights_()
    third = run.refill.collect()
    assert run.refill.counts["refill/stale_groups"] == surplus - 1
    assert (third.rows[keys.POLICY_VERSION] == 3).all()


def test_the_end_of_the_data(make: Callable) -> None:
    run = make(cached=False, epochs=1, max_batches=8)
    run.refill.groups_per_batch = 100
    given = run.refill.collect()
    assert len(given.sampled) == 12 * SIZE and given.rows is not None
    with pytest.raises(DatasetExhaustedError):
        run.refill.collect()


# Cache


def test_cached_groups_come_with_todays_log_probs_and_under_another_name(make: Callable) -> None:
    run = make(max_batches=8)
    given = run.refill.collect().rows
    before = {tuple(row[keys.TOKENS].tolist()): row[keys.LOG_PROBS].clone() for row in given.unbind(0)}
    run.cache.add(given)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1.1)
    filled = run.cache.fill(None, GROUPS, policy_version=1)
    assert len(filled) == GROUPS * SIZE
    assert sorted(set(filled[keys.GROUP_ID].tolist())) == [FIRST_CACHED_GROUP + i for i in range(GROUPS)]
    assert (filled[keys.POLICY_VERSION] == 0).all(), "the staleness metric shows their age"
    out = run.loss_fn(MCAdvantage(SIZE).inv(filled))
    assert float(out.ESS) == pytest.approx(1, abs=1e-6) and abs(float(out.kl_approx)) < 1e-8, "the ratio starts at 1"
    for row in filled.unbind(0):
        old = before[tuple(row[keys.TOKENS].tolist())]
        assert not torch.allclose(row[keys.LOG_PROBS], old, atol=1e-3)
        assert not row[keys.LOG_PROBS][~row[keys.ACTION_MASK]].any()
    for row in given.unbind(0):
        assert torch.equal(row[keys.LOG_PROBS], before[tuple(row[keys.TOKENS].tolist())]), "theirs are as they were"
    again = run.cache.fill(None, GROUPS, policy_version=1)
    assert not set(again[keys.GROUP_ID].tolist()) & set(filled[keys.GROUP_ID].tolist())
    assert len(run.cache) == 0 and run.cache.counts["cache/used_up"] == GROUPS
    assert run.cache.fill(None, GROUPS, policy_version=1) is None
    assert run.cache.counts["cache/missing"] == GROUPS
