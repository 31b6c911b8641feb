"""UserSimulator: what it sees, the ends of conversations, and its speakers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from support.waiting import PATIENCE, wait_until
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_model
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn, TransformersEngine
from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.envs.transforms.feedback import UserSimulator
from torchrl_rloo.modules import TransformersWrapper

PROMPT = "You want {goal}. Say ###STOP### when you have it."


@pytest.fixture(scope="module")
def goals(user):
    texts = {"What is 2+3?": "a sum", "What is 47+38?": "help", "What is 1+1?": "to chat", "What is 9+9?": "an end"}
    return load_prompts([{"query": user(text), "goal": goal} for text, goal in texts.items()])


@pytest.fixture(scope="module")
def make_env(goals, tokenizer) -> Callable[..., DatasetChatEnv]:
    def make(*args, **kwargs) -> DatasetChatEnv:
        simulator = UserSimulator(*args, **kwargs)
        env = DatasetChatEnv(goals, tokenizer, prompts_per_batch=4, shuffle=False, transforms=[simulator], max_turns=6)
        env.simulator = simulator
        return env

    return make


@pytest.fixture(scope="module")
def one_token(tokenizer) -> TransformersWrapper:
    """Policy that samples one token per turn and then stops."""
    kwargs = {"max_new_tokens": 1, "stop_token_ids": list(range(len(tokenizer))), "seed": 0}
    model = build_model(tokenizer, seed=0).eval()
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)


def reasons(rows) -> list[str]:
    return [stop_reason(row) for row in rows.unbind(0)]


def turn(query, completion, **columns):
    """Return the row of a turn and its next state."""
    row = TensorDict({keys.QUERY: NonTensorData(query), **{k: NonTensorData(v) for k, v in columns.items()}})
    return row, TensorDict({keys.COMPLETION: NonTensorData(completion), keys.TRAJECTORY_ID: torch.tensor(0)})


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def silent(messages, seed) -> str:
    return ""


def test_it_sees_the_other_side_of_what_was_said_aloud() -> None:
    simulator = UserSimulator(silent, "You are {persona}, {{rude}}.", greeting="Hi!")
    query = [say("system", "secret"), say("user", "Book it."), say("user", "Now.")]
    completion = [
        say("assistant", "<tool_call>book()</tool_call>"),
        say("tool", "booked"),
        say("assistant", "<think>they are {odd}</think>\nDone."),
        say("user", "Sure?"),
        say("assistant", "call()"),
        say("user", "<tool_response>what a template without tools shows"),
        say("assistant", "hm</think>Yes."),
    ]
    simulator._own_messages[0] = [3]
    assert simulator.messages(*turn(query, completion, persona="{an} heir")) == [
        say("system", "You are {an} heir, {rude}."),
        say("user", "Hi!"),
        say("assistant", "Book it.\n\nNow."),
        say("user", "Done."),
        say("assistant", "Sure?"),
        say("user", "Yes."),
    ]
    greeted = simulator.messages(*turn([say("assistant", "Welcome."), say("user", "Hm.")], [], persona=1))
    assert greeted == [say("system", "You are 1, {rude}."), say("user", "Welcome."), say("assistant", "Hm.")]


def test_it_answers_until_it_stops(make_env, one_token, tokenizer) -> None:
    seen = []

    async def speaker(messages, seed):
        seen.append((messages, seed))
        if "help" in messages[0]["content"]:
            return "Thanks, ###STOP###"
        if "chat" in messages[0]["content"]:
            return " \n"
        return f"What is {len(messages)}?"

    env = make_env(speaker, PROMPT, max_replies=2)
    rows = LLMCollector(env, one_token).collect()
    assert reasons(rows) == ["turns", "ended", "ended", "turns"]
    assert rows[keys.NUM_TURNS].tolist() == [3, 1, 1, 3]
    assert rows[keys.TERMINATED].flatten().tolist() == [False, True, True, False]
    assert env.simulator.counts == {"user/replies": 4, "user/ended": 2, "user/limit": 2}
    assert len({seed for _, seed in seen}) == len(seen) == 6 and all(0 <= seed < 2**63 for _, seed in seen)
    assert [m["role"] for m in seen[-1][0]] == ["system", "user", "assistant", "user", "assistant", "user"]
    for row in rows.unbind(0):
        said = tokenizer.decode(row[keys.TOKENS][~row[keys.ACTION_MASK]])
        assert ("What is 4?" in said) == ("What is 6?" in said) == (int(row[keys.NUM_TURNS]) == 3)
        assert "STOP" not in said and int(row[keys.ACTION_MASK].sum()) == int(row[keys.NUM_TURNS])


def test_what_it_thinks_is_its_own(make_env, one_token, tokenizer) -> None:
    env = make_env(lambda messages, seed: "<think>###STOP### if it is 5</think>\nAnd now?", PROMPT, max_replies=1)
    for row in LLMCollector(env, one_token).collect().unbind(0):
        assert [m["content"] for m in row[keys.COMPLETION] if m["role"] == "user"] == ["And now?"]
        assert "STOP" not in tokenizer.decode(row[keys.TOKENS])


def test_turns_that_others_answer_are_not_said_to_it(goals, one_token, tokenizer) -> None:
    seen = []

    def speaker(messages, seed):
        seen.append(messages)
        return "More?"

    def respond(conversation, row):  # like a tool, once after each user message
        return [say("user", "a result")] if conversation[-2]["content"] != "a result" else None

    simulator = UserSimulator(speaker, "Ask.", max_replies=2)
    transforms = [FeedbackTransform(respond), simulator]
    env = DatasetChatEnv(goals, tokenizer, prompts_per_batch=1, shuffle=False, transforms=transforms)
    rows = LLMCollector(env, one_token).collect()
    assert reasons(rows) == ["turns"] and rows[keys.NUM_TURNS].tolist() == [6]
    assert [[m["role"] for m in each] for each in seen] == [
        ["system", "user", "assistant", "user"],
        ["system", "user", "assistant", "user", "assistant", "user"],
    ]
    assert not any("a result" in m["content"] for each in seen for m in each)
    assert not simulator._own_messages, "forgotten with the conversation"


def test_a_speaker_that_fails_or_blocks_costs_its_own_conversation(make_env, one_token) -> None:
    stuck = threading.Event()

    def speaker(messages, seed):
        goal = messages[0]["content"]
        if "sum" in goal:
            raise OSError("no line")
        if "help" in goal:
            return 7
        if "chat" in goal:
            stuck.wait(60)
        return "###STOP###"

    env = make_env(speaker, PROMPT, timeout=1.0)
    rows = LLMCollector(env, one_token).collect()
    stuck.set()
    assert reasons(rows) == ["failed", "failed", "failed", "ended"]
    assert env.simulator.counts == {"user/failed": 3, "user/ended": 1}


class CountingEngine(TransformersEngine):
    """Engine that records the number of requests per call, and refuses those that contain a text."""

    def __init__(self, *args, refuse: str = "no prompt has this"):
        super().__init__(*args)
        self.sizes, self.refuse = [], refuse

    def generate(self, requests):
        self.sizes.append(len(requests))
        if any(self.refuse in self.tokenizer.decode(r.prompt) for r in requests):
            raise EngineError("a bad request")
        return super().generate(requests)


@pytest.fixture
def make_engine(tokenizer) -> Iterator[Callable[..., CountingEngine]]:
    engines = []

    def make(**kwargs) -> CountingEngine:
        engines.append(CountingEngine(build_model(tokenizer, seed=3).eval(), tokenizer, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_a_model_speaks_in_batches_and_says_the_same_again(make_env, make_engine, one_token, tokenizer) -> None:
    said = []
    for seed in (0, 0, 1):
        engine = make_engine()
        settings = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 8}, "max_replies": 2, "seed": seed}
        env = make_env(engine, PROMPT, **settings)
        policy = one_token.get_new_version(generate_kwargs=one_token.generate_kwargs | {"seed": 0})
        rows = LLMCollector(env, policy).collect()
        assert reasons(rows) == ["turns"] * 4
        assert engine.sizes == [4, 4], "all rows of a step in one call"
        said.append([[m["content"] for m in row[keys.COMPLETION]] for row in rows.unbind(0)])
    assert said[0] == said[1] != said[2]
    assert len({str(each) for each in said[0]}) == 4


def test_a_rows_seed_decides(make_engine, tokenizer) -> None:
    simulator = UserSimulator(silent, "Ask.", seed=2)

    def seed_of(**row):
        entries = {name: torch.tensor(value) for name, value in row.items()}
        return simulator._seed(TensorDict(entries), TensorDict({keys.NUM_TURNS: torch.tensor(1)}))

    assert seed_of(seed=1, group_id=0, trajectory_id=0) == seed_of(seed=1, group_id=5, trajectory_id=9)
    assert len({seed_of(group_id=g, trajectory_id=t) for g in (0, 1) for t in (0, 1)}) == 4
    assert seed_of(seed=1) != seed_of(seed=2)


def test_one_bad_request_does_not_fail_the_batch(make_env, make_engine, one_token, tokenizer) -> None:
    engine = make_engine(refuse="You want help.")
    settings = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 2}, "max_replies": 1, "seed": 0}
    rows = LLMCollector(make_env(engine, PROMPT, **settings), one_token).collect()
    assert reasons(rows) == ["turns", "failed", "turns", "turns"] and engine.sizes == [4, 1, 1, 1, 1]


def test_an_engine_that_only_aborts_fails_the_message(make_env, one_token, tokenizer) -> None:
    with ScriptedEngine(lambda request, index: ScriptedTurn([], finish="abort")) as engine:
        rows = LLMCollector(make_env(engine, PROMPT, tokenizer=tokenizer, timeout=PATIENCE), one_token).collect()
        assert reasons(rows) == ["failed"] * 4 and len(engine.requests) == 400


def test_an_asynchronous_engine_is_asked_at_once_and_again_after_a_pause(make_env, one_token, tokenizer) -> None:
    ids = tokenizer("Why?<|im_end|>", add_special_tokens=False)["input_ids"]
    with ScriptedEngine(lambda request, index: ScriptedTurn(ids, latency=PATIENCE if index < 4 else 0.0)) as engine:
        env = make_env(engine, PROMPT, tokenizer=tokenizer, max_replies=1)

        def pause() -> None:
            wait_until(lambda: len(engine.requests) == 4, what="four requests")
            engine.pause("abort")
            engine.resume()

        pausing = threading.Thread(target=pause, daemon=True)
        pausing.start()
        rows = LLMCollector(env, one_token).collect()
        pausing.join(60)
        assert reasons(rows) == ["turns"] * 4
        first, second = engine.requests[:4], engine.requests[4:]
        assert sorted(r.seed for r in first) == sorted(r.seed for r in second), "cut off, so asked again"
        assert all(row[keys.COMPLETION][1] == say("user", "Why?") for row in rows.unbind(0))


def test_a_model_that_only_thinks_fails(make_env, one_token, tokenizer, caplog) -> None:
    ids = tokenizer("<think>What now", add_special_tokens=False)["input_ids"]
    with ScriptedEngine(lambda request, index: ScriptedTurn(ids, finish="length")) as engine:
        env = make_env(engine, PROMPT, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 9})
        assert reasons(LLMCollector(env, one_token).collect()) == ["failed"] * 4
    assert "used its 9 tokens without a reply" in caplog.text


def test_an_engines_context_is_heeded(make_env, one_token, tokenizer) -> None:
    with ScriptedEngine(lambda request, index: ScriptedTurn([7] * 200)) as engine:
        engine.context_length = 100
        env = make_env(engine, "Ask.", tokenizer=tokenizer, max_replies=1)
        LLMCollector(env, one_token).collect()
        assert {len(r.prompt) + r.limit for r in engine.requests} == {100}
        engine.context_length = 3
        rows = LLMCollector(make_env(engine, "Ask.", tokenizer=tokenizer), one_token).collect()
        assert reasons(rows) == ["failed"] * 4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tokenizer": "a tokenizer"}, "a function requires tokenizer=None"),
        ({"generate_kwargs": {"max_new_tokens": 3}}, "requires an engine"),
        ({"stop_text": " "}, "stop_text=' ' must not be empty"),
        ({"max_replies": 0}, "max_replies=0 must be at least 1"),
        ({"timeout": 0}, "timeout=0 must be above 0"),
        ({"system_prompt": "Be {}."}, r"system_prompt has \[''\] in braces"),
    ],
)
def test_settings_that_make_no_sense(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UserSimulator(silent, **{"system_prompt": "Ask.", **kwargs})


def test_a_missing_column_is_named_at_reset(make_env) -> None:
    with pytest.raises(KeyError, match=r"names the columns \['persona'\].*'goal'"):
        make_env(silent, "You are {persona} and want {goal}.").reset()


def test_an_engine_needs_its_tokenizer() -> None:
    with ScriptedEngine([]) as engine, pytest.raises(ValueError, match="an engine needs"):
        UserSimulator(engine, "Ask.")
