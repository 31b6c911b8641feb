"""Log-probs of sampler and trainer for tiny random models of many architectures, against a plain pass of each row.

    python benchmarks/bench_architectures.py                # all architectures
    python benchmarks/bench_architectures.py llama mamba2   # some

Each policy samples two turns of groups with unequal prompts and limits, so that prompts repeat and finished lines are
dropped. The scorer scores these rows in each packing. The reference is the log-softmax of one row alone, without a
cache. A figure is the largest difference: log-probs in nats, and gradients as a share of the largest one.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import torch
import transformers
from common import print_table
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.modules import TransformersWrapper

EXACT = 1e-3  # largest difference that rounding to float32 explains; models that are refused have 3e-3 and more
PACKINGS = ("none", "packed", "shared_prefix")
TOKENIZER = build_tokenizer()
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
HEAD = {"head_dim": 8}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
GPT = {"hidden_size": 32, "num_key_value_heads": ..., "intermediate_size": ...}


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    """Return rotary parameters of a kind whose original length is 16."""
    return {
        "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 16, **more}
    }


LONGROPE = scaled("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
# By name: the type of the config, and what differs from SIZES; ... leaves a size out
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn": ("llama", scaled("yarn", factor=16.0)),
    "llama, linear rope": ("llama", scaled("linear", factor=2.0)),
    "llama, dynamic rope": ("llama", {"max_position_embeddings": 32} | scaled("dynamic", factor=2.0)),
    "llama, longrope": ("llama", LONGROPE),
    "phi3, longrope": ("phi3", LONGROPE | {"original_max_position_embeddings": 16}),
    "phimoe, longrope": (
        "phimoe",
        LOCAL | scaled("longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4, short_mscale=1.1, long_mscale=1.2),
    ),
    "gpt2": ("gpt2", {}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4, "intermediate_size": ...},
    ),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": ...}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "codegen": ("codegen", GPT | {"rotary_dim": 4}),
    "biogpt": ("biogpt", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "xglm": ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "hidden_size": ...}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "hidden_size": ...}),
    "falcon": ("falcon", {}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "persimmon": ("persimmon", {}),
    "stablelm": ("stablelm", {}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "mixtral": ("mixtral", LOCAL),
    "ministral": ("ministral", HEAD | {"sliding_window": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", MOE | {"shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", HEAD),
    "qwen3_moe": ("qwen3_moe", HEAD | MOE),
    "gemma": ("gemma", HEAD),
    "gemma2": ("gemma2", HEAD | {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma2, no cap": (
        "gemma2",
        HEAD | {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None},
    ),
    "gemma3": ("gemma3_text", HEAD | {"sliding_window": 4, "query_pre_attn_scalar": 8}),
    "gemma3n": (
        "gemma3n_text",
        HEAD
        | {
            "sliding_window": 4,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": len(TOKENIZER),
            "num_hidden_layers": 5,
            "intermediate_size": [48] * 5,
            "activation_sparsity_pattern": [0.0] * 5,
        },
    ),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phimoe": ("phimoe", LOCAL),
    "starcoder2": ("starcoder2", {"sliding_window": 4}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 4}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 4}),
    "olmoe": ("olmoe", MOE),
    "flex_olmo": ("flex_olmo", MOE),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "granitemoe": ("granitemoe", LOCAL | {"logits_scaling": 2.0}),
    "glm": ("glm", HEAD),
    "glm4": ("glm4", HEAD),
    "glm4_moe": ("glm4_moe", HEAD | MOE | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    "smollm3": ("smollm3", {}),
    "helium": ("helium", HEAD),
    "nemotron": ("nemotron", {}),
    "ernie4_5": ("ernie4_5", HEAD),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "exaone4": ("exaone4", {"sliding_window": 4, "sliding_window_pattern": 2}),
    "hunyuan": ("hunyuan_v1_dense", HEAD),
    "hunyuan_moe": ("hunyuan_v1_moe", HEAD | {"num_experts": 4, "moe_topk": 2}),
    "seed_oss": ("seed_oss", HEAD),
    "arcee": ("arcee", {}),
    "apertus": ("apertus", {}),
    "diffllama": ("diffllama", {}),
    "doge": ("doge", {}),
    "vaultgemma": (
        "vaultgemma",
        HEAD | {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": None},
    ),
    "gpt_oss": ("gpt_oss", HEAD | LOCAL | {"sliding_window": 4}),
    "llama4": (
        "llama4_text",
        HEAD
        | {
            "num_local_experts": 2,
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 48,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
    "deepseek_v2": ("deepseek_v2", MLA | {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", MLA | {"n_group": 2, "topk_group": 1}),
    "minimax_m2": ("minimax_m2", HEAD | LOCAL | {"rotary_dim": 4}),
    "gemma4": (
        "gemma4_text",
        HEAD | {"global_head_dim": 8, "sliding_window": 4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", HEAD | MOE | DELTA | {"shared_expert_intermediate_size": 16}),
    "longcat_flash": (
        "longcat_flash",
        MLA
        | {
            "head_dim": 4,
            "num_layers": 2,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "zero_expert_num": 1,
            "num_hidden_layers": ...,
        },
    ),
    "minimax": ("minimax", HEAD | LOCAL | {"block_size": 8}),
    "mamba": ("mamba", {"state_size": 8}),
    "mamba2": ("mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 8}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32}),
    "xlstm": ("xlstm", {"num_blocks": 2, "num_heads": 2, "num_hidden_layers": ...}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "lru_width": 32,
            "attention_window_size": 4,
            "conv1d_width": 3,
            "block_types": ("recurrent", "attention"),
            "num_key_value_heads": 1,
        },
    ),
    "jamba": (
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
    ),
    "bamba": ("bamba", SSM | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        SSM | LOCAL | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    ),
    "falcon_h1": ("falcon_h1", SSM | {"mamba_d_ssm": 64}),
    "zamba": (
        "zamba",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*-M",
            "num_hidden_layers": 4,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "head_dim": 8,
        },
    ),
    "qwen3_next": ("qwen3_next", HEAD | MOE | DELTA | {"shared_expert_intermediate_size": 16}),
    "qwen3_5": ("qwen3_5_text", HEAD | DELTA),
    "olmo_hybrid": ("olmo_hybrid", DELTA),
    "lfm2": ("lfm2", {"full_attn_idxs": [1]}),
    "lfm2_moe": ("lfm2_moe", MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
}


def build(name: str) -> torch.nn.Module:
    """Build a tiny random model, with weights large enough for each part to matter."""
    kind, more = FAMILIES[name]
    sizes = {key: value for key, value in (SIZES | more).items() if value is not ...}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.25)
    return model


def sample(policy: TransformersWrapper):
    """Sample two turns of groups with unequal prompts and limits."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 90, (length,), generator=draw) for length in (5, 13, 2)]
    limits = [[12, 3, 8], [10, 4, 7], [2, 9, 12]]
    rows = [
        TensorDict({keys.PROMPT_TOKENS: prompt, keys.MAX_NEW_TOKENS: torch.tensor(limit)}, [])
        for prompt, group in zip(prompts, limits, strict=True)
        for limit in group
    ]
    with torch.no_grad():
        first = policy(stack_rows(rows))
        rows = []
        for number, row in enumerate(first.unbind(0)):
            feedback = torch.randint(3, 90, (1 + number % 4,), generator=draw)
            mask, values = row[keys.ACTION_MASK], row[keys.LOG_PROBS]
            again = {
                keys.PROMPT_TOKENS: torch.cat([row[keys.TOKENS], feedback]),
                keys.ACTION_MASK: torch.cat([mask, torch.zeros(len(feedback), dtype=torch.bool)]),
                keys.LOG_PROBS: torch.cat([values, torch.zeros(len(feedback))]),
                keys.MAX_NEW_TOKENS: row[keys.MAX_NEW_TOKENS].remainder(5) + 1,
            }
            rows.append(TensorDict(again, []))
        return policy(stack_rows(rows))


