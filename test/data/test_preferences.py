from __future__ import annotations

import pytest
import torch

from torchrl_rloo.data import keys
from torchrl_rloo.data.preference_formats import LABELED_FORMATS, PAIRED_FORMATS
from torchrl_rloo.data.preferences import (
    CHOSEN,
    LABEL,
    MARKUPS,
    REJECTED,
    encode_demonstrations,
    encode_preferences,
    load_preference_splits,
    load_preferences,
    mismatched_rows,
)
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.data.templates import encode_conversation, encode_prompt
from torchrl_rloo.embedded import build_tokenizer


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASK, GOOD, BAD = said("user", "2+2?"), said("assistant", "4"), said("assistant", "5")
SYSTEM = said("system", "Be brief.")
LISTS = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
TEXTS = {"chosen": "4", "rejected": "5"}
ONE = ([ASK], [GOOD], [BAD])
WITH_SYSTEM = ([SYSTEM, ASK], [GOOD], [BAD])
THEIRS = [{"from": "human", "value": "2+2?"}]

# type -> rows of its shape, as Axolotl documents them, and (prompt, chosen, rejected) that they mean
PAIR_LAYOUTS = {
    "argilla": {"instruction": "2+2?", "chosen_response": "4", "rejected_response": "5"},
    "argilla_chat": LISTS,
    "icr": {"input": "2+2?", **TEXTS},
    "intel": {"question": "2+2?", **TEXTS},
    "prompt_pairs": {"prompt": "2+2?", **TEXTS},
    "ultra": {"prompt": "2+2?", **LISTS},
}
PAIRS = [
    *((f"{m}.{layout}", row, ONE) for m in ("chatml", "llama3") for layout, row in PAIR_LAYOUTS.items()),
    *(
        (f"{m}.{n}", r | {"system": "Be brief."}, WITH_SYSTEM)
        for m in ("chatml", "llama3")
        for n, r in PAIR_LAYOUTS.items()
    ),
    ("chatml.intel", PAIR_LAYOUTS["intel"] | {"system": None}, ONE),
    ("chatml", PAIR_LAYOUTS["argilla"], ONE),
    ("llama3", PAIR_LAYOUTS["ultra"], ONE),
    ("chat_template.argilla_chat", LISTS, ONE),
    ("chat_template.argilla", LISTS | {"system": "Be brief."}, WITH_SYSTEM),
    ("chat_template.argilla", LISTS | {"prompt": "3+1?"}, ([said("user", "3+1?")], [GOOD], [BAD])),
    (
        "chat_template.argilla",
        {"prompt": "2+2?", "chosen": [ASK, BAD, ASK, GOOD], "rejected": [ASK, BAD, ASK, BAD]},
        ([ASK, BAD, ASK], [GOOD], [BAD]),
    ),
    ("chat_template.default", {"messages": [SYSTEM, ASK], "chosen": GOOD, "rejected": BAD}, WITH_SYSTEM),
    ("chat_template.default", {"messages": "2+2?", **TEXTS}, ONE),
    ("user_defined.default", {"prompt": "2+2?", **TEXTS}, ("2+2?", "4", "5")),
    ("user_defined.default", {"prompt": "2+2?", "system": "Be brief.", **TEXTS}, ("2+2?", "4", "5")),
]
LABELED_LAYOUTS = {
    "argilla": {"instruction": "2+2?", "completion": "4"},
    "argilla_chat": {"chosen": [ASK], "completion": [GOOD]},
    "intel": {"question": "2+2?", "completion": "4"},
    "prompt_pairs": {"prompt": "2+2?", "completion": "4"},
    "ultra": {"prompt": "2+2?", "completion": "4"},
}
LABELED = [
    *((f"{m}.{layout}", row, ([ASK], [GOOD])) for m in ("chatml", "llama3") for layout, row in LABELED_LAYOUTS.items()),
    ("llama3.argilla_chat", {"completion": [ASK, GOOD]}, ([ASK], [GOOD])),
    ("chatml.intel", LABELED_LAYOUTS["intel"] | {"system": "Be brief."}, ([SYSTEM, ASK], [GOOD])),
    ("chatml", LABELED_LAYOUTS["ultra"], ([ASK], [GOOD])),
    ("llama3", LABELED_LAYOUTS["argilla"], ([ASK], [GOOD])),
    ("user_defined.default", {"prompt": "2+2?", "completion": "4"}, ("2+2?", "4")),
    ("user_defined.default", {"prompt": "2+2?", "system": "Be brief.", "completion": "4"}, ("2+2?", "4")),
]


