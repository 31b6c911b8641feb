"""Context length of a model in a run, and rotary frequencies that are those of this length in every pass.

Rotary positions of type ``longrope`` and ``dynamic`` have frequencies that Transformers chooses by the largest position
of a pass. A cached prefix would keep others than its row, and a row's log-probs would depend on the other rows.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

import torch
from torch import nn

_TYPES = ("longrope", "dynamic")
_LENGTH = "torchrl_rloo_context_length"  # entry of a model's config, which copies and saved models keep
_LOGGER = logging.getLogger(__name__)


def context_length(model: nn.Module) -> int | None:
    """Return the longest sequence that a model accepts in this run, in tokens; None if it has no limit."""
    return getattr(model.config, _LENGTH, None) or _longest_trained(model)


def _longest_trained(model: nn.Module) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def set_context_length(model: nn.Module, length: int) -> None:
    """Set the longest sequence of a run in tokens, before the first pass of a model."""
    if length < 1:
        raise ValueError(f"context_length={length} must be at least 1")
    config, limit = model.config.get_text_config(), _longest_trained(model)
    has_rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if limit is not None and length > limit and not has_rotary:
        raise ValueError(f"context_length={length} must be at most {limit}, the positions of {type(model).__name__}")
    lengths = {hook.args[0] for module in model.modules() for hook in _fixing_hooks(module)}
    if lengths - {length}:
        raise ValueError(
            f"context_length={length} comes too late: the model's rotary frequencies are those of {lengths.pop()} "
            "tokens; pass it to load_model"
        )
    setattr(model.config, _LENGTH, length)
    fix_frequencies(model)


def fix_frequencies(model: nn.Module) -> None:
    """Give every pass of a model the rotary frequencies of a pass of :func:`context_length` tokens.

    Only frequencies that depend on the pass change. Afterwards, passes with longer rows raise a ValueError.
    """
    config = getattr(model, "config", None)
    rope = _length_dependent(config)
    if rope is None:
        return
    length, fixed = context_length(model), False
    for module in model.modules():
        if _is_rotary(module) and not _fixing_hooks(module):
            module.register_forward_pre_hook(partial(_extend, length), prepend=True, with_kwargs=True)
            module.register_forward_hook(_shorten)
            fixed = True
    if fixed and rope["rope_type"] == "longrope":
        original = _original_length(config, rope)
        _LOGGER.warning(
            "%s: context_length=%d, so rows of every length have the %s rotary factors; the short ones are for rows of "
            "at most %d tokens. Choose by load_model(context_length=...)",
            type(model).__name__,
            length,
            "long" if length > original else "short",
            original,
        )


def depends_on_length(model: nn.Module) -> bool:
    """Return whether the rotary frequencies of a model depend on the longest row of a pass or an engine."""
    return _length_dependent(getattr(model, "config", None)) is not None


def check_engine_frequencies(model: nn.Module, engine_length: int | None) -> None:
    """Raise unless an engine has the rotary frequencies of the training model.

    vLLM takes long factors if its context exceeds the original length. It never scales ``dynamic`` frequencies.
    """
    config = getattr(model, "config", None)
    rope = _length_dependent(config)
    if rope is None:
        return
    length, original = context_length(model), _original_length(config, rope)
    dynamic = rope["rope_type"] == "dynamic"
    same_side = engine_length is not None and (engine_length > original) == (length > original)
    if length > original if dynamic else not same_side:
        remedy = f"pass context_length={original if dynamic else engine_length or original} to load_model"
        raise ValueError(
            f"context_length={engine_length} of the engine and {length} of {type(model).__name__} give other rotary "
            f"frequencies ({rope['rope_type']}, original length {original}); {remedy}"
            + ("" if dynamic else f", or max_model_len={length} to the engine")
        )


def _length_dependent(config) -> dict[str, Any] | None:
    """Return the rotary parameters of a config, or of one of its layer types, if they depend on the length."""
    config = None if config is None else config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = str(each.get("rope_type") or each.get("type"))
        if any(name in kind for name in _TYPES):
            return {**each, "rope_type": next(name for name in _TYPES if name in kind)}
    return None


def _original_length(config, rope: dict[str, Any]) -> int:
    config = config.get_text_config()
    if rope["rope_type"] == "dynamic":
        return config.max_position_embeddings
    names = (rope.get("original_max_position_embeddings"), getattr(config, "original_max_position_embeddings", None))
    return next((length for length in names if length), config.max_position_embeddings)


def _is_rotary(module: nn.Module) -> bool:
    """Return whether a module computes rotations of positions; those of images have none."""
    return "Rotary" in type(module).__name__ and "position_ids" in inspect.signature(module.forward).parameters


def _fixing_hooks(module: nn.Module) -> list[partial]:
    hooks = module._forward_pre_hooks.values()
    return [hook for hook in hooks if isinstance(hook, partial) and hook.func is _extend]


def _extend(length: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Append the last position of a row of ``length`` tokens."""
    in_kwargs = "position_ids" in kwargs
    positions = kwargs["position_ids"] if in_kwargs else args[1]
    longest = int(positions.max()) + 1
    if longest > length:
        raise ValueError(
            f"a row of {longest} tokens exceeds context_length={length}, for which the rotary frequencies are fixed; "
            f"pass context_length={longest} or more to load_model, or shorten the rows"
        )
    positions = torch.cat([positions, torch.full_like(positions[..., :1], length - 1)], -1)
    if in_kwargs:
        return args, kwargs | {"position_ids": positions}
    return (args[0], positions, *args[2:]), kwargs


def _shorten(module: nn.Module, args: tuple, output: Any) -> Any:
    """Drop the rotation of the appended position."""
    if isinstance(output, torch.Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)
