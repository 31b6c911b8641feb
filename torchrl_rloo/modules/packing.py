"""The training forward without padding: hidden states of action tokens from rows packed into one sequence.

The layouts differ in speed and memory, not in the result:

* ``"packed"``: all rows end to end, so that no position is spent on padding;
* ``"shared_prefix"``: besides, a prompt that several rows begin with is read once.

What nothing depends on, the last action token of a row and all that follows it, is left out in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchrl_rloo.data.rows import pad, prompt_groups, prompt_lengths
from torchrl_rloo.modules.packed_attention import REMEDY, AttentionPlan, Segment, forward_pack

PACKED_LAYOUTS = ("packed", "shared_prefix")

_REFUSALS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()  # why a decoder cannot be packed, if so


def action_hidden(
    decoder: nn.Module,
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    layout: Literal["packed", "shared_prefix"],
) -> torch.Tensor:
    """Hidden states at the positions that predict the action tokens, differentiable.

    The same as of rows padded to a rectangle, up to rounding. The decoder is proved to be fit for it on first use.

    Args:
        decoder: ids to hidden states, e.g. ``model.get_decoder()``; its attention is replaced for this pass only.
        tokens: ids of ``B`` rows, ``[T_i]`` each; copied to the CPU if not there. They may be padded on the right.
        action_masks: True on action tokens, bool ``[T_i]`` each.
        layout: ``"packed"`` or ``"shared_prefix"``.

    Returns:
        ``[N, H]`` for ``N`` action tokens, in row order.

    Raises:
        ValueError: for no rows, rows of the wrong shape, or a row that begins with an action token.
        NotImplementedError: if the decoder cannot be packed; see :func:`supports_packing`.
    """
    check_packing(decoder)
    return _action_hidden(decoder, tokens, action_masks, layout)


def supports_packing(decoder: nn.Module) -> bool:
    """Whether :func:`action_hidden` is right for a decoder, proved on a few tokens and remembered.

    False for a model in which tokens mix by other means than plain causal attention (state space layers, convolutions,
    chunked attention, attention sinks, soft-capped attention), or which does not take its attention or its positions
    from outside.
    """
    return _refusal(decoder) is None


def check_packing(decoder: nn.Module) -> None:
    """Raises a NotImplementedError with the reason where :func:`supports_packing` is False."""
    if reason := _refusal(decoder):
        raise NotImplementedError(f"{type(decoder).__name__} cannot be packed ({reason}): {REMEDY}")


def _refusal(decoder: nn.Module) -> str | None:
    if decoder not in _REFUSALS:
        modes = [(module, module.training) for module in decoder.modules()]
        decoder.eval()
        try:
            device = decoder.get_input_embeddings().weight.device
            with torch.autocast(device.type, enabled=False):  # whose rounding would look like a leak
                _REFUSALS[decoder] = _probe(decoder)
        except Exception as error:  # a model that cannot be called like this may raise anything
            _REFUSALS[decoder] = f"{type(error).__name__}: {error}"
        finally:
            for module, training in modes:
                module.training = training
    return _REFUSALS[decoder]


@torch.no_grad()
def _probe(decoder: nn.Module) -> str | None:
    """Compares a few packed rows, two with a prompt in common, with each row alone."""
    config = decoder.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    embeddings = decoder.get_input_embeddings().weight
    rows = [torch.tensor(r) % len(embeddings) for r in ([1, 2, 3, 4, 5, 6], [7, 8, 9, 2], [1, 2, 3, 7, 8])]
    masks = [torch.arange(len(r)) >= 3 for r in rows]
    alone = [decoder(input_ids=r[None].to(embeddings.device), use_cache=False).last_hidden_state[0] for r in rows]
    expected = torch.cat([h[:-1][m[1:].to(h.device)] for h, m in zip(alone, masks, strict=True)]).float()
    tolerance = (2e-2 if embeddings.dtype in (torch.float16, torch.bfloat16) else 1e-4) * float(expected.abs().max())
    for layout in PACKED_LAYOUTS:
        windows: list[int | None] = []
        hidden = _action_hidden(decoder, rows, masks, layout, windows).float()
        if not torch.allclose(hidden, expected, rtol=0, atol=tolerance):
            return f"packed rows are not the same as rows alone (off by {float((hidden - expected).abs().max()):.2g})"
        if (reason := _window_refusal(config, windows)) is not None:
            return reason
    return None


def _window_refusal(config, windows: list[int | None]) -> str | None:
    """The probe is shorter than any window, so whether the attention calls are told of it is to be checked apart."""
    if not windows:
        return "its attention cannot be replaced"
    types = getattr(config, "layer_types", None)
    everywhere = len(windows) if getattr(config, "sliding_window", None) else 0
    expected = list(types).count("sliding_attention") if types else everywhere
    told = sum(w is not None for w in windows)
    return None if told == expected else f"{expected} layers have a sliding window, {told} tell their attention of it"


class _Pack(NamedTuple):
    """Rows as one sequence.

    Attributes:
        ids: ``[N]`` tokens.
        position_ids: ``[N]``, counted within each row.
        predictors: for each action token in row order, the index of the token before it.
        segments: which tokens see which.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    predictors: torch.Tensor
    segments: list[Segment]


