"""Environments and collectors over scripted engines and over a random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from torchrl.envs import Transform

from support.collecting import G, words
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform, KLRewardTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

PROMPTS = 7
REPLY = [{"role": "user", "content": "again"}]


@pytest.fixture(scope="session")
def numbered_prompts(user: Callable):
    """Seven prompts, with columns ``answer``, their number, and ``turns``, one to three."""
    return load_prompts([{"query": user("a" * (i + 1)), "answer": i, "turns": 1 + i % 3} for i in range(PROMPTS)])


@pytest.fixture(scope="session")
def make_env(bpe, numbered_prompts) -> Callable[..., DatasetChatEnv]:
    """Make an environment of two groups of two, whose conversations have one to three turns depending on the prompt."""

    def build(*transforms: Transform, after: tuple = (), rewards=words, shuffle: bool = False, **kwargs):
        if not transforms:
            transforms = [FeedbackTransform(lambda c, row: REPLY if len(c) < 2 * row["turns"] else None)]
        settings = {"prompts_per_batch": 2, "num_generations": G} | kwargs
        return DatasetChatEnv(
            numbered_prompts,
            bpe,
            rewards=rewards,
            transforms=transforms,
            after_rewards=after,
            shuffle=shuffle,
            **settings,
        )

    return build


@pytest.fixture
def scripted(make_env, bpe) -> Iterator[Callable[..., LLMCollector]]:
    """Make a collector over a scripted engine. Turns have no latency, and by default three tokens of the prompt."""
    engines: list[ScriptedEngine] = []
    collectors: list[LLMCollector] = []

    def script(request, index) -> ScriptedTurn:
        ids = [30 + (sum(request.prompt) + k) % 60 for k in range(2)]
        return ScriptedTurn([*ids, bpe.eos_token_id], [-0.5, -1.0, -0.25])

    def build(*transforms, play=script, env=None, engine=None, updater=None, **kwargs) -> LLMCollector:
        names = ("rewards", "after", "epochs", "max_seconds", "max_tokens", "prompts_per_batch", "num_generations")
        env = env or make_env(*transforms, **{n: kwargs.pop(n) for n in (*names, "shuffle") if n in kwargs})
        engines.append(engine or ScriptedEngine(play))
        policy = vLLMWrapper(engines[-1], tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
        sender = None if updater is None else updater(engines[-1])
        collectors.append(LLMCollector(env, policy, weight_updater=sender, **kwargs))
        collectors[-1].engine = engines[-1]
        return collectors[-1]

    yield build
    for collector in collectors:
        collector.shutdown()
    for engine in engines:
        engine.close()


def length_reward(completion_ids, **_) -> list[float]:
    return [float(len(c)) for c in completion_ids]


def first_only(completions, **_) -> list[float | None]:
    return [1.0 if i == 0 else None for i in range(len(completions))]


@pytest.fixture
def modeled(random_model, bpe, numbered_prompts) -> Iterator[Callable[..., LLMCollector]]:
    """Make a collector of two groups of three, with ``turns`` of one token each or one turn of up to six."""
    made: list[LLMCollector] = []

    def build(*, turns: int = 0, epochs: int | None = None, env=None, model=random_model, seed=0, **kwargs):
        settings = {"max_new_tokens": 6, "seed": seed}
        transforms = []
        if turns:
            settings = {"max_new_tokens": 1, "stop_token_ids": list(range(len(bpe))), "seed": seed}
            transforms = [
                FeedbackTransform(lambda c, row: REPLY if len(c) < 2 * turns else None, max_turns=turns),
            ]
        ref = TransformersWrapper(random_model, tokenizer=bpe, generate=False)
        env = env or DatasetChatEnv(
            numbered_prompts,
            bpe,
            prompts_per_batch=2,
            num_generations=3,
            epochs=epochs,
            transforms=transforms,
            rewards=[length_reward, first_only],
            after_rewards=[KLRewardTransform(ref, 0.0)],
        )
        made.append(LLMCollector(env, TransformersWrapper(model, tokenizer=bpe, generate_kwargs=settings), **kwargs))
        return made[-1]

    yield build
    for collector in made:
        collector.shutdown()
