"""Tests of conversations that cannot begin, of the policy's context as a limit, and of its stop ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, RowStepper
from torchrl_rloo.envs.stepping import adapt_to_policy, open_rows
from torchrl_rloo.envs.text import text_env
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

G = 2


def reasons(rows: TensorDictBase) -> list[str]:
    return [stop_reason(row) for row in rows.unbind(0)]


def again(conversation, row) -> list[dict[str, str]]:
    return [{"role": "user", "content": "b" * 20}]


@pytest.fixture
def make_env(bpe, user: Callable) -> Callable[..., DatasetChatEnv]:
    """Make an environment of three prompts, the second of which has 200 letters; conversations never end themselves."""

    def build(**settings) -> DatasetChatEnv:
        dataset = load_prompts([{"query": user("c" * n)} for n in (1, 200, 2)])
        lengths = lambda completions, **_: [float(len(c)) for c in completions]  # noqa: E731
        defaults = {"prompts_per_batch": 3, "num_generations": G, "rewards": lengths, "shuffle": False}
        return DatasetChatEnv(dataset, bpe, transforms=[FeedbackTransform(again)], **defaults | settings)

    return build


@pytest.fixture
def make_policy(bpe) -> Callable[..., vLLMWrapper]:
    """Make a policy of a scripted engine, whose turns have as many tokens as the request allows, up to six."""
    engines: list[ScriptedEngine] = []

    def build(context: int | None = None) -> vLLMWrapper:
        def script(request, index: int) -> ScriptedTurn:
            turn = [30, 31, 32, 33, 34, bpe.eos_token_id]
            return ScriptedTurn(turn[: request.limit], finish="stop" if request.limit >= 6 else "length")

        engines.append(ScriptedEngine(script))
        engines[-1].context_length = context
        return vLLMWrapper(engines[-1], tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})

    yield build
    for engine in engines:
        engine.close()


def test_a_prompt_without_room_ends_its_row_and_no_other(make_env: Callable, make_policy: Callable) -> None:
    env, policy = make_env(max_tokens=64), make_policy()
    collector = LLMCollector(env, policy, total_dialog_turns=-1)
    for _ in range(2):  # the group is not drawn again
        rows = collector.collect()
        long = [row for row in rows.unbind(0) if not int(row[keys.NUM_TURNS])]
        assert reasons(rows) == ["total_tokens"] * 6 and len(long) == G
        assert all(row[keys.REWARD].isnan() and len(row[keys.TOKENS]) == 64 for row in long)
        assert int(rows[keys.REWARD].isnan().sum()) == G
    assert env.base_env.counts["env/long_prompts"] == 2 * G
    collector.shutdown()


def test_a_reset_by_hand_refuses_a_prompt_without_room(make_env: Callable, bpe, query_rows: Callable, user) -> None:
    with pytest.raises(ValueError, match="a prompt of .* tokens leaves the policy none of max_tokens=64; drop long"):
        make_env(max_tokens=64).reset()
    env = ChatEnv(bpe, max_tokens=64)
    env.context_length = 32
    with pytest.raises(ValueError, match="none of context_length=32"):
        env.reset(query_rows(user("c" * 100)))


def test_rows_that_are_done_at_their_reset_can_be_finished(make_env: Callable) -> None:
    env = make_env(max_tokens=64)
    stepper = RowStepper(env)
    _, group, _ = env.primer.draw_groups(3)
    rows = open_rows(env, group)
    assert rows["done"].all() and rows["truncated"].all() and rows[keys.GROUP_ID].tolist() == [1, 1]
    ended = [stepper.truncate(row, stop_reason(row)) for row in rows.unbind(0)]
    stepper.finish(ended)
    assert all(row[keys.REWARD].isnan() and row[keys.REWARDS].isnan().all() for row in ended)


def test_the_context_of_the_engine_is_a_limit_of_the_conversation(make_env: Callable, make_policy: Callable) -> None:
    def play(context: int | None, **settings) -> list[tuple]:
        env = make_env(num_generations=2, prompts_per_batch=1, **settings)
        collector = LLMCollector(env, make_policy(context))
        rows = collector.collect().unbind(0)
        collector.shutdown()
        kept = [(stop_reason(r), r[keys.TOKENS].tolist(), r[keys.ACTION_MASK].tolist()) for r in rows]
        assert all(reason == "total_tokens" for reason, _, _ in kept)
        return kept

    for limit in range(40, 80, 3):  # in the middle of turns and of feedback
        expected = play(None, max_tokens=limit)
        assert play(limit) == expected == play(limit, max_tokens=500) == play(500, max_tokens=limit)
        assert max(len(tokens) for _, tokens, _ in expected) <= limit


def test_a_conversation_that_outgrows_vllms_context(vllm_engines, tokenizer) -> None:
    """Without ``max_tokens``, the engine's context ends conversations and long prompts, and no request is refused."""
    queries = [[{"role": "user", "content": "1" * n}] for n in (1, 30, 300)]
    settings = {"prompts_per_batch": 3, "shuffle": False, "transforms": [FeedbackTransform(again)]}
    env = DatasetChatEnv(load_prompts([{"query": q} for q in queries]), tokenizer, **settings)
    policy = vLLMWrapper(
        vllm_engines.get(max_model_len=128), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 20, "seed": 0}
    )
    collector = LLMCollector(env, policy)
    rows = collector.collect()
    collector.shutdown()
    assert set(reasons(rows)) <= {"total_tokens", "turn_tokens", "answered"}
    assert not any(collector.runner.counts.values())
    lengths = [len(row[keys.TOKENS]) for row in rows.unbind(0)]
    long = rows[keys.NUM_TURNS].tolist().index(0)
    assert max(lengths) <= 128 and lengths[long] == 128 and stop_reason(rows[long]) == "total_tokens"


