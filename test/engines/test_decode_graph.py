"""Decoding over buffers of fixed size, by single kernels on a CPU and as a CUDA graph, gives the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from support.gpu import needs_gpu
from support.packed_rows import FAMILIES, build
from torchrl_rloo.engines import decode_graph, decoder
from torchrl_rloo.engines.decode_graph import FixedDecoding
from torchrl_rloo.engines.generation import Generated, generate
from torchrl_rloo.engines.head import find_head
from torchrl_rloo.functional import SamplingDistribution

PROMPTS = [[1, 2, 3, 4], [5, 6], [1, 2, 3, 4], [7, 8, 9], [5]]
STOPS = (11, 12, 13, 14, 15, 16, 17, 18)


def sample(model, *, cuda_graphs: bool, prompts=PROMPTS, stops=(), length=30, **distribution) -> list[Generated]:
    generator = torch.Generator().manual_seed(1)
    return generate(
        model,
        [torch.tensor(p) for p in prompts],
        SamplingDistribution(**distribution),
        uniforms=torch.rand(len(prompts), length, generator=generator),
        limits=torch.full((len(prompts),), length),
        stop_ids=stops,
        head=find_head(model),
        cuda_graphs=cuda_graphs,
    )


def assert_same(ours: list[Generated], expected: list[Generated], tolerance: float = 1e-5) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert torch.equal(a.tokens, b.tokens) and a.truncated == b.truncated
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=tolerance, rtol=tolerance)


def model_of(family: str):
    name, sizes = FAMILIES[family]
    return build(name, dtype=torch.float32, **sizes).eval()


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Use the buffers on the CPU, with growth every 8 positions; yield the sizes of the buffers that were used."""
    monkeypatch.setattr(decoder, "supports_graph", lambda model: True)
    monkeypatch.setattr(decode_graph, "CHUNK", 8)
    monkeypatch.setattr(decode_graph, "_ALIGNMENT", 4)
    sizes: list[int] = []
    step = FixedDecoding._step

    def recorded(self) -> torch.Tensor:
        sizes.append(self.mask.shape[3])
        return step(self)

    monkeypatch.setattr(FixedDecoding, "_step", recorded)
    yield sizes


@pytest.mark.parametrize("family", ["qwen2", "qwen2 without GQA", "llama", "gemma"])
def test_buffers_give_the_tokens_of_a_growing_cache(family: str, fixed: list[int]) -> None:
    model = model_of(family)
    expected = sample(model, cuda_graphs=False)
    assert not fixed
    assert_same(sample(model, cuda_graphs=True), expected)
    assert fixed[0] == 12 and fixed[-1] == 36  # 4 prompt positions and 8 more at first; 34 at the end, aligned


def test_finished_lines_are_dropped(fixed: list[int]) -> None:
    model = model_of("qwen2")
    expected = sample(model, cuda_graphs=False, stops=STOPS, temperature=3.0)
    assert len({len(e.tokens) for e in expected}) > 2
    assert_same(sample(model, cuda_graphs=True, stops=STOPS, temperature=3.0), expected)


def test_rows_without_padding_and_penalties_agree(fixed: list[int]) -> None:
    model, settings = model_of("qwen2"), {"prompts": [[1, 2], [3, 4]], "repetition_penalty": 1.3}
    assert_same(sample(model, cuda_graphs=True, **settings), sample(model, cuda_graphs=False, **settings))
    assert fixed


def test_sliding_caches_are_not_fixed(fixed: list[int]) -> None:
    sample(model_of("mistral"), cuda_graphs=True)
    assert not fixed


@pytest.mark.parametrize(("family", "supported"), [("qwen2", True), ("phi3 with longrope", False)])
def test_changing_rotary_frequencies_are_not_captured(family: str, supported: bool, monkeypatch) -> None:
    model = model_of(family)
    assert not decode_graph.supports_graph(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    assert decode_graph.supports_graph(model) == supported


def test_few_steps_are_not_captured(fixed: list[int]) -> None:
    sample(model_of("qwen2"), cuda_graphs=True, length=decode_graph.MIN_STEPS - 1)
    assert not fixed


@needs_gpu
@pytest.mark.parametrize("stops", [(), STOPS], ids=["all lines", "lines dropped"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_a_graph_replays_the_same_tokens(dtype, tolerance: float, stops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graph, "CHUNK", 16)
    model, settings = model_of("qwen2").to("cuda", dtype), {"stops": stops, "temperature": 3.0}
    growing = sample(model, cuda_graphs=False, **settings)
    replays: list[int] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), replay(graph))[1])
    replayed = sample(model, cuda_graphs=True, **settings)
    assert len(replays) > 5
    # The same kernels, launched one by one
    monkeypatch.setattr(FixedDecoding, "_capture", lambda self: setattr(self, "logits", self._step()))
    assert_same(replayed, sample(model, cuda_graphs=True, **settings), tolerance)
    if dtype == torch.float32:
        assert_same(replayed, growing, tolerance)


@needs_gpu
def test_a_model_that_waits_for_the_cpu_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("qwen2").cuda()
    expected = sample(model, cuda_graphs=True)
    model.get_decoder().layers[0].register_forward_hook(lambda module, args, out: float(out.sum()) and None)
    with caplog.at_level(logging.WARNING):
        assert_same(sample(model, cuda_graphs=True), expected)
    assert "cannot be captured" in caplog.text
