"""Tests of SGLangServer with a stand-in for SGLang's server."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.engines import check_scores
from support.sglang_stand_in import StandIn, serve
from torchrl_rloo.engines import EngineError, Request, SGLangServer
from torchrl_rloo.functional import SamplingDistribution
from torchrl_rloo.weight_update import Files, WeightPublisher, WeightSyncError

PROMPTS = [[5], [7, 8, 9], [40 + i % 200 for i in range(70)]]
REQUESTS = [Request(p, 12, seed, SamplingDistribution(0.7)) for seed, p in enumerate(PROMPTS)]
EXACT, STALE = 1e-5, 0.1


@pytest.fixture
def state(models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast) -> StandIn:
    info = {"enable_deterministic_inference": True, "context_length": 512}
    return StandIn(copy.deepcopy(models[0]), tokenizer, info)


@pytest.fixture
def engine(state: StandIn) -> Iterator[SGLangServer]:
    with serve(state) as url, SGLangServer(url, api_key="secret") as engine:
        yield engine


def test_samples_and_scores_are_of_the_model(engine: SGLangServer, state: StandIn, models, deviation):
    samples = engine.generate(REQUESTS)
    assert deviation(models[0], REQUESTS, samples) < EXACT
    assert all(len(s.tokens) == 12 and s.finish == "length" and s.versions == [0] * 12 for s in samples)
    assert engine.generate(REQUESTS[::-1])[::-1] == samples
    (greedy,) = engine.generate([Request([7], 3, 0, SamplingDistribution(0))])
    assert greedy.log_probs == [0.0] * 3
    stop = samples[1].tokens[2]
    (stopped,) = engine.generate([Request(PROMPTS[1], 12, 1, SamplingDistribution(0.7), stop_ids=(stop,))])
    assert stopped.finish == "stop" and stopped.tokens == samples[1].tokens[:3]
    check_scores(engine, models[0])
    assert engine.context_length == 512 and {key for _, _, key in state.calls} == {"Bearer secret"}
    engine.check_health()


@pytest.mark.parametrize("files", [False, True])
def test_pushes_arrive_with_their_version(engine: SGLangServer, state: StandIn, models, deviation, files, tmp_path):
    publisher = WeightPublisher(models[1], engine, transport=Files(tmp_path) if files else "auto", bucket_bytes=1 << 16)
    publisher.initialize()
    publisher.push_weights()
    samples = engine.generate(REQUESTS)
    assert deviation(models[1], REQUESTS, samples) < EXACT and deviation(models[0], REQUESTS, samples) > STALE
    assert {v for s in samples for v in s.versions} == {1} and engine.version == 1 and state.version == "1"
    assert not os.path.exists(engine._files), "weights stay on the disk"
    with SGLangServer(engine.url) as second:
        assert second.version == 1
    engine.restart()
    assert engine.version == 1 and engine.generate(REQUESTS) == samples


def test_a_failed_load_is_reported_and_the_next_push_repairs_it(engine: SGLangServer, state: StandIn, models):
    publisher = WeightPublisher(models[1], engine)
    publisher.initialize()
    state.broken = "no such tensor"
    with pytest.raises(WeightSyncError, match="did not load the weights: no such tensor"):
        publisher.push_weights()
    with pytest.raises(EngineError, match="failed half-way"):
        engine.generate(REQUESTS)
    state.broken = ""
    publisher.push_weights()
    assert {v for s in engine.generate(REQUESTS) for v in s.versions} == {engine.version}


def test_what_cannot_be_exact_is_refused(engine: SGLangServer, state: StandIn, models):
    with pytest.raises(EngineError, match="of the temperature alone; remove bad_words, top_k"):
        engine.generate([Request([1], 4, 0, SamplingDistribution(top_k=3, bad_words=["a"]))])
    with pytest.raises(EngineError, match="which weights sampled a token"):
        engine.pause("continue")
    engine.resume()
    for state.version, message in (("someone", "another client named"), ("default", "was restarted")):
        with pytest.raises(EngineError, match=message):
            engine.generate(REQUESTS)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"info": {}}, "ignores seeds; start it with --enable-deterministic-inference"),
        ({"raw": True}, "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"),
    ],
    ids=["seeds", "raw log-probs"],
)
def test_servers_that_were_started_otherwise_are_refused(state: StandIn, changes: dict, message: str):
    vars(state).update(changes)
    with serve(state) as url, pytest.raises(EngineError, match=message):
        SGLangServer(url)
