"""Tests of turn sources: requests to an engine, batches for other policies, and restarts of dead engines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.collectors.turn_source import BatchedTurns, EngineTurns, TurnSource, make_turn_source
from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import EngineDeadError, EngineError
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.transformers_engine import TransformersEngine
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

PATIENCE = 60.0  # seconds, enough for a slow machine
N = 5


def row(i: int) -> TensorDictBase:
    prompt = torch.tensor([5 + i, 6, 7][: 1 + i % 3])
    return TensorDict({keys.PROMPT_TOKENS: prompt, keys.SEED: torch.tensor(100 + i), "i": torch.tensor(i)}, [])


async def patiently(work):
    return await asyncio.wait_for(work, PATIENCE)


def take(source: TurnSource, rows: list[TensorDictBase]) -> list:
    """Take all turns concurrently, with exceptions as results."""

    async def main() -> list:
        return await patiently(asyncio.gather(*map(source.turn, rows), return_exceptions=True))

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    await patiently(look())


class Recorder:
    """Policy that answers with one token and records its batches. It fails on rows of ``bad``."""

    def __init__(self, bad: tuple[int, ...] = ()):
        self.bad, self.batches = bad, []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def __call__(self, rows: TensorDictBase) -> TensorDictBase:
        self.batches.append([int(r["i"]) for r in rows.unbind(0)])
        self.begun.set()
        assert self.may_go_on.wait(PATIENCE)
        for r in rows.unbind(0):
            r.set("said", torch.tensor(int(r["i"]) * 10))
        if bad := [i for i in self.batches[-1] if i in self.bad]:
            raise ArithmeticError(f"cannot say anything on {bad}")
        return rows


@pytest.fixture
def batched() -> Iterator[Callable[..., BatchedTurns]]:
    made: list[BatchedTurns] = []

    def make(policy, **kwargs) -> BatchedTurns:
        made.append(BatchedTurns(policy, kwargs.pop("version", lambda: 3), **kwargs))
        return made[-1]

    yield make
    for source in made:
        source.close()
        assert source._thread is None or not source._thread.is_alive()


# Batches


@pytest.mark.parametrize("most", [None, 1, 2])
def test_rows_that_wait_are_taken_together(most: int | None, batched: Callable) -> None:
    policy = Recorder()
    source = batched(policy, max_batch_size=most)
    policy.may_go_on.clear()

    async def main() -> list[TensorDictBase]:
        first = asyncio.ensure_future(source.turn(row(0)))
        await until(policy.begun.is_set)
        others = [asyncio.ensure_future(source.turn(row(i))) for i in range(1, N)]
        await asyncio.sleep(0)
        policy.may_go_on.set()
        return await patiently(asyncio.gather(first, *others))

    assert [int(r["said"]) for r in asyncio.run(main())] == [0, 10, 20, 30, 40]
    expected = {None: [[0], [1, 2, 3, 4]], 1: [[0], [1], [2], [3], [4]], 2: [[0], [1, 2], [3, 4]]}
    assert policy.batches == expected[most]


def test_only_the_bad_row_of_a_batch_fails(batched: Callable) -> None:
    policy = Recorder(bad=(1, 3))
    rows = [row(i) for i in range(N)]
    outcomes = take(batched(policy), rows)
    assert [isinstance(o, ArithmeticError) for o in outcomes] == [False, True, False, True, False]
    assert [int(o["said"]) for o in outcomes if not isinstance(o, Exception)] == [0, 20, 40]
    assert all("said" not in r.keys() and keys.POLICY_VERSION not in r.keys() for r in rows), "left as they were"


def test_a_policy_that_loses_rows_fails(batched: Callable) -> None:
    (outcome,) = take(batched(lambda rows: rows[:0]), [row(0)])
    assert isinstance(outcome, ValueError) and "0 rows for 1" in str(outcome)


def test_cancelled_turns_are_not_sampled(batched: Callable) -> None:
    policy = Recorder()
    source = batched(policy)
    policy.may_go_on.clear()

    async def main() -> None:
        turns = [asyncio.ensure_future(source.turn(row(0)))]
        await until(policy.begun.is_set)
        turns += [asyncio.ensure_future(source.turn(row(i))) for i in (1, 2)]
        await asyncio.sleep(0)
        for turn in turns[:2]:
            turn.cancel()
        await patiently(asyncio.wait(turns[:2]))
        policy.may_go_on.set()
        assert int((await patiently(turns[2]))["said"]) == 20

    asyncio.run(main())
    assert policy.batches == [[0], [2]]


def test_weights_change_between_batches_only(batched: Callable) -> None:
    """A row has the version that sampled its first turn."""
    policy, version = Recorder(), [0]
    source = batched(policy, version=lambda: version[0])
    policy.may_go_on.clear()
    pushing, pushed = threading.Event(), threading.Event()

    def push() -> None:
        pushing.set()
        with source.exclusive():
            version[0] = 1
            pushed.set()

    async def main() -> None:
        turns = [asyncio.ensure_future(source.turn(row(0)))]
        await until(policy.begun.is_set)
        pusher = threading.Thread(target=push, daemon=True)
        pusher.start()
        await until(pushing.is_set)
        assert not pushed.wait(0.05), "a batch is being sampled"
        policy.may_go_on.set()
        first = await patiently(turns[0])
        await until(pushed.is_set)
        second = await patiently(source.turn(row(1)))
        again = await patiently(source.turn(first))
        assert [int(r[keys.POLICY_VERSION]) for r in (first, second, again)] == [0, 1, 0]

    asyncio.run(main())


def test_real_turns_do_not_depend_on_their_batch(batched: Callable, model, tokenizer, prompt_rows: Callable) -> None:
    kwargs = {"max_new_tokens": 6, "temperature": 0.8}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    rows = [row(i) for i in range(N)]
    alone = [policy(r.copy().unsqueeze(0))[0] for r in rows]
    for most in (None, 1, 2):
        for ours, theirs in zip(take(batched(policy, max_batch_size=most), rows), alone, strict=True):
            assert ours[keys.TOKENS].tolist() == theirs[keys.TOKENS].tolist()
            torch.testing.assert_close(ours[keys.LOG_PROBS], theirs[keys.LOG_PROBS], rtol=0, atol=1e-5)


# Engines


def policy_of(engine, tokenizer, recover=None, **kwargs) -> vLLMWrapper:
    return vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8} | kwargs, recover=recover)


def test_the_source_of_a_policy(model, tokenizer) -> None:
    version = lambda: 0  # noqa: E731
    with ScriptedEngine([]) as engine:
        assert isinstance(make_turn_source(policy_of(engine, tokenizer), version), EngineTurns)
    source = make_turn_source(policy_of(TransformersEngine(model), tokenizer), version, max_batch_size=3)
    assert isinstance(source, BatchedTurns) and source.max_batch_size == 3
    assert isinstance(make_turn_source(lambda rows: rows, version), BatchedTurns)
    several = TransformersWrapper(model, tokenizer=tokenizer, num_samples=2)
    with pytest.raises(ValueError, match="num_samples=2"):
        make_turn_source(several, version)
    with pytest.raises(ValueError, match="max_batch_size=0"):
        make_turn_source(lambda rows: rows, version, max_batch_size=0)


def test_turns_of_an_engine_are_those_of_the_policy(model, tokenizer) -> None:
    """Turns that a pause interrupts and stop strings across the interruption are also equal."""
    stop = tokenizer.decode([20, 21])

    def script(request, index):
        return [ScriptedTurn([9, 20], finish="abort"), ScriptedTurn([21, 22]), ScriptedTurn([7])][min(index, 2)]

    outcomes = []
    for take_turn in (lambda p, r: p(r.unsqueeze(0))[0], lambda p, r: take(EngineTurns(p, lambda: 0), [r])[0]):
        with ScriptedEngine(script) as engine:
            policy = policy_of(engine, tokenizer, stop_strings=[stop])
            outcomes.append((take_turn(policy, row(2)), engine.requests))
    (sync, theirs), (ours, requests) = outcomes
    assert requests == theirs and len(requests) == 2
    assert ours[keys.RESPONSE_TOKENS].tolist() == sync[keys.RESPONSE_TOKENS].tolist() == [9, 20, 21]
    assert set(ours.keys(True, True)) == set(sync.keys(True, True))


def test_a_request_is_made_at_once_and_given_up_with_its_turn(tokenizer) -> None:
    with ScriptedEngine(lambda request, index: ScriptedTurn([3], latency=1e6)) as engine:
        source = EngineTurns(policy_of(engine, tokenizer), lambda: 0)

        async def main() -> None:
            turns = [asyncio.ensure_future(source.turn(row(i))) for i in range(3)]
            await until(lambda: len(engine.requests) == 3 and len(engine._running) == 3)
            for turn in turns:
                turn.cancel()
            await patiently(asyncio.wait(turns))
            await until(lambda: not engine._running)

        asyncio.run(main())


def test_one_request_that_fails_fails_its_turn(tokenizer) -> None:
    def script(request, index):
        return ScriptedTurn([3], error=EngineError("too long") if index == 1 else None)

    with ScriptedEngine(script) as engine:
        outcomes = take(EngineTurns(policy_of(engine, tokenizer), lambda: 0), [row(i) for i in range(3)])
    assert [isinstance(o, EngineError) for o in outcomes] == [False, True, False]


@pytest.mark.parametrize("kind", ["requests", "batches"])
def test_a_dead_engine_is_brought_back_once_for_all(kind: str, model, tokenizer, batched: Callable) -> None:
    deaths = []

    def recover() -> None:
        deaths.append(1)
        if len(deaths) == 1:
            raise EngineError("not this time")
        if kind == "requests":
            engine.restart()
        else:
            engine.dead = False

    class Mortal(TransformersEngine):
        dead = True

        def generate(self, requests):
            if self.dead:
                raise EngineDeadError("it is dead")
            return super().generate(requests)

    called = threading.Event()
    if kind == "requests":
        engine = ScriptedEngine(lambda request, index: ScriptedTurn([3, 4]))
        engine.kill()
        source = EngineTurns(policy_of(engine, tokenizer, recover), lambda: 0, called.set)
    else:
        engine = Mortal(model)
        source = batched(policy_of(engine, tokenizer, recover), on_death=called.set)

    async def main() -> list[TensorDictBase]:
        turns = [asyncio.ensure_future(source.turn(row(i))) for i in range(N)]
        await until(lambda: called.is_set() and len(source._waiting) == N)
        assert deaths == [], "who trains the model says when"
        with pytest.raises(EngineError, match="not this time"):
            await asyncio.to_thread(source.recover)
        await asyncio.to_thread(source.recover)
        await asyncio.to_thread(source.recover)
        return await patiently(asyncio.gather(*turns))

    with engine:
        assert all(len(r[keys.RESPONSE_TOKENS]) for r in asyncio.run(main()))
    assert len(deaths) == 2 and source.death is None


def test_a_death_without_a_way_back_is_raised(tokenizer) -> None:
    with ScriptedEngine([]) as engine:
        engine.kill()
        assert all(
            isinstance(o, EngineDeadError)
            for o in take(EngineTurns(policy_of(engine, tokenizer), lambda: 0), [row(0), row(1)])
        )
