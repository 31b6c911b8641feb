"""Tests of TransformersEngine: tokens and log-probs of the model, and weight updates."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import nn

from support.gpu import needs_gpu
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines.base import EngineError, EngineTimeoutError, Request, Sample
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.functional import SamplingDistribution
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.weight_update.protocol import TensorInfo, pack, packed_size, plan_buckets
from torchrl_rloo.weight_update.protocol import xxh3 as checksum

PROMPTS = [[5, 9, 17], [40, 8, 8, 120, 33, 60, 61, 62], [200], [99, 98, 97, 96, 95]]


def requests(**settings) -> list[Request]:
    """Return one request per prompt. ``settings`` may override the limit of 12."""
    return [Request(p, **({"limit": 12, "seed": 11 * i} | settings)) for i, p in enumerate(PROMPTS)]


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def engine(random_model, bpe) -> Iterator[TransformersEngine]:
    with TransformersEngine(copy.deepcopy(random_model), bpe) as engine:
        yield engine


# Sampling


def expected_log_probs(model: nn.Module, ids: list[int], d: SamplingDistribution) -> torch.Tensor:
    """Return the log-probs ``[V]`` of the token after ``ids``, without cache or batch, applying each rule per token."""
    z = model(torch.tensor([ids])).logits[0, -1].double()
    for i in set(ids):
        z[i] = z[i] / d.repetition_penalty if z[i] > 0 else z[i] * d.repetition_penalty
    z = z / d.temperature
    order = sorted(range(len(z)), key=lambda i: -z[i])
    kept = order[: d.top_k]
    p, mass, within = z[kept].softmax(0), 0.0, []
    for i, share in zip(kept, p.tolist(), strict=True):
        if mass < d.top_p:
            within.append(i)
        mass += share
    top = z[within[0]].exp()
    within = [i for i in within if z[i].exp() >= d.min_p * top]
    out = torch.full_like(z, -torch.inf)
    out[within] = z[within].log_softmax(0)
    return out


@torch.no_grad()
def check_sample(model: nn.Module, request: Request, sample: Sample) -> None:
    """Check that the request's random number selects each token in the model's distribution."""
    uniforms = torch.rand(request.limit, generator=torch.Generator().manual_seed(request.seed)).tolist()
    ids = list(request.prompt)
    for token, log_prob, u in zip(sample.tokens, sample.log_probs, uniforms, strict=False):
        expected = expected_log_probs(model, ids, request.distribution)
        assert log_prob == pytest.approx(float(expected[token]), abs=1e-5)
        below = float(expected[:token].exp().sum())
        assert below - 1e-5 <= u <= below + float(expected[token].exp()) + 1e-5
        ids.append(token)
    assert len(sample.tokens) == len(sample.log_probs) == len(sample.versions) <= request.limit
    assert sample.finish == ("stop" if sample.tokens[-1] in request.stop_ids else "length")
    assert sample.finish == "stop" or len(sample.tokens) == request.limit
    assert not set(sample.tokens[:-1]) & set(request.stop_ids)


DISTRIBUTIONS = [
    SamplingDistribution(),
    SamplingDistribution(temperature=0.6),
    SamplingDistribution(temperature=1.5, top_k=7),
    SamplingDistribution(top_p=0.8),
    SamplingDistribution(temperature=1.2, min_p=0.1),
    SamplingDistribution(repetition_penalty=1.4),
    SamplingDistribution(temperature=0.9, top_k=50, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("stops", [True, False])
def test_samples_are_the_models(engine: TransformersEngine, bpe, distribution, stops: bool) -> None:
    asked = requests(distribution=distribution, stop_ids=(bpe.eos_token_id,) if stops else ())
    for request, sample in zip(asked, engine.generate(asked), strict=True):
        check_sample(engine.model, request, sample)
        assert sample.versions == [0] * len(sample.tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_are_scored_id_by_id(engine: TransformersEngine, temperature: float) -> None:
    for row, scores in zip(PROMPTS, engine.score(PROMPTS, temperature), strict=True):
        d = SamplingDistribution(temperature)
        expected = [0.0, *(expected_log_probs(engine.model, row[:n], d)[row[n]].item() for n in range(1, len(row)))]
        assert scores == pytest.approx(expected, abs=1e-5)
    with pytest.raises(EngineError, match="the prompt of request 1 is empty"):
        engine.score([[1], []])
    marked = [
        TensorDict({keys.TOKENS: torch.tensor(row), keys.ACTION_MASK: torch.arange(len(row)) > 0}) for row in PROMPTS
    ]
    settings = {"generate": False, "generate_kwargs": {"temperature": temperature}}
    scored = TransformersWrapper(engine.model, tokenizer=engine.tokenizer, **settings)(stack_rows(marked))
    for row, scores in zip(scored.unbind(0), engine.score(PROMPTS, temperature), strict=True):
        assert row[keys.LOG_PROBS].tolist() == pytest.approx(scores, abs=1e-5)


def test_greedy_takes_the_likeliest_and_has_log_probs_of_0(engine: TransformersEngine) -> None:
    for request, sample in zip(
        requests(), engine.generate(requests(distribution=SamplingDistribution(temperature=0))), strict=True
    ):
        ids = list(request.prompt)
        for token in sample.tokens:
            assert token == int(engine.model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
        assert sample.log_probs == [0.0] * 12


def test_a_request_is_sampled_alike_in_any_batch(engine: TransformersEngine, bpe) -> None:
    """Requests with other distributions, stops, limits and seeds in one call do not affect each other."""
    asked = [
        Request(PROMPTS[i % 4], limit=1 + i, seed=i * 2**58, distribution=d, stop_ids=(bpe.eos_token_id,) * (i % 2))
        for i, d in enumerate([*DISTRIBUTIONS, *DISTRIBUTIONS])
    ]
    together, alone = engine.generate(asked), [engine.generate([request])[0] for request in asked]
    for request, a, b in zip(asked, together, alone, strict=True):
        check_sample(engine.model, request, a)
        assert (a.tokens, a.finish) == (b.tokens, b.finish)
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=0, atol=1e-5)
    assert len({len(s.tokens) for s in together}) > 3


def test_stop_strings_end_a_turn_and_are_kept(engine: TransformersEngine, bpe) -> None:
    free = engine.generate(requests())
    texts = tuple(bpe.decode(sample.tokens[4:6]) for sample in free[:3])
    for unbound, sample in zip(free, engine.generate(requests(stop_strings=texts)), strict=True):
        hits = (n for n in range(1, 13) if any(t in bpe.decode(unbound.tokens[:n]) for t in texts))
        end = next(hits, None)
        assert sample.tokens == unbound.tokens[:end]
        assert sample.finish == ("length" if end is None else "stop")


def test_a_stop_at_the_limit_is_a_stop(engine: TransformersEngine) -> None:
    (free,) = engine.generate([Request([5], limit=3, seed=0)])
    (last,) = engine.generate([Request([5], limit=3, seed=0, stop_ids=(free.tokens[2],))])
    assert last.finish == "stop"


def test_the_models_stop_ids_are_reported_but_not_applied(engine: TransformersEngine, bpe) -> None:
    assert engine.stop_ids == (bpe.eos_token_id,)
    assert any(bpe.eos_token_id in sample.tokens[:-1] for sample in engine.generate(requests(limit=40)))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([1], limit=0, seed=0), "limit=0 of request 1 must be at least 1"),
        (Request([], limit=1, seed=0), "the prompt of request 1 is empty"),
        (
            Request([3, 5000], limit=1, seed=0),
            "request 1 has ids from 3 to 5000, but the model has ids from 0 to 383",
        ),
        (Request([-1], limit=1, seed=0), "request 1 has ids from -1 to -1"),
        (
            Request([1], limit=1, seed=0, stop_strings=("a",)),
            "stop_strings, bad_words and structured of request 1 require a tokenizer",
        ),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused(random_model, request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        TransformersEngine(random_model).generate([Request([1], limit=1, seed=0), request_])


def test_a_failing_model_fails_only_its_call(engine: TransformersEngine) -> None:
    hook = engine.model.register_forward_pre_hook(_raise)
    hooks = [hook, engine.head.decoder.register_forward_pre_hook(_raise)]
    with pytest.raises(EngineError, match="batch of 4 requests: MemoryError: no room"):
        engine.generate(requests())
    for hook in hooks:
        hook.remove()
    assert len(engine.generate(requests())) == 4


def _raise(*_: object) -> None:
    raise MemoryError("no room")


# Weights


class Sender:
    """Sender of updates over the transports that need no second process."""

    def __init__(self, folder: Path):
        self.folder, self.files = folder, count()

    def steps(
        self, model: nn.Module, version: int, *, transport="direct", staged=True, bucket_bytes=1 << 16, names=None
    ):
        """Return all steps of an update as ``[step, info]``. By default ``names`` has one name of tied tensors."""
        tensors = model.state_dict() if names else dict(model.named_parameters())
        tensors = {name: tensors[name].detach() for name in names or tensors}
        manifest = [TensorInfo.of(name, tensor) for name, tensor in tensors.items()]
        buckets = plan_buckets(manifest, bucket_bytes)
        words = [[i.name, i.dtype, list(i.shape)] for i in manifest]
        yield "connect", {"transport": transport, "options": {}, "manifest": words, "staged": staged}
        yield "start", {"version": version}
        for number, (first, last) in enumerate(buckets):
            part = list(tensors.values())[first:last]
            payload = {"tensors": part}
            if transport == "shared_memory":
                path, size = str(self.folder / f"{next(self.files)}"), packed_size(manifest[first:last])
                os.close(os.open(path, os.O_CREAT, 0o600))  # as the engine demands
                pack(part, torch.from_file(path, shared=True, size=size, dtype=torch.uint8))
                payload = {"path": path, "size": size, "offset": 0, "nbytes": size, "uid": os.geteuid()}
            elif transport == "files":
                path = self.folder / f"{next(self.files)}"
                save_file({i.name: t.clone() for i, t in zip(manifest[first:last], part, strict=True)}, path)
                payload = {"path": str(path)}
            info = {"version": version, "bucket": number, "first": first, "last": last, "checksum": checksum(part)}
            yield "bucket", info | {"payload": payload}
        yield "finish", {"version": version}

    def send(self, engine: TransformersEngine, model: nn.Module, version: int, **settings) -> list[dict]:
        return [
            engine.update_weights(step, info, timeout=5.0) for step, info in self.steps(model, version, **settings)
        ][-1]


@pytest.fixture
def sender(tmp_path) -> Sender:
    return Sender(tmp_path)


@pytest.fixture(scope="module")
def make_source(make_model, bpe) -> Callable[[int], nn.Module]:
    """``make_source(seed)`` returns another model of the same shape."""
    return lambda seed: make_model(bpe, seed=seed, end_bias=seed % 7)


@pytest.mark.parametrize("transport", ["direct", "shared_memory", "files"])
@pytest.mark.parametrize("staged", [True, False])
def test_after_any_number_of_updates_the_engine_is_the_source(
    engine: TransformersEngine, sender: Sender, make_source, transport: str, staged: bool
) -> None:
    for version, bucket_bytes in zip(range(1, 5), (1, 1000, 1 << 16, 1 << 30), strict=True):
        source = make_source(version)
        settings = {"transport": transport, "staged": staged, "bucket_bytes": bucket_bytes}
        (report,) = sender.send(engine, source, version, **settings)
        sent = [info["checksum"] for step, info in sender.steps(source, version, **settings) if step == "bucket"]
        tensors = len(source.state_dict())
        assert report == {"rank": 0, "version": version, "checksums": sent, "tensors": tensors}
        assert same(state(engine.model), state(source))
        assert engine.generate(requests()) == [
            sample._replace(versions=[version] * 12) for sample in TransformersEngine(source).generate(requests())
        ]


def test_weights_are_cast_to_the_models_dtype(random_model, sender: Sender, make_source) -> None:
    engine = TransformersEngine(copy.deepcopy(random_model).bfloat16())
    sender.send(engine, make_source(3), 1)
    assert same(state(engine.model), state(copy.deepcopy(make_source(3)).bfloat16()))
    assert engine.model.dtype == torch.bfloat16


@pytest.fixture
def tied(tokenizer) -> TransformersEngine:
    return TransformersEngine(build_model(tokenizer, seed=0).eval())


HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("left_out", [HEAD, TABLE, None])
@pytest.mark.parametrize("staged", [True, False])
def test_tied_tensors_come_under_either_name_or_both(
    tied: TransformersEngine, tokenizer, sender: Sender, left_out: str | None, staged: bool
) -> None:
    source = build_model(tokenizer, seed=1)
    with torch.no_grad():
        source.get_input_embeddings().weight[0, 0] = torch.nan  # NaN, which does not equal itself
    sender.send(tied, source, 1, staged=staged, names=[name for name in source.state_dict() if name != left_out])
    assert checksum(list(state(tied.model).values())) == checksum(list(state(source).values()))
    assert tied.model.lm_head.weight is tied.model.get_input_embeddings().weight


@pytest.mark.parametrize("staged", [True, False])
def test_an_untied_source_of_a_tied_engine_is_found_out(
    tied: TransformersEngine, tokenizer, sender: Sender, staged: bool
) -> None:
    source, before = build_model(tokenizer, seed=1), state(tied.model)
    source.lm_head.weight = nn.Parameter(source.lm_head.weight * 2)
    with pytest.raises(EngineError, match=f"{HEAD} and {TABLE} are one tensor in the engine's model but differ"):
        sender.send(tied, source, 1, staged=staged)
    assert tied.version == 0
    assert (same(state(tied.model), before), tied.failed_version) == ((True, None) if staged else (False, 1))


def connect(model: nn.Module, **changes) -> dict:
    manifest = [[*TensorInfo.of(name, tensor)] for name, tensor in model.state_dict().items()]
    return {"transport": "direct", "options": {}, "manifest": manifest, "staged": True} | changes


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda i: i["manifest"].append(["model.extra", "float32", [1]]),
            "model has no tensor model.extra; it has model",
        ),
        (lambda i: i["manifest"][0].__setitem__(2, [384, 32]), r"has shape \[384, 64\], but \[384, 32\] is to come"),
        (
            lambda i: i["manifest"].pop(3),
            r"1 of the engine's tensors would keep their old weights, the first is model\.lay",
        ),
        (lambda i: i.update(transport="pigeon"), "transport='pigeon' must be one of .*'direct'"),
        (lambda i: i.pop("staged"), "connect of an update failed: KeyError: 'staged'"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(engine: TransformersEngine, spoil: Callable, message: str) -> None:
    info = connect(engine.model)
    spoil(info)
    with pytest.raises(EngineError, match=message):
        engine.update_weights("connect", info, timeout=1.0)
    with pytest.raises(EngineError, match="no transport is connected"):
        engine.update_weights("start", {"version": 1}, timeout=1.0)


def corrupt(steps: list) -> None:
    tensors = steps[-2][1]["payload"]["tensors"]
    tensors[-1] = tensors[-1].clone()
    tensors[-1].view(-1)[0] += 1


def swap(steps: list) -> None:
    steps[2], steps[3] = steps[3], steps[2]


def lose(steps: list) -> None:
    del steps[-2]


def cut(steps: list) -> None:
    steps[-2][1]["payload"]["tensors"].pop()


def lose_payload(steps: list) -> None:
    del steps[-2][1]["payload"]


def change_version(steps: list) -> None:
    steps[-1][1]["version"] = 9


FAULTS = {
    corrupt: "is corrupt: its checksum is",
    swap: "bucket 1 of version 1 arrived, expected bucket 0",
    lose: "tensors; .* is the first missing one",
    cut: "has .* tensors, but .* were announced",
    lose_payload: "bucket of an update failed: KeyError: 'payload'",
    change_version: r"no update to version 9 is open \(one to version 1 is\)",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("staged", [True, False])
def test_a_failed_update_changes_nothing_or_fails_the_engine(
    engine: TransformersEngine, sender: Sender, make_source, fault: Callable, staged: bool
) -> None:
    source, before, samples = make_source(1), state(engine.model), engine.generate(requests())
    steps = list(sender.steps(source, 1, staged=staged))
    fault(steps)
    with pytest.raises(EngineError, match=FAULTS[fault]):
        for step, info in steps:
            engine.update_weights(step, info, timeout=1.0)
    engine.update_weights("abort", timeout=1.0)
    assert engine.version == 0
    if staged or fault is swap:
        assert same(state(engine.model), before)
        assert engine.failed_version is None and engine.generate(requests()) == samples
    else:
        assert engine.failed_version == 1
        with pytest.raises(EngineError, match="update to version 1 failed"):
            engine.generate(requests())
    with pytest.raises(EngineError, match="no update to version 1 is open"):
        engine.update_weights("finish", {"version": 1}, timeout=1.0)
    sender.send(engine, source, 2, staged=staged)
    assert same(state(engine.model), state(source))
    assert (engine.version, engine.failed_version) == (2, None)


def test_a_late_step_leaves_a_newer_update_open(engine: TransformersEngine, sender: Sender, make_source) -> None:
    (_, *late), source = list(sender.steps(make_source(1), 1)), make_source(2)
    connect, start, *rest = list(sender.steps(source, 2))
    for step, info in (connect, start):
        engine.update_weights(step, info, timeout=1.0)
    for step, info in (late[1], late[-1]):
        with pytest.raises(EngineError, match="no update to version 1 is open"):
            engine.update_weights(step, info, timeout=1.0)
    for step, info in rest:
        engine.update_weights(step, info, timeout=1.0)
    assert engine.version == 2 and same(state(engine.model), state(source))


def test_adapters_are_refused_with_a_way_out(engine: TransformersEngine) -> None:
    with pytest.raises(EngineError, match="send the merged model with WeightPublisher, or use a vLLM engine"):
        engine.update_weights("adapter", {"version": 1, "path": "/nowhere", "checksum": ""}, timeout=1.0)


# Pauses


def slow_down(engine: TransformersEngine) -> tuple[threading.Event, threading.Event]:
    """Return two events: the model sets the first when it runs, and waits for the second."""
    running, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        running.set()
        assert go_on.wait(60)

    engine.head.decoder.register_forward_pre_hook(wait)
    return running, go_on


def test_paused_requests_wait_and_then_have_the_new_weights(
    engine: TransformersEngine, sender: Sender, make_source, wait_until
) -> None:
    with ThreadPoolExecutor() as pool:
        engine.pause()
        waiting = pool.submit(engine.generate, requests())
        wait_until(lambda: waiting.done() or engine._turn._waiters)
        sender.send(engine, make_source(1), 1)
        assert not waiting.done()
        engine.resume()
        assert {v for sample in waiting.result(60) for v in sample.versions} == {1}


def test_pauses_and_updates_wait_for_the_running_batch(engine: TransformersEngine) -> None:
    running, go_on = slow_down(engine)
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(engine.generate, requests())
        assert running.wait(60)
        pausing = pool.submit(engine.pause, timeout=60.0)
        with pytest.raises(EngineTimeoutError, match="not free within 0.05 s: another call is running"):
            engine.update_weights("connect", connect(engine.model), timeout=0.05)
        assert not pausing.done()
        go_on.set()
        pausing.result(60)
        assert len(batch.result(60)) == 4


def test_a_pause_that_takes_too_long_is_taken_back(engine: TransformersEngine) -> None:
    running, go_on = slow_down(engine)
    engine.request_timeout = 60.0
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(engine.generate, requests())
        assert running.wait(60)
        with pytest.raises(EngineTimeoutError, match="timeout=0.01 s; the engine is not paused"):
            engine.pause("abort", timeout=0.01)
        go_on.set()
        assert len(batch.result(60)) == len(engine.generate(requests())) == 4


def test_a_pause_without_resume_is_an_error(random_model) -> None:
    engine = TransformersEngine(random_model, request_timeout=0.05)
    engine.pause()
    with pytest.raises(EngineTimeoutError, match=r"not free within 0.05 s: the engine is paused; call resume\(\)"):
        engine.generate(requests())


def test_every_sample_is_of_the_version_that_it_names(
    engine: TransformersEngine, sender: Sender, make_source, wait_until
) -> None:
    sources = [copy.deepcopy(engine.model), *(make_source(version) for version in range(1, 6))]
    expected = [TransformersEngine(source).generate(requests()) for source in sources]
    stop, drawn = threading.Event(), []

    def sample() -> None:
        while not stop.is_set():
            drawn.append(engine.generate(requests()))

    with ThreadPoolExecutor() as pool:
        workers = [pool.submit(sample) for _ in range(3)]
        try:
            for version in range(1, 6):
                wait_until(lambda v=version - 1: sum(samples[0].versions[0] == v for samples in list(drawn)) >= 3)
                engine.pause()
                sender.send(engine, sources[version], version)
                engine.resume()
        finally:
            stop.set()
        for worker in workers:
            worker.result(60)
    for samples in drawn:
        (version,) = {v for sample in samples for v in sample.versions}
        for found, wanted in zip(samples, expected[version], strict=True):
            assert found.tokens == wanted.tokens
            torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
    assert {samples[0].versions[0] for samples in drawn} >= set(range(5))


# Sleep and close


def test_a_sleeping_engine_refuses_requests_and_takes_weights(engine: TransformersEngine, sender, make_source) -> None:
    engine.sleep()
    with pytest.raises(EngineError, match="asleep; call wake"):
        engine.generate(requests())
    sender.send(engine, make_source(2), 2)
    engine.wake()
    assert engine.generate(requests())[0].versions == [2] * 12


@needs_gpu
def test_sleep_moves_the_model_off_the_gpu_and_back(random_model, sender: Sender, make_source) -> None:
    engine = TransformersEngine(copy.deepcopy(random_model).cuda())
    before = engine.generate(requests())
    engine.sleep()
    assert engine.model.device.type == "cpu"
    engine.wake()
    assert engine.model.device.type == "cuda"
    assert [s.tokens for s in engine.generate(requests())] == [s.tokens for s in before]
    for version, staged in enumerate((True, False), 1):
        sender.send(engine, make_source(version), version, staged=staged)
        assert same(state(engine.model.cpu()), state(make_source(version)))
        engine.model.cuda()


def test_a_closed_engine_refuses_everything(engine: TransformersEngine) -> None:
    engine.check_health()
    engine.close()
    engine.close()
    calls = [lambda: engine.generate(requests()), engine.check_health, engine.pause, engine.sleep, engine.wake]
    for call in [*calls, lambda: engine.update_weights("abort", timeout=1.0)]:
        with pytest.raises(EngineError, match="this TransformersEngine is closed"):
            call()


def test_closing_ends_the_wait_of_paused_requests(engine: TransformersEngine, wait_until) -> None:
    engine.pause()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.generate, requests())
        wait_until(lambda: waiting.done() or engine._turn._waiters)
        engine.close()
        with pytest.raises(EngineError, match="is closed"):
            waiting.result(60)


def test_arguments_are_checked(random_model) -> None:
    with pytest.raises(ValueError, match="request_timeout=0"):
        TransformersEngine(random_model, request_timeout=0)
    with pytest.raises(ValueError, match="in_flight='keep'"):
        TransformersEngine(random_model).pause("keep")
    with pytest.raises(EngineError, match="TransformersEngine cannot be restarted"):
        TransformersEngine(random_model).restart()
