"""Cached decoding with a transformers model, which gives the next token's logits of every line.

Importing this module imports transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torchrl_rloo.data.rows import pad
from torchrl_rloo.engines.head import Head, attention_implementation
from torchrl_rloo.images.encoder import PassImages

_GROUPED = "torchrl_rloo_grouped"
_MIN_SPARE_POSITIONS = 64  # positions that a grown cache buffer has beyond those in use, at least


class Decoder:
    """Causal language model with a key-value cache of several lines; ``logits`` ``[lines, V]`` are of the next token.

    Equal prompts ``[P_i]`` are read once. ``longest`` counts the tokens of the longest line, prompt and turn, where the
    positions of finished lines stop. ``track_seen`` records ``seen`` ``[lines, V]``, the tokens that a line contains.
    ``images`` are those of the prompts, for a vision-language model.
    """

    def __init__(
        self,
        model,
        head: Head | None,
        prompts: Sequence[torch.Tensor],
        longest: int,
        track_seen: bool,
        images: PassImages | None = None,
    ):
        if any(m.training and getattr(m, "gradient_checkpointing", False) for m in model.modules()):
            raise ValueError(
                "gradient checkpointing in training mode disables the key-value cache; call model.eval(), which still "
                "recomputes layers"
            )

        self.argument = cache_argument(model if head is None else head.decoder)
        self.last = longest - 1

        # Read each distinct prompt once, padded on the left so that all end at the same position
        self.model, self.head = model, head
        prompts = prompts if images is None else images.tokens  # equal only with equal images
        unique: dict[tuple[int, ...], int] = {}
        lines = [unique.setdefault(tuple(p.tolist()), len(unique)) for p in prompts]
        prompts = [torch.tensor(prompt) for prompt in unique]
        ids = pad(prompts, side="left")
        self.mask = pad([torch.ones_like(p) for p in prompts], side="left").to(model.device)
        self.padded = not bool(self.mask.all())
        self.cache = DynamicCache(config=model.config)
        plain = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        self.cache.layers = [_with_spare(layer) for layer in self.cache.layers]
        self.position, positions = self.mask.sum(1), (self.mask.cumsum(1) - 1).clamp(min=0)
        mask, shown = self.mask if self.padded else None, {}
        if images is not None:
            shown = images.arguments(ids, model.device)
            if (whole := images.whole_images(ids)) is not None and shown:
                mask = image_masks(model.config.get_text_config(), whole.to(model.device), self.mask)
            if images.positions is not None:
                positions = self._image_positions(images, unique)
            ids = images.real(ids)
        self.logits: torch.Tensor | None = None
        self.logits = self._forward(ids.to(model.device), mask, positions, **shown)

        # Prepare boolean masks and grouped heads for decoding, if the model supports them
        config = model.config.get_text_config()
        decoder = model if head is None else head.decoder
        standard = plain and config._attn_implementation == "sdpa" and decoder._supports_attention_backend
        self.own_mask = standard and self.padded
        self.padded &= any(isinstance(layer, CacheLayerMixin) for layer in self.cache.layers)  # states need no mask
        self.grouped = config if self.own_mask and model.device.type == "cpu" else None
        self.seen = None
        if track_seen:
            self.seen = torch.zeros_like(self.logits, dtype=torch.bool)
            real = prompts if images is None else map(images.real, prompts)
            for row, prompt in enumerate(real):
                self.seen[row, prompt] = True

        # Expand distinct prompts to lines
        if len(lines) != len(unique):
            indices = torch.tensor(lines, device=model.device)
            self.logits = self.logits[indices]
            self.keep(indices)

    def _image_positions(self, images: PassImages, unique: Iterable[tuple[int, ...]]) -> torch.Tensor:
        """Return positions ``[3, B, T]`` of the distinct prompts, and set those of their next tokens."""
        rows = {tuple(t.tolist()): p for t, p in zip(images.tokens, images.positions, strict=True)}
        positions, device = [rows[prompt] for prompt in unique], self.model.device
        self.position = torch.stack([p.max() + 1 for p in positions]).to(device)
        return torch.stack([pad([p[axis] for p in positions], side="left") for axis in range(3)]).to(device)

    def _forward(self, ids: torch.Tensor, mask, positions: torch.Tensor, **shown: torch.Tensor) -> torch.Tensor:
        inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            self.argument: self.cache,
            "use_cache": True,
            **shown,
        }
        if self.head is not None:
            hidden = self.head.decoder(**inputs).last_hidden_state[:, -1]
            # Overwrite the logits of the last token: new memory costs as much as a tenth of the product
            reused = self.logits[: len(hidden)] if self.logits is not None and len(hidden) <= len(self.logits) else None
            return self.head.logits(hidden, reused)
        return self.model(**inputs, logits_to_keep=1).logits[:, -1].float()

    def keep(self, lines: torch.Tensor) -> None:
        """Keep the lines of a bool mask ``[lines]``, or of indices ``[n]``, which may repeat. Feed them next."""
        indices = lines.nonzero()[:, 0] if lines.dtype == torch.bool else lines
        self.cache.reorder_cache(indices)  # unlike batch_select_indices, recurrent states have it
        self.mask, self.position = self.mask[indices], self.position[indices]
        if self.seen is not None:
            self.seen = self.seen[indices]

    def feed(self, tokens: torch.Tensor) -> None:
        """Append one token ``[lines]`` to every line, and compute the logits of the next."""
        mask, position = None, self.position[:, None]
        self.position = (self.position + 1).clamp(max=self.last)
        if self.padded:
            self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
            mask = self.mask.bool()[:, None, None] if self.own_mask else self.mask
        with nullcontext() if self.grouped is None else attention_implementation(self.grouped, _GROUPED):
            self.logits = self._forward(tokens[:, None], mask, position)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)


def image_masks(config, whole: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return masks by type of layer, ``[B, 1, T, T]``, in which an image's tokens see each other in both directions.

    ``whole`` ``[B, T]`` numbers the images (``PassImages.whole_images``), and ``real`` ``[B, T]`` marks no padding.
    """
    place = torch.arange(whole.shape[1], device=whole.device)
    back = place[:, None] - place
    together = (whole[:, :, None] == whole[:, None]) & (whole[:, :, None] > 0)
    allowed = real.bool()[:, None] | (back == 0)  # padding sees itself, since a row without keys would be NaN
    windows = {"full_attention": len(place), "sliding_attention": getattr(config, "sliding_window", None) or len(place)}
    seen = {kind: (((back >= 0) & (back < window)) | together) & allowed for kind, window in windows.items()}
    return {kind: mask[:, None] for kind, mask in seen.items()}


