"""Training forward without padding: hidden states of action tokens from rows packed into one sequence.

Packings differ in speed and memory, not in the result:

* ``"packed"`` concatenates all rows.
* ``"shared_prefix"`` also processes tokens with which several rows begin only once: prompts, turns and branches.

Both leave out the last action token of each row and the tokens after it, since no prediction depends on them.

In attention each row sees only its own tokens, shared or not. Transformers can replace a model's attention by name; the
name is set for one forward pass only. A context variable holds the plan, since model families differ in the keyword
arguments that they pass on. The full ``[N, N]`` mask is never built.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import accumulate
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchrl_rloo.data.rows import PACKINGS, pad, prefix_order
from torchrl_rloo.engines.head import attention_implementation, evaluation_mode, probe_tolerance
from torchrl_rloo.images.encoder import PassImages
from torchrl_rloo.modules.context_parallel import ContextGroup, context_group
from torchrl_rloo.weight_update.rotary import fix_frequencies

PACKED = PACKINGS[1:]

# Reason by probed decoder; None if it can be packed
_REFUSALS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def action_hidden(
    decoder: nn.Module,
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    packing: Literal["packed", "shared_prefix"],
) -> torch.Tensor:
    """Compute hidden states at the positions that predict the action tokens, differentiable.

    They equal those of padded rows up to rounding. A probe checks the decoder on first use.

    Args:
        decoder: module from ids to hidden states, e.g. ``model.get_decoder()``. Its attention is replaced for this pass
            only.
        tokens: ids of ``B`` rows, ``[T_i]`` each, on any device. They may be padded on the right.
        action_masks: ``B`` bool masks ``[T_i]``, True on action tokens.
        packing: ``"packed"`` or ``"shared_prefix"``.

    Returns:
        ``[N, H]`` for ``N`` action tokens, in row order.

    Raises:
        ValueError: if there are no rows, shapes differ, or a row begins with an action token.
        NotImplementedError: if the decoder cannot be packed; see :func:`supports_packing`.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> decoder = build_model(build_tokenizer(), seed=0).eval().get_decoder()
        >>> tokens = [torch.arange(5), torch.arange(3)]
        >>> masks = [torch.arange(5) >= 2, torch.arange(3) >= 2]
        >>> action_hidden(decoder, tokens, masks, "shared_prefix").shape[0]  # 3 + 1 action tokens
        4
    """
    check_packing(decoder)
    if (context := context_group(decoder)) is not None:
        raise NotImplementedError(
            f"action_hidden computes whole packs, but context_parallel={context.size}; use TransformersWrapper.score"
        )
    return _action_states(decoder, tokens, action_masks, packing).hidden


class ActionStates(NamedTuple):
    """Hidden states at the positions that predict action tokens."""

    hidden: torch.Tensor  # [n, H], in row order
    owned: torch.Tensor | None  # [N] bool, True for the action tokens whose states this rank has; None for all of them


def action_states(
    decoder: nn.Module,
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    packing: Literal["packed", "shared_prefix"],
    images: PassImages | None = None,
) -> ActionStates:
    """Compute :func:`action_hidden` for the action tokens of this rank; context parallelism splits them over ranks."""
    check_packing(decoder)
    return _action_states(decoder, tokens, action_masks, packing, images=images)


def supports_packing(decoder: nn.Module) -> bool:
    """Return whether :func:`action_hidden` is exact for a decoder, after a probe of a few tokens on first use.

    It is False if tokens interact other than by plain causal attention: state space layers, convolutions, and chunked,
    soft-capped or sink attention. It is also False if the decoder's attention or positions cannot be set.

    Raises:
        MemoryError: if the probe runs out of memory (on CUDA ``torch.OutOfMemoryError``). The next call probes again.
    """
    return _refusal(decoder) is None


def check_packing(decoder: nn.Module) -> None:
    """Raise a NotImplementedError with the reason if :func:`supports_packing` is False."""
    if reason := _refusal(decoder):
        raise NotImplementedError(f"{type(decoder).__name__} cannot be packed ({reason}); {PACKING_HINT}")


def _refusal(decoder: nn.Module) -> str | None:
    if decoder not in _REFUSALS:
        try:
            fix_frequencies(decoder)
            device = decoder.get_input_embeddings().weight.device
            # Disable autocast: its rounding would look like attention between rows
            with evaluation_mode(decoder), torch.autocast(device.type, enabled=False):
                _REFUSALS[decoder] = _probe(decoder)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # an unsupported model may raise anything; not cached
            return f"{type(error).__name__}: {error}"
    return _REFUSALS[decoder]


@torch.no_grad()
def _probe(decoder: nn.Module) -> str | None:
    """Compare a few packed rows, two of which share a prompt, with separate forward passes."""
    config = decoder.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    # Run each row by itself for the expected hidden states
    embeddings = decoder.get_input_embeddings().weight
    rows = [torch.tensor(r) % len(embeddings) for r in ([1, 2, 3, 4, 5, 6], [7, 8, 9, 2], [1, 2, 3, 7, 8])]
    masks = [torch.arange(len(r)) >= 3 for r in rows]
    alone = [decoder(input_ids=r[None].to(embeddings.device), use_cache=False).last_hidden_state[0] for r in rows]
    expected = torch.cat([h[:-1][m[1:].to(h.device)] for h, m in zip(alone, masks, strict=True)]).float()
    tolerance = probe_tolerance(decoder) * float(expected.abs().max())
    # Compare both packings with them
    for packing in PACKED:
        windows: list[int | None] = []
        hidden, owned = _action_states(decoder, rows, masks, packing, windows)
        hidden = (hidden if owned is None else context_group(decoder).gather(hidden, owned)).float()
        if not torch.allclose(hidden, expected, rtol=0, atol=tolerance):
            return f"packed rows differ from separate rows by {float((hidden - expected).abs().max()):.2g}"
        if (reason := _window_refusal(config, windows)) is not None:
            return reason
    return None


def _window_refusal(config, windows: list[int | None]) -> str | None:
    """Return a reason unless attention calls receive the sliding window, which is longer than the probe's rows."""
    if not windows:
        return "its attention cannot be replaced"
    types = getattr(config, "layer_types", None)
    everywhere = len(windows) if getattr(config, "sliding_window", None) else 0
    expected = list(types).count("sliding_attention") if types else everywhere
    received = sum(w is not None for w in windows)
    return (
        None
        if received == expected
        else f"{expected} layers have a sliding window, but {received} pass it to their attention"
    )


