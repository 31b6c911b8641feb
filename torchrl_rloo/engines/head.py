"""Where a causal language model's logits come from: its decoder's hidden states and its output projection."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from torchrl_rloo.functional import SamplingDistribution, process_logits
from torchrl_rloo.functional.log_probs import TokenLogProbs, token_log_probs
from torchrl_rloo.functional.projection import accumulation_dtype, project
from torchrl_rloo.functional.sampling import Support

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """The parts of a model that turn ids into logits: ``logits = softcap(scale * (hidden @ weight.T + bias))``.

    Attributes:
        decoder: ids ``[B, T]`` to hidden states ``[B, T, H]``.
        projection: an ``nn.Linear`` of ``weight`` ``[V, H]`` and perhaps ``bias`` ``[V]``, or peft's LoRA layer around
            one. Its parameters are read at each use, so they are never stale.
        softcap: see :func:`~torchrl_rloo.functional.token_log_probs`.
        scale: likewise.
    """

    decoder: nn.Module
    projection: nn.Module
    softcap: float | None
    scale: float

    def token_log_probs(self, hidden: torch.Tensor, targets: torch.Tensor, **kwargs) -> TokenLogProbs:
        """:func:`~torchrl_rloo.functional.token_log_probs` of hidden states ``[N, H]`` under this head."""
        weight, bias, low_rank = self._parameters(hidden)
        shape = {"bias": bias, "softcap": self.softcap, "scale": self.scale, "low_rank": low_rank}
        return token_log_probs(hidden, weight, targets, **shape, **kwargs)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of a few hidden states in at least float32, ``[..., H]`` to ``[..., V]``, without a gradient."""
        flat = hidden.flatten(0, -2)
        with torch.autocast(flat.device.type, enabled=False):
            weight, bias, low_rank = self._parameters(flat)
            z = project(flat, weight)
            for pair in low_rank:
                z = z + project(*pair)
            z = (z if bias is None else z + bias) * self.scale
            z = z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        return z.unflatten(0, hidden.shape[:-1])

    def _parameters(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list]:
        """Weight, bias and low-rank pairs (see ``token_log_probs``) as the projection would use them now."""
        layer = self.projection
        if type(layer) is nn.Linear:
            return layer.weight, layer.bias, []
        if layer.disable_adapters and layer.merged:
            layer.unmerge()  # as the layer does itself when it is called
        weight, bias, low_rank = layer.base_layer.weight, layer.base_layer.bias, []
        active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
        for name in (n for n in active if n in layer.lora_A):
            if name in layer.lora_variant:
                raise ValueError(
                    f"adapter {name!r} was added to the output head later and is no plain LoRA: make a new wrapper of "
                    "the model, which will then use full logits"
                )
            down, up, factor = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
            low_rank.append((down(layer.lora_dropout[name](hidden.to(down.weight.dtype))) * factor, up.weight))
            if up.bias is not None:
                bias = factor * up.bias if bias is None else bias + factor * up.bias
        return weight, bias, low_rank


def find_head(model: nn.Module, *, warn: bool = True) -> Head | None:
    """Finds a model's head and proves it on a few tokens; None, with one warning, if the logits do not agree.

    Args:
        model: any ``AutoModelForCausalLM``, or peft's wrapper of one.
        warn: whether to warn.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    projection = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if decoder is not None and decoder is not model and (type(projection) is nn.Linear or _is_lora(projection)):
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        head = Head(decoder, projection, getattr(config, "final_logit_softcapping", None), scale)
        if _agrees(model, head):
            return head
    if warn:
        _LOGGER.warning(
            "the output head of %s was not found, so full logits are kept: memory grows with tokens times vocabulary",
            type(model).__name__,
        )
    return None


def _is_lora(projection: nn.Module | None) -> bool:
    """Whether this is peft's plain LoRA around a plain layer: other adapters (DoRA, ...) are no sum of two products."""
    if not type(projection).__module__.startswith("peft."):
        return False
    from peft.tuners.lora.layer import Linear

    plain = type(projection) is Linear and type(projection.base_layer) is nn.Linear
    return plain and not projection.fan_in_fan_out and not getattr(projection, "lora_variant", True)


