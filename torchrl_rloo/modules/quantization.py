"""Quantization of a frozen base model under LoRA (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from torchrl_rloo.data.dtypes import parse_dtype
from torchrl_rloo.four_bit import four_bit_layers
from torchrl_rloo.runtime.lookup import did_you_mean

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel

QUANTIZATIONS = ("nf4",)
_ARGUMENTS = ("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")


def check_quantization(name: str | None, arguments: Mapping[str, Any] | None) -> None:
    """Raise if settings of a quantization are wrong, before anything is loaded.

    Args:
        name: ``"nf4"``, or None for no quantization.
        arguments: see :func:`quantization_config`.

    Raises:
        ValueError: if the quantization or an argument is unknown, or there are arguments without a quantization.
        ImportError: if bitsandbytes is not installed.
    """
    arguments = arguments or {}
    if name is None:
        if arguments:
            raise ValueError(f"quantization_kwargs={dict(arguments)} requires a quantization; set quantization='nf4'")
        return
    if name not in QUANTIZATIONS:
        raise ValueError(
            f"unknown quantization={name!r}{did_you_mean(str(name), QUANTIZATIONS)}; use 'nf4', or None for none"
        )
    if "bnb_4bit_quant_storage" in arguments:
        raise ValueError(
            "quantization_kwargs.bnb_4bit_quant_storage must be uint8, since casts would change weights stored as "
            "floats; remove it"
        )
    if unknown := [key for key in arguments if key not in _ARGUMENTS]:
        hint = did_you_mean(str(unknown[0]), _ARGUMENTS)
        raise ValueError(f"unknown names {unknown} in quantization_kwargs{hint}; use {' or '.join(_ARGUMENTS)}")
    if find_spec("bitsandbytes") is None:
        raise ImportError(f"quantization={name!r} requires bitsandbytes: pip install 'torchrl_rloo[qlora]'")


def quantization_config(name: str, dtype: torch.dtype, arguments: Mapping[str, Any] | None) -> BitsAndBytesConfig:
    """Return the configuration with which Transformers quantizes linear layers as it loads them.

    Args:
        name: ``"nf4"``: 4-bit numbers with equally probable values under a normal distribution, scaled in blocks of 64.
        dtype: dtype of the model, and of products unless ``arguments`` has another.
        arguments: ``bnb_4bit_use_double_quant``, which also quantizes the scales (0.37 bits less per weight), and
            ``bnb_4bit_compute_dtype``, the dtype of products.
    """
    from transformers import BitsAndBytesConfig

    settings = {"bnb_4bit_compute_dtype": dtype} | dict(arguments or {})
    if isinstance(settings["bnb_4bit_compute_dtype"], str):
        settings["bnb_4bit_compute_dtype"] = parse_dtype(settings["bnb_4bit_compute_dtype"])
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=name, **settings)


def check_quantized(model: PreTrainedModel, config: BitsAndBytesConfig) -> None:
    """Raise unless a model was quantized as asked.

    Raises:
        ValueError: if its checkpoint has a quantization already, or no linear layer was quantized.
    """
    found = model.config.quantization_config
    if found.to_dict() != config.to_dict():
        raise ValueError(
            f"quantization={config.bnb_4bit_quant_type!r} has no effect, since the checkpoint is quantized already "
            f"({found.quant_method}); set it to null, or name the original checkpoint"
        )
    if not four_bit_layers(model):
        raise ValueError(f"{type(model).__name__} has no linear layers to quantize; set quantization to null")
