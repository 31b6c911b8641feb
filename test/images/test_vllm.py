"""Tests of vLLM engines with images: exact ids, log-probs and weights of a tiny vision-language model.

vLLM's build for CPUs runs Idefics3 without torchvision, which the processors of the other families import.
"""

from __future__ import annotations

import copy
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from support.engines import GROUP, VLLMEngines
from support.vision_models import build, picture
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.diagnostics.self_test import self_test
from torchrl_rloo.engines import AsyncVLLMEngine, Engine, EngineError, Request, Sample, VLLMServer
from torchrl_rloo.engines.base import check_sample
from torchrl_rloo.engines.vllm_server import server_command, server_environment
from torchrl_rloo.functional.sampling import SamplingDistribution
from torchrl_rloo.images.encoder import digests
from torchrl_rloo.modules import TransformersWrapper, add_adapter, load_model, save_model, vLLMWrapper
from torchrl_rloo.weight_update import LoRAPublisher, WeightPublisher, WeightSource, WeightSyncError

pytestmark = pytest.mark.xdist_group(GROUP)

EXACT = 1e-5  # float32; other weights and other pixels differ by more than 0.1
STALE = 0.1
SETTINGS = {"dtype": "float32", "max_model_len": 512}


class Setup(NamedTuple):
    """Saved model, which tests must not change, and images."""

    folder: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    images: tuple[str, str]

    def load(self, **arguments: Any) -> PreTrainedModel:
        """Return a new copy of the model."""
        return load_model(self.folder, **arguments)[0]

    def request(self, text: str, paths: Sequence[str] = (), seed: int = 0, **settings: Any) -> Request:
        """Return a request whose ``text`` has a placeholder for each image."""
        encoder = self.tokenizer.images
        ids = self.tokenizer(encoder.expand(text, paths), add_special_tokens=False)["input_ids"]
        distribution = SamplingDistribution(excluded=encoder.excluded, **settings)
        return Request(ids, 12, seed, distribution, images=encoder.spans(ids, paths))

    def requests(self) -> list[Request]:
        """Return requests with one image, two images, and none."""
        one, two = self.images
        return [
            self.request("user\n<image>What color is it?", [one], 0),
            self.request("<image>How many<image>\n\n", [one, two], 1),
            self.request("What color is it?", [], 2),
            self.request("<image><image>It", [two, one], 3, top_k=20, repetition_penalty=1.3),
        ]


def gap(model: PreTrainedModel, setup: Setup, requests: Sequence[Request], samples: Sequence[Sample]) -> float:
    """Return the largest difference of the samples' log-probs from the scorer's."""
    found = 0.0
    for request, sample in zip(requests, samples, strict=True):
        d, ids = request.distribution, torch.tensor([*request.prompt, *sample.tokens])
        settings = {name: value for name, value in vars(d).items() if name != "excluded"}
        scorer = TransformersWrapper(model, tokenizer=setup.tokenizer, generate=False, generate_kwargs=settings)
        row = {keys.TOKENS: ids, keys.ACTION_MASK: torch.arange(len(ids)) >= len(request.prompt)}
        if request.images:
            row[keys.IMAGES] = digests([image.path for image in request.images])
        with torch.no_grad():
            scored = scorer.score(stack_rows([TensorDict(row, [])]), entropy=False).log_probs[0]
        found = max(found, (scored - torch.tensor(sample.log_probs)).abs().max().item())
    return found


