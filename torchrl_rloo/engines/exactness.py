"""Probes of a model on first use: whether its log-probs depend on other rows of a pass, or on a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchrl_rloo.data.rows import pad
from torchrl_rloo.engines.head import NARROW, Head, evaluation_mode, probe_tolerance
from torchrl_rloo.engines.root import call_root
from torchrl_rloo.weight_update.rotary import context_length

# Results of the probes by model: reasons of a refusal, None, or whether prompts may be padded
_ROWS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
_CACHES: WeakKeyDictionary[nn.Module, bool | str] = WeakKeyDictionary()

_ROWS_OF_PROBE = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9, 8, 7, 6], [3, 1, 4, 1, 5, 9])
_CONTINUED = 4  # tokens of each row that are fed one by one


def check_rows(model: nn.Module, head: Head | None) -> None:
    """Raise ``NotImplementedError`` unless a row has equal logits alone, next to longer rows and to late positions.

    A probe of a few tokens decides it on first use, which all ranks of a sharded model must do together.
    """
    if model not in _ROWS:
        _ROWS[model] = call_root(model, _run, _compare_rows, model, head)
    if reason := _ROWS[model]:
        raise NotImplementedError(f"{type(model).__name__} cannot be trained exactly: {reason}; use another model")


def pads_prompts(model: nn.Module, head: Head | None) -> bool:
    """Return whether prompts of unequal length may share a batch of cached decoding; if not, equal lengths may.

    A probe compares cached decoding of a few tokens with plain passes on first use. If neither is exact, it raises
    ``NotImplementedError``.
    """
    if model not in _CACHES:
        _CACHES[model] = _run(_choose_padding, model, head)
    if isinstance(reason := _CACHES[model], str):
        raise NotImplementedError(
            f"{type(model).__name__} cannot be sampled with a cache: {reason}; sample with an engine, or use another "
            "model"
        )
    return reason


def _run(probe: Callable, model: nn.Module, head: Head | None):
    # Disable autocast and a head's rounding to 16 bits, which would look like a difference
    head = None if head is None else replace(head, dtype=None)
    with torch.no_grad(), evaluation_mode(model), torch.autocast(model.device.type, enabled=False):
        return probe(model, head)


def _rows_on(model: nn.Module) -> list[torch.Tensor]:
    """Return rows of ids, the first two of which begin alike."""
    vocabulary = model.get_input_embeddings().num_embeddings
    return [torch.tensor(row, device=model.device) % vocabulary for row in _ROWS_OF_PROBE]


def _logits(model: nn.Module, head: Head | None, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    if head is None:
        return model(input_ids=ids, use_cache=False, **kwargs).logits.float()
    return head.logits(head.decoder(input_ids=ids, use_cache=False, **kwargs).last_hidden_state)


def _compare_rows(model: nn.Module, head: Head | None) -> str | None:
    long, _, short = _rows_on(model)
    alone = _logits(model, head, short[None])[0]

    def differs(**kwargs) -> bool:
        logits = _logits(model, head, pad([short, long]), **kwargs)[0, : len(short)]
        return _differs(model, logits, alone)

    if differs():
        return "a row's logits differ next to a longer one"
    # The longest row of a run is too long for a probe, but its positions are not
    limit, callee = context_length(model), model if head is None else head.decoder
    if limit is None or limit < len(long) or "position_ids" not in inspect.signature(callee.forward).parameters:
        return None
    positions = torch.arange(len(long), device=model.device)
    if differs(position_ids=torch.stack([positions, positions + limit - len(long)])):
        return f"a row's logits differ next to a row of {limit} tokens"
    return None


def _choose_padding(model: nn.Module, head: Head | None) -> bool | str:
    """Return True if unequal prompts may be padded, False if only equal ones decode exactly, or why neither does."""
    rows = _rows_on(model)
    expected = [_logits(model, head, row[None])[0, -_CONTINUED - 1 :] for row in rows]
    reason = ""
    for pads in (True, False):
        chosen = [0, 1, 2] if pads else [0, 1]
        try:
            logits = _decode(model, head, [rows[i] for i in chosen])
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # an unsupported model may raise anything
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        if not any(_differs(model, logits[i], expected[i][: len(logits[i])]) for i in chosen):
            return pads
        reason = "its logits differ from those of a plain pass"
    return reason


def _decode(model: nn.Module, head: Head | None, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits of cached decoding after each prompt and its next tokens; a line is dropped on the way."""
    from torchrl_rloo.engines.decoder import Decoder  # imports transformers, which takes 2 s

    decoder = Decoder(model, head, [row[:-_CONTINUED] for row in rows], max(map(len, rows)), False)
    active, found = list(range(len(rows))), [[] for _ in rows]
    for step in range(_CONTINUED + 1):
        for line, row in enumerate(active):
            found[row].append(decoder.logits[line].clone())
        if step == _CONTINUED:
            break
        if step == 2:
            active = active[1:]
            decoder.keep(torch.arange(len(active), device=model.device) + 1)
        decoder.feed(torch.stack([rows[row][step - _CONTINUED] for row in active]))
    return [torch.stack(logits) for logits in found]


def _differs(model: nn.Module, logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether logits ``[T, V]`` differ by more than rounding, which says nothing if weights are NaN.

    In 16 bits most tokens must differ: after rounding, a mixture of experts may choose another expert for a token.
    """
    if not bool(expected.isfinite().all()):
        return False
    gaps = (logits.float() - expected.float()).abs().amax(-1)
    tolerance = probe_tolerance(model)
    gap = gaps.max() if tolerance < NARROW else gaps.median()
    return not bool(gap <= tolerance * expected.abs().max())
