"""Loading a model and its tokenizer from a hub id or a directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from torchrl_rloo.functional.dtypes import parse_dtype

_OF_THE_HUB = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")


def load_model(
    name: str | os.PathLike, *, dtype: str = "float32", device: str = "cpu", **kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode (no dropout, so that trainer and sampler agree), and its tokenizer.

    Args:
        name: a hub id or a local directory.
        dtype: ``"float32"``, ``"bfloat16"``, ...
        device: where to put the model.
        **kwargs: passed to ``AutoModelForCausalLM.from_pretrained`` (``attn_implementation=``, ...); those that say
            where a model is (``revision=``, ``trust_remote_code=``, ...) to ``AutoTokenizer.from_pretrained`` too.

    Raises:
        ValueError: for an unknown dtype, a CUDA device where there is none, or a tokenizer without an end-of-sequence
            token.
        OSError: if there is no such model.
    """
    torch_dtype = parse_dtype(dtype)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch {torch.__version__} finds no CUDA device: set device='cpu'")
    tokenizer = AutoTokenizer.from_pretrained(name, **{k: kwargs[k] for k in _OF_THE_HUB if k in kwargs})
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {name} has no eos_token, so a turn could never end: set tokenizer.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is masked by length, so sharing the id does no harm
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype, **kwargs)
    return model.to(device).eval(), tokenizer


def add_adapter(model: PreTrainedModel, config: Mapping[str, Any]) -> torch.nn.Module:
    """The model with a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) on it; the adapter alone is trained.

    Args:
        model: the base model; its weights are frozen.
        config: arguments of ``peft.LoraConfig``, ``r`` and ``target_modules`` among them.

    Raises:
        ImportError: if peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("an adapter needs peft: pip install 'torchrl_rloo[peft]'") from error
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config)).eval()


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence the model takes, in tokens; None if its configuration names no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)
