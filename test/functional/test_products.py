from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchrl_rloo.functional.products import FastLayers, has_fast_product

needs_product = pytest.mark.skipif(not has_fast_product(torch.zeros(1, 1)), reason="requires AVX-512")


class Tied(nn.Module):
    """Embedding, two layers, and a head that shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16, bias=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(self.embedding(ids)), self.embedding.weight)


def gradients(model: nn.Module, ids: torch.Tensor, fast: bool) -> list[torch.Tensor]:
    for _ in range(2):  # as two micro-batches
        if fast:
            with FastLayers():
                out = model(ids)
        else:
            out = model(ids)
        (out.log_softmax(-1)[..., 3].sum() * 0.1).backward()
    return [out, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_those_of_plain_layers(dtype):
    torch.manual_seed(0)
    plain, ids = Tied().to(dtype), torch.randint(50, (3, 7))
    fast = copy.deepcopy(plain)
    ids[0, 0] = 0
    for value, expected in zip(gradients(fast, ids, True), gradients(plain, ids, False), strict=True):
        assert value.layout == torch.strided
        torch.testing.assert_close(value, expected)


@needs_product
def test_fast_products_are_used_and_repeat_their_bits():
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(50, (3, 7))
    with FastLayers():
        out = model(ids)
        assert "_Linear" in type(out.grad_fn).__name__ and torch.equal(out, model(ids))
        assert torch.equal(out[:1], model(ids[:1]))  # whatever the other rows are
        with torch.autocast("cpu", torch.bfloat16):
            assert model(ids).dtype == torch.bfloat16
