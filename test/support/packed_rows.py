"""Tiny decoders of several families, ragged rows, and the padded forward pass as reference."""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_rloo.data.rows import pad
from torchrl_rloo.modules.packing import action_hidden

Rows = tuple[list[torch.Tensor], list[torch.Tensor]]

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.5] * 4, "rope_theta": 10000.0}
FAMILIES = {
    "qwen2": ("qwen2", {}),
    "qwen2 without GQA": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2 with one window of two": ("qwen2", MIXED_WINDOWS),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "llama": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 3}),
    "gemma": ("gemma", {"head_dim": 8}),
    "phi3": ("phi3", {}),
    "phi3 with longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "gpt2": ("gpt2", {"tie_word_embeddings": False}),
}


class _Norm(nn.Module):
    """RMS norm in the precision of its input; those of Transformers round to float32, which hides exactness."""

    def __init__(self, norm: nn.Module, offset: float):
        super().__init__()
        self.weight, self.offset = norm.weight, offset
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.weight + self.offset)


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes) -> PreTrainedModel:
    """Build a tiny random model, with weights large enough for attention to matter."""
    config = AutoConfig.for_model(family, **(SIZES | {"initializer_range": 0.2} | sizes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and dtype == torch.float64:
            model.set_submodule(name, _Norm(module, offset=float("gemma" in family)))
    return model


@functools.cache
def decoder_of(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    family, sizes = FAMILIES[name]
    return build(family, dtype=dtype, **sizes).get_decoder()


def rows_of(*rows: tuple[str, str]) -> Rows:
    """Build rows from letters, one per id, and masks: ``("abcd", "..x.")``."""
    for text, mask in rows:
        assert len(text) == len(mask)
    tokens = [torch.tensor([ord(c) - ord("a") for c in text]) for text, _ in rows]
    return tokens, [torch.tensor([c == "x" for c in mask]) for _, mask in rows]


def random_rows(seed: int, groups: int = 3, size: int = 4) -> Rows:
    """Draw groups of ragged rows with a shared prompt and one to three turns; some end without an action."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    tokens, masks = [], []
    for _ in range(groups):
        prompt = torch.randint(0, 48, (draw(1, 12),), generator=generator)
        for _ in range(size):
            mask = [False] * len(prompt)
            for _ in range(draw(1, 4)):
                mask += [True] * draw(1, 10) + [False] * draw(0, 5)
            answer = torch.randint(0, 48, (len(mask) - len(prompt),), generator=generator)
            tokens.append(torch.cat([prompt, answer]))
            masks.append(torch.tensor(mask))
    order = torch.randperm(len(tokens), generator=generator).tolist()
    return [tokens[i] for i in order], [masks[i] for i in order]


def tree_rows(seed: int, trees: int = 2, size: int = 6) -> Rows:
    """Draw rows that leave an earlier row of their tree anywhere; others repeat or begin one, or have no action."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    tokens = []
    for _ in range(trees):
        tree = [torch.randint(0, 48, (draw(4, 16),), generator=generator)]
        for _ in range(size - 1):
            stem = tree[draw(0, len(tree))]
            kept = draw(1, len(stem) + 1)
            tree.append(torch.cat([stem[:kept], torch.randint(0, 48, (max(0, draw(-4, 12)),), generator=generator)]))
        tokens += tree
    tokens = [tokens[i] for i in torch.randperm(len(tokens), generator=generator).tolist()]
    masks = [(torch.rand(len(t), generator=generator) < draw(0, 3) / 3) & (torch.arange(len(t)) > 0) for t in tokens]
    return tokens, masks


CASES = {
    "random": random_rows(0),
    "trees": tree_rows(0),
    "random, all prompts different": random_rows(1, groups=6, size=1),
    "one group": random_rows(2, groups=1, size=8),
    "single row": rows_of(("abcdef", "...xxx")),
    "rows of two tokens": rows_of(("ab", ".x"), ("ac", ".x"), ("bb", ".x")),
    "equal rows": rows_of(("abcde", "..xxx"), ("abcde", "..xxx"), ("fgh", ".xx"), ("abcde", "..xxx")),
    "prompts that begin other prompts": rows_of(
        ("abcx", "...x"), ("abxx", "..xx"), ("abcdxy", "....xx"), ("abcy", "...x"), ("abyx", "..xx"), ("ax", ".x")
    ),
    "answers that begin alike": rows_of(("abxyz", "..xxx"), ("abxyq", "..xxx"), ("abx", "..x")),
    "rows without actions": rows_of(("abc", "..."), ("abcd", "..xx"), ("abc", "..."), ("abe", "..x")),
    "turns": rows_of(("abcdefgh", "..x..xx."), ("abzz", "..x."), ("abcdefgi", "..x..xxx")),
    "turns that extend earlier ones partly": rows_of(
        ("abcxyd", "...xxx"), ("abcdefzg", "......xx"), ("abcdefghij", "........xx"), ("abcdk", "..xxx")
    ),
    "a last token past a limit": rows_of(("abcdefghijklmnopq", "." * 8 + "x" * 9), ("abcdefghij", "." * 8 + "xx")),
}


def padded(decoder: nn.Module, tokens: list[torch.Tensor], masks: list[torch.Tensor]) -> torch.Tensor:
    hidden = decoder(input_ids=pad(tokens), use_cache=False).last_hidden_state
    return hidden[:, :-1][pad(masks, False)[:, 1:]]


def gradients(decoder: nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a function that weights every hidden state differently."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    loss = (hidden * weights.to(hidden.dtype)).sum()
    return dict(
        zip(parameters, torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True), strict=True)
    )


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())) if b.numel() else 0)


def assert_same_as_padded(decoder: nn.Module, rows: Rows, packing: str, tolerance: float = 1e-10) -> None:
    expected = padded(decoder, *rows)
    hidden = action_hidden(decoder, *rows, packing)
    assert hidden.shape == expected.shape and hidden.dtype == expected.dtype
    assert_close(hidden, expected, tolerance)
    packed_gradients, padded_gradients = gradients(decoder, hidden), gradients(decoder, expected)
    for name, gradient in padded_gradients.items():
        assert_close(packed_gradients[name], gradient, tolerance)
