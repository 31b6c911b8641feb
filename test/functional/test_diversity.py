"""Hashes and sketches of n-grams, against sets of tuples."""

from __future__ import annotations

import pytest
import torch

from torchrl_rloo.functional.diversity import NGRAM, SKETCH_SIZE, ngram_statistics, overlap, sequence_hash


def ngrams(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + NGRAM]) for i in range(len(ids) - NGRAM + 1)] or [tuple(ids)]


def test_repetition_and_overlap_of_short_sequences_are_exact():
    generator = torch.Generator().manual_seed(0)
    for length in (0, 1, 3, 4, 5, 12, 30):
        rows = [torch.randint(0, 3, (length,), generator=generator).tolist() for _ in range(4)]
        sketches = []
        for row in rows:
            sketch, repetition = ngram_statistics(torch.tensor(row, dtype=torch.int64))
            found = ngrams(row)
            assert repetition == pytest.approx(1 - len(set(found)) / len(found))
            assert len(sketch) == min(SKETCH_SIZE, len(set(found)))
            sketches.append(sketch)
        sets = [set(ngrams(row)) for row in rows]
        if max(map(len, sets)) < SKETCH_SIZE:
            distinct, total = len(set.union(*sets)), sum(map(len, sets))
            assert overlap(sketches) == pytest.approx((1 - distinct / total) * 4 / 3)


def test_a_sketch_estimates_the_overlap_of_long_sequences():
    """Half of 20,000 tokens are shared, so a third of all different n-grams would be doubles."""
    generator = torch.Generator().manual_seed(1)
    shared, *own = (torch.randint(0, 50_000, (10_000,), generator=generator) for _ in range(3))
    sketches = [ngram_statistics(torch.cat([shared, part]))[0] for part in own]
    assert len(sketches[0]) == SKETCH_SIZE and overlap(sketches) == pytest.approx(0.5, abs=0.25)
    assert overlap([ngram_statistics(part)[0] for part in own]) == 0.0


def test_sequences_have_different_hashes():
    rows = [[], [0], [0, 0], [1, 2], [2, 1], [1, 2, 3], [3, 2, 1], [1, 2, 0]]
    assert len({int(sequence_hash(torch.tensor(row, dtype=torch.int64))) for row in rows}) == len(rows)
