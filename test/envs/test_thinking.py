"""AddThinkingPrompt: the rows that it asks again, and the number of requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import AddThinkingPrompt, FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.runtime import event_loop

AGAIN = "think again"


@pytest.fixture(scope="module")
def collect(random_model, bpe, prompts) -> Callable:
    """Collect the rows of one batch; each turn of the policy is one token."""

    def run(*transforms, **chat):
        env = DatasetChatEnv(prompts, bpe, prompts_per_batch=4, shuffle=False, transforms=transforms, **chat)
        kwargs = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe))), "seed": 0}
        return LLMCollector(env, TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=kwargs)).collect()

    return run


def asked(row) -> int:
    return sum(m == {"role": "user", "content": AGAIN} for m in row[keys.COMPLETION])


@pytest.mark.parametrize("times", [1, 3])
def test_an_answer_is_questioned_so_many_times(times: int, collect: Callable) -> None:
    transform = AddThinkingPrompt(AGAIN, max_times=times)
    rows = collect(transform)
    assert [asked(row) for row in rows.unbind(0)] == [times] * 4
    assert rows[keys.NUM_TURNS].tolist() == [times + 1] * 4
    assert all(stop_reason(row) == "answered" for row in rows.unbind(0))
    assert transform.counts["thinking/asked_again"] == 4 * times


@pytest.mark.parametrize("later", [False, True])
def test_the_condition_decides(later: bool, collect: Callable) -> None:
    seen = []

    def condition(conversation, row) -> bool:
        assert conversation[-1]["role"] == "assistant"
        seen.append(event_loop.default_loop())
        return row["answer"] in "ab"

    async def condition_later(conversation, row) -> bool:
        return condition(conversation, row)

    rows = collect(AddThinkingPrompt(AGAIN, condition_later if later else condition))
    assert {row["answer"]: asked(row) for row in rows.unbind(0)} == {"a": 1, "b": 1, "c": 0, "?": 0}
    assert len(seen) == 4


def test_a_condition_that_raises_costs_its_row_only(collect: Callable) -> None:
    def condition(conversation, row) -> bool:
        if row["answer"] == "a":
            raise OSError
        return True

    rows = collect(AddThinkingPrompt(AGAIN, condition))
    assert [stop_reason(row) for row in rows.unbind(0)] == ["failed", "answered", "answered", "answered"]


def test_what_another_transform_answered_is_left_alone(collect: Callable) -> None:
    reply = [{"role": "user", "content": "go on"}]
    feedback = FeedbackTransform(lambda conversation, row: reply if len(conversation) < 4 else None)
    for row in collect(feedback, AddThinkingPrompt(AGAIN)).unbind(0):
        users = [m["content"] for m in row[keys.COMPLETION] if m["role"] == "user"]
        assert users == ["go on", AGAIN]


def test_limits_hold(collect: Callable) -> None:
    transform = AddThinkingPrompt(AGAIN)
    rows = collect(transform, max_turns=1)
    assert [stop_reason(row) for row in rows.unbind(0)] == ["turns"] * 4
    assert transform.counts["thinking/asked_again"] == 0
    assert all(len(ids) for ids in ragged(rows, keys.TOKENS))


@pytest.mark.parametrize(("kwargs", "match"), [({"prompt": ""}, "prompt"), ({"max_times": 0}, "max_times=0")])
def test_bad_settings_are_refused(kwargs: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AddThinkingPrompt(**kwargs)
