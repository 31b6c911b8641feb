"""Embedded tokenizer, model and warm start."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_rloo.data.templates import encode_conversation
from torchrl_rloo.embedded import addition_demonstrations, build_model, build_tokenizer, warm_start
from torchrl_rloo.embedded.resolve import EMBEDDED_TASKS
from torchrl_rloo.embedded.warm_start import TEACHERS, _assistant_loss, _encode_demonstrations
from torchrl_rloo.runtime.files import cache_folder

STEPS = 8  # the recipe's 500 are too many for a unit test
TOKENIZER = build_tokenizer()
CONVERSATIONS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.text(max_size=20),
    ),
    min_size=1,
    max_size=6,
)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return warm_start(0, steps=STEPS, cache_dir=tmp_path_factory.mktemp("cache"))


# ------------------------------------------------------------------------------------------------------------ tokenizer
@settings(deadline=None)
@given(st.text())
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_markup_is_one_token_and_digits_stand_alone():
    ids = {token: TOKENIZER.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")}
    assert TOKENIZER.pad_token_id == ids["<|endoftext|>"] and TOKENIZER.eos_token_id == ids["<|im_end|>"]
    assert TOKENIZER.tokenize("<think>123</think><tool></tool>") == [
        "<think>", "1", "2", "3", "</think>", "<tool>", "</tool>"
    ]  # fmt: skip
    markup = "<think>7</think><tool>1*2</tool>"
    assert TOKENIZER.decode(TOKENIZER(markup)["input_ids"], skip_special_tokens=True) == markup


# ------------------------------------------------------------------------------------------------------------- template
@settings(deadline=None)
@given(CONVERSATIONS)
def test_the_mask_covers_what_the_assistant_said_and_its_end_of_turn(messages):
    ids, mask = encode_conversation(TOKENIZER, messages)
    said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert TOKENIZER.decode([i for i, assistant in zip(ids, mask, strict=True) if assistant]) == "".join(said)


@settings(deadline=None)
@given(CONVERSATIONS, st.text(max_size=20))
def test_prompt_and_continuation_are_prefixes_of_the_conversation(messages, answer):
    def render(conversation, **options):
        return TOKENIZER.apply_chat_template(conversation, tokenize=False, **options)

    prompt = render(messages, add_generation_prompt=True)
    answered = [*messages, {"role": "assistant", "content": answer}]
    assert prompt == render(messages) + "<|im_start|>assistant\n"
    assert render(answered, continue_final_message=True) == prompt + answer
    assert render(answered) == prompt + answer + "<|im_end|>\n"


# ---------------------------------------------------------------------------------------------------------------- model
def test_model_size_and_seed():
    state = torch.get_rng_state()
    model, again, other = build_model(TOKENIZER, 0), build_model(TOKENIZER, 0), build_model(TOKENIZER, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(p.numel() for p in model.parameters()) == 152_256
    assert model.config.vocab_size == len(TOKENIZER)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


# ----------------------------------------------------------------------------------------------------------- warm start
def test_the_loss_is_the_mean_over_assistant_tokens():
    model = build_model(TOKENIZER, 0)
    ids, mask, _ = _encode_demonstrations(TOKENIZER, "addition", 0, clean=False)
    rows = mask.sum(1).argsort()[:1500:100]  # of different lengths, and all shorter than the padded width
    ids, mask = ids[rows], mask[rows]
    assert not mask[:, -1].any() and len(mask.sum(1).unique()) > 3
    expected = model(input_ids=ids, attention_mask=ids != TOKENIZER.pad_token_id, labels=ids.where(mask, -100)).loss
    torch.testing.assert_close(_assistant_loss(model, ids, mask), expected)


def test_it_learns_and_says_so(tmp_path):
    lines: list[str] = []
    warm_start(0, steps=STEPS, cache_dir=tmp_path, log=lines.append)
    assert lines[-1].startswith(f"warm start: step {STEPS}/{STEPS}, loss ")
    ids, mask, _ = _encode_demonstrations(TOKENIZER, "addition", 0, clean=False)
    untrained = _assistant_loss(build_model(TOKENIZER, 0), ids[:64], mask[:64]).item()
    assert float(lines[-1].split()[-1]) < untrained - 0.3


def test_same_seed_same_bits_whatever_the_thread_count_and_global_state_untouched(built, tmp_path):
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    random.seed(5)
    torch.set_num_threads(threads + 1)
    before = torch.get_rng_state(), random.getstate()
    try:
        again = warm_start(0, steps=STEPS, cache_dir=tmp_path)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert weights(again) == weights(built)
    # A second call returns the first result
    stamp, lines = (built / "model.safetensors").stat().st_mtime_ns, []
    assert warm_start(0, steps=STEPS, cache_dir=built.parent, log=lines.append) == built
    assert not lines and (built / "model.safetensors").stat().st_mtime_ns == stamp


def test_tasks_seeds_and_steps_have_results_of_their_own(built, tmp_path):
    assert TEACHERS.keys() == EMBEDDED_TASKS.keys()
    others = [warm_start(seed, steps=1, cache_dir=built.parent) for seed in (1, 0)]
    assert len({built, *others}) == 3 and weights(others[0]) != weights(others[1]) != weights(built)
    assert "addition" in built.name
    for task in ("calculator", "guessing"):
        path = warm_start(0, task, steps=1, cache_dir=tmp_path / "a")
        assert task in path.name
        assert weights(warm_start(0, task, steps=1, cache_dir=tmp_path / "b")) == weights(path)
    assert len({weights(path) for path in (tmp_path / "a").iterdir()}) == 2
    with pytest.raises(ValueError, match="task='chess' has no teacher: use one of .*'calculator'"):
        warm_start(0, "chess", cache_dir=tmp_path)
    with pytest.raises(ValueError, match="steps=0 must be"):
        warm_start(0, steps=0, cache_dir=tmp_path)


@pytest.mark.parametrize("task", ["calculator", "guessing"])
def test_all_turns_of_a_demonstration_are_learnt_and_nothing_else(task):
    ids, mask, _ = _encode_demonstrations(TOKENIZER, task, 0, clean=True)
    for messages, row, learnt in list(zip(TEACHERS[task](2048, 0, clean=True), ids, mask, strict=True))[:50]:
        said = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
        assert len(said) > 1 or task == "guessing"
        assert TOKENIZER.decode(row[learnt]) == "".join(said)


def test_the_result_loads_as_a_hugging_face_model(built):
    tokenizer, model = AutoTokenizer.from_pretrained(built), AutoModelForCausalLM.from_pretrained(built)
    messages = addition_demonstrations(1, 0)[0]
    assert encode_conversation(tokenizer, messages) == encode_conversation(TOKENIZER, messages)
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) == 152_256
    assert model.generation_config.top_k == 0  # transformers would otherwise sample from the 50 likeliest tokens
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_killed_builder_leaves_no_result_behind(built, tmp_path, fork_server):
    """The process dies after it has written the weights and before it writes the tokenizer."""
    script = (
        "import os, signal, sys\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "from torchrl_rloo.embedded import warm_start\n"
        "PreTrainedTokenizerFast.save_pretrained = lambda *args: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"warm_start(0, steps={STEPS}, cache_dir=sys.argv[1])\n"
    )
    done = fork_server.run(script, [tmp_path])
    assert done.returncode == -signal.SIGKILL, done.stderr
    (debris,) = tmp_path.rglob("model.safetensors")
    assert debris.parent != tmp_path / built.name
    assert debris.read_bytes() == weights(built)  # another process gives the same bits, so also the same tokens
    result = warm_start(0, steps=STEPS, cache_dir=tmp_path)
    assert result == tmp_path / built.name and weights(result) == weights(built)
    assert AutoTokenizer.from_pretrained(result).chat_template == TOKENIZER.chat_template


def test_of_two_builders_the_first_to_finish_wins(built, tmp_path):
    winners: list[tuple[Path, int]] = []

    def overtake(line: str) -> None:
        path = warm_start(0, steps=STEPS, cache_dir=tmp_path)
        winners.append((path, (path / "model.safetensors").stat().st_ino))

    late = warm_start(0, steps=STEPS, cache_dir=tmp_path, log=overtake)
    assert winners == [(late, (late / "model.safetensors").stat().st_ino)]
    assert [entry.name for entry in tmp_path.iterdir()] == [built.name]
    assert weights(late) == weights(built)


def test_where_results_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHRL_RLOO_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("TORCHRL_RLOO_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "torchrl_rloo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "torchrl_rloo"
