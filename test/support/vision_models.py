"""Tiny random models of all families of vision-language models, with tokenizers and image processors."""

from __future__ import annotations

import copy
import types

import numpy as np
import torch
import transformers as T
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from torchrl_rloo.images import ImageStore
from torchrl_rloo.images.encoder import ImageEncoder

MARKS = {
    "qwen": ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "idefics": ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    + tuple(f"<row_{i}_col_{j}>" for i in (1, 2, 3, 4) for j in (1, 2, 3, 4)),
    "llava": ("<image>",),
    "gemma": ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
}
SHOWN = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics": "<image>",
    "llava": "<image>",
    "gemma": "<start_of_image>",
}
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava_next", "gemma3")
_KIND = dict(zip(FAMILIES, ("qwen", "qwen", "qwen", "idefics", "idefics", "llava", "gemma"), strict=True))
PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "idefics3": "Idefics3Processor",
    "smolvlm": "SmolVLMProcessor",
    "llava_next": "LlavaNextProcessor",
    "gemma3": "Gemma3Processor",
}


def tokenizer_of(kind: str) -> T.PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    corpus = ["user", "assistant", "What color is it?", "How many?\n\nIt", "\n\n\n", "\n\n", "\n\n\n\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(corpus, trainer)
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS[kind]])
    named = zip(("image_token", "boi_token", "eoi_token"), MARKS[kind], strict=False) if kind == "gemma" else ()
    marks = {"eos_token": "<|end|>", "pad_token": "<|pad|>", **dict(named)}
    tokenizer = T.PreTrainedTokenizerFast(tokenizer_object=core, **marks)
    tokenizer.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n"
        "{% for part in m['content'] %}{% if part['type'] == 'image' %}"
        + SHOWN[kind]
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    return tokenizer


def build(family: str, folder, seed: int = 0, head_dim: int = 16):
    """Return model, tokenizer (with its encoder of images) and store."""
    kind = _KIND[family]
    tokenizer = tokenizer_of(kind)
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS[kind]}
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"image_size": 32, "patch_size": 8}
    torch.manual_seed(seed)
    if kind == "qwen":
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        marks = dict(zip(names, ids.values(), strict=True))
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
        vision = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
        if family == "qwen3_vl":
            rope["mrope_interleaved"] = True
            vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64, "in_channels": 3}
            vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
            names = ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration")
        elif family == "qwen2_5_vl":
            vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
            vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
            names = ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration")
        else:
            vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
            names = ("Qwen2VLConfig", "Qwen2VLForConditionalGeneration")
        text["rope_parameters"] = rope
        processor = T.Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=16 * 16 * 24)
        config = getattr(T, names[0])(text_config=text, vision_config=vision, **marks)
    elif kind == "idefics":
        name = "Idefics3" if family == "idefics3" else "SmolVLM"
        names = (f"{name}Config", f"{name}ForConditionalGeneration")
        config = getattr(T, names[0])(
            text_config={"model_type": "llama", **text},
            vision_config=tower,
            image_token_id=ids["<image>"],
            scale_factor=2,
            pad_token_id=0,
        )
        size = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
        processor = getattr(T, f"{name}ImageProcessorPil")(**size)
    elif kind == "llava":
        names = ("LlavaNextConfig", "LlavaNextForConditionalGeneration")
        pinpoints = [[32, 64], [64, 32], [64, 64]]
        config = T.LlavaNextConfig(
            text_config={"model_type": "llama", **text},
            vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **tower},
            image_token_index=ids["<image>"],
            image_grid_pinpoints=pinpoints,
        )
        edges = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        processor = T.LlavaNextImageProcessorPil(image_grid_pinpoints=pinpoints, **edges)
    else:
        names = ("Gemma3Config", "Gemma3ForConditionalGeneration")
        config = T.Gemma3Config(
            text_config={
                **text,
                "sliding_window": 16,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            vision_config=tower,
            image_token_index=ids["<image_soft_token>"],
            mm_tokens_per_image=4,
            boi_token_index=ids["<start_of_image>"],
            eoi_token_index=ids["<end_of_image>"],
        )
        processor = T.Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    model = getattr(T, names[1])._from_config(config, attn_implementation="sdpa").float().eval()
    if kind == "gemma":  # starts at zero
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    store = ImageStore(folder)
    tokenizer.images = ImageEncoder(config, processor, tokenizer, store)
    return model, tokenizer, store


def transformers_processor(family: str, tokenizer, monkeypatch):
    """Return the processor of Transformers, without the video processor that needs torchvision."""
    tokenizer, cls, options = copy.deepcopy(tokenizer), getattr(T, PROCESSORS[family]), {}
    if family.startswith("qwen") or family == "smolvlm":
        unchecked = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
        cls, options = (
            type(f"ImageOnly{cls.__name__}", (cls,), unchecked),
            {"video_processor": types.SimpleNamespace(num_frames=1, fps=1)},
        )
    tokenizer.padding_side = "left"
    if family in ("idefics3", "smolvlm"):
        import transformers.models.smolvlm.processing_smolvlm as module

        monkeypatch.setattr(module, "num2words", str)  # an optional package, for videos
        options["image_seq_len"] = 4
    if family == "gemma3":
        names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
        for name, text in names.items():
            setattr(tokenizer, name, text)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
        options["image_seq_length"] = 4
    if family == "llava_next":
        options |= {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    options["chat_template"] = tokenizer.chat_template
    return cls(image_processor=tokenizer.images.family.processor, tokenizer=tokenizer, **options)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
