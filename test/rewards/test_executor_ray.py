"""RayExecutor on a real local cluster: scores, actors that are killed, calls that hang, and settings."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import wait_until_gone
from support.ray_cluster import RAY_GROUP
from support.recipes import settings
from torchrl_rloo.rewards import RewardBatch, RewardRunner
from torchrl_rloo.rewards.executors import RayExecutor, make_executor
from torchrl_rloo.rewards.protocol import RewardFailure

pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group(RAY_GROUP)


def batches(*completions: str) -> list[RewardBatch]:
    return [RewardBatch(["p"], [c], [[1, 2]], {"answer": ["4"]}) for c in completions]


def outcomes(results: list) -> list:
    return [r.kind if isinstance(r, RewardFailure) else r.scores[0] for r in results]


def obeys(completions, **_) -> list[float]:
    """Execute the command in the completion."""
    command, _, argument = completions[0].partition(" ")
    if command == "raise":
        raise KeyError(argument)
    if command == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if command == "hang":
        Path(argument).write_text(str(os.getpid()))
        time.sleep(1000)
    if command == "die_once" and not Path(argument).exists():
        Path(argument).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(command))]


@pytest.fixture(scope="module")
def executor(functions_by_value: str) -> Iterator[RayExecutor]:
    made = RayExecutor(workers=2, timeout=30.0)
    yield made
    made.close()


def test_scores_come_in_order_from_other_processes(executor: RayExecutor) -> None:
    here = os.getpid()

    def grade(completions, answer, log_metric, **_):
        log_metric("elsewhere", float(os.getpid() != here))
        return [float(c) + float(a) for c, a in zip(completions, answer, strict=True)]

    results = executor.run(grade, batches(*map(str, range(6))))
    assert outcomes(results) == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert {metric for result in results for metric in result.metrics} == {("elsewhere", 1.0)}
    # An exception fails its sample; async functions and retries are the runner's
    assert outcomes(executor.run(obeys, batches("a", "raise x", "abc"))) == [1.0, "raised", 3.0]
    runner = RewardRunner(obeys, executor=pickle.loads(pickle.dumps(executor)), deduplicate=False)
    assert runner.executors[0].workers == 2 and runner.executors[0]._idle == []


def test_a_killed_actor_costs_no_score_and_a_deadly_sample_only_its_own(executor: RayExecutor, tmp_path: Path) -> None:
    results = executor.run(obeys, batches("a", f"die_once {tmp_path / 'mark'}", "die", "abc"))
    assert outcomes(results) == [1.0, 8.0, "worker_died", 3.0]
    assert "the actor died" in results[2].message and (tmp_path / "mark").exists()


def test_a_call_that_hangs_is_killed(functions_by_value: str, tmp_path: Path) -> None:
    executor = RayExecutor(workers=1, timeout=2.0)
    results = executor.run(obeys, batches(f"hang {tmp_path / 'pid'}", "abc"))
    assert outcomes(results) == ["timed_out", 3.0] and results[0].message == "no answer within 2 s"
    wait_until_gone(int((tmp_path / "pid").read_text()))
    executor.close()


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    made = make_executor("ray", workers=3, timeout=5.0, rows_per_call=2)
    assert isinstance(made, RayExecutor) and (made.workers, made.timeout, made.rows_per_call) == (3, 5.0, 2)
    with pytest.raises(ValueError, match=r"environment=\['A'\] has no effect with mode='ray'"):
        make_executor("ray", environment=["A"])
    with pytest.raises(ValueError, match="reward.executor.mode=ray requires a cluster; use rloo_async"):
        settings("rloo", "reward.executor.mode=ray")
    assert settings("rloo_async", "reward.executor.mode=ray").reward.executor.mode == "ray"
    with pytest.raises(ValueError, match="start_timeout=0 must be"):
        RayExecutor(start_timeout=0)
    with pytest.raises(TypeError, match="reward <lambda> cannot be sent to an actor"):
        made.prepare((lambda lock: lambda completions: [lock])(__import__("threading").Lock()))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match="a RayExecutor requires a cluster"):
        made.run(obeys, batches("a"))