def plain_log_probs(model: torch.nn.Module, row: TensorDict) -> torch.Tensor:
    """Return the log-probs of a row's action tokens in a plain pass of this row alone."""
    ids = row[keys.TOKENS]
    log_probs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(1, ids[1:, None])[:, 0][row[keys.ACTION_MASK][1:]]


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradient of all parameters, and delete it."""
    values = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in model.parameters()]
    model.zero_grad()
    return torch.cat(values)


def shown(difference: float) -> str:
    return f"{difference:.0e}" if difference < EXACT else f"**WRONG** {difference:.2g}"


def measure(name: str, verbose: bool) -> dict[str, str]:
    """Return an architecture's row: differences of the sampler, then of values and gradients of each packing."""
    result = {"architecture": name}

    def note(part: str, error: Exception) -> None:
        honest = isinstance(error, NotImplementedError)
        result[part] = "refused" if honest else f"**{type(error).__name__}**"
        if verbose:
            print(f"{name}, {part}: {type(error).__name__}: {error}", flush=True)

    # Sample; rows of another model take the place of those that this one cannot sample
    settings = {"tokenizer": TOKENIZER, "generate_kwargs": {"max_new_tokens": 12, "seed": 0, "ignore_eos": True}}
    try:
        model = build(name)
        plain_log_probs(model, TensorDict({keys.TOKENS: torch.arange(9), keys.ACTION_MASK: torch.arange(9) > 4}, []))
    except Exception as error:  # this version of Transformers lacks it, or has other sizes
        note("sampler", error)
        return result | dict.fromkeys(("sampler", *PACKINGS), "not built")
    try:
        rows = sample(TransformersWrapper(model, **settings))
    except Exception as error:
        note("sampler", error)
        rows = sample(TransformersWrapper(build("llama"), **settings))
    # Compare with plain passes, whose sum is weighted by row so that every row matters
    weights = [float(1 + number) * (-1) ** number for number in range(len(rows))]
    plain = [plain_log_probs(model, row) for row in rows.unbind(0)]
    sum(w * values.sum() for w, values in zip(weights, plain, strict=True)).backward()
    expected, slope = [values.detach() for values in plain], gradient(model)
    if "sampler" not in result:
        sampled = [row[keys.LOG_PROBS][row[keys.ACTION_MASK]] for row in rows.unbind(0)]
        result["sampler"] = shown(max(float((s - e).abs().max()) for s, e in zip(sampled, expected, strict=True)))
    for packing in PACKINGS:
        try:
            scorer = TransformersWrapper(model, tokenizer=TOKENIZER, generate=False, packing=packing)
            log_probs = scorer.score(rows).log_probs
        except Exception as error:
            note(packing, error)
            continue
        (log_probs.sum(1) * torch.tensor(weights)).sum().backward()
        gap = max(float((log_probs[i, : len(e)].detach() - e).abs().max()) for i, e in enumerate(expected))
        result[packing] = f"{shown(gap)}, {shown(float((gradient(model) - slope).abs().max() / slope.abs().max()))}"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"architectures: {', '.join(FAMILIES)}")
    parser.add_argument("--verbose", action="store_true", help="print reasons of refusals")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = [measure(name, args.verbose) for name in args.names or FAMILIES]
    print_table(f"Transformers {transformers.__version__}, torch {torch.__version__}", rows)


if __name__ == "__main__":
    main()
