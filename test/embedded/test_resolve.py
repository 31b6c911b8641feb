"""Training and held-out prompts, and what the name "embedded" stands for."""

from __future__ import annotations

import json

import pytest

from torchrl_rloo.embedded import resolve_model, resolve_prompts


def write(path, names):
    path.write_text("".join(json.dumps({"prompt": n, "answer": n}) + "\n" for n in names))
    return str(path)


def test_embedded():
    train, held_out = resolve_prompts("embedded", eval_size=10)
    assert len(held_out) == 10 and not {str(r["query"]) for r in train} & {str(r["query"]) for r in held_out}
    assert resolve_model("some/model", seed=0) == "some/model"
    with pytest.raises(ValueError, match="has its own held-out prompts"):
        resolve_prompts("embedded", eval_source="x.jsonl")


def test_held_out_prompts_are_split_off_or_come_from_elsewhere(tmp_path):
    source = write(tmp_path / "train.jsonl", "abcdefgh")
    train, held_out = resolve_prompts(source, eval_size=3, seed=1)
    assert (len(train), len(held_out)) == (5, 3)
    other = write(tmp_path / "test.jsonl", "xyz")
    train, held_out = resolve_prompts(source, eval_source=other, eval_size=2, limit=6)
    assert (len(train), len(held_out)) == (6, 2)


def test_a_prompt_is_not_both(tmp_path):
    source = write(tmp_path / "train.jsonl", "abcd")
    with pytest.raises(ValueError, match="3 of the 3 held-out prompts of eval_source are training prompts"):
        resolve_prompts(source, eval_source=source, eval_size=3)
    with pytest.raises(ValueError, match="eval_split='test' is a split of eval_source, which is null"):
        resolve_prompts(source, eval_split="test")
