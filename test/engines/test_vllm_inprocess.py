"""Tests of VLLMEngine: real vLLM in this process."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from support.engines import GROUP, VLLMEngines, check_scores, check_turn_settings
from support.turn_settings import TURN_SETTINGS
from support.waiting import PATIENCE, in_thread
from support.weights import push
from torchrl_rloo.engines.base import EngineDeadError, EngineError, EngineTimeoutError, Request
from torchrl_rloo.engines.vllm_inprocess import VLLMEngine
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher, WeightSyncError

pytestmark = pytest.mark.xdist_group(GROUP)

PROMPTS = [[5], [7, 8, 9], [40 + i % 200 for i in range(70)], [5, 6]]
REQUESTS = [Request(p, 12, seed) for seed, p in enumerate(PROMPTS)]
EXACT = 1e-5  # float32; other weights differ by more than 0.3
STALE = 0.1


def global_state() -> list[Any]:
    """Return the global state that an engine must not change."""
    numpy = np.random.get_state()
    return [random.getstate(), numpy[1].tolist(), numpy[2:], torch.get_rng_state().tolist(), torch.get_num_threads()]


@pytest.fixture(scope="module")
def undisturbed(vllm_engines: VLLMEngines) -> bool:
    """True if the start of an engine did not change the global state."""
    vllm_engines.close()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before, set_num_threads = global_state(), torch.set_num_threads
    vllm_engines.get()
    return global_state() == before and torch.set_num_threads is set_num_threads


@pytest.fixture
def engine(undisturbed: bool, vllm_engine: VLLMEngine) -> VLLMEngine:
    return vllm_engine


def test_start_and_generate_leave_the_process_as_it_was(undisturbed: bool, engine: VLLMEngine, capfd):
    assert undisturbed
    before = global_state()
    capfd.readouterr()
    engine.generate(REQUESTS)
    assert global_state() == before
    assert capfd.readouterr() == ("", "")


def test_samples_are_of_the_model(engine: VLLMEngine, models: list[PreTrainedModel], deviation):
    samples = engine.generate(REQUESTS)
    assert [len(s.tokens) for s in samples] == [12] * 4
    assert all(s.finish == "length" and s.versions == [0] * 12 for s in samples)
    assert deviation(models[0], REQUESTS, samples) < EXACT
    assert deviation(models[1], REQUESTS, samples) > STALE
    assert engine.world_size == 1 and engine.stop_ids == (models[0].config.eos_token_id,)
    engine.check_health()


@pytest.mark.parametrize(
    "distribution",
    [
        SamplingDistribution(temperature=0.6),
        SamplingDistribution(top_k=5),
        SamplingDistribution(temperature=1.5, top_p=0.7),
        SamplingDistribution(min_p=0.4),
        SamplingDistribution(repetition_penalty=1.4),
        SamplingDistribution(temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.1),
    ],
    ids=lambda d: ",".join(f"{n}={v}" for n, v in vars(d).items() if v != getattr(SamplingDistribution(), n)),
)
def test_log_probs_are_of_the_distribution_sampled(
    engine: VLLMEngine, models: list[PreTrainedModel], deviation, distribution: SamplingDistribution
):
    requests = [Request(p, 12, seed, distribution) for seed, p in enumerate(PROMPTS)]
    samples = engine.generate(requests)
    assert deviation(models[0], requests, samples) < EXACT
    plain = [Request(p, 12, 0) for p in PROMPTS]
    assert deviation(models[0], plain, samples) > STALE  # otherwise the test could not fail


@pytest.mark.parametrize("name", TURN_SETTINGS)
def test_settings_of_turns_are_those_of_the_scorer(
    engine: VLLMEngine, models: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast, name: str
):
    check_turn_settings(engine, models[0], tokenizer, TURN_SETTINGS[name])


def test_log_probs_are_exact_for_a_large_vocabulary(make_vllm_engine: Callable[..., VLLMEngine]):
    """A float32 log_softmax of as many logits is off by 3e-5."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 262_144, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.1)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(5)  # a few thousand likely tokens
    (sample,) = make_vllm_engine(model).generate([Request(PROMPTS[2], 16, seed=0)])
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPTS[2], *sample.tokens]])).logits[0, len(PROMPTS[2]) - 1 : -1]
    exact = logits.double().log_softmax(-1).gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    assert (exact - torch.tensor(sample.log_probs)).abs().max() < EXACT


