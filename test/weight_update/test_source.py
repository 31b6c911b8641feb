from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from support.engines import GROUP
from support.weights import push
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.weight_update.protocol import TensorInfo
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

pytestmark = pytest.mark.xdist_group(GROUP)

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TOKENIZER = build_tokenizer()


def sent(source: WeightSource) -> dict[str, torch.Tensor]:
    manifest = source.manifest()
    tensors = source.tensors(0, len(manifest))
    assert [TensorInfo.of(i.name, t) for i, t in zip(manifest, tensors, strict=True)] == manifest
    assert not any(t.requires_grad for t in tensors)
    return {info.name: tensor for info, tensor in zip(manifest, tensors, strict=True)}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


def untied(seed: int = 0) -> nn.Module:
    model = build_model(TOKENIZER, seed)
    model.config.tie_word_embeddings = False
    model.lm_head = nn.Linear(64, len(TOKENIZER), bias=False)
    return model


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add noise to trained parameters, because new adapters are zero."""
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.data.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))
    return model


def with_lora(model: nn.Module, **settings) -> nn.Module:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "task_type": "CAUSAL_LM"} | settings
    return randomize(peft.get_peft_model(model, peft.LoraConfig(**config)))


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a copy that peft merged, tied ones once."""
    state, seen = copy.deepcopy(model).merge_and_unload().state_dict(), set()
    return {n: t for n, t in state.items() if t.data_ptr() not in seen and not seen.add(t.data_ptr())}


@pytest.mark.parametrize("build", [lambda: build_model(TOKENIZER, 0), untied], ids=["tied", "untied"])
def test_what_is_sent_is_the_checkpoint(build: Callable[[], nn.Module], tmp_path: Path):
    model = build()
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    found = sent(WeightSource(model))
    assert ("lm_head.weight" in found) == (build is untied)
    assert_same(found, {name: checkpoint[name] for name in found})
    assert set(found) == set(checkpoint)


def checkpointed(model: nn.Module) -> nn.Module:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        checkpointed,
        lambda m: torch.compile(nn.DataParallel(checkpointed(m))),
        lambda m: with_lora(m).get_base_model(),
        lambda m: torch.compile(with_lora(m)),
    ],
    ids=["compile", "data_parallel", "checkpointed", "all", "adapted", "compiled_adapted"],
)
def test_wrappers_leave_no_trace_in_the_names(wrap: Callable[[nn.Module], nn.Module]):
    plain = WeightSource(build_model(TOKENIZER, 0)).manifest()
    assert WeightSource(wrap(build_model(TOKENIZER, 0))).manifest() == plain


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("correction", torch.full((2,), 1.001))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("frequencies", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)


def test_the_cast_is_of_floating_parameters_alone():
    found = sent(WeightSource(Buffers(), dtype=torch.bfloat16))
    assert {n: t.dtype for n, t in found.items()} == {
        "weight": torch.bfloat16,
        "codes": torch.int8,
        "correction": torch.float32,
        "count": torch.int64,
    }
    assert found["count"] == 7 and found["correction"][0] == torch.tensor(1.001)
    with pytest.raises(ValueError, match="dtype=torch.int8"):
        WeightSource(Buffers(), dtype=torch.int8)


def test_ranges_of_the_manifest_are_its_tensors():
    model = build_model(TOKENIZER, 0)
    source = WeightSource(model, convert=lambda name, t: [(f"{name}.{i}", x) for i, x in enumerate(t.tensor_split(3))])
    names = [info.name for info in source.manifest()]
    whole = sent(source)
    for first, last in [(0, 1), (1, 2), (2, 7), (5, 5), (len(names) - 2, len(names))]:
        found = source.tensors(first, last)
        assert_same(dict(zip(names[first:last], found, strict=True)), {n: whole[n] for n in names[first:last]})


def test_it_sends_the_weights_of_the_moment_wherever_they_are():
    model = build_model(TOKENIZER, 0)
    source = WeightSource(model)
    for p in model.parameters():
        p.data = p.data + 1
    model.model.norm.weight = nn.Parameter(torch.full((64,), 5.0))
    assert_same(sent(source), {n: p.detach() for n, p in model.named_parameters()})
    model.model.norm.weight = nn.Parameter(torch.ones(65))
    with pytest.raises(ValueError, match=r"model.norm.weight must match .* got .*65.* new WeightSource"):
        sent(source)


@pytest.mark.parametrize(("rank", "sends"), [(None, True), (0, True), (1, False)])
def test_rank_0_sends(rank: int | None, sends: bool):
    assert WeightSource(Buffers(), rank=rank).sends is sends


def gpt2() -> nn.Module:
    """Build a model whose layers keep their weights transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32))


def qwen3_moe() -> nn.Module:
    """Build a model whose experts are one parameter of three dimensions."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "head_dim": 16, "vocab_size": 64}
    config = Qwen3MoeConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2
    )
    return Qwen3MoeForCausalLM(config)


def two_adapters() -> nn.Module:
    model = with_lora(build_model(TOKENIZER, 0))
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return randomize(model)


def two_doras() -> nn.Module:
    model = with_lora(build_model(TOKENIZER, 0), use_dora=True)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    model.base_model.set_adapter(["default", "second"])
    return model


def another_adapter_idle() -> nn.Module:
    model = two_adapters()
    model.set_adapter("second")
    return model


