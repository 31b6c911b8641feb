"""Tensor parallelism: the matrices of each layer split over ranks, by the plan of Transformers and torch's DTensor.

Transformers' plans name the style of each module, e.g. ``"colwise"``. Torch's ``parallelize_module`` applies them,
because Transformers' own hooks are made for loading, and sum the gradients of some norms again in each pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from torchrl_rloo.engines.head import evaluation_mode

_PROBE_TOKENS = 6


class _SummedGradient(torch.autograd.Function):
    """Identity whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _LocalHeads(ParallelStyle):
    """Style of a module with whole parameters that sees only the heads of this rank, such as a norm of queries."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, whole = device_mesh.get_group(), {}

        def enter(module: nn.Module, args: Any) -> None:
            whole.update(module._parameters)
            module._parameters.update(
                {n: None if p is None else _SummedGradient.apply(p, group) for n, p in whole.items()}
            )

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            module._parameters.update(whole)
            whole.clear()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)
        return module


STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": _LocalHeads,
}


def split_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the matrices of a model's layers over the ranks of a mesh, in place.

    Embeddings and the output head stay whole, so that the tiled log-prob head works on them. A pass of a few tokens
    before and after compares hidden states and gradients.

    Args:
        model: model with one Transformers model inside, equal on all ranks.
        mesh: mesh of one dimension.

    Raises:
        ValueError: if the model has no plan, the plan or the sizes do not allow the split, or the model has adapters.
        NotImplementedError: if the split model computes something else.
    """
    size = mesh.size()
    inner = _transformers_model(model, size)
    styles = _plan(inner, size)
    _check_heads(inner, size)
    # Compare what is computed from the same parameters, whole and split
    expected = _probe(inner, styles)
    parallelize_module(inner, mesh, {name: STYLES[style]() for name, style in styles.items()}, src_data_rank=None)
    for name, value in _probe(inner, styles).items():
        difference = float((value - expected[name]).abs().max())
        tolerance = 1e-4 if inner.dtype in (torch.float32, torch.float64) else 5e-2
        if not difference <= tolerance * float(expected[name].abs().max()) + 1e-7:
            raise NotImplementedError(
                f"tensor_parallel={size} changes {type(inner).__name__}: {name} differs by {difference:.2g}; set it to "
                "1 and use parallel='fsdp'"
            )


@torch.no_grad()
def average_copies(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of parameters that tensor parallelism leaves whole, in place, over the ranks that split.

    The gradients are equal but for the rounding of GPU kernels without a fixed order, which would let the copies drift
    apart. Nothing happens without tensor parallelism.

    Args:
        parameters: parameters in the same order on all ranks.
    """
    trained = [p for p in parameters if p.grad is not None]
    mesh = next((p.device_mesh["tensor"] for p in trained if "tensor" in _dimensions(p)), None)
    if mesh is None:
        return
    for p in trained:
        names = _dimensions(p)
        # Parameters outside of layers may be sharded over all ranks, and have one copy
        if names == ("all",) or ("tensor" in names and not p.placements[names.index("tensor")].is_replicate()):
            continue
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        mean = grad.to(mesh.device_type, copy=True)
        distributed.all_reduce(mean, group=mesh.get_group())
        grad.copy_(mean / mesh.size())


def _dimensions(parameter: nn.Parameter) -> tuple[str, ...]:
    """Return the names of the mesh dimensions of a parameter; none if it is not distributed."""
    return tuple(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()


def _transformers_model(model: nn.Module, size: int) -> nn.Module:
    """Return the outermost Transformers model in a module."""
    from transformers import PreTrainedModel

    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise ValueError(
            f"tensor_parallel={size} cannot be combined with LoRA adapters; set it to 1 and use parallel='fsdp'"
        )
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"tensor_parallel={size} requires a Transformers model, got {type(model).__name__}; set it to 1")


def _plan(model: nn.Module, size: int) -> dict[str, str]:
    """Return the style of each module to split, by name.

    Raises:
        ValueError: if the model has no plan, or a style, module or size cannot be split.
    """
    rules = dict(getattr(model, "tp_plan", None) or {})
    whole = {model.get_input_embeddings(), model.get_output_embeddings()}
    # Expand the rules, in which * is the number of a layer
    styles = {}
    for name, module in model.named_modules():
        style = rules.get(".".join("*" if part.isdigit() else part for part in name.split(".")))
        if style is not None and module not in whole:
            styles[name] = style
    kind = type(model).__name__
    if not styles:
        raise ValueError(f"tensor_parallel={size} requires a model with a tp_plan, which {kind} lacks; set it to 1")
    # Refuse what would not be exact
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style not in STYLES:
            raise ValueError(
                f"tensor_parallel={size} does not support style {style!r} of {name} in {kind}; set it to 1 and use "
                "parallel='fsdp'"
            )
        if style == "replicated_with_grad_allreduce":
            continue
        if type(module) is not nn.Linear:
            raise ValueError(f"tensor_parallel={size} requires nn.Linear, but {name} is a {type(module).__name__}")
        split = module.out_features if style.startswith("colwise") else module.in_features
        if split % size:
            raise ValueError(f"tensor_parallel={size} must divide the {split} features of {name}")
    return styles


def _check_heads(model: nn.Module, size: int) -> None:
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % size:
            raise ValueError(f"tensor_parallel={size} must divide {name}={heads} of {type(model).__name__}; lower it")


def _probe(model: nn.Module, styles: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return hidden states of a few tokens, and gradients of the embedded tokens and of parameters that stay whole."""
    embed = model.get_input_embeddings()
    head = model.get_output_embeddings()
    split = tuple(f"{name}." for name, style in styles.items() if style != "replicated_with_grad_allreduce")
    skipped = {id(p) for module in (embed, head) if module is not None for p in module.parameters()}
    whole = {
        f"the gradient of {name}": p
        for name, p in model.named_parameters()
        if p.requires_grad and not name.startswith(split) and id(p) not in skipped
    }
    # Run the decoder, without the head
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(embed.weight), (1, _PROBE_TOKENS), generator=generator).to(embed.weight.device)
    decoder = model.get_decoder() if head is not None else model
    with torch.enable_grad(), evaluation_mode(model):
        embedded = embed(ids).detach().requires_grad_()
        hidden = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
        weights = torch.randn(hidden.shape, generator=generator).to(hidden)
        inputs = {"the gradient of embedded tokens": embedded, **whole}
        gradients = torch.autograd.grad((hidden * weights).sum(), list(inputs.values()), allow_unused=True)
    found = {name: g for name, g in zip(inputs, gradients, strict=True) if g is not None}
    return {"the hidden state": hidden.detach(), **found}
