"""Waits of a collector on a scripted load, whose engine, tools and rewards alone advance the clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.collecting import G
from torchrl_rloo.collectors.waits import CollectorWaits
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.engines.occupancy import Occupancy, OccupancyMeter, Reading
from torchrl_rloo.envs.activity import STATES, Activity, Profile, spending
from torchrl_rloo.envs.turn_transform import TurnTransform

ENGINE_S, ENVIRONMENT_S, TOOLS_S, REWARDS_S = 2.0, 3.0, 4.0, 1.0


class Clock:
    def __init__(self):
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


class Slow(TurnTransform):
    """Transform that takes time, some of it in a tool."""

    def __init__(self, clock: Clock, tools_s: float):
        super().__init__()
        self.clock, self.tools_s = clock, tools_s

    async def step_row(self, row, next_row) -> None:
        self.clock.wait(ENVIRONMENT_S)
        if self.tools_s:
            with spending("tools"):
                self.clock.wait(self.tools_s)


@pytest.fixture
def clocked(scripted, bpe):
    """``clocked(tools_s)``: a collector of one group of two, and the clock of all its measurements."""

    def build(tools_s: float = 0.0):
        clock = Clock()

        def play(request, index) -> ScriptedTurn:
            clock.wait(ENGINE_S)
            return ScriptedTurn([40, bpe.eos_token_id])

        def rewards(completions, **_) -> list[float]:
            clock.wait(REWARDS_S)
            return [1.0] * len(completions)

        # One conversation after the other, so that each second has two of them in known states
        collector = scripted(Slow(clock, tools_s), play=play, rewards=rewards, prompts_per_batch=1, max_in_flight=1)
        runner, ledger = collector.runner, collector.ledger
        runner.activity, runner.source.occupancy, ledger.finished = Activity(clock), Occupancy(clock), Occupancy(clock)
        collector.waits = CollectorWaits(runner, ledger.finished, collector.policy, clock)
        return collector, clock

    return build


def test_shares_of_a_known_load(clocked):
    collector, clock = clocked()
    clock.wait(50.0)  # before the first batch, which does not count
    collector.collect()
    clock.wait(9.0)
    found = collector.timings()
    environment = ENGINE_S / 2 + ENVIRONMENT_S  # the second asks for its place after the first one's turn
    place, group = ENVIRONMENT_S / 2, (ENGINE_S + ENVIRONMENT_S) / 2
    total = G * (ENGINE_S + ENVIRONMENT_S) + REWARDS_S + 9.0
    known = {"engine": ENGINE_S, "environment": environment, "place": place, "group": group}
    known |= {"rewards": REWARDS_S, "idle": 9.0}
    for state in (*STATES, "idle"):
        assert found[f"wait/worker/{state}"] == pytest.approx(known.get(state, 0.0) / total), state
    assert found["time/collect/wait"] == pytest.approx(total - 9.0)
    assert found["engine/busy"] == found["engine/busy_min"] == pytest.approx(G * ENGINE_S / total)
    assert found["engine/in_flight"] == pytest.approx(G * ENGINE_S / total)
    assert found["queue/finished_groups"] == 0.0  # it was delivered at once
    for kind, seconds in (("engine", ENGINE_S), ("environment", ENVIRONMENT_S), ("rewards", REWARDS_S)):
        assert found[f"time/{kind}/mean"] == found[f"time/{kind}/max"] == pytest.approx(seconds)
        assert found[f"time/{kind}/p90"] == pytest.approx(seconds, rel=0.06)
    assert "time/tools/mean" not in found


def test_tools_are_told_from_the_rest_of_the_environment(clocked):
    collector, clock = clocked(TOOLS_S)
    collector.collect()
    found = collector.timings()
    assert found["time/tools/mean"] == pytest.approx(TOOLS_S)
    assert found["time/environment/mean"] == pytest.approx(ENVIRONMENT_S + TOOLS_S)
    total = G * (ENGINE_S + ENVIRONMENT_S + TOOLS_S) + REWARDS_S
    assert found["wait/worker/tools"] == pytest.approx(G * TOOLS_S / 2 / total)
    assert sum(share for name, share in found.items() if name.startswith("wait/worker/")) == pytest.approx(1.0)


def test_a_step_begins_where_the_last_one_ended(clocked):
    collector, clock = clocked()
    collector.collect()
    first = collector.timings()
    clock.wait(5.0)
    assert collector.timings()["wait/worker/idle"] == 1.0
    collector.collect()
    second = collector.timings()
    assert {name: second[name] for name in first} == pytest.approx(first)


def test_ended_and_cancelled_groups_leave_nothing_behind(scripted):
    collector = scripted(ahead=2, max_in_flight=2)
    for _ in range(2):
        collector.collect()
    collector.cancel()
    collector.shutdown()
    assert not any(collector.runner.activity.numbers().values())
    assert collector.runner.source.occupancy.number == 0


@pytest.mark.parametrize("min_members", [None, 1])
def test_failed_and_cut_conversations_leave_nothing_behind(scripted, bpe, min_members):
    def play(request, index) -> ScriptedTurn:
        if index % 3 == 1:
            raise RuntimeError("broken")
        return ScriptedTurn([40, bpe.eos_token_id])

    collector = scripted(play=play, min_members=min_members, on_failure="replace")
    collector.collect()
    collector.shutdown()
    assert not any(collector.runner.activity.numbers().values())


def test_each_member_of_a_pool_counts_its_requests():
    clock = Clock()
    engines = [ScriptedEngine(lambda r, i: ScriptedTurn([1], latency=r.prompt[0]), clock=clock) for _ in range(2)]
    with EnginePool(engines) as pool:
        for member in pool.members:
            member.occupancy = Occupancy(clock)
        meter = OccupancyMeter()
        futures = [pool.submit(Request([seconds], limit=4, seed=0)) for seconds in (1, 3)]  # one for each
        for _ in range(4):
            clock.wait(1.0)
            for engine in engines:
                engine.tick()
        assert all(future.result().tokens == [1] for future in futures)
        found = meter.take(pool.occupancies())
        assert found == pytest.approx({"engine/busy": 0.5, "engine/busy_min": 0.25, "engine/in_flight": 0.5})
        clock.wait(1.0)
        assert meter.take(pool.occupancies())["engine/busy"] == 0.0


def test_a_counter_that_started_again_is_not_subtracted():
    meter = OccupancyMeter()
    meter.take({0: Reading(100.0, 50.0, 70.0)})
    assert meter.take({0: Reading(4.0, 1.0, 2.0)})["engine/busy"] == 0.25
    assert meter.take({0: Reading(4.0, 1.0, 2.0)}) == {}  # no news


spans = st.lists(
    st.tuples(st.floats(0, 5e4), st.floats(1e-4, 2e3), st.lists(st.integers(0, 9), min_size=6, max_size=6)),
    max_size=20,
)


@settings(max_examples=30, deadline=None)
@given(spans, spans)
def test_a_profile_keeps_all_time_in_few_bins(first, second):
    profiles = []
    for part in (first, second):
        profile = Profile()
        for start, seconds, numbers in part:
            profile.add(1e9 + start, 1e9 + start + seconds, numbers)
        profiles.append(profile)
    before = [list(cells) for cells in profiles[1].bins.values()]
    profiles[0].merge(profiles[1])
    assert [list(cells) for cells in profiles[1].bins.values()] == before
    assert len(profiles[0].bins) <= 514
    for state in range(len(STATES)):
        total = sum(seconds * numbers[state] for _, seconds, numbers in first + second)
        held = sum(cells[state] for cells in profiles[0].bins.values())
        assert held == pytest.approx(total, rel=1e-4, abs=1e-2)
