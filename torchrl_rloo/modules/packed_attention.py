"""Attention over a pack of rows in one sequence, in which each row attends only to its own tokens, shared or not.

Transformers can replace a model's attention by name; the name is set for one forward pass only. A context variable
holds the plan, since model families differ in the keyword arguments that they pass on. The full ``[N, N]`` mask is
never built.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn

from torchrl_rloo.data.rows import pad
from torchrl_rloo.engines.head import attention_implementation
from torchrl_rloo.modules.context_parallel import ContextGroup

PACKING_HINT = 'use packing="none"'
MIN_FILL = 0.8  # shortest segment of an attention call, as a share of its longest; 0.7 to 0.9 is equally fast

_NAME = "torchrl_rloo_packed"
_PLAN: ContextVar[AttentionPlan | None] = ContextVar("attention_plan", default=None)
# Arguments without effect on a call that has a plan. Any other argument that is set raises.
_IGNORED_KWARGS = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position"}
)


class Segment(NamedTuple):
    """Run of consecutive tokens of a pack; each attends to earlier tokens of the run and to the whole prefix.

    Attributes:
        start: index of the first token in the pack.
        length: number of tokens, at least 1.
        prefix: runs of the pack, in order, that the row has before this one.
    """

    start: int
    length: int
    prefix: tuple[range, ...] = ()

    @property
    def prefix_length(self) -> int:
        """Number of tokens of the prefix."""
        return sum(map(len, self.prefix))

    @property
    def keys(self) -> torch.Tensor:
        """Indices in the pack of the prefix and the run, ``[prefix_length + length]``."""
        return index_runs([*self.prefix, range(self.start, self.start + self.length)])


def index_runs(runs: Sequence[range]) -> torch.Tensor:
    """Return the indices of runs, one after the other."""
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


class _Block:
    """Segments of similar lengths as one rectangular attention call, padded on the right.

    Rows of queries begin ``skipped`` tokens into each prefix. Queries of the rest of a prefix are computed for nothing.

    Args:
        first: first segment.
    """

    def __init__(self, first: Segment):
        total = first.prefix_length + first.length
        # Causal attention to the whole row skips half of the work, which a mask does not
        self.skipped = 0 if first.length >= MIN_FILL * total else first.prefix_length
        self.segments, self.length, self.shortest = [first], total - self.skipped, first.length
        self._masks: dict[int | None, torch.Tensor] = {}

    def add(self, segment: Segment) -> bool:
        """Add a segment with at least ``skipped`` tokens of prefix, and return True, unless its length differs."""
        length = max(self.length, segment.prefix_length + segment.length - self.skipped)
        shortest = min(self.shortest, segment.length)
        if shortest < MIN_FILL * length:
            return False
        self.segments.append(segment)
        self.length, self.shortest = length, shortest
        return True

    def finish(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the indices of queries and keys, and bool True for queries of the segments, ``[size * length]``."""
        # Pad with index 0: padding follows all real tokens, so none attends to it
        keys = pad([s.keys for s in self.segments])
        self.shape, self.device = keys.shape, device
        column = torch.arange(self.skipped, keys.shape[1])
        starts = torch.tensor([[s.prefix_length] for s in self.segments])
        stops = starts + torch.tensor([[s.length] for s in self.segments])
        real = (starts <= column) & (column < stops)
        return keys[:, self.skipped :].flatten(), keys.flatten(), real.flatten()

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return bool ``[L, P + L]``, True where a query attends to a key; None if plain causal attention is equal."""
        total = self.shape[1]
        if window is not None and window >= total:
            window = None
        if window is None and not self.skipped:
            return None
        if window not in self._masks:
            position = torch.arange(total, device=self.device)
            back = position[self.skipped :, None] - position
            self._masks[window] = (back >= 0) & (back < (window or total))
        return self._masks[window]


class AttentionPlan:
    """Plan of the attention within a pack, prepared once for all layers.

    Args:
        segments: segments that cover the pack, in order.
        device: device of the model.
        context: ranks that split the tokens of the pack. None computes all of them.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, context: ContextGroup | None = None):
        self.segments, self.device, self.context = list(segments), device, context
        self.num_tokens = sum(s.length for s in segments)
        self.windows: list[int | None] = []  # sliding window of each attention call so far

    @cached_property
    def blocks(self) -> tuple[list[_Block], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention calls, indices of their queries and keys, and the index ``[N]`` of each token in their outputs."""
        # Group segments of similar lengths, by length of their prefixes, longest first
        blocks: list[_Block] = []
        for s in sorted(self.segments, key=lambda s: (s.prefix_length, -s.length)):
            if not any(block.add(s) for block in blocks):
                blocks.append(_Block(s))
        # Map each token to its place among the padded outputs
        queries, keys, real = map(torch.cat, zip(*(block.finish(self.device) for block in blocks), strict=True))
        tokens = index_runs([range(s.start, s.start + s.length) for block in blocks for s in block.segments])
        places = real.nonzero()[:, 0][tokens.argsort()]
        return blocks, *(index.to(self.device) for index in (queries, keys, places))

    @cached_property
    def ragged(self) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor, int, int]:
        """Inputs of variable-length kernels: key indices, offsets of queries and keys, and the longest of each.

        The indices are None if no segment has a prefix: the keys are then those of the pack, in order.
        """
        keys = [s.keys for s in self.segments]
        lengths = [torch.tensor([0, *(s.length for s in self.segments)]), torch.tensor([0, *map(len, keys)])]
        offsets = [n.cumsum(0).to(self.device, torch.int32) for n in lengths]
        indices = torch.cat(keys).to(self.device) if any(s.prefix for s in self.segments) else None
        return indices, *offsets, *(int(n.max()) for n in lengths)


def _packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attend over heads-first ``[1, heads, N, D]`` and return ``[1, N, heads, D]``, as Transformers expects."""
    plan = _PLAN.get()
    if plan is None:
        raise RuntimeError(
            f"{type(module).__name__} was called while another thread runs a packed forward of the same model; use a "
            "separate model per thread"
        )
    num_tokens = plan.num_tokens if plan.context is None else plan.num_tokens // plan.context.size
    if tuple(query.shape[::2]) != (1, num_tokens) or key.shape[2] != num_tokens:
        raise RuntimeError(f"expected a pack of {num_tokens} tokens, got query {list(query.shape)}")
    # Reject every kind of attention that the plan cannot describe
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    extra = sorted(k for k, v in kwargs.items() if k not in _IGNORED_KWARGS and v is not None and v is not False)
    if not causal or attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} is not plainly causal")
    if extra:
        raise NotImplementedError(f"{type(module).__name__} attends with {', '.join(extra)}")
    if dropout:
        raise NotImplementedError(f"attention dropout {dropout} cannot be packed; set it to 0, or {PACKING_HINT}")
    # Attend within the segments, and record the window for the probe of packing
    plan.windows.append(sliding_window)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = _attend_ragged if _has_ragged_kernel(query) else _attend_blocks
    if plan.context is None:
        return attend(plan, q, k, v, scaling, sliding_window)[None], None
    # With split tokens, attend over all of them by some of the heads
    q, k, v = (plan.context.to_heads(x) for x in (q, k, v))
    return plan.context.to_tokens(attend(plan, q, k, v, scaling, sliding_window))[None], None


