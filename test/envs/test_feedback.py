"""FeedbackTransform: the rows that it answers, the ids that it adds, and the ends of conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import TransformedEnv
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_prompt, keys, load_prompts
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper

REPLY = [{"role": "user", "content": "again"}]


def always(conversation, row) -> list[dict[str, str]]:
    return REPLY


@pytest.fixture(scope="module")
def make_env(bpe, prompts) -> Callable[..., DatasetChatEnv]:
    def make(respond, max_turns: int = 3, data=prompts, tokenizer=bpe, **kwargs) -> DatasetChatEnv:
        transforms = [FeedbackTransform(respond, max_turns=max_turns)]
        settings = {"prompts_per_batch": len(data), "shuffle": False, "transforms": transforms, **kwargs}
        return DatasetChatEnv(data, tokenizer, **settings)

    return make


@pytest.fixture(scope="module")
def one_token(random_model, bpe) -> TransformersWrapper:
    """Policy that samples one token per turn and then stops."""
    kwargs = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe))), "seed": 0}
    return TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs=kwargs)


def feedback_of(env: DatasetChatEnv) -> FeedbackTransform:
    return next(t for t in env.transform if isinstance(t, FeedbackTransform))


def states(rows: TensorDictBase) -> list[tuple[bool, bool, bool]]:
    """Return ``(done, terminated, truncated)`` of each row's next state."""
    return [tuple(bool(r["next", k]) for k in ("done", "terminated", "truncated")) for r in rows.unbind(0)]


def test_an_answered_row_goes_on(make_env: Callable, one_token: TransformersWrapper, bpe) -> None:
    env = make_env(always)
    out = env.step(one_token(env.reset()))
    assert states(out) == [(False, False, False)] * 4
    ids = bpe("<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    for row in out.unbind(0):
        full, after = row[keys.TOKENS].tolist(), row["next", keys.PROMPT_TOKENS].tolist()
        assert after == full + ids["input_ids"]
        new = len(after) - len(full)
        assert row["next", keys.ACTION_MASK].tolist() == row[keys.ACTION_MASK].tolist() + [False] * new
        assert row["next", keys.LOG_PROBS].tolist() == row[keys.LOG_PROBS].tolist() + [0.0] * new
        assert row["next", keys.COMPLETION][1:] == REPLY and int(row["next", keys.NUM_TURNS]) == 1


def test_respond_sees_the_conversation_and_the_columns(make_env: Callable, one_token, prompts, bpe) -> None:
    calls = []

    def respond(conversation, row):
        calls.append((conversation, row["answer"], row["turns"]))
        return REPLY

    env = make_env(respond)
    LLMCollector(env, one_token).collect()
    assert len(calls) == 12
    for k, (conversation, answer, turns) in enumerate(calls):
        prompt = prompts[k % 4]
        assert (answer, turns) == (prompt["answer"], prompt["turns"])
        assert conversation[0] == prompt[keys.QUERY][0]
        assert [m["role"] for m in conversation] == ["user", "assistant"] * (k // 4 + 1)
        assert all(m == REPLY[0] for m in conversation[2::2])


@pytest.mark.parametrize("nothing", [None, []])
def test_no_feedback_ends_the_conversation(nothing, make_env: Callable, one_token: TransformersWrapper) -> None:
    env = make_env(lambda conversation, row: nothing)
    assert states(env.step(one_token(env.reset()))) == [(True, True, False)] * 4
    assert not any(feedback_of(env).counts.values())


def test_a_turn_cut_short_is_not_answered(make_env: Callable, random_model, bpe) -> None:
    calls = []
    env = make_env(lambda conversation, row: calls.append(1) or REPLY)
    policy = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 2, "ignore_eos": True})
    assert states(env.step(policy(env.reset()))) == [(True, False, True)] * 4
    assert calls == []


def test_the_turn_limit_truncates_who_would_go_on(make_env: Callable, one_token: TransformersWrapper) -> None:
    env = make_env(always, max_turns=2)
    rows = LLMCollector(env, one_token).collect()
    assert rows[keys.NUM_TURNS].tolist() == [2] * 4
    assert rows[keys.TRUNCATED].all() and not rows[keys.TERMINATED].any()
    assert feedback_of(env).counts["feedback/turn_limit"] == 4
    env = make_env(lambda conversation, row: REPLY if len(conversation) < 4 else None, max_turns=2)
    rows = LLMCollector(env, one_token).collect()
    assert rows[keys.NUM_TURNS].tolist() == [2] * 4
    assert rows[keys.TERMINATED].all() and not rows[keys.TRUNCATED].any()
    assert feedback_of(env).counts["feedback/turn_limit"] == 0


def test_rows_with_unequal_numbers_of_turns(make_env: Callable, one_token: TransformersWrapper, prompts) -> None:
    env = make_env(lambda conversation, row: REPLY if len(conversation) < 2 * row["turns"] else None)
    rows = LLMCollector(env, one_token).collect()
    assert rows[keys.NUM_TURNS].tolist() == [p["turns"] for p in prompts]
    for row, prompt in zip(rows.unbind(0), prompts, strict=True):
        assert row[keys.QUERY] == prompt[keys.QUERY] and row["answer"] == prompt["answer"]
        assert int(row[keys.ACTION_MASK].sum()) == prompt["turns"]
        assert bool(row[keys.TERMINATED]) and not bool(row[keys.TRUNCATED])


