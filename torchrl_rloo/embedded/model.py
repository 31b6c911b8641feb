"""Qwen2 model of 152,256 parameters: large enough to learn two-digit addition, small enough for a CPU core."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Build a randomly initialized float32 model on the CPU, without changing the global random state.

    Args:
        tokenizer: source of the vocabulary size (rounded up to a multiple of 64) and of the pad and end-of-turn ids.
        seed: seed of the initial weights.

    Returns:
        Model whose generation config samples from the full softmax, not from the top 50 of transformers' default.
    """
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # head size 32 is the smallest that vLLM's CPU attention supports
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.1,  # at this width the usual 0.02 makes learning three times slower
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Seed the weights separately from the global random state
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the accelerators
        model = Qwen2ForCausalLM(config)
    # Defaults for sampling, which transformers would otherwise fill in
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model
