"""Training forward without padding: hidden states of action tokens from rows packed into one sequence.

Packings differ in speed and memory, not in the result:

* ``"packed"`` concatenates all rows.
* ``"shared_prefix"`` also processes tokens with which several rows begin only once: prompts, turns and branches.

Both leave out the last action token of each row and the tokens after it, since no prediction depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchrl_rloo.data.rows import PACKINGS, pad, prefix_order
from torchrl_rloo.engines.head import evaluation_mode, probe_tolerance
from torchrl_rloo.modules.context_parallel import context_group
from torchrl_rloo.modules.packed_attention import PACKING_HINT, AttentionPlan, Segment, forward_pack, index_runs
from torchrl_rloo.rotary import fix_frequencies

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
    """Hidden states at the positions that predict action tokens.

    Attributes:
        hidden: ``[n, H]``, in row order.
        owned: ``[N]`` bool, True for the action tokens whose states this rank has; None for all of them.
    """

    hidden: torch.Tensor
    owned: torch.Tensor | None


def action_states(
    decoder: nn.Module,
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    packing: Literal["packed", "shared_prefix"],
) -> ActionStates:
    """Compute :func:`action_hidden` for the action tokens of this rank; context parallelism splits them over ranks."""
    check_packing(decoder)
    return _action_states(decoder, tokens, action_masks, packing)


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
    """Rows packed into one sequence.

    Attributes:
        ids: ``[N]`` token ids.
        position_ids: ``[N]``, counted within each row.
        predictors: index of the token before each action token, in row order.
        segments: segments of the attention plan.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    segments: list[Segment]


def _pack(tokens: Sequence[torch.Tensor], action_masks: Sequence[torch.Tensor], packing: str) -> _Pack:
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
        path, own = _first(path, length), range(size, size + stops[i] - length)
        if own:
            segments.append(Segment(size, len(own), tuple(path)))
            ids.append(rows[i][length:])
            positions.append(range(length, stops[i]))
            path, size = [*path, own], own.stop
        paths[i] = path
    # Map each action token to the pack index of the token before it
    before = torch.cat([torch.cat([m[1:], m.new_zeros(1)])[:stop] for m, stop in zip(action_masks, stops, strict=True)])
    predictors = index_runs([run for path in paths for run in path])[before]
    return _Pack(torch.cat(ids), index_runs(positions), predictors, segments)


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
) -> ActionStates:
    tokens, masks = [t.cpu() for t in tokens], [m.cpu() for m in action_masks]
    _check(tokens, masks, packing)
    # Lay out the pack; with context parallelism, each rank runs an equal slice of it
    context, pack = context_group(decoder), _pack(tokens, masks, packing)
    own = slice(None)
    if context is not None:
        pack = _padded(pack, context.size)
        own = context.own(len(pack.ids))
    # Run it
    device = decoder.get_input_embeddings().weight.device
    plan = AttentionPlan(pack.segments, device, context)
    hidden = forward_pack(decoder, pack.ids[own].to(device), pack.position_ids[own].to(device), plan)
    if windows is not None:
        windows += plan.windows
    if context is None:
        return ActionStates(hidden.index_select(0, pack.predictors.to(device)), None)
    owned = (pack.predictors >= own.start) & (pack.predictors < own.stop)
    return ActionStates(hidden.index_select(0, (pack.predictors[owned] - own.start).to(device)), owned.to(device))


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
