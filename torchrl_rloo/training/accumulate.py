"""Gradient accumulation: count normalizers, drop rows without signal, split into micro-batches, run backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.objectives import LossModule

from torchrl_rloo.data import keys
from torchrl_rloo.data.merging import merge_identical as merge
from torchrl_rloo.data.rows import micro_batches
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.replay.filters import drop_zero_advantage


def accumulate(
    loss_fn: LossModule,
    batch: TensorDictBase,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    merge_identical: bool = False,
) -> list[Any]:
    """Accumulate the gradient of one optimizer step's batch, one micro-batch at a time.

    Normalizers are counted over the whole batch first, so the gradient does not depend on the split. Rows whose
    advantages are all 0 are dropped unless another term of the loss needs them.

    Args:
        loss_fn: loss from :mod:`torchrl_rloo.objectives`, whose output has ``.loss``.
        batch: rows or preference pairs, batch size ``[B]``.
        micro_batch_size: rows per forward and backward pass. None takes all.
        max_tokens: tokens per pass; cannot be used with preference pairs. None sets no limit.
        merge_identical: True runs rows with equal tokens once, with their multiplicity.

    Returns:
        Detached output of the loss for each micro-batch, to be merged into metrics by
        :func:`~torchrl_rloo.objectives.merge_outputs`.

    Raises:
        ValueError: if a limit is below 1, or ``max_tokens`` is given for preference pairs.

    Example:
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> from torchrl_rloo.data import encode_demonstrations
        >>> from torchrl_rloo.modules import TransformersWrapper
        >>> from torchrl_rloo.objectives import SFTLoss
        >>> tokenizer = build_tokenizer()
        >>> talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
        >>> rows = encode_demonstrations([talk] * 3, tokenizer)
        >>> policy = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate=False)
        >>> len(accumulate(SFTLoss(policy), rows, micro_batch_size=2))
        2
    """
    # Count the normalizers before rows are dropped or merged
    are_rows = keys.TOKENS in batch.keys(include_nested=True)  # False for preference pairs
    if are_rows:
        batch = split_segments(batch)  # a trajectory whose past the template rewrote becomes several samples
    normalizers = loss_fn.normalizers(batch)

    # Drop and merge rows that would repeat or waste a forward pass
    advantage = getattr(loss_fn.tensor_keys, "advantage", keys.ADVANTAGE)
    if advantage in batch.keys(include_nested=True) and not loss_fn.needs_zero_advantage:
        batch = drop_zero_advantage(batch, advantage)
    if merge_identical:
        batch = merge(batch)
    # Split into micro-batches and add up their gradients
    outputs = []
    packing = getattr(getattr(loss_fn, "actor_network", None), "packing", "none")
    if are_rows:
        parts = micro_batches(batch, micro_batch_size, max_tokens=max_tokens, packing=packing)
    elif max_tokens is not None:
        raise ValueError(f"max_tokens={max_tokens} cannot be used with preference pairs; set micro_batch_size")
    elif micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be at least 1; None takes all pairs")
    else:
        parts = batch.split(micro_batch_size or len(batch))
    for part in parts:
        output = loss_fn(part, normalizers)
        output.loss.backward()
        outputs.append(output.detach())
    return outputs


def minibatches(buffer: ReplayBuffer, number: int, epochs: int = 1) -> Iterator[TensorDictBase]:
    """Yield all rows of a buffer once per epoch, as ``number`` batches of nearly equal size.

    A buffer with fewer rows than planned is also split evenly, so each row weighs the same in its update.

    Args:
        buffer: buffer that samples without replacement.
        number: batches per epoch; fewer if the buffer has fewer rows.
        epochs: passes over the rows.

    Yields:
        Rows, batch size ``[b]``.

    Raises:
        ValueError: if ``number`` or ``epochs`` is below 1.
    """
    for name, value in (("number", number), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    for _ in range(epochs):
        left = len(buffer)
        for k in range(number, 0, -1):
            if size := -(-left // k):
                yield buffer.sample(size)
                left -= size
