"""Recipe with each task, with a user's data, mixtures, curricula, shaping and failing rewards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hydra.errors import InstantiationException

from support import vision_models
from support.processes import children, wait_until_gone
from support.recipes import run_recipe_here
from support.runs import check_metric_names, read_jsonl
from support.waiting import wait_until
from torchrl_rloo import modules
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.cli.rescore import replay
from torchrl_rloo.embedded.resolve import EMBEDDED_TASKS
from torchrl_rloo.envs.tasks.environments import EnvironmentTask
from torchrl_rloo.envs.tasks.registry import TASKS

CONFIG = recipe_file("rloo").parent / "config"
TASK_FILES = sorted(path.stem for path in (CONFIG / "task").glob("*.yaml"))
PICTURES = ("chartqa", "geometry3k", "shapes")  # for vision-language models
NO_FORMATS = ("custom", *PICTURES, *(name for name, task in TASKS.items() if isinstance(task, EnvironmentTask)))
OF_FORMATS = [name for name in TASK_FILES if hasattr(TASKS.get(name), "dataset") and name not in NO_FORMATS]
BAD = {
    "hangs": (0, "timed_out"),  # at answers of this remainder
    "raises": (1, "raised"),
    "gives_nan": (2, "not_finite"),
    "segfaults": (3, "worker_died"),
}


def number(ids: list[int]) -> int:
    """Return the number by which the functions of ``own_rewards`` decide."""
    return zlib.crc32(str(ids).encode()) % 100


@pytest.fixture(scope="module")
def tiny(warm_model) -> list[str]:
    """Settings of two steps of a small model; few tests need more."""
    return [
        f"model.name={warm_model()}",
        "plan.steps=2",
        "plan.prompts_per_step=4",
        "plan.num_generations=4",
        "generate.max_new_tokens=12",
        "schedule.warmup_steps=1",
        "data.limit=64",
        "data.eval_size=4",
        "log.samples_every=1",
        "log.samples=1000",
    ]


def run(overrides: list[str], output: Path) -> None:
    run_recipe_here("rloo", "check.mode=off", *overrides, f"output_dir={output}")


def table(output: Path, name: str) -> list[dict]:
    return [row for row in read_jsonl(output / "completions.jsonl") if row["table"] == name]


# --------------------------------------------------------------------------------------------------------------- tasks
@pytest.mark.parametrize("task", [name for name in TASK_FILES if name not in NO_FORMATS])
def test_every_task_runs_on_its_generated_rows(tiny, tmp_path, task):
    run([*tiny, f"task={task}", "data.source=embedded", "eval.num_samples=2", "eval.ks=[1,2]"], tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [0, 1, 2] and (tmp_path / "report.html").is_file()
    assert {"eval/greedy", "eval/sampled", "eval/greedy_low"} <= records[-1].keys()
    assert records[-1]["eval/failed"] == 0 and not [k for r in records for k in r if k.startswith("count/eval")]
    assert all(r["frac_abstained"] == 0 for r in records[1:])  # every reward reads only rows of its task
    assert not (tmp_path / "quarantine.jsonl").exists()
    check_metric_names(tmp_path)


@pytest.mark.parametrize("task", OF_FORMATS)
def test_every_task_runs_on_a_file_in_the_format_of_its_dataset(tiny, tmp_path, task):
    source = tmp_path / "data.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in TASKS[task].synthetic_rows("train", 24, 0)))
    run([*tiny, f"task={task}", f"data.source={source}", "plan.steps=1"], tmp_path / "out")
    training, held_out = (table(tmp_path / "out", f"{kind} completions") for kind in ("training", "held-out"))
    assert len(training) == 16 and len({row["prompt"] for row in held_out}) == 4
    assert not {row["prompt"] for row in training} & {row["prompt"] for row in held_out}


def test_gsm8k_from_a_file_of_its_own_format(tiny, tmp_path):
    """The file has the published format: worked solutions with calculator annotations, the number after ``####``."""
    rows = [
        {
            "question": f"Tom has {n} boxes of 1,000 nails. How many nails?",
            "answer": f"He has {n} * 1000 = <<{n}*1000={n * 1000}>>{n},000 nails.\n#### {n},000",
        }
        for n in range(1, 21)
    ]
    source = tmp_path / "gsm8k.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run([*tiny, "task=gsm8k", f"data.source={source}"], tmp_path / "out")
    for row in table(tmp_path / "out", "training completions"):
        boxes = re.search(r"Tom has (\d+) boxes", row["prompt"])[1]
        assert row["answer"] == f"{boxes}000" and "\\boxed{}" in row["prompt"]
    source.write_text(json.dumps({"question": "1+1?", "answer": "two"}))
    with pytest.raises(ValueError, match="must have '####' before its number"):
        run([*tiny, "task=gsm8k", f"data.source={source}"], tmp_path / "other")


