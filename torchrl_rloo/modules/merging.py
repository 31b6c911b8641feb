"""Whole float weights of a model with an adapter or with 4-bit layers, as a checkpoint that any engine loads."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from torchrl_rloo.modules.loading import save_model
from torchrl_rloo.modules.reference import adapter_disabled
from torchrl_rloo.weight_update.source import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_merged(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    *,
    adapter: bool = True,
    dtype: torch.dtype | None = None,
) -> Path:
    """Save the weights that a model computes with: the adapter merged, 4-bit weights dequantized.

    peft's ``merge_and_unload`` rounds merged weights to 4 bits again, which changes the model. This function does not,
    and leaves the model as it is. It needs host memory for the whole float weights.

    Args:
        model: model, with or without adapter. If it is sharded, all ranks must call, and rank 0 saves.
        tokenizer: tokenizer of the model.
        folder: output directory, created if missing, see :func:`~torchrl_rloo.modules.save_model`.
        adapter: whether to merge the adapter. False saves the base model, for engines that receive the adapter.
        dtype: dtype of the saved weights; None keeps that of the model, for 4-bit weights that of their products.

    Returns:
        ``folder`` as a path.

    Raises:
        ValueError: if the adapter cannot be merged, see :class:`~torchrl_rloo.weight_update.WeightSource`.

    Example::

        model, tokenizer = load_model("Qwen/Qwen2.5-1.5B", quantization="nf4")
        model = add_adapter(model, {"r": 16, "target_modules": "all-linear"})
        save_merged(model, tokenizer, "merged")
    """
    with nullcontext() if adapter else adapter_disabled(model):
        source = WeightSource(model, dtype=dtype)
        state = {}
        for number, info in enumerate(source.manifest()):  # one tensor at a time on the model's device
            (tensor,) = source.tensors(number, number + 1)
            if source.sends:
                state[info.name] = tensor.cpu()
    if not source.sends:
        return Path(folder)
    # A model without memory takes the tensors, under a configuration that no longer names a quantization
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = copy.deepcopy(base.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = dtype or config.dtype
    with torch.device("meta"):
        merged = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))(config)
    merged.load_state_dict(state, strict=False, assign=True)
    merged.tie_weights()
    merged.generation_config = base.generation_config
    return save_model(merged, tokenizer, folder)