class _Pack(NamedTuple):
    """Rows packed into one sequence."""

    ids: torch.Tensor  # [N] token ids
    position_ids: torch.Tensor  # [N], or [3, N] for some models of images, within each row
    predictors: torch.Tensor  # index of the token before each action token, in row order
    segments: list[Segment]  # segments of the attention plan


def _pack(
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    packing: str,
    row_positions: Sequence[torch.Tensor] | None = None,
) -> _Pack:
    # Cut each row after its last needed token
    mask = pad(action_masks, False)
    stops = (mask * torch.arange(mask.shape[1])).amax(1).tolist()
    if not any(stops):  # without action tokens, run the decoder anyway, so that its parameters are in the graph
        stops[0] = 1
    rows = [t[:stop] for t, stop in zip(tokens, stops, strict=True)]
    # Append the tokens of each row that the row before it lacks
    order, shared = prefix_order(rows) if packing == "shared_prefix" else (range(len(rows)), [0] * len(rows))
    ids, positions, segments = [], [], []
    paths: list[list[range]] = [[]] * len(rows)  # per row: its runs of the pack
    size, path = 0, []
    for i, length in zip(order, shared, strict=True):
        path, added = _first(path, length), range(size, size + stops[i] - length)
        if added:
            segments.append(Segment(size, len(added), tuple(path)))
            ids.append(rows[i][length:])
            added_positions = torch.arange(length, stops[i])
            positions.append(added_positions if row_positions is None else row_positions[i][:, length : stops[i]])
            path, size = [*path, added], added.stop
        paths[i] = path
    # Map each action token to the pack index of the token before it
    before = torch.cat([torch.cat([m[1:], m.new_zeros(1)])[:stop] for m, stop in zip(action_masks, stops, strict=True)])
    predictors = index_runs([run for path in paths for run in path])[before]
    return _Pack(torch.cat(ids), torch.cat(positions, -1), predictors, segments)


