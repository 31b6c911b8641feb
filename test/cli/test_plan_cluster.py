"""Command torchrl-rloo plan --cluster: its tables, recommendation and picture, and messages."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from torchrl_rloo.cli import recipe
from torchrl_rloo.cli.cluster_options import HELP, ClusterOptions, describe_options
from torchrl_rloo.cli.main import main

SETTINGS = ("plan.prompts_per_step=8", "plan.num_generations=4", "generate.max_new_tokens=512")
CLUSTER = ("cluster.gpus=4", "cluster.gpu=L4", "cluster.steps=2", "cluster.max_staleness=1", "cluster.mean_tokens=100")


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run in a folder with the configuration of a model of one billion weights, but without the weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32
    )
    config.save_pretrained("model")
    token = recipe.PROGRAM.set(None)
    yield
    recipe.PROGRAM.reset(token)


def outcome(capsys: pytest.CaptureFixture, *argv: str, cluster: tuple[str, ...] = CLUSTER) -> tuple[int, str, str]:
    try:
        main(["plan", "--cluster", "rloo", "model.name=model", *SETTINGS, *cluster, *argv])
        code = 0
    except SystemExit as error:
        code = error.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_prints_splits_modes_sizes_and_a_recommendation(capsys, tmp_path: Path):
    code, out, err = outcome(capsys, "cluster.scale=2", "--picture", "cluster.png")
    assert code == 0, err
    assert "model on 4 L4; 8 groups of 4 in a step" in out and "assumed: prompts of 512 tokens" in out
    splits = [tuple(map(int, pair)) for pair in re.findall(r"^(\d) \+ (\d) ", out, re.M)]
    assert splits and all(sum(split) == 4 for split in splits)
    modes = re.findall(r"^(sync, same GPUs|sync|one-step-off|async|partial) .* (\d+\.\d\d)$", out, re.M)
    assert [name for name, _ in modes] == ["sync, same GPUs", "sync", "one-step-off", "async", "partial"]
    assert modes[0][1] == "1.00" and re.search(r"^2 +1 \+ 1 .*(engines|trainer|waiting)$", out, re.M)
    recommended = re.search(r"^recommended: (\d) engines? of 1 GPU and (\d) trainer GPUs, ", out, re.M)
    assert tuple(map(int, recommended.groups())) in splits
    assert (tmp_path / "cluster.png").stat().st_size > 10_000


def test_measurements_replace_the_data_sheet(capsys, tmp_path: Path):
    (tmp_path / "lengths.txt").write_text("100\n300\n")
    measured = ("cluster.lengths=lengths.txt", "cluster.rate=1:50,64:1000", "cluster.engines=1", "cluster.turns=2")
    code, out, err = outcome(capsys, *measured)
    assert code == 0, err
    assert "50 tokens/s of 1 request, 1,000 of" in out and "conversations of 2 turns" in out
    sampled = float(re.search(r"turns, (\d+) sampled tokens", out)[1])
    assert sampled == pytest.approx(400, rel=0.1) and re.search(r"^1 \+ 3 ", out, re.M)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cluster.gpux=3"], "unknown setting cluster.gpux (did you mean 'gpu' or 'gpus'?)"),
        (["cluster.gpus=many"], "cluster.gpus=many must be of type int"),
        (["cluster.gpus=1"], "cluster.gpus=1 must be at least 2"),
        (["cluster.gpu=H10"], "cluster.gpu=H10 is unknown (did you mean"),
        (["cluster.mode=asynk"], "cluster.mode=asynk is unknown (did you mean"),
        (["cluster.mfu=0"], "cluster.mfu=0.0 must be above 0"),
        (["cluster.engines=4"], "cluster.engines=4 of 1 GPUs leave none of cluster.gpus=4 for the trainer"),
        (["cluster.rate=64"], "cluster.rate=64 must be like 1:60,64:1800"),
        (["cluster.scale=a"], "cluster.scale=a must be like 8,64,512"),
        (["cluster.lengths=none.txt"], "none.txt"),
        (["plan.prompts=3"], "unknown setting plan.prompts"),
    ],
)
def test_wrong_settings_are_named(capsys, argv: list[str], message: str):
    code, _, err = outcome(capsys, *argv)
    assert code and message in err and "Traceback" not in err


def test_a_picture_requires_a_cluster(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "rloo", "model.name=model", "--picture", "x.png"])
    assert "--picture x.png requires --cluster" in capsys.readouterr().err


def test_the_help_lists_every_setting(capsys):
    assert set(HELP) == set(vars(ClusterOptions()))
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert describe_options() in capsys.readouterr().out
