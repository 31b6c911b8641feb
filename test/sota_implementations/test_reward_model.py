"""Reward-model recipe as a user runs it: to the end, killed and resumed, from a file, with wrong settings, in use."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
import torch

from support.recipes import run_recipe_here
from torchrl_rloo.cli.main import recipe_file
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_demonstrations, addition_preferences, addition_prompts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.envs.transforms.shaping import CalibrateScores
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.rewards.classifier import SequenceClassifier

STEPS = 30
KILLED = """
import os, runpy, signal, sys
from torchrl_rloo.run import Run

def log(self, metrics, **kwargs):
    if self.step == 18:
        os.kill(os.getpid(), signal.SIGKILL)
    logged(self, metrics, **kwargs)

logged, Run.log = Run.log, log
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def overrides(warm_model) -> list[str]:
    """Settings with micro-batches and both regularizers, so that the whole loss is used."""
    return [
        f"model.name={warm_model()}",
        f"train.steps={STEPS}",
        "train.pairs_per_step=16",
        "train.micro_batch_size=10",
        "data.limit=600",
        "data.eval_size=96",
        "loss.batch_sum_coeff=0.01",
        "eval.every=15",
        "checkpoint.every=4",
        "schedule.warmup_steps=3",
    ]


def results(output: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "completions.jsonl", "model/model.safetensors", "model/calibration.json")
    return {name: (output / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def finished(overrides, fork_server, tmp_path_factory) -> Path:
    """Output of a run that was never stopped."""
    output = tmp_path_factory.mktemp("finished")
    done = fork_server.run(recipe_file("reward_model"), [*overrides, f"output_dir={output}"])
    assert done.returncode == 0, done.stderr[-3000:]
    (output / "stdout").write_text(done.stdout)
    return output


def test_it_learns_and_says_so(finished):
    result = json.loads((finished / "stdout").read_text().splitlines()[-1])
    assert result["held_out_accuracy_before"] == 0.5  # the head starts at zero, so all pairs are ties
    assert result["held_out_accuracy_after"] > 0.8
    page = Path(result["report"]).read_text()
    assert page.count("data:image/png;base64,") == 1 and "Calibration on held-out pairs" in page
    calibration = json.loads((Path(result["model"]) / "calibration.json").read_text())
    assert calibration["after"]["nll"] <= calibration["before"]["nll"] < 0.5
    assert calibration["temperature"] == result["temperature"]
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert [line["step"] for line in lines if "eval/pair_accuracy" in line] == [0, 15, 30]
    assert {"loss_centering", "loss_batch_sum", "rewards/margin", "grad_norm"} <= lines[-1].keys()


def test_the_directory_is_a_reward_in_the_environment(finished, warm_model):
    """The calibrated scores are the returns of sampled completions."""
    directory = finished / "model"
    model, tokenizer = load_model(warm_model())
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
    rewards = RewardTransform([SequenceClassifier(directory)])
    temperature = json.loads((directory / "calibration.json").read_text())["temperature"]
    env = DatasetChatEnv(
        load_prompts(addition_prompts("test", size=8)),
        tokenizer,
        prompts_per_batch=8,
        num_generations=2,
        rewards=rewards,
        after_rewards=[CalibrateScores(rewards, directory / "calibration.json", functions=["model"])],
    )
    rows = LLMCollector(env, policy).collect()
    scores = rows[keys.REWARD].flatten()
    assert scores.isfinite().all() and scores.std() > 0.1
    raw = SequenceClassifier(directory)(list(rows[keys.QUERY]), list(rows[keys.COMPLETION]), [[]] * len(rows))
    torch.testing.assert_close(scores * temperature, torch.tensor(raw), rtol=1e-4, atol=1e-4)


def test_killed_and_resumed(overrides, finished, fork_server, tmp_path):
    command = [*overrides, f"output_dir={tmp_path}"]
    killed = fork_server.run(KILLED, [recipe_file("reward_model"), *command])
    assert killed.returncode == -signal.SIGKILL
    done = fork_server.run(recipe_file("reward_model"), command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed after step 16 " in done.stdout
    assert results(tmp_path) == results(finished)


def test_a_gaussian_model_is_trained_further_and_used_with_its_uncertainty(overrides, tmp_path):
    few = ["model.gaussian=true", "train.steps=3", "schedule.warmup_steps=1", "data.limit=200", "data.eval_size=20"]
    run_recipe_here("reward_model", *overrides, *few, f"output_dir={tmp_path / 'first'}")
    more = [*few, f"model.name={tmp_path / 'first' / 'model'}"]
    run_recipe_here("reward_model", *overrides[1:], *more, f"output_dir={tmp_path / 'second'}")
    folder = tmp_path / "second" / "model"
    known = json.loads((folder / "config.json").read_text())["held_out_rewards"]
    assert [len(each) for each in known] == [40, 40] and min(known[1]) > 0
    batch = ([[{"role": "user", "content": "1+1?"}]], [[{"role": "assistant", "content": "2"}]], [[1]])
    (plain,), (score,) = SequenceClassifier(folder)(*batch), SequenceClassifier(folder, uncertainty=1.0)(*batch)
    assert plain - 1 < score < plain


def test_any_source_with_its_own_held_out_pairs(overrides, tmp_path, capsys):
    def write(name: str, conversations: list) -> Path:
        rows = [
            {"system": c[0]["content"], "question": c[1]["content"], "chosen": c[2]["content"], "rejected": "No idea"}
            for c in conversations
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    conversations = addition_demonstrations(60, seed=3, clean=True)
    train, held_out = write("train.jsonl", conversations[:48]), write("held_out.jsonl", conversations[48:])
    more = [f"data.source={train}", f"data.eval_source={held_out}", "data.type=chatml.intel", "train.pairs_per_step=8"]
    more += ["train.steps=6", "schedule.warmup_steps=1", f"output_dir={tmp_path / 'out'}"]
    run_recipe_here("reward_model", *overrides, *more)
    printed = capsys.readouterr().out
    assert re.search(r"4\d training pairs, 0 dropped", printed) and "12 held-out pairs" in printed
    result = json.loads(printed.splitlines()[-1])
    assert result["held_out_accuracy_after"] > 0.9 and result["separable"]
    with pytest.raises(ValueError, match="have prompts of training examples"):
        run_recipe_here("reward_model", *overrides, *more, f"data.eval_source={train}", "resume=never")


@pytest.fixture(scope="module")
def few_pairs(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in addition_preferences(100)))
    return f"data.source={file}"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["train.pairs_per_step=100000"], "train.pairs_per_step=100000 must be at most the"),
        (["train.steps=0"], "steps=0"),
        (["resume=yes"], "resume=yes: unknown; valid: auto"),
        (["data.eval_size=0"], "data.eval_size=0 must be at least 1"),
        (["data.max_length=3"], "training pairs are longer than 3 tokens; raise data.max_length"),
        (["data.options.drop_bad_row=true"], "drop_bad_row"),
        (["data.type=chatml.unknown"], "type='chatml.unknown' must be one of"),
        (["loss.centering_coeff=-1"], "centering_coeff=-1"),
        (["model.dtype=float33"], "model.dtype=float33: unknown"),
        (["eval.bins=0"], "bins=0 must be at least 1"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_impossible_settings_are_refused(overrides, few_pairs, tmp_path, bad, message):
    with pytest.raises(Exception) as raised:
        run_recipe_here("reward_model", *overrides, few_pairs, "data.eval_size=20", *bad, f"output_dir={tmp_path}")
    assert message in str(raised.value)


def test_other_settings_do_not_resume(overrides, finished):
    with pytest.raises(ValueError, match="optimizer.lr: 0.001 -> 0.1"):
        run_recipe_here("reward_model", *overrides, "optimizer.lr=0.1", f"output_dir={finished}")