def test_policies_keep_to_their_context(make_policy: Callable, random_model, bpe) -> None:
    prompt = torch.tensor([[40] * 10])
    policy = make_policy(13)
    assert policy.context_length == 13
    assert len(policy(TensorDict({("tokens", "prompt"): prompt}, [1]))[0][keys.RESPONSE_TOKENS]) == 3
    with pytest.raises(ValueError, match="a prompt of 10 tokens leaves none of the policy's context_length=10"):
        make_policy(10)(TensorDict({("tokens", "prompt"): prompt}, [1]))
    own = TransformersWrapper(random_model, tokenizer=bpe, generate_kwargs={"max_new_tokens": 2048, "ignore_eos": True})
    assert own.context_length == 2048
    assert own._limit(TensorDict({("tokens", "prompt"): prompt}, [1])[0], 2040, own.context_length) == 8


class Game:
    """Environment whose opening depends on its seed: short, too long, or none at all."""

    steps = 0

    def reset(self, *, seed: int):
        if seed == 2:
            raise OSError("no server")
        return "c" * (600 if seed == 1 else 1), {}

    def step(self, action: str):
        Game.steps += 1
        return "c", 1.0, True, False, {}


def test_sessions_that_do_not_open_take_no_turn(bpe, make_policy: Callable) -> None:
    Game.steps = 0
    env = text_env(Game, bpe, prompts_per_batch=3, num_seeds=3, max_tokens=100, shuffle=False)
    policy = make_policy()
    collector = LLMCollector(env, policy)
    rows = collector.collect()
    assert sorted(reasons(rows)) == ["ended", "failed", "total_tokens"] and Game.steps == 1
    for row in rows.unbind(0):
        assert bool(row[keys.REWARD].isnan()) == (stop_reason(row) != "ended") == (not int(row[keys.NUM_TURNS]))
    assert len(policy.engine.requests) == 1, "nothing is sampled for the others"
    collector.shutdown()


# The end of a turn


@pytest.mark.parametrize("template", ["llama3", "chatml", "mistral"])
def test_a_turn_is_not_ended_twice(template: str, make_tokenizer: Callable) -> None:
    """A model may end its turn with another id than the template, e.g. ``<|eom_id|>`` or ``<|endoftext|>``."""
    tokenizer = make_tokenizer(template)
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def play(stop: int) -> list[int]:
        engine = ScriptedEngine(lambda request, index: ScriptedTurn([40, stop]))
        engine.stop_ids = (other,)
        dataset = load_prompts([{"query": [{"role": "user", "content": "a"}]}])
        env = DatasetChatEnv(
            dataset, tokenizer, prompts_per_batch=1, transforms=[FeedbackTransform(again)], max_turns=2
        )
        with engine:
            (row,) = LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer)).collect().unbind(0)
        assert int(row[keys.NUM_TURNS]) == 2
        return row[keys.TOKENS].tolist()

    expected, ids = play(tokenizer.eos_token_id), play(other)
    assert ids == [other if i == tokenizer.eos_token_id and a else i for i, a in _marked(expected)]


def _marked(ids: list[int]) -> list[tuple[int, bool]]:
    """Mark the ids that follow a sampled 40: the ends of turns."""
    return [(i, k > 0 and ids[k - 1] == 40) for k, i in enumerate(ids)]


def test_a_class_that_makes_a_policy_is_no_policy_yet(make_env: Callable) -> None:
    env = make_env()
    adapt_to_policy(env, vLLMWrapper)
    assert env.base_env.context_length is None
