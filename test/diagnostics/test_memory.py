"""Planned memory against real objects: their bytes, what autograd saves, and the peak of the allocator in a pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import micro_batches
from torchrl_rloo.diagnostics import MemorySettings, plan_memory, read_shape
from torchrl_rloo.diagnostics.memory import cache_bytes, state_share
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines.decoder import Decoder
from torchrl_rloo.modules import TransformersWrapper, add_adapter
from torchrl_rloo.modules.packing import _pack
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.training import accumulate, make_optimizer

SIZES = dict(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, pad_token_id=0)
LLAMA = LlamaConfig(**SIZES, tie_word_embeddings=True)
UNTIED = LlamaConfig(**SIZES, tie_word_embeddings=False)
GEMMA = Gemma3TextConfig(**SIZES, head_dim=16)
EXPERTS = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96, head_dim=16)
LORA = {"r": 4, "target_modules": "all-linear"}
ROWS, ROW, PROMPT, GROUP = 6, 40, 16, 3
SETTINGS = MemorySettings(rows=ROWS, row_tokens=ROW, prompt_tokens=PROMPT, group=GROUP)


def build(config, lora=None) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    return model if lora is None else add_adapter(model, lora)


def make_rows():
    draw, rows = torch.Generator().manual_seed(0), []
    for i in range(ROWS):
        if i % GROUP == 0:
            prompt = torch.randint(1, 512, (PROMPT,), generator=draw)
        ids = torch.cat([prompt, torch.randint(1, 512, (ROW - PROMPT,), generator=draw)])
        mask = torch.arange(ROW) >= PROMPT
        row = TensorDict({keys.TOKENS: ids, keys.ACTION_MASK: mask, keys.LOG_PROBS: -6.0 * mask})
        row[keys.ADVANTAGE] = torch.randn(1, 1, generator=draw)
        row[keys.GROUP_ID] = torch.tensor(i // GROUP)
        rows.append(row)
    return stack_rows(rows)


def nbytes(tensors) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "lora"])
@pytest.mark.parametrize("config", [LLAMA, UNTIED, EXPERTS], ids=["tied", "untied", "experts"])
def test_weights_gradients_and_states_have_the_bytes_of_real_ones(config, lora):
    model = build(config, lora)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    parts = plan_memory(read_shape(config, lora), SETTINGS).phases["optimize"]
    states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
    assert parts["weights"] == nbytes(model.parameters())
    assert parts["gradients"] == nbytes(p.grad for p in model.parameters() if p.grad is not None)
    assert parts["optimizer states"] == nbytes(states)


@pytest.mark.parametrize(
    ("name", "kwargs", "share"),
    [("adamw", {}, 2), ("adam", {"amsgrad": True}, 3), ("sgd", {}, 0), ("sgd", {"momentum": 0.9}, 1), ("muon", {}, 1)],
)
def test_states_of_an_optimizer_relative_to_the_weights(name, kwargs, share):
    assert state_share(name, kwargs) == share


def test_states_of_8_bits():
    pytest.importorskip("bitsandbytes")
    weight = nn.Parameter(torch.zeros(256, 256))
    optimizer = make_optimizer(nn.ParameterList([weight]), "adamw_8bit", lr=1e-3)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    states = nbytes(t for t in optimizer.state[weight].values() if t.numel() > 1)
    assert states / weight.nbytes == pytest.approx(state_share("adamw_8bit", {}), rel=1e-6)


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match=r"optimizer.name=adamv is unknown \(did you mean 'adam"):
        state_share("adamv", {})


@pytest.mark.parametrize("packing", ["none", "packed", "shared_prefix"])
def test_a_pass_has_the_positions_of_a_real_one(packing):
    rows = make_rows()
    tokens, masks = [row[keys.TOKENS] for row in rows.unbind(0)], [row[keys.ACTION_MASK] for row in rows.unbind(0)]
    settings = replace(SETTINGS, packing=packing)
    positions = sum(map(len, tokens)) if packing == "none" else len(_pack(tokens, masks, packing).ids)
    assert settings.pass_tokens == positions
    for limit in (1, 50, 130, 1000):
        sizes = [len(part) for part in micro_batches(rows, max_tokens=limit, packing=packing)]
        planned = replace(SETTINGS, packing=packing, micro_batch_tokens=limit)
        assert (planned.pass_rows, planned.passes) == (sizes[0], len(sizes))


def allocator_peak(function) -> int:
    """Return the largest sum of bytes that a call allocates and has not freed yet."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {}),
        (UNTIED, {}),
        (GEMMA, {}),
        (EXPERTS, {}),
        (LLAMA, {"micro_batch_size": 2}),
        (UNTIED, {"micro_batch_size": 2, "packing": "packed"}),
        (UNTIED, {"gradient_checkpointing": True}),
        (LLAMA, {"gradient_checkpointing": True, "packing": "shared_prefix"}),
        (UNTIED, {"precision": "bfloat16"}),
    ],
    ids=lambda v: "" if not isinstance(v, dict) else " ".join(f"{name}={value}" for name, value in v.items()) or "once",
)
def test_the_peak_of_a_pass_is_that_of_the_allocator(config, changes, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.functional.log_probs.TILE_ELEMENTS", 2**14)  # a model this small has large tiles
    monkeypatch.setattr("torchrl_rloo.functional.log_probs.TILE_ROWS", 32)
    settings, rows, model = replace(SETTINGS, **changes), make_rows(), build(config)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    precision = {"precision": settings.precision}
    policy = TransformersWrapper(
        model, tokenizer=build_tokenizer(), generate=False, packing=settings.packing, **precision
    )
    loss_fn = RLOOLoss(policy)
    accumulate(loss_fn, rows[:1])
    model.zero_grad()
    real = allocator_peak(lambda: accumulate(loss_fn, rows, micro_batch_size=settings.micro_batch_size))
    parts = plan_memory(read_shape(config), settings).phases["train"]
    planned = sum(parts.get(name, 0) for name in ("gradients", "activations", "head"))
    assert planned == pytest.approx(real, rel=0.15)


def test_the_cache_has_the_bytes_of_a_real_one():
    model, prompts = build(LLAMA), [torch.arange(1, 17), torch.arange(2, 18)]
    with torch.no_grad():
        decoder = Decoder(model, None, [prompts[0], prompts[1], prompts[1]], 16 + 150, track_seen=False)
        for _ in range(150):
            decoder.feed(torch.ones(3, dtype=torch.long))
    real = nbytes(buffer for layer in decoder.cache.layers for buffer in layer.buffers)
    settings = replace(SETTINGS, prompt_tokens=16, row_tokens=16 + 150, sampled_lines=3)
    assert cache_bytes(read_shape(LLAMA), settings) == real


def test_offloaded_and_shared_parts_take_nothing():
    model, whole = read_shape(LLAMA), plan_memory(read_shape(LLAMA), SETTINGS)
    fsdp = replace(SETTINGS, parallel="fsdp", ranks=4, device="cuda", offload=("parameters",), reference=True)
    parts = plan_memory(model, fsdp).phases
    assert not {"weights", "gradients", "optimizer states"} & parts["optimize"].keys()
    assert parts["optimize"]["reference model"] == pytest.approx(whole.phases["optimize"]["weights"] / 4, rel=0.01)
    offloaded = plan_memory(model, replace(SETTINGS, device="cuda", offload=("optimizer",)))
    assert "optimizer states" not in offloaded.phases["train"]
    quantized = plan_memory(read_shape(LLAMA, LORA), replace(SETTINGS, quantization="nf4"))
    assert quantized.phases["train"]["weights"] < 0.6 * whole.phases["train"]["weights"]


def test_a_model_is_loaded_whole_unless_each_rank_reads_its_shards():
    model, settings = read_shape(LLAMA), replace(SETTINGS, parallel="fsdp", ranks=4, reference=True)
    loaded = plan_memory(model, settings).phases["load"]
    assert loaded["weights"] == loaded["reference model"] == nbytes(build(LLAMA).parameters())
    assert "load" not in plan_memory(model, replace(settings, load_shards=True)).phases


def test_the_engine_sleeps_while_the_model_trains():
    model, settings = read_shape(LLAMA), replace(SETTINGS, device="cuda", engine_bytes=10**9, device_bytes=2 * 10**9)
    asleep = plan_memory(model, replace(settings, engine_sleeps=True))
    assert asleep.phases["collect"]["engine"] == 10**9 and "engine" not in asleep.phases["train"]
    assert plan_memory(model, settings).phases["train"]["engine"] == 10**9
