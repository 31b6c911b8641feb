"""Rows of preferences with wrong values in any field of any format, and messages with more than a role and a text."""

from __future__ import annotations

import copy
import decimal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_rloo.data import encode_preferences, load_preference_splits, load_preferences
from torchrl_rloo.embedded import build_tokenizer

ASK, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "2+2?"), ("assistant", "4"), ("assistant", "5")))
LISTS = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
TEXTS = {"chosen": "4", "rejected": "5"}
SYSTEM = {"system": "Be brief."}
NECTAR = {"prompt": "2+2?", "answers": [{"answer": "4", "rank": 1}, {"answer": "5", "rank": 2}]}
FIELDS = {"prompt_format": "{system}{prompt}"}
KTO = {"completion": "4", "label": True}

# (type, options, a good row)
FORMATS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    ("chatml.argilla", {}, {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"} | SYSTEM),
    ("chatml.argilla_chat", {}, LISTS | SYSTEM),
    ("llama3.icr", {}, {"input": "2+2?"} | TEXTS),
    ("chatml.intel", {"margin_column": "gap"}, {"question": "2+2?", "gap": 1.0} | TEXTS | SYSTEM),
    ("chatml.prompt_pairs", {}, {"prompt": [ASK]} | TEXTS),
    ("llama3.ultra", {}, {"prompt": "2+2?"} | LISTS),
    ("chatml", {}, {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"}),
    ("zephyr.nectar", {}, NECTAR | SYSTEM),
    ("chat_template.argilla", {}, {"prompt": "2+2?"} | LISTS),
    ("chat_template.argilla_chat", {}, LISTS),
    ("chat_template.default", {}, {"messages": [ASK], "chosen": GOOD, "rejected": BAD}),
    ("user_defined.default", FIELDS, {"prompt": "2+2?"} | TEXTS | SYSTEM),
    ("chatml.intel", {"objective": "kto"}, {"question": "2+2?"} | KTO),
    ("llama3.argilla_chat", {"objective": "kto"}, {"chosen": [ASK], "completion": [GOOD], "label": "1"}),
    ("chatml.ultra", {"objective": "kto"}, {"prompt": [ASK]} | KTO | SYSTEM),
    ("user_defined.default", {"objective": "kto"} | FIELDS, {"prompt": "2+2?"} | KTO | SYSTEM),
]


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = [None, True, False, 0, 1, -1, 2, 5.0, float("nan"), float("inf"), 10**400, decimal.Decimal(3)]
TEXTS_ = ["", " ", "\n", "\ud800", "a\udfffb", b"text", "x"]
EMPTY = [[], {}, [None], [5], ["text"], [[]], [{}], {1: 2}, {"a"}]
MESSAGES = [
    *([{"role": "user"}], {"role": ["user"], "content": "x"}, [{"role": "user", "content": None}]),
    *([{"role": 5, "content": "x"}], [{"role": "tool", "content": "x"}], [{"answer": "4", "rank": None}]),
    {"role": "assistant", "content": "x", "extra": {"a": {1: 2}}},
]
OBJECTS = [object(), int, range(3), iter(()), Unprintable(), np.array([1.0]), np.float32(3), torch.ones(2)]
WRONG: list[Any] = [*NUMBERS, *TEXTS_, *EMPTY, *MESSAGES, *OBJECTS, nested(70), nested(5000)]


def places(value: Any) -> Iterator[list[Any]]:
    """Yield the path of each entry of nested lists and mappings."""
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield [key]
        yield from ([key, *rest] for rest in places(entry))


def changed(row: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    row = copy.deepcopy(row)
    inner: Any = row
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return row


@pytest.mark.parametrize(("type_", "options", "good"), FORMATS)
def test_a_wrong_value_anywhere_is_a_bad_row_with_its_place_or_a_sound_example(type_, options, good):
    expected, tokenizer = list(load_preferences([good], type_, **options)), build_tokenizer()
    refused = 0
    for path in places(good):
        for value in WRONG:
            bad = changed(good, path, value)
            dataset = load_preferences([good, bad, good], type_, drop_bad_rows=True, **options)
            if not dataset.dropped:  # accepted: then it must be as usable as any other
                sound = [example for example in dataset if example != expected[0]]
                if "label" not in good:
                    encode_preferences(sound or expected, tokenizer)
                continue
            refused += 1
            assert list(dataset) == expected * 2
            (fault,) = dataset.dropped
            assert fault.startswith("row 1: ") and "\n" not in fault and len(fault) < 1000
            with pytest.raises(ValueError, match="^row 1 as "):
                load_preferences([good, bad], type_, **options)
    assert refused > 20
    for row in (None, 5, "text", b"x", [], ["a"], {}, {1: 2}, {None: "x"}, Unprintable(), object()):
        dataset = load_preferences([good, row], type_, drop_bad_rows=True, **options)
        assert list(dataset) == expected and len(dataset.dropped) == 1


@pytest.mark.parametrize(
    ("value", "label"),
    [(1.0, True), (0.0, False), ("1", True), ("0.0", False), (" TRUE\n", True), (np.bool_(False), False)]
    + [(np.float32(1), True), (np.int8(0), False), (torch.tensor(True), True), (decimal.Decimal("1.0"), True)],
)
@pytest.mark.parametrize("type_", ["chatml.intel", "user_defined.default"])
def test_labels_of_any_file_format(type_, value, label):
    row = {"question": "q", "prompt": "q", "completion": "a", "label": value}
    assert load_preferences([row], type_, objective="kto")[0]["label"] is label


@pytest.mark.parametrize("value", [0.5, 2, -1, float("nan"), "yes", "2", "", [1], {"a": 1}, np.array([1]), "1.5"])
def test_other_labels_are_refused(value):
    row = {"question": "q", "completion": "a", "label": value}
    with pytest.raises(ValueError, match="row 0 as 'chatml.intel': .*label"):
        load_preferences([row], "chatml.intel", objective="kto")


# Fields of messages


def call(number: int) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"n": number}}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


RESULT = {"role": "tool", "content": "7", "tool_call_id": "call00001", "name": "f"}


@pytest.mark.parametrize("type_", ["chat_template.argilla_chat", "chat_template.argilla"])
@pytest.mark.parametrize(
    "other",
    [call(2), {**call(1), "tool_calls": []}, {"role": "assistant", "content": ""}, {**call(1), "name": "x"}]
    + [{**call(1), "reasoning_content": "hm"}, {**call(1), "tool_calls": [*call(1)["tool_calls"], {}]}],
)
def test_prompts_that_differ_in_any_field_are_two_prompts(type_, other):
    row = {"chosen": [ASK, call(1), RESULT, GOOD], "rejected": [ASK, other, RESULT, BAD]}
    with pytest.raises(ValueError, match="must answer the same prompt"):
        load_preferences([row], type_)
    with pytest.raises(ValueError, match="must be the prompt in column"):
        row = {"prompt": [ASK, other, RESULT], "chosen": [ASK, call(1), RESULT, GOOD], "rejected": BAD}
        load_preferences([row], "chatml.ultra")


def test_messages_keep_their_fields_but_not_those_that_are_none():
    answer = {**call(3), "content": "", "extra": None}
    row = {"chosen": [ASK, call(1), RESULT, answer], "rejected": [ASK, {**call(1), "name": None}, RESULT, BAD]}
    (example,) = load_preferences([row], "chat_template.argilla_chat")
    assert example == {"prompt": [ASK, call(1), RESULT], "chosen": [call(3)], "rejected": [BAD]}
    renamed = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "", "calls": call(1)["tool_calls"]}]
    row = {"chosen": [*renamed, {"from": "tool", "value": "7", "id": "a"}, {"from": "gpt", "value": "4"}]}
    row["rejected"] = [*row["chosen"][:-1], {"from": "gpt", "value": "5"}]
    mapping = {"role": "from", "content": "value", "tool_calls": "calls"}
    roles = {"user": ["human"], "assistant": ["gpt"], "tool": ["tool"]}
    options = {"message_property_mappings": mapping, "roles": roles}
    (example,) = load_preferences([row], "chat_template.argilla_chat", **options)
    assert example["prompt"] == [ASK, call(1), {"role": "tool", "content": "7", "id": "a"}]


