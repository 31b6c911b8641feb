"""Tests of weight updates by a collector over an engine, and of the version that counts them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import EngineError, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.weight_update import SequentialWeightUpdater, WeightPublisher, WeightSyncError, WeightUpdater


@pytest.fixture
def make_collector(tokenizer, prompts) -> Callable:
    def make(fail: list | None = None, **kwargs) -> tuple[LLMCollector, ScriptedEngine]:
        turn = ScriptedTurn([7, tokenizer.eos_token_id])
        engine = ScriptedEngine(lambda request, index: turn, fail_updates={"finish": list(fail or [])})
        env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, rewards=zero)
        updater = WeightPublisher(build_model(tokenizer, seed=0), engine)
        policy = vLLMWrapper(engine, tokenizer=tokenizer)
        return LLMCollector(env, policy, weight_updater=updater, **kwargs), engine

    return make


def zero(prompts, completions, **_) -> list[float]:
    return [0.0] * len(prompts)


def test_a_version_counts_once_it_is_confirmed(make_collector) -> None:
    collector, engine = make_collector(fail=[None, EngineError("lost"), None])
    collector.update_policy_weights_()
    assert collector.policy_version == engine.version == 1
    with pytest.raises(WeightSyncError, match="version 2 .*lost"):
        collector.update_policy_weights_()
    assert collector.policy_version == 1
    collector.update_policy_weights_()
    assert collector.policy_version == engine.version == 3, "version 2 is spent"
    rows = collector.collect()
    assert rows[keys.POLICY_VERSION].tolist() == [3] * 4
    assert rows[0][keys.ACTION_VERSIONS].tolist() == [3, 3]


def test_a_dead_engine_is_an_error_and_its_version_is_spent(make_collector) -> None:
    collector, engine = make_collector()
    collector.update_policy_weights_()
    engine.kill(RuntimeError("out of memory"))
    with pytest.raises(WeightSyncError, match="out of memory"):
        collector.update_policy_weights_()
    assert collector.policy_version == 1
    engine.restart()
    collector.update_policy_weights_()
    assert collector.policy_version == engine.version == 3
    assert collector.collect()[keys.POLICY_VERSION].tolist() == [3] * 4


def test_engines_that_get_different_weights_never_share_a_version(tokenizer, prompts) -> None:
    turn = ScriptedTurn([7, tokenizer.eos_token_id])
    engines = [
        ScriptedEngine(lambda r, i: turn, fail_updates={"finish": failures})
        for failures in ([], [EngineError("boom"), None])
    ]
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, rewards=zero)
    publisher = WeightPublisher(build_model(tokenizer, seed=0), engines)
    collector = LLMCollector(env, vLLMWrapper(engines[0], tokenizer=tokenizer), weight_updater=publisher)
    with pytest.raises(WeightSyncError, match="boom"):
        collector.update_policy_weights_()
    assert publisher.version == collector.policy_version == engines[0].version == 1, "one engine samples with it"
    collector.update_policy_weights_()
    assert collector.policy_version == 2 and [engine.version for engine in engines] == [2, 2]


def test_a_schedule_updates_before_every_nth_batch(make_collector) -> None:
    collector, engine = make_collector(sync_every=2)
    versions = [collector.collect()[keys.POLICY_VERSION].tolist()[0] for _ in range(5)]
    assert versions == [0, 0, 1, 1, 2]
    state = collector.state_dict()
    resumed, _ = make_collector(sync_every=2)
    resumed.load_state_dict(state)
    resumed.collect()
    assert resumed.policy_version == 2
    resumed.collect()
    assert resumed.policy_version == 3 and engine.version == 2


def test_without_a_schedule_nothing_is_sent(make_collector) -> None:
    collector, engine = make_collector()
    for _ in range(3):
        collector.collect()
    assert not engine.updates and collector.policy_version == 0


@pytest.mark.parametrize("sync_every", [0, -1])
def test_a_schedule_is_at_least_every_batch(make_collector, sync_every: int) -> None:
    with pytest.raises(ValueError, match=f"sync_every={sync_every} must be None or at least 1"):
        make_collector(sync_every=sync_every)


def test_a_schedule_needs_an_updater(tokenizer, prompts) -> None:
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, rewards=zero)
    engine = ScriptedEngine([])
    with pytest.raises(ValueError, match="requires a weight_updater"):
        LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer), sync_every=1)


class _Recording(WeightUpdater):
    """Updater that records versions and fails on demand."""

    def __init__(self):
        self.versions: list[int] = []
        self.fails = False

    def _send(self, version: int) -> None:
        self.versions.append(version)
        if self.fails:
            raise RuntimeError("no answer")


def test_updaters_in_sequence_share_versions_that_neither_has_spent() -> None:
    first, second = _Recording(), _Recording()
    second.push_weights()
    both = SequentialWeightUpdater(first, second)
    assert both.push_weights() == 2
    second.fails = True
    with pytest.raises(RuntimeError, match="no answer"):
        both.push_weights()
    assert (both.version, both.current_version, first.current_version) == (3, 2, 3)
    second.fails = False
    assert both.push_weights() == both.current_version == 4
    assert first.versions == [2, 3, 4] and second.versions == [1, 2, 3, 4]
    both.resume_from(9)
    assert both.push_weights() == 10 and first.versions[-1] == second.versions[-1] == 10
    with pytest.raises(ValueError, match="at least one"):
        SequentialWeightUpdater()
