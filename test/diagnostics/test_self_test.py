from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.engines import GROUP
from torchrl_rloo.diagnostics.self_test import self_test
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines.base import Engine, EngineError
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.weight_update import InProcessWeightUpdater, WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

TOKENIZER = build_tokenizer()


def untied(seed: int) -> nn.Module:
    """Give a model an untied head equal to the embedding, as a stale copy of a tied head."""
    model = build_model(TOKENIZER, seed)
    model.config.tie_word_embeddings = False
    model.lm_head = nn.Linear(64, len(TOKENIZER), bias=False)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    return model


class Copy(WeightUpdater):
    """Updater that copies given tensors into an engine's model."""

    def __init__(self, source: nn.Module, engine: TransformersEngine, sends: Callable[[str], bool] = lambda name: True):
        self.source, self.target, self.sends, self.engine = source, engine.model, sends, engine
        self.pushes: list[int] = []

    @torch.no_grad()
    def _send(self, version: int) -> None:
        self.pushes.append(version)
        weights = self.source.state_dict()
        for name, tensor in self.target.state_dict().items():
            if self.sends(name):
                tensor.copy_(weights[name])
        self.engine.version = version


def copies(dtype: torch.dtype | None = None) -> tuple[nn.Module, TransformersEngine]:
    model = build_model(TOKENIZER, 0).train()
    return model, TransformersEngine(copy.deepcopy(model).eval().to(dtype))


def test_a_working_updater_passes_and_everything_is_as_before():
    model = untied(0).train()
    engine = TransformersEngine(untied(3).eval())  # weights of another run, until the first push
    model.model.norm.requires_grad_(False)
    model.model.norm.eval()
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before, modes = copy.deepcopy(model), [m.training for m in model.modules()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    engine.version = 7
    updater = Copy(model, engine)
    found = self_test(updater, model, TOKENIZER, engine)
    assert max(found.gap_before, found.gap_changed, found.gap_after) < 1e-5
    assert found.movement > 0.5
    assert updater.pushes == [1, 2, 3] and engine.version == 3, "a version is never used for other weights"
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [m.training for m in model.modules()] == modes
    for p, q, theirs, gradient in zip(
        model.parameters(), before.parameters(), engine.model.parameters(), gradients, strict=True
    ):
        assert torch.equal(p, q) and torch.equal(p, theirs) and p.requires_grad == q.requires_grad
        assert p.grad is gradient is None or torch.equal(p.grad, gradient)


def test_the_order_of_pushes_is_present_changed_present():
    model, engine = copies()
    seen = []

    class Watching(Copy):
        def _send(self, version: int) -> None:
            super()._send(version)
            seen.append([p.detach().clone() for p in model.parameters()])

    self_test(Watching(model, engine), model, TOKENIZER, engine)
    present, changed, again = seen
    assert all(torch.equal(p, q) for p, q in zip(present, again, strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(present, changed, strict=True))  # including zero biases


@pytest.mark.parametrize("name", [n for n, _ in build_model(TOKENIZER, 0).named_parameters()])
def test_one_tensor_that_is_not_sent_is_noticed(name: str):
    model, engine = copies()
    kept = {name, "lm_head.weight"} if "embed" in name else {name}
    with pytest.raises(WeightSyncError, match="changed weights did not arrive, although the push succeeded"):
        self_test(Copy(model, engine, lambda n: n not in kept), model, TOKENIZER, engine)


def test_an_updater_that_does_nothing_is_noticed():
    model, engine = copies()
    with pytest.raises(WeightSyncError, match=r"^the changed weights did not arrive.*gap_before .*movement"):
        self_test(Copy(model, engine, lambda name: False), model, TOKENIZER, engine)


def test_a_stale_tied_head_is_noticed():
    model, engine = build_model(TOKENIZER, 0), TransformersEngine(untied(0).eval())
    with pytest.raises(WeightSyncError, match="changed weights did not arrive"):
        self_test(Copy(model, engine, lambda name: name != "lm_head.weight"), model, TOKENIZER, engine)


def test_two_tensors_that_change_places_are_noticed():
    model, engine = copies()

    class Swapping(Copy):
        def _send(self, version: int) -> None:
            super()._send(version)
            attention = self.target.model.layers[0].self_attn
            attention.k_proj.weight.data, attention.v_proj.weight.data = (
                attention.v_proj.weight.data,
                attention.k_proj.weight.data,
            )

    with pytest.raises(WeightSyncError, match="differ with the current weights"):
        self_test(Swapping(model, engine), model, TOKENIZER, engine)


def test_weights_that_do_not_come_back_are_noticed():
    model, engine = copies()

    class Twice(Copy):
        def _send(self, version: int) -> None:
            if len(self.pushes) == 2:
                self.sends = lambda name: "layers.1" not in name
            super()._send(version)

    with pytest.raises(WeightSyncError, match="current weights did not return"):
        self_test(Twice(model, engine), model, TOKENIZER, engine)


def test_a_failure_leaves_no_changed_weights_in_the_engine():
    model, engine = copies()

    class Failing(Copy):
        def _send(self, version: int) -> None:
            super()._send(version)
            if len(self.pushes) == 2:
                raise EngineError("one engine has it, another one not")

    with pytest.raises(WeightSyncError, match="pushing changed weights failed"):
        self_test(Failing(model, engine), model, TOKENIZER, engine)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), engine.model.parameters(), strict=True))


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_push_that_fails_leaves_the_model_as_it_was(number: int):
    model, engine = copies()
    before = copy.deepcopy(model)

    class Failing(Copy):
        def _send(self, version: int) -> None:
            if len(self.pushes) == number:
                raise EngineError("the line is dead")
            super()._send(version)

    what = ["the current weights", "changed weights", "the current weights again"][number]
    with pytest.raises(WeightSyncError, match=f"pushing {what} failed: EngineError: the line is dead"):
        self_test(Failing(model, engine), model, TOKENIZER, engine)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
    assert model.training


