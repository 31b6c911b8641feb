"""Optimizers by name: AdamW, 8-bit AdamW, Muon, and the classes of ``torch.optim``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchrl_rloo.runtime.lookup import did_you_mean
from torchrl_rloo.training.optimizer_classes import AdamW8bit, OffloadedStates, make_muon

# torch's, without those that evaluate the loss several times or need sparse gradients; Muon is ours with AdamW
_OTHERS = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
TORCH_OPTIMIZERS = {
    name.lower(): value
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and name not in _OTHERS
}
OPTIMIZERS = ("adamw", "adamw_8bit", "muon", *sorted(TORCH_OPTIMIZERS.keys() - {"adamw"}))
WHOLE_ONLY = ("adafactor", "rprop")  # torch cannot step them on shards: rows and columns, and indexing by a mask
FUSED = ("adam", "adamw")  # stepped in one pass over the weights, without temporaries of their size
DEFAULT_BETAS, DEFAULT_WEIGHT_DECAY = (0.9, 0.99), 0.0
_NOT_ARGUMENTS = ("params", "matrices", "others", "lr", "betas", "weight_decay")


def make_optimizer(
    model: nn.Module,
    name: str = "adamw",
    *,
    lr: float,
    betas: Iterable[float] | None = None,
    weight_decay: float | None = None,
    offload_states: bool = False,
    **kwargs: Any,
) -> torch.optim.Optimizer:
    """Build an optimizer of a model's trained parameters by name.

    ``"adamw_8bit"`` is AdamW with moments of 8 bits. ``"muon"`` is torch's Muon for hidden matrices and
    AdamW for embeddings, the head, vectors and all other parameters, with one learning rate. Call it after
    :func:`~torchrl_rloo.training.shard_model`; the steps on shards are those of one process.

    Args:
        model: model with the trained parameters.
        name: ``"adamw"``, ``"adamw_8bit"``, ``"muon"``, or a class of ``torch.optim`` in lower case, such as ``"sgd"``.
        lr: learning rate.
        betas: decay rates of the mean gradient and its square. None takes 0.9 and 0.99, if the optimizer has them.
        weight_decay: weight decay. None takes 0.
        offload_states: keep the states in CPU memory between steps; requires parameters on a GPU.
        **kwargs: further arguments of the optimizer, such as ``momentum``.

    Returns:
        An optimizer with one state dict.

    Raises:
        ValueError: if a name is unknown, an argument has no effect or is out of range, or nothing is trained. Also if
            trained weights have 16 bits, in which most steps of a small learning rate round to 0.

    Example:
        >>> optimizer = make_optimizer(nn.Linear(2, 2), "sgd", lr=0.1, momentum=0.9)
        >>> type(optimizer).__name__, optimizer.param_groups[0]["momentum"]
        ('SGD', 0.9)
    """
    arguments = _arguments(name, lr, betas, weight_decay, kwargs)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    _check_parameters(parameters, name, lr, offload_states)
    try:
        if name == "muon":
            hidden = _hidden_matrices(model, parameters)
            inner = {id(p) for p in hidden}
            others = [p for p in parameters.values() if id(p) not in inner]
            optimizer = make_muon(_by_mesh(hidden), _by_mesh(others), **arguments)
        else:
            optimizer = _builder(name)([{"params": group} for group in _by_mesh(parameters.values())], **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"optimizer {name!r}: {error}") from error
    return OffloadedStates(optimizer) if offload_states else optimizer


def _builder(name: str) -> Any:
    """Return the class or function that builds an optimizer.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r}: unknown{did_you_mean(name, OPTIMIZERS)}; valid: {', '.join(OPTIMIZERS)}")
    return {"adamw_8bit": AdamW8bit, "muon": make_muon}.get(name) or TORCH_OPTIMIZERS[name]


def _arguments(
    name: str, lr: float, betas: Iterable[float] | None, weight_decay: float | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an optimizer; refuse those that it does not have."""
    known = inspect.signature(_builder(name)).parameters
    arguments: dict[str, Any] = {"lr": lr}
    for key, value, default in (
        ("betas", betas if betas is None else tuple(betas), DEFAULT_BETAS),
        ("weight_decay", weight_decay, DEFAULT_WEIGHT_DECAY),
    ):
        if key in known:
            arguments[key] = default if value is None else value
        elif value is not None:
            raise ValueError(f"{key}={value} has no effect with optimizer {name!r}, which has no {key}; set it to null")
    if name in FUSED and not kwargs.keys() & {"foreach", "fused", "differentiable"}:
        arguments["fused"] = True
    further = [n for n in known if n not in _NOT_ARGUMENTS]
    if unknown := [n for n in kwargs if n not in further]:
        hint = did_you_mean(str(unknown[0]), further)
        raise ValueError(f"unknown names {unknown} for optimizer {name!r}{hint}; valid: {', '.join(further)}")
    return arguments | kwargs


def _check_parameters(parameters: dict[str, nn.Parameter], name: str, lr: float, offload_states: bool) -> None:
    """Raise if the parameters cannot be trained."""
    if not parameters:
        raise ValueError("the model has no trained parameters; merge a saved adapter into its base model")
    for parameter, p in parameters.items():
        if name in WHOLE_ONLY and isinstance(p, DTensor):
            raise ValueError(f"optimizer {name!r} cannot be combined with sharded parameters; use 'adamw_8bit', or ddp")
        if p.dtype.itemsize < 4:
            raise ValueError(
                f"{parameter} has dtype={p.dtype}, in which most steps of lr={lr} round to 0; train float32 weights "
                "(model.dtype=float32), and compute in bfloat16 with train.precision=bfloat16"
            )
        if offload_states and p.device.type == "cpu":
            raise ValueError(f"offload_states=True has no effect on {parameter}, which is on the CPU; set it to False")


def _hidden_matrices(model: nn.Module, parameters: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return the matrices that Muon trains: with two dimensions, and neither of an embedding nor of the head.

    Raises:
        ValueError: if there are none.
    """
    outer = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = [m.get_output_embeddings() for m in model.modules() if hasattr(m, "get_output_embeddings")]
    outer |= {id(p) for head in heads if head is not None for p in head.parameters()}
    hidden = [
        p
        for name, p in parameters.items()
        if p.ndim == 2 and min(p.shape) > 1 and id(p) not in outer and "embedding" not in name
    ]
    if not hidden:
        raise ValueError("the model has no hidden matrices to train; use 'adamw'")
    return hidden


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in groups of one mesh each, since torch updates the parameters of a group together."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())