def test_a_respond_that_raises_costs_its_row_only(make_env: Callable, one_token, caplog) -> None:
    def respond(conversation, row):
        if row["answer"] == "c":
            raise OSError("the tool is down")
        return REPLY

    env = make_env(respond)
    with caplog.at_level(logging.ERROR):
        out = env.step(one_token(env.reset()))
    assert [row["answer"] for row in out.unbind(0)] == ["a", "c", "b", "?"]
    assert states(out) == [(False, False, False), (True, False, True), (False, False, False), (False, False, False)]
    assert feedback_of(env).counts["feedback/failed"] == 1 and "the tool is down" in caplog.text


@pytest.mark.parametrize("bad", [[{"role": "tool", "content": 7}], [{"role": "user"}], "again", 3], ids=repr)
def test_feedback_that_cannot_be_rendered_costs_its_row_only(bad, make_env: Callable, one_token) -> None:
    """Treat a wrong return value as a failed tool, and continue the run."""
    env = make_env(lambda conversation, row: bad if row["answer"] == "c" else REPLY)
    out = env.step(one_token(env.reset()))
    assert states(out)[1] == (True, False, True) and states(out)[0] == (False, False, False)
    assert feedback_of(env).counts["feedback/failed"] == 1


def test_feedback_on_plain_text_prompts_is_refused(one_token: TransformersWrapper, make_env: Callable) -> None:
    """Raise at once for a setup that can never work, instead of counting failed tools."""
    data = load_prompts([{"query": "abc"}, {"query": "cab ab"}], chat=False)
    env = make_env(lambda c, row: [{"role": "user", "content": c[-1]["content"]}], data=data)
    with pytest.raises(ValueError, match="chat messages"):
        env.step(one_token(env.reset()))


def test_where_it_belongs(make_env: Callable) -> None:
    with pytest.raises(ValueError, match="max_turns=0"):
        FeedbackTransform(always, max_turns=0)
    elsewhere = TransformedEnv(ContinuousActionVecMockEnv(), FeedbackTransform(always, max_turns=1))
    with pytest.raises(TypeError, match="ChatEnv"):
        elsewhere.rollout(1)


def test_a_seeded_row_draws_new_numbers_each_turn(
    make_model: Callable, bpe, user: Callable, make_env: Callable
) -> None:
    """Expect one random stream per seeded row, so that its turns are independent.

    Under uniform logits the sampled ids are the numbers drawn, so a restarted stream would show.
    """
    model = make_model(bpe)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    kwargs = {"max_new_tokens": 6, "stop_strings": [], "ignore_eos": True}
    policy = TransformersWrapper(model, tokenizer=bpe, generate_kwargs=kwargs)

    def seeded(rows: TensorDictBase) -> TensorDictBase:
        for i, row in enumerate(rows.unbind(0)):
            row.set(keys.SEED, torch.tensor(i))
        rows = policy(rows)
        for row in rows.unbind(0):
            row.set(keys.RESPONSE_TRUNCATED, torch.tensor([False]))  # so that it is answered
        return rows

    rows = LLMCollector(make_env(always, max_turns=2), seeded).collect()
    for row in rows.unbind(0):
        sampled = row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()
        assert len(sampled) == 12 and sampled[:6] != sampled[6:]


def test_an_open_turn_in_the_prompt_counts_as_one_with_its_rest(make_tokenizer: Callable, make_model: Callable) -> None:
    """Use a template that requires alternating roles; it accepts feedback after a turn that the prompt began."""
    tokenizer = make_tokenizer("mistral")
    model = make_model(tokenizer)
    query = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "so ca"}]
    env = DatasetChatEnv(
        load_prompts([{"query": query}]),
        tokenizer,
        prompts_per_batch=1,
        transforms=[FeedbackTransform(always, max_turns=2)],
    )
    kwargs = {"max_new_tokens": 1, "stop_token_ids": list(range(len(tokenizer))), "seed": 0}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    out = env.step(policy(env.reset()))[0]
    prompt = encode_prompt(tokenizer, query)
    ids = tokenizer("</s>[INST] again [/INST]", add_special_tokens=False)["input_ids"]
    assert out["next", keys.PROMPT_TOKENS].tolist() == prompt + out[keys.RESPONSE_TOKENS].tolist() + ids


@pytest.mark.parametrize("input_mode", ["tokens", "text", "history"])
def test_all_modes_make_the_same_ids(input_mode: str, make_env: Callable, random_model, bpe) -> None:
    def collect(mode: str) -> list[list[int]]:
        kwargs = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe))), "seed": 3}
        policy = TransformersWrapper(random_model, tokenizer=bpe, input_mode=mode, generate_kwargs=kwargs)
        rows = LLMCollector(make_env(always, input_mode=mode), policy).collect()
        return [t.tolist() for t in ragged(rows, keys.TOKENS)]

    assert collect(input_mode) == collect("tokens")


def test_what_the_policy_reads_in_history_mode(make_env: Callable, one_token: TransformersWrapper, prompts) -> None:
    env = make_env(always, input_mode="history")
    policy = one_token.get_new_version(input_mode="history")
    out = env.step(policy(env.reset()))
    following = stack_rows([row["next"] for row in out.unbind(0)])
    for row, prompt in zip(following.unbind(0), prompts, strict=True):
        assert row["history", "prompt"].role == ["user", "assistant", "user"]
        assert row["history", "prompt"].content[0] == prompt[keys.QUERY][0]["content"]
        assert row["history", "prompt"].content[2] == "again"
