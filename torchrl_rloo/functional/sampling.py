"""Distribution that tokens are sampled from: logits to processed log-probs to token ids.

:func:`process_logits` defines the sampling distribution. The sampler draws from it and the scorer evaluates it, so
behavior and training log-probs are of the same distribution for all settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

_DRAWN_ELEMENTS = 2**19  # logits drawn from at once: 2 MiB in float32
NEVER = -1e30  # logit of excluded tokens: their probability is 0, and unlike infinity it gives no NaN
_GROUP_TOKENS = 512  # tokens whose probabilities are summed before the search


@dataclass(frozen=True)
class SamplingDistribution:
    """Sampling distribution of a policy, as processing steps of its logits.

    Args:
        temperature: divisor of the logits; 0 is greedy.
        top_k: number of most likely tokens to keep. None keeps all.
        top_p: probability mass to keep after top-k: the smallest set of most likely tokens that reaches it. 1 keeps
            all.
        min_p: smallest kept probability after top-p, relative to the most likely token. 0 keeps all.
        repetition_penalty: divisor of positive and factor of negative logits of the tokens that are already in the row,
            including the prompt (Keskar et al. 2019, arXiv 1909.05858). It is applied first. 1 disables it.
        presence_penalty: subtracted from the logits of the tokens that are already in the turn; 0 disables it.
        frequency_penalty: subtracted from the logit of a token once for each time that it is already in the turn.
        logit_bias: pairs or a dict of ids and what is added to their logits.
        min_new_tokens: tokens of a turn before which those that stop it have probability 0.
        bad_words: texts whose last token has probability 0 after the others, as the tokenizer spells them with and
            without a space before.
        structured: grammar that the text of a turn must follow, as ``{"regex": ...}``, ``{"json": schema}``,
            ``{"choice": [...]}`` or ``{"grammar": ...}`` (EBNF). Tokens that leave it have probability 0.
        excluded: ids of probability 0, such as those of images.

    Raises:
        ValueError: if a value is out of range.

    Example:
        >>> SamplingDistribution(temperature=0.7, top_p=0.95).truncates
        True
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    excluded: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    bad_words: Sequence[str] = ()
    structured: Mapping[str, Any] | tuple[str, str] | None = None

    def __post_init__(self):
        # Hashable values, since engines batch requests by distribution
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)
        object.__setattr__(self, "logit_bias", tuple(sorted((int(i), float(b)) for i, b in bias)))
        object.__setattr__(self, "bad_words", words)
        if not isinstance(self.structured, tuple | None):
            object.__setattr__(self, "structured", _parse_structured(self.structured))
        checks = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k is None or self.top_k >= 1, "None or at least 1"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1)"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "in [-2, 2], the range of vLLM"),
            "frequency_penalty": (-2 <= self.frequency_penalty <= 2, "in [-2, 2], the range of vLLM"),
            "min_new_tokens": (self.min_new_tokens >= 0, "at least 0"),
            "bad_words": (all(word.strip() for word in words), "a list of texts, none of them blank"),
        }
        for name, (ok, wanted) in checks.items():
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {wanted}")
        if self.logit_bias and self.repetition_penalty != 1:
            raise ValueError("logit_bias cannot be combined with repetition_penalty, which scales it; remove one")
        if self.structured and self.min_new_tokens:
            raise ValueError("min_new_tokens cannot be combined with structured; let the grammar require the length")

    @property
    def counts_tokens(self) -> bool:
        """True if logits depend on how often the turn has each token."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_rules(self) -> bool:
        """True if the tokens of a turn decide which others are allowed."""
        return bool(self.min_new_tokens or self.bad_words or self.structured)

    @property
    def truncates(self) -> bool:
        """True if some tokens get probability 0."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def _parse_structured(value: Any) -> tuple[str, str]:
    """Return kind and text of a grammar; choices become an EBNF grammar."""
    kind, text = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else (None, None)
    if kind == "json" and not isinstance(text, str):
        text = json.dumps(text)
    elif kind == "choice" and isinstance(text, Sequence) and not isinstance(text, str) and text:
        kind, text = "grammar", "root ::= " + " | ".join(json.dumps(one, ensure_ascii=False) for one in text)
    is_text = isinstance(text, str) and (kind != "grammar" or "::=" in text)
    if kind not in ("regex", "json", "grammar") or not is_text:
        raise ValueError(
            f"structured={value!r:.80} must be one of {{regex: text}}, {{json: schema}}, {{choice: [texts]}} and "
            "{grammar: text}, with '::=' (EBNF)"
        )
    return kind, text


