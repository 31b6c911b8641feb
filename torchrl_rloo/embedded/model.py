"""Models that learn on a CPU core: a Qwen2 of 152,256 parameters, and an Idefics3 of 255,552 that sees pictures."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from torchrl_rloo.embedded.shapes import IMAGE_SIZE, QUARTER

INITIALIZER_RANGE = 0.1  # at this width the usual 0.02 makes learning three times slower
PATCH_SIZE = QUARTER  # one patch, and one image token, per quarter of the picture


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    """Build a randomly initialized float32 model on the CPU, without changing the global random state.

    Args:
        tokenizer: source of the vocabulary size (rounded up to a multiple of 64) and of the pad and end-of-turn ids.
        seed: seed of the initial weights.

    Returns:
        Model whose generation config samples from the full softmax, not from the top 50 of transformers' default.
    """
    return _build(Qwen2ForCausalLM, Qwen2Config(**_text_settings(tokenizer)), seed)


def build_vision_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Idefics3ForConditionalGeneration:
    """Build a vision-language model for square pictures of ``IMAGE_SIZE`` pixels, as :func:`build_model` does."""
    vision = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
        "initializer_range": INITIALIZER_RANGE,
    }
    text = _text_settings(tokenizer)
    config = Idefics3Config(
        text_config={"model_type": "llama", **text},
        vision_config=vision,
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        **{name: text[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")},
    )
    return _build(Idefics3ForConditionalGeneration, config, seed)


def build_processor() -> Idefics3ImageProcessorPil:
    """Build the image processor of :func:`build_vision_model`, which neither resizes nor splits its pictures."""
    size = {"longest_edge": IMAGE_SIZE}
    return Idefics3ImageProcessorPil(do_resize=False, size=size, max_image_size=size, do_image_splitting=False)


def _text_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # head size 32 is the smallest that vLLM's CPU attention supports
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _build(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    # Seed the weights separately from the global random state
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the accelerators
        model = model_class(config)
    # Defaults for sampling, which transformers would otherwise fill in
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model
