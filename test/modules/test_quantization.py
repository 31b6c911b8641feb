"""Frozen weights in 4 bits under LoRA: exact against a float model with the dequantized weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict, TensorDictBase
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.embedded import build_model
from torchrl_rloo.modules import (
    AdapterReference,
    TransformersWrapper,
    add_adapter,
    count_trained,
    frozen_copy,
    load_model,
    save_merged,
    save_model,
)
from torchrl_rloo.weight_update import InProcessWeightUpdater
from torchrl_rloo.weight_update.four_bit import (
    check_shardable,
    compute_dtype,
    dequantize,
    four_bit_layers,
    use_exact_products,
)

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

# The 16 values of NF4 (Dettmers et al. 2023, appendix E)
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
DOUBLE = {"bnb_4bit_use_double_quant": True}
IDS = torch.arange(5, 29)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Directory of a small saved model."""
    path = tmp_path_factory.mktemp("model")
    build_model(tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def load(folder: Path, quantization: str | None = "nf4", **settings) -> PreTrainedModel:
    return load_model(folder, quantization=quantization, **settings)[0]


def adapted(model: PreTrainedModel) -> nn.Module:
    """Add an adapter with random weights, equal for any base model."""
    model, generator = add_adapter(model, LORA), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def twin_of(model: nn.Module, folder: Path, by: Callable[[nn.Module], torch.Tensor]) -> PreTrainedModel:
    """Return a float model with the weights that ``by`` computes from the 4-bit layers of ``model``."""
    twin = load(folder, None)
    for name, layer in four_bit_layers(model).items():
        twin.get_submodule(name).weight.data = by(layer)
    return twin


def decode(layer: nn.Module) -> torch.Tensor:
    """Decode a weight in float64: the first of two numbers is in the higher half of a byte, 64 numbers have a scale."""
    state, packed = layer.quant_state, layer.weight.data.flatten()
    codes = torch.stack([packed >> 4, packed & 15], -1).flatten().long()
    scales = state.absmax.double()
    if state.nested:
        blocks = torch.arange(len(scales)) // state.state2.blocksize
        scales = state.state2.code.double()[state.absmax.long()] * state.state2.absmax.double()[blocks] + state.offset
    values = torch.tensor(NF4, dtype=torch.float64)[codes].view(-1, 64) * scales[:, None]
    return values.view(state.shape).float()


@pytest.fixture
def rows() -> TensorDictBase:
    generator, result = torch.Generator().manual_seed(0), []
    prompt = torch.randint(3, 300, (4,), generator=generator)
    for group, length in ((0, 3), (0, 5), (1, 2)):
        tokens = torch.cat([prompt + group, torch.randint(3, 300, (length,), generator=generator)])
        entries = {keys.TOKENS: tokens, keys.ACTION_MASK: torch.arange(len(tokens)) >= 4}
        result.append(TensorDict(entries | {keys.GROUP_ID: torch.tensor(group)}, []))
    return stack_rows(result)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n.removeprefix("base_model.model."): p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", [{}, DOUBLE], ids=["scales", "quantized_scales"])
def test_weights_are_those_of_the_format(folder: Path, settings: dict) -> None:
    model, original = load(folder, quantization_kwargs=settings), load(folder, None)
    layers = four_bit_layers(model)
    assert len(layers) == 14 and type(model.lm_head) is nn.Linear and all(not m.training for m in model.modules())
    for name, layer in layers.items():
        expected, found = decode(layer), dequantize(layer, layer.weight.data)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        error = (found - original.get_submodule(name).weight).abs() / layer.quant_state.shape[1] ** -0.5
        assert layer.weight.nbytes * 2 == found.numel() and error.max() < 1


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_and_gradients_equal_the_float_model(
    folder: Path, tokenizer, rows: TensorDictBase, packing: str, checkpointing: bool
) -> None:
    base = load(folder, gradient_checkpointing=checkpointing)
    base_twin = twin_of(base, folder, decode)
    model, twin, results = adapted(base), adapted(copy.deepcopy(base_twin)), []
    calls: list[int] = []
    model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for one in (model, twin):
        policy = TransformersWrapper(one, tokenizer=tokenizer, generate=False, packing=packing)
        log_probs = policy.score(rows).log_probs
        calls.clear()
        log_probs.square().sum().backward()
        assert bool(calls) == (checkpointing and one is model)  # the twin has no checkpointing
        results.append((log_probs.detach(), gradients(one), AdapterReference(policy).score(rows).log_probs))
    (found, found_gradients, reference), (expected, expected_gradients, _) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    of_base = TransformersWrapper(base_twin, tokenizer=tokenizer, generate=False).score(rows).log_probs
    torch.testing.assert_close(reference, of_base, rtol=0, atol=1e-5)
    assert found_gradients.keys() == expected_gradients.keys() and len(found_gradients) == 28
    for name, gradient in found_gradients.items():
        largest = expected_gradients[name].abs().max()
        assert largest > 0
        torch.testing.assert_close(gradient / largest, expected_gradients[name] / largest, rtol=0, atol=1e-5)


def test_a_pass_without_gradient_changes_nothing(folder: Path) -> None:
    """bitsandbytes would repack the first layer for a kernel that rounds to bfloat16, on CPUs that have it."""
    model = load(folder)
    shapes = [layer.weight.shape for layer in four_bit_layers(model).values()]
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits, twin_of(model, folder, decode)(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert [layer.weight.shape for layer in four_bit_layers(model).values()] == shapes
    assert not any(layer.support_avx512bf16_for_cpu for layer in four_bit_layers(model).values())
    next(iter(four_bit_layers(model).values())).quant_state.packing_format_for_cpu = True
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj was repacked by a forward pass"):
        use_exact_products(model)


def test_products_have_the_dtype_asked_for(folder: Path) -> None:
    wide = load(folder, dtype="bfloat16", quantization_kwargs={"bnb_4bit_compute_dtype": "float32"})
    narrow = load(folder, dtype="bfloat16")
    for model, dtype in ((wide, torch.float32), (narrow, torch.bfloat16)):
        layers = four_bit_layers(model).values()
        assert model.model.embed_tokens.weight.dtype is torch.bfloat16
        assert {compute_dtype(layer) for layer in layers} == {dtype}
        assert {dequantize(layer, layer.weight.data).dtype for layer in layers} == {dtype}
        assert model(input_ids=IDS).logits.dtype is torch.bfloat16


@pytest.mark.parametrize("settings", [{}, DOUBLE], ids=["scales", "quantized_scales"])
def test_a_sampler_copy_follows_the_adapter(folder: Path, settings: dict) -> None:
    model = adapted(load(folder, quantization_kwargs=settings))
    sampler, rounded = frozen_copy(model), frozen_copy(model, torch.bfloat16)
    updaters = [InProcessWeightUpdater(model, target) for target in (sampler, rounded)]
    for layer in four_bit_layers(sampler).values():
        assert layer.quant_state is layer.weight.quant_state  # no second copy of the scales
    mine = {id(t) for layer in four_bit_layers(model).values() for t in (layer.weight, layer.quant_state.absmax)}
    assert not mine & {id(t) for layer in four_bit_layers(sampler).values() for t in (layer.weight, layer.quant_state)}
    for _ in range(2):
        for updater in updaters:
            updater.push_weights()
        with torch.no_grad():
            expected, found = (m(input_ids=IDS).logits.log_softmax(-1) for m in (model, sampler))
            near = rounded(input_ids=IDS).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert near.dtype is torch.bfloat16 and (near.log_softmax(-1) - expected).abs().max() < 0.3
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data.mul_(1.5)
    assert {compute_dtype(layer) for layer in four_bit_layers(rounded).values()} == {torch.bfloat16}


def test_a_state_dict_restores_a_new_model(folder: Path) -> None:
    """Quantization states are constants of the base checkpoint, and a state dict does not have them."""
    model, other = adapted(load(folder)), add_adapter(load(folder), LORA)
    state = model.state_dict()
    assert set(state) == {n for n, _ in model.named_parameters()} | {"base_model.model.lm_head.weight"}
    other.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, other(input_ids=IDS).logits)


def test_an_adapter_and_the_merged_model_are_saved(folder: Path, tokenizer, tmp_path: Path) -> None:
    model = adapted(load(folder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = [p.requires_grad for p in model.parameters()]
    save_model(model, tokenizer, tmp_path / "adapter")
    save_merged(model, tokenizer, tmp_path / "merged")
    save_merged(model, tokenizer, tmp_path / "base", adapter=False)
    save_merged(model, tokenizer, tmp_path / "half", dtype=torch.bfloat16)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        merged = load(tmp_path / "merged", None)
        torch.testing.assert_close(merged(input_ids=IDS).logits, logits, rtol=0, atol=1e-5)
        saved = {name: load_file(tmp_path / name / "model.safetensors") for name in ("merged", "half")}
        assert saved["merged"].keys() == saved["half"].keys() == load_file(folder / "model.safetensors").keys()
        assert {t.dtype for t in saved["half"].values()} == {torch.bfloat16}
        # The saved adapter is for the 4-bit base model, or for its dequantized copy
        assert torch.equal(load(tmp_path / "adapter")(input_ids=IDS).logits, logits)
        with model.disable_adapter():
            base = load(tmp_path / "base", None)
            assert torch.equal(base(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "nf5"}, r"unknown quantization='nf5' \(did you mean 'nf4'\?\); use 'nf4'"),
        ({"quantization_kwargs": DOUBLE}, r"quantization_kwargs=\{.*\} requires a quantization; set quant"),
        (
            {"quantization": "nf4", "quantization_kwargs": {"bnb_4bit_quant_storage": "bfloat16"}},
            r"bnb_4bit_quant_storage must be uint8, since casts would change weights .*; remove it",
        ),
        (
            {"quantization": "nf4", "quantization_kwargs": {"double": True}},
            r"unknown names \['double'\] in quantization_kwargs; use bnb_4bit_use_double_quant or",
        ),
    ],
)
def test_wrong_settings_are_refused_before_loading(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        load_model("/no/such/model", **settings)
    assert "\n" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_rloo.modules.loading.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("pip install 'torchrl_rloo[qlora]'")):
        load_model("/no/such/model", quantization="nf4")


def test_models_that_cannot_be_quantized_are_refused(folder: Path, tokenizer, tmp_path: Path) -> None:
    model = load(folder)
    with pytest.raises(ValueError, match=r"weights in 4 bits cannot be trained; set lora="):
        count_trained(model)
    # A quantized checkpoint keeps its quantization
    model.save_pretrained(tmp_path / "quantized")
    tokenizer.save_pretrained(tmp_path / "quantized")
    found = load(tmp_path / "quantized", None)
    assert torch.equal(found(input_ids=IDS).logits, model(input_ids=IDS).logits)
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="'nf4' has no effect.*quantized already"):
        load(tmp_path / "quantized", quantization_kwargs=DOUBLE)
    # GPT-2 stores transposed weights
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": len(tokenizer)}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn is a Conv1D"):
        load(tmp_path / "gpt2")


def test_only_integers_are_sharded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    check_shardable(model)
    with pytest.raises(ValueError, match="tensor_parallel=2 cannot split weights in 4 bits; set it to 1"):
        check_shardable(model, "ddp", tensor_parallel=2)
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    check_shardable(model, "ddp")
    with pytest.raises(ValueError, match=r"requires torch>=2\.12, .*got 2\.11\.0\+cpu; upgrade torch, or set it to"):
        check_shardable(model)
    check_shardable(load(folder, None))
