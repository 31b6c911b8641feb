"""Recipes on given rows, as a user runs them: sft and preference, killed and resumed, on ranks, with wrong settings."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.recipes import load_recipe, run_recipe_here, settings
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.embedded import addition_demonstrations, addition_preferences
from torchrl_rloo.functional.preference import PREFERENCE_OBJECTIVES
from torchrl_rloo.modules import load_model

KILLED = """
import os, runpy, signal, sys
from torchrl_rloo.run import Run

def log(self, metrics, **kwargs):
    if self.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    logged(self, metrics, **kwargs)

logged, Run.log = Run.log, log
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = pytest.mark.slow
LORA = "lora={r: 4, target_modules: all-linear}"


@pytest.fixture(scope="module")
def common(warm_model) -> list[str]:
    return [
        f"model.name={warm_model()}",
        "train.steps=6",
        "train.rows_per_step=8",
        "train.micro_batch_size=5",
        "data.limit=200",
        "data.eval_size=40",
        "eval.every=3",
        "eval.task_size=8",
        "checkpoint.every=2",
        "optimizer.lr=3e-4",
        "schedule.warmup_steps=1",
        "log.loggers=[]",
    ]


@pytest.fixture(scope="module")
def run(common, tmp_path_factory):
    """``run(recipe, *settings)``: run a recipe here and return its output directory."""

    def run(recipe: str, *more: str) -> Path:
        output = tmp_path_factory.mktemp(recipe)
        run_recipe_here(recipe, *common, *more, f"output_dir={output}")
        return output

    return run