class Support(NamedTuple):
    """Tokens that a truncation kept at each of ``N`` positions, as recorded by the sampler."""

    ids: torch.Tensor  # [K] int32 or int64, kept tokens of all positions in order
    sizes: torch.Tensor  # [N], number of kept tokens per position. They sum to K

    def offsets(self) -> list[int]:
        """Return the ``N + 1`` offsets in ``ids`` between which the tokens of each position stand."""
        return [0, *self.sizes.cumsum(0).tolist()]

    def mask(self, rows: slice, offsets: list[int], vocab_size: int) -> torch.Tensor:
        """Return the bool mask ``[n, V]`` of the positions ``rows``; ``offsets`` are computed once for all tiles."""
        ids, sizes = self.ids[offsets[rows.start] : offsets[rows.stop]], self.sizes[rows]
        mask = torch.zeros(len(sizes), vocab_size, dtype=torch.bool, device=ids.device)
        lines = torch.arange(len(sizes), device=ids.device).repeat_interleave(sizes.long(), output_size=len(ids))
        mask[lines, ids.long()] = True
        return mask


def kept_tokens(logits: torch.Tensor, distribution: SamplingDistribution) -> torch.Tensor:
    """Return the mask of the tokens that top-k, top-p and min-p keep, applied in this order.

    Shapes: ``logits [N, V]`` to ``[N, V]`` bool.
    """
    keep = torch.ones_like(logits, dtype=torch.bool)
    if distribution.top_k is not None and distribution.top_k < logits.shape[-1]:
        keep &= logits >= logits.topk(distribution.top_k, -1).values[:, -1:]
    if distribution.top_p < 1:
        ordered, order = logits.masked_fill(~keep, -torch.inf).sort(-1, descending=True)
        probs = ordered.softmax(-1)
        kept = probs.cumsum(-1) - probs < distribution.top_p  # mass before each token, so the first token stays
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
    counts: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the logits of the sampled distribution: penalties, temperature, excluded tokens, then truncation.

    ``seen`` are the tokens of the row so far, and ``counts`` how often its turn has each. ``allowed`` are those that
    the rules of the turn allow.

    Shapes: ``sampled [N]``, the others ``[N, V]``, to ``[N, V]``.
    """
    if distribution.logit_bias:
        ids, bias = zip(*distribution.logit_bias, strict=True)
        ids = torch.tensor(ids, device=logits.device)
        logits = logits.index_add(-1, ids, logits.new_tensor(bias).expand(len(logits), -1))
    if distribution.repetition_penalty != 1:
        penalty = distribution.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if counts is not None:
        logits = logits - distribution.frequency_penalty * counts - distribution.presence_penalty * (counts > 0)
    if distribution.temperature != 1:
        logits = logits / distribution.temperature
    if distribution.excluded:
        logits = exclude_(logits.clone(), distribution.excluded)
    if allowed is not None:
        logits = logits.masked_fill(~allowed, NEVER)
    if support is not None:
        logits = logits.masked_fill(~support, -torch.inf)
    elif distribution.truncates:
        keep = kept_tokens(logits.detach(), distribution)
        if sampled is not None:
            keep = keep.scatter(-1, sampled[:, None], True)
        logits = logits.masked_fill(~keep, -torch.inf)
    return logits


def count_in_turn(tokens: torch.Tensor, starts: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    """Count each id in the part of its turn that precedes a token, for the tokens ``rows`` and the ids ``columns``.

    ``starts`` are the indices in ``tokens`` at which their turns begin.

    Shapes: ``tokens [N]``, ``starts [N]`` to ``[n, v]`` float32.
    """
    here = torch.arange(rows.start, rows.stop, device=tokens.device)
    earlier = torch.arange(int(starts[rows].min()), rows.stop, device=tokens.device)
    earlier = earlier[(tokens[earlier] >= columns.start) & (tokens[earlier] < columns.stop)]
    inside = (earlier >= starts[rows, None]) & (earlier < here[:, None])
    counts = torch.zeros(len(here), columns.stop - columns.start, device=tokens.device)
    return counts.index_add_(1, tokens[earlier] - columns.start, inside.to(counts.dtype))


def unpack_bits(bits: torch.Tensor, columns: slice) -> torch.Tensor:
    """Return bits ``[n, W]`` int32, 32 ids in each word, as bool ``[n, v]`` of the ids ``columns``."""
    ids = torch.arange(columns.start, columns.stop, device=bits.device)
    return (bits[:, ids // 32] >> (ids % 32).int()).bitwise_and_(1).bool()


def exclude_(logits: torch.Tensor, ids: tuple[int, ...], first: int = 0) -> torch.Tensor:
    """Give excluded ids probability 0 in logits ``[N, v]`` of the ids from ``first`` on, in place."""
    inside = [i - first for i in ids if 0 <= i - first < logits.shape[-1]]
    return logits.index_fill_(-1, torch.tensor(inside, device=logits.device), NEVER) if inside else logits


def sample_tokens(
    logits: torch.Tensor,
    distribution: SamplingDistribution,
    uniforms: torch.Tensor,
    seen: torch.Tensor | None = None,
    **turn: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row by inverting the cumulative distribution at a given uniform number.

    The token of a row depends only on its logits and its uniform number, not on the batch that contains it. ``turn``
    has ``counts`` and ``allowed`` of :func:`process_logits`.

    Shapes: ``logits [N, V]``, ``uniforms [N]``, ``seen [N, V]`` to ``(ids [N] int64, log_probs [N] float32)``.
    """
    if distribution.temperature == 0:
        greedy = replace(distribution, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0)
        ids = process_logits(logits, greedy, seen, **turn).argmax(-1)
        return ids, torch.zeros_like(ids, dtype=torch.float32)
    return draw_tokens(process_logits(logits, distribution, seen, **turn), uniforms)


