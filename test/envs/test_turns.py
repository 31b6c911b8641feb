"""Turns: ends of conversations and their reasons, limits, and a template that rewrites the past."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from torchrl_rloo.collectors import LLMCollector, conversation
from torchrl_rloo.data import encode_prompt, keys, load_prompts
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.segments import sampled_versions, split_segments
from torchrl_rloo.data.stop_reasons import STOP_REASONS, TERMINATED, stop_reason
from torchrl_rloo.engines.base import Request
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, chat
from torchrl_rloo.envs.stepping import step_rows
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

AGAIN = [{"role": "user", "content": "again"}]
LONGEST = 50


def forever(conversation, row) -> list[dict[str, str]]:
    return AGAIN


@pytest.fixture
def play(bpe) -> Iterator[Callable]:
    """Return ``play(script, **generate_kwargs)``, which makes a policy that plays the script, and its engine."""
    engines = []

    def make(script, tokenizer=bpe, input_mode: str = "tokens", **generate_kwargs) -> vLLMWrapper:
        engines.append(ScriptedEngine(script))
        kwargs = {"max_new_tokens": LONGEST, "seed": 0, **generate_kwargs}
        return vLLMWrapper(engines[-1], tokenizer=tokenizer, input_mode=input_mode, generate_kwargs=kwargs)

    yield make
    for engine in engines:
        engine.close()


def turn_of(tokenizer, text: str, ends: bool = True) -> ScriptedTurn:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [*ids, tokenizer.eos_token_id] if ends else ids
    return ScriptedTurn(ids, [-0.1 * (i + 1) for i in range(len(ids))])


def collect(bpe, policy, respond=forever, query=None, **limits) -> tuple[TensorDictBase, DatasetChatEnv]:
    """Collect one conversation to its end; return it and the environment."""
    prompts = load_prompts([{"query": query or [{"role": "user", "content": "abc"}]}])
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=1, transforms=[FeedbackTransform(respond)], **limits)
    return LLMCollector(env, policy).collect()[0], env


# limits


def limit_case(bpe, name: str) -> tuple[dict, list[ScriptedTurn], Callable]:
    """Return limits, scripted turns and the answering function of a conversation that ends for the reason ``name``."""
    prompt = len(encode_prompt(bpe, [{"role": "user", "content": "abc"}]))
    short, cut = turn_of(bpe, "ab"), ScriptedTurn([40] * 9)
    feedback = len(bpe("\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    room = prompt + len(short.tokens)
    return {
        "answered": ({}, [short], lambda conversation, row: None),
        "turn_tokens": ({"max_turn_tokens": 6}, [short, cut], forever),
        "total_tokens": ({"max_tokens": room + feedback + 6}, [short, cut], forever),
        "total_tokens by feedback": ({"max_tokens": room + feedback}, [short], forever),
        "turns": ({"max_turns": 2}, [short, short], forever),
        "time": ({"max_seconds": 25.0}, [short, short, short], forever),
    }[name]


@pytest.mark.parametrize(
    "name", ["answered", "turn_tokens", "total_tokens", "total_tokens by feedback", "turns", "time"]
)
def test_every_limit_has_its_reason(name: str, bpe, play: Callable, monkeypatch) -> None:
    limits, turns, respond = limit_case(bpe, name)
    now = itertools.count(0.0, 10.0)  # the clock is read once at the start and once for each answer
    monkeypatch.setattr(chat, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(conversation, "time", SimpleNamespace(monotonic=lambda: 0.0))
    policy = play(turns)
    row, env = collect(bpe, policy, respond, **limits)
    reason = name.split()[0]
    assert stop_reason(row) == reason and int(row[keys.NUM_TURNS]) == len(turns)
    assert bool(row[keys.TERMINATED]) == (reason in TERMINATED) and row[keys.DONE].all()
    assert bool(row[keys.TRUNCATED]) != bool(row[keys.TERMINATED])
    assert len(policy.engine.requests) == len(turns)
    assert row[keys.COMPLETION][-1]["role"] == "assistant", "feedback that leads to no turn is not in the row"
    assert env.base_env.counts["env/rewritten_turns"] == 0
    if "max_tokens" in limits:
        assert len(row[keys.TOKENS]) <= limits["max_tokens"]


def test_reasons_are_places_that_do_not_move() -> None:
    """Keep the ids of reasons, which buffers and checkpoints hold."""
    known = "running answered ended turn_tokens total_tokens turns tool_calls time failed cancelled"
    assert list(STOP_REASONS)[: len(known.split())] == known.split()


# how long a turn may be


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        (None, {}, [LONGEST] * 3),
        (4, {}, [4] * 3),
        (4, {"max_turn_tokens": 7}, [4] * 3),
        (9, {"max_turn_tokens": 7}, [7] * 3),
        (None, {"max_turn_tokens": 7}, [7] * 3),
        (4, {"room": 60}, [4] * 3),
        (12, {"room": 30}, [12, 12, 4]),
        (9, {"room": 30, "max_turn_tokens": 8}, [8, 8, 4]),
    ],
    ids=str,
)
def test_a_turn_has_the_smallest_of_its_limits(
    own: int | None, limits: dict, expected: list[int], bpe, user: Callable, play: Callable
) -> None:
    """Combine the limits of policy, environment and row at every turn, also after another reset."""
    feedback = len(bpe("\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    turn = turn_of(bpe, "", ends=True)
    used = len(turn.tokens) + feedback
    if "room" in limits:
        prompt = len(encode_prompt(bpe, user("abc")))
        limits = {k: v for k, v in limits.items() if k != "room"} | {"max_tokens": prompt + 2 * used + 4}
    policy = play(lambda request, index: turn)
    env = ChatEnv(bpe, batch_size=1, **limits)
    row = TensorDict({keys.QUERY: NonTensorData(user("abc"))}, [])
    if own is not None:
        row.set(keys.MAX_NEW_TOKENS, torch.tensor(own))
    for _ in range(2):
        rows = env.reset(stack_rows([row]))
        for _ in range(3):
            stepped = step_rows(env, policy(rows))
            row = stepped[0]["next"]
            assert env.continue_row(row, user("a")) or len(row[keys.PROMPT_TOKENS]) + feedback >= env.max_tokens
            rows = stack_rows([stepped[0].exclude("next", "tokens", "masks", "log_probs").update(row)])
        row = rows[0].exclude("reward", keys.ACTION_VERSIONS)
    assert [request.limit for request in policy.engine.requests] == expected * 2


# the past, rewritten

THOUGHT, PLAIN = "<think>a</think>b", "cab"


@pytest.mark.parametrize("input_mode", ["tokens", "text", "history"])
def test_keep_goes_on_from_what_the_policy_saw(input_mode: str, make_tokenizer: Callable, play: Callable) -> None:
    bpe = make_tokenizer("strips_thinking")
    turns = [turn_of(bpe, said) for said in (THOUGHT, PLAIN, THOUGHT, THOUGHT)]
    policy = play(turns, bpe, input_mode)
    row, env = collect(bpe, policy, max_turns=4, input_mode=input_mode)
    requests = policy.engine.requests
    for k in range(3):
        seen = [*requests[k].prompt, *turns[k].tokens]
        assert requests[k + 1].prompt[: len(seen)] == seen
    assert row[keys.TOKENS].tolist() == [*requests[3].prompt, *turns[3].tokens]
    assert env.base_env.counts["env/rewritten_turns"] == 2, (
        "of four turns the first and the third; the last has no answer"
    )
    assert keys.PREVIOUS_SEGMENTS not in row.keys()


@pytest.mark.parametrize("input_mode", ["tokens", "text", "history"])
def test_split_goes_on_from_the_conversation_as_rendered(
    input_mode: str, make_tokenizer: Callable, play: Callable
) -> None:
    bpe = make_tokenizer("strips_thinking")
    turns = [turn_of(bpe, said) for said in (THOUGHT, PLAIN, THOUGHT, THOUGHT)]
    policy = play(turns, bpe, input_mode)
    row, env = collect(bpe, policy, max_turns=4, on_rewrite="split", input_mode=input_mode)
    requests = policy.engine.requests
    conversation = [{"role": "user", "content": "abc"}, *row[keys.COMPLETION]]
    assert requests[1].prompt == encode_prompt(bpe, conversation[:3]) and "<think>" not in bpe.decode(
        requests[1].prompt
    )
    assert requests[2].prompt[: len(requests[1].prompt)] == requests[1].prompt
    assert requests[3].prompt == encode_prompt(bpe, conversation[:7])
    samples = split_segments(stack_rows([row])).unbind(0)
    for sample, members in zip(samples, ([0], [1, 2], [3]), strict=True):
        last = members[-1]
        assert sample[keys.TOKENS].tolist() == [*requests[last].prompt, *turns[last].tokens]
        assert sample[keys.PROMPT_TOKENS].tolist() == requests[members[0]].prompt
        sampled = [i for k in members for i in turns[k].tokens]
        assert sample[keys.TOKENS][sample[keys.ACTION_MASK]].tolist() == sampled
        expected = torch.tensor([p for k in members for p in turns[k].log_probs])
        torch.testing.assert_close(sample[keys.LOG_PROBS][sample[keys.ACTION_MASK]], expected)
        assert (sample[keys.LOG_PROBS][~sample[keys.ACTION_MASK]] == 0).all()
        assert len(sample[keys.ACTION_VERSIONS]) == len(sampled)
    assert len(sampled_versions(row)) == sum(len(turn.tokens) for turn in turns)
    assert env.base_env.counts["env/rewritten_turns"] == 2


def test_samples_keep_the_support_of_their_tokens(make_tokenizer: Callable, make_model: Callable) -> None:
    """Continue after a split; each sample is scored over the support that it was sampled from."""
    bpe = make_tokenizer("strips_thinking")
    bpe.chat_template = bpe.chat_template.replace("'</think>'", "'a'")
    kwargs = {"max_new_tokens": 8, "top_k": 20, "seed": 3}
    policy = TransformersWrapper(
        make_model(bpe, seed=1, end_bias=9.0), tokenizer=bpe, generate_kwargs=kwargs, record_support=True
    )
    row, env = collect(bpe, policy, max_turns=6, on_rewrite="split", max_tokens=200)
    assert env.base_env.counts["env/rewritten_turns"], "the test wants a split"
    out = split_segments(stack_rows([row]))
    assert len(out) == 1 + env.base_env.counts["env/rewritten_turns"]
    for sample in out.unbind(0):
        assert len(sample[keys.SUPPORT_SIZES]) == int(sample[keys.ACTION_MASK].sum())
        assert int(sample[keys.SUPPORT_SIZES].sum()) == len(sample[keys.SUPPORT_IDS])
    scorer = policy.get_new_version(generate=False)
    scored = scorer.score(out)
    behaviour = torch.cat([s[keys.LOG_PROBS][s[keys.ACTION_MASK]] for s in out.unbind(0)])
    torch.testing.assert_close(scored.log_probs[scored.actions.mask], behaviour, rtol=0, atol=1e-5)


@pytest.mark.parametrize("on_rewrite", ["keep", "split"])
@pytest.mark.parametrize("shown", [True, False])
def test_a_changed_tool_schema(shown: bool, on_rewrite: str, make_tokenizer: Callable, play: Callable, user) -> None:
    """Expect a rewritten past once per change, if the template shows the schema."""
    bpe = make_tokenizer()
    if shown:
        bpe.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + bpe.chat_template
    policy = play(lambda request, index: turn_of(bpe, "ab"), bpe)
    env = ChatEnv(bpe, batch_size=1, on_rewrite=on_rewrite)
    row = TensorDict({keys.QUERY: NonTensorData(user("abc")), keys.TOOLS: NonTensorData(tools("f"))}, [])
    rows = env.reset(stack_rows([row]))
    counts = []
    for now in ("f", "g", "g", "h"):
        stepped = step_rows(env, policy(rows))
        row = stepped[0]["next"]
        if row[keys.TOOLS] != tools(now):
            row.set(keys.TOOLS, NonTensorData(tools(now)))
        assert env.continue_row(row, user("b"))
        rows = stack_rows([stepped[0].exclude("next", "tokens", "masks", "log_probs").update(row)])
        counts.append(env.counts["env/rewritten_turns"])
        latest = bpe.decode(row[keys.PROMPT_TOKENS]).count(f'"{now}"')
        assert latest == (shown and (on_rewrite == "split" or now == "f"))
    assert counts == ([0, 1, 1, 2] if shown else [0] * 4)
    assert (keys.PREVIOUS_SEGMENTS in rows[0].keys()) == (shown and on_rewrite == "split")


def tools(name: str) -> list[dict]:
    return [{"type": "function", "function": {"name": name, "parameters": {}}}]


@pytest.mark.parametrize("template", ["chatml", "chatml_generation", "llama3", "mistral", "llama2"])
def test_plain_templates_rewrite_nothing(template: str, make_tokenizer: Callable, play: Callable) -> None:
    bpe = make_tokenizer(template)
    said = ["cab", "", "  a \n", "<think>a</think>", "<|im_end|><|eot|></s>", "[INST] a [/INST]", "{{ 1 }}"]
    script: Sequence[ScriptedTurn] = [turn_of(bpe, text) for text in said]
    row, env = collect(bpe, play(script, bpe), max_turns=len(said), on_rewrite="split")
    assert int(row[keys.NUM_TURNS]) == len(said)
    assert env.base_env.counts["env/rewritten_turns"] == 0 and keys.PREVIOUS_SEGMENTS not in row.keys()


def test_the_limit_of_tokens_is_that_of_each_sample(make_tokenizer: Callable, play: Callable) -> None:
    """Expect text that the template drops to free room under the limit."""
    bpe = make_tokenizer("strips_thinking")
    long = turn_of(bpe, "<think>" + "ab " * 30 + "</think>b")

    def script(request: Request, index: int) -> ScriptedTurn:
        return long

    limit = len(encode_prompt(bpe, [{"role": "user", "content": "abc"}])) + len(long.tokens) + 60
    kept, _ = collect(bpe, play(script, bpe, max_new_tokens=200), max_turns=3, max_tokens=limit)
    assert stop_reason(kept) == "total_tokens" and int(kept[keys.NUM_TURNS]) < 3
    split, _ = collect(bpe, play(script, bpe, max_new_tokens=200), max_turns=3, max_tokens=limit, on_rewrite="split")
    assert stop_reason(split) == "turns" and int(split[keys.NUM_TURNS]) == 3
    assert all(len(row[keys.TOKENS]) <= limit for row in split_segments(stack_rows([split])).unbind(0))


def test_rewards_are_given_all_that_was_sampled(make_tokenizer: Callable, play: Callable) -> None:
    bpe = make_tokenizer("strips_thinking")
    turns = [turn_of(bpe, said) for said in (THOUGHT, PLAIN, THOUGHT)]
    prompts = load_prompts([{"query": [{"role": "user", "content": "abc"}]}])
    seen = []

    def note(completion_ids, **columns) -> list[float]:
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    asks = [FeedbackTransform(forever)]
    env = DatasetChatEnv(
        prompts, bpe, prompts_per_batch=1, transforms=asks, rewards=note, max_turns=3, on_rewrite="split"
    )
    row = LLMCollector(env, play(turns, bpe)).collect()[0]
    assert len(row[keys.PREVIOUS_SEGMENTS]["sizes"]) == 1, "the test wants a split"
    assert seen == [[i for turn in turns for i in turn.tokens]]
