"""Errors of packing, and the state of the model afterwards."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import nn

from support.packed_rows import (
    CASES,
    MIXED_WINDOWS,
    assert_close,
    assert_same_as_padded,
    build,
    decoder_of,
    padded,
)
from torchrl_rloo.modules import packed_attention
from torchrl_rloo.modules.packing import PACKED, action_hidden, supports_packing


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
