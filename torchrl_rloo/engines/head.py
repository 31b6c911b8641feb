"""Head of a causal language model: the decoder and the projection that compute its logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchrl_rloo.data.rows import pad
from torchrl_rloo.engines.root import call_root, fsdp_dtypes
from torchrl_rloo.engines.turn_rules import TurnRules, turn_starts
from torchrl_rloo.functional import SamplingDistribution
from torchrl_rloo.functional.log_probs import TokenLogProbs, accumulation_dtype, project, token_log_probs
from torchrl_rloo.functional.sampling import Support, count_in_turn, process_logits, unpack_bits
from torchrl_rloo.images.encoder import ImageEncoder, PassImages
from torchrl_rloo.weight_update.four_bit import four_bit_layers

NARROW = 2e-2  # share of the largest logit that rounding to 16 bits explains
_LOGGER = logging.getLogger(__name__)
_ATTENTION = RLock()  # without it, threads that switch one model would restore each other's setting


@dataclass(frozen=True)
class Head:
    """Parts of a model that turn ids into logits: ``logits = softcap(scale * (hidden @ weight.T + bias))``.

    Attributes:
        decoder: module from ids ``[B, T]`` to hidden states ``[B, T, H]``.
        projection: ``nn.Linear`` with ``weight`` ``[V, H]`` and optionally ``bias`` ``[V]``, or peft's LoRA layer
            around one. Its parameters are read at each use, so they are never stale.
        softcap: soft cap of the logits; None disables it.
        scale: factor of the logits.
        dtype: dtype that hidden states and weights are rounded to before their product, which is summed in float32.
            None keeps theirs.
    """

    decoder: nn.Module
    projection: nn.Module
    softcap: float | None
    scale: float
    dtype: torch.dtype | None = None

    def token_log_probs(self, hidden: torch.Tensor, targets: torch.Tensor, **kwargs) -> TokenLogProbs:
        """Compute :func:`~torchrl_rloo.functional.token_log_probs` of ids ``[N]`` from states ``[N, H]``."""
        hidden, (weight, bias, low_rank) = self._rounded(hidden), self._parameters(hidden)
        shape = {"bias": bias, "softcap": self.softcap, "scale": self.scale, "low_rank": low_rank}
        return token_log_probs(hidden, weight, targets, **shape, **kwargs)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits ``[..., V]`` of hidden states ``[..., H]``, in at least float32 and without a gradient.

        ``out`` ``[N, V]`` is memory for the logits of ``N`` states.
        """
        flat = hidden.flatten(0, -2)
        with torch.autocast(flat.device.type, enabled=False):
            weight, bias, low_rank = self._parameters(flat)
            z = project(self._rounded(flat), weight, out)
            for pair in low_rank:
                z += project(*pair)
            if bias is not None:
                z += bias
            if self.scale != 1:
                z *= self.scale
            if self.softcap is not None:
                z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z.unflatten(0, hidden.shape[:-1])

    def _parameters(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, list]:
        """Return weight, bias and low-rank pairs (see ``token_log_probs``) as the projection would use them now."""
        layer = self.projection
        if type(layer) is nn.Linear:
            return self._rounded(layer.weight), layer.bias, []
        # Unmerge disabled adapters, as the layer does when it is called
        if layer.disable_adapters and layer.merged:
            layer.unmerge()
        # Collect the active adapters, whose low-rank products are added to the logits
        weight, bias, low_rank = layer.base_layer.weight, layer.base_layer.bias, []
        active = [] if layer.disable_adapters or layer.merged else layer.active_adapters
        for name in (n for n in active if n in layer.lora_A):
            if name in layer.lora_variant:
                raise ValueError(
                    f"adapter {name!r} was added to the output head later and is not a plain LoRA; create a new "
                    "wrapper of the model, which then uses full logits"
                )
            down, up, factor = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
            low_rank.append((down(layer.lora_dropout[name](hidden.to(down.weight.dtype))) * factor, up.weight))
            if up.bias is not None:
                bias = factor * up.bias if bias is None else bias + factor * up.bias
        return self._rounded(weight), bias, low_rank

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.dtype is None else tensor.to(self.dtype)


def find_head(model: nn.Module, *, warn: bool = True) -> Head | None:
    """Find a model's head, and compare its logits with the model's on a few tokens.

    Args:
        model: any ``AutoModelForCausalLM``, or peft's wrapper of one.
        warn: whether to log a warning if no head is found.

    Returns:
        The head, or None if there is none or the logits differ.
    """
    decoder = decoder_of(model)
    projection = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if decoder is not None and decoder is not model and (type(projection) is nn.Linear or _is_lora(projection)):
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        head = Head(decoder, projection, getattr(config, "final_logit_softcapping", None), scale)
        if call_root(model, _agrees, model, head):
            return head
    if warn:
        _LOGGER.warning(
            "the output head of %s was not found, so full logits are stored; memory grows with tokens times vocabulary",
            type(model).__name__,
        )
    return None


