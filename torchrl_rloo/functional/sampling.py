"""The distribution that tokens are sampled from: logits to processed log-probs to token ids.

One function, :func:`process_logits`, defines the sampling distribution. The sampler draws from it and the scorer
evaluates it, so that behavior and training log-probs are of the same distribution at any setting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class SamplingDistribution:
    """Which distribution a policy samples from, given its logits.

    Args:
        temperature: divides the logits; 0 is greedy.
        top_k: keep only the ``top_k`` most likely tokens; None keeps all.
        top_p: then keep the smallest set of most likely tokens whose mass reaches ``top_p``.
        min_p: then keep the tokens at least ``min_p`` times as likely as the most likely one.
        repetition_penalty: divides the positive and multiplies the negative logits of the tokens that are already in
            the row, prompt included (Keskar et al. 2019, arXiv 1909.05858); applied first.

    Raises:
        ValueError: if a value is out of its range.

    Example:
        >>> SamplingDistribution(temperature=0.7, top_p=0.95).truncates
        True
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        checks = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k is None or self.top_k >= 1, "None or at least 1"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
        }
        for name, (ok, wanted) in checks.items():
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {wanted}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens get probability 0."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


class Support(NamedTuple):
    """The tokens that a truncation left at each of ``N`` positions, as the sampler recorded them.

    Attributes:
        ids: ``[K]`` int32 or int64, all positions' tokens in order.
        sizes: ``[N]``, how many of them each position has; ``K`` is their sum.
    """

    ids: torch.Tensor
    sizes: torch.Tensor

    def ends(self) -> list[int]:
        """Where in ``ids`` each position begins and ends: ``N + 1`` numbers."""
        return [0, *self.sizes.cumsum(0).tolist()]

    def mask(self, rows: slice, ends: list[int], vocab_size: int) -> torch.Tensor:
        """``[n, V]`` bool of the positions ``rows``; ``ends`` are those of :meth:`ends`, counted once for all tiles."""
        ids, sizes = self.ids[ends[rows.start] : ends[rows.stop]], self.sizes[rows]
        mask = torch.zeros(len(sizes), vocab_size, dtype=torch.bool, device=ids.device)
        lines = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes.long(), output_size=len(ids))
        mask[lines, ids.long()] = True
        return mask


def kept_tokens(logits: torch.Tensor, distribution: SamplingDistribution) -> torch.Tensor:
    """Which tokens top-k, top-p and min-p leave, in that order.

    Args:
        logits: ``[N, V]``, already divided by the temperature.
        distribution: the truncations.

    Returns:
        ``[N, V]`` bool; at least one token a row.
    """
    keep = torch.ones_like(logits, dtype=torch.bool)
    if distribution.top_k is not None and distribution.top_k < logits.shape[-1]:
        keep &= logits >= logits.topk(distribution.top_k, -1).values[:, -1:]
    if distribution.top_p < 1:
        ordered, order = logits.masked_fill(~keep, -torch.inf).sort(-1, descending=True)
        probs = ordered.softmax(-1)
        kept = probs.cumsum(-1) - probs < distribution.top_p  # the mass before a token, so the first always stays
        keep &= torch.zeros_like(keep).scatter(-1, order, kept)
    if distribution.min_p > 0:
        threshold = torch.tensor(distribution.min_p, device=logits.device).log()
        keep &= logits >= logits.amax(-1, keepdim=True) + threshold
    return keep


def process_logits(
    logits: torch.Tensor,
    distribution: SamplingDistribution,
    seen: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    support: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of the distribution that is really sampled.

    Args:
        logits: ``[N, V]`` float32 logits of the model.
        distribution: what is done to them; its temperature must be above 0.
        seen: ``[N, V]`` bool, the tokens already in each row; needed for a repetition penalty.
        sampled: ``[N]`` ids to be kept whatever the truncation says. Scoring passes the ids that were sampled, so that
            their log-prob stays finite after the weights have moved.
        support: ``[N, V]`` bool, what the truncation left when it was recorded; then truncates in the present one's
            place.

    Returns:
        ``[N, V]``, minus infinity on the tokens that cannot be sampled.
    """
    if distribution.repetition_penalty != 1:
        penalty = distribution.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if distribution.temperature != 1:
        logits = logits / distribution.temperature
    if support is not None:
        logits = logits.masked_fill(~support, -torch.inf)
    elif distribution.truncates:
        keep = kept_tokens(logits.detach(), distribution)
        if sampled is not None:
            keep = keep.scatter(-1, sampled[:, None], True)
        logits = logits.masked_fill(~keep, -torch.inf)
    return logits


def sample_tokens(
    logits: torch.Tensor, distribution: SamplingDistribution, uniforms: torch.Tensor, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token a row by inverting the cumulative distribution at a given uniform number.

    A row's token depends on its own logits and its own uniform number only, so a row samples the same whatever batch
    it is in.

    Args:
        logits: ``[N, V]`` float32.
        distribution: what to sample from; temperature 0 takes the most likely token.
        uniforms: ``[N]`` in ``[0, 1)``.
        seen: ``[N, V]`` bool, the tokens already in each row; needed for a repetition penalty.

    Returns:
        ``(ids [N] int64, log_probs [N] float32)``; log-probs in nats under the sampled distribution (0 when greedy:
        the distribution is a point).
    """
    if distribution.temperature == 0:
        greedy = SamplingDistribution(repetition_penalty=distribution.repetition_penalty)
        ids = process_logits(logits, greedy, seen).argmax(-1)
        return ids, torch.zeros_like(ids, dtype=torch.float32)
    return draw_tokens(process_logits(logits, distribution, seen).log_softmax(-1), uniforms)


def draw_tokens(log_probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`sample_tokens` does once it has the log-probs ``[N, V]`` of the distribution to sample from."""
    cumulative = log_probs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target, right=True).clamp(max=log_probs.shape[-1] - 1)
    return ids[:, 0], log_probs.gather(-1, ids)[:, 0]