def test_rows_are_scored_as_by_the_model(engine: VLLMEngine, models: list[PreTrainedModel]):
    check_scores(engine, models[0])


def test_greedy_takes_the_most_likely_token(engine: VLLMEngine, models: list[PreTrainedModel]):
    request = Request(PROMPTS[1], 6, 0, SamplingDistribution(temperature=0))
    (sample,) = engine.generate([request])
    assert sample.log_probs == [0.0] * 6
    ids = torch.tensor([[*request.prompt, *sample.tokens]])
    assert models[0](input_ids=ids).logits[0, 2:-1].argmax(-1).tolist() == sample.tokens


def test_a_request_depends_only_on_its_seed(engine: VLLMEngine):
    alone = [engine.generate([r])[0].tokens for r in REQUESTS]
    assert [s.tokens for s in engine.generate(REQUESTS[::-1])][::-1] == alone
    group = engine.generate([Request(PROMPTS[2], 12, seed) for seed in range(8)])
    assert len({tuple(s.tokens) for s in group}) == 8


def test_more_prompt_tokens_than_a_step_takes(engine: VLLMEngine, models: list[PreTrainedModel], deviation):
    """Prompts longer than a step are read whole. In parts, a seeded request would kill the engine on CPU."""
    requests = [Request([(7 * i + j) % 200 for j in range(230)], 4, i) for i in range(60)]
    assert deviation(models[0], requests[-4:], engine.generate(requests)[-4:]) < EXACT


def test_limits_and_stops(engine: VLLMEngine, tokenizer: PreTrainedTokenizerFast):
    (free,) = engine.generate([Request(PROMPTS[1], 12, 3)])
    stop = next(t for t in free.tokens[3:] if t not in free.tokens[:3])
    end = free.tokens.index(stop) + 1
    text = tokenizer.decode([stop])
    samples = engine.generate(
        [
            Request(PROMPTS[1], 5, 3),
            Request(PROMPTS[1], 12, 3, stop_ids=(stop,)),
            Request(PROMPTS[1], 12, 3, stop_strings=(text,)),
        ]
    )
    assert [s.finish for s in samples] == ["length", "stop", "stop"]
    assert samples[0].tokens == free.tokens[:5]
    assert samples[1] == free._replace(
        tokens=free.tokens[:end], log_probs=free.log_probs[:end], finish="stop", versions=[0] * end
    )
    cut = len(samples[2].tokens)
    assert samples[2].tokens == free.tokens[:cut] and text in tokenizer.decode(samples[2].tokens)
    assert text not in tokenizer.decode(samples[2].tokens[:-1])


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request([1] * 300, 4, 0), "300"),
        (Request([999_999], 4, 0), "999999"),
        (Request([], 4, 0), "empty"),
        (Request([1], 0, 0), "max_tokens"),
        (Request([1], 4, 0, SamplingDistribution(min_p=0.1, top_p=0.9)), "min_p=0.1 before top_p=0.9"),
    ],
    ids=["too long", "no token", "empty", "no limit", "min-p with top-p"],
)
def test_a_refused_request_affects_no_other(engine: VLLMEngine, request_: Request, words: str):
    before = engine.generate(REQUESTS)
    with pytest.raises(EngineError, match=words) as caught:
        engine.generate([*REQUESTS, request_])
    assert not isinstance(caught.value, EngineDeadError)
    assert engine.generate(REQUESTS) == before


