"""Gradient accumulation: the one place where a batch is normalized, thinned, split and sent backward."""

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
    """Add the gradient of one optimizer step's batch to the parameters, a micro-batch at a time.

    Normalizers are counted over the whole batch first, so the gradient does not depend on how the batch is split. Rows
    whose advantages are all 0 are skipped where no other term of the loss needs them.

    Args:
        loss_fn: a loss of :mod:`torchrl_rloo.objectives`; its output has ``.loss``.
        batch: batch size ``[B]``, rows or preference pairs.
        micro_batch_size: rows in one forward and backward pass; None for all.
        max_tokens: tokens in one pass; None for any number. Not for preference pairs.
        merge_identical: run rows that are equal token by token once, with their multiplicity.

    Returns:
        The loss's output for each micro-batch, detached; :func:`~torchrl_rloo.objectives.merge_outputs` makes metrics
        of them.

    Raises:
        ValueError: for a limit below 1.

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
    are_rows = keys.TOKENS in batch.keys(include_nested=True)  # else preference pairs
    if are_rows:
        batch = split_segments(batch)  # a trajectory whose past the template rewrote is several samples
    normalizers = loss_fn.normalizers(batch)
    advantage = getattr(loss_fn.tensor_keys, "advantage", keys.ADVANTAGE)
    if advantage in batch.keys(include_nested=True) and not loss_fn.needs_zero_advantage:
        batch = drop_zero_advantage(batch, advantage)
    if merge_identical:
        batch = merge(batch)
    outputs = []
    packing = getattr(getattr(loss_fn, "actor_network", None), "packing", "none")
    if are_rows:
        parts = micro_batches(batch, micro_batch_size, max_tokens=max_tokens, packing=packing)
    elif max_tokens is not None:
        raise ValueError(f"max_tokens={max_tokens} is for rows, not for pairs: set micro_batch_size")
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
    """Yield all rows of a buffer once an epoch, as ``number`` batches of nearly equal size.

    A batch that is shorter than planned is split evenly, too: each row then weighs the same in its update.

    Args:
        buffer: samples without replacement.
        number: of batches an epoch; fewer if the buffer has fewer rows.
        epochs: passes over the rows.

    Raises:
        ValueError: for a number below 1.
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