def current_head(model: nn.Module, head: Head | None, *, warn: bool = True) -> Head | None:
    """Return ``head`` while the model still has it, else find the head again.

    An adapter or resized embeddings replace a model's modules; a head found before would keep the old ones.

    Args:
        model: the model that ``head`` was found for.
        head: what :func:`find_head` returned.
        warn: whether to warn if the model's present head is not found.
    """
    if head is None or (model.get_output_embeddings() is head.projection and model.get_decoder() is head.decoder):
        return head
    return find_head(model, warn=warn)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each of its modules back in its own mode on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@torch.no_grad()
def _agrees(model: nn.Module, head: Head) -> bool:
    weight = head.projection.weight
    ids = torch.arange(min(4, weight.shape[0]), device=weight.device)[None]
    with evaluation_mode(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        logits = head.logits(head.decoder(input_ids=ids, use_cache=False).last_hidden_state).float()
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 2e-2
    atol = tolerance * float(expected.abs().max())
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=0, atol=atol)


def predicting_states(
    model: nn.Module, head: Head | None, tokens: torch.Tensor, positions: torch.Tensor, **kwargs
) -> tuple[torch.Tensor, object]:
    """Hidden states just before some of a batch's tokens.

    Rows are padded on the right and the attention is causal, so padding needs no mask: no real token sees it.

    Args:
        model: the causal language model.
        head: its head, or None.
        tokens: ``[B, T]`` ids, padded on the right.
        positions: ``[B, T]`` bool; never the first of a row.
        **kwargs: passed to the decoder, or to the model.

    Returns:
        Hidden states ``[N, H]`` in row order, or without a head the model's logits ``[N, V]``; and all that the decoder
        or the model returned.
    """
    if head is None:
        out = model(input_ids=tokens, use_cache=False, **kwargs)
        states = out.logits
    else:
        out = head.decoder(input_ids=tokens, use_cache=False, **kwargs)
        states = out.last_hidden_state
    return states[:, :-1][positions[:, 1:]], out


def score_positions(
    model: nn.Module,
    head: Head | None,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    distribution: SamplingDistribution,
    *,
    hidden: torch.Tensor | None = None,
    support: Support | None = None,
    entropy: bool = True,
    top_k: int = 0,
) -> TokenLogProbs:
    """Log-probs and entropies of some of a batch's tokens; logits are computed for those alone.

    Args:
        model: the causal language model.
        head: its head, or None to use full logits.
        tokens: ``[B, T]`` ids, padded on the right.
        positions: ``[B, T]`` bool, which tokens to score; never the first of a row.
        distribution: the sampling distribution to score under.
        hidden: what :func:`predicting_states` gives for these tokens, where somebody has it already (a packed forward,
            say); the model is then not run.
        support: the tokens that the truncation left at each position when it was sampled, to score under instead of
            what ``distribution`` would leave now.
        entropy: whether to compute entropies; they carry a gradient like the log-probs.
        top_k: of how many most likely tokens to return ids and log-probs.

    Returns:
        Values of the ``N`` True positions in row order, in float32 nats.

    Raises:
        ValueError: for a temperature of 0, or if ``hidden`` is not of ``N`` positions.
    """
    if distribution.temperature == 0:
        raise ValueError("temperature=0 has no log-probs to train on: a greedy policy is a point distribution")
    targets = tokens[:, 1:][positions[:, 1:]]
    seen = _seen_tokens(model, tokens, positions) if distribution.repetition_penalty != 1 else None
    if hidden is None:
        hidden, _ = predicting_states(model, head, tokens, positions)
    if len(hidden) != len(targets):
        raise ValueError(f"hidden has {len(hidden)} states for {len(targets)} scored positions: one for each is needed")
    if head is not None:
        kwargs = {"seen": seen, "support": support, "entropy": entropy, "top_k": top_k}
        return head.token_log_probs(hidden, targets, distribution=distribution, **kwargs)
    mask = None
    if support is not None:
        mask = support.mask(slice(0, len(targets)), support.ends(), hidden.shape[-1])
    full = process_logits(hidden.to(accumulation_dtype(hidden)), distribution, seen, targets, mask).log_softmax(-1)
    log_probs = full.gather(-1, targets[:, None])[:, 0]
    top = full.detach().topk(top_k, -1) if top_k else None
    finite = full.masked_fill(full.isneginf(), 0.0) if entropy else None  # 0 * -inf would be NaN
    return TokenLogProbs(
        log_probs,
        -torch.linalg.vecdot(full.exp(), finite) if entropy else None,
        *((top.indices, top.values) if top else ()),
    )


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

    Holds all logits at once: for interoperation, not for training. Recorded supports are not looked at: the present
    truncation applies.

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
