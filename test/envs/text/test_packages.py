"""Environments of gymnasium and textarena, and what is said if a package is missing; others have their own programs."""

from __future__ import annotations

import asyncio
import random
from importlib.util import find_spec

import pytest

from support.environment_rows import collect
from torchrl_rloo.agents import AgentTransform
from torchrl_rloo.cli.config import DataConfig
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs.tasks import load_task
from torchrl_rloo.envs.text.adapters import EnvSession
from torchrl_rloo.envs.text.packages import Gymnasium, TextArena, random_player
from torchrl_rloo.modules import vLLMWrapper


def play(kind, row, turns):
    """Return the opening, what follows each turn, and the return of a game."""

    async def run():
        session = EnvSession(kind())
        said, total = [(await session.reset(row))[-1]["content"]], 0.0
        for turn in turns:
            outcome = await session.step(turn)
            said.append(None if outcome.feedback is None else outcome.feedback[0]["content"])
            total += outcome.reward
        await session.close()
        return said, total, outcome

    return asyncio.run(run())


def rows_of(task, **options):
    return load_task(task).load(eval_size=2, limit=6, **options)


def test_gymnasium_shows_drawings_and_takes_the_last_number():
    lake = {"render_mode": "ansi", "is_slippery": False}
    train, held_out = rows_of("gymnasium", name="FrozenLake-v1", arguments=lake)
    assert not {row["env_seed"] for row in train.rows} & {row["env_seed"] for row in held_out.rows}
    turns = ["left", "2", "I go 2", "9", "1", "1", "1", "2"]
    said, total, outcome = play(Gymnasium, train[0], turns)
    assert said[0] == "[S]FFF\nFHFH\nFFFH\nHFFG\n\n0\nAnswer with a number from 0 to 3."
    assert said[1] == said[4] == "Answer with a number from 0 to 3."
    assert said[2] == "(Right)\nS[F]FF\nFHFH\nFFFH\nHFFG\n\n1" and said[3].endswith("\n\n2")
    assert said[-1] is None and total == 1.0 and outcome.terminated


def test_rows_of_gymnasium_are_exact():
    train, _ = rows_of("gymnasium", name="Blackjack-v1", system_prompt="Play.")
    rows = collect(load_task("gymnasium"), train, max_turns=3)
    for row in rows.unbind(0):
        assert row["query"][0] == {"role": "system", "content": "Play."}
        assert row["query"][1]["content"].endswith("Answer with a number from 0 to 1.")
    assert int(rows[keys.NUM_TURNS].max()) > 1


def test_a_game_for_one_player():
    train, _ = rows_of("textarena", name="GuessTheNumber-v0", arguments={"max_number": 9})
    state = random.getstate()
    for row in train.rows:
        secret = random.Random(row["env_seed"]).randint(1, 9)  # as the game draws it
        said, total, outcome = play(TextArena, row, [f"I say [{n}]" for n in range(9, secret - 1, -1)])
        assert "between 1 and 9" in said[0] and said[1:] == ["The target number is lower."] * (9 - secret) + [None]
        assert total == 1.0 and outcome.terminated
    assert random.getstate() == state  # of the process
    rows = collect(load_task("textarena"), train, max_turns=4)
    assert int(rows[keys.NUM_TURNS].max()) > 1


def lowest(observation, rng):
    """Play the first free square."""
    return min(random_player(observation, rng) for _ in range(200))


@pytest.mark.parametrize("seat", [0, 1])
def test_a_game_against_an_opponent(seat):
    arguments = {"num_players": 2, "opponent": f"{__name__}.lowest"}
    train, _ = rows_of("textarena", name="TicTacToe-v0", arguments=arguments)
    row = next(row for row in train.rows if row["env_seed"] % 2 == seat)
    said, total, outcome = play(TextArena, row, ["4", "[2]", "so [6]"])
    other = f"[Player {1 - seat}]"
    assert f"You are Player {seat}" in said[0] and (f"{other} [0]" in said[0]) == (seat == 1)
    # Each move of the other once, none of the own, and nothing after the end
    expected = ["[1]", "[3]"] if seat else ["[0]", "[1]"]
    for text, move in zip(said[1:3], expected, strict=True):
        assert f"{other} {move}" in text and text.count("[Player") == 1 and "You are Player" not in text
    assert said[3] is None and outcome.terminated and total == 1.0 and outcome.metrics == {"won": True}
    # The same with moves at random, twice alike
    row = row | {"arguments": {"num_players": 2}}
    assert play(TextArena, row, ["4", "4"])[0] == play(TextArena, row, ["4", "4"])[0]