def decoder_of(model: nn.Module) -> nn.Module | None:
    """Return the module of a model from ids to hidden states, which for a vision-language model also takes images."""
    if getattr(model.config, "vision_config", None) is not None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        return getattr(base, "model", None)
    return model.get_decoder() if hasattr(model, "get_decoder") else None


def _is_lora(projection: nn.Module | None) -> bool:
    """Return whether this is peft's plain LoRA around a plain layer. DoRA and others are not a sum of two products."""
    if not type(projection).__module__.startswith("peft."):
        return False
    from peft.tuners.lora.layer import Linear

    plain = type(projection) is Linear and type(projection.base_layer) is nn.Linear
    return plain and not projection.fan_in_fan_out and not getattr(projection, "lora_variant", True)


def current_head(model: nn.Module, head: Head | None, *, warn: bool = True) -> Head | None:
    """Return ``head`` if the model still has it, else find the head again; None stays None.

    Adding an adapter or resizing embeddings replaces a model's modules, and an earlier head would keep the old ones.
    """
    if head is None or (model.get_output_embeddings() is head.projection and decoder_of(model) is head.decoder):
        return head
    return find_head(model, warn=warn)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within the context, then restore the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def attention_implementation(config, name: str) -> Iterator[None]:
    """Use another of transformers' attention implementations within the context, then restore the original one."""
    with _ATTENTION:
        original, config._attn_implementation = config._attn_implementation, name
        try:
            yield
        finally:
            config._attn_implementation = original


def probe_tolerance(module: nn.Module) -> float:
    """Return the difference that rounding explains in passes of a module, as a share of the largest value."""
    four_bit = list(four_bit_layers(module).values())
    weights = {id(layer.weight) for layer in four_bit}
    dtypes = {layer.compute_dtype for layer in four_bit} | fsdp_dtypes(module)
    dtypes |= {parameter.dtype for parameter in module.parameters() if id(parameter) not in weights}
    if dtypes - {torch.float32, torch.float64}:
        return NARROW
    # Convolutions on GPUs may round to TF32
    return 1e-3 if any(parameter.is_cuda for parameter in module.parameters()) else 5e-5


@torch.no_grad()
def _agrees(model: nn.Module, head: Head) -> bool:
    weight = head.projection.weight
    ids = torch.arange(min(4, weight.shape[0]), device=weight.device)[None]
    with evaluation_mode(model):
        expected = model(input_ids=ids, use_cache=False).logits.float()
        logits = head.logits(head.decoder(input_ids=ids, use_cache=False).last_hidden_state).float()
    atol = probe_tolerance(head.projection) * float(expected.abs().max())
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=0, atol=atol)


def predicting_states(
    model: nn.Module, head: Head | None, tokens: torch.Tensor, positions: torch.Tensor, **kwargs
) -> tuple[torch.Tensor, object]:
    """Compute the hidden states that predict some tokens of a batch.

    Rows ``[B, T]`` are padded on the right and attention is causal, so no real token attends to padding and no mask is
    needed. ``positions`` ``[B, T]`` is True for the ``N`` tokens to predict; never for the first of a row.

    It returns states ``[N, H]`` in row order, or logits ``[N, V]`` without a head, and the whole output of the pass.
    """
    if head is None:
        out = model(input_ids=tokens, use_cache=False, **kwargs)
        states = out.logits
    else:
        out = head.decoder(input_ids=tokens, use_cache=False, **kwargs)
        states = out.last_hidden_state
    return states[:, :-1][positions[:, 1:]], out


def padded_arguments(model: nn.Module, images: PassImages) -> dict[str, Any]:
    """Return the arguments of a pass over rows that are padded on the right."""
    from torchrl_rloo.engines.decoder import image_masks  # imports transformers, which takes 2 s

    ids = pad(images.tokens)
    shown: dict[str, Any] = images.arguments(ids, model.device)
    if (whole := images.whole_images(ids)) is not None and shown:
        whole = whole.to(model.device)
        shown["attention_mask"] = image_masks(model.config.get_text_config(), whole, torch.ones_like(whole))
    if images.positions is not None:
        axes = [pad([positions[axis] for positions in images.positions]) for axis in range(3)]
        shown["position_ids"] = torch.stack(axes).to(model.device)
    return shown