def test_own_prompts_and_rewards(tiny, tmp_path, importable):
    """Without a scorer, the rewards score the held-out prompts."""
    source = tmp_path / "mine.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"Say {n}.", "seen": n}) + "\n" for n in range(20)))
    run([*tiny, "task=custom", f"data.source={source}", "reward.functions=[own_rewards.coin]"], tmp_path / "out")
    last = read_jsonl(tmp_path / "out" / "metrics.jsonl")[-1]
    assert 0 <= last["reward"] <= 1 and 0 <= last["eval/greedy"] <= 1
    for kind in ("training", "held-out"):
        assert all(re.search(r"Say \d+\.", row["prompt"]) for row in table(tmp_path / "out", f"{kind} completions"))
    check_metric_names(tmp_path / "out")


TRL_REWARDS = """
def unique_characters(completions, **kwargs):  # for TRL's standard format: texts
    return [len(set(c)) for c in completions]

def curriculum(prompts, completion_ids, trainer_state, log_metric=None, **kwargs):
    assert all(isinstance(prompt, str) for prompt in prompts) and trainer_state.is_world_process_zero
    rewards = [entry["reward"] for entry in trainer_state.log_history if "reward" in entry]
    log_metric("finished_steps", len(rewards))
    log_metric("steps", [trainer_state.global_step, trainer_state.max_steps] == [len(rewards), 3])
    return [len(set(ids)) / 100 for ids in completion_ids]
"""


