"""Packed and prefix-shared forward: the hidden states and gradients of the padded one, or a refusal."""

from __future__ import annotations

import functools
import inspect
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from torchrl_rloo.data.rows import pad
from torchrl_rloo.modules import packed_attention
from torchrl_rloo.modules.packing import PACKED_LAYOUTS, action_hidden, supports_packing

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
    """An RMS norm in the precision of its input; those of transformers round to float32, which hides what is exact."""

    def __init__(self, norm: nn.Module, offset: float):
        super().__init__()
        self.weight, self.offset = norm.weight, offset
        self.eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.weight + self.offset)


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **sizes) -> PreTrainedModel:
    """A tiny random model, with weights large enough for attention to matter."""
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
    """Rows from letters, one for each id, and a mask: ``("abcd", "..x.")``."""
    for text, mask in rows:
        assert len(text) == len(mask)
    tokens = [torch.tensor([ord(c) - ord("a") for c in text]) for text, _ in rows]
    return tokens, [torch.tensor([c == "x" for c in mask]) for _, mask in rows]


def random_rows(seed: int, groups: int = 3, size: int = 4) -> Rows:
    """Groups with a prompt in common, of ragged rows of one to three turns; some turns end without an action."""
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


CASES = {
    "random": random_rows(0),
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
    "a last token past a limit": rows_of(("abcdefghijklmnopq", "." * 8 + "x" * 9), ("abcdefghij", "." * 8 + "xx")),
}


def padded(decoder: nn.Module, tokens: list[torch.Tensor], masks: list[torch.Tensor]) -> torch.Tensor:
    hidden = decoder(input_ids=pad(tokens), use_cache=False).last_hidden_state
    return hidden[:, :-1][pad(masks, False)[:, 1:]]


