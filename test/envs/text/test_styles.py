"""One game in every known style: all give the same rows to the last token, and unknown styles are refused."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from torchrl_rloo.data import keys, load_prompts, stack_rows
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.envs.text import Outcome, TextSession, text_env
from torchrl_rloo.envs.text.adapters import detect_style, wrap
from torchrl_rloo.envs.text.games import GuessNumber
from torchrl_rloo.replay import ZeroSignalFilter

# The game: "go on" is answered by "turn <n>" and earns 0.5; "stop" ends it and earns 2.
OPENING = "Say go on, or stop."


class Gymnasium:
    def reset(self, *, seed=None, options=None):
        self.n = 0
        return OPENING, {}

    def step(self, action: str):
        self.n += 1
        stops = action == "stop"
        return f"turn {self.n}", 2.0 if stops else 0.5, stops, False, {"n": self.n}


class OldGym(Gymnasium):
    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        return super().reset()[0]

    def step(self, action: str):
        assert isinstance(self.seeded, int)
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class Plain(OldGym):
    def step(self, action: str):
        return super().step(action)[:3]


class AsyncGym(Gymnasium):
    async def reset(self, seed=None):
        await asyncio.sleep(0)
        return super().reset()

    async def step(self, action: str):
        await asyncio.sleep(0)
        return super().step(action)


@dataclass
class Action:
    text: str


@dataclass
class Observation:
    text: str


@dataclass
class Result:
    observation: Observation
    reward: float | None = None
    done: bool = False


class OpenEnvClient:
    """Async client with classes of actions and observations, and a reset result without a reward."""

    def __init__(self):
        self.game, self.closed = Gymnasium(), False

    async def reset(self, **kwargs: Any) -> Result:
        assert set(kwargs) == {"seed"}
        return Result(Observation(self.game.reset()[0]))

    async def step(self, action: Action, **kwargs: Any) -> Result:
        observation, reward, done, _, _ = self.game.step(action.text)
        return Result(Observation(observation), reward, done)

    async def close(self) -> None:
        self.closed = True


class SyncOpenEnvClient(OpenEnvClient):
    def reset(self, **kwargs):
        return Result(Observation(self.game.reset()[0]))

    def step(self, action: Action, **kwargs):
        observation, reward, done, _, _ = self.game.step(action.text)
        return Result(Observation(observation), reward, done)

    def close(self):
        self.closed = True


class AgentInstance:
    """Agent with an awaited constructor and tensor rewards, as in OpenRLHF's examples."""

    async def __init__(self, *args, **kwargs):
        self.game = Gymnasium()

    async def reset(self, states: dict, **kwargs):
        return {"observation": self.game.reset()[0]}

    async def step(self, states: dict, **kwargs) -> dict[str, Any]:
        assert OPENING in states["observation_text"] and states["action_text"] not in ("", None)
        observation, reward, done, _, info = self.game.step(states["action_text"])
        return {
            "rewards": torch.tensor([reward]),
            "scores": torch.tensor(reward),
            "environment_feedback": observation,
            "done": done,
            "sampling_params": states.get("sampling_params"),
            "extra_logs": {"n": torch.tensor(info["n"])},
        }


async def rollout(row, generate) -> float:
    messages = [{"role": "user", "content": OPENING}]
    reward = n = 0
    while True:
        said = await generate(messages)
        if said == "stop":
            return reward + 2.0
        n += 1
        reward += 0.5
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"turn {n}"}]


class Session(TextSession):
    async def reset(self, row):
        self.game = Gymnasium()
        return self.game.reset()[0]

    async def step(self, text):
        observation, reward, done, _, _ = self.game.step(text)
        return Outcome(observation, reward, done)


async def opened_elsewhere():
    await asyncio.sleep(0)
    return Gymnasium()


def say(turn: int, prompt: str) -> str:
    return "go on" if turn < 3 else "stop"


def text(observation: Observation) -> str:
    return observation.text


OPENENV = {"action": Action, "observe": text}
STYLES: list[tuple[Any, str, dict]] = [
    (Gymnasium, "env", {}),
    (Gymnasium(), "env", {}),
    (lambda: Gymnasium(), "env", {}),
    (partial(Gymnasium), "env", {}),
    (opened_elsewhere, "env", {}),
    (OldGym, "env", {}),
    (Plain, "env", {}),
    (AsyncGym, "env", {}),
    (OpenEnvClient, "env", OPENENV),
    (SyncOpenEnvClient, "env", OPENENV),
    (AgentInstance, "openrlhf", {}),
    (rollout, "rollout", {}),
    (Session, "session", {}),
    (lambda: Session(), "session", {}),
]


@pytest.mark.parametrize(
    ("environment", "style", "settings"), STYLES, ids=[f"{i}-{style}" for i, (_, style, _) in enumerate(STYLES)]
)
def test_the_same_game_in_any_style_gives_the_same_rows(environment, style, settings, play: Callable, tokenizer):
    for named in (None, style):
        kwargs = dict(settings, prompts_per_batch=1, num_generations=2)
        rows = play(text_env(environment, tokenizer, style=named, **kwargs), say)
        for row in rows:
            said = ["go on", "turn 1", "go on", "turn 2", "go on", "turn 3", "stop"]
            assert row[keys.QUERY] == [{"role": "user", "content": OPENING}]
            assert [m["content"] for m in row[keys.COMPLETION]] == said
            conversation = [*row[keys.QUERY], *row[keys.COMPLETION]]
            ids = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
            assert row[keys.TOKENS].tolist() == list(ids)[:-1]  # the template ends in a newline
            assert float(row[keys.REWARD]) == 3.5
            assert stop_reason(row) == "ended" and bool(row[keys.TERMINATED]) and int(row[keys.NUM_TURNS]) == 4


