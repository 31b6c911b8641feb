"""Settings of a run that decide its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchrl_rloo.diagnostics.memory_shapes import Pass


@dataclass(frozen=True)
class Sampling:
    """Sampling by the Transformers model in the training process.

    Args:
        lines: completions that are sampled at the same time.
        prompts: distinct prompts among them.
        itemsize: bytes of an element of the key-value cache.
    """

    lines: int
    prompts: int
    itemsize: int


@dataclass(frozen=True)
class MemorySettings:
    """Settings of a run that decide its memory.

    Args:
        rows: rows of a minibatch, over all ranks.
        row_tokens: tokens of the longest row.
        prompt_tokens: tokens of its prompt.
        group: rows that share a prompt.
        packing: layout of rows, see :class:`~torchrl_rloo.diagnostics.Pass`.
        micro_batch_size: rows of a pass. None takes all of a rank.
        micro_batch_tokens: tokens of a pass. None sets no limit.
        parallel: ``"none"``, ``"ddp"`` or ``"fsdp"``.
        ranks: number of ranks.
        shard_size: with FSDP, ranks that share one copy of the model. None shares it among all.
        load_shards: with FSDP, whether each rank reads only its shards of the model's files.
        reduce: ``"last_pass"`` or ``"every_pass"``.
        dtype: data type of the trained weights.
        precision: data type of a pass, ``"float32"`` or ``"bfloat16"``.
        float32_head: whether the weights outside the layers are gathered in float32, with FSDP in a narrower precision.
        gradient_checkpointing: whether layers are computed again in the backward pass.
        quantization: None, or ``"nf4"`` for 4-bit frozen weights under an adapter.
        optimizer: name of the optimizer: ``"adamw_8bit"``, ``"muon"``, or a class of ``torch.optim`` in lower case.
        optimizer_kwargs: arguments of the optimizer that decide its states, such as ``momentum``.
        offload: parts that wait in host memory: ``"activations"``, ``"optimizer"``, ``"parameters"``.
        reference: whether a frozen copy of the model scores the KL.
        copy_dtype: data type of the sampler's copy of the weights. None shares the trained weights.
        sampling: sampling in this process. None if an engine samples.
        engine_bytes: memory of this device that an engine takes; 0 if it runs elsewhere.
        engine_sleeps: whether the engine frees its memory while the model trains.
        device: ``"cpu"`` or ``"cuda"``.
        device_bytes: memory of the device. None sets no limit.
    """

    rows: int
    row_tokens: int
    prompt_tokens: int
    group: int = 1
    packing: str = "none"
    micro_batch_size: int | None = None
    micro_batch_tokens: int | None = None
    parallel: str = "none"
    ranks: int = 1
    shard_size: int | None = None
    load_shards: bool = False
    reduce: str = "last_pass"
    dtype: str = "float32"
    precision: str = "float32"
    float32_head: bool = False
    gradient_checkpointing: bool = False
    quantization: str | None = None
    optimizer: str = "adamw"
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    reference: bool = False
    copy_dtype: str | None = None
    sampling: Sampling | None = None
    engine_bytes: int = 0
    engine_sleeps: bool = False
    device: str = "cpu"
    device_bytes: int | None = None

    @property
    def rank_rows(self) -> int:
        """Rows of a minibatch on one rank."""
        return math.ceil(self.rows / self.ranks)

    @property
    def work(self) -> Pass:
        """Largest pass of a rank."""
        rows = min(self.rank_rows, self.micro_batch_size or self.rank_rows)
        work = Pass(rows, self.row_tokens, self.prompt_tokens, self.group, self.packing)
        while work.rows > 1 and self.micro_batch_tokens is not None and work.counted > self.micro_batch_tokens:
            work = replace(work, rows=work.rows - 1)
        return work

    @property
    def passes(self) -> int:
        """Passes of an optimizer step on one rank."""
        return math.ceil(self.rank_rows / self.work.rows)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the model."""
        return (self.shard_size or self.ranks) if self.parallel == "fsdp" else 1
