"""Log-probs of given tokens from hidden states, without materializing all logits.

Products with the output projection are accumulated and returned in at least float32. Logits rounded to bfloat16 have a
relative error of up to 2^-9, and the sampler and the trainer round different sums. Both therefore use these functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from torchrl_rloo.functional.products import add_product_, fast_product, has_fast_product
from torchrl_rloo.functional.sampling import (
    SamplingDistribution,
    Support,
    count_in_turn,
    exclude_,
    process_logits,
    unpack_bits,
)

TILE_ELEMENTS = 2**21  # logits per tile: 8 MiB in float32; 2**22 is no faster on CPU cores
TILE_ROWS = 2048  # positions per tile of a large vocabulary, so that few large products read the projection
BLOCK_ELEMENTS = 2**18  # probabilities per block of a tile: small enough to stay in the cache
# A tile is one block there: 256 MiB in float32, so that kernels take far longer than their launches
GPU_TILE_ELEMENTS = 2**26
GPU_TILE_ROWS = 2**13


class TokenLogProbs(NamedTuple):
    """Result of :func:`token_log_probs`, in nats, float32 (float64 for float64 inputs).

    Attributes:
        log_probs: ``[N]``, log-probs of the targets.
        entropy: ``[N]``, entropies of the processed distribution. None if not requested.
        top_ids: ``[N, k]`` int64, the ``k`` most likely tokens in descending order. None for ``top_k=0``.
        top_log_probs: ``[N, k]``, log-probs of ``top_ids``, without gradient. Minus infinity where a truncation kept
            fewer than ``k`` tokens.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    top_ids: torch.Tensor | None = None
    top_log_probs: torch.Tensor | None = None


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    distribution: SamplingDistribution = SamplingDistribution(),
    softcap: float | None = None,
    scale: float = 1.0,
    seen: torch.Tensor | None = None,
    entropy: bool = True,
    top_k: int = 0,
    support: Support | None = None,
    low_rank: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    turns: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> TokenLogProbs:
    """Compute log-probs of target tokens and entropies, one tile of positions and vocabulary at a time.

    With ``z`` the processed logits (:func:`~torchrl_rloo.functional.sampling.process_logits`)::

        log pi(a_n) = z[n, a_n] - log sum_v exp(z[n, v])
        d log pi(a_n) / d z[n, v] = [v = a_n] - pi[n, v]
        d H_n / d z[n, v] = -pi[n, v] * (log pi[n, v] + H_n)

    Forward and backward hold a few tiles of :data:`TILE_ELEMENTS` logits instead of several times ``N * V``; on a GPU
    of :data:`GPU_TILE_ELEMENTS`. Logits and sums are at least float32, also for narrower inputs
    (:mod:`~torchrl_rloo.functional.log_probs`).

    Args:
        hidden: ``[N, H]`` hidden states, each at the position before its target.
        weight: ``[V, H]`` output projection.
        targets: ``[N]`` int64 token ids.
        bias: ``[V]`` bias of the projection. None adds nothing.
        distribution: sampling distribution with a temperature above 0.
        softcap: cap ``c`` of ``c * tanh(logits / c)``. None disables it.
        scale: factor of the logits, applied before the cap.
        seen: ``[N, V]`` bool, tokens before each target; required by a repetition penalty.
        entropy: True computes entropies. Their gradient costs time only if it is used.
        top_k: number of most likely tokens to return, at most ``V``.
        support: tokens that the sampler's truncation kept at each position, including the target. Log-probs are
            normalized over these tokens, and the truncation of ``distribution`` is ignored.
        low_rank: pairs ``[N, r]``, ``[V, r]`` whose products are added to ``hidden @ weight.T``, for adapters of the
            projection (Hu et al. 2021, arXiv 2106.09685).
        turns: ``[N]`` int64, index of the target with which the turn of each target begins; required by presence and
            frequency penalties.
        allowed: ``[N, ceil(V / 32)]`` int32, a bit for each id that the rules of the turn allow. None allows all.

    Returns:
        Log-probs, entropies and the most likely tokens; see :class:`TokenLogProbs`.

    Raises:
        ValueError: if the temperature is 0 or ``top_k`` is out of range.

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.zeros(4, 2)
        >>> token_log_probs(hidden, weight, torch.tensor([2])).log_probs  # log(1 / 4)
        tensor([-1.3863])
    """
    if distribution.temperature == 0:
        raise ValueError("temperature=0 must be above 0: a greedy policy has no log-probs to train on")
    if not 0 <= top_k <= len(weight):
        raise ValueError(f"top_k={top_k} must be in [0, {len(weight)}] (size of the vocabulary)")
    factors = [tensor for pair in ((hidden, weight), *low_rank) for tensor in pair]
    # Keep the logits for the backward pass where they need no more memory than the gradient of the weight
    keep = hidden.device.type == "cpu" and len(hidden) <= hidden.shape[1] and weight.requires_grad
    keep = keep and torch.is_grad_enabled() and softcap is None and distribution.repetition_penalty == 1
    settings = _HeadSettings(distribution, softcap, scale, entropy, top_k, keep, turns, allowed)
    with torch.autocast(hidden.device.type, enabled=False):
        return TokenLogProbs(*_TokenLogProbs.apply(settings, targets, seen, *(support or (None, None)), bias, *factors))


