"""Log-probs that depend on no other row, padding or cache, and refusals of models that cannot have them."""

from __future__ import annotations

import gc
import re
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from support.packed_rows import LONGROPE, SIZES, build
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.rows import PACKINGS
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines import exactness
from torchrl_rloo.engines.decoder import Decoder
from torchrl_rloo.engines.head import find_head
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.training.shard import layers_of
from torchrl_rloo.weight_update import Direct, WeightPublisher
from torchrl_rloo.weight_update.rotary import check_engine_frequencies, set_context_length

TOKENIZER = build_tokenizer()
FLOAT32 = {"dtype": torch.float32}
SCALED = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
PER_LAYER = {
    "full_attention": LONGROPE | {"original_max_position_embeddings": 16},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
ROPES = {
    "phi3, longrope": ("phi3", SCALED | {"rope_parameters": LONGROPE | {"long_factor": [4.0] * 4}}),
    "llama, longrope": (
        "llama",
        {"rope_parameters": LONGROPE | {"long_factor": [4.0] * 4, "original_max_position_embeddings": 16}},
    ),
    "gemma3, longrope in one layer type": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "rope_parameters": PER_LAYER},
    ),
    "llama, dynamic": (
        "llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# One family for each kind of cache layer and name of the argument that takes the cache
HYBRIDS = {
    "mamba": {"state_size": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "qwen3_next": DELTA
    | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"full_attn_idxs": [1]},
}


def model_of(family: str, **sizes) -> nn.Module:
    """Build a tiny random model, whose parts all matter."""
    config = AutoConfig.for_model(family, **(SIZES | {"vocab_size": 48, "eos_token_id": 2} | sizes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.25)
    return model


@torch.no_grad()
def test_a_window_is_exact_over_grown_and_moved_buffers() -> None:
    model = model_of("gemma3_text", head_dim=8, sliding_window=5, query_pre_attn_scalar=8)
    rows = torch.randint(3, 48, (3, 250), generator=torch.Generator().manual_seed(0))
    prompts = [rows[0, :40], rows[1, :7], rows[2, :3]]
    decoder = Decoder(model, find_head(model), prompts, 250, track_seen=False)
    active, ends = torch.arange(3), torch.tensor([len(prompt) for prompt in prompts])
    expected = model(input_ids=rows, use_cache=False).logits
    for step in range(200):
        torch.testing.assert_close(decoder.logits, expected[active, ends - 1], atol=1e-4, rtol=0)
        if step == 150:
            decoder.keep(torch.tensor([2, 0]))
            active, ends = active[[2, 0]], ends[[2, 0]]
        decoder.feed(rows[active, ends])
        ends = ends + 1


def policy_of(model: nn.Module, tokens: int = 8) -> TransformersWrapper:
    settings = {"max_new_tokens": tokens, "seed": 0, "ignore_eos": True}
    return TransformersWrapper(model, tokenizer=TOKENIZER, generate_kwargs=settings)


def sample(policy: TransformersWrapper, lengths: list[int], limits: list[int]):
    """Sample a turn for prompts that begin alike; those of one length are equal."""
    ids = torch.randint(3, 48, (64,), generator=torch.Generator().manual_seed(1))
    rows = [
        TensorDict({keys.PROMPT_TOKENS: ids[:length], keys.MAX_NEW_TOKENS: torch.tensor(limit)}, [])
        for length, limit in zip(lengths, limits, strict=True)
    ]
    return policy(stack_rows(rows))


@torch.no_grad()
def alone(model: nn.Module, row: TensorDict) -> torch.Tensor:
    """Return the log-probs of a row's action tokens in a plain pass of this row."""
    ids = row[keys.TOKENS]
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(1, ids[1:, None])[:, 0][row[keys.ACTION_MASK][1:]]


def assert_sampled_exactly(model: nn.Module, rows, tolerance: float = 5e-5) -> None:
    for row in rows.unbind(0):
        sampled = row[keys.LOG_PROBS][row[keys.ACTION_MASK]]
        torch.testing.assert_close(sampled, alone(model, row), rtol=0, atol=tolerance)


def cut(row: TensorDict, length: int) -> TensorDict:
    return TensorDict({key: row[key][:length] for key in (keys.TOKENS, keys.ACTION_MASK)}, [])


@pytest.mark.parametrize("context", [None, 16], ids=["longer", "original length"])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_the_context_in_every_pass(name: str, context: int | None) -> None:
    """Rows below and above the original length agree alone, next to each other, sampled and in each packing."""
    family, sizes = ROPES[name]
    model = model_of(family, **sizes)
    if context is not None or "dynamic" in name:
        set_context_length(model, context or 48)
    limit = context or 40
    rows = sample(policy_of(model, 24), [2, 2, 9, 9], [limit - 12, 3, 4, min(24, limit - 9)])
    assert max(len(row[keys.TOKENS]) for row in rows.unbind(0)) == (16 if context else 33)
    assert_sampled_exactly(model, rows)
    short, full = cut(rows[3], 12), rows[3]
    for packing in PACKINGS:
        scorer = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, packing=packing)
        with torch.no_grad():
            scores = [scorer.score(stack_rows(batch)).log_probs[0, :3] for batch in ([short], [short, full], [full])]
        for values in scores:
            torch.testing.assert_close(values, alone(model, short), rtol=0, atol=2e-5)


def test_the_context_chooses_the_factors_which_are_announced(caplog) -> None:
    family, sizes = ROPES["phi3, longrope"]
    ids = torch.arange(3, 15)[None]
    plain = model_of(family, **sizes)(input_ids=ids).logits
    short, long = model_of(family, **sizes), model_of(family, **sizes)
    set_context_length(short, 16)
    policy_of(long)
    for model, words in ((short, "context_length=16, .* short"), (long, "context_length=64, .* long")):
        assert any(re.search(words, record.getMessage()) for record in caplog.records)
        assert policy_of(model).context_length == (16 if model is short else 64)
    assert torch.equal(short(input_ids=ids).logits, plain) and not torch.allclose(long(input_ids=ids).logits, plain)
    with pytest.raises(ValueError, match="a row of 17 tokens exceeds context_length=16"):
        short(input_ids=torch.arange(17)[None])
    with pytest.raises(ValueError, match="context_length=16 comes too late: .* those of 64"):
        set_context_length(long, 16)


def test_a_saved_model_keeps_its_context(tmp_path) -> None:
    family, sizes = ROPES["phi3, longrope"]
    set_context_length(short := model_of(family, **sizes), 16)
    short.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    loaded, ids = load_model(tmp_path)[0], torch.arange(3, 15)[None]
    assert policy_of(loaded).context_length == 16
    assert torch.equal(loaded(input_ids=ids).logits, short(input_ids=ids).logits)
    with pytest.raises(ValueError, match="context_length=65 must be at most 64, the positions of GPT2LMHeadModel"):
        set_context_length(model_of("gpt2", n_positions=64), 65)


def test_an_engine_with_other_frequencies_is_refused() -> None:
    family, sizes = ROPES["phi3, longrope"]
    trained, engine = model_of(family, **sizes), TransformersEngine(model_of(family, **sizes))
    assert WeightPublisher(trained, engine, transport=Direct()).push_weights() == 1
    short = model_of(family, **sizes)
    set_context_length(short, 12)
    with pytest.raises(ValueError, match="context_length=64 of the engine and 12 of Phi3.*=64 to .*max_model_len=12"):
        WeightPublisher(short, engine, transport=Direct())
    check_engine_frequencies(short, 16)
    check_engine_frequencies(trained, 17)
    dynamic = model_of("llama", **ROPES["llama, dynamic"][1])
    check_engine_frequencies(dynamic, 64)
    for model, length in ((trained, 16), (trained, None), (short, 17)):
        with pytest.raises(ValueError, match="other rotary frequencies"):
            check_engine_frequencies(model, length)
    set_context_length(dynamic, 32)
    for length in (32, 64):
        with pytest.raises(ValueError, match="other rotary frequencies .* pass context_length=16 to load_model$"):
            check_engine_frequencies(dynamic, length)


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_states_follow_their_lines(family: str) -> None:
    """Groups, unequal prompts, finished lines and a second turn are exact with states and keys in the cache."""
    model = model_of(family, **HYBRIDS[family])
    policy = policy_of(model)
    rows = sample(policy, [5, 5, 5, 2, 2, 9], [8, 2, 3, 8, 1, 6])
    assert_sampled_exactly(model, rows)
    again = []
    for number, row in enumerate(rows.unbind(0)):
        turn = {keys.PROMPT_TOKENS: torch.cat([row[keys.TOKENS], torch.arange(3, 5 + number % 3)])}
        again.append(TensorDict(turn, []))
    assert_sampled_exactly(model, policy(stack_rows(again)))
    scorer = policy.get_new_version(generate=False)
    with torch.no_grad():
        scores = scorer.score(rows).log_probs
    torch.testing.assert_close(scores[0, :8], alone(model, rows[0]), rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("family", "sizes", "reason"),
    [
        ("rwkv", {"attention_hidden_size": 32}, "RwkvForCausalLM .* takes no cache"),
        (
            "recurrent_gemma",
            {"lru_width": 32, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
            "RecurrentGemmaForCausalLM .* its logits differ",
        ),
        ("xlstm", {"num_blocks": 2, "num_hidden_layers": 2, "num_heads": 2}, "xLSTMForCausalLM .*rnn_state"),
    ],
)
def test_models_whose_past_is_not_in_the_cache_are_refused(family: str, sizes: dict, reason: str) -> None:
    model = model_of(family, **sizes)
    with pytest.raises(NotImplementedError, match=f"{reason}.*; sample with an engine"):
        sample(policy_of(model), [4], [2])


def forget(decoder, args, kwargs):
    """Ignore the cache after the prompt."""
    alone = kwargs["input_ids"].shape[1] > 1
    return args, {name: v for name, v in kwargs.items() if alone or name not in ("cache", "past_key_values")}


def ignore_padding(decoder, args, kwargs):
    return args, {name: v for name, v in kwargs.items() if name not in ("attention_mask", "position_ids")}


def average(decoder, args, output) -> None:
    """Make a row depend on the other rows of its pass."""
    output.last_hidden_state = output.last_hidden_state - output.last_hidden_state.mean((0, 1))


def scale(decoder, args, output) -> None:
    """Change batches of rows by less than the tolerance of float32, and by more if rounded to 16 bits."""
    if len(output.last_hidden_state) > 1:
        output.last_hidden_state = output.last_hidden_state * (1 + 4e-5)


def test_a_model_that_forgets_is_refused() -> None:
    model = build("qwen2", **FLOAT32)
    model.model.register_forward_pre_hook(forget, with_kwargs=True)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="Qwen2ForCausalLM cannot be sampled with a cache: its logits"):
            sample(policy_of(model), [4], [2])


def test_prompts_are_sampled_by_length_if_padding_is_not_exact() -> None:
    model = build("qwen2", **FLOAT32)
    model.model.register_forward_pre_hook(ignore_padding, with_kwargs=True)
    rows = sample(policy_of(model), [3, 7, 3, 2], [4, 5, 6, 8])
    assert [len(row[keys.TOKENS]) for row in rows.unbind(0)] == [7, 12, 9, 10]
    assert_sampled_exactly(model, rows)


def test_a_model_whose_rows_depend_on_each_other_is_refused() -> None:
    model = build("qwen2", **FLOAT32)
    model.model.register_forward_hook(average)
    with pytest.raises(NotImplementedError, match="Qwen2For.* cannot be trained exactly: .* next to a longer one"):
        TransformersWrapper(model, tokenizer=TOKENIZER, generate=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_runs_once_and_leaves_no_trace(dtype: torch.dtype) -> None:
    model = build("qwen2_moe", dtype=dtype, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model.model.layers[0].train()
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    calls: list[int] = []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    policy = policy_of(model, 1)
    sample(policy, [4], [1])
    first = len(calls)
    sample(policy_of(model, 1), [4], [1])
    assert torch.equal(torch.get_rng_state(), state) and [m.training for m in model.modules()] == modes
    assert len(calls) - first < first / 2
    gc.collect()  # models of other tests
    known = len(exactness._CACHES)
    del model, policy
    gc.collect()
    assert len(exactness._CACHES) == known - 1


def test_positions_of_finished_lines_stop_at_the_context() -> None:
    """A finished line is fed until it is dropped; a model with learned positions has none beyond its context."""
    model = build("gpt2", dtype=torch.float32, max_position_embeddings=16)
    rows = sample(policy_of(model, 14), [10, 2, 2, 2, 2], [6, 14, 14, 14, 14])
    assert [len(row[keys.TOKENS]) for row in rows.unbind(0)] == [16] * 5
    assert_sampled_exactly(model, rows)


def test_rounding_of_the_head_or_by_fsdp_is_no_difference_between_rows() -> None:
    model = build("qwen2", **FLOAT32)
    model.model.register_forward_hook(scale)
    exactness.check_rows(model, replace(find_head(model), dtype=torch.bfloat16))

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = build("qwen2", **FLOAT32), init_device_mesh("cpu", (1,))
        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, packing="packed")
    finally:
        distributed.destroy_process_group()