def test_an_engine_in_half_precision_passes_by_its_own_gap():
    model, engine = copies(torch.bfloat16)
    found = self_test(InProcessWeightUpdater(model, engine.model), model, TOKENIZER, engine)
    assert 1e-3 < found.gap_before < 0.2 and found.movement > 1
    with pytest.raises(WeightSyncError, match="differ with the current weights"):
        self_test(InProcessWeightUpdater(model, engine.model), model, TOKENIZER, engine, tolerance=1e-3)
    with pytest.raises(WeightSyncError, match="the changed weights did not arrive"):
        self_test(Copy(model, engine, lambda name: False), model, TOKENIZER, engine)


def test_a_change_too_small_to_tell_is_an_error():
    model, engine = copies()
    model.requires_grad_(False)
    model.model.layers[1].self_attn.k_proj.bias.requires_grad_(True)
    with pytest.raises(WeightSyncError, match="moved the model's log-probs too little"):
        self_test(InProcessWeightUpdater(model, engine.model), model, TOKENIZER, engine, tolerance=0.1)


def test_all_engines_are_tested():
    model, engine = copies()
    other = TransformersEngine(copy.deepcopy(model).eval())
    with pytest.raises(WeightSyncError, match="did not arrive"):
        self_test(InProcessWeightUpdater(model, engine.model), model, TOKENIZER, [engine, other])
    with pytest.raises(ValueError, match=r"engines=\[\]"):
        self_test(InProcessWeightUpdater(model, engine.model), model, TOKENIZER, [])


# With vLLM.


@pytest.fixture
def engine(vllm_engine: Engine) -> Engine:
    return vllm_engine


def test_vllm_passes(engine: Engine):
    model = build_model(TOKENIZER, 1)
    publisher = WeightPublisher(model, engine)
    found = self_test(publisher, model, TOKENIZER, engine)
    assert max(found.gap_before, found.gap_changed, found.gap_after) < 1e-5 and found.movement > 0.5
    assert engine.version == publisher.version == 3


def test_vllm_with_a_stale_prefix_cache_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    model = build_model(TOKENIZER, 1)
    monkeypatch.setattr(engine, "_reset_cache", lambda: None)
    with pytest.raises(WeightSyncError, match="differ with the current weights|did not arrive"):
        self_test(WeightPublisher(model, engine), model, TOKENIZER, engine)
    monkeypatch.undo()
    engine._reset_cache()
    self_test(WeightPublisher(model, engine), model, TOKENIZER, engine)


def test_vllm_that_misses_a_tensor_is_noticed(engine: Engine):
    """A tensor that always arrives with its first values fails the test, although the manifest is complete."""
    model = build_model(TOKENIZER, 1)
    name = "model.layers.0.mlp.down_proj.weight"
    first = model.get_parameter(name).detach().clone()

    def convert(found: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(found, first if found == name and not tensor.is_meta else tensor)]

    with pytest.raises(WeightSyncError, match="part of the changed weights did not arrive"):
        self_test(WeightPublisher(WeightSource(model, convert=convert), engine), model, TOKENIZER, engine)


@pytest.mark.parametrize("case", ["trained", "frozen copy", "of another model"])
def test_vllm_with_an_adapter(engine: Engine, case: str):
    peft = pytest.importorskip("peft")
    from torchrl_rloo.weight_update.lora import LoRAPublisher

    WeightPublisher(build_model(TOKENIZER, 0), engine).push_weights()
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(build_model(TOKENIZER, 0), config)  # its second factors are zeros
    before = copy.deepcopy(model)
    if case == "frozen copy":
        model.requires_grad_(False)
    if case != "of another model":
        found = self_test(LoRAPublisher(model, engine), model, TOKENIZER, engine)
        assert max(found.gap_before, found.gap_changed, found.gap_after) < 1e-5 and found.movement > 0.05
    else:
        with pytest.raises(WeightSyncError, match="the changed weights did not arrive"):
            self_test(LoRAPublisher(before, engine), model, TOKENIZER, engine)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))
