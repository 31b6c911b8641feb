"""The simulated cluster: cases with a known answer, the modes, the driver's limit, and the real collector."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from dataclasses import dataclass, replace

import pytest

from support.collecting import Bump, words
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics.cluster_clock import Server, StuckError, run_virtual
from torchrl_rloo.diagnostics.cluster_engine import (
    EngineSpeed,
    SimulatedEngine,
    SimulatedPool,
    linear_rate,
    table_rate,
)
from torchrl_rloo.diagnostics.cluster_load import Distribution, Load, Turn, read_values
from torchrl_rloo.diagnostics.cluster_runner import ProcessCosts
from torchrl_rloo.diagnostics.cluster_simulation import ClusterSettings, Mode, compare_modes, simulate
from torchrl_rloo.diagnostics.cluster_split import advise_cluster, bottleneck, estimate_step, search_split
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import vLLMWrapper

NO_PROMPT = Distribution(0.0)
EQUAL = Load(Distribution(100.0), prompt=NO_PROMPT)
HEAVY = Load(Distribution(400.0, p99=3000.0, maximum=4000.0), prompt=Distribution(100.0))


def cluster(load: Load = EQUAL, **changes) -> ClusterSettings:
    """Return a cluster whose batch takes 10 s to sample: 8 x 4 conversations, 2 engines of 160 tokens/s."""
    settings = {
        "engines": 2,
        "speed": EngineSpeed(linear_rate(10.0, 160.0)),
        "groups_per_batch": 8,
        "group_size": 4,
        "train_seconds": 10.0,
    }
    return ClusterSettings(load, **(settings | changes))


def seconds_per_step(settings: ClusterSettings, steps: int = 10) -> float:
    result = simulate(settings, steps, warmup=5)
    return result.seconds / result.steps


# Cases with a known answer


@pytest.mark.parametrize("train", [1.0, 10.0, 40.0])
def test_sync_takes_the_sum_of_both(train: float) -> None:
    settings = cluster(train_seconds=train, transfer_seconds=1.0, still_seconds=2.0)
    assert seconds_per_step(settings) == pytest.approx(10 + train + 3, rel=0.02)
    result = simulate(settings)
    assert result.trainer_busy == pytest.approx(train / (13 + train), rel=0.02)
    assert result.engine_busy == pytest.approx(10 / (13 + train), rel=0.02)
    assert result.engine_still == pytest.approx(2 / (13 + train), rel=0.02) and result.staleness.keys() == {0}


@pytest.mark.parametrize("train", [1.0, 40.0])
def test_async_takes_the_longer_of_both(train: float) -> None:
    """The engine-bound and the trainer-bound cluster; their sampling and training overlap."""
    settings = cluster(train_seconds=train, mode=Mode(2, in_flight="continue"))
    assert seconds_per_step(settings, 60) == pytest.approx(max(10, train), rel=0.02)
    result = simulate(settings, 10, warmup=5)
    assert bottleneck(result) == ("engines" if train < 10 else "trainer") and max(result.staleness) <= 2


def test_tokens_of_rows_cost_training_time() -> None:
    load = replace(EQUAL, prompt=Distribution(50.0))
    assert seconds_per_step(cluster(load, train_seconds=0.0, train_rate=480.0)) == pytest.approx(10 + 10, rel=0.02)


def test_the_cache_limits_the_requests_in_flight() -> None:
    """Room for 4 requests of an engine's 16: they take turns at 40 tokens/s."""
    speed = EngineSpeed(linear_rate(10.0, 160.0), cache_tokens=4 * 50.0)
    assert seconds_per_step(cluster(speed=speed)) == pytest.approx(40 + 10, rel=0.02)
    assert seconds_per_step(cluster(max_in_flight=8)) == pytest.approx(40 + 10, rel=0.02)


def test_reading_prompts_stops_sampling() -> None:
    """Each of an engine's 16 requests reads 100 tokens in a second; with the prefix cache, 4 of them do."""
    load = replace(EQUAL, prompt=Distribution(100.0), prefix_cache=False)
    settings = cluster(load, speed=EngineSpeed(linear_rate(10.0, 160.0), prefill=100.0))
    assert seconds_per_step(settings) == pytest.approx(10 + 16 + 10, rel=0.02)
    cached = replace(settings, load=replace(load, prefix_cache=True))
    assert seconds_per_step(cached) == pytest.approx(10 + 4 + 10, rel=0.02)


