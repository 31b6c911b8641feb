"""Log-probs of given tokens from hidden states, without ever holding the logits of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from torchrl_rloo.functional.projection import accumulation_dtype, add_back, add_outer, project, widen
from torchrl_rloo.functional.sampling import SamplingDistribution, Support, process_logits

TILE_ELEMENTS = 2**21  # logits held at once: 8 MiB in float32; 2**22 is no faster on CPU cores
TILE_ROWS = 2048  # positions of a tile of a large vocabulary: the projection is then read seldom and in large products
BLOCK_ELEMENTS = 2**18  # probabilities held beside them: what is smaller than a tile also stays in the cache


class TokenLogProbs(NamedTuple):
    """What :func:`token_log_probs` returns; in nats, float32 (float64 for float64 inputs).

    Attributes:
        log_probs: ``[N]``, of the targets.
        entropy: ``[N]``, of the processed distribution; None if not asked for.
        top_ids: ``[N, k]`` int64, the ``k`` most likely tokens, most likely first; None for ``top_k=0``.
        top_log_probs: ``[N, k]``, theirs, without gradient; minus infinity once a truncation has left fewer than ``k``.
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
) -> TokenLogProbs:
    r"""Log-probs of target tokens and entropies, a tile of positions and of the vocabulary at a time.

    .. math:: \log \pi(a_n) = z_{n a_n} - \log \sum_v e^{z_{nv}}, \quad
        \frac{\partial \log \pi(a_n)}{\partial z_{nv}} = [v = a_n] - \pi_{nv}, \quad
        \frac{\partial H_n}{\partial z_{nv}} = -\pi_{nv} (\log \pi_{nv} + H_n)

    with :math:`z` the processed logits (:func:`~torchrl_rloo.functional.sampling.process_logits`). Peak memory is a few
    tiles of :data:`TILE_ELEMENTS` logits, forward and backward, instead of several times ``N * V``. Logits and sums are
    float32 for narrower inputs, too (:mod:`~torchrl_rloo.functional.projection`).

    Args:
        hidden: ``[N, H]`` hidden states, each at the position before its target.
        weight: ``[V, H]`` of the output projection.
        targets: ``[N]`` int64 token ids.
        bias: ``[V]`` or None.
        distribution: the sampling distribution; its temperature must be above 0.
        softcap: cap ``c`` of ``c * tanh(logits / c)``, or None.
        scale: multiplies the logits before the cap.
        seen: ``[N, V]`` bool, the tokens before each target; needed for a repetition penalty.
        entropy: whether to compute entropies. Their gradient costs something only where it is used.
        top_k: of how many most likely tokens to return ids and log-probs, at most ``V``.
        support: the tokens that the sampler's truncation left of each position, its target among them; log-probs are
            then of the distribution over those, whatever ``distribution`` would leave now.
        low_rank: pairs ``[N, r]``, ``[V, r]`` whose products are added to ``hidden @ weight.T``: adapters of the
            projection (Hu et al. 2021, arXiv 2106.09685).

    Returns:
        Log-probs, entropies and the most likely tokens.

    Raises:
        ValueError: for a temperature of 0, or a ``top_k`` out of range.
    """
    if distribution.temperature == 0:
        raise ValueError("temperature=0 has no log-probs to train on: a greedy policy is a point distribution")
    if not 0 <= top_k <= len(weight):
        raise ValueError(f"top_k={top_k} must be in [0, {len(weight)}], the vocabulary's size")
    factors = [tensor for pair in ((hidden, weight), *low_rank) for tensor in pair]
    shape = _Shape(distribution, softcap, scale, entropy, top_k)
    with torch.autocast(hidden.device.type, enabled=False):
        return TokenLogProbs(*_TokenLogProbs.apply(shape, targets, seen, *(support or (None, None)), bias, *factors))


class _Shape(NamedTuple):
    """What makes log-probs of a projection, and which statistics are wanted."""

    distribution: SamplingDistribution
    softcap: float | None
    scale: float
    entropy: bool
    top_k: int


