"""Waits of workers and engines in a real cluster."""

from __future__ import annotations

from functools import partial

import pytest

from support.waiting import wait_until
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines import EnginePool, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.activity import STATES
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.ray import RayEngine, RayLLMCollector
from torchrl_rloo.rewards import boxed_accuracy

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("functions_by_value")]

LATENCY_S = 0.25


def make_env() -> DatasetChatEnv:
    prompts = load_prompts(addition_prompts("train", size=16))
    sizes = {"prompts_per_batch": 2, "num_generations": 2}
    return DatasetChatEnv(prompts, build_tokenizer(), rewards=boxed_accuracy, seed=0, **sizes)


def make_engine(end: int) -> ScriptedEngine:
    return ScriptedEngine(lambda request, index: ScriptedTurn([5, end], latency=LATENCY_S))


@pytest.fixture(scope="module")
def pool(functions_by_value):
    tokenizer = build_tokenizer()
    engines = [RayEngine(partial(make_engine, tokenizer.eos_token_id)) for _ in range(2)]
    with EnginePool(engines) as pool:
        yield pool


def test_waits_of_workers_and_engines(pool):
    policy = vLLMWrapper(pool, tokenizer=build_tokenizer(), generate_kwargs={"max_new_tokens": 4})
    collector = RayLLMCollector(make_env, policy, num_workers=2, seed=0)
    windows = []
    try:
        collector.collect()

        def measured() -> bool:
            windows.append(collector.timings())
            kinds = {name for window in windows for name in window}
            # The state that an engine tells first is of a time before the requests
            seen = [
                any(window.get(name, 0.0) > 0 for window in windows) for name in ("engine/busy", "wait/worker/engine")
            ]
            return all(seen) and {"time/engine/mean", "time/rewards/mean"} <= kinds

        wait_until(measured)
        # Heartbeats bring the shares of the workers, whose every window sums to 1
        shares = [w for w in windows if "wait/worker/idle" in w]
        for window in shares:
            assert sum(window[f"wait/worker/{s}"] for s in (*STATES, "idle")) == pytest.approx(1.0)
        assert max(window.get("time/engine/mean", 0.0) for window in windows) >= LATENCY_S
        assert max(window["time/collect/wait"] for window in windows) >= LATENCY_S
        # Each engine has had requests of both workers' processes
        wait_until(lambda: all(reading.busy >= LATENCY_S for reading in pool.occupancies().values()))
    finally:
        collector.shutdown()


def test_requests_of_a_restarted_engine_are_counted_anew():
    with RayEngine(partial(make_engine, build_tokenizer().eos_token_id)) as engine:  # without a supervisor
        assert engine.generate([Request([1], limit=4, seed=0)])[0].tokens
        assert engine.occupancy.busy >= LATENCY_S
        engine.restart()
        wait_until(lambda: engine.occupancy.seconds > 0)
        assert engine.occupancy.total == 0.0