def test_updates_arrive_and_leave_nothing_cached(engine: VLLMEngine, models: list[PreTrainedModel], deviation):
    shared = [Request([*PROMPTS[2], t], 8, t) for t in (3, 4)]  # two common blocks of the prefix cache
    engine.generate(shared)
    for version, model in ((1, models[1]), (7, models[2])):
        push(WeightPublisher(model, engine, bucket_bytes=100_000), version)
        samples = engine.generate(shared)
        assert deviation(model, shared, samples) < EXACT
        assert engine.version == version and all(s.versions == [version] * 8 for s in samples)


def test_an_update_that_fails_when_loading_fails_the_engine(
    engine: VLLMEngine, models: list[PreTrainedModel], deviation
):
    updater = WeightPublisher(models[1], engine, staged=False)
    finish = engine._rpc

    def fail(method: str, *args: Any, timeout: float) -> list:
        if method == "finish_weight_update":
            raise EngineError("power cut")
        return finish(method, *args, timeout=timeout)

    engine._rpc = fail
    with pytest.raises(WeightSyncError, match="power cut"):
        push(updater, 3)
    del engine._rpc
    with pytest.raises(EngineError, match="update to version 3 failed"):
        engine.generate(REQUESTS)
    push(updater, 4)
    assert deviation(models[1], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_workers_confirm_the_version_that_they_were_sent(
    engine: VLLMEngine, models: list[PreTrainedModel], deviation, monkeypatch
):
    finish = engine.update_weights

    def of_another_version(step: str, info: dict | None = None, *, timeout: float) -> list[dict]:
        return finish(step, {"version": 8} if step == "finish" else info, timeout=timeout)

    monkeypatch.setattr(engine, "update_weights", of_another_version)
    with pytest.raises(WeightSyncError, match="was sent version 7, but finish is of 8"):
        push(WeightPublisher(models[1], engine), 7)
    monkeypatch.undo()
    assert engine.failed_version == 8
    push(WeightPublisher(models[1], engine), 7)
    assert engine.version == 7 and deviation(models[1], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_adapters_replace_each_other_and_an_update_drops_them(
    engine: VLLMEngine, models: list[PreTrainedModel], make_adapted, deviation, tmp_path: Path
):
    engine.generate(REQUESTS)
    for version in (1, 2):
        adapted = make_adapted(version)
        updater = LoRAPublisher(adapted, engine, directory=tmp_path)
        push(updater, version)
        samples = engine.generate(REQUESTS)
        assert deviation(adapted, REQUESTS, samples) < EXACT
        assert deviation(models[0], REQUESTS, samples) > STALE
        assert all(s.versions == [version] * 12 for s in samples)
        updater.close()
    assert deviation(adapted, REQUESTS, engine.generate(REQUESTS)) < EXACT  # its files are no longer needed
    push(WeightPublisher(models[1], engine), 3)
    assert deviation(models[1], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_an_adapter_that_does_not_load_leaves_the_one_before(
    engine: VLLMEngine, make_adapted, deviation, tmp_path: Path
):
    adapted = make_adapted(1)
    push(LoRAPublisher(adapted, engine, directory=tmp_path), 1)
    with pytest.raises(EngineError, match="add_lora"):
        engine._load_adapter(str(tmp_path), 2, timeout=5.0)
    samples = engine.generate(REQUESTS)
    assert deviation(adapted, REQUESTS, samples) < EXACT and samples[0].versions == [1] * 12


def test_requests_of_other_threads_wait_for_resume(engine: VLLMEngine, wait_until):
    expected = engine.generate(REQUESTS)
    engine.pause()
    found = in_thread(engine.generate, REQUESTS)
    wait_until(lambda: found.done() or engine._turn._waiters)
    assert not found.done()
    with pytest.raises(EngineError, match="resume"):  # the thread would wait for itself
        engine.generate(REQUESTS)
    engine.resume()
    assert found.result(PATIENCE) == expected
    with pytest.raises(ValueError, match="in_flight='now'"):
        engine.pause("now")


def test_a_running_request_and_an_update_exclude_each_other(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch):
    executor = engine.llm.llm_engine.engine_core.engine_core.model_executor
    execute, running, go_on = executor.execute_model, threading.Event(), threading.Event()

    def execute_when_told(*args: Any, **kwargs: Any) -> Any:
        running.set()
        assert go_on.wait(60.0)
        return execute(*args, **kwargs)

    monkeypatch.setattr(executor, "execute_model", execute_when_told)
    found = in_thread(engine.generate, [Request([5], 250, seed) for seed in range(8)])
    assert running.wait(PATIENCE)
    with pytest.raises(EngineTimeoutError, match="pause.*timeout=0.01"):
        engine.pause(timeout=0.01)
    with pytest.raises(EngineTimeoutError, match="weight_report.*timeout=0.01"):
        engine._rpc("weight_report", timeout=0.01)
    go_on.set()
    engine.pause(timeout=60.0)  # the requests end first
    engine.resume()
    assert [len(s.tokens) for s in found.result(PATIENCE)] == [250] * 8


def test_a_sleeping_engine_refuses_until_it_wakes(engine: VLLMEngine):
    before = engine.generate(REQUESTS)
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(REQUESTS)
    engine.wake()
    assert engine.generate(REQUESTS) == before


def test_a_failure_between_steps_is_final_until_restart(
    engine: VLLMEngine, models: list[PreTrainedModel], deviation, monkeypatch: pytest.MonkeyPatch
):
    push(WeightPublisher(models[1], engine), 5)
    start_count = engine.start_count
    core = engine.llm.llm_engine.engine_core.engine_core

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of everything")

    with monkeypatch.context() as patch:
        patch.setattr(core.model_executor, "execute_model", fail)
        with pytest.raises(EngineDeadError, match="RuntimeError: out of everything"):
            engine.generate(REQUESTS)
    for call in (lambda: engine.generate(REQUESTS), engine.check_health, lambda: engine._rpc("x", timeout=1.0)):
        with pytest.raises(EngineDeadError, match="out of everything"):
            call()
    with monkeypatch.context() as patch:
        patch.setitem(engine._arguments, "dtype", "float31")
        with pytest.raises(EngineError, match="float31"):
            engine.restart()
    with pytest.raises(EngineDeadError, match="has not started it yet"):  # so that a further restart may follow
        engine.check_health()
    before = global_state()
    engine.restart()
    assert global_state() == before
    samples = engine.generate(REQUESTS)
    assert deviation(models[0], REQUESTS, samples) < EXACT
    assert (engine.version, engine.start_count, engine.failed_version) == (0, start_count + 1, None)
    assert samples[0].versions == [0] * 12
    push(WeightPublisher(models[2], engine), 6)
    assert deviation(models[2], REQUESTS, engine.generate(REQUESTS)) < EXACT


def test_settings_of_the_toolkit_and_bad_models_are_refused(vllm, tmp_path: Path):
    with pytest.raises(ValueError, match="enable_return_routed_experts=True has no effect"):
        VLLMEngine("nowhere", enable_return_routed_experts=True)
    with pytest.raises(ValueError, match="logprobs_mode is set by the toolkit and cannot be 'raw_logprobs'"):
        VLLMEngine(tmp_path, logprobs_mode="raw_logprobs")
    with pytest.raises(EngineError, match=r"(?s)does not start with model='/.*config\.json"):
        VLLMEngine(tmp_path)


def test_a_closed_engine_says_so(engine: VLLMEngine):
    engine.close()
    engine.close()
    for call in (lambda: engine.generate(REQUESTS), engine.check_health, lambda: engine._rpc("x", timeout=1.0)):
        with pytest.raises(EngineError, match="closed"):
            call()
