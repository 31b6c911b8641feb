"""Masks and log-probs of earlier turns: kept if they fit the ids, else an error."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.modules import TransformersWrapper


@pytest.fixture
def policy(model, tokenizer) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0})


@pytest.fixture
def second_turn(policy, prompt_rows) -> TensorDictBase:
    """Row after its first turn, with feedback ids appended to every key."""
    rows = policy(prompt_rows([5, 6, 7]))
    for row in rows.unbind(0):
        row.set(keys.PROMPT_TOKENS, torch.cat([row[keys.TOKENS], torch.tensor([8, 9])]))
        row.set(keys.ACTION_MASK, torch.cat([row[keys.ACTION_MASK], torch.zeros(2, dtype=torch.bool)]))
        row.set(keys.LOG_PROBS, torch.cat([row[keys.LOG_PROBS], torch.zeros(2)]))
    return rows


@pytest.mark.parametrize("key", [keys.ACTION_MASK, keys.LOG_PROBS])
@pytest.mark.parametrize("change", [lambda values: values[:-2], lambda values: values.repeat(2)])
def test_another_length_than_that_of_the_ids_is_refused(policy, second_turn, key, change) -> None:
    row = second_turn[0]
    row.set(key, change(row[key]))
    with pytest.raises(ValueError, match=rf"a prompt of {len(row[keys.PROMPT_TOKENS])} ids has \d+ values of"):
        policy(second_turn)


@pytest.mark.parametrize("missing", ["masks", "log_probs"])
def test_one_without_the_other_is_refused(policy, second_turn, missing: str) -> None:
    row = second_turn[0]
    del row[missing]
    with pytest.raises(ValueError, match="has no values of .*or delete both"):
        policy(second_turn)


def test_a_row_without_both_begins_anew(policy, second_turn) -> None:
    row = second_turn[0]
    del row["masks"], row["log_probs"]
    out = policy(second_turn)[0]
    assert int(out[keys.ACTION_MASK].sum()) == len(out[keys.RESPONSE_TOKENS])