def test_rows_rewards_and_settings_of_trl(tiny, tmp_path, monkeypatch):
    """Texts stay texts, answers are left out, the reference moves every second step, the entropy bonus adapts."""
    (tmp_path / "trl_rewards.py").write_text(TRL_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "tldr.jsonl"
    source.write_text("".join(json.dumps({"prompt": f"{n}+1 TL;DR:", "completion": " x"}) + "\n" for n in range(20)))
    more = ["task=custom", f"data.source={source}", "data.chat=false", "plan.steps=3", "optimizer.lr=3e-3"]
    more += ["reward.functions=[trl_rewards.unique_characters,trl_rewards.curriculum,repetition_penalty]"]
    more += [
        "kl.coeff=0.05",
        "reference.sync_every=2",
        "reference.share=1",
        "loss.entropy_coeff={target: 100, step: 0.01}",
    ]
    run([*tiny, *more], tmp_path / "whole")
    run([*tiny, *more, "stop_after=2"], tmp_path / "resumed")
    run([*tiny, *more], tmp_path / "resumed")
    records = read_jsonl(tmp_path / "whole" / "metrics.jsonl")[1:]
    assert [r["logged/finished_steps"] for r in records] == [0, 1, 2]
    assert {r["logged/steps"] for r in records} == {1}
    near, far, moved = (abs(r["kl"]) for r in records)
    assert max(near, moved) < 1e-5 < 1e-3 < far, "the reference of the third step is the model that sampled it"
    assert [r["entropy_coeff"] for r in records] == [0, 0.01, 0.02]
    assert records == read_jsonl(tmp_path / "resumed" / "metrics.jsonl")[1:]
    check_metric_names(tmp_path / "whole")


PICTURE_REWARDS = """
def size_and_letters(completions, images, **kwargs):
    return [(sum(map(ord, c[0]["content"])) + i[0].size[0]) % 7 / 7 for c, i in zip(completions, images)]
"""


@pytest.mark.parametrize("packing", ["none", "shared_prefix"])
def test_a_stopped_run_with_pictures_ends_with_the_bits_of_a_whole_one(packing, tmp_path, monkeypatch):
    (tmp_path / "picture_rewards.py").write_text(PICTURE_REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    model, tokenizer, _ = vision_models.build("qwen2_5_vl", tmp_path / "store")
    name = modules.save_model(model, tokenizer, tmp_path / "tiny")
    settings = ["task=geometry3k", "data.source=embedded", "data.limit=24", "data.eval_size=4", f"model.name={name}"]
    settings += ["plan.steps=3", "plan.prompts_per_step=4", "plan.num_generations=4", "generate.max_new_tokens=8"]
    settings += ["optimizer.lr=1e-2", "reward.functions=[picture_rewards.size_and_letters]", "checkpoint.every=1"]
    settings += [f"train.packing={packing}", "model.train_vision=true", "log.samples_every=1"]
    run(settings, tmp_path / "whole")
    run([*settings, "stop_after=2"], tmp_path / "resumed")
    run(settings, tmp_path / "resumed")
    weights = [(tmp_path / folder / "model" / "model.safetensors").read_bytes() for folder in ("whole", "resumed")]
    assert weights[0] == weights[1] != (name / "model.safetensors").read_bytes()
    pictures = list((tmp_path / "whole" / "images").iterdir())
    assert len(pictures) >= 20 and all(len(picture.stem) == 64 for picture in pictures)
    checkpoint = max((tmp_path / "whole" / "checkpoints").iterdir())
    assert checkpoint.stat().st_size < 4 * len(weights[0]), "a checkpoint has references to pictures, not pixels"


def test_mixture_draws_rewards_judges_and_logs_each_task(tiny, tmp_path):
    source = tmp_path / "gsm8k.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in TASKS["gsm8k"].synthetic_rows("train", 40, 0)))
    parts = {"addition": "{weight: 2}", "gsm8k": f"{{weight: 1, source: {source}}}", "countdown": "null"}
    more = ["task=mixture", *(f"task.mixture.{name}={value}" for name, value in parts.items())]
    run([*tiny, *more, "data.eval_size=12", "eval.num_samples=2", "eval.ks=[2]"], tmp_path / "out")
    records = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    shares = {"addition": 0.5, "multiple_choice": 0.25, "gsm8k": 0.25}
    for task, share in shares.items():
        assert [r[f"tasks/{task}/share"] for r in records[1:]] == [share, share]
        assert records[-1][f"count/draws/{task}"] == share * 8
        assert 0 <= records[-1][f"eval/tasks/{task}/greedy"] <= 1 and f"eval/tasks/{task}/score/pass@2" in records[-1]
    functions = {"addition_boxed_accuracy", "multiple_choice_multiple_choice", "gsm8k_numeric_match"}
    assert functions == {name.split("/")[1] for name in records[-1] if name.startswith("rewards/")}
    mean = sum(records[-1][f"eval/tasks/{task}/greedy"] for task in shares) / 3  # of four prompts each
    assert records[-1]["eval/greedy"] == pytest.approx(mean)
    check_metric_names(tmp_path / "out")


def test_help_names_the_tasks_and_engines_that_there_are(tmp_path):
    assert set(TASK_FILES) == {"mixture", "custom", *EMBEDDED_TASKS, *TASKS}
    command = [sys.executable, str(recipe_file("rloo")), "--help-all"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path).stdout
    for group in ("task", "inference"):
        listed = re.search(rf"^ *{group}= +(.*)$", shown, re.MULTILINE)[1]
        files = sorted(p.stem for p in (CONFIG / group).glob("*.yaml") if not p.stem.startswith("_"))
        assert sorted(re.findall(r"\w+", listed)) == files
    for setting in ("reward.executor.mode", "reward.shaping", "curriculum.pass_rate", "eval.num_samples", "eval.ks"):
        assert f"{setting}=" in shown


# ---------------------------------------------------------------------------------------------- curriculum and shaping
def test_groups_without_signal_train_nothing(tiny, tmp_path, importable):
    """No group has a signal, although the KL in the reward makes all returns differ."""
    more = ["reward.functions=[own_rewards.flat]", "curriculum.refill={max_batches: 2}", "kl.target=0.01"]
    more += ["curriculum.cache={capacity: 8}", "kl.coeff=0.05", "plan.minibatches=2", "inference.parity_every=1"]
    run([*tiny, *more], tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")[1:]
    assert all("loss" not in r and "parity/mean" not in r for r in records)
    assert records[1]["kl_coeff"] < records[0]["kl_coeff"] == 0.05
    assert records[-1]["count/refill/missing_groups"] == 8 == records[-1]["count/cache/missing"]
    assert records[-1]["count/zero_signal/all_right"] == 16 and all(r["reward"] == 1 for r in records)
    check_metric_names(tmp_path)


def test_rows_without_signal_leave_the_weights(tiny, tmp_path, importable):
    """Without a curriculum such rows reach the loss, which skips them."""
    run([*tiny, "reward.functions=[own_rewards.flat]", "plan.micro_batch_size=4"], tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")[1:]
    assert all(r["reward"] == 1 and not r.get("grad_norm") for r in records)


REFILLED = ["reward.functions=[own_rewards.coin]", "plan.steps=8", "inference.parity_every=1", "optimizer.lr=3e-3"]


def test_short_batches_surplus_and_cached_groups_train(tiny, tmp_path, importable):
    more = ["curriculum.refill={max_batches: 1}", "curriculum.cache={capacity: 8, max_uses: 4}", "plan.minibatches=2"]
    run([*tiny, *REFILLED, *more], tmp_path)
    records = read_jsonl(tmp_path / "metrics.jsonl")[1:]
    last, trained = records[-1], [r for r in records if "loss" in r]
    assert last["count/refill/short_batches"] > 0 and last["count/cache/used"] > 0
    assert last["count/advantage/groups"] == last["count/refill/groups"] + last["count/cache/used"]
    assert len(trained) >= 6 and all(r["grad_norm"] > 0 for r in trained)
    assert any(r["staleness"] > 0 for r in trained)  # of the cached rows
    check_metric_names(tmp_path)


def test_parity_covers_only_rows_of_the_current_weights(tiny, tmp_path, importable):
    """Surplus rows were sampled before an update, so their gap is not one of sampler and trainer."""
    run([*tiny, *REFILLED, "curriculum.refill={max_batches: 4}"], tmp_path)
    records = [r for r in read_jsonl(tmp_path / "metrics.jsonl") if "parity/max" in r]
    assert any(r["staleness"] > 0 for r in records)
    assert all(r["parity/max"] < 1e-4 for r in records)


def test_pass_rates_are_of_scores_before_shaping(tiny, tmp_path, importable):
    """The pool of pass rates must not take a centered and scaled score of 1 for a failure."""
    shaping = "{_target_: torchrl_rloo.envs.transforms.NormalizeRewards, min_count: 2, center: true}"
    more = ["reward.functions=[own_rewards.flat]", f"reward.shaping=[{shaping}]", "curriculum.pass_rate={}"]
    run([*tiny, *more, "curriculum.rerolls={}"], tmp_path)
    last = read_jsonl(tmp_path / "metrics.jsonl")[-1]
    assert last["pool/too_easy"] > 0 and last["pool/too_hard"] == 0 and "count/rerolls/queued" not in last


def test_several_rewards_kept_apart(tiny, tmp_path, importable):
    """GDPO runs with its weights and whitening, and with groups refilled by the signal of each reward."""
    more = ["reward.functions=[own_rewards.coin,own_rewards.flat]", "reward.weights=[1,2]", "algorithm=grpo"]
    apart = "advantage.credit={name: normalize_then_sum, weights: [1, 2]}"
    run([*tiny, *more, apart], tmp_path / "whole")
    run([*tiny, *more, apart, "advantage.normalize=null", "curriculum.refill={}"], tmp_path / "refilled")
    for folder in ("whole", "refilled"):
        assert any(r.get("grad_norm", 0) > 0 for r in read_jsonl(tmp_path / folder / "metrics.jsonl"))
    with pytest.raises(ValueError, match="curriculum.refill drops groups without signal"):
        run([*tiny, *more, apart, "curriculum.refill={}"], tmp_path / "refused")


# ----------------------------------------------------------------------------------------------------- killed, stopped
EVERYTHING = [
    "task=mixture",
    "plan.steps=10",
    "plan.minibatches=2",
    "sampler.share_weights=false",
    "sampler.sync_every=2",
    "kl.coeff=0.01",
    "eval.every=5",
    "checkpoint.every=3",
    "reward.functions=[own_rewards.coin,own_rewards.raises]",
    "reward.executor={mode: process, workers: 2, timeout: 60}",
    "reward.shaping=[{_target_: torchrl_rloo.envs.transforms.NormalizeRewards, min_count: 8}]",
    "curriculum.rerolls={delay: 6, threshold: 1}",
    "curriculum.refill={max_batches: 2}",
    "curriculum.cache={capacity: 8, max_uses: 2}",
]


def bad_samples(output: Path) -> list[tuple]:
    """Return the rows in quarantine without their durations."""
    return [(r["function"], r["step"], r["completion_ids"]) for r in read_jsonl(output / "quarantine.jsonl")]


def test_killed_and_resumed_with_all_that_has_a_state(tiny, start, finish, tmp_path):
    overrides, killed = [*tiny, *EVERYTHING], tmp_path / "killed"
    finish(overrides, tmp_path / "whole")
    last = read_jsonl(tmp_path / "whole" / "metrics.jsonl")[-1]
    for name in ("cache/used", "refill/short_batches", "rerolls/drawn"):
        assert last[f"count/{name}"] > 0, name  # otherwise the test would prove nothing
    process = start(overrides, killed, hold="train:9")
    workers = children(process.pid, "executor_worker")
    assert len(workers) == 2
    os.kill(process.pid, signal.SIGKILL)  # only this process: its workers must then exit
    wait_until_gone(workers)
    assert "resumed after step 3" in finish(overrides, killed)
    for name in ("metrics.jsonl", "completions.jsonl", "model/model.safetensors"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert bad_samples(killed) == bad_samples(tmp_path / "whole") != []


def test_pass_rates_have_a_state(tiny, start, finish, tmp_path):
    """A pool of pass rates cannot be combined with a mixture, so it is tested alone."""
    overrides = [*tiny, "plan.steps=4", "checkpoint.every=1", "curriculum.pass_rate={floor: 0.2, success: 0.5}"]
    overrides += ["reward.functions=[own_rewards.coin]"]
    finish(overrides, tmp_path / "whole")
    process = start(overrides, tmp_path / "killed", hold="train:3")
    process.kill()
    assert "resumed after step 2" in finish(overrides, tmp_path / "killed")
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("aborted", [False, True], ids=["stopped", "aborted"])
def test_no_worker_outlives_a_run_that_is_stopped(tiny, start, tmp_path, aborted):
    more = ["reward.functions=[own_rewards.flat]", "reward.executor.mode=process", "plan.steps=1000", "eval.every=0"]
    process = start([*tiny, *more], tmp_path, hold="train:2")
    left = children(process.pid, "executor_worker")
    assert left
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    if aborted:
        wait_until(lambda: "second signal" in process.stderr)
        process.send_signal(signal.SIGINT)
    code = process.wait(120)
    assert (code != 0) == (aborted and "stopped after step" not in process.stdout), process.stderr[-3000:]
    wait_until_gone(left)


# --------------------------------------------------------------------------------------------------------- bad rewards
def test_bad_samples_cost_their_scores_and_nothing_else(tiny, tmp_path, importable):
    functions = ",".join(f"own_rewards.{name}" for name in ("coin", *BAD))
    more = [f"reward.functions=[{functions}]", "reward.executor={mode: process, workers: 2, timeout: 5}"]
    run(
        [*tiny, *more, "plan.prompts_per_step=8", "generate.max_new_tokens=2", "eval.every=0"],
        tmp_path,
    )
    assert not children(os.getpid(), "executor_worker")
    samples = table(tmp_path, "training completions")
    assert len(samples) == 2 * 8 * 4
    records, kept = read_jsonl(tmp_path / "metrics.jsonl"), read_jsonl(tmp_path / "quarantine.jsonl")
    for name, (bad, kind) in BAD.items():
        hit = [row for row in samples if int(row["answer"]) % 8 == bad]
        assert 0 < len(hit) < len(samples) / 2, name
        assert records[-1][f"count/rewards/{name}/{kind}"] == len(hit)
        counted = {k for k in records[-1] if k.startswith(f"count/rewards/{name}/")}
        assert counted <= {f"count/rewards/{name}/{kind}", f"count/rewards/{name}/duplicates"}
        expected = Counter((row["step"] - 1, row["prompt"], tuple(row["ids"])) for row in hit)
        mine = [r for r in kept if r["function"] == name]
        found = Counter((r["step"], _text(r["prompt"]), tuple(r["completion_ids"])) for r in mine)
        assert found.keys() == expected.keys() and set(found.values()) == {1}  # identical completions appear once
        assert {r["kind"] for r in mine} == {kind}
        assert all(r[f"rewards/{name}/mean"] == 1 for r in records[1:])  # the other rewards are unaffected
    for row in samples:  # the return sums only the functions that succeeded
        failed = sum(int(row["answer"]) % 8 == bad for bad, _ in BAD.values())
        assert row["reward"] == 4 - failed + float(number(row["ids"]) % 8 == 0)
    report = (tmp_path / "report.html").read_text()
    assert "timed_out" in report and records[-1]["count/rewards/coin/duplicates"] > 0
    check_metric_names(tmp_path)


def _text(prompt: list[dict]) -> str:
    return "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def test_a_reward_that_only_fails_ends_the_run_with_the_evidence(tiny, tmp_path, importable):
    more = ["reward.functions=[own_rewards.broken]", "reward.executor.mode=process"]
    more += ["reward.max_consecutive_failures=5", "eval.scorer=own_rewards.score"]
    with pytest.raises(RuntimeError, match=r"reward broken failed on \d+ samples in a row.*max_consecutive_failures=5"):
        run([*tiny, *more], tmp_path)
    assert not children(os.getpid(), "executor_worker") and read_jsonl(tmp_path / "quarantine.jsonl")[0]["error"]
    with pytest.raises(RuntimeError):
        run([*tiny, *more, "resume=never"], tmp_path)
    ids = bad_samples(tmp_path)
    assert len(ids) == len(set(map(str, ids)))  # only of the second run


# ------------------------------------------------------------------------------------------------------ wrong settings
REFUSED = [
    ("task=gsm9k", "did you mean gsm8k?"),
    ("task.name=gsm9k", "task='gsm9k' is unknown (did you mean 'gsm8k'?)"),
    ("task=mixture task.mixture.addition.weight=-1", "must be one positive number for each of"),
    ("task=mixture task.mixture.gsm9k=1", "task='gsm9k' is unknown"),
    ("task=mixture data.source=some/data", "cannot be that of every task of a mixture"),
    ("reward.functions=[boxed_acuracy]", "boxed_accuracy"),
    ("reward.functions=[{_target_:length_budget}]", "LengthBudget requires the settings"),
    ("reward.executor.timeout=5", "timeout=5"),
    ("reward.executor={mode:process,timeout:0}", "timeout=0"),
    ("reward.max_consecutive_failures=0", "max_consecutive_failures=0"),
    ("reward.shaping=[{_target_:torchrl_rloo.envs.transforms.ClipRewards,low:1,high:0}]", "low=1"),
    ("curriculum.refill={max_batches:0}", "max_batches=0 must be at least 1"),
    ("curriculum.refill={} algorithm=reinforce_pp kl.coeff=0", "curriculum.refill=null"),
    ("curriculum.refill={} advantage.estimator=reinforce", "curriculum.refill=null"),
    ("curriculum.pass_rate={target:[0.9,0.1]}", "(low, high)"),
    ("curriculum.pass_rate={tarjet:1}", "did you mean curriculum.pass_rate.target?"),
    ("curriculum.pass_rate={} task=mixture", "curriculum.pass_rate cannot be combined with a mixture's weights"),
    ("curriculum.rerolls={max_share:0.9}", "max_share=0.9 must be above 0 and at most 0.5"),
    ("eval.num_samples=-1", "num_samples=-1 must be at least 0"),
    ("eval.scorer=boxed_acuracy", "boxed_accuracy"),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED, ids=[bad for bad, _ in REFUSED])
def test_impossible_settings_are_refused(tiny, tmp_path, bad, message):
    with pytest.raises((ValueError, InstantiationException)) as raised:
        run([*tiny, *bad.split()], tmp_path)
    assert message in str(raised.value)


def test_evaluation_without_samples(tiny, tmp_path, capsys):
    run([*tiny, "eval.num_samples=0"], tmp_path)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["eval/greedy_after"] >= 0
    assert "eval/sampled" not in read_jsonl(tmp_path / "metrics.jsonl")[-1]


def test_stored_rows_with_pictures_are_replayed_from_another_folder(tmp_path):
    settings = ["task=shapes", "plan.steps=1", "plan.prompts_per_step=4", "plan.num_generations=4", "data.eval_size=4"]
    run([*settings, f"rollouts.path={tmp_path / 'rows'}"], tmp_path / "out")
    paths = [str(tmp_path / name) for name in ("rows", "out/model", "page.html")]
    replay(paths[0], None, paths[1], None, "rloo", "cpu", "float32", paths[2])
    assert "data:image/jpeg" in (tmp_path / "page.html").read_text()


def test_checks_tell_prompts_apart_by_their_pictures():
    command = [sys.executable, "-m", "torchrl_rloo.cli.main", "check", "rloo", "task=shapes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "checks passed, 0 warnings, 0 errors" in done.stdout, done.stdout + done.stderr
