"""Planned memory against real objects: their bytes, what autograd saves, and the peak of the allocator in a pass."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3MoeConfig

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import micro_batches
from torchrl_rloo.diagnostics import FakeModel, MemorySettings, Pass, Sampling, advise, plan_memory
from torchrl_rloo.diagnostics.memory_plan import cache_bytes, shard_numel, state_share, weight_bytes
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines.decoder import Decoder
from torchrl_rloo.modules import TransformersWrapper, add_adapter
from torchrl_rloo.modules.packing import _pack, action_hidden
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
    parts = plan_memory(FakeModel(config, lora=lora), SETTINGS).phases["optimize"]
    states = [t for state in optimizer.state.values() for t in state.values() if t.numel() > 1]
    assert parts["weights"] == nbytes(model.parameters())
    assert parts["gradients"] == nbytes(p.grad for p in model.parameters() if p.grad is not None)
    assert parts["optimizer states"] == nbytes(states)


def test_a_shard_is_the_largest_chunk_of_the_first_dimension():
    weights = FakeModel(UNTIED).weights
    for shards in (2, 3, 5):
        real = sum(p.chunk(shards)[0].numel() for p in build(UNTIED).parameters())
        assert sum(shard_numel(w, shards) for w in weights) == real
    hybrid = replace(SETTINGS, parallel="fsdp", ranks=8, shard_size=2)
    assert weight_bytes(weights, hybrid) == weight_bytes(weights, replace(hybrid, ranks=2, shard_size=None))


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
    work = Pass(ROWS, ROW, PROMPT, GROUP, packing)
    if packing != "none":
        pack = _pack(tokens, masks, packing)
        assert (work.tokens, work.segments) == (len(pack.ids), pack.segments)
    assert work.actions == sum(int(mask.sum()) for mask in masks)
    for limit in (1, 50, 130, 1000):
        sizes = [len(part) for part in micro_batches(rows, max_tokens=limit, packing=packing)]
        planned = replace(SETTINGS, packing=packing, micro_batch_tokens=limit)
        assert (planned.work.rows, planned.passes) == (sizes[0], len(sizes))


@pytest.mark.parametrize(
    ("config", "lora", "autocast", "packing"),
    [
        (LLAMA, None, None, "none"),
        (LLAMA, None, None, "packed"),
        (LLAMA, None, torch.bfloat16, "shared_prefix"),
        (LLAMA, LORA, None, "none"),
        (LLAMA, LORA, None, "shared_prefix"),
        (GEMMA, None, None, "packed"),
        (EXPERTS, None, None, "none"),
    ],
    ids=["llama", "packed", "autocast", "lora", "lora shared", "gemma", "experts"],
)
def test_saved_activations_are_those_of_a_real_pass(config, lora, autocast, packing):
    # Count the storages that autograd saves in a real forward pass
    model, rows = build(config, lora), make_rows()
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    tokens, masks = [row[keys.TOKENS] for row in rows.unbind(0)], [row[keys.ACTION_MASK] for row in rows.unbind(0)]
    cast = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    if packing != "none":
        action_hidden(model.get_decoder(), tokens, masks, packing)  # the probe is no part of the pass
    with cast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if packing == "none":
            hidden = model.get_decoder()(input_ids=torch.stack(tokens), use_cache=False).last_hidden_state
        else:
            hidden = action_hidden(model.get_decoder(), tokens, masks, packing)
    real = sum(storage.nbytes() for storage in saved.values())
    assert hidden.requires_grad
    # Compare with the planned ones
    planned = FakeModel(config, lora=lora).trace(Pass(ROWS, ROW, PROMPT, GROUP, packing), autocast=autocast)
    assert planned.outside + sum(layer.saved for layer in planned.layers) == pytest.approx(real, rel=0.03)


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
    parts = plan_memory(FakeModel(config), settings).phases["train"]
    planned = sum(parts.get(name, 0) for name in ("gradients", "activations", "head"))
    assert planned == pytest.approx(real, rel=0.1)


def test_the_cache_has_the_bytes_of_a_real_one():
    model, prompts = build(LLAMA), [torch.arange(1, 17), torch.arange(2, 18)]
    with torch.no_grad():
        decoder = Decoder(model, None, [prompts[0], prompts[1], prompts[1]], 16 + 150, track_seen=False)
        for _ in range(150):
            decoder.feed(torch.ones(3, dtype=torch.long))
    real = nbytes(buffer for layer in decoder.cache.layers for buffer in layer.buffers)
    settings = replace(SETTINGS, prompt_tokens=16, row_tokens=16 + 150, sampling=Sampling(3, 2, 4))
    assert cache_bytes(FakeModel(LLAMA).kv_elements, settings) == real


def test_offloaded_and_shared_parts_take_nothing():
    model, whole = FakeModel(LLAMA), plan_memory(FakeModel(LLAMA), SETTINGS)
    fsdp = replace(SETTINGS, parallel="fsdp", ranks=4, device="cuda", offload=("parameters",), reference=True)
    parts = plan_memory(model, fsdp).phases
    assert not {"weights", "gradients", "optimizer states"} & parts["optimize"].keys()
    assert parts["optimize"]["reference model"] == pytest.approx(whole.phases["optimize"]["weights"] / 4, rel=0.01)
    offloaded = plan_memory(model, replace(SETTINGS, device="cuda", offload=("optimizer",)))
    assert "optimizer states" not in offloaded.phases["train"]
    quantized = plan_memory(FakeModel(LLAMA, lora=LORA), replace(SETTINGS, quantization="nf4"))
    assert quantized.phases["train"]["weights"] < 0.6 * whole.phases["train"]["weights"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, {"model.gradient_checkpointing", "train.micro_batch_tokens", "train.packing"}),
        ({"parallel": "ddp", "ranks": 2, "micro_batch_size": 1}, {"train.parallel", "optimizer.name"}),
        ({"parallel": "fsdp", "ranks": 2, "micro_batch_size": 1}, {"train.reduce"}),
        ({"device": "cuda", "micro_batch_size": 1}, {"train.offload"}),
        ({"sampling": Sampling(4096, 8, 4)}, {"collector.max_batch_size"}),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, dict) else "",
)
def test_advice_lowers_the_peak_and_fits_if_it_says_so(changes, names):
    model, settings = FakeModel(UNTIED), replace(SETTINGS, **changes)
    before = plan_memory(model, settings).peak
    lowest = min(advice.plan.peak for advice in advise(model, replace(settings, device_bytes=1)))
    limited = replace(settings, device_bytes=(before + lowest) // 2)
    found = advise(model, limited)
    assert names <= {advice.change.setting.partition("=")[0] for advice in found}
    assert any(advice.plan.fits for advice in found)
    for advice in found:
        assert advice.plan.peak == plan_memory(model, advice.change.settings).peak < before
        assert advice.plan.fits == (advice.plan.peak <= limited.device_bytes)


def test_a_model_is_loaded_whole_unless_each_rank_reads_its_shards():
    model, settings = FakeModel(LLAMA), replace(SETTINGS, parallel="fsdp", ranks=4, reference=True)
    loaded = plan_memory(model, settings).phases["load"]
    assert loaded["weights"] == loaded["reference model"] == nbytes(build(LLAMA).parameters())
    assert "load" not in plan_memory(model, replace(settings, load_shards=True)).phases


def test_the_engine_sleeps_while_the_model_trains():
    model, settings = FakeModel(LLAMA), replace(SETTINGS, device="cuda", engine_bytes=10**9, device_bytes=2 * 10**9)
    asleep = plan_memory(model, replace(settings, engine_sleeps=True))
    assert asleep.phases["collect"]["engine"] == 10**9 and "engine" not in asleep.phases["train"]
    assert plan_memory(model, settings).phases["train"]["engine"] == 10**9
