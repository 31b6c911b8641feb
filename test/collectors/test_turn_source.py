"""Tests of turn sources: requests to an engine, and batches for other policies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

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
        return await patiently(
            asyncio.gather(*(source.turn(r, (0, i)) for i, r in enumerate(rows)), return_exceptions=True)
        )

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
def batched() -> Callable[..., BatchedTurns]:
    """Make a source in which ``expected`` conversations may ask for a turn."""

    def make(policy, expected: int | list[int], *, eager: bool = False, version=lambda: 3, **kwargs) -> BatchedTurns:
        count = (lambda: expected[0]) if isinstance(expected, list) else (lambda: expected)
        return BatchedTurns(policy, version, count, eager=eager, **kwargs)

    return make


# Batches


@pytest.mark.parametrize("most", [None, 1, 2])
def test_a_batch_has_all_conversations_in_their_order(most: int | None, batched: Callable) -> None:
    """It begins with the last of them, so that its rows do not depend on the times at which they ask."""
    policy = Recorder()
    source = batched(policy, N, max_batch_size=most)

    async def main() -> list[TensorDictBase]:
        turns = {}
        for i in (3, 0, 4, 2, 1):
            assert most is not None or not policy.batches, "not all of them wait"
            turns[i] = asyncio.ensure_future(source.turn(row(i), (i // 2, i % 2)))
            await asyncio.sleep(0.01)
        return await patiently(asyncio.gather(*(turns[i] for i in range(N))))

    if most is None:
        assert [int(r["said"]) for r in asyncio.run(main())] == [0, 10, 20, 30, 40]
        assert policy.batches == [[0, 1, 2, 3, 4]]
        return
    # The maximum begins a batch earlier; those that are left wait for the others
    source.expected = lambda: min(N, max(1, len(source._waiting)))
    assert [int(r["said"]) for r in asyncio.run(main())] == [0, 10, 20, 30, 40]
    assert max(map(len, policy.batches)) <= most and sorted(sum(policy.batches, [])) == [0, 1, 2, 3, 4]


def test_an_ended_conversation_begins_the_batch_of_the_others(batched: Callable) -> None:
    policy, expected = Recorder(), [3]
    source = batched(policy, expected)

    async def main() -> None:
        turns = [asyncio.ensure_future(source.turn(row(i), (i, 0))) for i in (1, 0)]
        await asyncio.sleep(0.02)
        assert not policy.batches, "the third may ask"
        expected[0] = 2
        source.notify()
        await patiently(asyncio.gather(*turns))

    asyncio.run(main())
    assert policy.batches == [[0, 1]]


def test_an_eager_source_does_not_wait_for_all(batched: Callable) -> None:
    policy = Recorder()
    source = batched(policy, 100, eager=True)
    policy.may_go_on.clear()

    async def main() -> list[TensorDictBase]:
        first = asyncio.ensure_future(source.turn(row(0), (0, 0)))
        await until(policy.begun.is_set)
        others = [asyncio.ensure_future(source.turn(row(i), (i, 0))) for i in range(N - 1, 0, -1)]
        await asyncio.sleep(0)
        policy.may_go_on.set()
        return await patiently(asyncio.gather(first, *reversed(others)))

    assert [int(r["said"]) for r in asyncio.run(main())] == [0, 10, 20, 30, 40]
    assert policy.batches == [[0], [1, 2, 3, 4]]


def test_only_the_bad_row_of_a_batch_fails(batched: Callable) -> None:
    policy = Recorder(bad=(1, 3))
    rows = [row(i) for i in range(N)]
    outcomes = take(batched(policy, N), rows)
    assert [isinstance(o, ArithmeticError) for o in outcomes] == [False, True, False, True, False]
    assert [int(o["said"]) for o in outcomes if not isinstance(o, Exception)] == [0, 20, 40]
    assert all("said" not in r.keys() and keys.POLICY_VERSION not in r.keys() for r in rows), "left as they were"
    assert policy.batches == [[0, 1, 2, 3, 4], [0], [1], [2], [3], [4]]


def test_a_policy_that_loses_rows_fails(batched: Callable) -> None:
    (outcome,) = take(batched(lambda rows: rows[:0], 1), [row(0)])
    assert isinstance(outcome, ValueError) and "0 rows for 1" in str(outcome)


def test_cancelled_turns_are_not_sampled(batched: Callable) -> None:
    policy, expected = Recorder(), [1]
    source = batched(policy, expected)
    policy.may_go_on.clear()

    async def main() -> None:
        turns = [asyncio.ensure_future(source.turn(row(0), (0, 0)))]
        await until(policy.begun.is_set)
        turns += [asyncio.ensure_future(source.turn(row(i), (i, 0))) for i in (1, 2)]
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
    source = batched(policy, 1, version=lambda: version[0])
    policy.may_go_on.clear()
    pushing, pushed = threading.Event(), threading.Event()

    def push() -> None:
        pushing.set()
        with source.exclusive():
            version[0] = 1
            pushed.set()

    async def main() -> None:
        turn = asyncio.ensure_future(source.turn(row(0), (0, 0)))
        await until(policy.begun.is_set)
        pusher = threading.Thread(target=push, daemon=True)
        pusher.start()
        await until(pushing.is_set)
        assert not pushed.wait(0.05), "a batch is being sampled"
        policy.may_go_on.set()
        first = await patiently(turn)
        await until(pushed.is_set)
        second = await patiently(source.turn(row(1), (1, 0)))
        again = await patiently(source.turn(first, (0, 0)))
        assert [int(r[keys.POLICY_VERSION]) for r in (first, second, again)] == [0, 1, 0]

    asyncio.run(main())


def test_real_turns_do_not_depend_on_their_batch(batched: Callable, model, tokenizer) -> None:
    kwargs = {"max_new_tokens": 6, "temperature": 0.8}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs)
    rows = [row(i) for i in range(N)]
    alone = [policy(r.copy().unsqueeze(0))[0] for r in rows]
    for source in (batched(policy, N), batched(policy, 100, eager=True, max_batch_size=2)):
        for ours, theirs in zip(take(source, rows), alone, strict=True):
            assert ours[keys.TOKENS].tolist() == theirs[keys.TOKENS].tolist()
            torch.testing.assert_close(ours[keys.LOG_PROBS], theirs[keys.LOG_PROBS], rtol=0, atol=1e-5)


# Engines


def policy_of(engine, tokenizer, **kwargs) -> vLLMWrapper:
    return vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8} | kwargs)


def test_the_source_of_a_policy(model, tokenizer) -> None:
    make = partial(make_turn_source, version=lambda: 0, expected=lambda: 1, eager=False)
    with ScriptedEngine([]) as engine:
        assert isinstance(make(policy_of(engine, tokenizer)), EngineTurns)
    source = make(policy_of(TransformersEngine(model), tokenizer), max_batch_size=3)
    assert isinstance(source, BatchedTurns) and source.max_batch_size == 3
    assert isinstance(make(lambda rows: rows), BatchedTurns)
    several = TransformersWrapper(model, tokenizer=tokenizer, num_samples=2)
    with pytest.raises(ValueError, match="num_samples=2"):
        make(several)


def test_turns_of_an_engine_are_those_of_the_policy(model, tokenizer) -> None:
    """Turns that a pause interrupts and stop strings across the interruption are also equal."""
    stop = tokenizer.decode([20, 21])

    def script(request, index):
        return [ScriptedTurn([9, 20], finish="abort"), ScriptedTurn([21, 22]), ScriptedTurn([7])][min(index, 2)]

    outcomes = []
    for take_turn in (lambda p, r: p(r.unsqueeze(0))[0], lambda p, r: take(EngineTurns(p), [r])[0]):
        with ScriptedEngine(script) as engine:
            policy = policy_of(engine, tokenizer, stop_strings=[stop])
            outcomes.append((take_turn(policy, row(2)), engine.requests))
    (sync, theirs), (ours, requests) = outcomes
    assert requests == theirs and len(requests) == 2
    assert ours[keys.RESPONSE_TOKENS].tolist() == sync[keys.RESPONSE_TOKENS].tolist() == [9, 20, 21]
    assert set(ours.keys(True, True)) == set(sync.keys(True, True))


def test_a_request_is_cancelled_with_its_turn(tokenizer) -> None:
    with ScriptedEngine(lambda request, index: ScriptedTurn([3], latency=1e6)) as engine:
        source = EngineTurns(policy_of(engine, tokenizer))

        async def main() -> None:
            turns = [asyncio.ensure_future(source.turn(row(i), (i, 0))) for i in range(3)]
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
        outcomes = take(EngineTurns(policy_of(engine, tokenizer)), [row(i) for i in range(3)])
    assert [isinstance(o, EngineError) for o in outcomes] == [False, True, False]


def test_a_dead_engine_fails_all_turns(tokenizer, model, batched: Callable) -> None:
    """A batch is not retried row by row on a dead engine."""

    class Dead(TransformersEngine):
        calls = 0

        def generate(self, requests):
            Dead.calls += 1
            raise EngineDeadError("it is dead")

    with ScriptedEngine([]) as engine:
        engine.kill()
        for source in (EngineTurns(policy_of(engine, tokenizer)), batched(policy_of(Dead(model), tokenizer), 2)):
            assert all(isinstance(outcome, EngineDeadError) for outcome in take(source, [row(0), row(1)]))
    assert Dead.calls == 1