def tile_limits(device_type: str) -> tuple[int, int, int]:
    """Return the logits and positions of a tile at most, and the probabilities of a block, on a type of device."""
    if device_type == "cpu":
        return TILE_ELEMENTS, TILE_ROWS, BLOCK_ELEMENTS
    return GPU_TILE_ELEMENTS, GPU_TILE_ROWS, GPU_TILE_ELEMENTS


class _HeadSettings(NamedTuple):
    """Processing of the logits and statistics to compute."""

    distribution: SamplingDistribution
    softcap: float | None
    scale: float
    entropy: bool
    top_k: int
    keep: bool  # the processed logits, for the backward pass
    turns: torch.Tensor | None
    allowed: torch.Tensor | None


class _TokenLogProbs(torch.autograd.Function):
    """Autograd function that saves a normalizer per position, and keeps or recomputes the logits for its gradient."""

    @staticmethod
    def forward(ctx, settings, targets, seen, support_ids, support_sizes, bias, *factors):
        support = None if support_ids is None else Support(support_ids, support_sizes)
        tiles = _Tiles(settings, targets, seen, support, bias, factors)
        # Allocate the running sums of each position: target logit, largest logit, sums for normalizer and entropy
        n, k = len(targets), settings.top_k
        targeted, top, total = (factors[0].new_zeros(n, dtype=tiles.dtype) for _ in range(3))
        top.fill_(torch.finfo(tiles.dtype).min)
        spread = torch.zeros_like(total) if settings.entropy else None
        top_ids = targets.new_zeros(n, k) if k else None
        top_log_probs = top.new_full((n, k), -torch.inf) if k else None
        # Accumulate over the tiles
        ctx.kept = []
        for rows, columns in tiles:
            logits = tiles.process(tiles.compute_raw(rows, columns), rows, columns)
            if settings.keep:
                ctx.kept.append(logits)
            inside, places = tiles.locate_targets(rows, columns)
            targeted[rows] += torch.where(inside, logits.gather(1, places), 0.0)[:, 0]
            if k:
                _keep_top_(top_log_probs[rows], top_ids[rows], logits, columns.start)
            for part, block in tiles.iter_blocks(logits, rows):
                block = block.clone() if settings.keep else block
                _accumulate_(block, top[part], total[part], None if spread is None else spread[part], tiles.masked)
            del logits, block  # before the next tile
        # Turn the sums into log-probs and entropies
        log_total = total.log()
        normalizer = top + log_total
        entropy = None if spread is None else log_total - spread / total
        if k:
            top_log_probs -= normalizer[:, None]
            ctx.mark_non_differentiable(top_ids, top_log_probs)
        ctx.save_for_backward(targets, seen, support_ids, support_sizes, bias, normalizer, entropy, *factors)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return targeted - normalizer, entropy, top_ids, top_log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy, *_):
        if grad is None and grad_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        targets, seen, support_ids, support_sizes, bias, normalizer, entropy, *factors = ctx.saved_tensors
        support = None if support_ids is None else Support(support_ids, support_sizes)
        tiles = _Tiles(ctx.settings, targets, seen, support, bias, factors)
        needs = ctx.needs_input_grad[5:]
        kept, ctx.kept = ctx.kept[::-1], []  # freed one by one; a second backward pass recomputes them
        with torch.autocast(targets.device.type, enabled=False):
            grads = _backward(tiles, kept, normalizer, entropy, grad, grad_entropy, needs)
        return None, None, None, None, None, *grads


