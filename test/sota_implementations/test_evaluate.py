"""The evaluation scripts, as a user runs them: a checkpoint, another one, and the two compared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_rloo.diagnostics.evaluation_result import EvaluationResult
from torchrl_rloo.embedded import addition_prompts, warm_start

FOLDER = Path(__file__).resolve().parents[2] / "sota_implementations" / "evaluate"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(tmp_path_factory) -> list[str]:
    start = warm_start(seed=0, steps=150, cache_dir=tmp_path_factory.mktemp("cache"))
    votes = "eval.votes=torchrl_rloo.diagnostics.final_answer"
    return [f"model.name={start}", "data.eval_size=12", "eval.num_samples=4", "eval.ks=[2,4]", votes]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def call_main(overrides: list[str], output: Path) -> None:
    """In this process: the script's own entry point, without the cost of a new interpreter."""
    from hydra import compose, initialize_config_dir

    spec = importlib.util.spec_from_file_location("evaluate_script", FOLDER / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shared = [f"hydra.searchpath=['file://{module.SHARED}']", f"output_dir={output}"]
    with initialize_config_dir(str(FOLDER / "config"), version_base="1.3"):
        cfg = compose("evaluate", [*overrides, *shared])
    module.main(cfg)


@pytest.fixture(scope="module")
def first(overrides, tmp_path_factory) -> tuple[str, Path]:
    output = tmp_path_factory.mktemp("first")
    return run("evaluate.py", *overrides, f"output_dir={output}", "label=base"), output


def test_result_is_printed_and_saved(first):
    stdout, output = first
    closing = json.loads(stdout.splitlines()[-1])
    result = EvaluationResult.load(output)
    assert closing["prompts"] == 12 and len(result.samples) == 12 * 5 and closing["result"] == str(output.resolve())
    assert {"eval/greedy", "eval/sampled_low", "eval/score/pass@4", "eval/score/maj@2_high"} <= closing.keys()
    assert all(closing[name] == pytest.approx(value) for name, value in result.metrics.items())
    assert "12 prompts, 60 completions" in stdout and result.settings.label == "base"
    held_out = {row["query"][1]["content"] for row in addition_prompts("test")}
    assert all(s.prompt.rpartition("user: ")[2] in held_out for s in result.samples)


def test_two_results_are_compared(overrides, first, tmp_path, capsys):
    _, earlier = first
    call_main([*overrides, "generate.temperature=0.5", f"compare={earlier}", "same_settings=false"], tmp_path)
    printed = capsys.readouterr().out
    assert "| greedy " in printed and "note: generate_kwargs differs" in printed
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["metrics"]["greedy"]["difference"] == 0.0  # of greedy completions the temperature is the same
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    again = run("compare.py", str(earlier), str(tmp_path), str(tmp_path / "again"), "--any-settings")
    assert again.strip() in printed and (tmp_path / "again" / "comparison.json").is_file()
    with pytest.raises(ValueError, match="differ in generate_kwargs"):
        call_main([*overrides, "generate.temperature=0.5", f"compare={earlier}"], tmp_path / "refused")


def test_own_prompts_scorers_and_sampling(overrides, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in addition_prompts("train", size=5)))
    scorers = "eval.scorers={right: boxed_accuracy, format: think_format}"
    more = [f"data.eval_source={file}", scorers, "+generate.top_p=0.9", "eval.greedy=false", "format=jsonl"]
    call_main([*overrides, *more], tmp_path / "out")
    result = EvaluationResult.load(tmp_path / "out")
    assert len(result.samples) == 20 and result.settings.generate_kwargs["top_p"] == 0.9
    assert {"sampled", "right/pass@4", "format/avg@4", "format/maj@2"} <= result.values.keys()
    assert (tmp_path / "out" / "samples.jsonl").is_file()


def test_another_task(overrides, tmp_path):
    call_main([*overrides, "task=gsm8k", "data.source=embedded", "generate.max_new_tokens=8"], tmp_path)
    result = EvaluationResult.load(tmp_path)
    assert len({s.prompt_id for s in result.samples}) == 12 and "answer" in result.samples[0].columns


def test_vllm_samples_the_same_greedy_completions(overrides, first, tmp_path):
    pytest.importorskip("vllm")
    engine = [
        "inference=vllm",
        "+inference.engine.enforce_eager=true",
        "+inference.engine.kv_cache_memory_bytes=67108864",
    ]
    stdout = run("evaluate.py", *overrides, *engine, f"output_dir={tmp_path}")
    mine, theirs = EvaluationResult.load(tmp_path), EvaluationResult.load(first[1])
    same = [a["completion"] == b["completion"] for a, b in zip(mine.table(), theirs.table(), strict=True)]
    assert sum(same) >= 11 and json.loads(stdout.splitlines()[-1])["prompts"] == 12  # 1: rounding may part a tie


def test_help_says_how_to_use_it():
    text = run("evaluate.py", "--help")
    assert "eval.num_samples=16" in text and "max_new_tokens: 32" in text and "inference=" in text


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["eval.ks=[8]"], "not between 1 and num_samples=4"),
        (["compare=nowhere"], "holds no evaluation.json"),
        (["eval.scorers={right: boxed_acuracy}"], "boxed_acuracy"),
        (["generate.temperature=0"], "temperature=0 gives num_samples=4 times the same completion"),
        (["format=csv"], "format='csv' must be one of"),
        (["eval.batch_size=0"], "batch_size=0 must be at least 1"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_impossible_settings_are_refused(overrides, tmp_path, bad, message):
    with pytest.raises(Exception) as raised:
        call_main([*overrides, *bad], tmp_path)
    assert message in str(raised.value)