class _TokenLogProbs(torch.autograd.Function):
    """Keeps the normalizer of each position, and computes a tile's logits again when its gradient is needed."""

    @staticmethod
    def forward(ctx, shape, targets, seen, support_ids, support_sizes, bias, *factors):
        support = None if support_ids is None else Support(support_ids, support_sizes)
        tiles = _Tiles(shape, targets, seen, support, bias, factors)
        n, k = len(targets), shape.top_k
        targeted, top, total = (factors[0].new_zeros(n, dtype=tiles.dtype) for _ in range(3))
        top.fill_(torch.finfo(tiles.dtype).min)
        spread = torch.zeros_like(total) if shape.entropy else None
        top_ids = targets.new_zeros(n, k) if k else None
        top_log_probs = top.new_full((n, k), -torch.inf) if k else None
        for rows, columns in tiles:
            logits = tiles.processed(tiles.raw(rows, columns), rows, columns)
            lines, places = tiles.targets_in(rows, columns)
            targeted[rows.start + lines] = logits[lines, places]
            if k:
                _keep_top_(top_log_probs[rows], top_ids[rows], logits, columns.start)
            for part, block in _blocks(logits, rows):
                _accumulate_(block, top[part], total[part], None if spread is None else spread[part], tiles.masked)
        log_total = total.log()
        normalizer = top + log_total
        entropy = None if spread is None else log_total - spread / total
        if k:
            top_log_probs -= normalizer[:, None]
            ctx.mark_non_differentiable(top_ids, top_log_probs)
        ctx.save_for_backward(targets, seen, support_ids, support_sizes, bias, normalizer, entropy, *factors)
        ctx.shape = shape
        ctx.set_materialize_grads(False)
        return targeted - normalizer, entropy, top_ids, top_log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_entropy, *_):
        if grad is None and grad_entropy is None:
            return (None,) * len(ctx.needs_input_grad)
        targets, seen, support_ids, support_sizes, bias, normalizer, entropy, *factors = ctx.saved_tensors
        support = None if support_ids is None else Support(support_ids, support_sizes)
        tiles = _Tiles(ctx.shape, targets, seen, support, bias, factors)
        needs = ctx.needs_input_grad[5:]
        with torch.autocast(targets.device.type, enabled=False):
            grads = _backward(tiles, normalizer, entropy, grad, grad_entropy, needs)
        return None, None, None, None, None, *grads