def see_nothing(decoder: nn.Module, images: ImageEncoder) -> torch.Tensor | float:
    """Return 0 after a pass of the towers of images, which all ranks of a model must run in each pass."""
    blank = {name: value.to(decoder.device) for name, value in images.blank().items()}
    output = decoder.get_image_features(**blank, return_dict=True)
    # Exactly what a pass uses, since only these parts have gradients to reduce
    used = tree_leaves([output.pooler_output, getattr(output, "deepstack_features", None)])
    return 0.0 * sum(part.sum() for part in used if part is not None)


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
    rules: TurnRules | None = None,
) -> TokenLogProbs:
    """Compute log-probs and entropies of some tokens of a batch. Logits are computed only for these tokens.

    Args:
        model: causal language model.
        head: head of the model; None uses full logits.
        tokens: ``[B, T]`` ids, padded on the right.
        positions: ``[B, T]`` bool, True for the ``N`` tokens to score; never for the first of a row.
        distribution: sampling distribution to score under.
        hidden: ``[N, H]`` result of :func:`predicting_states` for these tokens, e.g. of a packed forward pass. None
            runs the model.
        support: tokens that the truncation left at each position when it was sampled. They replace those that
            ``distribution`` would leave now. None uses ``distribution``.
        entropy: whether to compute entropies, which carry a gradient like the log-probs.
        top_k: number of most likely tokens whose ids and log-probs are returned.
        rules: rules of a turn, which a distribution with ``has_rules`` requires. The positions are then sampled tokens.

    Returns:
        Values ``[N]`` of the True positions in row order, in float32 nats.

    Raises:
        ValueError: if the temperature is 0, ``hidden`` does not have ``N`` positions, or rules are missing or broken.
    """
    if distribution.temperature == 0:
        raise ValueError(
            "temperature=0 is a point distribution, which has no log-probs to train on; set a temperature above 0"
        )
    if distribution.has_rules and rules is None:
        raise ValueError("min_new_tokens, bad_words and structured require the rules of a turn; pass rules=")
    targets = tokens[:, 1:][positions[:, 1:]]
    turns = allowed = None
    if distribution.counts_tokens or distribution.has_rules:
        starts = turn_starts(tokens, positions, rules.stop_ids if rules is not None else ())
        turns = starts if distribution.counts_tokens else None
        allowed = rules.allowed(targets, starts) if distribution.has_rules else None
    seen = _seen_tokens(model, tokens, positions) if distribution.repetition_penalty != 1 else None
    if hidden is None:
        hidden, _ = predicting_states(model, head, tokens, positions)
    if len(hidden) != len(targets):
        raise ValueError(f"hidden has {len(hidden)} states for {len(targets)} scored positions; pass one for each")
    if head is not None:
        kwargs = {"seen": seen, "support": support, "entropy": entropy, "top_k": top_k}
        kwargs |= {"turns": turns, "allowed": allowed}
        return head.token_log_probs(hidden, targets, distribution=distribution, **kwargs)

    # Without a head, normalize full logits
    mask = None
    if support is not None:
        mask = support.mask(slice(0, len(targets)), support.offsets(), hidden.shape[-1])
    everything = slice(0, len(targets)), slice(0, hidden.shape[-1])
    counts = None if turns is None else count_in_turn(targets, turns, *everything)
    allowed = None if allowed is None else unpack_bits(allowed, everything[1])
    logits = hidden.to(accumulation_dtype(hidden))
    full = process_logits(logits, distribution, seen, targets, mask, counts, allowed).log_softmax(-1)
    log_probs = full.gather(-1, targets[:, None])[:, 0]
    top = full.detach().topk(top_k, -1) if top_k else None
    finite = full.masked_fill(full.isneginf(), 0.0) if entropy else None  # 0 * -inf would be NaN
    return TokenLogProbs(
        log_probs,
        -torch.linalg.vecdot(full.exp(), finite) if entropy else None,
        *((top.indices, top.values) if top else ()),
    )


def _seen_tokens(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return ``[N, V]`` bool, True for the ids that precede a scored token in its row."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    rows = []
    for row, scored in zip(tokens, positions, strict=True):
        scored_at = scored.nonzero()[:, 0]
        first_seen = torch.full((vocab_size,), len(row), device=row.device)
        first_seen.scatter_reduce_(0, row, torch.arange(len(row), device=row.device), "amin")
        rows.append(first_seen[None] < scored_at[:, None])
    return torch.cat(rows)


def sampled_logits(
    model: nn.Module, tokens: torch.Tensor, distribution: SamplingDistribution, **kwargs
) -> torch.Tensor:
    """Compute logits ``[B, T, V]`` of the sampled distribution at every position, in float32.

    Rows are padded on the right. Position ``t`` predicts token ``t``, and logits of the first token are 0. It stores
    all logits at once, so use it for interoperation, not for training. Recorded supports are ignored.
    """
    positions = torch.ones_like(tokens, dtype=torch.bool)
    positions[:, 0] = False
    if distribution.counts_tokens or distribution.has_rules:
        raise NotImplementedError("logits at every position cannot have penalties or rules of a turn; use score()")
    seen = _seen_tokens(model, tokens, positions) if distribution.repetition_penalty != 1 else None
    logits = model(input_ids=tokens, use_cache=False, **kwargs).logits.float()
    flat = process_logits(logits[:, :-1].flatten(0, 1), distribution, seen, tokens[:, 1:].flatten())
    return torch.cat([torch.zeros_like(logits[:, :1]), flat.view_as(logits[:, 1:])], 1)