class _Tiles:
    """Iterator over tiles of logits, with the forward and backward computation of one tile.

    A tile has many positions and a part of the vocabulary. With a truncation, which needs the whole vocabulary, it has
    few positions and all columns.
    """

    def __init__(self, settings, targets, seen, support, bias, factors):
        self.settings, self.targets, self.seen, self.support = settings, targets, seen, support
        self.bias, self.factors, self.dtype = bias, factors, accumulation_dtype(*factors)
        self.pairs = [(widen_hidden(h, w, self.dtype), w) for h, w in zip(factors[::2], factors[1::2], strict=True)]
        self.vocab_size = len(factors[1])
        self.masked = support is not None or settings.distribution.truncates
        self.offsets = None if support is None else support.offsets()
        elements, most_rows, self.block_elements = tile_limits(targets.device.type)
        whole = max(1, elements // self.vocab_size)  # positions in a tile of the whole vocabulary
        self.rows = max(1, min(len(targets), whole if self.masked else max(whole, most_rows)))
        self.columns = self.vocab_size if self.masked else min(self.vocab_size, max(1, elements // self.rows))
        reuse = not settings.keep and not has_fast_product(*self.pairs[0])  # whose results are new tensors
        self.buffer = factors[0].new_empty(self.rows * self.columns, dtype=self.dtype) if reuse else None

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        for rows in _iter_slices(len(self.targets), self.rows):
            for columns in _iter_slices(self.vocab_size, self.columns):
                yield rows, columns

    def compute_raw(self, rows: slice, columns: slice) -> torch.Tensor:
        """Return the logits of the model; the next tile may overwrite them."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        (hidden, weight), *more = self.pairs
        out = None if self.buffer is None else self.buffer[: shape[0] * shape[1]].view(shape)
        logits = project(hidden[rows], weight[columns], out)
        for down, up in more:
            logits += project(down[rows], up[columns])
        if self.bias is not None:
            logits += self.bias[columns]
        if self.settings.scale != 1:
            logits *= self.settings.scale
        cap = self.settings.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def process(self, raw: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Return the logits of the scored distribution; overwrites ``raw`` where it can."""
        distribution = self.settings.distribution
        turns, allowed = self.settings.turns, self.settings.allowed
        depends = distribution.repetition_penalty != 1 or distribution.logit_bias or turns is not None
        if not self.masked and not depends and allowed is None:
            scaled = raw if distribution.temperature == 1 else raw.div_(distribution.temperature)
            return exclude_(scaled, distribution.excluded, columns.start) if distribution.excluded else scaled
        if distribution.excluded:
            distribution = replace(distribution, excluded=tuple(i - columns.start for i in distribution.excluded))
        if distribution.logit_bias:
            bias = tuple(
                (i - columns.start, b) for i, b in distribution.logit_bias if columns.start <= i < columns.stop
            )
            distribution = replace(distribution, logit_bias=bias)
        seen = None if self.seen is None else self.seen[rows, columns]
        support = None if self.support is None else self.support.mask(rows, self.offsets, self.vocab_size)
        return process_logits(
            raw,
            distribution,
            seen,
            self.targets[rows] if self.masked else None,
            support,
            None if turns is None else count_in_turn(self.targets, turns, rows, columns),
            None if allowed is None else unpack_bits(allowed[rows], columns),
        )

    def locate_targets(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[n, 1]`` whether the tile contains each target, and its column, clamped to the tile.

        All lines are kept, since an index of those inside would make a GPU wait for the CPU.
        """
        places = self.targets[rows, None] - columns.start
        width = columns.stop - columns.start
        return (places >= 0) & (places < width), places.clamp(0, width - 1)

    def iter_blocks(self, tile: torch.Tensor, rows: slice) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield views of a few rows of a tile, each after its positions."""
        step = max(1, self.block_elements // tile.shape[1])
        for part in _iter_slices(len(tile), step):
            yield slice(rows.start + part.start, rows.start + part.stop), tile[part]

    def backpropagate_(self, g: torch.Tensor, raw: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Apply the chain rule from processed logits to the output of the projection, in place where it can."""
        distribution, softcap, scale = self.settings[:3]
        if distribution.temperature != 1:
            g = g.div_(distribution.temperature)
        if (penalty := distribution.repetition_penalty) != 1:
            g = torch.where(self.seen[rows, columns], torch.where(raw > 0, g / penalty, g * penalty), g)
        if softcap is not None:
            g = g.mul_(1 - (raw / softcap) ** 2)
        return g.mul_(scale) if scale != 1 else g

    @property
    def needs_raw(self) -> bool:
        """True if :meth:`backpropagate_` reads the raw logits."""
        return self.settings.softcap is not None or self.settings.distribution.repetition_penalty != 1


def _backward(tiles: _Tiles, kept, normalizer, entropy, grad, grad_entropy, needs) -> list[torch.Tensor | None]:
    """Return the gradients of the bias and the factors that need one, summed over tiles in at least float32."""
    inputs = (tiles.bias, *tiles.factors)
    grads = [torch.zeros_like(t, dtype=tiles.dtype) if need else None for t, need in zip(inputs, needs, strict=True)]
    grad_bias, *grad_factors = grads
    for rows, columns in tiles:
        # Take or recompute the logits, and turn them into their gradient in place
        raw = kept[-1] if kept else tiles.compute_raw(rows, columns)
        g = kept.pop() if kept else tiles.process(raw.clone() if tiles.needs_raw else raw, rows, columns)
        _replace_by_gradient_(g, rows, normalizer, entropy, grad, grad_entropy, tiles)
        if grad is not None:
            inside, places = tiles.locate_targets(rows, columns)
            g.scatter_(1, places, g.gather(1, places) + torch.where(inside, grad[rows, None], 0.0))
        g = tiles.backpropagate_(g, raw, rows, columns)
        # Add the share of this tile to the gradients of the inputs
        if grad_bias is not None:
            grad_bias[columns] += g.sum(0)
        if len(tiles.pairs) == 1:
            g = narrow_gradient(g, *tiles.pairs[0])  # once for both products
        for i, (hidden, weight) in enumerate(tiles.pairs):
            grad_hidden, grad_weight = grad_factors[2 * i : 2 * i + 2]
            if grad_hidden is not None:
                add_hidden_gradient(grad_hidden[rows], g, weight[columns])
            if grad_weight is not None:
                add_weight_gradient(grad_weight[columns], g, hidden[rows])
        del raw, g  # before the next tile
    return [None if d is None else d.to(t.dtype) for d, t in zip(grads, inputs, strict=True)]


def _accumulate_(
    logits: torch.Tensor, top: torch.Tensor, total: torch.Tensor, spread: torch.Tensor | None, masked: bool
) -> None:
    """Add columns to the running sums of each row; overwrites ``logits``.

    The sums are ``top``, the largest logit ``m``; ``total = sum_v exp(z_v - m)``; and, unless None,
    ``spread = sum_v exp(z_v - m) * (z_v - m)``. The entropy is ``log(total) - spread / total``.
    """
    new = torch.maximum(top, logits.amax(-1))
    shift = top - new
    logits.sub_(new[:, None])
    if spread is None:
        probs = logits.exp_()
    else:
        probs = logits.exp()
        if masked:
            logits.masked_fill_(logits.isneginf(), 0.0)  # 0 * -inf would be NaN
        spread.addcmul_(total, shift).mul_(shift.exp()).add_(torch.linalg.vecdot(probs, logits))
    total.mul_(shift.exp()).add_(probs.sum(-1))
    top.copy_(new)


def _keep_top_(best: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, first: int) -> None:
    """Merge columns that begin at ``first`` into the ``k`` largest logits of each row and their ids."""
    k = best.shape[1]
    more = logits.topk(min(k, logits.shape[1]), -1)
    if first == 0:  # the initial entries are no tokens: a logit of minus infinity must not lose to them
        best[:, : more.values.shape[1]], ids[:, : more.values.shape[1]] = more
        return
    order = torch.cat([best, more.values], 1).topk(k, -1)
    ids.copy_(torch.cat([ids, more.indices + first], 1).gather(1, order.indices))
    best.copy_(order.values)


def _replace_by_gradient_(
    logits: torch.Tensor, rows: slice, normalizer, entropy, grad, grad_entropy, tiles: _Tiles
) -> None:
    """Replace logits by ``-p * (grad + grad_entropy * (log p + H))``, the gradient without the target's term."""
    for part, block in tiles.iter_blocks(logits, rows):
        block.sub_(normalizer[part, None])
        if grad_entropy is None:
            block.exp_().mul_(-grad[part, None])
            continue
        probs = block.exp()
        if tiles.masked:
            block.masked_fill_(block.isneginf(), 0.0)
        block.add_(entropy[part, None]).mul_(grad_entropy[part, None])
        if grad is not None:
            block.add_(grad[part, None])
        block.mul_(probs).neg_()


def _iter_slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


CAST_ELEMENTS = 2**18  # weights cast at once: 1 MiB in float32, which stays in the cache of a core


def accumulation_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """Return the widest dtype of the tensors, at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def widen_hidden(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast ``hidden`` to ``dtype``, unless the device has a kernel that widens its products with ``weight``."""
    return hidden if _has_kernel(hidden, weight) else hidden.to(dtype)


def project(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``hidden @ weight.T`` in at least float32, without gradient.

    Shapes: ``hidden [n, H]``, ``weight [V, H]``, ``out [n, V]`` to ``[n, V]``.
    """
    dtype = accumulation_dtype(hidden, weight)
    if has_fast_product(hidden, weight) and (out is None or weight.numel() <= 4 * CAST_ELEMENTS):
        return fast_product(hidden, weight)
    out = hidden.new_empty(len(hidden), len(weight), dtype=dtype) if out is None or out.dtype != dtype else out
    if _has_kernel(hidden, weight):
        return torch.mm(hidden, weight.T, out_dtype=dtype, out=out)
    hidden = hidden.to(dtype)
    if weight.dtype == dtype:
        if weight.is_cuda:
            return torch.mm(hidden, weight.T, out=out)
        for rows in _chunks(weight, 4 * CAST_ELEMENTS):  # one product with a large vocabulary takes longer
            if has_fast_product(hidden, weight):
                out[:, rows] = fast_product(hidden, weight[rows])
            else:
                torch.mm(hidden, weight[rows].T, out=out[:, rows])
        return out
    for rows in _chunks(weight):
        torch.mm(hidden, weight[rows].to(dtype).T, out=out[:, rows])
    return out


def narrow_gradient(gradient: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Cast the gradient of a product to the dtype of both factors if the device has a kernel that widens products."""
    return gradient.to(weight.dtype) if _has_kernel(hidden, weight) else gradient


def add_hidden_gradient(total: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> None:
    """Add ``gradient @ weight``, the gradient of :func:`project` for ``hidden``, to ``total`` ``[n, H]``."""
    if _has_kernel(weight, weight):
        total += torch.mm(gradient.to(weight.dtype), weight, out_dtype=total.dtype)
    elif gradient.dtype == weight.dtype:
        add_product_(total, gradient, weight.T)
    else:
        for rows in _chunks(weight):
            add_product_(total, gradient[:, rows], weight[rows].to(gradient.dtype).T)


def add_weight_gradient(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add ``gradient.T @ hidden``, the gradient of :func:`project` for ``weight``, to ``total`` ``[V, H]``."""
    if hidden.dtype != total.dtype and _has_kernel(hidden, hidden):
        gradient = gradient.to(hidden.dtype)
        for rows in _chunks(total, 64 * CAST_ELEMENTS):  # bounds the product, which has the size of the weight
            total[rows] += torch.mm(gradient[:, rows].T, hidden, out_dtype=total.dtype)
    else:
        add_product_(total, gradient.T.to(total.dtype), hidden.to(total.dtype).T)


def _has_kernel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the device multiplies 16-bit floats into float32; CPUs in torch 2.13 do not."""
    return a.is_cuda and a.dtype == b.dtype and a.dtype.itemsize == 2


def _chunks(weight: torch.Tensor, elements: int = CAST_ELEMENTS) -> Iterator[slice]:
    step = max(1, elements // max(1, weight.shape[1]))
    return (slice(start, start + step) for start in range(0, len(weight), step))
