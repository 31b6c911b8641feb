"""Waits of workers and engines in a real cluster, and the metrics that Ray exports."""

from __future__ import annotations

import urllib.request
from functools import partial

import pytest

from support.waiting import wait_until
from torchrl_rloo.collectors import RayLLMCollector
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines import EnginePool, RayEngine, Request, ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.activity import STATES
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.run import Run

ray = pytest.importorskip("ray")
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


def exported(name: str) -> str:
    """Return what the node's endpoint says about a metric."""
    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return "\n".join(line for line in answer.read().decode().splitlines() if line.startswith(f"ray_{name}{{"))


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
        # What conversations and engines do now is exported by their processes
        if ray.nodes()[0]["MetricsExportPort"] > 0:
            for name in ("torchrl_rloo_worker_conversations", "torchrl_rloo_engine_in_flight"):
                wait_until(lambda name=name: exported(name), 90)
            wait_until(lambda: exported("torchrl_rloo_worker_turns_total") or exported("torchrl_rloo_worker_turns"), 90)
    finally:
        collector.shutdown()


def test_requests_of_a_restarted_engine_are_counted_anew():
    with RayEngine(partial(make_engine, build_tokenizer().eos_token_id)) as engine:  # without a supervisor
        assert engine.generate([Request([1], limit=4, seed=0)])[0].tokens
        assert engine.occupancy.busy >= LATENCY_S
        engine.restart()
        wait_until(lambda: engine.occupancy.seconds > 0)
        assert engine.occupancy.total == 0.0


def test_metrics_of_a_run_are_exported_by_ray(tmp_path, monkeypatch):
    from ray.util.metrics import Gauge

    found, set_gauge = {}, Gauge.set

    def spy(gauge, value, tags=None):
        found[(gauge.info["name"], tags.get("phase"))] = (value, tags["run"])
        set_gauge(gauge, value, tags=tags)

    monkeypatch.setattr(Gauge, "set", spy)
    with Run(tmp_path / "mine", 2, {}, loggers=["ray"], checkpoint_every=0) as run:
        for step in run.steps():
            with run.time("train"):
                run.log({"reward/a b": step / 4, "broken": float("nan")})
            if step == 2:  # the logger is open since the first step's entry
                assert found["torchrl_rloo_phase", "train"] == (0.0, "mine")
                with run.time("sync"):
                    assert found["torchrl_rloo_phase", "sync"] == (1.0, "mine")
    assert found["torchrl_rloo_reward_a_b", None] == (0.5, "mine")
    assert found["torchrl_rloo_step", None] == (2, "mine")
    assert ("torchrl_rloo_broken", None) not in found and ("torchrl_rloo_time_step", None) in found
    if ray.nodes()[0]["MetricsExportPort"] > 0:
        wait_until(lambda: 'run="mine"' in exported("torchrl_rloo_step"), 90)


def test_the_logger_of_ray_is_refused_without_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match="logger 'ray' requires a cluster"):
        Run(tmp_path, 2, {}, loggers=["ray"])
