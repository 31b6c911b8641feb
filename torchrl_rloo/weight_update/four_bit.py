"""Four-bit linear layers of bitsandbytes: their exact use in training, their values, copies and checkpoints."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

SHARDING_TORCH = (2, 12)  # the first torch whose fully_shard accepts integer parameters


def is_four_bit(module: nn.Module) -> bool:
    """Return whether a module is a 4-bit layer, whose weight holds two numbers per byte."""
    if "bitsandbytes" not in sys.modules:  # nothing can be its layer, and the import is slow
        return False
    from bitsandbytes.nn import Linear4bit

    return isinstance(module, Linear4bit)


def four_bit_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the 4-bit layers of a model by name."""
    return {name: module for name, module in model.named_modules() if is_four_bit(module)}


def use_exact_products(model: nn.Module) -> nn.Module:
    """Make 4-bit layers compute with their dequantized weights, in their compute dtype.

    On CPUs with bfloat16 instructions, bitsandbytes repacks the weights of a layer in evaluation mode. The kernel for
    them rounds to bfloat16 and has no gradient. A policy trains in evaluation mode, so its layers must not use it.
    """
    for name, layer in four_bit_layers(model).items():
        if getattr(layer.quant_state, "packing_format_for_cpu", False):
            raise ValueError(f"{name} was repacked by a forward pass on the CPU; use the model only after load_model")
        if getattr(layer, "source_cls", nn.Linear) is not nn.Linear:
            raise ValueError(
                f"{name} is a {layer.source_cls.__name__}, but quantization requires nn.Linear; set it to null"
            )
        layer.support_avx512bf16_for_cpu = False
    return model


def compute_dtype(layer: nn.Module) -> torch.dtype:
    """Return the dtype in which a 4-bit layer multiplies."""
    return layer.compute_dtype or layer.quant_state.dtype


def dequantize(layer: nn.Module, packed: torch.Tensor) -> torch.Tensor:
    """Return the weight ``[out_features, in_features]`` that a 4-bit layer multiplies with, in its compute dtype."""
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(layer.quant_state)  # sharding replaces the weight, but not the state of its layer
    state.dtype = compute_dtype(layer)
    return dequantize_4bit(packed, state)


def copy_four_bit(weight: nn.Parameter, device: torch.device | str | None, memo: dict[int, Any]) -> nn.Parameter:
    """Copy a packed weight to a device; ``memo`` of ``deepcopy`` receives the state that layer and weight share."""
    state = copy.deepcopy(weight.quant_state)
    if device is not None:
        state.to(device)
    memo[id(weight.quant_state)] = state
    settings = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
    data = weight.data.to(device=device, copy=True)
    return type(weight)(data, quant_state=state, **{name: getattr(weight, name) for name in settings})


def omit_quantization_states(model: nn.Module) -> nn.Module:
    """Leave the quantization states of 4-bit layers out of a model's state dict.

    They are constants of the base checkpoint, and ``load_state_dict`` of bitsandbytes refuses them. Without them, a
    state dict has the same names whether the model is sharded or not.
    """
    model.register_state_dict_post_hook(_omit_states)
    return model


def _omit_states(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    layers = {prefix + name for name in four_bit_layers(model)}
    for key in [key for key in state if ".weight." in key and key.partition(".weight.")[0] in layers]:
        del state[key]


def check_shardable(model: nn.Module, parallel: str = "fsdp", tensor_parallel: int = 1) -> None:
    """Raise if 4-bit layers cannot be distributed over ranks."""
    if tensor_parallel > 1 and four_bit_layers(model):
        raise ValueError(f"tensor_parallel={tensor_parallel} cannot split weights in 4 bits; set it to 1")
    if parallel != "fsdp":
        return
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    for name, layer in four_bit_layers(model).items():
        if version < SHARDING_TORCH:
            raise ValueError(
                f"parallel='fsdp' of 4-bit weights requires torch>=2.12, which shards integers, got "
                f"{torch.__version__}; upgrade torch, or set it to 'ddp'"
            )
        if layer.weight.is_floating_point():
            raise ValueError(
                f"parallel='fsdp' cannot shard {name}, whose 4-bit weight is stored as {layer.weight.dtype}, because "
                "casts would change it; load the original checkpoint with quantization='nf4'"
            )
