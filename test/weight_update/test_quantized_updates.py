"""Weight updates from a trainer with a frozen base in 4 bits: engines hold the numbers that it computes with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from support.engines import GROUP
from support.weights import push
from torchrl_rloo.engines.base import Engine
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.modules import add_adapter, load_model, save_merged
from torchrl_rloo.weight_update import WeightUpdater
from torchrl_rloo.weight_update.four_bit import four_bit_layers
from torchrl_rloo.weight_update.lora import LoRAPublisher
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

LINEAR = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]  # v_proj and up_proj stay as they are


def change(model: nn.Module, seed: int) -> nn.Module:
    """Give the adapter random weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = 0.12 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def trainer(engine_checkpoint: Path) -> nn.Module:
    """Model of the engines' checkpoint in 4 bits, with a random adapter."""
    model, _ = load_model(engine_checkpoint, quantization="nf4")
    return change(add_adapter(model, {"r": 4, "lora_alpha": 8, "target_modules": LINEAR}), 0)


def test_whole_merged_weights_are_sent(trainer: nn.Module, models: list[PreTrainedModel]) -> None:
    source, plain = WeightSource(trainer), WeightSource(models[0])
    assert source.manifest() == plain.manifest()
    names = [info.name for info in source.manifest()]
    found = dict(zip(names, source.tensors(0, len(names)), strict=True))
    eye = torch.eye(256, dtype=torch.float32)
    for name, layer in four_bit_layers(trainer).items():
        outer = trainer.get_submodule(name.removesuffix(".base_layer"))
        with torch.no_grad():  # the weight is the layer's product with the identity
            inputs = eye[: layer.in_features, : layer.in_features]
            product = outer(inputs).T - (0 if layer.bias is None else layer.bias[:, None])
        tensor = found[name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"]
        assert tensor.dtype is torch.float32
        torch.testing.assert_close(tensor, product, rtol=0, atol=1e-6)
    halved = WeightSource(trainer, dtype=torch.bfloat16)
    assert {info.dtype for info in halved.manifest()} == {"bfloat16"}
    assert torch.equal(halved.tensors(1, 2)[0], source.tensors(1, 2)[0].bfloat16())


def check_updates(
    engine: Engine, trainer: nn.Module, updater: WeightUpdater, log_prob_error: Callable[..., float]
) -> None:
    for step in range(2):
        change(trainer, step + 1)
        assert log_prob_error(engine, trainer) > 0.1
        push(updater, engine.version + 1)
        assert log_prob_error(engine, trainer) < 1e-5


def test_an_engine_in_this_process_follows(
    trainer: nn.Module, engine_checkpoint: Path, log_prob_error: Callable[..., float]
) -> None:
    engine = TransformersEngine(load_model(engine_checkpoint)[0])
    check_updates(engine, trainer, WeightPublisher(trainer, engine), log_prob_error)


def test_vllm_follows(vllm_engine: Engine, trainer: nn.Module, log_prob_error: Callable[..., float]) -> None:
    check_updates(vllm_engine, trainer, WeightPublisher(trainer, vllm_engine), log_prob_error)


def test_vllm_follows_the_adapter_over_the_dequantized_base(
    vllm_engine: Engine, trainer: nn.Module, tokenizer, log_prob_error: Callable[..., float], tmp_path: Path
) -> None:
    save_merged(trainer, tokenizer, tmp_path / "base", adapter=False)
    push(WeightPublisher(load_model(tmp_path / "base")[0], vllm_engine), vllm_engine.version + 1)
    with trainer.disable_adapter():
        assert log_prob_error(vllm_engine, trainer) < 1e-5
    check_updates(vllm_engine, trainer, LoRAPublisher(trainer, vllm_engine), log_prob_error)