def test_tools_and_turns_take_their_time() -> None:
    load = Load(
        Distribution(100.0), NO_PROMPT, turns=Distribution(3.0), tool_seconds=Distribution(5.0), feedback=NO_PROMPT
    )
    settings = cluster(load, engines=1, groups_per_batch=4)
    assert seconds_per_step(settings) == pytest.approx(3 * 10 + 2 * 5 + 10, rel=0.02)


def test_the_estimate_agrees_without_stragglers() -> None:
    for mode in (Mode(), Mode(2, in_flight="continue")):
        settings = cluster(train_seconds=30.0, transfer_seconds=1.0, mode=mode)
        expected = estimate_step(settings).seconds(overlaps=mode.max_staleness != 0)
        assert seconds_per_step(settings, 60) == pytest.approx(expected, rel=0.02)


# Modes


def test_each_mode_is_faster_than_the_one_before_on_a_heavy_tail() -> None:
    speed = EngineSpeed(linear_rate(40.0, 1000.0), prefill=1e4)
    settings = cluster(HEAVY, speed=speed, groups_per_batch=16, still_seconds=0.5)
    found = compare_modes(replace(settings, train_seconds=20.0), steps=8, warmup=6)
    speeds = [found[name].tokens_per_second for name in ("sync", "one-step-off", "partial")]
    assert speeds[0] < 0.9 * speeds[1] and speeds[1] < 0.9 * speeds[2]
    assert set(found["sync"].staleness) == {0} and max(found["one-step-off"].staleness) == 1
    assert not found["one-step-off"].masked_tokens and found["partial"].engine_busy > 0.9


def test_requests_go_on_under_new_weights_only_in_partial_rollouts() -> None:
    async def versions(in_flight: str) -> tuple[list[tuple[int, int]], float]:
        engine = SimulatedEngine(EngineSpeed(linear_rate(10.0, 160.0)))
        turn = asyncio.ensure_future(engine.sample(Turn(0.0, 0.0, 100.0, 0.0)))
        await asyncio.sleep(3)
        await engine.update(7, 2.0, in_flight)
        return await turn, asyncio.get_running_loop().time()

    assert run_virtual(versions("continue")) == ([(0, 30), (7, 70)], 12.0)
    assert run_virtual(versions("finish")) == ([(0, 100)], 12.0)


def test_the_bound_on_staleness_counts_tokens() -> None:
    """Conversations that outlast all updates: their old tokens are counted as masked, and nothing else."""
    load = Load(Distribution(values=(100.0,) * 9 + (4000.0,)), prompt=NO_PROMPT)
    result = simulate(cluster(load, train_seconds=1.0, mode=Mode(1, in_flight="continue")), 30)
    stale = sum(tokens for age, tokens in result.staleness.items() if age > 1)
    assert result.masked_tokens == stale > 0 and result.mean_staleness <= 1


def test_a_group_beyond_the_bound_is_sampled_again() -> None:
    load = Load(Distribution(values=(100.0,) * 9 + (4000.0,)), prompt=NO_PROMPT)
    mode = Mode(1, "requeue", in_flight="continue")
    result = simulate(cluster(load, train_seconds=1.0, mode=mode), 30)
    masked = simulate(cluster(load, train_seconds=1.0, mode=replace(mode, on_stale="mask")), 30)
    assert result.masked_tokens < masked.masked_tokens and result.engine_tokens / result.tokens > 1.02


def test_stragglers_are_cut() -> None:
    load = Load(Distribution(values=(100.0,) * 9 + (1e5,)), prompt=NO_PROMPT)
    slow, fast = (seconds_per_step(cluster(load, mode=Mode(min_members=n))) for n in (None, 1))
    assert fast < slow / 10


# The driver and the workers