def draw_tokens(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row from processed logits ``[N, V]``; see :func:`sample_tokens`."""
    # A few rows at once stay in the cache of a core, and a new tensor of all rows would cost page faults
    rows = len(logits) if logits.is_cuda else max(1, _DRAWN_ELEMENTS // logits.shape[-1])
    drawn = [_draw(*part) for part in zip(logits.split(rows), uniforms.split(rows), strict=True)]
    ids, log_probs = drawn[0] if len(drawn) == 1 else map(torch.cat, zip(*drawn, strict=True))
    return ids, log_probs


def _draw(logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the cumulative sum of groups of tokens, then that of the tokens in the group."""
    vocab_size = logits.shape[-1]
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).exp_()
    width = min(vocab_size, _GROUP_TOKENS)
    if vocab_size % width:
        weights = torch.nn.functional.pad(weights, (0, -vocab_size % width))
    groups = weights.unflatten(-1, (-1, width))
    sums = groups.sum(-1)
    cumulative = sums.cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    group = _invert(cumulative, target)
    rest = target - (cumulative.gather(-1, group) - sums.gather(-1, group))
    within = groups.take_along_dim(group[..., None], 1)[:, 0].cumsum(-1)
    ids = (group * width + _invert(within, rest.clamp_(min=0))).clamp_(max=vocab_size - 1)
    log_probs = logits.gather(-1, ids) - top - sums.sum(-1, keepdim=True).log()
    return ids[:, 0], log_probs[:, 0]


def _invert(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index ``[N, 1]`` whose sum exceeds the target; its own share is above 0."""
    total = cumulative[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[-1] - 1)