async def self_play(context, row):
    """Play a game with the policy in both roles, as docs/how-to/environments.md shows it."""
    game = TextArena()
    game.players = len(context.roles)
    game.begin(row["environment"], {}, row["env_seed"])
    talks, over = [[] for _ in context.roles], False
    while not over:
        role, talk = context.roles[game.player], talks[game.player]
        talk.append({"role": "user", "content": game.observe()})
        async with context.openai(role) as client:
            reply = await client.chat.completions.create(model=role, messages=talk)
        talk.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        over = game.play(talk[-1]["content"])
    return {"rewards": {role: game.rewards[player] for player, role in enumerate(context.roles)}}


def test_self_play_gives_rows_of_both_players():
    train, _ = rows_of("textarena", name="TicTacToe-v0", arguments={"num_players": 2})
    tokenizer = build_tokenizer()

    def script(request, index):
        text = tokenizer.decode(request.prompt)
        move = random_player(text, random.Random(text))
        return ScriptedTurn([*tokenizer.encode(move, add_special_tokens=False), tokenizer.eos_token_id])

    transforms = [AgentTransform(self_play, roles=["first", "second"])]
    env = load_task("textarena").env(train, tokenizer, prompts_per_batch=1, num_generations=2, transforms=transforms)
    with ScriptedEngine(script) as engine:
        collector = LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 9}))
        rows = collector.collect()
        collector.shutdown()
    first, second = ([r for r in rows.unbind(0) if r["role"] == role] for role in ("first", "second"))
    assert [float(r[keys.REWARD]) for r in first] == [-float(r[keys.REWARD]) for r in second]
    for row, other in zip(first, second, strict=True):
        assert 2 < int(row[keys.NUM_TURNS]) < 6 and 0 <= int(row[keys.NUM_TURNS]) - int(other[keys.NUM_TURNS]) <= 1
        sampled = row["tokens", "full"][row["masks", "all_assistant_mask"]].tolist()
        assert sampled.count(tokenizer.eos_token_id) == int(row[keys.NUM_TURNS])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("gymnasium", {}, "requires data.name"),
        ("gymnasium", {"name": "FrozenLake-v1", "split": "train"}, "data.split='train' has no effect"),
        (
            "gymnasium",
            {"name": "FrozenLake-v1", "arguments": {"size": 4}},
            "cannot open data.name='FrozenLake-v1'.*size",
        ),
        ("gymnasium", {"name": "Pendulum-v1"}, "actions are Box, not numbers"),
        ("textarena", {"name": "TicTacToe-v0"}, "number of players has to be 2"),
        ("textarena", {"name": "Chess"}, "Environment Chess not found"),
        ("openenv", {"name": "echo"}, "requires data.source"),
    ],
)
def test_wrong_settings_are_refused(task, options, message):
    with pytest.raises(ValueError, match=message):
        load_task(task).load(**options)


def test_arguments_are_refused_where_nothing_takes_them():
    with pytest.raises(ValueError, match=r"data.arguments=\{'a': 1\} has no effect with task=gsm8k"):
        DataConfig(source="embedded", arguments={"a": 1}).load(load_task("gsm8k"), build_tokenizer(), 0)


@pytest.mark.parametrize(
    ("task", "options"), [("openenv", {"source": "http://127.0.0.1:1"}), ("verifiers", {"name": "gsm8k"})]
)
def test_a_missing_package_names_its_extra(task, options):
    if find_spec(task) is not None:
        pytest.skip(f"{task} is installed")
    with pytest.raises(ImportError, match=rf"torchrl_rloo\[{task}\]"):
        load_task(task).load(**options)