def test_the_driver_becomes_the_limit() -> None:
    """The driver takes 100 groups/s, which 2 engines of 16 groups/s do not reach, and 128 exceed."""
    costs, load = ProcessCosts(group_seconds=0.01), Load(Distribution(10.0), prompt=NO_PROMPT)
    rates, found = [], []
    for engines in (2, 128):
        mode = Mode(2, in_flight="continue")
        sizes = {"engines": engines, "groups_per_batch": 64, "group_size": 1}
        settings = cluster(load, **sizes, train_seconds=0.01, costs=costs, mode=mode)
        found.append(simulate(settings, 24, warmup=6))
        rates.append(64 * found[-1].steps / found[-1].seconds)
    assert rates == pytest.approx([32, 100], rel=0.05)
    assert [result.driver_busy for result in found] == pytest.approx([0.32, 1.0], rel=0.05)
    assert [bottleneck(result) for result in found] == ["engines", "driver"]
    assert "of 100.0 groups/s: use larger groups, or several drivers" in advise_cluster(found[1])


def test_workers_become_the_limit() -> None:
    costs = ProcessCosts(turn_seconds=1.0, workers=2)
    result = simulate(cluster(train_seconds=0.0, costs=costs, mode=Mode(2, in_flight="continue")))
    assert result.seconds / result.steps == pytest.approx(16, rel=0.02)
    assert bottleneck(result) == "workers" and "start more than 2" in advise_cluster(result)


def test_the_search_finds_the_best_of_all_splits() -> None:
    def make(engines: int, trainer_gpus: int) -> ClusterSettings:
        mode = Mode(2, in_flight="continue")
        return cluster(engines=engines, train_seconds=0.0, train_rate=100.0 * trainer_gpus, mode=mode)

    every = {e: simulate(make(e, 12 - e), 4, warmup=3).tokens_per_second for e in range(1, 12)}
    found = search_split(make, 12, 1, steps=4, warmup=3)
    best = max(found, key=lambda split: split.result.tokens_per_second)
    assert every[best.engines] == pytest.approx(max(every.values()), rel=0.02) and len(found) < 11
    with pytest.raises(ValueError, match="gpus=2 must be above engine_gpus=2"):
        search_split(make, 2, 2)


# The real collector


@dataclass(frozen=True)
class ScriptedLoad(Load):
    """Conversations of one turn, one token per millisecond. All of a group take equally long.

    Groups that open together may begin in any order; here, in the order ``order``.
    """

    order: tuple[int, ...] = ()

    def conversation(self, group_id: int, member: int) -> list[Turn]:
        return [Turn(0.0, 0.0, 1e3 * scripted_seconds(self.order[group_id]), 0.0)]


def random_order(sizes: list[int], seed: int) -> tuple[int, ...]:
    """Return the ids of groups that open in batches of ``sizes``, shuffled within each."""
    ids = iter(range(sum(sizes)))
    batches = [list(itertools.islice(ids, size)) for size in sizes]
    rng = random.Random(seed)
    return tuple(group for batch in batches for group in rng.sample(batch, len(batch)))


def scripted_seconds(group_id: int) -> float:
    return random.Random(group_id).choice([0.1, 0.2, 0.8])


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_real_collector_takes_as_long(bpe, user, staleness: int) -> None:
    """Batches of 4 groups of 2 over an engine of 4 slots, a trainer that sleeps, and the same latencies."""
    slots, groups, size, train, steps = 4, 4, 2, 0.6, 5
    prompts = load_prompts([{"query": user("a" * (i + 1))} for i in range(7)])
    env = DatasetChatEnv(prompts, bpe, prompts_per_batch=groups, num_generations=size, rewards=words)

    def play(request, index: int) -> ScriptedTurn:
        return ScriptedTurn([40, bpe.eos_token_id], latency=scripted_seconds(request.session[0]))

    with ScriptedEngine(play, max_concurrency=slots) as engine:
        policy = vLLMWrapper(engine, tokenizer=bpe, generate_kwargs={"max_new_tokens": 6})
        collector = LLMCollector(env, policy, max_staleness=staleness or None, weight_updater=Bump(engine))
        start = time.monotonic()
        for _ in range(steps):
            collector.collect()
            time.sleep(train)
            collector.update_policy_weights_()
        seconds = time.monotonic() - start
        collector.shutdown()
    opened = [groups * (1 + staleness)] + [groups] * steps

    def simulated(seed: int) -> float:
        settings = cluster(
            ScriptedLoad(EQUAL.tokens, order=random_order(opened, seed)),
            engines=1,
            speed=EngineSpeed(linear_rate(1000.0, math.inf), max_running=slots),
            groups_per_batch=groups,
            group_size=size,
            train_seconds=train,
            mode=Mode(staleness, in_flight="continue"),
        )
        return simulate(settings, steps, warmup=0).seconds

    every = [simulated(seed) for seed in range(100)]
    assert 0.97 * min(every) < seconds < 1.5 * max(every)


