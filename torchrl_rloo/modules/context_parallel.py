"""Context parallelism: the tokens of a pack split over ranks, and attention over whole rows by heads.

Each rank runs the layers on its slice of the tokens. Before attention, all-to-all calls give each rank all tokens of
some heads, and afterwards all heads of its slice (Jacobs et al. 2023, *DeepSpeed Ulysses*, arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn

from torchrl_rloo.engines.turn_rules import TurnRules
from torchrl_rloo.functional.sampling import Support
from torchrl_rloo.runtime.ranks import Ranks

_KEY = "_context_group"


class ContextGroup:
    """Ranks that split the tokens of each pass.

    Attributes:
        size: number of ranks.
        rank: number of this rank in the group.
    """

    def __init__(self, group: distributed.ProcessGroup | None):
        self.group = group
        self.size = 1 if group is None else distributed.get_world_size(group)
        self.rank = 0 if group is None else distributed.get_rank(group)

    def __deepcopy__(self, memo: dict) -> ContextGroup:
        return ContextGroup(None)

    def __reduce__(self) -> tuple:
        return ContextGroup, (None,)

    def own(self, tokens: int) -> slice:
        """Return the slice of a pack that this rank computes, whose number of tokens is a multiple of the size."""
        share = tokens // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Turn this rank's tokens with all heads ``[n, heads, D]`` into all tokens ``[N, heads / size, D]``."""
        split = x.unflatten(1, (self.size, -1)).transpose(0, 1)
        return _AllToAll.apply(split, self.group).flatten(0, 1)

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Turn all tokens of this rank's heads ``[N, heads / size, D]`` into its tokens ``[n, heads, D]``."""
        split = x.unflatten(0, (self.size, -1))
        return _AllToAll.apply(split, self.group).transpose(0, 1).flatten(1, 2)

    def gather(self, own: torch.Tensor, owned: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks.

        Shapes: ``owned [N]``.
        """
        return _Gather.apply(own, owned, self.group)


class _AllToAll(torch.autograd.Function):
    """Exchange of ``[size, ...]``: part ``i`` goes to rank ``i``, and part ``i`` of the result comes from it."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        distributed.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Union of the ranks' values. Each rank's loss reads all of them, so its own part has the whole gradient."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, owned: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(owned)
        values = own.new_zeros(len(owned), *own.shape[1:])
        values[owned] = own
        distributed.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (owned,) = ctx.saved_tensors
        return grad[owned], None, None


def split_tokens(model: nn.Module, ranks: Ranks) -> None:
    """Split the tokens of packed passes through a model over ranks."""
    size = ranks.context_parallel
    decoder = model.get_decoder() if hasattr(model, "get_output_embeddings") else None
    if decoder is None or decoder is model:
        raise ValueError(
            f"context_parallel={size} requires a causal language model, whose rows can be packed; a "
            f"{type(model).__name__} pads them. Set it to 1"
        )
    # After tensor parallelism, each rank has only some heads
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or size * ranks.tensor_parallel
        if heads % (size * ranks.tensor_parallel):
            raise ValueError(
                f"context_parallel={size} * tensor_parallel={ranks.tensor_parallel} must divide {name}={heads} of "
                f"{type(model).__name__}; lower it"
            )
    mesh = ranks.make_mesh(data=ranks.data_size, context=size, tensor=ranks.tensor_parallel)
    decoder.__dict__[_KEY] = ContextGroup(mesh["context"].get_group())


def context_group(decoder: nn.Module) -> ContextGroup | None:
    """Return the ranks that split the tokens of a decoder, or None."""
    group = decoder.__dict__.get(_KEY)
    return None if group is None or group.size == 1 else group


def owned_inputs(
    positions: torch.Tensor, owned: torch.Tensor, support: Support | None, rules: TurnRules | None
) -> dict[str, Any]:
    """Return the positions and supports of the action tokens that this rank scores.

    Shapes: ``positions [B, T]``, ``owned [N]``.
    """
    if rules is not None:
        raise ValueError("context_parallel splits turns, on which settings of generate_kwargs depend; set it to 1")
    if support is not None:
        of_token = owned.repeat_interleave(support.sizes.long())
        support = Support(support.ids[of_token], support.sizes[owned])
    return {"positions": positions.masked_scatter(positions, owned), "support": support}
