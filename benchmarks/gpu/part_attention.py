"""Part ``attention``: the packed decoder pass with the variable-length kernel, with blocks, and padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from measure import SHAPES, Setup, attempt, build_model, clear, peak_bytes, random_rows, relative_error, timed_ms

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import action_tokens, ragged
from torchrl_rloo.modules import packing as packing_module
from torchrl_rloo.modules.packing import action_hidden


@contextmanager
def without_kernel() -> Iterator[None]:
    """Attend in blocks of ``scaled_dot_product_attention`` within the context, as on a CPU."""
    with mock.patch.object(packing_module, "_has_ragged_kernel", lambda query: False):
        yield


def padded_hidden(decoder, rows) -> torch.Tensor:
    """Compute the states before action tokens of rows padded on the right."""
    actions = action_tokens(rows)
    hidden = decoder(input_ids=actions.tokens.to(decoder.device), use_cache=False).last_hidden_state
    return hidden[:, :-1][actions.action_mask[:, 1:].to(hidden.device)]


def measure(decoder, forward: Callable[[], torch.Tensor], expected: torch.Tensor, setup: Setup) -> dict[str, Any]:
    """Measure the error, time and peak memory of a forward and backward pass."""

    def both() -> None:
        decoder.zero_grad()
        forward().float().square().mean().backward()

    with torch.no_grad():
        error = relative_error(forward(), expected)
        forward_ms = timed_ms(forward, setup)
    return {
        "error": error,
        "forward_ms": forward_ms,
        "peak_bytes": peak_bytes(both, setup.device),
        "ms": timed_ms(both, setup),
    }


def run(setup: Setup) -> dict[str, Any]:
    """Measure each layout on groups of rows of ragged lengths."""
    size = setup.pick("0.5B", "tiny")
    prompt, longest, groups = setup.pick((256, 1024, 4), (8, 16, 2))
    # Completions of a group take an eighth to all of the limit
    lengths = [(prompt, max(1, longest * part // 8)) for _ in range(groups) for part in (1, 2, 3, 8)]
    rows = random_rows(lengths, SHAPES[size]["vocab_size"], group=4)
    tokens, masks = ragged(rows, keys.TOKENS), ragged(rows, keys.ACTION_MASK)
    decoder = build_model(size, setup).get_decoder()
    results: dict[str, Any] = {"rows": len(rows), "tokens": sum(map(len, tokens)), "padding": "to the longest row"}

    def packed(packing: str) -> Callable[[], torch.Tensor]:
        return lambda: action_hidden(decoder, tokens, masks, packing)

    # The padded pass in float32 is the reference for all
    wide = build_model(size, setup).float().get_decoder()
    with torch.no_grad():
        expected = padded_hidden(wide, rows)
    del wide
    clear(setup.device)
    results["padded"] = attempt(measure, decoder, lambda: padded_hidden(decoder, rows), expected, setup)
    for packing in ("packed", "shared_prefix"):
        results[packing] = attempt(measure, decoder, packed(packing), expected, setup)
        with without_kernel():
            results[f"{packing}, blocks"] = attempt(measure, decoder, packed(packing), expected, setup)
    return results
