"""Gradient checkpointing in evaluation mode, where Transformers silently skips it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


@contextmanager
def recompute_in_eval(model: nn.Module) -> Iterator[None]:
    """Recompute layers that have gradient checkpointing enabled, although the model is in evaluation mode.

    Transformers recomputes a layer only while ``layer.training`` is True, but a policy trains in evaluation mode. The
    context sets the flag for that decision only. The layer runs in evaluation mode, without dropout, in both passes.
    It ignores layers in training mode, and does nothing without gradients.

    Args:
        model: module that contains Transformers layers.

    Example::

        with recompute_in_eval(model):
            loss = model(input_ids=ids).logits.sum()
        loss.backward()  # recomputes the layers
    """
    layers = [layer for layer in checkpointing_layers(model) if not layer.training] if torch.is_grad_enabled() else []
    functions = [layer._gradient_checkpointing_func for layer in layers]
    for layer, function in zip(layers, functions, strict=True):
        layer.training = True
        layer._gradient_checkpointing_func = partial(_checkpoint_in_eval, layer, function)
    try:
        yield
    finally:
        for layer, function in zip(layers, functions, strict=True):
            layer.training = False
            layer._gradient_checkpointing_func = function


def checkpointing_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that have gradient checkpointing enabled."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


def _checkpoint_in_eval(layer: nn.Module, checkpoint: Callable, function: Callable, *args):
    return checkpoint(partial(_run_in_eval, layer, function), *args)


def _run_in_eval(layer: nn.Module, function: Callable, *args):
    training, layer.training = layer.training, False
    try:
        return function(*args)
    finally:
        layer.training = training
