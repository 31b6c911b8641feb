"""Tests of limits on conversations in flight: fixed ones, and those that follow the engine's load."""

from __future__ import annotations

import asyncio
import random

import pytest

from torchrl_rloo.collectors import AdaptiveConcurrency
from torchrl_rloo.collectors.concurrency import Slots
from torchrl_rloo.engines.base import EngineLoad


def load(waiting: int = 0, kv_usage: float = 0.1, preemptions: int = 0) -> EngineLoad:
    return EngineLoad(running=1, waiting=waiting, kv_usage=kv_usage, preemptions=preemptions, tokens=0)


def test_the_limit_follows_the_engine() -> None:
    limit = AdaptiveConcurrency(4, 20)
    assert [limit.update(load(), in_flight=limit.limit) for _ in range(9)] == [5, 6, 7, 8, 10, 12, 15, 18, 20]
    assert limit.update(load(), in_flight=20) == 20, "the maximum"
    assert [limit.update(load(preemptions=n), 20) for n in (1, 1, 2, 5)] == [15, 18, 13, 9], "only new preemptions"
    for busy in (load(waiting=1, preemptions=5), load(kv_usage=0.95, preemptions=5)):
        assert limit.update(busy, in_flight=9) == 9
    assert limit.update(load(preemptions=5), in_flight=8) == 9, "it is not reached"
    assert [limit.update(load(preemptions=n), 9) for n in range(6, 10)] == [6, 4, 4, 4], "the minimum"
    assert AdaptiveConcurrency(4).update(load(preemptions=3), 4) == 4, "preemptions before the first look count"


@pytest.mark.parametrize("kwargs", [{"minimum": 0}, {"minimum": 9, "maximum": 8}, {"period": 0.0}], ids=str)
def test_numbers_are_checked(kwargs: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        AdaptiveConcurrency(**kwargs)
    with pytest.raises(ValueError, match="requires a policy over an AsyncEngine"):
        Slots(AdaptiveConcurrency())


def test_conversations_enter_in_their_order() -> None:
    async def main() -> list[int]:
        slots, entered, leave = Slots(2), [], [asyncio.Event() for _ in range(6)]

        async def converse(i: int) -> None:
            async with slots:
                entered.append(i)
                await leave[i].wait()

        tasks = [asyncio.ensure_future(converse(i)) for i in range(6)]
        await asyncio.sleep(0)
        assert entered == [0, 1] and slots.in_flight == 2
        tasks[2].cancel()
        leave[1].set()
        leave[0].set()
        await asyncio.sleep(0.01)
        assert entered == [0, 1, 3, 4] and slots.in_flight == 2
        for event in leave:
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.in_flight == 0
        return entered

    assert asyncio.run(main()) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_cancellations_leak_and_exceed_no_place(seed: int) -> None:
    """A place that is granted to a conversation in the instant of its cancellation goes to the next one."""

    async def main() -> None:
        rng, slots, most, entered = random.Random(seed), Slots(3), 0, 0

        async def converse() -> None:
            nonlocal most, entered
            async with slots:
                entered += 1
                most = max(most, slots.in_flight)
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)

        tasks = []
        for _ in range(300):
            tasks.append(asyncio.ensure_future(converse()))
            if rng.random() < 0.5:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert most == 3 and entered > 100 and slots.in_flight == 0
        async with slots:
            assert slots.in_flight == 1

    asyncio.run(main())


def test_waiting_conversations_enter_as_the_limit_grows() -> None:
    async def main() -> None:
        loads = [load(), load(), load(preemptions=1), load(preemptions=1, waiting=2)]
        limit = AdaptiveConcurrency(2, 8, period=0.01)
        slots = Slots(limit, lambda: loads.pop(0) if len(loads) > 1 else loads[0])
        seen, leave = [], asyncio.Event()

        async def converse() -> None:
            async with slots:
                seen.append(slots.in_flight)
                await leave.wait()

        tasks = [asyncio.ensure_future(converse()) for _ in range(9)]
        await asyncio.sleep(0.2)
        assert seen == [1, 2, 3, 4] and slots.limit == 3, "grown twice, then shrunk"
        leave.set()
        await asyncio.gather(*tasks)
        assert len(seen) == 9 and max(seen[4:]) <= 4

    asyncio.run(main())


def test_a_collector_follows_the_load_of_its_engine(scripted, monkeypatch) -> None:
    looks = []

    def report() -> EngineLoad:
        looks.append(1)
        return load()

    collector = scripted(max_in_flight=AdaptiveConcurrency(1, 4, period=0.001), groups_per_batch=6)
    monkeypatch.setattr(collector.runner.slots, "_load", report)
    assert len(collector.collect()) == 12
    assert 1 <= collector.runner.slots.limit <= 4
    with pytest.raises(ValueError, match="minimum=5 and maximum=4"):
        scripted(max_in_flight=AdaptiveConcurrency(5, 4))
