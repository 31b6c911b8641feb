"""Shapes of weights and passes, and the bytes of layers, from which the memory of a run is planned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torchrl_rloo.modules.packing import Segment


class Weight(NamedTuple):
    """Shape of a parameter.

    Attributes:
        layer: index of its layer; None outside the layers, as for embeddings.
        shape: its shape.
        itemsize: bytes of an element.
        trained: whether it gets a gradient.
        quantizable: whether 4-bit quantization replaces it: the matrix of a linear map inside a layer.
    """

    layer: int | None
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    quantizable: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class LayerBytes(NamedTuple):
    """Memory of one layer in a pass, without its weights.

    Attributes:
        saved: bytes that the forward pass keeps for the backward pass.
        peak: largest number of bytes during the layer's forward and backward pass, with its gradients.
        inputs: bytes of its hidden states, which gradient checkpointing keeps instead of ``saved``.
    """

    saved: int
    peak: int
    inputs: int


class PassBytes(NamedTuple):
    """Memory of the decoder in a pass.

    Attributes:
        layers: memory of each layer, in order.
        outside: bytes that the forward pass keeps outside the layers.
    """

    layers: list[LayerBytes]
    outside: int


@dataclass(frozen=True)
class Pass:
    """Rows of one forward and backward pass; all have the same length.

    Args:
        rows: number of rows.
        row_tokens: tokens of a row.
        prompt_tokens: tokens of its prompt.
        group: rows that share a prompt.
        packing: layout of the rows, ``"none"``, ``"packed"`` or ``"shared_prefix"``.

    Example:
        >>> Pass(8, 100, 60, 4, "shared_prefix").tokens  # two prompts, and eight completions without their last token
        432
    """

    rows: int
    row_tokens: int
    prompt_tokens: int
    group: int = 1
    packing: str = "none"

    @property
    def segments(self) -> list[Segment]:
        """Runs of tokens of a packed pass, see :class:`~torchrl_rloo.modules.packing.AttentionPlan`."""
        group = self.group if self.packing == "shared_prefix" else 1
        found: list[Segment] = []
        size, prompt = 0, range(0)
        for row in range(self.rows):
            if row % group == 0:
                prompt = range(size, size + self.prompt_tokens)
            prefix = (prompt,) if row % group else ()
            segment = Segment(size, self.row_tokens - 1, prefix)
            segment = segment._replace(length=segment.length - segment.prefix_length)
            found += [segment] if segment.length else []
            size += segment.length
        return found

    @property
    def tokens(self) -> int:
        """Number of positions of the pass."""
        if self.packing == "none":
            return self.rows * self.row_tokens
        return self.counted - self.rows  # a pack leaves out the last token of each row

    @property
    def counted(self) -> int:
        """Number of tokens as :func:`~torchrl_rloo.data.rows.micro_batches` counts them for ``max_tokens``."""
        if self.packing != "shared_prefix":
            return self.rows * self.row_tokens
        return math.ceil(self.rows / self.group) * self.prompt_tokens + self.actions

    @property
    def actions(self) -> int:
        """Number of action tokens of the pass."""
        return self.rows * (self.row_tokens - self.prompt_tokens)