class _Tiles:
    """The logits of one tile after the other, and the chain rule back through them.

    A tile is of many positions and a part of the vocabulary. Where a truncation has to see all of it, it is of few
    positions and the whole.
    """

    def __init__(self, shape, targets, seen, support, bias, factors):
        self.shape, self.targets, self.seen, self.support = shape, targets, seen, support
        self.bias, self.factors, self.dtype = bias, factors, accumulation_dtype(*factors)
        self.pairs = [(widen(h, w, self.dtype), w) for h, w in zip(factors[::2], factors[1::2], strict=True)]
        self.vocab_size = len(factors[1])
        self.masked = support is not None or shape.distribution.truncates
        self.ends = None if support is None else support.ends()
        whole = max(1, TILE_ELEMENTS // self.vocab_size)  # positions in a tile of the whole vocabulary
        self.rows = max(1, min(len(targets), whole if self.masked else max(whole, TILE_ROWS)))
        self.columns = self.vocab_size if self.masked else min(self.vocab_size, max(1, TILE_ELEMENTS // self.rows))
        self.buffer = factors[0].new_empty(self.rows * self.columns, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        for rows in _slices(len(self.targets), self.rows):
            for columns in _slices(self.vocab_size, self.columns):
                yield rows, columns

    def raw(self, rows: slice, columns: slice) -> torch.Tensor:
        """The model's own logits, in a buffer that the next tile overwrites."""
        shape = rows.stop - rows.start, columns.stop - columns.start
        (hidden, weight), *more = self.pairs
        logits = project(hidden[rows], weight[columns], self.buffer[: shape[0] * shape[1]].view(shape))
        for down, up in more:
            logits += project(down[rows], up[columns])
        if self.bias is not None:
            logits += self.bias[columns]
        if self.shape.scale != 1:
            logits *= self.shape.scale
        cap = self.shape.softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def processed(self, raw: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Logits of the distribution scored; uses ``raw`` up where it can."""
        distribution = self.shape.distribution
        if not self.masked and distribution.repetition_penalty == 1:
            return raw if distribution.temperature == 1 else raw.div_(distribution.temperature)
        seen = None if self.seen is None else self.seen[rows, columns]
        support = None if self.support is None else self.support.mask(rows, self.ends, self.vocab_size)
        return process_logits(raw, distribution, seen, self.targets[rows] if self.masked else None, support)

    def targets_in(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in a tile the targets lie: its lines that have one, and their places."""
        places = self.targets[rows] - columns.start
        lines = ((places >= 0) & (places < columns.stop - columns.start)).nonzero()[:, 0]
        return lines, places[lines]

    def unprocess_(self, g: torch.Tensor, raw: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Chain rule from the processed logits back to the projection's output, in place where it can."""
        distribution, softcap, scale = self.shape[:3]
        if distribution.temperature != 1:
            g = g.div_(distribution.temperature)
        if (penalty := distribution.repetition_penalty) != 1:
            g = torch.where(self.seen[rows, columns], torch.where(raw > 0, g / penalty, g * penalty), g)
        if softcap is not None:
            g = g.mul_(1 - (raw / softcap) ** 2)
        return g.mul_(scale) if scale != 1 else g

    @property
    def needs_raw(self) -> bool:
        """Whether :meth:`unprocess_` looks at the model's own logits."""
        return self.shape.softcap is not None or self.shape.distribution.repetition_penalty != 1


def _backward(tiles: _Tiles, normalizer, entropy, grad, grad_entropy, needs) -> list[torch.Tensor | None]:
    """Gradients of the bias and the factors that need one, summed over the tiles in at least float32."""
    inputs = (tiles.bias, *tiles.factors)
    grads = [torch.zeros_like(t, dtype=tiles.dtype) if need else None for t, need in zip(inputs, needs, strict=True)]
    grad_bias, *grad_factors = grads
    for rows, columns in tiles:
        raw = tiles.raw(rows, columns)
        g = tiles.processed(raw.clone() if tiles.needs_raw else raw, rows, columns)
        g = g.sub_(normalizer[rows, None])
        _logit_gradient_(g, rows, entropy, grad, grad_entropy, tiles.masked)
        if grad is not None:
            lines, places = tiles.targets_in(rows, columns)
            g[lines, places] += grad[rows][lines]
        g = tiles.unprocess_(g, raw, rows, columns)
        if grad_bias is not None:
            grad_bias[columns] += g.sum(0)
        for i, (hidden, weight) in enumerate(tiles.pairs):
            grad_hidden, grad_weight = grad_factors[2 * i : 2 * i + 2]
            if grad_hidden is not None:
                add_back(grad_hidden[rows], g, weight[columns])
            if grad_weight is not None:
                add_outer(grad_weight[columns], g, hidden[rows])
    return [None if d is None else d.to(t.dtype) for d, t in zip(grads, inputs, strict=True)]


def _accumulate_(
    logits: torch.Tensor, top: torch.Tensor, total: torch.Tensor, spread: torch.Tensor | None, masked: bool
) -> None:
    r"""Takes more columns into running sums of each row, and uses them up.

    They are ``top``, the largest logit :math:`m`, ``total`` :math:`= \sum_v e^{z_v - m}` and, unless None, ``spread``
    :math:`= \sum_v e^{z_v - m} (z_v - m)`; the entropy is :math:`\log total - spread / total`.
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
    """Takes more columns, which begin at ``first``, into the ``k`` largest logits of each row and their ids."""
    k = best.shape[1]
    more = logits.topk(min(k, logits.shape[1]), -1)
    if first == 0:  # nothing to compare with, and no id must come in whose logit is as low as that of none
        best[:, : more.values.shape[1]], ids[:, : more.values.shape[1]] = more
        return
    order = torch.cat([best, more.values], 1).topk(k, -1)
    ids.copy_(torch.cat([ids, more.indices + first], 1).gather(1, order.indices))
    best.copy_(order.values)


def _logit_gradient_(log_probs: torch.Tensor, rows: slice, entropy, grad, grad_entropy, masked: bool) -> None:
    """Replaces a tile's log-probs by ``-p (grad + grad_entropy (log p + H))``: all but the target's own gradient."""
    if grad_entropy is None:
        log_probs.exp_().mul_(-grad[rows, None])
        return
    for part, block in _blocks(log_probs, rows):
        probs = block.exp()
        if masked:
            block.masked_fill_(block.isneginf(), 0.0)
        block.add_(entropy[part, None]).mul_(grad_entropy[part, None])
        if grad is not None:
            block.add_(grad[part, None])
        block.mul_(probs).neg_()


def _blocks(tile: torch.Tensor, rows: slice) -> Iterator[tuple[slice, torch.Tensor]]:
    """Views of a few rows of a tile, with the positions that they are of."""
    step = max(1, BLOCK_ELEMENTS // tile.shape[1])
    for start in range(0, len(tile), step):
        block = tile[start : start + step]
        yield slice(rows.start + start, rows.start + start + len(block)), block


def _slices(total: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