def test_scores_of_an_agent_may_decide_which_groups_are_dropped(play: Callable, tokenizer):
    """As OpenRLHF's dynamic filtering does; the rewards are equal in all groups."""
    number = itertools.count()

    class Agent:
        async def reset(self, states):
            return states

        async def step(self, states):
            score = float(states["label"] == "mixed" and next(number) % 2)
            return {"rewards": 1.0, "scores": torch.tensor([score]), "environment_feedback": "", "done": True}

    def scores(rows):
        return torch.tensor([row["next", "log_extra"]["scores"] for row in rows.unbind(0)])

    prompts = load_prompts(
        [{"query": [{"role": "user", "content": label}], "label": label} for label in ("mixed", "flat")]
    )
    env = text_env(Agent, tokenizer, prompts_per_batch=2, num_generations=4, dataset=prompts)
    rows = stack_rows(play(env, say))
    signal = ZeroSignalFilter(returns=scores)
    assert {row["label"] for row in signal.keep_informative(rows).unbind(0)} == {"mixed"}
    assert signal.counts == {"zero_signal/kept": 1, "zero_signal/all_wrong": 1}


def test_what_is_no_environment_gets_the_list_of_styles():
    async def one_argument(row):
        return 0.0

    for wrong in (3, object(), dict, lambda a, b: 0, one_argument):
        with pytest.raises(ValueError, match="style= to one of .*'env': reset and step.*'rollout': async def rollout"):
            wrap(wrong)
    with pytest.raises(ValueError, match="style='gym' is unknown"):
        wrap(Gymnasium, style="gym")
    with pytest.raises(ValueError, match=r"\['action'\] cannot be combined with style='rollout'"):
        wrap(rollout, action=Action)


def test_a_factory_of_something_else_is_told_at_the_first_reset(tokenizer):
    env = text_env(lambda: object(), tokenizer, prompts_per_batch=1, num_generations=2)
    with pytest.raises(RuntimeError, match="none of 2 sessions could be opened.*has no known style"):
        env.reset()


def test_agents_are_told_from_environments():
    class Async:
        async def reset(self, state_dict): ...

        async def step(self, state_dict, **kwargs): ...

    class AgentInstanceBase:
        async def reset(self, states): ...

    class Inherits(AgentInstanceBase):
        async def step(self, s): ...

    assert detect_style(Async) == detect_style(Inherits) == detect_style(Async()) == "openrlhf"
    assert detect_style(AsyncGym) == detect_style(GuessNumber()) == "env"


def test_columns_reach_reset_by_name(play: Callable, tokenizer):
    seen = []

    class Named:
        def reset(self, word, seed):
            seen.append((word, seed))
            return f"say {word}"

        def step(self, action):
            return None, float(action == "w1"), True

    class WithOptions(Named):
        def reset(self, *, seed=None, options=None):
            return Named.reset(self, options["word"], seed), {}

    class Anything(Named):
        def reset(self, **kwargs):
            return Named.reset(self, kwargs.pop("word"), kwargs.pop("seed")), {}

    dataset = load_prompts([{"query": f"q{i}", "word": f"w{i}"} for i in range(3)], chat=True)
    kwargs = dict(dataset=dataset, prompts_per_batch=3, num_generations=2, shuffle=False)
    for kind in (Named, WithOptions, Anything):
        seen.clear()
        rows = play(text_env(kind, tokenizer, **kwargs), lambda turn, prompt: "w1")
        assert all(float(row[keys.REWARD]) == 1.0 for row in rows)
        words = ["w0", "w0", "w1", "w1", "w2", "w2"]
        assert [row["word"] for row in rows] == words
        assert [row[keys.QUERY][0]["content"] for row in rows] == [f"say {word}" for word in words]
        assert len(set(seen)) == 3  # the same row always has the same seed


def test_an_environment_that_cannot_be_copied_says_so(tokenizer):
    class Held(Gymnasium):
        def __deepcopy__(self, memo):
            raise OSError("a socket")

    env = text_env(Held(), tokenizer, prompts_per_batch=1)
    with pytest.raises(RuntimeError, match="Held cannot be copied.*a socket.*pass its class"):
        env.reset()


def test_the_old_gyms_time_limit_truncates(play: Callable, tokenizer):
    class Limited(OldGym):
        def step(self, action):
            return "too late", 0.25, True, {"TimeLimit.truncated": True}

    row = play(text_env(Limited, tokenizer, prompts_per_batch=1), say)[0]
    assert stop_reason(row) == "turns" and bool(row[keys.TRUNCATED]) and not bool(row[keys.TERMINATED])
    assert float(row[keys.REWARD]) == 0.25


def test_an_end_together_with_a_limit_is_an_end(play: Callable, tokenizer):
    class Both:
        def reset(self, *, seed=None):
            return "go", {}

        def step(self, action):
            return "over", 0.5, True, True, {}

    row = play(text_env(Both, tokenizer, prompts_per_batch=1), say)[0]
    assert stop_reason(row) == "ended" and bool(row[keys.TERMINATED]) and not bool(row[keys.TRUNCATED])
