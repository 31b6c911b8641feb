"""Packed and prefix-shared forward: hidden states and gradients equal those of padded rows."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from support.gpu import needs_gpu
from support.packed_rows import (
    CASES,
    FAMILIES,
    MIXED_WINDOWS,
    assert_close,
    assert_same_as_padded,
    build,
    decoder_of,
    gradients,
    padded,
    random_rows,
    rows_of,
)
from torchrl_rloo.modules import packing as packing_module
from torchrl_rloo.modules.packing import PACKED, action_hidden, supports_packing


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_gradients_are_those_of_padded_rows(case: str, packing: str) -> None:
    assert_same_as_padded(decoder_of("qwen2"), CASES[case], packing)


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees(family: str, packing: str) -> None:
    for case in ("random", "trees", "a last token past a limit"):
        assert_same_as_padded(decoder_of(family), CASES[case], packing)


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_other_precisions_agree(dtype: torch.dtype, tolerance: float, packing: str) -> None:
    assert_same_as_padded(decoder_of("qwen2", dtype), CASES["random"], packing, tolerance)


@needs_gpu
@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize(
    ("dtype", "autocast", "tolerance"),
    [(torch.float32, False, 1e-5), (torch.bfloat16, False, 5e-2), (torch.float32, True, 5e-2)],
)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_cuda_agrees_with_the_cpu(
    family: str, dtype: torch.dtype, autocast: bool, tolerance: float, packing: str
) -> None:
    name, sizes = FAMILIES[family]
    model = build(name, dtype=dtype, **sizes).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        hidden = action_hidden(model.get_decoder(), *CASES["random"], packing)
    expected = padded(decoder_of(family), *CASES["random"])
    assert_close(hidden.double().cpu(), expected, tolerance)
    found = gradients(model.get_decoder(), hidden.cpu())
    for key, gradient in gradients(decoder_of(family), expected).items():
        assert_close(found[key].double().cpu(), gradient, tolerance)


def varlen_reference(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
) -> torch.Tensor:
    """Compute the result of the CUDA kernel in a loop; it aligns the last query with the last key."""
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


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_the_rows_handed_to_the_cuda_kernel_are_right(
    family: str, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    names = inspect.signature(varlen.varlen_attn).parameters
    assert inspect.signature(varlen_reference).parameters.keys() <= {*names, "enable_gqa"}  # torch 2.11 lacks the flag
    monkeypatch.setattr(varlen, "varlen_attn", varlen_reference)
    monkeypatch.setattr(packing_module, "_has_ragged_kernel", lambda query: True)
    for case in ("random", "trees", "prompts that begin other prompts"):
        assert_same_as_padded(decoder_of(family), CASES[case], packing)


def test_the_cuda_kernel_gets_16_bits_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen, seen = pytest.importorskip("torch.nn.attention.varlen"), set()

    @functools.wraps(varlen_reference)
    def record(*args, **kwargs) -> torch.Tensor:
        seen.update(x.dtype for x in args[:3])
        return varlen_reference(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", record)
    monkeypatch.setattr(packing_module, "_has_ragged_kernel", lambda query: True)
    decoder, rows = build("qwen2", dtype=torch.float32).get_decoder(), CASES["random"]
    assert supports_packing(decoder) and seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):  # rotary embeddings make float32 of queries and keys
        hidden = action_hidden(decoder, *rows, "packed")
    assert seen == {torch.bfloat16}
    assert_close(hidden.double(), padded(decoder, *rows).double(), 5e-2)


def by_row(hidden: torch.Tensor, masks: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(hidden.split([int(m.sum()) for m in masks]))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(PACKED), st.data())
def test_order_company_and_padding_do_not_matter(seed: int, packing: str, data: st.DataObject) -> None:
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
        found = by_row(action_hidden(decoder, *wider, packing), wider[1])
    for i, hidden in zip(order, found, strict=True):
        assert_close(hidden, alone[i], 1e-10)


@contextmanager
def ids_read_by(decoder: nn.Module) -> Iterator[list[str]]:
    read: list[str] = []

    def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
        read.append("".join(chr(i + ord("a")) for i in kwargs["input_ids"][0].tolist()))

    handle = decoder.register_forward_pre_hook(record, with_kwargs=True)
    yield read
    handle.remove()


def test_shared_tokens_are_read_once_and_what_nothing_needs_never() -> None:
    decoder = decoder_of("qwen2")
    rows = rows_of(
        ("abcdxy", "....xx"),
        ("abcdz", "....x"),
        ("abcdqrs", "....x.."),
        ("fgh", "..."),
        ("kl", ".x"),
        ("abczz", "..x.x"),
    )
    with ids_read_by(decoder) as read:
        action_hidden(decoder, *rows, "shared_prefix")
        action_hidden(decoder, *rows, "packed")
    assert read == ["kabczdx", "abcdxabcdabcdkabcz"]


tries = st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=8), min_size=1, max_size=7)


@settings(max_examples=30, deadline=None)
@given(tries, st.sampled_from(["qwen2", "mistral"]))
def test_a_tree_scores_each_row_as_by_itself(rows: list[list[tuple[int, bool]]], family: str) -> None:
    decoder = decoder_of(family)
    assert supports_packing(decoder)
    tokens = [torch.tensor([token for token, _ in row]) for row in rows]
    masks = [torch.tensor([k > 0 and action for k, (_, action) in enumerate(row)]) for row in rows]
    with ids_read_by(decoder) as read:
        hidden = action_hidden(decoder, tokens, masks, "shared_prefix")
    expected = torch.cat([padded(decoder, [t], [m]) for t, m in zip(tokens, masks, strict=True)])
    assert_close(hidden, expected, 1e-10)
    found = gradients(decoder, hidden)
    for name, gradient in gradients(decoder, expected).items():
        assert_close(found[name], gradient, 1e-10)
    # One token per node of the trie of what precedes the last action of each row
    needed = [t[: max(m.nonzero().flatten().tolist(), default=0)].tolist() for t, m in zip(tokens, masks, strict=True)]
    nodes = {tuple(row[:length]) for row in needed for length in range(1, len(row) + 1)}
    assert len(read[0]) == max(1, len(nodes))


class _Largest(TorchDispatchMode):
    """Recorder of the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("packing", PACKED)
