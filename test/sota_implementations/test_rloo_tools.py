"""Configuration for conversations with tools: to the end, ahead of training, stopped and resumed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from support.recipes import run_recipe_here
from support.runs import check_metric_names, read_jsonl

OWN_TOOL = """
import time


def slow_calculator(expression: str) -> str:
    '''Sums, takes its time, and fails on products.

    Args:
        expression: such as 2+3.
    '''
    if "*" in expression:
        raise ArithmeticError("no products")
    if "-" in expression:
        time.sleep(1000)
    return str(sum(map(int, expression.split("+"))))
"""
OWN_TRANSFORM = """{
    _target_: torchrl_rloo.envs.transforms.ToolTransform,
    tools: [{_target_: hydra.utils.get_method, path: own_tools_of_the_script.slow_calculator}],
    parser: {_target_: torchrl_rloo.envs.tools.RegexParser, pattern: "<tool>(?P<expression>[^<]*)</tool>",
             tool: slow_calculator},
    timeout: 0.5, show_schemas: false, max_calls: 2}"""
AHEAD = ["collector.max_staleness=1", "sampler.share_weights=false"]
BOUNDED = ["collector.max_staleness=1", "sampler.share_weights=false"]
SIGNAL = "reward.functions=[own_rewards.distinct]"  # every step has a gradient


@pytest.fixture(scope="module")
def tiny(warm_model) -> list[str]:
    """Settings of a short run."""
    return [
        f"model.name={warm_model('calculator')}",
        "plan.steps=3",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "data.limit=128",
        "data.eval_size=8",
        "eval.every=2",
        "checkpoint.every=1",
    ]


def run(overrides: list[str], output: Path) -> list[dict]:
    run_recipe_here("rloo", "--config", "rloo_tools", *overrides, f"output_dir={output}")
    return read_jsonl(output / "metrics.jsonl")


@pytest.mark.parametrize(
    ("more", "stale"),
    [([], False), (AHEAD, True), (BOUNDED, True)],
    ids=["default", "ahead", "max_staleness"],
)
def test_it_runs_to_the_end(tiny, tmp_path, more, stale) -> None:
    logged = run([*tiny, *more], tmp_path)
    assert [r["step"] for r in logged] == [0, 1, 2, 3] and (tmp_path / "report.html").is_file()
    assert all(0 < r["num_tool_calls"] < 2 and 1 < r["num_turns"] <= 2 for r in logged[1:])
    assert logged[-1]["count/tools/calculator/calls"] > 0 and logged[-1]["count/advantage/groups"] == 12
    ends = [sum(v for k, v in r.items() if k.startswith("stop/")) for r in logged[1:]]
    assert ends == pytest.approx([1, 1, 1])
    pages = sorted((tmp_path / "transcripts").iterdir())
    assert [page.name for page in pages] == ["step_000000.html", "step_000002.html", "step_000003.html"]
    assert "\\u003ctool" in pages[0].read_text() or "<tool>" in pages[0].read_text()
    versions = [set(map(int, re.findall(r'"version": ?(\d+)', page.read_text()))) for page in pages]
    assert versions == [{0}, {2}, {3}]  # each evaluation has the weights of its step
    staleness = [r["staleness"] for r in logged[1:]]
    times = read_jsonl(tmp_path / "timings.jsonl")[1:]
    for entry in times:
        shares = [share for name, share in entry.items() if name.startswith("wait/worker/")]
        assert sum(shares) == pytest.approx(1.0) and len(shares) == 7
        assert entry["time/collect/wait"] <= entry["time/collect"] <= entry["time/step"]
    assert any(entry.get("time/tools/mean", 0.0) > 0 for entry in times)
    assert "Who waits for whom" in (tmp_path / "report.html").read_text()
    assert staleness[0] == 0 and (max(staleness) > 0) == stale  # groups that were started ahead have older weights
    check_metric_names(tmp_path)


def test_a_killed_run_resumes(tiny, start, finish, tmp_path) -> None:
    """Groups that were started but not delivered restart under their ids: none is lost or delivered twice."""
    overrides = [*tiny, *AHEAD, SIGNAL, "checkpoint.every=1"]
    start(overrides, tmp_path, hold="train:3", recipe="rloo_tools").kill()
    assert "resumed after step 2" in finish(overrides, tmp_path, recipe="rloo_tools")
    logged = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in logged] == [0, 1, 2, 3] and logged[-1]["count/advantage/groups"] == 12


def test_a_stopped_run_resumes(tiny, start, finish, tmp_path) -> None:
    overrides = [*tiny, *AHEAD, SIGNAL, "checkpoint.every=0"]
    process = start(overrides, tmp_path, hold="train:2", recipe="rloo_tools")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(120) == 0 and "stopped after step 2" in process.stdout, process.stderr
    assert "resumed after step 2" in finish(overrides, tmp_path, recipe="rloo_tools")
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["count/advantage/groups"] == 12


def test_a_game(tiny, warm_model, tmp_path) -> None:
    """The environment computes the reward, not a function."""
    logged = run([*tiny, "task=guessing", f"model.name={warm_model('guessing')}"], tmp_path)
    assert all(r["num_turns"] > 1.5 for r in logged[1:]) and any(r["reward"] != 0 for r in logged[1:])
    assert {"eval/greedy", "eval/sampled"} <= logged[-1].keys() and "num_tool_calls" not in logged[-1]
    check_metric_names(tmp_path)


def test_user_tools_that_fail_and_hang(tiny, tmp_path, monkeypatch) -> None:
    (tmp_path / "own_tools_of_the_script.py").write_text(OWN_TOOL)
    monkeypatch.syspath_prepend(tmp_path)
    more = [f"environment.transforms=[{' '.join(OWN_TRANSFORM.split())}]", "environment.max_turns=3"]
    last = run([*tiny, *more], tmp_path / "out")[-1]
    assert last["count/tools/slow_calculator/calls"] > 0
    assert last["count/tools/slow_calculator/failed"] > 0 and last["count/tools/slow_calculator/timed_out"] > 0
    check_metric_names(tmp_path / "out")


def test_evaluation_with_the_tools_of_a_task(tiny, tmp_path) -> None:
    (model,) = [setting for setting in tiny if setting.startswith("model.name=")]
    more = ["task=calculator", "data.eval_size=8", "eval.num_samples=2", "eval.transcripts=true"]
    run_recipe_here("evaluate", model, *more, f"output_dir={tmp_path}")
    assert (tmp_path / "transcripts.html").is_file()
