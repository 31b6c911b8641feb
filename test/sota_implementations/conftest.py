"""User-defined rewards and scorers that let a test stop a run in a known phase."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.fork_server import ForkedProcess
from support.processes import process_state
from support.waiting import wait_until
from torchrl_rloo.cli.main import RECIPES, recipe_file

# A user's module. It stops the process where HOLD says: "train:3" before its third optimizer step. Rewards decide by
# the completion's ids, and fail by the answer, so that a test can tell afterwards what they gave.
OWN_REWARDS = """
import ctypes, os, signal, time, zlib

PHASE, _, AT = os.environ.get("HOLD", "").partition(":")
calls = 0


def reached(phase):
    global calls
    calls += phase == PHASE
    if phase == PHASE and calls == int(AT):
        os.kill(os.getpid(), signal.SIGSTOP)


def hold_before(owner, name, phase, condition=lambda *args: True):
    original = getattr(owner, name)

    def held(*args, **kwargs):
        if condition(*args):
            reached(phase)
        return original(*args, **kwargs)

    setattr(owner, name, held)


def number(ids):
    return zlib.crc32(str(list(ids)).encode()) % 100


def coin(completion_ids, log_extra, **columns):
    reached("rollout")
    log_extra("ids", [list(ids) for ids in completion_ids])
    return [float(number(ids) % 8 == 0) for ids in completion_ids]


def distinct(completion_ids, **columns):
    reached("rollout")
    return [number(ids) / 100 for ids in completion_ids]


def score(completion_ids, **columns):
    reached("evaluation")
    return [float(number(ids) % 2) for ids in completion_ids]


def flat(completion_ids, **columns):
    return [1.0] * len(completion_ids)


def hangs(answer, **columns):
    if int(answer[0]) % 8 == 0:
        time.sleep(1000)
    return [1.0]


def raises(answer, **columns):
    if int(answer[0]) % 8 == 1:
        raise RuntimeError("one")
    return [1.0]


def gives_nan(answer, **columns):
    return [float("nan") if int(answer[0]) % 8 == 2 else 1.0]


def segfaults(answer, **columns):
    if int(answer[0]) % 8 == 3:
        ctypes.string_at(0)
    return [1.0]


def broken(completion_ids, **columns):
    raise RuntimeError("always")


if PHASE:  # only in the run itself: workers of rewards need neither import
    import torch
    from transformers import PreTrainedModel

    reached("start")
    hold_before(torch.optim.AdamW, "step", "train")
    hold_before(os, "replace", "save", lambda source, target: "step_" in os.path.basename(target))
    hold_before(PreTrainedModel, "save_pretrained", "end")
"""


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a user's module ``own_rewards``."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_rewards.py").write_text(OWN_REWARDS)
    return folder


@pytest.fixture
def importable(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own)


@pytest.fixture(scope="session")
def start(fork_server, own: Path) -> Callable[..., ForkedProcess]:
    """Function ``start(overrides, output, hold="")``: start the recipe in a process that stops where ``hold`` says."""

    def start(overrides: list[str], output: Path, hold: str = "", recipe: str = "rloo") -> ForkedProcess:
        environment = os.environ | ({"HOLD": hold} if hold else {})
        unchecked = ["check.mode=off"] if recipe.startswith("rloo") else []  # only the run itself calls rewards
        arguments = [*RECIPES[recipe][1:], *unchecked, *overrides, f"output_dir={output}"]
        process = fork_server.start(recipe_file(recipe), arguments, cwd=own, environment=environment)
        if hold:
            state = wait_until(lambda: (now := process_state(process.pid)) in "TZX" and now, what=hold)
            assert state == "T", f"{hold} was not reached\n{process.stdout}\n{process.stderr}"
        return process

    return start


@pytest.fixture(scope="session")
def finish(start) -> Callable[..., str]:
    """Function ``finish(overrides, output)``: run the recipe to its end in a process and return its output."""

    def finish(overrides: list[str], output: Path, recipe: str = "rloo") -> str:
        process = start(overrides, output, recipe=recipe)
        try:
            assert process.wait(300) == 0, process.stdout[-2000:] + process.stderr[-3000:]
        finally:
            process.kill()
        return process.stdout

    return finish


@pytest.fixture(scope="session")
def kill(start) -> Callable[..., None]:
    """Function ``kill(overrides, output, hold)``: kill a run in a known phase."""

    def kill(overrides: list[str], output: Path, hold: str) -> None:
        process = start(overrides, output, hold)
        process.kill()
        assert process.wait(60) == -signal.SIGKILL

    return kill