def _pack(tokens: Sequence[torch.Tensor], action_masks: Sequence[torch.Tensor], layout: str, trim: bool) -> _Pack:
    mask = pad(action_masks, False)
    stops = (mask * torch.arange(mask.shape[1])).amax(1).tolist() if trim else [len(t) for t in tokens]
    prompts, groups = [0] * len(tokens), [[i] for i in range(len(tokens))]
    if layout == "shared_prefix":
        prompts = prompt_lengths(action_masks)
        groups = prompt_groups(tokens, prompts)
    runs, segments = [], []
    places = [(0, 0, 0)] * len(tokens)  # of each row: length and start of the shared prompt, start of the rest
    size = 0

    def append(row: int, start: int, stop: int, prefix: Segment) -> Segment:
        nonlocal size
        segment = Segment(size, stop - start, prefix.start, prefix.length)
        if segment.length:
            runs.append((row, start, stop))
            segments.append(segment)
        size += segment.length
        return segment

    for group in groups:
        members = [i for i in group if stops[i]]
        prompt = nothing = Segment(0, 0)
        if len(members) > 1:
            prompt = append(members[0], 0, prompts[members[0]], nothing)
        for i in members:
            own = append(i, prompt.length, stops[i], prompt)
            places[i] = prompt.length, prompt.start, own.start
    if not size:  # no row has an action token: the decoder still runs, so that its parameters are in the graph
        append(0, 0, 1, Segment(0, 0))
    row, column = mask[:, 1:].nonzero(as_tuple=True)
    length, prompt_start, own_start = torch.tensor(places)[row].unbind(1)
    predictors = column + torch.where(column < length, prompt_start, own_start - length)
    ids = torch.cat([tokens[i][start:stop] for i, start, stop in runs])
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in runs])
    return _Pack(ids, positions, predictors, segments)


def _action_hidden(
    decoder: nn.Module,
    tokens: Sequence[torch.Tensor],
    action_masks: Sequence[torch.Tensor],
    layout: str,
    windows: list[int | None] | None = None,
) -> torch.Tensor:
    tokens, masks = [t.cpu() for t in tokens], [m.cpu() for m in action_masks]
    _check(tokens, masks, layout)
    pack = _pack(tokens, masks, layout, trim=not _rope_depends_on_length(decoder.config.get_text_config()))
    device = decoder.get_input_embeddings().weight.device
    plan = AttentionPlan(pack.segments, device)
    hidden = forward_pack(decoder, pack.ids.to(device), pack.position_ids.to(device), plan)
    if windows is not None:
        windows += plan.windows
    return hidden.index_select(0, pack.predictors.to(hidden.device))


def _rope_depends_on_length(config) -> bool:
    """Some rotary embeddings change all frequencies once the longest row of a batch passes a limit: keep it whole."""
    scaling = str(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    return "longrope" in scaling or "dynamic" in scaling


def _check(tokens: list[torch.Tensor], action_masks: list[torch.Tensor], layout: str) -> None:
    if layout not in PACKED_LAYOUTS:
        raise ValueError(f"layout={layout!r} must be one of {PACKED_LAYOUTS}")
    if not tokens or any(t.ndim != 1 or not len(t) for t in tokens):
        raise ValueError(f"tokens must be rows of at least one id, got shapes {[list(t.shape) for t in tokens]}")
    if [t.shape for t in tokens] != [m.shape for m in action_masks]:
        raise ValueError(
            f"action_masks must have the shapes of tokens, {[len(t) for t in tokens]}, got "
            f"{[list(m.shape) for m in action_masks]}"
        )
    if any(m[0] for m in action_masks):
        raise ValueError("the first token of a row is an action token, but a policy needs at least one prompt token")
