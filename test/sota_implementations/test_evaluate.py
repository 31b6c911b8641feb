"""Evaluation recipe as a user runs it: one checkpoint, another one, and their comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.recipes import run_recipe_here
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.embedded import addition_prompts
from torchrl_rloo.envs.tasks import load_task
from torchrl_rloo.evaluation.result import EvaluationResult

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    votes = "eval.votes=torchrl_rloo.diagnostics.final_answer"
    return [f"model.name={warm_model()}", "data.eval_size=12", "eval.num_samples=4", "eval.ks=[2,4]", votes]


@pytest.fixture(scope="module")
def first(overrides, fork_server, tmp_path_factory) -> tuple[str, Path]:
    output = tmp_path_factory.mktemp("first")
    done = fork_server.run(recipe_file("evaluate"), [*overrides, f"output_dir={output}", "label=base"])
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, output


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
    earlier = first[1]
    cooler = [*overrides, "generate.temperature=0.5"]
    run_recipe_here("evaluate", *cooler, f"compare={earlier}", "same_settings=false", f"output_dir={tmp_path}")
    printed = capsys.readouterr().out
    assert "| greedy " in printed and "note: generate_kwargs differs" in printed
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert found["metrics"]["greedy"]["difference"] == 0.0  # the temperature does not affect greedy completions
    both = [f"compare=[{earlier},{tmp_path}]", f"output_dir={tmp_path / 'again'}"]
    run_recipe_here("evaluate", *both, "same_settings=false")  # evaluates nothing, so the model is not loaded
    again = json.loads((tmp_path / "again" / "comparison.json").read_text())
    assert again == found and "| greedy " in capsys.readouterr().out
    with pytest.raises(ValueError, match="differ in generate_kwargs"):
        run_recipe_here("evaluate", *both)


def test_own_prompts_scorers_and_sampling(overrides, tmp_path):
    file, output = tmp_path / "mine.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for row in addition_prompts("train", size=5)))
    scorers = "eval.scorers={right: boxed_accuracy, format: think_format}"
    more = [f"data.eval_source={file}", scorers, "generate.top_p=0.9", "eval.greedy=false", "format=jsonl"]
    run_recipe_here("evaluate", *overrides, *more, "eval.transcripts=true", f"output_dir={output}")
    result = EvaluationResult.load(output)
    assert len(result.samples) == 20 and result.settings.generate_kwargs["top_p"] == 0.9
    assert {"sampled", "right/pass@4", "format/avg@4", "format/maj@2"} <= result.values.keys()
    assert (output / "samples.jsonl").is_file() and "<html" in (output / "transcripts.html").read_text()


def test_prompts_with_a_pass_rate_in_the_range_are_kept_to_train_on(overrides, tmp_path, capsys):
    output, file = tmp_path / "out", tmp_path / "kept" / "some.jsonl"
    limits = [f"filter.path={file}", "filter.low=0.25", "filter.high=0.75", "eval.greedy=false"]
    run_recipe_here("evaluate", *overrides, *limits, f"output_dir={output}")
    rates = {s.prompt_id: [] for s in EvaluationResult.load(output).samples}
    for sample in EvaluationResult.load(output).samples:
        rates[sample.prompt_id].append(sample.scores["score"])
    expected = {i: sum(each) / 4 for i, each in rates.items() if 0.25 <= sum(each) / 4 <= 0.75}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["pass_rate"] for row in rows] == list(expected.values()) and 0 < len(rows) < 12
    assert f"kept {len(rows)} of 12 prompts" in capsys.readouterr().out
    held_out = {row["query"][1]["content"]: row["answer"] for row in addition_prompts("test")}
    for row in load_task("gsm8k").load_held_out(str(file), row_map="builtins.dict"):
        assert held_out[row["query"][-1]["content"]] == row["answer"] and row["query"][0]["role"] == "system"


@pytest.mark.parametrize("held_out", [False, True])
def test_examples_stand_before_the_prompts(overrides, tmp_path, held_out):
    rows = [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in range(10, 20)]
    (file := tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = (
        [f"data.eval_source={file}", "data.eval_size=4"] if held_out else [f"data.source={file}", "data.eval_size=4"]
    )
    more = ["task=custom", "eval.scorers={right: exact_match}", "data.examples=2", "eval.num_samples=1", "eval.ks=[]"]
    run_recipe_here("evaluate", *overrides, *source, *more, f"output_dir={tmp_path / 'out'}")
    prompts = [str(row["prompt"]) for row in EvaluationResult.load(tmp_path / "out").table()]
    assert len(set(prompts)) == 4 and all(prompt.count("Q: ") == 3 for prompt in prompts)


def test_a_task_brings_its_settings(overrides, tmp_path):
    run_recipe_here("evaluate", *overrides, "task=gsm8k", "data.source=embedded", f"output_dir={tmp_path}")
    result = EvaluationResult.load(tmp_path)
    assert len({s.prompt_id for s in result.samples}) == 12 and "answer" in result.samples[0].columns
    assert result.settings.generate_kwargs["max_new_tokens"] == 512


def test_vllm_samples_the_same_greedy_completions(overrides, first, fork_server, tmp_path):
    pytest.importorskip("vllm")
    engine = ["inference.engine.enforce_eager=true", "inference.engine.kv_cache_memory_bytes=67108864"]
    arguments = [*overrides, "inference=vllm", *engine, f"output_dir={tmp_path}"]
    done = fork_server.run(recipe_file("evaluate"), arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    mine, theirs = EvaluationResult.load(tmp_path), EvaluationResult.load(first[1])
    same = [a["completion"] == b["completion"] for a, b in zip(mine.table(), theirs.table(), strict=True)]
    assert sum(same) >= 11 and json.loads(done.stdout.splitlines()[-1])["prompts"] == 12  # rounding may break a tie


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["eval.ks=[8]"], "not between 1 and num_samples=4"),
        (["compare=nowhere"], "has no evaluation.json"),
        (["eval.scorers={right: boxed_acuracy}"], "boxed_acuracy"),
        (["generate.temperature=0"], "temperature=0 cannot be combined with num_samples=4"),
        (["format=csv"], "format=csv: unknown; valid: parquet, jsonl"),
        (["inference.parity_every=3"], "inference.parity_every has no effect in this recipe"),
        (["inference=vllm", "model.dtype=bfloat16"], "model.dtype has no effect with an engine"),
        (["eval.batch_size=0"], "batch_size=0 must be at least 1"),
        (["filter.low=0.2"], "have no effect without filter.path"),
        (["filter.path=kept.csv"], "must end with .jsonl"),
        (["filter.path=a.jsonl", "filter.low=0.95"], "must be at most filter.high=0.9"),
        (["filter.path=a.jsonl", "eval.num_samples=0", "eval.ks=[]"], "filter.path requires eval.num_samples"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_impossible_settings_are_refused(overrides, tmp_path, bad, message):
    with pytest.raises(Exception) as raised:
        run_recipe_here("evaluate", *overrides, *bad, f"output_dir={tmp_path}")
    assert message in str(raised.value)


def test_a_task_without_a_scorer_is_judged_by_those_given(overrides, tmp_path):
    file, scorers = tmp_path / "mine.jsonl", "eval.scorers={right: boxed_accuracy}"
    file.write_text("".join(json.dumps(row) + "\n" for row in addition_prompts("train", size=5)))
    run_recipe_here(
        "evaluate", *overrides, "task=custom", f"data.eval_source={file}", scorers, f"output_dir={tmp_path}"
    )
    assert "right/pass@4" in EvaluationResult.load(tmp_path).values
    with pytest.raises(ValueError, match="task='custom' has no default scorer; .* evaluate eval.scorers="):
        run_recipe_here("evaluate", *overrides, "task=custom", f"data.eval_source={file}", f"output_dir={tmp_path}")


@pytest.mark.parametrize(
    ("recipe", "scorer", "setting"),
    [
        ("evaluate", "eval.scorers={own: bad.nan}", "eval.scorers="),
        ("rloo", "eval.scorer=bad.nan", "eval.scorer="),
    ],
)
def test_a_scorer_that_always_fails_ends_with_its_setting_and_its_samples(
    checkpoint, fork_server, tmp_path, recipe, scorer, setting
):
    (tmp_path / "bad.py").write_text("def nan(completions, **columns):\n    return [float('nan')] * len(completions)\n")
    arguments = [f"model.name={checkpoint}", "data.eval_size=4", scorer, "output_dir=out"]
    done = fork_server.run(recipe_file(recipe), arguments, cwd=tmp_path)
    line = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert done.returncode == 1 and f"set {setting} to others" in line and "max_consecutive_failures" not in line
    assert "Failed samples with tracebacks: out/quarantine.jsonl." in line
    samples = [json.loads(entry) for entry in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert len(samples) >= 4 and {sample["kind"] for sample in samples} == {"not_finite"}