def metrics(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["sft", "preference"])
def test_killed_and_resumed_to_the_same_bits(common, run, recipe, fork_server, tmp_path):
    command = [*common, f"output_dir={tmp_path}"]
    killed = fork_server.run(KILLED, [recipe_file(recipe), *command])
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    done = fork_server.run(recipe_file(recipe), command)
    assert done.returncode == 0 and "resumed after step 4 " in done.stdout, done.stderr[-3000:]
    whole = run(recipe)
    for name in ("metrics.jsonl", "completions.jsonl", "model/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name
    result = json.loads(done.stdout.splitlines()[-1])
    assert Path(result["report"]).is_file() and load_model(result["model"])
    name = {"sft": "eval/nll", "preference": "eval/loss"}[recipe]
    assert result[f"{name}_after"] < result[f"{name}_before"] and result["eval/greedy_before"] >= 0


@pytest.mark.parametrize(("recipe", "parallel"), [("sft", "fsdp"), ("preference", "ddp")])
def test_two_ranks_train_as_one_process(common, run, recipe, parallel, fork_server, tmp_path):
    more = ["loss.kl_to_ref_coeff=0.1"] if recipe == "sft" else ["loss.name=kto"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "LOCAL_WORLD_SIZE": "2"}
    ranks |= {"WORLD_SIZE": "2"}
    arguments = [*common, *more, "train.rank_timeout=60", f"train.parallel={parallel}", f"output_dir={tmp_path}"]
    started = [
        fork_server.start(
            recipe_file(recipe), arguments, environment=os.environ | ranks | {"RANK": str(i), "LOCAL_RANK": str(i)}
        )
        for i in range(2)
    ]
    try:
        assert [each.wait(120) for each in started] == [0, 0], [each.stderr[-3000:] for each in started]
    finally:
        for each in started:
            each.kill()
    whole = run(recipe, *more)
    ours, expected = (load_file(folder / "model/model.safetensors") for folder in (tmp_path, whole))
    start = load_file(
        Path(next(s for s in common if s.startswith("model.name")).partition("=")[2], "model.safetensors")
    )
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    assert max(float((ours[name] - expected[name]).abs().max()) for name in expected) < 0.02 * moved
    for line, other in zip(metrics(tmp_path), metrics(whole), strict=True):
        losses = {name: value for name, value in other.items() if "loss" in name or "nll" in name or "pair" in name}
        assert {name: line[name] for name in losses} == pytest.approx(losses, abs=1e-4)


def test_reinforcement_learning_continues_the_saved_adapter(run, common, tmp_path):
    folder = run("sft", LORA, "optimizer.lr=0.01") / "model"
    assert (folder / "adapter_config.json").is_file()
    small = ["plan.steps=1", "plan.prompts_per_step=2", "plan.num_generations=2", "data.eval_size=4", "eval.every=0"]
    small += ["generate.max_new_tokens=4", "log.loggers=[]", "check.mode=off", "schedule.warmup_steps=0"]
    small += [common[0], f"lora={{adapter: {folder}}}", "kl.coeff=1e-6", f"output_dir={tmp_path}"]
    run_recipe_here("rloo", *small, "optimizer.lr=1e-9")
    before, after = (load_file(path / "adapter_model.safetensors") for path in (folder, tmp_path / "model"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, atol=1e-6, rtol=0)
    # The reference is the fine-tuned model, not the base model
    assert metrics(tmp_path)[-1]["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(("name", "lora"), [*((name, False) for name in PREFERENCE_OBJECTIVES), ("dpo", True)])
def test_each_objective_starts_from_its_reference(run, name, lora):
    output = run("preference", f"loss.name={name}", "train.steps=2", *([LORA] if lora else []))
    first = metrics(output)[1]
    known = {"dpo": math.log(2), "dpo_norm": math.log(2), "ipo": 25.0, "kto": 0.5}
    if name in known:
        assert first["loss"] == pytest.approx(known[name], abs=1e-3)
    assert {"rewards/margin", "grad_norm", "log_probs/chosen"} <= first.keys()
    assert {"eval/pair_accuracy", "eval/pair_margin", "eval/loss", "eval/greedy"} <= metrics(output)[-1].keys()


@pytest.mark.parametrize(("recipe", "few"), [("preference", []), ("reward_model", ["train.pairs_per_step=8"])])
def test_several_sources_of_pairs(common, recipe, few, tmp_path, capsys):
    pairs = addition_preferences(120)
    intel = [
        {"question": p["chosen"][1]["content"], "chosen": p["chosen"][2]["content"], "rejected": "No"} for p in pairs
    ]
    for name, rows in (("a", pairs[:60]), ("b", intel[60:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = f"{{source: {tmp_path}/b.jsonl, type: chatml.intel, limit: 20}}"
    more = [f"data.sources=[{tmp_path}/a.jsonl, {second}]", "data.eval_size=10", f"output_dir={tmp_path}/out"]
    sizes = [s for s in common if "task" not in s and ("rows_per" not in s or recipe == "preference")]
    run_recipe_here(recipe, *sizes, *more, "train.steps=2", "data.options={markup: tokenizer}", *few)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if " pairs, " in line]
    assert sum(int(line.split()[0]) for line in lines) == len(pairs[:60]) + 20
    with pytest.raises(ValueError, match=r"the sources have the markups \['chatml', 'tokenizer'\]; set markup"):
        run_recipe_here(recipe, *sizes, *more, *few, "train.steps=2", "resume=never")


def test_sft_reads_several_sources_of_other_columns(common, tmp_path, capsys):
    talks = addition_demonstrations(60, seed=3, clean=True)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks[:30]))
    rows = [{"question": t[1]["content"], "answer": t[2]["content"], "id": i} for i, t in enumerate(talks[30:])]
    (tmp_path / "b.json").write_text(json.dumps(rows))
    sources = f"data.sources=[{tmp_path}/a.jsonl, {{source: {tmp_path}/b.json, limit: 20}}]"
    more = ["data.eval_size=10", "train.epochs=2", "loss.tokens=all", "data.system_prompt=Add.", "eval.task=addition"]
    run_recipe_here("sft", *common, sources, *more, f"output_dir={tmp_path}/out")
    printed = capsys.readouterr().out
    assert sum(int(line.split()[0]) for line in printed.splitlines() if " rows, 0 dropped" in line) == 50
    assert len(metrics(tmp_path / "out")) == 1 + 2 * (40 // 8)


ASK, TELL = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
LAYOUTS = {
    "conversation": ({"messages": [ASK, TELL, ASK, TELL]}, [ASK], [TELL, ASK, TELL]),
    "sharegpt": ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, [ASK], [TELL]),
    "texts": ({"question": "2+2?", "answer": "4"}, [ASK], [TELL]),
    "messages": ({"prompt": [ASK, TELL, ASK], "completion": [TELL]}, [ASK, TELL, ASK], [TELL]),
    "alpaca": (
        {"instruction": "Add.", "input": "2+2", "output": "4"},
        [{"role": "user", "content": "Add.\n\n2+2"}],
        [TELL],
    ),
    "text": ({"text": "2+2=4"}, "2+2=4", ""),
    "plain": ({"prompt": "2+2=", "completion": "4"}, "2+2=", "4"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_demonstrations(name):
    row, prompt, rest = LAYOUTS[name]
    recipe = load_recipe("sft")
    assert recipe.split_row(recipe.DemonstrationsConfig(), row, chat=name != "plain") == {
        "prompt": prompt,
        "demonstration": rest,
    }


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"a": "b"}, r"columns \['a'\]; set data.prompt_column"),
        ({"messages": [TELL]}, "must have a prompt and then an assistant message"),
        ({"messages": [ASK]}, "must have a prompt and then an assistant message"),
    ],
)
def test_rows_that_are_no_demonstrations_are_refused(row, fault):
    recipe = load_recipe("sft")
    with pytest.raises(ValueError, match=fault):
        recipe.split_row(recipe.DemonstrationsConfig(), row, chat=True)


@pytest.mark.parametrize(
    ("recipe", "bad", "message"),
    [
        ("sft", ["data.source=a/b", "eval.task_size=9"], "eval.task_size=9 has no effect without eval.task"),
        ("sft", ["loss.beta=0.2"], "loss.beta=0.2 has no effect with loss.loss_function=sft"),
        ("sft", ["loss.loss_function=minor_sft", "loss.kl_to_ref_coeff=0.1"], "cannot be combined"),
        ("sft", ["data.sources=[a.jsonl]"], "data.sources='a.jsonl' is neither"),
        ("sft", ["data.sources=[{source: a/b, tipe: c}]"], "unknown setting data.sources.tipe"),
        ("sft", ["data.source=a/b", "data.sources=[c/d]"], "data.sources cannot be combined with data.source=a/b"),
        ("sft", ["train.rows_per_step=500"], "train.rows_per_step=500 must be at most the"),
        ("sft", ["data.max_length=3"], "training rows are longer than 3 tokens; raise data.max_length"),
        ("sft", ["lora={adapter: ., r: 3}"], "lora.adapter=. has its own settings; remove lora.r"),
        ("sft", ["lora={adapter: ./none}"], "lora.adapter='./none' is neither"),
        ("preference", ["loss.gamma=1"], "loss.name='dpo': unknown field 'gamma'"),
        ("preference", ["loss.name=dpo_sum"], "loss.name=dpo_sum: unknown"),
        ("preference", ["train.micro_batch_tokens=9"], "train.micro_batch_tokens=9 cannot count pairs"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(common, recipe, bad, message, tmp_path):
    with pytest.raises(Exception) as raised:
        run_recipe_here(recipe, *common, *bad, f"output_dir={tmp_path}")
    assert message in str(raised.value)


def test_settings_of_the_command_line_reach_the_loss():
    cfg = settings(
        "preference", "loss.name=kto", "loss.beta=0.2", "loss.desirable_weight=2", "loss.undesirable_weight=3"
    )
    assert cfg.loss.make() == PREFERENCE_OBJECTIVES["kto"](0.2, 2, 3)
