"""Tests of weight updates by a collector, and of the versions of its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch

from support.collecting import Bump, Gate, groups_of, in_state
from support.waiting import wait_until
from torchrl_rloo.collectors import LLMCollector, weights
from torchrl_rloo.data import keys, notices
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.engines import EngineError
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.weight_update import InProcessWeightUpdater, WeightSyncError


def test_a_version_counts_once_it_is_confirmed(scripted: Callable) -> None:
    """Failed updates are counted, and the third in a row raises. Their versions are never used again."""
    lost = EngineError("lost")
    collector = scripted(updater=partial(Bump, failures=[None, lost, None, lost, lost, lost, lost, None]))
    versions = []
    for _ in range(5):
        collector.update_policy_weights_()
        rows = collector.collect()
        versions.append(collector.policy_version)
        assert rows[keys.POLICY_VERSION].tolist() == [collector.policy_version] * 4
    assert versions == [1, 1, 3, 3, 3]
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="lost"):
            collector.update_policy_weights_()
    collector.update_policy_weights_()
    assert collector.policy_version == 8 and collector.counts["weights/failed_pushes"] == 5
    with pytest.raises(RuntimeError, match="weight_updater=None"):
        scripted().update_policy_weights_()


def test_an_interrupted_update_counts_if_the_weights_arrived(scripted: Callable) -> None:
    class Interrupted(Bump):
        def _send(self, version: int) -> None:
            super()._send(version)
            raise KeyboardInterrupt

    collector = scripted(updater=Interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.update_policy_weights_()
    assert collector.policy_version == 1
    assert collector.collect()[keys.POLICY_VERSION].tolist() == [1] * 4


def test_a_resumed_run_continues_the_versions(scripted: Callable) -> None:
    """A version that was spent on a failed update is not used again, and the weights are sent before sampling."""
    lost = EngineError("lost")
    collector = scripted(updater=partial(Bump, failures=[None, lost]))
    collector.update_policy_weights_()
    collector.update_policy_weights_()
    resumed = scripted(updater=Bump)
    resumed.load_state_dict(copy.deepcopy(collector.state_dict()))
    resumed.collect()
    assert resumed.weight_updater.initialized == 1 and resumed.engine.version == 2
    resumed.update_policy_weights_()
    assert resumed.policy_version == resumed.engine.version == 3
    resumed.collect()
    assert resumed.weight_updater.initialized == 1, "once"


def test_a_schedule_updates_before_every_nth_batch(scripted: Callable) -> None:
    collector = scripted(sync_every=2, updater=Bump)
    assert [int(collector.collect()[keys.POLICY_VERSION][0]) for _ in range(5)] == [0, 0, 1, 1, 2]
    resumed = scripted(sync_every=2, updater=Bump)
    resumed.load_state_dict(collector.state_dict())
    assert [int(resumed.collect()[keys.POLICY_VERSION][0]) for _ in range(2)] == [2, 3]
    plain = scripted(updater=Bump)
    for _ in range(3):
        plain.collect()
    assert plain.policy_version == plain.weight_updater.version == 0, "nothing is sent without a schedule"


def test_a_row_has_the_oldest_version_that_sampled_it(scripted: Callable) -> None:
    """The staleness of a group that lasts over updates is that of its oldest turn."""
    gate = Gate(closed={0})
    collector = scripted(gate, ahead=1, groups_per_batch=1, updater=Bump)
    for version in range(3):
        rows = collector.collect()
        assert groups_of(rows) == [version + 1] * 2 and rows[keys.POLICY_VERSION].tolist() == [version] * 2
        collector.update_policy_weights_()
    gate.closed.clear()
    wait_until(lambda: 0 in in_state(collector, "complete"))
    rows = collector.collect()
    assert groups_of(rows) == [0, 0] and rows[keys.POLICY_VERSION].tolist() == [0, 0]
    assert set(torch.cat(ragged(rows, keys.ACTION_VERSIONS)).tolist()) == {0, 3}


def test_in_process_weights_change_between_batches(random_model, bpe, make_env) -> None:
    """Rows are on-policy under the weights of their version, except for turns after an update."""
    trained, sampler = copy.deepcopy(random_model), copy.deepcopy(random_model)
    policy = TransformersWrapper(sampler, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
    updater = InProcessWeightUpdater(trained, sampler)
    collector = LLMCollector(make_env(Gate(turns=1)), policy, ahead=4, weight_updater=updater, sync_every=1)
    weights = {0: copy.deepcopy(trained)}
    for version in range(4):
        for row in (rows := collector.collect()).unbind(0):
            scorer = policy.get_new_version(model=weights[int(row[keys.POLICY_VERSION])], generate=False)
            scored = scorer.score(row.unsqueeze(0))
            behaviour = row[keys.LOG_PROBS][row[keys.ACTION_MASK]]
            torch.testing.assert_close(scored.log_probs.detach()[0], behaviour, rtol=0, atol=1e-5)
        assert int(rows[keys.POLICY_VERSION].max()) <= version
        with torch.no_grad():
            trained.lm_head.bias.add_(torch.linspace(-1, 1, len(trained.lm_head.bias)))
        weights[version + 1] = copy.deepcopy(trained)
    collector.shutdown()


@pytest.mark.parametrize("sent", [False, True])
def test_a_sampler_that_never_gets_weights_is_told(scripted: Callable, sent: bool, caplog, monkeypatch) -> None:
    monkeypatch.setattr(notices, "_SHOWN", set())
    monkeypatch.setattr(weights, "BATCHES_WITHOUT_UPDATE", 2)
    collector = scripted(updater=Bump)
    for _ in range(3):
        if sent:
            collector.update_policy_weights_()
        collector.collect()
    told = [m for m in caplog.messages if "2 batches are sampled with the initial weights" in m]
    assert len(told) == (0 if sent else 1)
