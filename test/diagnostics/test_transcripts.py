"""Page of transcripts: complete content, without requests or active markup."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.data.segments import stash_segment
from torchrl_rloo.data.stop_reasons import STOP_REASONS
from torchrl_rloo.diagnostics import transcripts
from torchrl_rloo.diagnostics.transcripts import (
    TokenTexts,
    find_blocks,
    find_calls,
    group_contexts,
    write_transcripts,
)
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.evaluation import Evaluation, write_evaluation_transcripts
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards import boxed_accuracy

ASKED = [{"role": "tool", "content": "Error: <b>no</b>", "name": "calculator", "tool_call_id": "call00000"}]


class Page(HTMLParser):
    """Scripts, styles and content security policy of the page, parsed as in a browser."""

    def __init__(self, path: Path):
        super().__init__()
        self.found: dict[str, list[str]] = {}
        self.policy = self.inside = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        assert not {"src", "href", "style", "onload", "onerror"} & named.keys()
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"]
        self.inside = named.get("type", tag) if tag in ("script", "style", "title") else ""
        if self.inside:
            self.found.setdefault(self.inside, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[self.inside][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        (text,) = self.found["application/json"]
        return json.loads(text)


def unpack(text: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)


def collect(turns: int = 2) -> tuple[TensorDict, Any]:
    """Collect rows of a random model, to which a tool responds with an error."""
    tokenizer = build_tokenizer()
    env = DatasetChatEnv(
        load_prompts(addition_prompts("test", size=4)),
        tokenizer,
        prompts_per_batch=2,
        num_generations=2,
        rewards=boxed_accuracy,
        transforms=[FeedbackTransform(lambda conversation, row: ASKED, max_turns=turns)],
    )
    kwargs = {"max_new_tokens": 6, "seed": 0, "stop_token_ids": list(range(0, len(tokenizer), 2))}
    policy = TransformersWrapper(build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate_kwargs=kwargs)
    return LLMCollector(env, policy).collect(), tokenizer


def test_every_number_of_a_row_is_there(tmp_path):
    rows, tokenizer = collect()
    for i, row in enumerate(rows.unbind(0)):
        n = len(row[keys.TOKENS])
        row.set(keys.ADVANTAGE, torch.full((1, 1), i - 1.5)).set(keys.REF_LOG_PROBS, torch.linspace(-1, 0, n))
    path = write_transcripts(tmp_path / "new" / "page.html", rows, tokenizer, reward_names=["boxed"], title="A & B")
    data = Page(path).data
    assert path == tmp_path / "new" / "page.html" and data["title"] == "A & B" and data["reward_names"] == ["boxed"]
    assert len(data["rows"]) == data["total"] == 4
    for row, entry in zip(rows.unbind(0), data["rows"], strict=True):
        (part,), mask = entry["parts"], row[keys.ACTION_MASK]
        assert unpack(part["ids"], torch.int32).tolist() == row[keys.TOKENS].tolist()
        assert torch.equal(unpack(part["log_probs"], torch.float32), row[keys.LOG_PROBS][mask])
        assert torch.equal(unpack(part["ref_log_probs"], torch.float32), row[keys.REF_LOG_PROBS][mask])
        flags = torch.zeros_like(mask)
        for start, end in part["mask"]:
            flags[start:end] = True
        assert torch.equal(flags, mask)
        assert entry["reward"] == float(row[keys.REWARD]) and entry["advantage"] == float(row[keys.ADVANTAGE])
        assert entry["group"] == int(row[keys.GROUP_ID]) and entry["version"] == 0
        assert entry["turns"] == int(row[keys.NUM_TURNS]) and entry["columns"]["answer"] == row["answer"]
        text = [
            part["texts"].get(str(i), data["vocabulary"][str(t)][0]) for i, t in enumerate(row[keys.TOKENS].tolist())
        ]
        assert "".join(text) == tokenizer.decode(row[keys.TOKENS])
    assert {entry["stop"] for entry in data["rows"]} <= STOP_REASONS.keys()
    answered = [entry for entry in data["rows"] if entry["turns"] > 1]
    assert answered and all(entry["errors"] == entry["turns"] - 1 for entry in answered)
    roles = [block[1:] for block in answered[0]["parts"][0]["blocks"]]
    assert roles == [
        ["system", "", False],
        ["user", "", False],
        ["assistant", "", False],
        ["tool", "calculator call00000", True],
        ["assistant", "", False],
    ]


def test_rows_of_a_buffer_have_no_messages(tmp_path):
    rows, tokenizer = collect()
    data = Page(write_transcripts(tmp_path / "page.html", tensor_rows(rows), tokenizer)).data
    roles = [block[1] for block in data["rows"][0]["parts"][0]["blocks"]]
    assert set(roles) == {"context", "assistant"} and roles[:2] == ["context", "assistant"]
    assert "What is" in data["rows"][0]["prompt"]


def test_numbers_of_columns_are_the_datasets(tmp_path):
    rows, tokenizer = collect()
    row = rows[0].set("large", NonTensorData(2**62 + 1)).set("exact", NonTensorData([123456789.25, 1 / 3, 1e300]))
    row.set("single", torch.tensor([0.8, 16777217.0, 0.1 + 1e-8]))
    (entry,) = Page(write_transcripts(tmp_path / "page.html", [row], tokenizer)).data["rows"]
    columns = entry["columns"]
    assert columns["large"] == str(2**62 + 1), "a browser would round it"
    assert columns["exact"] == [123456789.25, 1 / 3, 1e300]
    assert columns["single"] == [0.8, 16777216.0, 0.1 + 1e-8]


def test_credit_of_tokens(tmp_path):
    rows, tokenizer = collect()
    row = rows[0]
    n, mask = len(row[keys.TOKENS]), row[keys.ACTION_MASK]
    rewards = torch.zeros(n)
    rewards[-1] = 0.8
    row.set(keys.TOKEN_REWARDS, rewards).set(keys.ADVANTAGE, torch.arange(float(n))[:, None] * mask[:, None])
    row.set(keys.ACTION_VERSIONS, torch.arange(int(mask.sum())))
    row.set(keys.REWARD, torch.full((1, 1), torch.nan))
    (entry,) = Page(write_transcripts(tmp_path / "page.html", [row], tokenizer)).data["rows"]
    (part,) = entry["parts"]
    assert unpack(part["advantages"], torch.float32).tolist() == mask.nonzero()[:, 0].tolist()
    assert entry["advantage"] == pytest.approx(float(mask.nonzero().float().mean()), rel=1e-6)
    assert part["token_rewards"] == {str(n - 1): 0.8} and entry["reward"] is None
    assert unpack(part["versions"], torch.int32).tolist() == list(range(int(mask.sum())))


def test_samples_that_the_template_rewrote_are_parts(tmp_path):
    rows, tokenizer = collect()
    row = next(row for row in rows.unbind(0) if int(row[keys.NUM_TURNS]) > 1)
    n = len(row[keys.PROMPT_TOKENS]) + 2
    begun = TensorDict({keys.PROMPT_TOKENS: row[keys.TOKENS][:n], keys.ACTION_MASK: row[keys.ACTION_MASK][:n]})
    begun.set(keys.LOG_PROBS, row[keys.LOG_PROBS][:n])
    stash_segment(begun)
    for _ in range(2):  # positions without action tokens
        begun.set(keys.ACTION_MASK, torch.zeros(n, dtype=torch.bool))
        stash_segment(begun)
    row.set(keys.PREVIOUS_SEGMENTS, begun[keys.PREVIOUS_SEGMENTS]).set(
        keys.TOKEN_REWARDS, torch.zeros(len(row[keys.TOKENS]))
    )
    (entry,) = Page(write_transcripts(tmp_path / "page.html", [row], tokenizer)).data["rows"]
    ids = [unpack(part["ids"], torch.int32).tolist() for part in entry["parts"]]
    assert ids == [row[keys.TOKENS][:n].tolist(), row[keys.TOKENS].tolist()]
    assert entry["tokens"] == n + len(row[keys.TOKENS])


def test_markup_and_broken_text_stay_inside(tmp_path):
    rows, tokenizer = collect()
    attack = "</script><!--<script>\u2028%DATA%%TITLE%\ud800\x00</title>"
    row = rows[0]
    row.set("answer", NonTensorData({attack: [attack, math.inf]})).set(keys.TASK, NonTensorData(attack))
    row.set(keys.QUERY, NonTensorData([{"role": attack, "content": attack}]))
    path = write_transcripts(
        tmp_path / "page.html", [row], tokenizer, title=attack, settings={attack: attack}, reward_names=[attack]
    )
    page = Page(path)
    assert {name: len(texts) for name, texts in page.found.items()} == {
        "title": 1,
        "style": 1,
        "application/json": 1,
        "script": 1,
    }
    assert page.data["title"] == page.data["rows"][0]["task"] == attack and page.data["settings"] == {attack: attack}
    assert page.data["rows"][0]["columns"]["answer"] == {attack: [attack, None]}
    (data,) = page.found["application/json"]
    assert data.isascii() and not set("<>&") & set(data)


def test_the_policy_allows_this_script_and_style_alone(tmp_path):
    rows, tokenizer = collect(turns=1)
    page = Page(write_transcripts(tmp_path / "page.html", rows, tokenizer))
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.found[kind][0].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.policy
    assert "default-src 'none'" in page.policy and "require-trusted-types-for 'script'" in page.policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|https?:", page.found["script"][0])


def test_the_first_rows_and_how_many_there_were(tmp_path, monkeypatch):
    rows, tokenizer = collect(turns=1)
    monkeypatch.setattr(transcripts, "MAX_ROWS", 3)
    data = Page(write_transcripts(tmp_path / "page.html", rows, tokenizer)).data
    assert len(data["rows"]) == 3 and data["total"] == 4
    with pytest.raises(ValueError, match="empty"):
        write_transcripts(tmp_path / "page.html", [], tokenizer)


def test_an_evaluation_is_one_call(tmp_path):
    tokenizer = build_tokenizer()
    policy = TransformersWrapper(
        build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 3, "seed": 5}
    )

    def scorer(prompts, completions, completion_ids, **columns):
        return [None if i == 0 else i / 10 for i in range(len(completions))]

    evaluation = Evaluation(policy, load_prompts(addition_prompts("test", size=3)), {"mine": scorer}, num_samples=2)
    result = evaluation.run(keep_rows=True)
    path = write_evaluation_transcripts(tmp_path / "page.html", result, tokenizer, settings={"step": 7})
    data = Page(path).data
    assert [entry["group"] for entry in data["rows"]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [entry["kind"] for entry in data["rows"]] == ["greedy", "sample 0", "sample 1"] * 3
    assert [entry["reward"] for entry in data["rows"]] == [None, 0.3, 0.4, 0.1, 0.5, 0.6, 0.2, 0.7, 0.8]
    assert data["reward_names"] == ["mine"] and data["settings"]["step"] == 7
    assert data["settings"]["metrics"]["greedy"].startswith("0.1 [")
    assert data["rows"][0]["columns"]["answer"] == addition_prompts("test", size=3)[0]["answer"]
    assert {entry["version"] for entry in data["rows"]} == {None}  # the evaluation does not know it
    again = evaluation.run(keep_rows=True, policy_version=7)
    write_evaluation_transcripts(path, again, tokenizer)
    assert {entry["version"] for entry in Page(path).data["rows"]} == {7}
    assert evaluation.run().rows is None
    with pytest.raises(ValueError, match="keep_rows=True"):
        write_evaluation_transcripts(tmp_path / "page.html", evaluation.run(), tokenizer)


def pieces(text: str) -> tuple[list[str], list[bool]]:
    """Split a text into characters and special tokens between < and >."""
    texts = re.findall(r"<[^<>]*>|.", text, re.DOTALL)
    return texts, [len(t) > 1 for t in texts]


TEMPLATES = {  # opening and end of a turn
    "chatml": ("<start>{role}\n", "<end>\n"),
    "llama": ("<head>{role}</head>\n\n", "<eot>"),
    "gemma": ("<turn>{role}\n", "<end>\n"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_blocks_begin_where_messages_do(template):
    opening, closing = TEMPLATES[template]
    query = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "  hello there "}]
    completion = [
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "be kind", "name": "echo"},  # repeated in another message
        {"role": "tool", "content": "Error: no"},
        {"role": "assistant", "content": "bye"},
    ]
    text, expected, flags = "<bos>", [], []
    for message in [*query, *completion]:
        sampled = message["role"] == "assistant"
        start = flags[-1][1] if flags and message["role"] == "tool" and expected[-1][1] == "assistant" else None
        expected.append(((start or len(pieces(text)[0])) if expected else 0, message["role"]))
        text += opening.format(role=message["role"]) + message["content"].strip()
        ahead = len(pieces(text)[0])
        text += closing
        flags += [(ahead - len(message["content"]), ahead + 1)] if sampled else []
    texts, special = pieces(text)
    actions = [any(start <= i < end for start, end in flags) for i in range(len(texts))]
    blocks = find_blocks(texts, special, actions, group_contexts(query, completion))
    found = [(block.start, block.role) for block in blocks]
    assert found[:6] == expected
    assert [(b.label, b.error) for b in blocks[3:5]] == [("echo", False), ("", True)]


def test_blocks_of_an_unknown_template_are_context():
    texts, special = pieces("<s>something else<e>said<e>more")
    actions = [17 <= i < 22 for i in range(len(texts))]
    blocks = find_blocks(texts, special, actions, group_contexts([{"role": "system", "content": "a"}] * 2, []))
    assert [block.role for block in blocks] == ["context", "assistant", "context"]


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        ("ab<tool_call>{}</tool_call>c<tool_call>", ["<tool_call>{}</tool_call>", "<tool_call>"]),
        ("[TOOL_CALLS][{}]", ["[TOOL_CALLS][{}]"]),
        ("<|python_tag|>x.call()", ["<|python_tag|>x.call()"]),
        ("<tool>1</tool> and </tool>", ["<tool>1</tool>"]),
        ("no call", []),
    ],
)
def test_calls_of_what_the_policy_wrote_alone(said, calls):
    texts = [*said, *"<tool>2</tool>"]
    found = find_calls(texts, [i < len(said) for i in range(len(texts))])
    assert ["".join(texts[start:end]) for start, end in found] == calls


# Texts of tokens


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
