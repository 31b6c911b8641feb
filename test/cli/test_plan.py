"""Command torchrl-rloo plan: its table and verdict, advice that holds, and messages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from torchrl_rloo.cli import recipe
from torchrl_rloo.cli.main import main

SETTINGS = ("plan.prompts_per_step=4", "plan.num_generations=4", "generate.max_new_tokens=64", "eval.batch_size=4")


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run in a folder with the configuration of a model of 2.6 million weights, but without the weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=3, num_attention_heads=4
    )
    config.save_pretrained("model")
    token = recipe.PROGRAM.set(None)
    yield
    recipe.PROGRAM.reset(token)


def outcome(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    try:
        main(["plan", "--prompt-tokens", "32", "rloo", "model.name=model", *SETTINGS, *argv])
        code = 0
    except SystemExit as error:
        code = error.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_has_the_parts_and_the_passes(capsys):
    code, out, _ = outcome(capsys, "train.micro_batch_tokens=200")
    assert code == 0 and "rows of up to 96 tokens, 32 of the prompt; 16 in a minibatch" in out
    assert "largest pass: 2 rows, 192 positions, padded; 8 passes of a rank" in out
    for part in ("weights", "optimizer states", "gradients", "activations", "key-value cache", "process", "sum"):
        assert re.search(rf"^{part} .*\d\.\d\d", out, re.M)
    assert "peak:" in out


def test_a_change_makes_it_fit(capsys):
    many = "plan.num_generations=64"
    peak = float(re.search(r"\nfits: (\S+) of 99.00 GiB", outcome(capsys, many, "--gpu-memory", "99")[1])[1])
    limit = ("--gpu-memory", f"{peak - 0.1:.2f}")
    code, out, _ = outcome(capsys, many, *limit)
    assert code == 0 and f"does not fit: {peak:.2f} of {limit[1]} GiB, in phase train" in out
    for change in ("model.gradient_checkpointing=true", "train.micro_batch_tokens=6000"):
        assert "\nfits: " in outcome(capsys, many, *limit, change)[1]


def test_ranks_share_the_weights_and_the_rows(capsys):
    whole = outcome(capsys, "train.parallel=ddp", "--ranks", "4")[1]
    shared = outcome(capsys, "--ranks", "4", "train.parallel=fsdp")[1]
    assert "on 4 ranks, ddp (cpu)" in whole and "largest pass: 4 rows" in whole
    assert "gathered weights" in shared and "gathered weights" not in whole


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model.name=./missing"], "./missing"),
        (["--ranks", "2"], "--ranks 2 cannot be combined with train.parallel=none; set it to ddp or fsdp"),
        (["train.parallel=fsdp", "train.shard_size=3", "--ranks", "4"], "train.shard_size=3 requires"),
        (["--prompt-tokens", "5000"], "prompts of 5000 tokens leave none of the 2048 of a row"),
        (["model.nam=x"], "unknown setting model.nam: did you mean model.name?"),
        (["--gpu-memory", "much"], "invalid float value: 'much'"),
        (["--rows", "2"], "unrecognized arguments: --rows"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_an_error_is_one_line(capsys, argv, message):
    code, out, err = outcome(capsys, *argv)
    assert code == 1 and not out and message in err and len(err.splitlines()) == 1


def test_a_recipe_without_groups_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "reward_model"])
    assert "reward_model.py has no algorithm, so no plan, check or server of it; use rloo" in capsys.readouterr().err