# Parts


def test_virtual_time_jumps_and_reports_a_deadlock() -> None:
    async def stuck() -> None:
        await asyncio.sleep(100)
        await asyncio.Event().wait()

    with pytest.raises(StuckError, match="after 100.0 simulated s everything waits"):
        run_virtual(stuck())


@pytest.mark.parametrize("start", [0.0, 1e9])
def test_an_engine_ends_its_requests_at_any_time(start: float) -> None:
    """Rounding of a late clock neither stops time nor loses a request."""

    async def sample() -> float:
        await asyncio.sleep(start)
        engine = SimulatedEngine(EngineSpeed(linear_rate(997.0, 1e5)))
        await asyncio.gather(*(engine.sample(Turn(0.0, 0.0, 10.0 * n, 0.0)) for n in range(1, 100)))
        return asyncio.get_running_loop().time() - start

    assert run_virtual(sample()) == pytest.approx(990 / 997, abs=1e-4)


def test_a_server_runs_one_piece_of_work_at_a_time() -> None:
    async def work() -> tuple[float, float]:
        server = Server()
        await asyncio.gather(*(server.work(2.0) for _ in range(3)))
        return asyncio.get_running_loop().time(), server.busy_seconds

    assert run_virtual(work()) == (6.0, 6.0)


def test_a_pool_keeps_conversations_home_unless_it_is_overloaded() -> None:
    async def homes() -> list[int]:
        pool = SimulatedPool([SimulatedEngine(EngineSpeed(linear_rate(10.0, 160.0))) for _ in range(4)])
        turn = Turn(0.0, 0.0, 10.0, 0.0)
        spread = await asyncio.gather(*(pool.sample(turn, None) for _ in range(8)))
        crowded = await asyncio.gather(*(pool.sample(turn, 2) for _ in range(8)))
        kept, _ = await pool.sample(turn, 3)
        return [sorted(number for number, _ in found) for found in (spread, crowded)] + [kept]

    spread, crowded, kept = run_virtual(homes())
    assert spread == [0, 0, 1, 1, 2, 2, 3, 3] and kept == 3
    assert 1 < crowded.count(2) < 8


def test_lognormal_lengths_have_their_mean_and_quantile() -> None:
    draw, lengths = random.Random(0), Distribution(1000.0, p99=8000.0)
    values = sorted(lengths.sample(draw) for _ in range(40_000))
    assert sum(values) / len(values) == pytest.approx(1000, rel=0.03)
    assert values[int(0.99 * len(values))] == pytest.approx(8000, rel=0.08)
    with pytest.raises(ValueError, match="p99=20000.0 must be 1 to 15.0 times mean=1000.0"):
        Distribution(1000.0, p99=20_000.0)


def test_measured_lengths_are_read(tmp_path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"completions/mean_length": 12.5}\n{"other": 1}\n\n7\n')
    assert read_values(file) == (12.5, 7.0)
    file.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="has no value of completions/mean_length"):
        read_values(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engines": 0}, "engines=0 must be at least 1"),
        ({"train_rate": 0.0}, "train_rate=0.0 must be above 0"),
        ({"max_in_flight": 0}, "max_in_flight=0 must be at least 1"),
    ],
)
def test_impossible_clusters_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cluster(**change)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        simulate(cluster(), 0)
    with pytest.raises(ValueError, match="must have ascending positive numbers"):
        table_rate([(8, 1.0), (2, 1.0)])
