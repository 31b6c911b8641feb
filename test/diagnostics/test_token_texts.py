"""Token texts join to the decoded text, for any tokenizer and ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_rloo.diagnostics.transcripts import TokenTexts
from torchrl_rloo.embedded import build_tokenizer

TEXTS = ["the answer is one", "don't answer the other", "\u00e9t\u00e9, na\u00efve \u4f60\u597d", "a, b. c!"]


def metaspace() -> PreTrainedTokenizerFast:
    """Build a tokenizer like Llama 2's: leading spaces, bytes for unknown characters, first space stripped."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256))]
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=350, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>")


def word_pieces() -> PreTrainedTokenizerFast:
    """Build a tokenizer like BERT's: decoding adds spaces between words and removes some before punctuation."""
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    core.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")


TOKENIZERS = {"byte-level": build_tokenizer(), "metaspace": metaspace(), "word pieces": word_pieces()}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


@KINDS
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_or_invented(kind, data):
    tokenizer = TOKENIZERS[kind]
    texts = TokenTexts(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    shown = texts(ids)
    assert len(shown) == len(ids) and "".join(shown) == texts.decode(ids)


@KINDS
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_a_character_belongs_to_the_token_that_completes_it(kind, text):
    tokenizer = TOKENIZERS[kind]
    texts, ids = TokenTexts(tokenizer), tokenizer(text, add_special_tokens=False)["input_ids"]
    shown = texts(ids)
    for i in range(1, len(ids) + 1):
        whole = texts.decode(ids[:i])
        assert "\ufffd" in whole or whole.startswith("".join(shown[:i]))


def test_bytes_wait_for_the_one_that_makes_them_a_character():
    tokenizer = build_tokenizer()
    texts = TokenTexts(tokenizer)
    assert texts(tokenizer("5\U0001f600!", add_special_tokens=False)["input_ids"]) == [
        "5",
        "",
        "",
        "",
        "\U0001f600",
        "!",
    ]
    first = tokenizer.convert_tokens_to_ids("\u00f0")  # byte-level spelling of the byte 0xf0
    assert texts.token_text(first) is None and texts.token_bytes(first) == b"\xf0"
    assert texts([first, tokenizer.convert_tokens_to_ids("A")]) == ["\ufffd", "A"]


def test_a_space_belongs_to_the_word_after_it():
    tokenizer = metaspace()
    texts, ids = TokenTexts(tokenizer), tokenizer("the answer", add_special_tokens=False)["input_ids"]
    assert "".join(texts(ids)) == "the answer"
    assert texts([tokenizer.bos_token_id, *ids])[1].startswith(" ")
    assert texts.token_text(ids[-1]).strip() == texts(ids)[-1].strip()


def test_ids_beyond_the_vocabulary_have_no_text():
    texts = TokenTexts(build_tokenizer())
    assert texts.vocabulary_entry(383) is None and texts([383, 3]) == ["", texts.token_text(3)]
    assert texts.is_special(texts.tokenizer.eos_token_id) and not texts.is_special(3)
