"""Log-probs of given tokens from hidden states, without ever holding the logits of all of them."""

from __future__ import annotations

import torch

from torchrl_rloo.functional.sampling import SamplingDistribution, process_logits

TILE_ELEMENTS = 2**22  # logits held at once: 16 MiB in float32, the fastest of 2**20, 2**22 and 2**24 on two CPU cores


def tile_rows(vocab_size: int) -> int:
    """How many positions to project at once, given the vocabulary size."""
    return max(16, TILE_ELEMENTS // vocab_size)


class _TokenLogProbs(torch.autograd.Function):
    """Keeps the normaliser of each position, and computes a tile's logits again when its gradient is needed."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, distribution, softcap, scale, seen):
        n = len(hidden)
        log_probs, entropy, normaliser = (hidden.new_empty(n, dtype=torch.float32) for _ in range(3))
        for rows in _tiles(n, weight):
            logits = _tile_logits(hidden[rows], weight, bias, softcap, scale)
            logits = process_logits(logits, distribution, seen[rows] if seen is not None else None, targets[rows])
            z = logits.logsumexp(-1)
            normaliser[rows] = z
            log_probs[rows] = logits.gather(-1, targets[rows, None])[:, 0] - z
            tile = logits.sub_(z[:, None])
            probs = tile.exp()
            if distribution.truncates:
                tile = tile.masked_fill_(tile.isneginf(), 0.0)  # 0 * -inf would be NaN
            entropy[rows] = -torch.linalg.vecdot(probs, tile)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, seen)
        ctx.settings = distribution, softcap, scale
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, bias, targets, normaliser, seen = ctx.saved_tensors
        distribution, softcap, scale = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        needs_raw = softcap is not None or distribution.repetition_penalty != 1
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
        for rows in _tiles(len(hidden), weight):
            raw = _tile_logits(hidden[rows], weight, bias, softcap, scale)
            seen_rows = seen[rows] if seen is not None else None
            g = process_logits(raw, distribution, seen_rows, targets[rows])
            if g is raw and needs_raw:
                g = raw.clone()
            g = g.sub_(normaliser[rows, None]).exp_().mul_(-grad[rows, None])
            g.scatter_add_(-1, targets[rows, None], grad[rows, None])
            g = _unprocess_gradient(g, raw, distribution, seen_rows, softcap, scale).to(weight.dtype)
            if need_hidden:
                grad_hidden[rows] = g @ weight
            if need_weight:
                if g.dtype == torch.float32:
                    grad_weight.addmm_(g.T, hidden[rows])
                else:
                    grad_weight += g.T @ hidden[rows]
            if grad_bias is not None:
                grad_bias += g.sum(0, dtype=torch.float32)
        cast_weight = grad_weight.to(weight.dtype) if need_weight else None
        cast_bias = grad_bias.to(bias.dtype) if grad_bias is not None else None
        return grad_hidden, cast_weight, cast_bias, None, None, None, None, None


def _tiles(n: int, weight: torch.Tensor):
    step = tile_rows(weight.shape[0])
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def _tile_logits(hidden, weight, bias, softcap, scale) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if scale != 1:
        logits = logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _unprocess_gradient(g, raw, distribution, seen, softcap, scale) -> torch.Tensor:
    """Chain rule from the processed logits back to the projection's output, in place where it can."""
    if distribution.temperature != 1:
        g = g.div_(distribution.temperature)
    if distribution.repetition_penalty != 1:
        penalty = distribution.repetition_penalty
        g = torch.where(seen, torch.where(raw > 0, g / penalty, g * penalty), g)
    if softcap is not None:
        g = g.mul_(1 - (raw / softcap) ** 2)
    return g.mul_(scale) if scale != 1 else g


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
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Log-probs of target tokens and entropies, the vocabulary projected a tile of positions at a time.

    .. math:: \log \pi(a_n) = z_{n a_n} - \log \sum_v e^{z_{nv}}, \quad
        \frac{\partial \log \pi(a_n)}{\partial z_{nv}} = [v = a_n] - \pi_{nv}

    with :math:`z` the processed logits (:func:`~torchrl_rloo.functional.sampling.process_logits`). Peak memory is a few
    tiles of :data:`TILE_ELEMENTS` logits, forward and backward, instead of several times ``N * V``.

    Args:
        hidden: ``[N, H]`` hidden states, each at the position before its target.
        weight: ``[V, H]`` of the output projection.
        targets: ``[N]`` int64 token ids.
        bias: ``[V]`` or None.
        distribution: the sampling distribution; its temperature must be above 0.
        softcap: cap ``c`` of ``c * tanh(logits / c)``, or None.
        scale: multiplies the logits before the cap.
        seen: ``[N, V]`` bool, the tokens before each target; needed for a repetition penalty.

    Returns:
        ``(log_probs [N], entropy [N])`` in float32 nats. Gradients flow through the log-probs only.
    """
    if distribution.temperature == 0:
        raise ValueError("temperature=0 has no log-probs to train on: a greedy policy is a point distribution")
    return _TokenLogProbs.apply(hidden, weight, bias, targets, distribution, softcap, scale, seen)
