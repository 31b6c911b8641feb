"""Run: resume after stops, kills and changed settings."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from support.waiting import PATIENCE, wait_until
from torchrl_rloo.run import Checkpointer, Run, check_resumable, meters
from torchrl_rloo.run.meters import StepTimer
from torchrl_rloo.run.run import StopSignal
from torchrl_rloo.run.settings import check_same_settings

SETTINGS = {"plan": {"steps": 4, "prompts": 2}, "optimizer": {"lr": 0.1}, "eval": {"every": 2}, "log": {"samples": 1}}


class Part:
    """Part that counts its steps and draws a number in each."""

    def __init__(self):
        self.state = {"n": 0, "sum": 0.0}

    def work(self) -> float:
        self.state["n"] += 1
        self.state["sum"] += float(torch.rand(()))
        return self.state["sum"]

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


def play(directory: Path, steps: int = 4, *, until: int | None = None, seed: int = 0, **kwargs) -> tuple[Run, Part]:
    """Run the loop, with a stop request in step ``until``."""
    torch.manual_seed(seed)
    part = Part()
    run = Run(
        directory, steps, {"part": part}, loggers=[], checkpoint_every=kwargs.pop("checkpoint_every", 2), **kwargs
    )
    with run:
        if run.step == 0:
            run.log({"eval/greedy": 0.0})
        for step in run.steps():
            with run.time("train"):
                run.log({"sum": part.work()}, timings={"speed": 1.0})
            if step == until:
                os.kill(os.getpid(), signal.SIGTERM)
    return run, part


def test_a_stopped_run_resumes_to_the_same_bytes(tmp_path, capsys):
    whole, part = play(tmp_path / "whole")
    assert whole.finished and whole.first_and_last("sum")[1] == part.state["sum"]
    stopped, _ = play(tmp_path / "stopped", until=3, checkpoint_every=0)
    assert not stopped.finished and "rerun the same command to resume" in capsys.readouterr().out
    resumed, other = play(tmp_path / "stopped", seed=1)  # the random state comes from the checkpoint
    assert resumed.finished and other.state == part.state
    files = ("metrics.jsonl", "completions.jsonl")
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()


def test_a_run_goes_back_to_a_given_step(tmp_path, capsys):
    whole, part = play(tmp_path, checkpoint_every=1, keep=9)
    log = (tmp_path / "metrics.jsonl").read_bytes()
    stopped, _ = play(tmp_path, checkpoint_every=0, keep=9, resume=2, until=3)
    output = capsys.readouterr().out
    assert "resumed after step 2" in output and "stopped after step 3; rerun with resume=auto to resume" in output
    assert Checkpointer(tmp_path / "checkpoints").steps() == [1, 2, 3]
    resumed, other = play(tmp_path, seed=1)
    assert other.state == part.state and (tmp_path / "metrics.jsonl").read_bytes() == log


def test_a_run_without_the_given_step_is_refused_before_anything_is_loaded(tmp_path):
    settings = {"settings": SETTINGS, "defaults": {}}
    for resume, steps in ((3, r"\[\]"), (0, r"\[\]")):
        with pytest.raises(FileNotFoundError, match=rf"resume={resume} must be one of the checkpoints {steps}"):
            check_resumable(tmp_path, resume=resume, **settings)
    play(tmp_path)
    for call in (lambda: check_resumable(tmp_path, resume=3, **settings), lambda: play(tmp_path, resume=3)):
        with pytest.raises(FileNotFoundError, match=r"=3 must be one of the checkpoints \[2, 4\]"):
            call()
    assert Checkpointer(tmp_path / "checkpoints").steps() == [2, 4]
    for resume in ("now", -1, True, 1.0, None):
        with pytest.raises(ValueError, match="resume=.* must be one of .* or the step of a checkpoint"):
            Run(tmp_path, 4, {}, resume=resume)


def test_an_asynchronous_run_has_the_same_checkpoints(tmp_path):
    for name, asynchronous in (("a", False), ("b", True)):
        play(tmp_path / name, asynchronous=asynchronous)
    states = [Checkpointer(tmp_path / name / "checkpoints").load() for name in "ab"]
    for state in states:
        state.pop("cpu_seconds")
        state["parts"].pop("logger")["timings"]  # lengths of numbers that depend on the clock
    assert str(states[0]) == str(states[1])


def test_an_error_of_an_asynchronous_save_ends_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, 9, {}, loggers=[], checkpoint_every=2, asynchronous=True)
    with pytest.raises(OSError, match="the disk is full"), run:
        for step in run.steps():
            if step == 2:
                monkeypatch.setattr("torch.save", full_disk)
            time.sleep(0.01)
    assert 2 <= run.step <= 4
    run = Run(tmp_path, 9, {}, loggers=[], checkpoint_every=2, asynchronous=True)
    with pytest.raises(ZeroDivisionError, match="comes first"), run:
        for step in run.steps():
            if step == 3:
                raise ZeroDivisionError("the error of the loop comes first")


def full_disk(*args) -> None:
    raise OSError(errno.ENOSPC, "No space left on device: the disk is full")


def test_what_was_logged_after_the_checkpoint_is_dropped(tmp_path):
    run, _ = play(tmp_path, 3)  # checkpoints after 2 and 3
    (tmp_path / "checkpoints" / "step_00000003.pt").unlink()
    resumed, _ = play(tmp_path, 3)
    assert [record["step"] for record in resumed.logger.history] == [0, 1, 2, 3]


def test_a_checkpoint_does_not_grow_with_the_log(tmp_path):
    short, _ = play(tmp_path / "short", 2)
    long, _ = play(tmp_path / "long", 200, checkpoint_every=0)
    sizes = [max(p.stat().st_size for p in (tmp_path / name / "checkpoints").iterdir()) for name in ("short", "long")]
    assert abs(sizes[0] - sizes[1]) < 1024  # 198 lines of the log are 20 kB


def test_a_log_shorter_than_its_checkpoint_is_refused(tmp_path):
    play(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics.jsonl has 0 bytes, fewer than .* resume=never"):
        play(tmp_path, 6)


def test_a_changed_setting_is_refused_before_anything_is_loaded(tmp_path):
    other = SETTINGS | {"optimizer": {"lr": 0.2}}
    check_resumable(tmp_path, settings=other, defaults={}, resume="auto")  # nothing to resume
    play(tmp_path, settings=SETTINGS)
    with pytest.raises(ValueError, match=r"optimizer.lr: 0.1 -> 0.2\. Restore them"):
        check_resumable(tmp_path, settings=other, defaults={}, resume="auto")
    check_resumable(tmp_path, settings=other, defaults={}, resume="never")
    check_resumable(tmp_path, settings=SETTINGS, defaults={}, resume="auto")


def test_a_changed_setting_is_refused_by_name(tmp_path):
    play(tmp_path, settings=SETTINGS)
    other = SETTINGS | {"optimizer": {"lr": 0.2}, "log": {"samples": 9}}
    for resume in ("auto", "extend"):
        with pytest.raises(ValueError, match=r"optimizer.lr: 0.1 -> 0.2\. Restore them") as error:
            play(tmp_path, settings=other, resume=resume)
        assert "log.samples" not in str(error.value) and "resume=extend" not in str(error.value)
    restarted, part = play(tmp_path, settings=other, resume="never")
    assert part.state["n"] == 4 and len(restarted.logger.history) == 5


def test_extend_continues_with_more_steps_and_another_evaluation(tmp_path):
    play(tmp_path, settings=SETTINGS)
    longer = SETTINGS | {"plan": {"steps": 6, "prompts": 2}, "eval": {"every": 3}, "inference": {"engine": "vllm"}}
    with pytest.raises(ValueError, match=r"plan.steps: 4 -> 6\. Set resume=extend"):
        play(tmp_path, 6, settings=longer)
    extended, part = play(tmp_path, 6, settings=longer, resume="extend")
    assert extended.finished and part.state["n"] == 6


def test_a_setting_that_the_checkpoint_lacks_had_its_default(tmp_path):
    defaults = SETTINGS | {"plan": {"steps": 4, "prompts": 2, "packing": "none"}, "lora": None}
    check = {"extend": False, "where": tmp_path}
    check_same_settings(SETTINGS, defaults, defaults, **check)
    with pytest.raises(ValueError, match="plan.packing: none -> packed"):
        changed = defaults | {"plan": {"steps": 4, "prompts": 2, "packing": "packed"}}
        check_same_settings(SETTINGS, changed, defaults, **check)


def test_fewer_steps_than_are_done_are_refused(tmp_path):
    play(tmp_path)
    with pytest.raises(ValueError, match="total_steps=2 must be at least step 4"):
        play(tmp_path, 2)


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="resume='sometimes' must be one of"):
        play(tmp_path, resume="sometimes")
    with pytest.raises(ValueError, match=r"checkpoint_every=-1 must be at least 0"):
        play(tmp_path, checkpoint_every=-1)


def test_an_exception_leaves_the_step_unwritten(tmp_path):
    part = Part()
    with pytest.raises(RuntimeError), Run(tmp_path, 4, {"part": part}, loggers=[], checkpoint_every=1) as run:
        for step in run.steps():
            run.log({"sum": part.work()})
            if step == 3:
                raise RuntimeError("a fault")
    assert Checkpointer(tmp_path / "checkpoints").steps() == [1, 2]
    resumed, other = play(tmp_path)
    assert resumed.finished and other.state["n"] == 4


def test_meters_gather_metrics_and_keep_the_counts_of_parts_apart():
    class Meter:
        def __init__(self, **counts):
            self.counts = counts

        def metrics(self):
            return {"share": 0.5}

    class Tools(Meter):
        part = "tools"

    class Other(Meter): ...

    first, second, tools = Meter(a=1), Meter(b=1), Tools(**{"tools/f/failed": 3})
    assert meters(first, None, second, tools, first) == {
        "share": 0.5,
        "count/meter/a": 1,
        "count/meter_2/b": 1,
        "count/tools/f/failed": 3,
    }
    first.counts["b"] = 5
    assert meters(first, second)["count/meter_2/b"] == 1, "names do not change once another part counts"
    with pytest.raises(ValueError, match="Other and a part before it both count 'count/tools/f/failed'"):
        meters(tools, Other(**{"tools/f/failed": 1}))


def test_the_timer_adds_the_phases_of_a_step():
    time = [100.0]
    timer = StepTimer(lambda: time[0])
    for step in range(3):
        for phase, seconds in (("collect", 2.0), ("train", 1.0 + step), ("collect", 1.0)):
            with timer(phase):
                time[0] += seconds
        time[0] += 0.5
        assert timer.seconds("collect") == 3.0
        assert timer.take() == {"time/collect": 3.0, "time/train": 1.0 + step, "time/step": 4.5 + step}
    with pytest.raises(ValueError), timer("failed"):
        raise ValueError
    assert set(timer.take()) == {"time/failed", "time/step"}


def test_the_time_of_a_checkpoint_is_part_of_the_next_step(tmp_path):
    run, _ = play(tmp_path)
    times = {entry["step"]: entry for entry in run.logger.timings}
    assert [step for step, entry in times.items() if "time/checkpoint" in entry] == [3]
    assert times[3]["time/step"] >= times[3]["time/checkpoint"] + times[3]["time/train"]


# ------------------------------------------------------------------------------------------------------- stop signals
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_aborts(number: int, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(number)
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert len(caplog.records) == 1 and "save and stop at the end of this step" in caplog.text
        os.kill(os.getpid(), signal.SIGINT)
    assert len(caplog.records) == 1
    assert signal.getsignal(number) is before


def test_previous_handlers_come_back() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopSignal() as stop:
            pass
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] and not stop.requested


def test_off_the_main_thread_it_does_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    requested = []

    def loop() -> None:
        with StopSignal() as stop:
            assert signal.getsignal(signal.SIGINT) is before
            requested.append(stop.requested)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert requested == [False]


_LOOP = """
import pathlib, sys, time
from torchrl_rloo.run.run import StopSignal
with StopSignal() as stop:
    for step in range(10):
        print("step", step, flush=True)
        while not pathlib.Path("go_on").exists():
            time.sleep(0.01)
        if stop.requested:
            print("saved", step, flush=True)
            break
"""


def test_a_terminated_process_finishes_its_step_and_exits_well(fork_server, tmp_path: Path) -> None:
    process = fork_server.start(_LOOP, cwd=tmp_path)
    wait_until(lambda: process.stdout)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.stderr)
    (tmp_path / "go_on").touch()  # the end of the step
    assert process.wait(PATIENCE) == 0
    assert process.stdout == "step 0\nsaved 0\n"
    assert process.stderr.count("a second signal aborts") == 1  # visible without any logging set-up