def _first(path: Sequence[range], length: int) -> list[range]:
    """Return the first tokens of a path."""
    starts = accumulate(map(len, path), initial=0)
    return [run[: length - start] for run, start in zip(path, starts, strict=False) if start < length]


def _action_states(
    decoder: nn.Module,
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    packing: str,
    windows: list[int | None] | None = None,
    images: PassImages | None = None,
) -> ActionStates:
    tokens, masks = [t.cpu() for t in tokens], [m.cpu() for m in action_masks]
    _check(tokens, masks, packing)
    row_positions = None
    if images is not None:  # their ids differ between images, so that rows share the same ones only
        tokens, row_positions = images.tokens, images.positions
    # Lay out the pack; with context parallelism, each rank runs an equal slice of it
    context, pack = context_group(decoder), _pack(tokens, masks, packing, row_positions)
    part = slice(None)
    if context is not None:
        if images is not None:
            raise NotImplementedError(f"context_parallel={context.size} cannot split images; set it to 1")
        pack = _padded(pack, context.size)
        part = context.own(len(pack.ids))
    # Run it
    device = decoder.get_input_embeddings().weight.device
    ids, shown, whole = pack.ids[part], {}, None
    if images is not None:
        shown, whole, ids = images.arguments(ids, device), images.whole_images(ids), images.real(ids)
    plan = AttentionPlan(pack.segments, device, context, whole if shown else None)
    hidden = forward_pack(decoder, ids.to(device), pack.position_ids[..., part].to(device), plan, **shown)
    if windows is not None:
        windows += plan.windows
    if context is None:
        return ActionStates(hidden.index_select(0, pack.predictors.to(device)), None)
    owned = (pack.predictors >= part.start) & (pack.predictors < part.stop)
    return ActionStates(hidden.index_select(0, (pack.predictors[owned] - part.start).to(device)), owned.to(device))


def _padded(pack: _Pack, multiple: int) -> _Pack:
    """Append a segment that nothing reads, so that the number of tokens is a multiple."""
    size = len(pack.ids)
    more = -size % multiple
    if not more:
        return pack
    ids = torch.cat([pack.ids, pack.ids[:1].expand(more)])
    positions = torch.cat([pack.position_ids, torch.arange(more)])
    return pack._replace(ids=ids, position_ids=positions, segments=[*pack.segments, Segment(size, more)])


def _check(tokens: list[torch.Tensor], action_masks: list[torch.Tensor], packing: str) -> None:
    if packing not in PACKED:
        raise ValueError(f"packing={packing!r} must be one of {PACKED}")
    if not tokens or any(t.ndim != 1 or not len(t) for t in tokens):
        raise ValueError(f"tokens must be rows of at least one id, got shapes {[list(t.shape) for t in tokens]}")
    if [t.shape for t in tokens] != [m.shape for m in action_masks]:
        raise ValueError(
            f"action_masks must have the shapes of tokens, {[len(t) for t in tokens]}, got "
            f"{[list(m.shape) for m in action_masks]}"
        )
    if any(m[0] for m in action_masks):
        raise ValueError("the first token of a row is an action token; every row requires at least one prompt token")


PACKING_HINT = 'use packing="none"'
MIN_FILL = 0.8  # shortest segment of an attention call, as a share of its longest; 0.7 to 0.9 is equally fast

_NAME = "torchrl_rloo_packed"
_PLAN: ContextVar[AttentionPlan | None] = ContextVar("attention_plan", default=None)
# Arguments without effect on a call that has a plan. Any other argument that is set raises.
_IGNORED_KWARGS = frozenset(
    {"position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position"}
)


