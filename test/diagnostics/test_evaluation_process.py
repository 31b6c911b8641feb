"""Evaluation in a separate process: results, a killed, a hung and a failing process, an interrupted run."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from support.evaluated import make_evaluate
from support.waiting import wait_until
from torchrl_rloo.diagnostics import EvaluationProcess


@pytest.fixture
def process(tmp_path):
    process = EvaluationProcess(partial(make_evaluate, tmp_path), tmp_path / "evaluations", timeout=120)
    yield process
    process.close()


def save(process: EvaluationProcess, step: int, score: float) -> None:
    folder = process.model_folder(step)
    folder.mkdir(parents=True)
    (folder / "score").write_text(str(score))


def began(folder: Path, step: int) -> set[int]:
    """Return the processes that have begun to evaluate a step."""
    return {int(path.name.rpartition("_")[2]) for path in folder.glob(f"began_{step}_*")}


def kill(folder: Path, step: int, killed: set[int]) -> None:
    """Kill the process that evaluates a step, once it has begun."""
    (pid,) = wait_until(lambda: began(folder, step) - killed)
    os.kill(pid, signal.SIGKILL)
    killed.add(pid)


def test_results_come_while_training_continues(process, tmp_path):
    assert process.take(wait=True) is None
    (tmp_path / "hold").touch()
    save(process, 4, 0.5)
    process.start(4)
    wait_until(lambda: began(tmp_path, 4))
    assert process.take() is None  # it is held, and this does not wait
    with pytest.raises(RuntimeError, match="step=5 cannot be evaluated before the results of step 4"):
        process.start(5)
    (tmp_path / "hold").unlink()
    step, results = process.take(wait=True)
    assert step == 4 and list(results) == ["", "hard"]
    assert results[""].metrics["eval/greedy"] == 1.0 and results[""].failed == {"right": 1}
    assert not process.model_folder(4).exists() and process.take(wait=True) is None
    # A failure is raised with its traceback, and the process continues
    (tmp_path / "fail").touch()
    save(process, 5, 0.0)
    process.start(5)
    with pytest.raises(RuntimeError, match="(?s)evaluation of step 5 failed:.*ValueError: no prompts"):
        process.take(wait=True)
    (tmp_path / "fail").unlink()
    save(process, 6, 2.0)
    process.start(6)
    assert process.take(wait=True)[1]["hard"].metrics["eval/greedy"] == 2.5
    assert len((tmp_path / "processes").read_text().split()) == 1


def test_a_killed_process_is_replaced_once(process, tmp_path):
    (tmp_path / "hold").touch()
    save(process, 1, 0.0)
    process.start(1)
    killed: set[int] = set()
    kill(tmp_path, 1, killed)
    wait_until(lambda: process.take() or began(tmp_path, 1) - killed)
    (tmp_path / "hold").unlink()
    assert process.take(wait=True)[0] == 1
    # Two deaths over one model: the next process would die too
    (tmp_path / "hold").touch()
    save(process, 2, 0.0)
    process.start(2)
    kill(tmp_path, 2, killed := set())
    wait_until(lambda: process.take() or began(tmp_path, 2) - killed)
    kill(tmp_path, 2, killed)
    with pytest.raises(RuntimeError, match=r"evaluated step 2 died twice \(exit code -9\)"):
        process.take(wait=True)


def test_an_interrupted_run_gets_its_results(tmp_path):
    (tmp_path / "hold").touch()
    make = partial(make_evaluate, tmp_path)
    with pytest.raises(ValueError, match="timeout=0 must be above 0 s"):
        EvaluationProcess(make, tmp_path / "evaluations", timeout=0)
    hung = EvaluationProcess(make, tmp_path / "evaluations", timeout=0.2)
    save(hung, 8, 0.5)
    hung.start(8)
    with pytest.raises(TimeoutError, match="evaluation of step 8 took more than timeout=0.2 s"):
        hung.take(wait=True)
    (tmp_path / "hold").unlink()
    # The run resumes after step 9, whose later steps are played again
    save(hung, 12, 0.0)
    resumed = EvaluationProcess(make, tmp_path / "evaluations")
    try:
        resumed.rewind(9, logged=[0, 4])
        assert not resumed.model_folder(12).exists()
        assert resumed.take(wait=True)[0] == 8
        # Results that were complete, but not logged before the checkpoint
        resumed.rewind(9, logged=[0, 4])
        assert resumed.take(wait=True)[1][""].metrics["eval/greedy"] == 1.0
        resumed.rewind(9, logged=[0, 4, 8])
        assert resumed.take(wait=True) is None
        # A new run in the folder of an earlier one
        resumed.rewind(-1, logged=[])
        assert resumed.take(wait=True) is None and not list((tmp_path / "evaluations").iterdir())
    finally:
        resumed.close()
