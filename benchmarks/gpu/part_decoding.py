"""Part ``decoding``: tokens per second of our decoding, and of ``model.generate``."""

from __future__ import annotations

from typing import Any

import torch
from measure import Setup, attempt, build_model, clear, peak_bytes, timed_ms

from torchrl_rloo.engines.generation import generate
from torchrl_rloo.engines.head import find_head
from torchrl_rloo.functional import SamplingDistribution

GENERATE_KWARGS = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "use_cache": True}


class Sampler:
    """Sample completions of a fixed length for one batch of left-padded prompts, in several ways."""

    def __init__(self, size: str, lines: int, prompt: int, tokens: int, setup: Setup):
        self.model, self.tokens = build_model(size, setup), tokens
        self.head = find_head(self.model)
        generator = torch.Generator().manual_seed(0)
        # Prompts differ in length, so that the lines are padded
        vocab = self.model.config.vocab_size
        lengths = [prompt - n % (prompt // 4) for n in range(lines)]
        self.prompts = [torch.randint(vocab, (n,), generator=generator) for n in lengths]
        self.uniforms = torch.rand(lines, tokens, generator=generator)

    def ours(self) -> list[torch.Tensor]:
        """Sample with :func:`torchrl_rloo.engines.generation.generate`."""
        limits = torch.full((len(self.prompts),), self.tokens)
        turns = generate(
            self.model,
            self.prompts,
            SamplingDistribution(),
            uniforms=self.uniforms,
            limits=limits,
            stop_ids=(),
            head=self.head,
        )
        return [turn.tokens for turn in turns]

    def theirs(self, **kwargs: Any) -> torch.Tensor:
        """Sample with ``model.generate`` of transformers, without log-probs."""
        width = max(map(len, self.prompts))
        ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in self.prompts])
        mask = torch.stack([torch.arange(width) >= width - len(p) for p in self.prompts]).long()
        device = self.model.device
        return self.model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=self.tokens,
            pad_token_id=0,
            **GENERATE_KWARGS,
            **kwargs,
        )


def measure(function, lines: int, tokens: int, setup: Setup) -> dict[str, Any]:
    """Measure the time and peak memory of sampling one batch."""
    clear(setup.device)
    figures: dict[str, Any] = {"peak_bytes": peak_bytes(function, setup.device)}
    figures["ms"] = timed_ms(function, setup, warmup=1, repeats=3)
    return figures | {"ms_per_token": figures["ms"] / tokens, "tokens_per_s": 1000 * lines * tokens / figures["ms"]}


def run(setup: Setup) -> dict[str, Any]:
    """Measure each way of sampling; the ratios divide its tokens per second by those of ``model.generate``."""
    size = setup.pick("0.5B", "tiny")
    prompt, tokens = setup.pick((128, 128), (8, 6))
    results: dict[str, Any] = {"prompt_tokens": prompt, "new_tokens": tokens}
    for lines in setup.pick((64, 256), (4,)):
        sampler = Sampler(size, lines, prompt, tokens, setup)
        ways = {"ours": lambda s=sampler: s.ours(), "transformers": lambda s=sampler: s.theirs()}
        figures = {name: attempt(measure, way, lines, tokens, setup) for name, way in ways.items()}
        if base := figures["transformers"].get("tokens_per_s"):
            if "tokens_per_s" in figures["ours"]:
                figures["ours"]["ratio"] = figures["ours"]["tokens_per_s"] / base
        results[f"{size}, {lines} lines"] = figures
        setup.keep(results)
    return results