class Segment(NamedTuple):
    """Run of consecutive tokens of a pack; each attends to earlier tokens of the run and to the whole prefix."""

    start: int  # index of the first token in the pack
    length: int  # number of tokens, at least 1
    prefix: tuple[range, ...] = ()  # runs of the pack, in order, that the row has before this one

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

    def finish(
        self, device: torch.device, whole_images: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the indices of queries and keys, and bool True for queries of the segments, ``[size * length]``."""
        # Pad with index 0: padding follows all real tokens, so none attends to it
        keys = pad([s.keys for s in self.segments])
        self.shape, self.device = keys.shape, device
        column = torch.arange(self.skipped, keys.shape[1])
        starts = torch.tensor([[s.prefix_length] for s in self.segments])
        stops = starts + torch.tensor([[s.length] for s in self.segments])
        real = (starts <= column) & (column < stops)
        self._together = None if whole_images is None else self._same_images(keys, stops, whole_images).to(device)
        return keys[:, self.skipped :].flatten(), keys.flatten(), real.flatten()

    def _same_images(self, keys: torch.Tensor, stops: torch.Tensor, whole_images: torch.Tensor) -> torch.Tensor:
        """Return bool ``[size, 1, L, P + L]``, True between tokens of one image."""
        image = whole_images[keys].masked_fill(torch.arange(keys.shape[1]) >= stops, 0)
        queries = image[:, self.skipped :, None]
        return ((queries == image[:, None]) & (queries > 0))[:, None]

    def mask(self, window: int | None) -> torch.Tensor | None:
        """Return bool ``[L, P + L]``, True where a query attends to a key; None if plain causal attention is equal.

        Blocks with images that see themselves whole have masks ``[size, 1, L, P + L]``.
        """
        total = self.shape[1]
        if window is not None and window >= total:
            window = None
        if window is None and not self.skipped and self._together is None:
            return None
        if window not in self._masks:
            position = torch.arange(total, device=self.device)
            back = position[self.skipped :, None] - position
            causal = (back >= 0) & (back < (window or total))
            self._masks[window] = causal if self._together is None else causal | self._together
        return self._masks[window]


class AttentionPlan:
    """Plan of the attention within a pack, prepared once for all layers."""

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        context: ContextGroup | None = None,
        whole_images: torch.Tensor | None = None,
    ):
        self.segments, self.device, self.context = list(segments), device, context
        self.whole_images = whole_images  # [N] number of the image that a token sees whole; 0 for text
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
        inputs = [block.finish(self.device, self.whole_images) for block in blocks]
        queries, keys, real = map(torch.cat, zip(*inputs, strict=True))
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
    ragged = _has_ragged_kernel(query) and plan.whole_images is None
    attend = _attend_ragged if ragged else _attend_blocks
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
    k, v = (x if keys is None else x.index_select(0, keys) for x in (k, v))
    # Cast after the gather, so that the gradients of a shared prefix are summed in float32
    q, k, v = (x.to(_attention_dtype(x)).contiguous() for x in (q, k, v))
    # torch 2.11 has the same kernel without the flag, and does not compare the numbers of heads
    grouped = q.shape[1] != k.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn(
        q,
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
    if not query.is_cuda or _attention_dtype(query) not in (torch.float16, torch.bfloat16):
        return False
    return (
        query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attention_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the data type of an attention call, which under autocast is narrower than rotated queries and keys."""
    casts = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if casts else x.dtype


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
    decoder: nn.Module, ids: torch.Tensor, position_ids: torch.Tensor, plan: AttentionPlan, **shown: torch.Tensor
) -> torch.Tensor:
    """Compute the hidden states of a pack.

    The decoder's attention is restored afterwards. The model's gradient checkpointing works; checkpointing wrappers
    around its layers do not. ``shown`` are the decoder's arguments for images.

    Shapes: ``ids [N]``, ``position_ids [N]`` or ``[3, N]``.
    """
    config = decoder.config.get_text_config()

    def forward() -> torch.Tensor:
        out = decoder(input_ids=ids[None], position_ids=position_ids[..., None, :], use_cache=False, **shown)
        return out.last_hidden_state[0]

    with _recompute_with_plan(decoder, config, plan):
        return _call_with_plan(config, plan, forward)
