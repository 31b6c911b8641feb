"""Operations of a forward and backward pass, by two conventions; recomputed operations count in neither.

A weight takes 2 operations for each token in the forward pass and 2 for the gradient of its input. A trained weight
takes 2 more for its own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Matrices(NamedTuple):
    """Elements of the matrices that multiply a token, and sizes of the attention."""

    body: int  # of the layers, with adapters
    trained_body: int
    head: int
    trained_head: int
    hidden: int
    width: int  # heads * head_dim
    windows: tuple[int | None, ...]  # of each layer, the tokens that a query attends to; None for all before it


def read_matrices(model) -> Matrices:
    """Return the sizes of a dense decoder, which may have an adapter or lie on the meta device."""
    config = model.config.get_text_config()
    body = [p for p in model.get_decoder().layers.parameters() if p.ndim == 2]  # others are norms and biases
    head = model.get_output_embeddings().weight
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return Matrices(
        body=sum(p.numel() for p in body),
        trained_body=sum(p.numel() for p in body if p.requires_grad),
        head=head.numel(),
        trained_head=head.numel() * head.requires_grad,
        hidden=config.hidden_size,
        width=config.num_attention_heads * config.head_dim,
        windows=tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds),
    )


def useful_flops(matrices: Matrices, lengths: Sequence[int], actions: int) -> int:
    """Return the operations that a result needs: causal attention, and the head for ``actions`` tokens only.

    With rows of ``n`` tokens, from ``lengths``, and windows of ``w`` in the layers, and ``m = min(n, w)``::

        (4 body + 2 trained_body) sum n + (4 head + 2 trained_head) actions + 12 width sum (m n - m^2 / 2)

    The last sum is over layers and rows; it is ``n^2 / 2`` without a window.
    """
    m = matrices
    pairs = sum(min(n, w or n) * (2 * n - min(n, w or n)) for n in lengths for w in m.windows)
    body, head = 4 * m.body + 2 * m.trained_body, 4 * m.head + 2 * m.trained_head
    return body * sum(lengths) + head * actions + 6 * m.width * pairs


def flops_6n(matrices: Matrices, lengths: Sequence[int]) -> int:
    """Return the operations as prime-rl counts them, with all tokens in the head and whole squares of attention::

        (4 (body + head) + 2 (trained_body + trained_head)) sum n + 12 layers hidden sum n^2

    With all weights trained, the first term is 6 for each weight. Attention has the width ``hidden`` there, which is
    half of Qwen3-0.6B's, so that both conventions agree on long rows of this model. Where it packs several rows,
    prime-rl takes the length of the pack for each ``n``. Source: ``PerfCounter`` in ``src/prime_rl/trainer/perf.py``
    of PrimeIntellect-ai/prime-rl, at 559b447 as at a127150.
    """
    m = matrices
    weights = 4 * (m.body + m.head) + 2 * (m.trained_body + m.trained_head)
    return weights * sum(lengths) + 12 * len(m.windows) * m.hidden * sum(n * n for n in lengths)
