"""Where a causal language model's logits come from: its decoder's hidden states and its output projection."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from torchrl_rloo.functional import SamplingDistribution, process_logits, token_log_probs

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """The parts of a model that turn ids into logits: ``logits = softcap(scale * (hidden @ weight.T + bias))``.

    Attributes:
        decoder: ids ``[B, T]`` to hidden states ``[B, T, H]``.
        projection: holds ``weight`` ``[V, H]`` and perhaps ``bias`` ``[V]``; read at each use, so it is never stale.
        softcap: see :func:`~torchrl_rloo.functional.token_log_probs`.
        scale: likewise.
    """

    decoder: nn.Module
    projection: nn.Module
    softcap: float | None
    scale: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits of a few hidden states, ``[..., H]`` to ``[..., V]``."""
        bias = getattr(self.projection, "bias", None)
        z = nn.functional.linear(hidden, self.projection.weight, bias).float() * self.scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def find_head(model: nn.Module) -> Head | None:
    """Finds a model's head and proves it on a few tokens; None, with one warning, if the logits do not agree.

    Args:
        model: any ``AutoModelForCausalLM``.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    projection = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if decoder is not None and decoder is not model and type(projection) is nn.Linear:  # an adapter's is more than that
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        head = Head(decoder, projection, getattr(config, "final_logit_softcapping", None), scale)
        if _agrees(model, head):
            return head
    _LOGGER.warning(
        "the output head of %s was not found, so full logits are kept: memory grows with tokens times vocabulary",
        type(model).__name__,
    )
    return None


@torch.no_grad()
def _agrees(model: nn.Module, head: Head) -> bool:
    weight = head.projection.weight
    ids = torch.arange(min(4, weight.shape[0]), device=weight.device)[None]
    training = model.training
    model.eval()
    try:
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = head.decoder(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        model.train(training)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    return torch.allclose(head.logits(hidden), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def score_positions(
    model: nn.Module,
    head: Head | None,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    distribution: SamplingDistribution,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of some of a batch's tokens; logits are computed for those alone.

    Rows are padded on the right and the attention is causal, so padding needs no mask: no real token sees it.

    Args:
        model: the causal language model.
        head: its head, or None to use full logits.
        tokens: ``[B, T]`` ids, padded on the right.
        positions: ``[B, T]`` bool, which tokens to score; never the first of a row.
        distribution: the sampling distribution to score under.

    Returns:
        ``(log_probs [N], entropy [N])`` in float32 nats, in row order, ``N`` the number of True positions.
    """
    if distribution.temperature == 0:
        raise ValueError("temperature=0 has no log-probs to train on: a greedy policy is a point distribution")
    predicted = positions[:, 1:]
    targets = tokens[:, 1:][predicted]
    seen = _seen_tokens(model, tokens, positions) if distribution.repetition_penalty != 1 else None
    if head is not None:
        hidden = head.decoder(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][predicted]
        return token_log_probs(
            hidden,
            head.projection.weight,
            targets,
            bias=getattr(head.projection, "bias", None),
            distribution=distribution,
            softcap=head.softcap,
            scale=head.scale,
            seen=seen,
        )
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1][predicted].float()
    full = process_logits(logits, distribution, seen, targets).log_softmax(-1)
    entropy = -torch.linalg.vecdot(full.detach().exp(), full.detach().masked_fill(full.isneginf(), 0.0))
    return full.gather(-1, targets[:, None])[:, 0], entropy


def _seen_tokens(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[N, V]``: for each scored token, which ids precede it in its row."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    rows = []
    for row, scored in zip(tokens, positions, strict=True):
        where = scored.nonzero()[:, 0]
        first_seen = torch.full((vocab_size,), len(row), device=row.device)
        first_seen.scatter_reduce_(0, row, torch.arange(len(row), device=row.device), "amin")
        rows.append(first_seen[None] < where[:, None])
    return torch.cat(rows)


def sampled_logits(model: nn.Module, tokens: torch.Tensor, distribution: SamplingDistribution) -> torch.Tensor:
    """Logits of the sampled distribution at every position, ``[B, T, V]``; position ``t`` predicts token ``t``.

    Holds all logits at once: for interoperation, not for training.

    Args:
        model: the causal language model.
        tokens: ``[B, T]`` ids, padded on the right.
        distribution: the sampling distribution.
    """
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    everywhere[:, 0] = False
    seen = _seen_tokens(model, tokens, everywhere) if distribution.repetition_penalty != 1 else None
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    flat = process_logits(logits[:, :-1].flatten(0, 1), distribution, seen, tokens[:, 1:].flatten())
    return torch.cat([torch.zeros_like(logits[:, :1]), flat.view_as(logits[:, 1:])], 1)