def cache_argument(module: torch.nn.Module) -> str:
    """Return the argument that takes a cache. Wrappers, such as those of peft, pass it to their decoder."""
    for part in (module, module.get_decoder()):
        known = inspect.signature(part.forward).parameters
        for name in ("cache", "past_key_values", "cache_params"):
            if name in known:
                return name
    raise NotImplementedError(f"{type(module).__name__} takes no cache of Transformers")


def _with_spare(layer: CacheLayerMixin) -> CacheLayerMixin:
    """Return an empty layer with spare positions if there is one for its type."""
    if type(layer) is DynamicSlidingWindowLayer:
        return _SlidingLayer(layer.sliding_window)
    return _Layer() if type(layer) is DynamicLayer else layer


class _Layer(DynamicLayer):
    """Cache layer with spare positions, so that a new token does not copy all tokens before it."""

    sliding_window: int | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values ``[B, heads, n, D]``, and return views of all."""
        added = key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._allocate(key_states[..., :0, :], value_states[..., :0, :], added)
        elif self.end + added > self.buffers[0].shape[-2]:
            self._allocate(self.keys, self.values, self.keys.shape[-2] + added)
        start, end = self.end - self.keys.shape[-2], self.end + added
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[..., self.end : end, :] = states
        self.end = end
        keys, values = self.keys, self.values = [buffer[..., start:end, :] for buffer in self.buffers]
        if self.sliding_window is not None:
            self.cumulative_length += added
            self.keys, self.values = (states[..., 1 - self.sliding_window :, :] for states in (keys, values))
        return keys, values

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Copy the states to the start of buffers that are made for ``length`` positions."""
        self.end = keys.shape[-2]
        self.buffers = [_grow(states, length) for states in (keys, values)]
        self.keys, self.values = (buffer[..., : self.end, :] for buffer in self.buffers)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep only these lines."""
        if self.is_initialized:
            self._allocate(self.keys[beam_idx], self.values[beam_idx], self.keys.shape[-2])


class _SlidingLayer(_Layer, DynamicSlidingWindowLayer):
    """Cache layer with spare positions for attention to the last positions only."""


def buffer_length(length: int) -> int:
    """Return the positions of a cache buffer that is made for ``length`` positions: half as many more."""
    return length + max(_MIN_SPARE_POSITIONS, length // 2)


def _grow(states: torch.Tensor, length: int) -> torch.Tensor:
    """Copy ``[B, heads, n, D]`` to the start of a buffer for ``length`` positions and half as many more."""
    buffer = states.new_empty(*states.shape[:-2], buffer_length(length), states.shape[-1])
    buffer[..., : states.shape[-2], :] = states
    return buffer


def _grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Compute bit-identical "sdpa" attention without copying the keys and values that heads share.

    transformers copies them whenever there is a mask, since CUDA has no fast kernel for both. The CPU has one.
    """
    if query.shape[2] > 1 or query.shape[1] == key.shape[1] or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    out = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


AttentionInterface.register(_GROUPED, _grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