def test_answers_that_differ_in_their_calls_alone_are_a_pair_for_templates_that_write_calls():
    row = {"chosen": [ASK, call(1)], "rejected": [ASK, call(2)]}
    dataset, tokenizer = load_preferences([row], "chat_template.argilla_chat"), build_tokenizer()
    with pytest.raises(ValueError, match="example 0: chosen and rejected have the same tokens"):
        encode_preferences(dataset, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    assert len(encode_preferences(dataset, tokenizer)) == 1


@pytest.mark.parametrize("markup", ["chatml", "llama3", "zephyr"])
@pytest.mark.parametrize("message", [RESULT, call(1), {**ASK, "name": "Ann"}, {**GOOD, "reasoning_content": "hm"}])
def test_a_markup_refuses_messages_that_it_would_not_write_whole(markup, message):
    before = {"user": [], "assistant": [ASK], "tool": [ASK, GOOD]}[message["role"]]
    after = {"user": [], "assistant": [ASK], "tool": []}[message["role"]]
    lists = {name: [*before, message, *after, answer] for name, answer in (("chosen", GOOD), ("rejected", BAD))}
    with pytest.raises(ValueError, match=f"row 0 .*fields .* which markup='{markup}' does not write.*'tokenizer'"):
        load_preferences([lists], "chat_template.argilla_chat", markup=markup)
    assert load_preferences([lists], "chat_template.argilla_chat")[0]["prompt"] == lists["chosen"][:-1]


# Axolotl's type as a mapping


def test_a_mapping_is_the_user_defined_type():
    mapping = {"field_prompt": "q", "field_chosen": "good", "field_rejected": "bad", "prompt_format": "Q: {prompt}"}
    row = {"q": "2+2?", "good": "4", "bad": "5"}
    expected = {"prompt": "Q: 2+2?", "chosen": "4", "rejected": "5"}
    for given in (mapping, mapping | {"field_system": None, "chosen_format": None}):
        assert list(load_preferences([row], given)) == [expected]
    kto = {"field_prompt": "q", "field_completion": "good", "field_label": "ok", "completion_format": "A: {completion}"}
    (example,) = load_preferences([row | {"ok": 0.0}], kto, objective="kto")
    assert example == {"prompt": "2+2?", "completion": "A: 4", "label": False}
    train, held_out = load_preference_splits([row, row | {"q": "1+1?"}], mapping, eval_size=1)
    assert len(train) == len(held_out) == 1


@pytest.mark.parametrize(
    ("type_", "options", "message"),
    [
        ({"field_prompts": "q"}, {}, r"unknown options \['field_prompts'\]"),
        ({1: "q"}, {}, r"unknown options \['1'\]"),
        ({"field_prompt": "q"}, {"field_prompt": "p"}, r"options \['field_prompt'\] are set in type="),
        ({"field_completion": "q"}, {}, r"unknown options \['field_completion'\]"),
        ({"field_label": "q"}, {"objective": "simpo"}, r"unknown options \['field_label'\]"),
        ({"prompt_format": "Q"}, {}, "prompt_format='Q' must contain"),
        ({"field_prompt": 5}, {}, "row 0 as 'user_defined.default': .*must have a column 5"),
        (["chatml.intel"], {}, "type=.* must be one of"),
        (5, {}, "type=5 must be one of"),
    ],
)
def test_wrong_mappings_are_refused(type_, options, message):
    with pytest.raises(ValueError, match=message):
        load_preferences([{"prompt": "2+2?"} | TEXTS], type_, **options)
