"""Gradient checkpointing in evaluation mode, where Transformers would silently skip it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Let the layers that have gradient checkpointing enabled recompute in the backward pass of what runs inside.

    Transformers recomputes a layer only while ``layer.training`` is True, and a policy trains in evaluation mode. The
    flag is set for the decision only: the layer itself runs in evaluation mode, without dropout, in both passes.
    Layers in training mode, and a forward pass without gradient, are left alone.

    Args:
        model: any module that contains Transformers layers.
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