ADAPTED = {
    "plain": lambda: with_lora(build_model(TOKENIZER, 0)),
    "bfloat16": lambda: with_lora(build_model(TOKENIZER, 0).bfloat16()),
    "rank_stabilised": lambda: with_lora(build_model(TOKENIZER, 0), use_rslora=True, alpha_pattern={"q_proj": 3}),
    "bias": lambda: with_lora(build_model(TOKENIZER, 0), target_modules=["q_proj"], lora_bias=True, bias="lora_only"),
    "embedding": lambda: with_lora(untied(), target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "modules_to_save": lambda: with_lora(untied(), modules_to_save=["lm_head", "norm"]),
    "tied_modules_to_save": lambda: with_lora(
        build_model(TOKENIZER, 0), modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "dora": lambda: with_lora(build_model(TOKENIZER, 0), use_dora=True),
    "dora_transposed": lambda: with_lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True),
    "transposed": lambda: with_lora(gpt2(), target_modules=["c_attn", "c_fc"], fan_in_fan_out=True),
    "experts": lambda: with_lora(qwen3_moe(), target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "two_adapters": two_adapters,
    "another_adapter_idle": another_adapter_idle,
}


@pytest.mark.parametrize("name", ADAPTED)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_merged_into_copies(name: str):
    model = ADAPTED[name]()
    model.train()
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before, gradients = copy.deepcopy(model), [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    found = sent(WeightSource(model))
    assert_same(found, merged(before), tolerance=4e-3 if name == "bfloat16" else 1e-6)
    base = sent(WeightSource(disabled(before)))
    assert any(not torch.equal(found[n], base[n]) for n in found)
    assert [m.training for m in model.modules()] == modes
    for (n, p), q, gradient in zip(model.named_parameters(), before.parameters(), gradients, strict=True):
        same = torch.equal(p, q) and p.requires_grad == q.requires_grad
        assert same and (p.grad is gradient is None or torch.equal(p.grad, gradient)), n
    assert torch.equal(model.eval()(input_ids=ids).logits, before.eval()(input_ids=ids).logits)


def disabled(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model.base_model.disable_adapter_layers()
    return model


def test_an_adapter_that_is_off_is_not_merged():
    base = build_model(TOKENIZER, 0)
    wanted = {n: p.detach().clone() for n, p in base.named_parameters()}
    model = with_lora(base)
    source = WeightSource(model)
    with model.disable_adapter():
        assert_same(sent(source), wanted)
    model.merge_adapter()  # peft merges in place: the source must not add the adapter again
    assert_same(sent(source), merged(model), tolerance=1e-6)


REFUSED = {
    "DoraLinearVariant": two_doras,
    "IA3": lambda: peft.get_peft_model(
        build_model(TOKENIZER, 0), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    ),
    "PROMPT_TUNING": lambda: peft.get_peft_model(
        build_model(TOKENIZER, 0), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    ),
    "embed_tokens.weight and lm_head.weight are one": lambda: with_lora(
        build_model(TOKENIZER, 0), target_modules=["embed_tokens"]
    ),
    "model.embed_tokens.weight and lm_head.weight are one": lambda: with_lora(
        build_model(TOKENIZER, 0), modules_to_save=["lm_head"]
    ),
    "TrainableTokensWrapper": lambda: with_lora(build_model(TOKENIZER, 0), trainable_token_indices=[1, 2]),
    "lm_head.weight are one": lambda: with_lora(build_model(TOKENIZER, 0), modules_to_save=["lm_head", "embed_tokens"]),
    "lora_bias=True": lambda: with_lora(build_model(TOKENIZER, 0), target_modules=["o_proj"], lora_bias=True),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_merged_exactly_is_refused(reason: str):
    model = REFUSED[reason]()
    with pytest.raises(ValueError, match=reason):
        WeightSource(model)


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match="tensor same would be sent twice"):
        WeightSource(build_model(TOKENIZER, 0), convert=lambda name, tensor: [("same", tensor)])


# With a real engine


class Third(nn.Module):
    """One of the three outputs of another module's projection."""

    def __init__(self, fused: nn.Linear, number: int):
        super().__init__()
        self.fused, self.number = (fused,), number  # in a tuple, so that it is not a child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused[0](x).chunk(3, -1)[self.number]


def with_fused_projections(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        attention = layer.self_attn
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        fused = nn.Linear(64, 192)
        fused.weight.data = torch.cat([p.weight.data for p in parts])
        fused.bias.data = torch.cat([p.bias.data for p in parts])
        for number, name in enumerate(("q_proj", "k_proj", "v_proj")):
            setattr(attention, name, Third(fused, number))
        attention.qkv_proj = fused
    return model


def split_qkv(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    if "qkv_proj" not in name:
        return [(name, tensor)]
    return [(name.replace("qkv", x), part) for x, part in zip("qkv", tensor.chunk(3), strict=True)]


def test_an_engine_loads_what_is_fused_in_training(vllm_engine, log_prob_error: Callable[..., float]):
    model = randomize(with_fused_projections(build_model(TOKENIZER, 1)), seed=1).eval()
    assert log_prob_error(vllm_engine, model) > 0.1
    push(WeightPublisher(WeightSource(model, convert=split_qkv), vllm_engine, bucket_bytes=30_000), 1)
    assert log_prob_error(vllm_engine, model) < 1e-5


@pytest.mark.parametrize("name", ["plain", "rank_stabilised", "bias", "two_adapters", "dora"])
def test_an_engine_with_merged_weights_samples_as_the_adapted_model(
    vllm_engine, log_prob_error: Callable[..., float], name: str
):
    model = ADAPTED[name]().eval()
    assert log_prob_error(vllm_engine, model) > 0.1
    push(WeightPublisher(model, vllm_engine), 1)
    assert log_prob_error(vllm_engine, model) < 1e-5