def _attend_blocks(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """Attend over ``[N, heads, D]`` in blocks of segments of similar length."""
    blocks, queries, keys, places = plan.blocks
    query_shapes = [(b.shape[0], b.shape[1] - b.skipped) for b in blocks]
    key_shapes = [b.shape for b in blocks]

    def take(x: torch.Tensor, index: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        # Gather whole rows, faster than single heads, at once: a gradient of all tokens for each block would be slow
        parts = x.flatten(1).index_select(0, index).split([math.prod(shape) for shape in shapes])
        return [part.view(*shape, *x.shape[1:]).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]

    # Make one call per block, whose segments differ little in length and need little padding
    outputs = []
    inputs = (take(q, queries, query_shapes), take(k, keys, key_shapes), take(v, keys, key_shapes))
    for block, *states in zip(blocks, *inputs, strict=True):
        mask = block.mask(window)
        out = nn.functional.scaled_dot_product_attention(
            *states, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    # Restore the order of the tokens, without padding
    return torch.cat(outputs).flatten(1).index_select(0, places).view(len(q), q.shape[1], -1)


def _attend_ragged(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """Attend in one call of a kernel for ragged rows, which aligns each row's last query with its last key."""
    from torch.nn.attention.varlen import varlen_attn

    keys, query_offsets, key_offsets, longest_query, longest_key = plan.ragged
    k, v = (x.contiguous() if keys is None else x.index_select(0, keys) for x in (k, v))
    # torch 2.11 has the same kernel without the flag, and does not compare the numbers of heads
    grouped = q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn(
        q.contiguous(),
        k,
        v,
        query_offsets,
        key_offsets,
        longest_query,
        longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **({"enable_gqa": True} if grouped else {}),
    )


def _has_ragged_kernel(query: torch.Tensor) -> bool:
    """Return whether FlashAttention 2 supports the query: 16-bit floats, heads of 8 to 256, and Ampere or newer."""
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return (
        query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _call_with_plan(config, plan: AttentionPlan, function: Callable, *args):
    """Call ``function(*args)`` with the model's attention replaced by the plan's."""
    from transformers import AttentionInterface

    AttentionInterface.register(_NAME, _packed_attention)  # without a mask function of that name, models build no mask
    with attention_implementation(config, _NAME):
        token = _PLAN.set(plan)
        try:
            return function(*args)
        finally:
            _PLAN.reset(token)


@contextmanager
def _recompute_with_plan(decoder: nn.Module, config, plan: AttentionPlan) -> Iterator[None]:
    """Apply the same plan when gradient checkpointing recomputes layers."""
    with ExitStack() as stack:
        for module in decoder.modules():
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func"):
                checkpoint = module._gradient_checkpointing_func
                stack.callback(setattr, module, "_gradient_checkpointing_func", checkpoint)
                module._gradient_checkpointing_func = partial(_checkpoint_with_plan, checkpoint, config, plan)
        yield


def _checkpoint_with_plan(checkpoint: Callable, config, plan: AttentionPlan, function: Callable, *args):
    return checkpoint(partial(_call_with_plan, config, plan, function), *args)


def forward_pack(
    decoder: nn.Module, ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Compute the hidden states of a pack.

    The decoder's attention is restored afterwards. The model's gradient checkpointing works; checkpointing wrappers
    around its layers do not.

    Args:
        decoder: Transformers decoder, e.g. ``model.get_decoder()``.
        ids: ``[N]`` int64.
        position_ids: ``[N]`` int64, counted within each row.
        plan: attention plan of the pack.

    Returns:
        Hidden states ``[N, H]``.

    Raises:
        NotImplementedError: if a plan cannot describe the decoder's attention.
    """
    config = decoder.config.get_text_config()

    def forward() -> torch.Tensor:
        out = decoder(input_ids=ids[None], position_ids=position_ids[None], use_cache=False)
        return out.last_hidden_state[0]

    with _recompute_with_plan(decoder, config, plan):
        return _call_with_plan(config, plan, forward)