@pytest.mark.parametrize(("type_", "row", "expected"), PAIRS)
def test_pairs_of_every_type(type_, row, expected):
    example = load_preferences([row], type_)[0]
    assert (example["prompt"], example["chosen"], example["rejected"]) == expected


@pytest.mark.parametrize(("type_", "row", "expected"), LABELED)
def test_labeled_completions_of_every_type(type_, row, expected):
    rows = [row | {"label": True}, row | {"label": "false"}]
    examples = list(load_preferences(rows, type_, objective="kto"))
    assert [e["label"] for e in examples] == [True, False]
    assert all((e["prompt"], e["completion"]) == expected for e in examples)


def test_no_type_is_untested():
    assert {name for name, *_ in PAIRS} | {"zephyr.nectar"} == set(PAIRED_FORMATS)
    assert {name for name, *_ in LABELED} == set(LABELED_FORMATS)


def test_nectar_pairs_the_best_with_all_that_are_ranked_behind_it():
    answers = [{"answer": a, "rank": r} for a, r in (("c", 3), ("a", 1), ("d", 3), ("b", 1))]
    examples = load_preferences([{"prompt": "2+2?", "answers": answers}], "zephyr.nectar")
    texts = [(e["chosen"][0]["content"], e["rejected"][0]["content"]) for e in examples]
    assert texts == [("a", "c"), ("a", "d")]
    assert examples.markup == "zephyr" and examples[0]["prompt"] == [ASK]


def test_default_template_reads_names_of_the_datasets_own():
    row = {"talk": THEIRS, "good": {"from": "gpt", "value": "4"}, "bad": {"from": "gpt", "value": "5"}}
    options = {
        "field_messages": "talk",
        "field_chosen": "good",
        "field_rejected": "bad",
        "message_property_mappings": {"role": "from", "content": "value"},
        "roles": {"user": ["human"], "assistant": ["gpt"], "system": ["system"]},
    }
    example = load_preferences([row], "chat_template.default", **options)[0]
    assert (example["prompt"], example["chosen"], example["rejected"]) == ONE
    lists = {"good": [*THEIRS, row["good"]], "bad": [*THEIRS, row["bad"]]}
    del options["field_messages"]
    example = load_preferences([lists], "chat_template.argilla_chat", **options)[0]
    assert (example["prompt"], example["chosen"], example["rejected"]) == ONE


def test_user_defined_text_is_put_together_by_formats():
    row = {"sys": "Be brief.", "q": "2+2 {x}?", "good": "4", "bad": "5"}
    fields = {"field_system": "sys", "field_prompt": "q", "field_chosen": "good", "field_rejected": "bad"}
    formats = {
        "prompt_format": "{system}|Q: {prompt} A:",
        "chosen_format": " {chosen}.",
        "rejected_format": " {rejected}!",
    }
    example = load_preferences([row], "user_defined.default", **fields, **formats)[0]
    assert example == {"prompt": "Be brief.|Q: 2+2 {x}? A:", "chosen": " 4.", "rejected": " 5!"}
    row = {"q": "2+2?", "a": "4", "good": 1}
    fields = {"field_prompt": "q", "field_completion": "a", "field_label": "good", "completion_format": " {completion}"}
    example = load_preferences([row], "user_defined.default", objective="kto", **fields)[0]
    assert example == {"prompt": "2+2?", "completion": " 4", "label": True}


NECTAR = {"prompt": "2+2?", "answers": [{"answer": "4", "rank": 1}, {"answer": "5", "rank": 2}]}
INTEL, CHAT, DEFAULT, USER = "chatml.intel", "chatml.argilla_chat", "chat_template.default", "user_defined.default"


