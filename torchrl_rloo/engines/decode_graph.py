"""Decoding over buffers of a fixed size, one step of which a CUDA graph replays.

A step of a small model takes far less time on a GPU than Python needs to launch its kernels one by one. A graph
launches them at once. It requires that addresses and shapes of all tensors stay the same from step to step.

Importing this module imports transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from torchrl_rloo.engines.attention import attention_implementation
from torchrl_rloo.engines.root import is_distributed

MIN_STEPS = 16  # steps below which a capture costs more than it saves
CHUNK = 1024  # positions by which a full buffer grows; every growth is a new capture
TOLERANCE = 2e-2  # difference between replayed and launched logits, as a share of the largest
_ALIGNMENT = 64  # positions; attention kernels read masks in rows of aligned length
_NAME = "torchrl_rloo_fixed"
_LOGGER = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def supports_graph(model: torch.nn.Module) -> bool:
    """Return whether decoding may be captured: a model in one process, on a GPU, with fixed rotary frequencies."""
    rope = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    fixed = "longrope" not in rope and "dynamic" not in rope
    return model.device.type == "cuda" and fixed and not any(map(is_distributed, model.modules()))


class FixedDecoding:
    """Key-value cache of fixed size with a step that feeds one token to every line.

    Args:
        forward: function of ids ``[lines, 1]``, a bool mask ``[lines, 1, 1, positions]`` and position ids
            ``[lines, 1]``, which returns logits ``[lines, V]``. It reads and writes ``cache``.
        cache: cache after the prompts. Its layers are replaced.
        config: text config of the model, whose attention is replaced during a step.
        mask: ``[lines, length]``, nonzero on real tokens of the padded prompts.
        position: ``[lines]`` position id of the next token.
        last: largest position id; finished lines stay there.
        steps: maximum number of steps.
    """

    def __init__(
        self, forward: Forward, cache: Cache, config, mask: torch.Tensor, position: torch.Tensor, last: int, steps: int
    ):
        self.forward, self.cache, self.config = forward, cache, config
        self.length, self.limit = mask.shape[1], mask.shape[1] + steps
        self.index = torch.tensor([self.length], device=mask.device)  # where a step writes
        self.mask = mask.bool()[:, None, None]
        self.position, self.last = position[:, None].clone(), last
        cache.layers = [_FixedLayer(layer.keys, layer.values, self.index) for layer in cache.layers]
        self._resize()

    def _resize(self) -> None:
        """Move to buffers for the next steps, which the next step captures."""
        capacity = min(self.limit, self.length + CHUNK)
        capacity = -(-capacity // _ALIGNMENT) * _ALIGNMENT
        for layer in self.cache.layers:
            layer.keys, layer.values = (_extended(x, 2, capacity) for x in (layer.keys, layer.values))
        self.mask = _extended(self.mask, 3, capacity)
        self._reset()

    def _reset(self) -> None:
        self.tokens = torch.zeros_like(self.position)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.may_capture = self.index.is_cuda

    def keep(self, indices: torch.Tensor) -> None:
        """Keep lines by index ``[n]``."""
        self.cache.reorder_cache(indices)
        self.mask, self.position = self.mask[indices], self.position[indices]
        self._reset()

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token ``[lines]`` to every line, and return the next logits ``[lines, V]``.

        A later step overwrites them.
        """
        if self.length == self.mask.shape[3]:
            self._resize()
        self.tokens.copy_(tokens[:, None])
        if self.graph is not None:
            self.graph.replay()
        elif self.may_capture:
            self._capture()
        else:
            self.logits = self._step()
        self.length += 1
        return self.logits

    def _step(self) -> torch.Tensor:
        self.mask.index_fill_(3, self.index, True)
        with attention_implementation(self.config, _NAME):
            logits = self.forward(self.tokens, self.mask, self.position)
        self.position.add_(1).clamp_(max=self.last)
        self.index.add_(1)
        return logits

    def _capture(self) -> None:
        """Do one step in a new graph, and compare its logits with those of launched kernels, which are kept if not."""
        self.may_capture = False
        position = self.position.clone()  # a step leaves it as it is on finished lines at the last position
        # Launch the step on another stream, as a capture requires: libraries allocate on first use
        stream, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            expected = self._step()
        stream.wait_stream(side)
        self.logits = expected
        # Capture it, and replay the same step again, which writes the same keys and values
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = self._step()
        except RuntimeError as error:  # also of a model that reads a tensor on the CPU
            torch.cuda.set_stream(stream)
            _LOGGER.warning("decoding of this model cannot be captured as a CUDA graph and is slower: %s", error)
            return
        self.position.copy_(position)
        self.index.sub_(1)
        graph.replay()
        if (captured - expected).abs().max() > TOLERANCE * expected.abs().max():
            _LOGGER.warning("a CUDA graph of this model gives other logits and is not used; decoding is slower")
            return
        self.graph, self.logits = graph, captured


class _FixedLayer(DynamicLayer):
    """Cache layer that writes at an index on the device and returns all its positions."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor):
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.index = keys, values, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values ``[B, heads, 1, D]``, and return all positions."""
        self.keys.index_copy_(2, self.index, key_states)
        self.values.index_copy_(2, self.index, value_states)
        return self.keys, self.values


def _extended(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Copy a tensor to the start of one of another size along ``dim``, filled with zeros: masked NaN would spread."""
    shape = list(x.shape)
    shape[dim] = size
    buffer = x.new_zeros(shape)
    used = min(size, x.shape[dim])
    buffer.narrow(dim, 0, used).copy_(x.narrow(dim, 0, used))
    return buffer


def _fixed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend with one query per line, in one kernel that reads the keys and values that heads share once.

    The heads that share a key take the place of query positions, since CUDA has no fast kernel for masks and shared
    heads. transformers copies the keys and values instead.
    """
    if query.shape[2] > 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    lines, heads, _, size = query.shape
    grouped = query.reshape(lines, key.shape[1], heads // key.shape[1], size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
    return out.reshape(lines, 1, heads, value.shape[-1]), None


AttentionInterface.register(_NAME, _fixed_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