def gradients(decoder: nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a function of the hidden states that treats every entry otherwise."""
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    parameters = {n: p for n, p in decoder.named_parameters() if p.requires_grad}
    loss = (hidden * weights.to(hidden.dtype)).sum()
    return dict(
        zip(parameters, torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True), strict=True)
    )


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.abs().max())) if b.numel() else 0)


def assert_same_as_padded(decoder: nn.Module, rows: Rows, layout: str, tolerance: float = 1e-10) -> None:
    expected = padded(decoder, *rows)
    hidden = action_hidden(decoder, *rows, layout)
    assert hidden.shape == expected.shape and hidden.dtype == expected.dtype
    assert_close(hidden, expected, tolerance)
    packed_gradients, padded_gradients = gradients(decoder, hidden), gradients(decoder, expected)
    for name, gradient in padded_gradients.items():
        assert_close(packed_gradients[name], gradient, tolerance)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_gradients_are_those_of_padded_rows(case: str, layout: str) -> None:
    assert_same_as_padded(decoder_of("qwen2"), CASES[case], layout)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees(family: str, layout: str) -> None:
    for case in ("random", "a last token past a limit"):
        assert_same_as_padded(decoder_of(family), CASES[case], layout)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions_agree(dtype: torch.dtype, tolerance: float, layout: str) -> None:
    assert_same_as_padded(decoder_of("qwen2", dtype), CASES["random"], layout, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_cuda_agrees_with_the_cpu(family: str, dtype: torch.dtype, tolerance: float, layout: str) -> None:
    name, sizes = FAMILIES[family]
    model = build(name, dtype=dtype, **sizes).cuda()
    hidden = action_hidden(model.get_decoder(), *CASES["random"], layout)
    expected = padded(decoder_of(family), *CASES["random"])
    assert_close(hidden.double().cpu(), expected, tolerance)
    found = gradients(model.get_decoder(), hidden.cpu())
    for key, gradient in gradients(decoder_of(family), expected).items():
        assert_close(found[key].double().cpu(), gradient, tolerance)


def varlen_reference(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
) -> torch.Tensor:
    """What the CUDA kernel of that signature computes, in a loop; its last query is aligned with its last key."""
    outputs = []
    queries, keys, values = (
        x.split(offsets.diff().tolist()) for x, offsets in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k))
    )
    for q, k, v in zip(queries, keys, values, strict=True):
        assert len(q) <= max_q and len(k) <= max_k
        back = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        mask = (back >= -window_size[1]) & (back <= (len(k) if window_size[0] < 0 else window_size[0]))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_the_rows_handed_to_the_cuda_kernel_are_right(
    family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    names = inspect.signature(varlen.varlen_attn).parameters
    assert inspect.signature(varlen_reference).parameters.keys() <= names.keys()
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(packed_attention, "_has_ragged_kernel", lambda query: True)
    for case in ("random", "prompts that begin other prompts"):
        assert_same_as_padded(decoder_of(family), CASES[case], layout)


def by_row(hidden: torch.Tensor, masks: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(hidden.split([int(m.sum()) for m in masks]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(PACKED_LAYOUTS), st.data())
def test_order_company_and_padding_do_not_matter(seed: int, layout: str, data: st.DataObject) -> None:
    decoder = decoder_of("qwen2")
    tokens, masks = random_rows(seed, groups=2, size=3)
    order = data.draw(st.permutations(range(len(tokens))))[: data.draw(st.integers(1, len(tokens)))]
    alone = [padded(decoder, [t], [m]) for t, m in zip(tokens, masks, strict=True)]
    extra = data.draw(st.integers(0, 3))
    wider = (
        [nn.functional.pad(tokens[i], (0, extra), value=7) for i in order],
        [nn.functional.pad(masks[i], (0, extra), value=False) for i in order],
    )
    with torch.no_grad():
        found = by_row(action_hidden(decoder, *wider, layout), wider[1])
    for i, hidden in zip(order, found, strict=True):
        assert_close(hidden, alone[i], 1e-10)


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_nothing_leaks_from_row_to_row(family: str, layout: str) -> None:
    decoder = decoder_of(family)
    tokens, masks = random_rows(3, groups=2, size=4)
    with torch.no_grad():
        before = by_row(action_hidden(decoder, tokens, masks, layout), masks)
        for changed in range(len(tokens)):
            start = int(masks[changed].nonzero()[0])
            other = list(tokens)
            other[changed] = torch.cat([tokens[changed][:start], (tokens[changed][start:] + 1) % 48])
            after = by_row(action_hidden(decoder, other, masks, layout), masks)
            for i, (a, b) in enumerate(zip(after, before, strict=True)):
                if i != changed:
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
                elif len(b) > 1:
                    assert not torch.allclose(a[1:], b[1:], atol=1e-3)


def test_a_shared_prompt_is_read_once_and_what_nothing_needs_never() -> None:
    decoder = decoder_of("qwen2")
    rows = rows_of(
        ("abcdXY".lower(), "....xx"), ("abcdz", "....x"), ("abcdqrs", "....x.."), ("fgh", "..."), ("kl", ".x")
    )
    read = []
    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    action_hidden(decoder, *rows, "shared_prefix")
    action_hidden(decoder, *rows, "packed")
    handle.remove()
    letters = ["".join(chr(i + ord("a")) for i in ids[0]) for ids in read]
    assert letters == ["abcdxk", "abcdxabcdabcdk"]


class _Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_no_mask_of_all_tokens_by_all_tokens_is_made(layout: str) -> None:
    decoder = decoder_of("mistral")
    rows = random_rows(4, groups=60, size=2)
    assert supports_packing(decoder)
    with torch.no_grad(), _Largest() as largest:
        action_hidden(decoder, *rows, layout)
    tokens = sum(map(len, rows[0]))
    assert tokens > 1500 and largest.numel < tokens**2 / 4


class _Convolution(nn.Module):
    """A causal convolution over time in front of an MLP."""

    def __init__(self, mlp: nn.Module, width: int):
        super().__init__()
        self.mlp, self.convolution = mlp, nn.Conv1d(width, width, 3, groups=width, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(x.transpose(1, 2), (2, 0))
        return self.mlp(x + self.convolution(before).transpose(1, 2))


def with_convolution() -> nn.Module:
    decoder = build("qwen2").get_decoder()
    decoder.layers[1].mlp = _Convolution(decoder.layers[1].mlp, 32)
    return decoder


def with_a_window_that_attention_does_not_know() -> nn.Module:
    decoder = build("qwen2", **MIXED_WINDOWS).get_decoder()
    decoder.layers[0].self_attn.sliding_window = None
    return decoder


class _NotOfTransformers(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


REFUSED = {
    "soft-capped attention": (lambda: build("gemma2", head_dim=8).get_decoder(), "softcap"),
    "attention sinks": (
        lambda: build("gpt_oss", dtype=torch.float32, head_dim=8, num_local_experts=4).get_decoder(),
        "s_aux",
    ),
    "a state space": (lambda: build("mamba").get_decoder(), "linear_attention"),
    "its own attention": (lambda: build("bloom").get_decoder(), "not the same"),
    "a convolution": (with_convolution, "not the same"),
    "chunked attention": (lambda: build("llama4_text").get_decoder(), "chunked_attention"),
    "an untold window": (with_a_window_that_attention_does_not_know, "sliding window"),
    "no transformers model": (_NotOfTransformers, "AttributeError"),
}


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused(name: str, layout: str) -> None:
    make, words = REFUSED[name]
    decoder = make()
    with pytest.raises(NotImplementedError, match=rf'cannot be packed \(.*{words}(.|\n)*layout="padded"$'):
        action_hidden(decoder, *CASES["turns"], layout)
    assert not supports_packing(decoder)


def test_attention_dropout_is_refused_in_training_alone() -> None:
    decoder = build("qwen2", attention_dropout=0.1).get_decoder()
    assert supports_packing(decoder)
    action_hidden(decoder, *CASES["turns"], "packed")
    decoder.train()
    with pytest.raises(NotImplementedError, match=r'dropout 0.1 .*layout="padded"'):
        action_hidden(decoder, *CASES["turns"], "packed")
    assert decoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("tokens", "masks", "layout", "message"),
    [
        ([[1, 2]], [[0, 1]], "padded", r"layout='padded' must be one of"),
        ([], [], "packed", "at least one id"),
        ([[1], []], [[0], []], "packed", "at least one id"),
        ([[1, 2]], [[0, 1, 1]], "packed", r"shapes of tokens, \[2\], got \[\[3\]\]"),
        ([[1, 2], [1]], [[0, 1]], "packed", "shapes of tokens"),
        ([[1, 2], [3, 4]], [[0, 1], [1, 1]], "shared_prefix", "first token of a row is an action"),
    ],
)
def test_wrong_rows_are_refused(tokens: list, masks: list, layout: str, message: str) -> None:
    rows = [torch.tensor(t, dtype=torch.long) for t in tokens], [torch.tensor(m, dtype=torch.bool) for m in masks]
    with pytest.raises(ValueError, match=message):
        action_hidden(decoder_of("qwen2"), *rows, layout)


def test_the_model_is_left_as_it_was() -> None:
    model = build("qwen2")
    prompt = {"input_ids": torch.tensor([[0, 1, 2], [3, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    generate = functools.partial(model.generate, **prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    before = generate()
    for layout in PACKED_LAYOUTS:
        action_hidden(model.get_decoder(), *CASES["random"], layout)
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(), before)


def test_an_exception_restores_the_attention() -> None:
    decoder = build("qwen2").get_decoder()
    assert supports_packing(decoder)
    handle = decoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        action_hidden(decoder, *CASES["turns"], "packed")
    handle.remove()
    assert decoder.config._attn_implementation == "sdpa" and packed_attention._PLAN.get() is None
    assert_same_as_padded(decoder, CASES["turns"], "packed")


def test_a_forward_of_another_thread_meanwhile_is_an_error_and_not_wrong() -> None:
    decoder = build("qwen2").get_decoder()
    assert supports_packing(decoder)
    errors = []

    def meanwhile(*_) -> None:
        def forward() -> None:
            try:
                decoder(input_ids=torch.tensor([[1, 2]]))
            except RuntimeError as error:
                errors.append(str(error))

        handle.remove()
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join(10)

    handle = decoder.layers[1].register_forward_pre_hook(meanwhile)
    hidden = action_hidden(decoder, *CASES["random"], "packed")
    assert len(errors) == 1 and "another thread" in errors[0]
    assert_close(hidden, padded(decoder, *CASES["random"]), 1e-10)


def test_two_threads_pack_with_one_model() -> None:
    decoder = decoder_of("qwen2")
    with torch.no_grad():
        expected = padded(decoder, *CASES["random"])
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(action_hidden(decoder, *CASES["random"], "packed").detach() for _ in range(10))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 20 and decoder.config._attn_implementation == "sdpa"
    for hidden in found:
        assert_close(hidden, expected, 1e-10)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_gradient_checkpointing_recomputes_the_same(layout: str, reentrant: bool) -> None:
    model = build("qwen2")
    decoder = model.get_decoder()
    expected = gradients(decoder, padded(decoder, *CASES["random"]))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    functions = [layer._gradient_checkpointing_func for layer in decoder.layers]
    calls = []
    handle = decoder.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert supports_packing(decoder)
    calls.clear()
    hidden = action_hidden(decoder, *CASES["random"], layout)
    assert [layer._gradient_checkpointing_func for layer in decoder.layers] == functions
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (hidden * weights).sum().backward()
    handle.remove()
    assert len(calls) == 2  # once forward, once again in the backward pass
    for name, parameter in decoder.named_parameters():
        if parameter.grad is not None:  # re-entrant checkpointing leaves out what lies before the first layer
            assert_close(parameter.grad, expected[name], 1e-10)
    assert sum(p.grad is not None for p in decoder.parameters()) >= len(expected) - 1


@pytest.mark.parametrize("layout", PACKED_LAYOUTS)
def test_adapters_get_their_gradients(layout: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    decoder = peft.get_peft_model(build("qwen2"), config).double().get_decoder()
    names = [n for n, p in decoder.named_parameters() if p.requires_grad]
    assert names and all("lora" in n for n in names)
    assert_same_as_padded(decoder, CASES["random"], layout)


def test_no_gradient_is_kept_without_one_being_asked_for() -> None:
    with torch.no_grad():
        assert not action_hidden(decoder_of("qwen2"), *CASES["turns"], "packed").requires_grad


def test_the_proof_does_not_depend_on_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert supports_packing(build("qwen2", dtype=torch.float32).get_decoder())
