"""Logs of a run: files, loggers, display, and resume after a kill."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import os
import pty
import struct
import sys
import termios
import time
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchrl.record.loggers import MLFlowLogger, WandbLogger

from torchrl_rloo.run import Checkpointer, RunLogger
from torchrl_rloo.run.loggers import log_rows
from torchrl_rloo.run.logging import Digest
from torchrl_rloo.run.progress import duration

_FILES = ("metrics.jsonl", "timings.jsonl", "completions.jsonl")


def _log_step(logger: RunLogger, step: int, seconds: float = 0.5) -> None:
    metrics = {"reward": torch.tensor(step / 3), "kl": math.nan if step == 2 else 0.1 * step}
    logger.log(step, metrics, timings={"time/step": seconds, "tokens/s": 100 / seconds})
    if step % 2 == 0:
        logger.log_table(step, "completions", [{"completion": f"é {step}\n<b>", "reward": torch.tensor(0.25)}])


def _contents(directory: Path, names: tuple[str, ...] = _FILES) -> list[bytes]:
    return [(directory / name).read_bytes() for name in names]


def test_files_hold_one_object_per_line_step_first(tmp_path: Path) -> None:
    with RunLogger(tmp_path, loggers=[], progress=False) as logger:
        logger.log(1, {"b": 1, "a": torch.tensor(0.5), "nan": math.nan, "inf": math.inf, "flag": True})
        logger.log_table(1, "completions", [{"text": "a\n\ud800", "score": math.nan, "messages": ({"role": "user"},)}])
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "b": 1.0, "a": 0.5, "nan": null, "inf": null, "flag": 1.0}\n'
    )
    assert json.loads((tmp_path / "completions.jsonl").read_text()) == {
        "step": 1, "table": "completions", "text": "a\n\\ud800", "score": None, "messages": [{"role": "user"}],
    }  # fmt: skip
    assert logger.history[0]["b"] == 1.0 and math.isnan(logger.history[0]["inf"])
    assert logger.tables["completions"][0]["step"] == 1


def test_timings_do_not_reach_the_files_that_a_seed_determines(tmp_path: Path) -> None:
    for name, seconds in (("a", 0.5), ("b", 0.7)):
        with RunLogger(tmp_path / name, loggers=[], progress=False) as logger:
            for step in range(1, 5):
                _log_step(logger, step, seconds)
    a, b = _contents(tmp_path / "a"), _contents(tmp_path / "b")
    assert a[0] == b[0] and a[2] == b[2]
    assert a[1] != b[1]


def test_a_resumed_run_leaves_the_record_of_one_never_stopped(tmp_path: Path) -> None:
    with RunLogger(tmp_path / "whole", progress=False) as logger:
        for step in range(1, 7):
            _log_step(logger, step)

    killed = RunLogger(tmp_path / "resumed", progress=False)
    for step in range(1, 6):
        _log_step(killed, step)
        if step == 3:
            Checkpointer(tmp_path / "checkpoints").save(step, {"logger": killed.state_dict()})
    with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rew')  # killed while writing a line
    for logger in killed._loggers:
        logger.flush()
    time.sleep(1.1)  # its files are read in the order of the second in their names

    with RunLogger(tmp_path / "resumed", progress=False) as logger:
        logger.load_state_dict(Checkpointer(tmp_path / "checkpoints").load()["logger"])
        assert len((tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()) == 3
        assert math.isnan(logger.history[1]["kl"])
        for step in range(4, 7):
            _log_step(logger, step)

    assert _contents(tmp_path / "resumed") == _contents(tmp_path / "whole")
    events = EventAccumulator(str(tmp_path / "resumed" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1, 2, 3, 4, 5, 6]
    assert events.Scalars("reward")[4].value == pytest.approx(5 / 3)


def test_completions_with_line_breaks_of_unicode_can_be_resumed(tmp_path: Path) -> None:
    text = "next line\x85, line\u2028 and paragraph\u2029 separators, \x1c, \r and \n"
    with RunLogger(tmp_path, progress=False) as logger:
        logger.log_table(1, "completions", [{"completion": text}])
        state = logger.state_dict()
    with RunLogger(tmp_path, progress=False) as logger:
        logger.load_state_dict(state)
        assert logger.tables["completions"][0]["completion"] == text
        assert logger.state_dict() == state


def test_a_fresh_run_starts_the_files_anew(tmp_path: Path) -> None:
    with RunLogger(tmp_path, progress=False) as logger:
        for step in range(1, 5):
            _log_step(logger, step)
    time.sleep(1)  # TensorBoard sorts event files of one second by a counter as text: the tenth is before the ninth
    with RunLogger(tmp_path, progress=False) as logger:
        logger.log(1, {"reward": 0.0})
    assert _contents(tmp_path) == [b'{"step": 1, "reward": 0.0}\n', b"", b""]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward")] == [1]


def test_making_and_closing_a_logger_touches_no_earlier_record(tmp_path: Path) -> None:
    with RunLogger(tmp_path, progress=False) as logger:
        _log_step(logger, 1)
    before = _contents(tmp_path)
    RunLogger(tmp_path, progress=False).close()
    assert _contents(tmp_path) == before


def test_tensorboard_shows_completions_as_text(tmp_path: Path) -> None:
    with RunLogger(tmp_path, progress=False) as logger:
        logger.log_table(3, "completions", [{"completion": "<b>two\nlines", "reward": 1.0}])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.step == 3
    assert event.tensor_proto.string_val[0].decode() == "**completion**\n\n    <b>two\n    lines\n\n**reward**\n\n    1"


def test_the_rendering_is_short_and_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "q", "completion": "\x1b[31mred\r\n" + "x" * 5000 + "end", "reward": 0.123456}] * 5
    with RunLogger(tmp_path, loggers=[], progress=None) as logger:
        text = logger.log_table(8, "completions", rows)
    assert text.startswith("completions at step 8 (2 of 5 rows)\n  prompt      q\n  completion  \\x1b[31mred\\r\\nxxx")
    assert "xend\n  reward      0.1235\n\n  prompt" in text
    assert len(text) < 800 and "\x1b" not in text and "\r" not in text
    assert capsys.readouterr().err == text + "\n"


def test_off_a_terminal_there_are_about_twenty_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogger(tmp_path, loggers=[], total_steps=120, headline=["reward", "eval/accuracy", "tokens/s"]) as logger:
        for step in range(1, 121):
            metrics = {"reward": step / 120, "loss": 1.0}
            if step % 50 == 0:
                metrics["eval/accuracy"] = 0.83
            logger.log(step, metrics, timings={"tokens/s": 12345.6})
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and "\r" not in captured.err
    assert lines[0] == "step 1/120  reward 0.00833  tokens/s 12,346"
    shown = [int(line.split("/")[0].removeprefix("step")) for line in lines]
    assert shown == sorted({1, *range(6, 121, 6), 50, 100})  # steps with an evaluation have an extra line
    assert [step for step, line in zip(shown, lines, strict=True) if "eval/accuracy 0.83" in line] == [50, 100]
    assert "s/step  eta " in lines[10] and lines[-1].endswith("s/step")


def test_the_last_step_of_a_stopped_run_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogger(tmp_path, loggers=[], total_steps=1000) as logger:
        for step in range(1, 18):
            logger.log(step, {"reward": 0.5})
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "step 1/1000",
        "step 17/1000",
    ]


def test_without_progress_nothing_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLogger(tmp_path, loggers=[], progress=False) as logger:
        _log_step(logger, 2)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_there_is_one_line_that_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # as large as a terminal
    with open(inner, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with RunLogger(tmp_path, loggers=[], total_steps=4) as logger:
            for step in range(1, 5):
                logger.log(step, {"reward": 0.5})
            logger.log_table(4, "completions", [{"completion": "hello"}])
        print("the end", file=terminal, flush=True)
        shown = ""
        while "the end" not in shown:  # what is written arrives with a delay, in pieces
            shown += os.read(outer, 4096).decode()
    os.close(outer)
    assert [f"\r\x1b[Kstep {step}/4  reward 0.5" in shown for step in range(1, 5)] == [True] * 4
    assert "\r\x1b[Kcompletions at step 4" in shown and "completion  hello" in shown and "eta" in shown


def test_a_digest_tells_of_the_steps_since_the_last_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def digest(entries, before) -> str:
        steps = [entry["step"] for entry in entries]
        speed = sum(entry["tokens/s"] for entry in entries)
        return f"steps {steps[0]} to {steps[-1]} after {before and before['step']}, {speed:g}"

    with RunLogger(tmp_path, loggers=[], total_steps=47, digest=digest) as logger:
        for step in range(1, 48):
            _log_step(logger, step)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("steps")]
    starts = [
        "steps 1 to 11 after None",
        "steps 12 to 22 after 11",
        "steps 23 to 33 after 22",
        "steps 34 to 44 after 33",
    ]
    assert shown == [f"{start}, 2200" for start in starts] + ["steps 45 to 47 after 44, 600"]


def test_a_late_digest_does_not_wait_for_its_step() -> None:
    time = [0.0]
    digest = Digest(lambda entries, before: str(len(entries)), None, clock=lambda: time[0])
    assert digest.text({"step": 1}) == ""
    time[0] = 600.0
    assert [digest.text({"step": step}) for step in (2, 3)] == ["2", ""]


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'tensorbord'; valid: \['mlflow', 'tensorboard', 'trackio', 'wandb'\]"):
        RunLogger(tmp_path, loggers=["tensorbord"])
    with pytest.raises(ValueError, match=r"arguments for \['wandb'\]"):
        RunLogger(tmp_path, loggers=[], logger_kwargs={"wandb": {}})
    with RunLogger(tmp_path, loggers=[], progress=False) as logger:
        with pytest.raises(TypeError, match=r"metrics\['reward'\] must be a number, got 'high'"):
            logger.log(1, {"reward": "high"})
        with pytest.raises(TypeError, match=r"timings\['t'\] must be a number"):
            logger.log(1, {}, timings={"t": torch.zeros(2)})
        with pytest.raises(ValueError, match="'step'; rename it"):
            logger.log(1, {"step": 1.0})
        with pytest.raises(ValueError, match="column 'table'"):
            logger.log_table(1, "completions", [{"table": 1}])
        with pytest.raises(TypeError, match="column x.* has a object"):
            logger.log_table(1, "completions", [{"x": [object()]}])
    assert logger.history == []


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(ImportError, match=rf"{name}; run: pip install 'torchrl_rloo\[loggers\]'"):
        RunLogger(tmp_path, loggers=[name])


@pytest.mark.parametrize(("name", "kwargs"), [("wandb", {"offline": True, "log_env_packages": False}), ("mlflow", {})])
def test_services_take_a_run_and_the_next_one(tmp_path: Path, name: str, kwargs: dict[str, object]) -> None:
    pytest.importorskip(name)
    for _ in range(2):
        with RunLogger(tmp_path, loggers=[name], progress=False, logger_kwargs={name: kwargs}) as logger:
            _log_step(logger, 2)
    assert len(logger.history) == 1


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 151, 3599.7, 11220)] == ["0s", "1m00s", "2m31s", "1h00m", "3h07m"]


_ROWS = [{"prompt": "?", "reward": 0.5, "messages": [{"role": "user"}]}, {"prompt": "!", "reward": None}]
_CELLS = [[3, "?", 0.5, '[{"role": "user"}]'], [3, "!", None, None]]


class _Service:
    """Stand-in of the packages wandb and mlflow, and of their runs; it records what is logged."""

    def __init__(self) -> None:
        self.tables: list[tuple] = []
        self.info = types.SimpleNamespace(run_id="7")

    def log(self, values: dict, **_: object) -> None:
        self.tables += [(name, *table) for name, table in values.items()]

    def log_table(self, data: dict, file: str, run_id: str) -> None:
        assert run_id == "7"
        self.tables.append((file, list(data), [list(row) for row in zip(*data.values(), strict=True)]))

    @staticmethod
    def Table(columns: list[str], data: list[list], **_: object) -> tuple:
        return columns, data


@pytest.mark.parametrize(("name", "kind"), [("wandb", WandbLogger), ("mlflow", MLFlowLogger)])
def test_a_service_gets_rows_as_a_table(monkeypatch: pytest.MonkeyPatch, name: str, kind: type) -> None:
    logger, service = object.__new__(kind), _Service()
    monkeypatch.setattr(kind, "experiment", service, raising=False)
    monkeypatch.setitem(sys.modules, name, service)
    log_rows(logger, "held-out completions", _ROWS, 3)
    table = "held-out completions" if name == "wandb" else "held-out_completions.json"
    assert service.tables == [(table, ["step", "prompt", "reward", "messages"], _CELLS)]


def test_a_name_is_that_of_the_run_in_all_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    module = types.ModuleType("trackio")
    module.__spec__ = ModuleSpec("trackio", None)
    module.init = lambda **kwargs: (
        started.append(kwargs["name"]) or types.SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    )
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr("torchrl.record.loggers.trackio._has_trackio", True)
    with RunLogger(tmp_path, loggers=["tensorboard", "trackio"], progress=False, run_name="lr=1e-5") as logger:
        logger.log(1, {"reward": 0.5})
    assert started == ["lr=1e-5"] and list((tmp_path / "tensorboard" / "lr=1e-5").glob("events*"))
    for name in ("", "../outside", "a/b", "x" * 101):
        with pytest.raises(ValueError, match="run_name="):
            RunLogger(tmp_path, loggers=[], run_name=name)


def test_trackio_gets_a_call_a_step_and_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []

    class Experiment:
        def log(self, metrics: dict, step: int | None = None) -> None:
            calls.append(("log", metrics, step))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(**kwargs: str) -> Experiment:
        calls.append(("init", kwargs))
        return Experiment()

    module = types.ModuleType("trackio")  # a stand-in
    module.__spec__, module.init, module.Table = ModuleSpec("trackio", None), init, lambda **content: content
    monkeypatch.setitem(sys.modules, "trackio", module)
    monkeypatch.setattr("torchrl.record.loggers.trackio._has_trackio", True)
    with RunLogger(tmp_path / "mine", loggers=["trackio"], progress=False) as logger:
        logger.log(1, {"reward": 0.5}, timings={"time/step": 2.0})
        logger.log_table(1, "samples", [{"prompt": "?"}])
    (_, started), logged, (_, table, _), finished = calls
    assert started == {"name": "mine", "project": "torchrl_rloo", "resume": "allow"} and finished == ("finish",)
    assert logged == ("log", {"reward": 0.5, "time/step": 2.0}, 1)
    assert table == {"samples": {"data": [{"step": 1, "prompt": "?"}]}}
