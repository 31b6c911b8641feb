"""Parts of scoring: recorded supports of rows, and the router loss of mixtures of experts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens
from torchrl_rloo.functional.sampling import Support


class ScoredActions(NamedTuple):
    """Log-probs of rows' action tokens under a model.

    Attributes:
        log_probs: ``[B, A]`` float32 in nats, left-aligned, 0 beyond a row's action tokens, with gradient.
        entropy: ``[B, A]`` float32 in nats, entropy of the scored distribution, with gradient; None if not requested.
        actions: positions of the action tokens.
        router_loss: scalar load-balancing loss of a mixture of experts; None if not requested.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    actions: ActionTokens
    router_loss: torch.Tensor | None = None


def row_support(row: TensorDictBase) -> Support | None:
    """Return the recorded supports of a row's action tokens, or None.

    Raises:
        ValueError: if they do not fit the row's action tokens.
    """
    ids, sizes = row.get(keys.SUPPORT_IDS, None), row.get(keys.SUPPORT_SIZES, None)
    if ids is None or sizes is None:
        return None
    mask = row.get(keys.ACTION_MASK, None)
    actions = 0 if mask is None else int(mask.sum())
    if len(sizes) != actions or int(sizes.sum()) != len(ids) or (actions and int(sizes.min()) < 1):
        raise ValueError(
            f"a row with {actions} action tokens has {len(sizes)} support sizes with sum {int(sizes.sum())} and "
            f"{len(ids)} support ids; every action token requires one size of at least 1, and every size its ids"
        )
    return Support(ids, sizes)


def extend_support(row: TensorDictBase, actions_before: int, support: Support) -> None:
    """Append the supports of a new turn to those of a row's earlier turns, in place.

    Args:
        row: one row.
        actions_before: number of its earlier action tokens. With 0, supports on the row belong to another conversation
            and are dropped.
        support: supports of the new turn.

    Raises:
        ValueError: if the row has earlier action tokens without supports.
    """
    before = row_support(row) if actions_before else None
    if before is None and actions_before:
        raise ValueError(
            f"record_support=True, but a row has {actions_before} action tokens without {keys.SUPPORT_IDS}; record "
            "the supports of all its turns"
        )
    if before is not None:
        support = Support(*(torch.cat([old.cpu(), new]) for old, new in zip(before, support, strict=True)))
    entries = dict(zip(("ids", "sizes"), support, strict=True))
    row.set(keys.SUPPORT_IDS[0], TensorDict._new_unsafe(entries, batch_size=torch.Size([])))


def batch_support(rows: TensorDictBase, actions: ActionTokens) -> Support | None:
    """Return the supports of all action tokens in row order, on the device of ``actions``, or None.

    Raises:
        ValueError: if only some rows have supports, or a sampled token is not in its support.
    """
    supports = [row_support(row) for row in rows.unbind(0)]
    if without := [i for i, support in enumerate(supports) if support is None]:
        if len(without) == len(supports):
            return None
        raise ValueError(
            f"rows {without[:5]} have no {keys.SUPPORT_IDS} but others do; score the two kinds in separate batches"
        )
    # Check that every sampled token is in its support
    device = actions.tokens.device
    ids, sizes = (torch.cat(part).to(device) for part in zip(*supports, strict=True))
    sampled = actions.tokens[actions.action_mask]
    token_index = torch.arange(len(sizes), device=device).repeat_interleave(sizes.long(), output_size=len(ids))
    found = torch.zeros_like(sampled).index_add_(0, token_index, (ids == sampled[token_index]).to(sampled.dtype))
    if not bool((found > 0).all()):
        at = int((found == 0).nonzero()[0])
        raise ValueError(f"action token {int(sampled[at])}, number {at} of the batch, is not in its recorded support")
    return Support(ids, sizes)


def check_has_router(model: torch.nn.Module) -> None:
    """Raise a ValueError if the model is not a mixture of experts with a load-balancing loss."""
    model = _without_adapters(model)
    if not hasattr(_modeling_module(model), "load_balancing_loss_func") or not getattr(model, "num_experts", None):
        raise ValueError(
            f"router_loss=True requires a mixture of experts with a load-balancing loss; model type "
            f"{model.config.model_type!r} has none"
        )


def load_balancing_loss(
    model: torch.nn.Module, router_logits: tuple[torch.Tensor, ...], lengths: Sequence[int], width: int
) -> torch.Tensor:
    """Compute the model family's load-balancing loss (Fedus et al. 2021, arXiv 2101.03961) over real tokens.

    Args:
        model: causal language model.
        router_logits: logits ``[B * T, experts]`` of each layer, as the decoder returns them.
        lengths: lengths of the ``B`` rows, which are padded on the right.
        width: padded length ``T``.

    Returns:
        A scalar; the number of experts per token if experts are used evenly.
    """
    model, device = _without_adapters(model), router_logits[0].device
    real = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    function = _modeling_module(model).load_balancing_loss_func
    return function(router_logits, model.num_experts, model.num_experts_per_tok, real.long())


def _without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _modeling_module(model: torch.nn.Module):
    """Return the Python module of the model's class."""
    return sys.modules[type(model).__module__]