@pytest.mark.parametrize(
    ("type_", "row", "fault"),
    [
        (
            INTEL,
            {"prompt": "2+2?", **TEXTS},
            "must have a column 'question', got .*'chosen', 'prompt', 'rejected'.*rename",
        ),
        (INTEL, {"question": " ", **TEXTS}, "column 'question' must contain non-blank text.*remove the row"),
        (
            INTEL,
            {"question": "2+2?", "chosen": 4, "rejected": "4"},
            "column 'chosen' must contain text or a list of messages",
        ),
        (
            CHAT,
            {"chosen": [ASK, ASK], "rejected": [ASK, BAD]},
            "column 'chosen' must end with role 'assistant', got role 'user'",
        ),
        (CHAT, {"chosen": [GOOD], "rejected": [BAD]}, "column 'chosen' has an answer without a prompt"),
        (CHAT, {"chosen": [ASK, GOOD], "rejected": [said("user", "1+1?"), BAD]}, "must answer the same prompt"),
        (CHAT, {"chosen": [BAD, GOOD], "rejected": [BAD, BAD]}, "message 0 has role 'assistant' after 'nothing'"),
        (
            CHAT,
            {"chosen": [ASK, GOOD, GOOD], "rejected": [ASK, GOOD, BAD]},
            "the answer has role 'assistant' after 'assist",
        ),
        (
            "chatml.ultra",
            LISTS | {"prompt": "1+1?"},
            "column 'prompt' must be the prompt in column 'chosen'.*argilla_chat",
        ),
        ("chatml", {"text": "2+2?", **TEXTS}, "one of the columns .* but has 0; name the layout"),
        ("zephyr.nectar", {"prompt": "2+2?", "answers": [{"answer": "4"}]}, "column 'answers' must contain a list"),
        ("zephyr.nectar", {"prompt": "2+2?", "answers": [{"answer": "4", "rank": 1}]}, "at least two different ranks"),
        (
            DEFAULT,
            {"messages": THEIRS, **TEXTS},
            "message 0 of column 'messages' must have the fields of message_property_map",
        ),
        (DEFAULT, {"messages": [said("human", "2+2?")], **TEXTS}, "unknown role 'human'; valid: .*add it to roles"),
    ],
)
def test_a_bad_row_is_named_with_its_column_and_a_remedy(type_, row, fault):
    good = next(row for name, row, _ in [*PAIRS, ("zephyr.nectar", NECTAR, None)] if name == type_)
    with pytest.raises(ValueError, match=rf"row 1 as '{type_}': .*{fault}"):
        load_preferences([good, row], type_)


@pytest.mark.parametrize(
    ("type_", "options", "fault"),
    [
        ("chatml.oasst", {}, "type='chatml.oasst' must be one of .*chatml.intel.* for objective='dpo'"),
        ("chatml.icr", {"objective": "kto"}, "type='chatml.icr' must be one of .* for objective='kto'"),
        ("chatml.intel", {"objective": "ppo"}, "objective='ppo' must be one of"),
        ("chatml.intel", {"field_chosen": "good"}, r"unknown options \['field_chosen'\]"),
        ("chat_template.argilla_chat", {"field_messages": "m"}, r"unknown options \['field_messages'\]"),
        ("chatml.intel", {"markup": "vicuna"}, "markup='vicuna' must be one of"),
        ("user_defined.default", {"prompt_format": "Q:"}, "prompt_format='Q:' must contain"),
        ("user_defined.default", {"chosen_format": "{chosen}{}"}, "double other braces"),
    ],
)
def test_unknown_choices_are_refused(type_, options, fault):
    with pytest.raises(ValueError, match=fault):
        load_preferences([{"question": "2+2?", "prompt": "2+2?", **TEXTS}], type_, **options)


def test_a_dataset_gives_copies():
    dataset = load_preferences([PAIR_LAYOUTS["intel"]] * 3, INTEL)
    dataset[0]["prompt"][0]["content"] = "changed"
    assert dataset[0]["prompt"] == [ASK]
    part = dataset[1:]
    assert len(part) == 2 and part.markup == "chatml"


def decoded(tokenizer, row, masked: bool) -> str:
    mask = row[keys.ACTION_MASK]
    return tokenizer.decode(row[keys.TOKENS][mask if masked else ~mask])


def test_the_mask_is_of_the_last_answer_alone(tokenizer):
    lists = {"chosen": [SYSTEM, ASK, BAD, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD, ASK, BAD]}
    (row,) = encode_preferences(load_preferences([lists], "chat_template.argilla_chat"), tokenizer).unbind(0)
    prompt = encode_prompt(tokenizer, [SYSTEM, ASK, BAD, ASK])
    for part, answer in ((CHOSEN, "4"), (REJECTED, "5")):
        n = len(prompt)
        assert row[part][keys.TOKENS][:n].tolist() == prompt and not row[part][keys.ACTION_MASK][:n].any()
        assert row[part][keys.ACTION_MASK][n:].all()
        assert decoded(tokenizer, row[part], True) == answer + "<|im_end|>"


