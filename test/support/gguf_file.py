"""Tiny models as GGUF files."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from transformers import Qwen2Config, Qwen2ForCausalLM

BYTES = [chr(b) for b in range(33, 127)] + [
    "Ġ",
    "Ċ",
]  # byte-level BPE
TOKENS = ["<bos>", "<eos>", *BYTES, "he", "ll"]
MERGES = ["h e", "l l"]
LAYERS = 2


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(TOKENS), num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return Qwen2ForCausalLM(config).eval()


def write_file(path: Path, model: Qwen2ForCausalLM, *, add_bos: bool = True, arch: str = "qwen2") -> Path:
    config, writer = model.config, GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    for i in range(LAYERS):
        for theirs, ours in parts.items():
            names |= {f"model.layers.{i}.{theirs}.{kind}": f"blk.{i}.{ours}.{kind}" for kind in ("weight", "bias")}
    for name, tensor in model.state_dict().items():
        writer.add_tensor(names[name], tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
