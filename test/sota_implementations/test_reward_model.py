"""The reward-model script, as a user runs it: to the end, killed and resumed, on a file, misconfigured; and its use."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, demonstrations, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.envs.transforms.shaping import CalibrateScores
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.rewards.classifier import SequenceClassifier

SCRIPT = Path(__file__).resolve().parents[2] / "sota_implementations" / "reward_model" / "reward_model.py"
STEPS = 60
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return warm_start(seed=0, steps=200, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def overrides(start) -> list[str]:
    """Micro-batches and both terms, so that all of the loss is in use."""
    return [
        f"model.name={start}",
        f"train.steps={STEPS}",
        "train.pairs_per_step=16",
        "train.micro_batch_size=10",
        "+data.limit=900",
        "data.eval_size=128",
        "loss.batch_sum_coeff=0.01",
        "eval.every=30",
        "checkpoint.every=4",
    ]


def command(overrides: list[str], output: Path) -> list[str]:
    return [sys.executable, str(SCRIPT), *overrides, f"output_dir={output}"]


def results(output: Path) -> dict[str, bytes]:
    names = ("metrics.jsonl", "completions.jsonl", "model/model.safetensors", "model/calibration.json")
    return {name: (output / name).read_bytes() for name in names}


def call_main(overrides: list[str], output: Path) -> None:
    spec = importlib.util.spec_from_file_location("reward_model_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with initialize_config_dir(str(SCRIPT.parent / "config"), version_base="1.3"):
        cfg = compose("reward_model", [*overrides, f"output_dir={output}"])
    module.main(cfg)


@pytest.fixture(scope="module")
def finished(overrides, tmp_path_factory) -> Path:
    """A run that was never stopped."""
    output = tmp_path_factory.mktemp("finished")
    done = subprocess.run(command(overrides, output), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (output / "stdout").write_text(done.stdout)
    return output


def test_it_learns_and_says_so(finished):
    result = json.loads((finished / "stdout").read_text().splitlines()[-1])
    assert result["held_out_accuracy_before"] == 0.5  # the head starts at zero: all are ties
    assert result["held_out_accuracy_after"] > 0.9
    assert result["nll_after_calibration"] <= result["nll_before_calibration"] < 0.5
    page = Path(result["report"]).read_text()
    assert page.count("data:image/png;base64,") == 2 and "Calibration on held-out pairs" in page
    assert json.loads((Path(result["model"]) / "calibration.json").read_text())["temperature"] == result["temperature"]
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert {"loss_centering", "loss_batch_sum", "rewards/margin", "grad_norm"} <= lines[-1].keys()


def test_the_directory_is_a_reward_in_the_environment(finished, start):
    """Its calibrated scores are the returns of what a policy samples, and tell right answers from wrong ones."""
    directory = finished / "model"
    model, tokenizer = load_model(start)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
    rewards = RewardTransform([SequenceClassifier(directory), boxed_accuracy], weights=[1.0, 0.0])
    temperature = json.loads((directory / "calibration.json").read_text())["temperature"]
    env = DatasetChatEnv(
        load_prompts(addition_prompts("test", size=64)),
        tokenizer,
        prompts_per_batch=32,
        num_generations=4,
        rewards=rewards,
        after_rewards=[CalibrateScores(rewards, directory / "calibration.json", functions=["model"])],
    )
    rows = LLMCollector(env, policy).collect()
    scores, right = rows[keys.REWARDS].unbind(-1)
    assert torch.equal(rows[keys.REWARD].flatten(), scores) and scores.isfinite().all()
    raw = SequenceClassifier(directory)(list(rows[keys.QUERY]), list(rows[keys.COMPLETION]), [[]] * len(rows))
    torch.testing.assert_close(scores * temperature, torch.tensor(raw), rtol=1e-4, atol=1e-4)
    assert 0 < right.mean() < 1
    assert scores[right == 1].mean() > scores[right == 0].mean() + 1


def test_killed_and_resumed(overrides, finished, tmp_path):
    process = subprocess.Popen(
        command(overrides, tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    deadline, file = time.monotonic() + 120, tmp_path / "metrics.jsonl"
    while not file.exists() or len(file.read_bytes().splitlines()) < 35:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = subprocess.run(command(overrides, tmp_path), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"resumed after step (32|36|40) ", done.stdout)
    assert results(tmp_path) == results(finished)


def test_any_source_with_its_own_held_out_pairs(overrides, tmp_path, capsys):
    def write(name: str, conversations: list) -> Path:
        rows = [
            {"system": c[0]["content"], "question": c[1]["content"], "chosen": c[2]["content"], "rejected": "No idea"}
            for c in conversations
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    conversations = demonstrations(60, seed=3, clean=True)
    train, held_out = write("train.jsonl", conversations[:48]), write("held_out.jsonl", conversations[48:])
    more = [f"data.source={train}", f"data.eval_source={held_out}", "data.type=chatml.intel", "train.pairs_per_step=8"]
    call_main([*overrides, *more, "train.steps=6", "schedule.warmup_steps=1", "model.dtype=float32"], tmp_path / "out")
    printed = capsys.readouterr().out
    assert re.search(r"4\d training pairs, each seen \d(\.\d+)? times; 12 held out", printed)
    result = json.loads(printed.splitlines()[-1])
    assert result["held_out_accuracy_after"] > 0.9 and result["separable"]
    with pytest.raises(ValueError, match="have prompts of training pairs"):
        call_main([*overrides, *more, f"data.eval_source={train}"], tmp_path / "same")


def test_no_prompt_is_in_both_parts():
    spec = importlib.util.spec_from_file_location("reward_model_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = {"eval_source": None, "eval_split": None, "eval_size": 100}
    train, held_out = module.pairs("embedded", "chat_template.argilla_chat", seed=0, limit=900, **options)
    prompts = [{str(e["prompt"]) for e in part} for part in (train, held_out)]
    assert len(held_out) == 100 and len(train) == 800 and not prompts[0] & prompts[1]
    ordered = [{"question": f"{subject} {i}", "chosen": "a", "rejected": "b"} for subject in "abcd" for i in range(50)]
    own = {"eval_source": ordered, "eval_split": None, "eval_size": 40}
    chosen = module.pairs([{"question": "x", "chosen": "a", "rejected": "b"}], "chatml.intel", seed=0, limit=1, **own)[
        1
    ]
    assert len(chosen) == 40 and {e["prompt"][0]["content"][0] for e in chosen} == set("abcd")
    seen = [i for _, batch in zip(range(2 * 6), module.batches(20, 3, 0, 0), strict=False) for i in batch]
    assert len(set(seen[:18])) == 18 and seen[:18] != seen[18:]
    later = [i for _, batch in zip(range(5), module.batches(20, 3, 0, 7), strict=False) for i in batch]
    assert later == seen[21:36]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (["train.pairs_per_step=100000"], "pairs_per_step=100000 from 1 to"),
        (["train.steps=0"], "steps=0 must be at least 1"),
        (["resume=yes"], "must be 'auto' or 'never'"),
        (["data.eval_size=0"], "data.eval_size=0 of"),
        (["data.max_length=3"], "training pairs are longer than 3 tokens: raise data.max_length"),
        (["data.type=chatml.unknown"], "type='chatml.unknown' is none"),
        (["loss.centering_coeff=-1"], "centering_coeff=-1 must be"),
        (["model.dtype=float33"], "dtype='float33' is not a torch dtype"),
        (["eval.bins=0"], "bins=0 must be at least 1"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_impossible_settings_are_refused(overrides, tmp_path, bad, message):
    with pytest.raises(Exception) as raised:
        call_main([*overrides, "data.eval_size=20", *bad], tmp_path)
    assert message in str(raised.value)


def test_other_settings_do_not_resume(overrides, finished):
    with pytest.raises(ValueError, match="optimizer.lr: 0.001 -> 0.1"):
        call_main([*overrides, "optimizer.lr=0.1"], finished)


def test_help_says_how_to_use_it():
    done = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=300)
    assert "data.type=chat_template.default" in done.stdout and "pairs_per_step: 32" in done.stdout