def test_no_mask_of_all_tokens_by_all_tokens_is_made(packing: str) -> None:
    decoder = decoder_of("mistral")
    rows = random_rows(4, groups=60, size=2)
    assert supports_packing(decoder)
    with torch.no_grad(), _Largest() as largest:
        action_hidden(decoder, *rows, packing)
    tokens = sum(map(len, rows[0]))
    assert tokens > 1500 and largest.numel < tokens**2 / 4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("packing", PACKED)
def test_gradient_checkpointing_recomputes_the_same(packing: str, reentrant: bool) -> None:
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
    hidden = action_hidden(decoder, *CASES["random"], packing)
    assert [layer._gradient_checkpointing_func for layer in decoder.layers] == functions
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (hidden * weights).sum().backward()
    handle.remove()
    assert len(calls) == 2  # once in the forward pass, once in the backward pass
    for name, parameter in decoder.named_parameters():
        if parameter.grad is not None:  # reentrant checkpointing drops gradients before the first layer
            assert_close(parameter.grad, expected[name], 1e-10)
    assert sum(p.grad is not None for p in decoder.parameters()) >= len(expected) - 1


@pytest.mark.parametrize("packing", PACKED)
def test_adapters_get_their_gradients(packing: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    decoder = peft.get_peft_model(build("qwen2"), config).double().get_decoder()
    names = [n for n, p in decoder.named_parameters() if p.requires_grad]
    assert names and all("lora" in n for n in names)
    for case in ("random", "trees"):
        assert_same_as_padded(decoder, CASES[case], packing)


def test_the_proof_does_not_depend_on_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert supports_packing(build("qwen2", dtype=torch.float32).get_decoder())


class _Convolution(nn.Module):
    """Causal convolution over time before an MLP."""

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
    "its own attention": (lambda: build("bloom").get_decoder(), "differ from separate rows"),
    "a convolution": (with_convolution, "differ from separate rows"),
    "chunked attention": (lambda: build("llama4_text").get_decoder(), "chunked_attention"),
    "an untold window": (with_a_window_that_attention_does_not_know, "sliding window"),
    "no transformers model": (_NotOfTransformers, "AttributeError"),
}


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused(name: str, packing: str) -> None:
    make, words = REFUSED[name]
    decoder = make()
    with pytest.raises(NotImplementedError, match=rf'cannot be packed \(.*{words}(.|\n)*packing="none"$'):
        action_hidden(decoder, *CASES["turns"], packing)
    assert not supports_packing(decoder)


def test_attention_dropout_is_refused_in_training_alone() -> None:
    decoder = build("qwen2", attention_dropout=0.1).get_decoder()
    assert supports_packing(decoder)
    action_hidden(decoder, *CASES["turns"], "packed")
    decoder.train()
    with pytest.raises(NotImplementedError, match=r'dropout 0.1 .*packing="none"'):
        action_hidden(decoder, *CASES["turns"], "packed")
    assert decoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("tokens", "masks", "packing", "message"),
    [
        ([[1, 2]], [[0, 1]], "none", r"packing='none' must be one of"),
        ([], [], "packed", "at least one id"),
        ([[1], []], [[0], []], "packed", "at least one id"),
        ([[1, 2]], [[0, 1, 1]], "packed", r"shapes of tokens, \[2\], got \[\[3\]\]"),
        ([[1, 2], [1]], [[0, 1]], "packed", "shapes of tokens"),
        ([[1, 2], [3, 4]], [[0, 1], [1, 1]], "shared_prefix", "first token of a row is an action"),
    ],
)
def test_wrong_rows_are_refused(tokens: list, masks: list, packing: str, message: str) -> None:
    rows = [torch.tensor(t, dtype=torch.long) for t in tokens], [torch.tensor(m, dtype=torch.bool) for m in masks]
    with pytest.raises(ValueError, match=message):
        action_hidden(decoder_of("qwen2"), *rows, packing)


def test_the_model_is_left_as_it_was() -> None:
    model = build("qwen2")
    prompt = {"input_ids": torch.tensor([[0, 1, 2], [3, 4, 5]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    generate = functools.partial(model.generate, **prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.train()
    model.model.layers[0].eval()
    modes = [m.training for m in model.modules()]
    before = generate()
    for packing in PACKED:
        action_hidden(model.get_decoder(), *CASES["random"], packing)
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
    assert decoder.config._attn_implementation == "sdpa" and packing_module._PLAN.get() is None
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


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_an_out_of_memory_error_is_passed_on_and_not_remembered(error: Exception) -> None:
    def fail(*_) -> None:
        raise error

    decoder = build("qwen2").get_decoder()
    handle = decoder.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(type(error)):
        supports_packing(decoder)
    handle.remove()
    assert supports_packing(decoder)


def test_an_error_of_the_probe_is_a_reason_only_while_it_lasts() -> None:
    decoder = build("qwen2").get_decoder()
    handle = decoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(NotImplementedError, match="ZeroDivisionError"):
        action_hidden(decoder, *CASES["turns"], "packed")
    handle.remove()
    assert supports_packing(decoder)