@pytest.mark.parametrize("template", ["chatml", "chatml_generation", "llama3", "mistral", "llama2"])
def test_any_template_gives_the_prompt_that_a_policy_sees(make_tokenizer, template):
    tokenizer = make_tokenizer(template)
    examples = [
        {"prompt": [said("user", "abc")], "chosen": [said("assistant", "cab")], "rejected": [said("assistant", "b")]}
    ]
    (row,) = encode_preferences(examples, tokenizer).unbind(0)
    prompt = encode_prompt(tokenizer, examples[0]["prompt"])
    assert row[CHOSEN][keys.TOKENS][: len(prompt)].tolist() == prompt
    assert row[CHOSEN][keys.ACTION_MASK].tolist() == [i >= len(prompt) for i in range(len(row[CHOSEN][keys.TOKENS]))]
    assert row[CHOSEN][keys.TOKENS][-1] == tokenizer.eos_token_id


TEXT_OF_MARKUP = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>"
    ),
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\n2+2?</s>\n<|assistant|>\n4</s>",
}


@pytest.mark.parametrize("markup", MARKUPS)
def test_a_types_markup_is_literal(markup):
    dataset = load_preferences([PAIR_LAYOUTS["intel"] | {"system": "Be brief."}], INTEL, markup=markup)
    tokenizer = build_tokenizer()
    if missing := [t for t in MARKUPS[markup].tokens if t not in tokenizer.get_vocab()]:
        with pytest.raises(ValueError, match=r"requires the tokens .*markup='tokenizer'"):
            encode_preferences(dataset, tokenizer)
        tokenizer.add_tokens(missing, special_tokens=True)
    if markup == "llama3":  # a tokenizer that begins every text with BOS
        from tokenizers.processors import TemplateProcessing

        tokenizer.add_special_tokens({"bos_token": "<s>"})
        special = [("<s>", tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    own = tokenizer.chat_template
    (row,) = encode_preferences(dataset, tokenizer).unbind(0)
    assert tokenizer.decode(row[CHOSEN][keys.TOKENS]) == TEXT_OF_MARKUP[markup]
    assert decoded(tokenizer, row[CHOSEN], True) == "4" + MARKUPS[markup].end
    assert tokenizer.chat_template == own


def test_text_ends_with_one_eos(tokenizer):
    row = {"prompt": "2+2?", "chosen": " 4", "rejected": " 5<|im_end|>"}
    (row,) = encode_preferences(load_preferences([row], "user_defined.default"), tokenizer).unbind(0)
    assert decoded(tokenizer, row[CHOSEN], False) == "2+2?"
    assert decoded(tokenizer, row[CHOSEN], True) == " 4<|im_end|>"
    assert decoded(tokenizer, row[REJECTED], True) == " 5<|im_end|>"


def test_labeled_rows_and_their_mismatched_pairs(tokenizer):
    rows = [
        {"question": q, "completion": c, "label": label}
        for q, c, label in (("a?", "b", 1), ("cc?", "dd", 0), ("e?", "f", 1))
    ]
    encoded = encode_preferences(load_preferences(rows, INTEL, objective="kto"), tokenizer)
    assert encoded[LABEL].tolist() == [True, False, True]
    before, mixed = list(encoded.unbind(0)), list(mismatched_rows(encoded).unbind(0))
    for i, row in enumerate(mixed):
        assert decoded(tokenizer, row, False) == decoded(tokenizer, before[i], False)
        assert decoded(tokenizer, row, True) == decoded(tokenizer, before[(i + 1) % 3], True)
    with pytest.raises(ValueError, match="at least 2 rows"):
        mismatched_rows(encoded[:1])


def test_demonstrations_are_learned_whole(tokenizer):
    talk = [SYSTEM, ASK, BAD, ASK, GOOD]
    rows = encode_demonstrations([talk, [ASK, GOOD]], tokenizer)
    ids, mask = encode_conversation(tokenizer, talk)
    assert ragged(rows, keys.TOKENS)[0].tolist() == ids and ragged(rows, keys.ACTION_MASK)[0].tolist() == mask
    assert torch.equal(ragged(rows, keys.ACTION_MASK)[0], torch.tensor(mask)) and len(rows) == 2


def test_demonstrations_after_a_query_leave_its_turns_out(tokenizer):
    rows = encode_demonstrations(
        [
            {"query": [SYSTEM, ASK, BAD, ASK], "demonstration": [GOOD, ASK, GOOD]},
            {"query": "2+2=", "demonstration": "4"},
            {"query": "2+2=4", "demonstration": ""},
        ],
        tokenizer,
    )
    answer = GOOD["content"] + tokenizer.eos_token
    first, second, third = rows.unbind(0)
    assert decoded(tokenizer, first, True) == answer * 2 and BAD["content"] in decoded(tokenizer, first, False)
    assert decoded(tokenizer, second, True) == "4" + tokenizer.eos_token
    assert decoded(tokenizer, third, True) == "+2=4" + tokenizer.eos_token  # nothing predicts the first token


def test_margins_come_from_a_column():
    rows = [{"question": "q", "chosen": "a", "rejected": "b", "gap": 2}]
    assert load_preferences(rows, "chatml.intel", margin_column="gap")[0]["margin"] == 2.0
    assert "margin" not in load_preferences(rows, "chatml.intel")[0]
    for bad in (None, "2", True, float("nan")):
        with pytest.raises(ValueError, match="row 0 .*margin_column='gap' must contain a finite number"):
            load_preferences([{**rows[0], "gap": bad}], "chatml.intel", margin_column="gap")


def test_splits_share_no_prompt_and_choose_from_the_whole_source():
    answers = [{"prompt": f"{i}?", "answers": [{"answer": str(k), "rank": k} for k in (1, 2, 3)]} for i in range(30)]
    train, held_out = load_preference_splits(answers, "zephyr.nectar", eval_size=11)
    prompts = [{str(example["prompt"]) for example in part} for part in (train, held_out)]
    assert len(held_out) == 10 and len(train) == 50 and not prompts[0] & prompts[1]  # two pairs a prompt
    other = load_preference_splits(answers, "zephyr.nectar", eval_size=11, seed=1)[1]
    assert {str(example["prompt"]) for example in other} != prompts[1]


@pytest.mark.parametrize("type", ["chatml.intel", "llama3.ultra", "zephyr.nectar", {"field_prompt": "q"}])
@pytest.mark.parametrize("separate", [False, True])
def test_splits_keep_the_markup_of_the_type_and_the_faults_of_their_source(type, separate: bool):
    def rows(word: str) -> list[dict]:
        pair = {"chosen": "a", "rejected": "b"}
        if type == "llama3.ultra":
            pair = {part: [{"role": "assistant", "content": text}] for part, text in pair.items()}
        answers = {"answers": [{"answer": text, "rank": rank} for rank, text in enumerate("ab")]}
        names = {"question": word, "q": word, "prompt": word}
        return [{name: f"{text}{i}" for name, text in names.items()} | pair | answers for i in range(4)] + [{}]

    options = {"drop_bad_rows": True}
    whole = load_preferences(rows("x"), type, **options)
    more = {"eval_source": rows("y"), "eval_size": 3} if separate else {"eval_size": 1}
    parts = load_preference_splits(rows("x"), type, **more, **options)
    assert [part.markup for part in parts] == [whole.markup] * 2
    assert [len(part.dropped) for part in parts] == [1, int(separate)] and parts[0].dropped == whole.dropped
    assert [len(part) for part in parts] == ([4, 3] if separate else [3, 1])


def test_a_source_of_its_own_is_held_out():
    def rows(words: str) -> list[dict]:
        return [{"question": f"{word} {i}", "chosen": "a", "rejected": "b"} for word in words for i in range(50)]

    train, held_out = load_preference_splits(rows("x"), "chatml.intel", eval_source=rows("abcd"), eval_size=40, limit=9)
    assert len(train) == 9 and len(held_out) == 40
    assert {e["prompt"][0]["content"][0] for e in held_out} == set("abcd")  # not only the first
    with pytest.raises(ValueError, match="3 of 4 examples of eval_source have prompts of training examples"):
        shared = [*rows("x")[:3], *rows("y")[:1]]
        load_preference_splits(rows("x"), "chatml.intel", eval_source=shared)
    with pytest.raises(ValueError, match="eval_size=0 of 50 examples leaves 50 to train on and 0 held out"):
        load_preference_splits(rows("x"), "chatml.intel", eval_size=0)
