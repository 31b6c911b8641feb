"""Metrics of an evaluation's samples other than scores: entropy, KL to the reference, and diversity of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchrl_rloo.functional.statistics import distinct_share, overlap

if TYPE_CHECKING:
    from torchrl_rloo.diagnostics.evaluation_result import EvaluatedSample


def sample_metrics(groups: Sequence[Sequence[EvaluatedSample]], *, answers: bool) -> dict[str, float]:
    """Return entropy and KL per sampled token, and how different the samples of a prompt are.

    Args:
        groups: samples of each prompt, without greedy completions.
        answers: True if answers were extracted from the completions.

    Returns:
        ``eval/sampled_entropy`` and ``eval/sampled_kl`` in nats per token, over the samples that have them. With
        several samples of a prompt also ``eval/sampled_distinct``, ``eval/sampled_distinct_answers`` and
        ``eval/sampled_ngram_overlap``, the means over the prompts.
    """
    samples, metrics = [sample for group in groups for sample in group], {}
    for name, entry in (("entropy", "surprisal"), ("kl", "kl_to_ref")):
        known = [s for s in samples if getattr(s, entry) is not None]
        if known:
            total = sum(getattr(s, entry) for s in known)
            metrics[f"eval/sampled_{name}"] = total / max(1, sum(s.tokens for s in known))
    several = [group for group in groups if len(group) > 1]
    if several:
        metrics["eval/sampled_distinct"] = _mean([distinct_share([s.completion for s in group]) for group in several])
    if several and answers:
        shares = [distinct_share([s.extracted for s in group]) for group in several]
        metrics["eval/sampled_distinct_answers"] = _mean(shares)
    if several and all(s.ngrams is not None for s in samples):
        shared = [overlap([torch.tensor(s.ngrams, dtype=torch.int64) for s in group]) for group in several]
        metrics["eval/sampled_ngram_overlap"] = _mean(shared)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