def change(model: PreTrainedModel, seed: int = 0) -> None:
    """Change the trained parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("idefics3")
    model, tokenizer, store = build("idefics3", folder / "images", head_dim=32)  # as vLLM's attention requires
    save_model(model, tokenizer, folder / "model")
    return Setup(folder / "model", model, tokenizer, (store.add(picture(50, 70)), store.add(picture(90, 20, 1))))


@pytest.fixture
def engine(vllm_engines: VLLMEngines, setup: Setup) -> Engine:
    engine = vllm_engines.get(setup.folder, enable_lora=True, **SETTINGS)
    if engine.version or engine._adapter or engine.failed_version is not None:
        WeightPublisher(setup.load(train_vision=True), engine).initialize()
    return engine


def test_samples_are_of_the_model_and_the_images(engine: Engine, setup: Setup):
    requests = setup.requests()
    samples = engine.generate(requests)
    assert gap(setup.model, setup, requests, samples) < EXACT
    # Another image of the same size gives other log-probs; otherwise the test could not fail
    other = setup.tokenizer.images.store.add(picture(50, 70, 2))
    wrong = [replace(requests[0], images=(requests[0].images[0]._replace(path=other),))]
    assert gap(setup.model, setup, wrong, samples[:1]) > STALE
    # The same images again come from vLLM's caches
    assert [sample.tokens for sample in engine.generate(requests)] == [sample.tokens for sample in samples]


def test_other_ids_than_those_trained_on_are_refused(engine: Engine, setup: Setup):
    request = setup.requests()[0]
    wrong = replace(request, images=(request.images[0]._replace(path=setup.images[1]),))  # has fewer tiles
    with pytest.raises(EngineError, match="ids, which differ from"):
        engine.generate([wrong])
    assert gap(setup.model, setup, [request], engine.generate([request])) < EXACT


def test_excluded_ids_have_probability_zero(vllm_engines: VLLMEngines, setup: Setup, tmp_path: Path):
    model = copy.deepcopy(setup.model)
    excluded = setup.tokenizer.images.excluded
    with torch.no_grad():
        model.lm_head.weight[list(excluded)] *= 50  # nearly all probability at about half of the tokens
    save_model(model, setup.tokenizer, tmp_path)
    engine = vllm_engines.get(tmp_path, enable_lora=False, **SETTINGS)
    texts = [("<image>What", {}), ("<image>How", {"temperature": 0.3}), ("It", {"top_p": 0.8}), ("x", {"top_k": 5})]
    requests = [setup.request(t, setup.images[: t.count("<image>")], n, **s) for n, (t, s) in enumerate(texts)]
    samples = engine.generate(requests)
    assert not set(excluded) & {token for sample in samples for token in sample.tokens}
    assert gap(model, setup, requests, samples) < EXACT
    # Without the exclusion, they are sampled, and such an answer is refused
    plain = [replace(request, distribution=SamplingDistribution()) for request in requests]
    answers = engine.generate(plain)
    assert set(excluded) & {token for sample in answers for token in sample.tokens}
    answer = next(sample for sample in answers if set(excluded) & set(sample.tokens))
    with pytest.raises(EngineError, match=f"the excluded id {excluded[0]}"):
        check_sample(answer, requests[0], vocab_size=engine.vocab_size, version=0)


def test_turns_with_new_images_are_exact(engine: Engine, setup: Setup):
    tokenizer = setup.tokenizer
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "seed": 0})
    scorer = policy.get_new_version(generate=False, model=setup.model)
    first = setup.request("<image>What color is it?", setup.images[:1]).prompt
    row = TensorDict({keys.PROMPT_TOKENS: torch.tensor(first), keys.IMAGES: digests(setup.images[:1])}, [])
    row = policy(stack_rows([row]))[0]
    # The environment answers with another image
    answer = torch.tensor(setup.request("<image>How many?", setup.images[1:]).prompt)
    row[keys.PROMPT_TOKENS] = torch.cat([row[keys.TOKENS], answer])
    row[keys.ACTION_MASK] = torch.cat([row[keys.ACTION_MASK], torch.zeros_like(answer, dtype=torch.bool)])
    row[keys.LOG_PROBS] = torch.cat([row[keys.LOG_PROBS], torch.zeros(len(answer))])
    row[keys.IMAGES] = digests(setup.images)
    rows = policy(stack_rows([row]))
    mask = rows[0][keys.ACTION_MASK]
    assert mask.sum() == 12
    with torch.no_grad():
        scored = scorer.score(rows, entropy=False).log_probs[0]
    assert (scored - rows[0][keys.LOG_PROBS][mask]).abs().max() < EXACT


def test_pushes_leave_out_frozen_towers_and_caches_of_old_weights(engine: Engine, setup: Setup):
    trained, requests = setup.load(), setup.requests()
    before = engine.generate(requests)
    publisher = WeightPublisher(trained, engine)
    tower = [info.name for info, _ in publisher.source.frozen]
    assert tower and all(name.startswith("model.vision_model.") for name in tower)
    assert not set(tower) & {info.name for info in publisher.source.manifest()}
    for seed in range(2):
        change(trained, seed)
        assert gap(trained, setup, requests, before) > STALE
        publisher.push_weights()
        before = engine.generate(requests)
        assert gap(trained, setup, requests, before) < EXACT
    # A tower that is not the engine's is found before anything is sent
    with torch.no_grad():
        trained.model.vision_model.post_layernorm.weight.add_(1)
    with pytest.raises(
        WeightSyncError, match="the frozen tensor model.vision_model.post_layernorm.weight has checksum"
    ):
        WeightPublisher(trained, engine).push_weights()
    assert engine.generate(requests) == [s._replace(versions=[engine.version] * 12) for s in before]
    trained.requires_grad_(True)
    with pytest.raises(WeightSyncError, match="was frozen, but is trained by now"):
        publisher.push_weights()


def test_a_trained_tower_is_sent(engine: Engine, setup: Setup):
    trained, requests = setup.load(train_vision=True), setup.requests()
    publisher = WeightPublisher(trained, engine)
    assert not publisher.source.frozen
    engine.generate(requests)
    change(trained)
    publisher.push_weights()
    assert gap(trained, setup, requests, engine.generate(requests)) < EXACT


@pytest.mark.parametrize("merged", [True, False], ids=["merged", "adapter"])
def test_adapters_are_of_the_language_model(engine: Engine, setup: Setup, merged: bool):
    adapted, requests = add_adapter(setup.load(), {"r": 4, "target_modules": "all-linear"}), setup.requests()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 28 and all(".text_model.layers." in name for name in trained)
    change(adapted)
    publisher = WeightPublisher(adapted, engine) if merged else LoRAPublisher(adapted, engine)
    engine.generate(requests)
    publisher.push_weights()
    assert gap(adapted, setup, requests, engine.generate(requests)) < EXACT


def test_the_self_test_sees_the_connector(engine: Engine, setup: Setup):
    trained = setup.load()
    result = self_test(WeightPublisher(trained, engine), trained, setup.tokenizer, engine)
    assert max(result.gap_before, result.gap_changed, result.gap_after) < EXACT and result.movement > STALE

    def without_connector(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor * 0.9 if "connector" in name and not tensor.is_meta else tensor)]

    source = WeightSource(trained, convert=without_connector)
    with pytest.raises(WeightSyncError, match="differ with the current weights|did not arrive"):
        self_test(WeightPublisher(source, engine), trained, setup.tokenizer, engine, tolerance=1e-3)


def test_images_must_be_read_as_in_training(engine: Engine, setup: Setup):
    tokenizer = copy.copy(setup.tokenizer)
    tokenizer.images = copy.copy(setup.tokenizer.images)
    tokenizer.images.family = copy.copy(tokenizer.images.family)
    tokenizer.images.family.processor = type(setup.tokenizer.images.family.processor)(
        size={"longest_edge": 96}, max_image_size={"longest_edge": 32}
    )
    assert engine.image_settings == setup.tokenizer.images.settings()
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 2})
    prompt = torch.tensor(setup.request("<image>", setup.images[:1]).prompt)
    row = TensorDict({keys.PROMPT_TOKENS: prompt, keys.IMAGES: digests(setup.images[:1])}, [])
    with pytest.raises(ValueError, match=r"sees images differently from the scorer: size=.*64.* instead of .*96"):
        policy(stack_rows([row]))


@pytest.mark.slow
def test_an_engine_in_its_own_process(vllm, setup: Setup):
    with AsyncVLLMEngine(setup.folder, request_timeout=120.0, **SETTINGS) as engine:
        check_exact(engine, setup)


@pytest.fixture
def server(vllm, setup: Setup, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = server_command(setup.folder, port=port, **SETTINGS)
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=server_environment(), stdout=log, stderr=log)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(60)


@pytest.mark.slow
def test_a_server(server: str, setup: Setup):
    with VLLMServer(server, connect_timeout=200.0, request_timeout=120.0) as engine:
        check_exact(engine, setup)


def check_exact(engine: Engine, setup: Setup) -> None:
    """Compare an engine with the scorer before and after a push."""
    trained, requests = setup.load(), setup.requests()
    assert engine.image_settings == setup.tokenizer.images.settings()
    assert gap(setup.model, setup, requests, engine.generate(requests)) < EXACT
    change(trained)
    WeightPublisher(trained, engine).push_weights()
    assert gap(trained, setup, requests, engine.generate(requests)) < EXACT
    wrong = replace(requests[0], images=requests[1].images[1:])
    with pytest.raises(EngineError, match="ids, which differ from"):
        engine.generate([wrong])
