"""Prompt datasets: all kinds of sources give the same rows, and all errors name the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchrl_rloo.data import notices
from torchrl_rloo.data.prompts import (
    PromptCounts,
    PromptDataset,
    load_prompts,
    longest_prompt,
    show_examples,
    split_prompts,
)
from torchrl_rloo.data.templates import encode_prompt
from torchrl_rloo.envs.tasks.mixture import mix_prompts

ROWS = [{"prompt": "What is 1+1?", "answer": "2"}, {"prompt": "What is 2+5?", "answer": "7"}]
LOADED = [{"query": row["prompt"], "answer": row["answer"]} for row in ROWS]
USER = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "hi"}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with one token per byte and per ChatML mark."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    marks = {"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    tokenizer.add_special_tokens(marks)
    tokenizer.chat_template = CHATML
    return tokenizer


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def raises(message: str, kind: type[Exception] = ValueError):
    return pytest.raises(kind, match=re.escape(message))


# Sources


def save(kind: str, folder: Path):
    """Save ``ROWS`` as a kind of source and return it."""
    dataset = datasets.Dataset.from_list(ROWS)
    match kind:
        case "jsonl":
            return write(folder / "a.jsonl", "".join(json.dumps(row) + "\r\n\n" for row in ROWS))
        case "json":
            return str(write(folder / "a.json", "\ufeff" + json.dumps(ROWS, indent=1)))
        case "json lines":
            return write(folder / "a.json", "\n".join(json.dumps(row) for row in ROWS))
        case "csv":
            return write(
                folder / "a.CSV", "\ufeffprompt,answer\n" + "".join(f'"{r["prompt"]}",{r["answer"]}\n' for r in ROWS)
            )
        case "parquet":
            pyarrow.parquet.write_table(dataset.data.table, folder / "a.parquet")
            return folder / "a.parquet"
        case "directory":
            dataset.save_to_disk(folder / "a")
            return folder / "a"
        case "split directory":
            datasets.DatasetDict(train=dataset, test=dataset.select([1])).save_to_disk(folder / "a")
            return folder / "a"
        case "dataset":
            return dataset
        case "tensor dataset":
            return dataset.with_format("torch")
        case "streamed dataset":
            return dataset.to_iterable_dataset()
        case "splits":
            return datasets.DatasetDict(test=dataset.select([1]), train=dataset)
        case "generator":
            return (row for row in ROWS)
    raise AssertionError(kind)


FILES = ["jsonl", "json", "json lines", "csv", "parquet"]
OTHERS = ["directory", "split directory", "dataset", "tensor dataset", "streamed dataset", "splits", "generator"]


@pytest.mark.parametrize("kind", FILES + OTHERS)
def test_every_source_gives_the_same_rows(kind: str, tmp_path: Path, capfd):
    source = save(kind, tmp_path)
    capfd.readouterr()
    dataset = load_prompts(source)
    assert dataset.rows == LOADED
    assert dataset.fingerprint == load_prompts(ROWS).fingerprint
    assert capfd.readouterr() == ("", "")  # no progress bar


def test_a_split_is_picked(tmp_path: Path):
    for kind in ("splits", "split directory"):
        assert load_prompts(save(kind, tmp_path), split="test").rows == LOADED[1:]
    assert load_prompts(datasets.DatasetDict(only=datasets.Dataset.from_list(ROWS)), split=None).rows == LOADED


def test_split_and_name_are_refused_where_they_mean_nothing(tmp_path: Path):
    splits = save("splits", tmp_path)
    for split in (None, "validation"):
        with raises(f"split={split!r} of source of type DatasetDict must be one of ['test', 'train']"):
            load_prompts(splits, split=split)
    path = save("jsonl", tmp_path)
    with raises(f"split='test' requires a source with splits, got source='{path}'; remove split"):
        load_prompts(path, split="test")
    with raises(f"name='main' requires a hub dataset, got source='{path}'; remove name"):
        load_prompts(path, name="main")


def test_values_of_a_csv_stay_text(tmp_path: Path):
    path = write(tmp_path / "a.csv", 'prompt,answer\n"one, two\nthree",007\nNA,\n')
    expected = [{"query": "one, two\nthree", "answer": "007"}, {"query": "NA", "answer": ""}]
    assert load_prompts(path).rows == expected


def test_a_path_that_does_not_exist(tmp_path: Path, monkeypatch):
    missing = str(tmp_path / "missing.jsonl")
    with raises(f"source='{missing}' is neither a local file or directory", FileNotFoundError):
        load_prompts(missing)
    monkeypatch.chdir(tmp_path)
    for form in ("missing.jsonl", "./missing", "a/b/missing"):
        with raises("nor a hub id: correct the path", FileNotFoundError):
            load_prompts(form)


def test_a_hub_id_that_cannot_be_reached(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = "source='nobody/nothing' is neither a local file or directory"
    with raises(message, FileNotFoundError) as caught:
        load_prompts("nobody/nothing")
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "nor a reachable hub id: Couldn't reach 'nobody/nothing'" in str(caught.value)


def test_an_empty_source(tmp_path: Path):
    with raises("source of type list is empty; give at least one row"):
        load_prompts([])
    with raises("is empty; give at least one row"):
        load_prompts(write(tmp_path / "a.csv", "prompt,answer\n"))
    with raises("rows=[] must have at least one row"):
        load_prompts(ROWS).select([])
    with raises("source must be a path, a hub id, a datasets.Dataset or an iterable of mappings", TypeError):
        load_prompts(3)


# Rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("What?", "row 1 must be a mapping from column names to values, got 'What?'"),
        ({1: "a"}, "row 1 must be a mapping from column names to values"),
        ({"prompt": None}, "row 1: prompt column 'prompt' must contain text or messages, got None"),
        ({"prompt": 3}, "row 1: prompt column 'prompt' must contain text or messages, got 3"),
        ({"prompt": USER}, "row 1: prompt column 'prompt' must contain text or messages"),
        ({"prompt": ""}, "row 1: prompt column 'prompt' must contain text or messages, got ''"),
        ({"prompt": []}, "row 1: prompt column 'prompt' must contain text or messages, got []"),
        ({"prompt": " \n"}, "row 1: prompt column 'prompt' must not be blank, got ' \\n'; remove the row"),
        ({"prompt": [{"role": "user", "content": " "}]}, "row 1: prompt column 'prompt' must not be blank"),
        ({"prompt": [{"role": "system", "content": "Be brief."}]}, "row 1: prompt column 'prompt' must not be blank"),
        (
            {"prompt": [USER, "hi"]},
            "row 1: message 1 of prompt column 'prompt' must have text as 'role' and 'content'",
        ),
        ({"prompt": [{"content": "hi"}]}, "must have text as 'role' and 'content', got {'content': 'hi'}"),
        ({"prompt": [{"role": "user"}]}, "must have text as 'role' and 'content', got {'role': 'user'}"),
        ({"prompt": [{"role": "user", "content": []}]}, "must have text as 'role' and 'content'"),
        (
            {"prompt": [{"role": "user", "content": ["hi"]}]},
            "row 1: message 0 of prompt column 'prompt': part 0 of its content must be {'type': 'text', 'text': ...}",
        ),
        ({"prompt": [USER]}, "row 0 and row 1 mix plain text and chat messages; use one kind for all prompts"),
        ({}, "row 1 and row 0 differ in columns ['prompt']; give all rows the same columns"),
        ({"prompt": "b", "hint": 1}, "row 1 and row 0 differ in columns ['hint']; give all rows the same columns"),
    ],
)
def test_a_malformed_row(row, message: str):
    with raises(message):
        load_prompts([{"prompt": "a"}, row])


def test_columns_to_keep_may_be_fewer_than_the_rows_have():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2, "hint": 3}]
    assert load_prompts(rows, columns=["answer"]).rows == [{"query": "a", "answer": 1}, {"query": "b", "answer": 2}]
    with raises("row 1 and row 0 differ in columns ['hint']"):
        load_prompts(rows[::-1], columns=["hint"])


def test_a_messages_column_with_its_answer_is_refused():
    rows = [{"messages": [USER, ASSISTANT]}]
    with raises("row 0: column 'messages' must not end with an assistant message; drop it or set prompt_column"):
        load_prompts(rows)
    assert load_prompts([{"messages": [USER, ASSISTANT, USER]}]).conversational
    # Both fixes in the message work
    assert load_prompts(rows, column_map={"messages": "prompt"})[0] == {"query": [USER, ASSISTANT]}
    both = [{"messages": [USER, ASSISTANT], "q": "hello"}]
    assert load_prompts(both, prompt_column="q", columns=[])[0] == {"query": "hello"}


def test_fields_that_arrow_fills_in_are_left_out_of_messages():
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    dataset = datasets.Dataset.from_list([{"prompt": [{**USER, "tool_calls": None}, call, USER]}])
    assert load_prompts(dataset)[0]["query"] == [USER, call, USER]


def test_values_become_plain_python():
    row = {"prompt": np.str_("a"), "x": np.float32(0.5), "y": torch.tensor([1, 2]), "z": ({"k": np.arange(2)},)}
    loaded = load_prompts([row])[0]
    assert loaded == {"query": "a", "x": 0.5, "y": [1, 2], "z": [{"k": [0, 1]}]}
    assert type(loaded["query"]) is str and type(loaded["x"]) is float
    with raises("row 0: column 'figure' has a value of type object, but requires plain values with text keys; convert"):
        load_prompts([{"prompt": "a", "figure": object()}])
    with raises("row 0: column 'x' has a key 1, but"):
        load_prompts([{"prompt": "a", "x": [{1: 2}]}])


def test_prompts_that_are_all_the_same():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "a", "answer": 2}]
    with raises("all 2 prompts of source of type list are equal, 'a'; check prompt_column, or give one row"):
        load_prompts(rows)
    assert len(load_prompts(rows[:1])) == 1
    assert load_prompts([*rows, {"prompt": "b", "answer": 3}]).counts == PromptCounts(3, 0, duplicates=1, kept=3)


# Columns


@pytest.mark.parametrize("name", ["prompt", "query", "question", "problem", "messages", "instruction"])
def test_the_prompt_column_is_found(name: str):
    value = [USER] if name == "messages" else "a"
    assert load_prompts([{"answer": 1, name: value}])[0] == {"query": value, "answer": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "one candidate in ['question', 'problem', 'answer'], got ['question', 'problem']; set it"),
        (
            {"column_map": {"question": "a", "problem": "b"}},
            "one candidate in ['a', 'b', 'answer'], got []; set it",
        ),
        (
            {"prompt_column": "text"},
            "prompt_column='text' must be one of the columns ['question', 'problem', 'answer']",
        ),
        (
            {"column_map": {"solution": "a"}},
            "unknown columns ['solution'] in column_map; columns: ['question', 'problem',",
        ),
        ({"column_map": {"answer": "problem"}}, "column_map={'answer': 'problem'} must not give two of the columns"),
        (
            {"prompt_column": "problem", "columns": ["solution"]},
            "columns=['solution'] must be a list of names from ['question', 'answer']",
        ),
        ({"prompt_column": "problem", "columns": "answer"}, "columns='answer' must be a list of names"),
    ],
)
def test_columns_that_are_not_there(arguments: dict, message: str):
    with raises(message):
        load_prompts([{"question": "q", "problem": "p", "answer": "1"}], **arguments)


def test_columns_are_renamed_then_chosen():
    rows = [{"question": "q", "problem": "p", "solution": 1, "note": 2}]
    dataset = load_prompts(
        rows, prompt_column="p", column_map={"problem": "p", "solution": "answer"}, columns=["answer"]
    )
    assert dataset.rows == [{"query": "p", "answer": 1}]
    assert dataset.columns == ("answer",)


def test_the_answers_of_rows_for_fine_tuning_are_left_out_and_said(caplog, monkeypatch):
    monkeypatch.setattr(notices, "_SHOWN", set())
    rows = [{"prompt": "TL;DR:", "completion": " Short.", "completion_ids": [1], "subreddit": "x"}]
    assert load_prompts(rows).rows == [{"query": "TL;DR:", "subreddit": "x"}]
    assert "columns ['completion', 'completion_ids'] are left out" in caplog.text
    assert load_prompts(rows, column_map={"completion": "reference"}).columns == ("reference", "subreddit")
    for named in ({"columns": ["completion"]}, {"column_map": {"subreddit": "completion", "completion": "c"}}):
        with raises("columns ['completion'] have reserved names"):
            load_prompts(rows, **named)


def shouted(row):
    return {"prompt": row["prompt"].upper()}


def axolotl_transform(cfg, *args, **kwargs):
    def transform(example, tokenizer=None):
        return {
            "prompt": [{"role": "user", "content": example["question"]}],
            "answer": example["answer"].split("#")[-1],
        }

    return transform, {"remove_columns": ["question"]}


def test_a_transform_of_axolotl_is_taken_as_it_is():
    row = {"question": "1+1?", "answer": "two # 2", "source": "me"}
    (read,) = load_prompts([row], row_map=axolotl_transform)
    query = [{"role": "user", "content": "1+1?"}]
    assert read == {"query": query, "answer": " 2", "source": "me"}


def test_a_row_map_by_its_path():
    assert load_prompts(ROWS, row_map=f"{__name__}.shouted").rows == load_prompts(ROWS, row_map=shouted).rows
    assert load_prompts(ROWS, row_map=shouted)[0]["query"] == "WHAT IS 1+1?"
    with raises(f"row_map '{__name__}.shoute': module '{__name__}' has no 'shoute' (did you mean 'shouted'"):
        load_prompts(ROWS, row_map=f"{__name__}.shoute")
    with raises("row_map=3 must be a function of a row or its dotted path", TypeError):
        load_prompts(ROWS, row_map=3)


# Chat and length


def test_text_is_wrapped_if_the_tokenizer_has_a_template(tokenizer: PreTrainedTokenizerFast):
    text, message = ROWS[0]["prompt"], [{"role": "user", "content": ROWS[0]["prompt"]}]
    assert load_prompts(ROWS)[0]["query"] == text
    assert load_prompts(ROWS, tokenizer=tokenizer)[0]["query"] == message
    assert load_prompts(ROWS, tokenizer=tokenizer, chat=False)[0]["query"] == text
    assert load_prompts(ROWS, chat=True)[0]["query"] == message
    tokenizer.chat_template = None
    assert load_prompts(ROWS, tokenizer=tokenizer)[0]["query"] == text
    with raises("has no chat_template"):
        load_prompts(ROWS, tokenizer=tokenizer, chat=True)


def test_the_system_prompt_goes_where_there_is_none():
    system = {"role": "system", "content": "Be brief."}
    rows = [{"prompt": [USER]}, {"prompt": [{"role": "system", "content": "Be long."}, USER]}]
    loaded = load_prompts(rows, system_prompt="Be brief.").rows
    assert [row["query"] for row in loaded] == [[system, USER], rows[1]["prompt"]]
    assert load_prompts(ROWS, system_prompt="Be brief.", chat=True)[0]["query"][0] == system
    assert load_prompts(ROWS, system_prompt="Be brief.")[0]["query"][0] == system, "a system prompt asks for messages"
    with raises(
        "system_prompt='Be brief.' cannot be combined with plain-text prompts; set chat=True, or pass a tokenizer"
    ):
        load_prompts(ROWS, system_prompt="Be brief.", chat=False)


def test_the_rule_for_text_prompts_is_logged_once(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(notices, "_SHOWN", set())
    undecided, text = load_prompts(ROWS), load_prompts(ROWS, chat=False)
    assert text.for_tokenizer(tokenizer) is text and not caplog.messages
    for _ in range(2):
        chat = undecided.select([0, 1]).for_tokenizer(tokenizer)
        assert chat.conversational and chat.for_tokenizer(tokenizer) is chat
        assert chat.rows == load_prompts(ROWS, chat=True).select([0, 1]).rows
    assert len(caplog.messages) == 1 and "chat=False" in caplog.messages[0]
    tokenizer.chat_template = None
    assert undecided.for_tokenizer(tokenizer) is undecided
    assert len(caplog.messages) == 2 and "no chat template" in caplog.messages[1]


def test_prompts_are_encoded_once(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch):
    dataset = load_prompts([{"prompt": "a" * n} for n in (3, 9, 4)], chat=True)
    each = [encode_prompt(tokenizer, row["query"]) for row in dataset.rows]
    assert dataset.encoded(tokenizer) is None
    assert dataset.encode(tokenizer) == each
    assert longest_prompt(tokenizer, (dataset, dataset.select([0]))) == len(each[1])
    assert dataset.select([2, 0]).encoded(tokenizer) == [each[2], each[0]]
    assert dataset.encoded(tokenizer, enable_thinking=False) is None, "other arguments, other ids"
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + "{{ '!' }}")
    assert dataset.encoded(tokenizer) is None, "another template, other ids"
    assert dataset.encode(tokenizer) != each


def test_long_prompts_are_dropped_and_counted(tokenizer: PreTrainedTokenizerFast):
    rows = [{"prompt": "a" * n} for n in (3, 9, 4, 5, 4)]
    overhead = len(encode_prompt(tokenizer, [{"role": "user", "content": "a"}])) - 1
    dataset = load_prompts(rows, tokenizer=tokenizer, max_prompt_length=overhead + 4)
    assert [len(row["query"][0]["content"]) for row in dataset] == [3, 4, 4]
    assert dataset.counts == PromptCounts(read=5, too_long=2, duplicates=1, kept=3)
    assert len(load_prompts(rows, tokenizer=tokenizer, chat=False, max_prompt_length=4)) == 3
    thinking = load_prompts(
        rows, tokenizer=tokenizer, max_prompt_length=overhead + 4 + len("<think>"), template_kwargs={"think": True}
    )
    assert thinking.rows == dataset.rows
    with raises(
        f"max_prompt_length=2 drops all 5 prompts: the shortest has {overhead + 3} tokens, the longest {overhead + 9}"
    ):
        load_prompts(rows, tokenizer=tokenizer, max_prompt_length=2)
    with raises("max_prompt_length=2 requires the policy's tokenizer; pass tokenizer="):
        load_prompts(rows, max_prompt_length=2)


def test_limit_reads_no_further():
    def endless():
        yield from ROWS
        raise AssertionError("read too far")

    dataset = load_prompts(endless(), limit=2)
    assert dataset.rows == LOADED
    assert dataset.counts.read == 2


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_sizes_are_positive_integers(value, tokenizer: PreTrainedTokenizerFast):
    with raises(f"limit={value!r} must be a positive integer or None"):
        load_prompts(ROWS, limit=value)
    with raises(f"max_prompt_length={value!r} must be a positive integer or None"):
        load_prompts(ROWS, tokenizer=tokenizer, max_prompt_length=value)


# The dataset


def test_a_dataset_is_an_immutable_sequence():
    source = [{"prompt": [dict(USER)], "answer": [1]}]
    dataset = load_prompts(source)
    fingerprint, expected = dataset.fingerprint, {"query": [USER], "answer": [1]}
    source[0]["prompt"][0]["content"] = "changed"
    row = dataset[0]
    row["query"].append(ASSISTANT)
    row["answer"].clear()
    assert list(dataset) == [expected]
    assert PromptDataset(dataset.rows).fingerprint == fingerprint
    with pytest.raises(TypeError):
        dataset[0] = row
    with pytest.raises(TypeError):
        dataset[:1]
    with pytest.raises(IndexError):
        dataset[1]


def test_a_dataset_says_what_it_holds():
    rows = [*ROWS, ROWS[0]]
    assert repr(load_prompts(rows)) == (
        "PromptDataset(3 text prompts, columns=('answer',), "
        "PromptCounts(read=3, too_long=0, duplicates=1, kept=3, unreadable=0))"
    )
    assert "conversational" in repr(load_prompts(rows, chat=True))
    assert str(load_prompts(rows)) == "3 text prompts with answer (1 repeated)"
    assert str(load_prompts(ROWS, chat=True, columns=[])) == "2 chat prompts"
    assert load_prompts(rows, chat=True).conversational and not load_prompts(rows).conversational
    assert load_prompts(rows).select([2, np.int64(0)]).counts == PromptCounts(2, 0, duplicates=1, kept=2)


def test_the_fingerprint_is_that_of_the_content():
    # A constant, because checkpoints of other processes and versions contain it
    golden = "94352bcfa6d9c22b99e9dc47169182a031a465111ff62d21f5ea9ddeba07f752"
    assert load_prompts(ROWS).fingerprint == golden
    reordered_columns = [dict(reversed(row.items())) for row in ROWS]
    assert load_prompts(reordered_columns).fingerprint == golden
    others = [ROWS[::-1], ROWS[:1], [ROWS[0], {**ROWS[1], "answer": 7}], [{"prompt": r["prompt"]} for r in ROWS]]
    assert len({golden, *(load_prompts(rows).fingerprint for rows in others)}) == 5


# Train and eval


@given(
    texts=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=20).filter(lambda t: len(set(t)) > 1),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_a_split_keeps_every_row_and_no_prompt_twice(texts: list[str], seed: int, data):
    size = data.draw(st.integers(1, len(set(texts)) - 1))
    dataset = PromptDataset({"query": text, "i": i} for i, text in enumerate(texts))
    train, held_out = split_prompts(dataset, size, seed)
    in_train, in_eval = ({row["query"] for row in part} for part in (train, held_out))
    assert not in_train & in_eval
    assert len(in_eval) == size
    assert sorted(row["i"] for part in (train, held_out) for row in part) == list(range(len(texts)))
    assert all([row["i"] for row in part] == sorted(row["i"] for row in part) for part in (train, held_out))
    # The held-out prompts do not depend on the call or on the order of the rows
    assert {row["query"] for row in split_prompts(dataset.select(range(len(texts))[::-1]), size, seed)[1]} == in_eval


@pytest.mark.parametrize(
    ("eval_size", "message"),
    [
        (2, "eval_size=2 of 2 distinct prompts leaves no train prompt; lower it or add prompts"),
        (0.9, "eval_size=0.9 of 2 distinct prompts leaves no train prompt; lower it or add prompts"),
        (0.1, "eval_size=0.1 of 2 distinct prompts leaves no eval prompt; raise it or add prompts"),
        (0, "eval_size=0 must be a positive integer or a fraction between 0 and 1"),
        (1.0, "eval_size=1.0 must be a positive integer or a fraction between 0 and 1"),
        (-0.5, "eval_size=-0.5 must be a positive integer or a fraction between 0 and 1"),
        (float("nan"), "eval_size=nan must be a positive integer or a fraction between 0 and 1"),
        (True, "eval_size=True must be a positive integer or a fraction between 0 and 1"),
    ],
)
def test_a_split_that_leaves_a_part_empty(eval_size, message: str):
    with raises(message):
        split_prompts(load_prompts([*ROWS, ROWS[0]]), eval_size, seed=0)


def test_examples_are_shown_before_every_prompt_and_not_trained_on():
    rows = [{"prompt": f"{i}+{i}?", "answer": str(2 * i)} for i in range(5)]
    train, held_out = show_examples(2, load_prompts(rows), load_prompts([{"prompt": "9+9?", "answer": "18"}]))
    before = "Q: 0+0?\nA: 0\n\nQ: 1+1?\nA: 2\n\n"
    assert [row["query"] for row in train.rows] == [f"{before}Q: {i}+{i}?\nA:" for i in (2, 3, 4)]
    assert [row["answer"] for row in train.rows] == ["4", "6", "8"]
    assert [row["query"] for row in held_out.rows] == [f"{before}Q: 9+9?\nA:"]


def test_examples_of_a_mixture_are_those_of_the_task():
    sums, words = ([{"prompt": f"{kind}{i}", "answer": str(i)} for i in range(3)] for kind in ("sum", "word"))
    mixed = mix_prompts({"sums": load_prompts(sums), "words": load_prompts(words)})
    (shown,) = show_examples(2, mixed)
    assert [row["query"].split("\n")[0] for row in shown.rows] == ["Q: sum0", "Q: word0"]


@pytest.mark.parametrize(
    ("rows", "number", "message"),
    [
        ([{"prompt": "a"}, {"prompt": "b"}], 1, "requires text prompts with a column 'answer', got PromptDataset"),
        ([{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "1"}], 1, "requires text prompts with a column"),
        ([{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}], 1, "requires text prompts"),
        (
            [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1"}],
            2,
            "examples=2 leaves none of",
        ),
    ],
)
def test_examples_that_cannot_be_shown(rows, number: int, message: str):
    with pytest.raises(ValueError, match=message):
        show_examples(number, load_prompts(rows))


def test_examples_are_not_shown_before_the_messages_of_another_set():
    text = load_prompts([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1"}])
    messages = load_prompts([{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}])
    with pytest.raises(ValueError, match="examples=1 requires text prompts"):
        show_examples(1, text, messages)
