"""Health of a run: events in its folder, stop, rollback with a smaller learning rate, resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.histories import constant_rule
from support.runs import read_jsonl
from torchrl_rloo.diagnostics.health import Health
from torchrl_rloo.run import Run, repeat_after_rollback
from torchrl_rloo.run.health_log import RollbackError, UnhealthyRunError
from torchrl_rloo.training import make_schedule, optimizer_step
from torchrl_rloo.training.step import NonFiniteGradientError

LARGE = constant_rule("large", "weight", 5.0, severity="stop")


def loop(
    directory: Path, health: Health, resume: int | str | None = None, *, steps: int = 10, bad_at: int | None = None
) -> tuple[Run, list[float]]:
    """Train one weight, which moves by the learning rate at each step, 1 at first."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = make_schedule(optimizer, 100, warmup_steps=0, final_fraction=1.0)
    parts, rates = {"model": model, "optimizer": optimizer, "scheduler": scheduler}, []
    options = {"loggers": [], "checkpoint_every": 2, "keep": 5, "resume": resume or "auto"}
    run = Run(directory, steps, parts, health=health, **options)
    with run:
        for step in run.steps():
            rates.append(optimizer.param_groups[0]["lr"])
            model.weight.grad = torch.full((1, 1), torch.inf if step == bad_at else -1.0)
            optimizer_step(model, optimizer, scheduler)
            run.log({"weight": float(model.weight.detach())})
    return run, rates


def events(directory: Path) -> list[tuple[int, str, str]]:
    return [(line["step"], line["rule"], line["state"]) for line in read_jsonl(directory / "health.jsonl")]


def test_a_healthy_run_has_no_file_and_the_same_checkpoints(tmp_path):
    run, _ = loop(tmp_path, Health(), steps=4)
    assert run.finished and not (tmp_path / "health.jsonl").exists()


def test_events_are_shown_and_written_and_the_run_goes_on(tmp_path, capsys):
    run, _ = loop(tmp_path, Health([LARGE], stop_on=()))
    assert run.finished and events(tmp_path) == [(6, "large", "fired")]
    assert "step 6, stop, large: It is high. (weight 6) Lower it." in capsys.readouterr().err


def test_a_stop_leaves_the_checkpoints_from_before(tmp_path):
    for _ in range(2):  # the same command finds the same
        with pytest.raises(UnhealthyRunError, match="stopped at step 6 by health rule .*large: It is high"):
            loop(tmp_path, Health([LARGE], stop_on=["stop"]))
        assert sorted(path.stem for path in (tmp_path / "checkpoints").glob("*.pt")) == [
            "step_00000002",
            "step_00000004",
        ]
        assert events(tmp_path) == [(6, "large", "fired")]
    run, _ = loop(tmp_path, Health([LARGE], stop_on=()))  # it may go on without the rule
    assert run.finished and events(tmp_path) == [(6, "large", "fired")]


def test_rollbacks_lower_the_learning_rate_until_their_limit(tmp_path):
    """A half and then a quarter of the rate reach the limit later; the third time ends the run."""
    settings = {"stop_on": (), "rollback_on": ["large"], "max_rollbacks": 2}
    attempts = []

    def train(step: int | None) -> None:
        attempts.append(step)
        run, rates = loop(tmp_path, Health([LARGE], **settings), step, steps=16)
        attempts.append((run.finished, rates[0]))

    with pytest.raises(UnhealthyRunError, match="after 2 rollbacks"):
        repeat_after_rollback(train)
    assert attempts == [None, 4, 6]
    lines = read_jsonl(tmp_path / "health.jsonl")
    back = [line for line in lines if line["rule"] == "rollback"]
    assert [(line["step"], line["evidence"]["to_step"]) for line in back] == [(6, 4), (7, 6)]
    assert [line["evidence"]["learning_rate_factor"] for line in back] == [0.5, 0.25]
    assert "with learning rates times 0.25, because of large" in back[1]["sentence"]
    weights = {line["step"]: line["weight"] for line in read_jsonl(tmp_path / "metrics.jsonl")}
    assert [weights[step] for step in (4, 5, 6, 7)] == [4.0, 4.5, 5.0, 5.25]
    # A process that takes over has the rate of the last rollback, although the checkpoint is from before it
    _, rates = loop(tmp_path, Health([LARGE], stop_on=()), steps=16)
    assert rates[0] == 0.25 and [rule for _, rule, _ in events(tmp_path)].count("rollback") == 2


def test_a_gradient_that_is_not_finite_goes_back(tmp_path):
    with pytest.raises(RollbackError) as raised:
        loop(tmp_path, Health(stop_on=(), rollback_on=["nan"]), bad_at=7)
    assert raised.value.step == 6 and isinstance(raised.value.__context__, NonFiniteGradientError)
    _, rates = loop(tmp_path, Health(stop_on=(), rollback_on=["nan"]), raised.value.step)
    assert rates == [0.5] * 4 and events(tmp_path) == [(7, "nan", "fired"), (7, "rollback", "fired")]


def test_a_gradient_that_is_not_finite_ends_the_run_with_its_own_error(tmp_path):
    with pytest.raises(NonFiniteGradientError, match="non-finite"):
        loop(tmp_path, Health(), bad_at=7)
    assert events(tmp_path) == [(7, "nan", "fired")]


def test_without_a_checkpoint_the_run_stops(tmp_path):
    with pytest.raises(UnhealthyRunError, match="without a checkpoint to go back to"):
        loop(tmp_path, Health([constant_rule("early", "weight", 0.5)], stop_on=(), rollback_on=["early"]))


def test_a_run_that_starts_over_drops_the_events(tmp_path):
    loop(tmp_path, Health([LARGE], stop_on=()))
    loop(tmp_path, Health([LARGE], stop_on=()), "never", steps=3)
    assert events(tmp_path) == []


def test_a_checkpoint_without_health_is_restored(tmp_path):
    loop(tmp_path, None, steps=4)
    run, _ = loop(tmp_path, Health([LARGE], stop_on=()))
    assert run.finished and events(tmp_path) == [(6, "large", "fired")]
