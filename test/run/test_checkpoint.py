"""Checkpoints: valid contents, round trips, and recovery after a kill or damage."""

from __future__ import annotations

import errno
import json
import logging
import random
import signal
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from support.gpu import needs_gpu
from torchrl_rloo.run import Checkpointer
from torchrl_rloo.run.shards import gather_state, restore_state
from torchrl_rloo.run.state import rng_state, set_rng_state


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = {
        "step": 7,
        "model": model.state_dict(),
        "parameter": model.weight,
        "shape": torch.Size([2, 3]),
        "nested": [1, 2.5, None, True, "text", (4, {("next", "reward"): torch.arange(3)})],
        "nan": float("nan"),
    }
    path = Checkpointer(tmp_path).save(7, state)
    assert path == tmp_path / "step_00000007.pt"
    loaded = Checkpointer(tmp_path).load()
    torch.testing.assert_close(loaded["model"]["weight"], model.weight.data, rtol=0, atol=0)
    torch.testing.assert_close(loaded["parameter"].data, model.weight.data, rtol=0, atol=0)
    assert loaded["nested"][:5] == state["nested"][:5] and type(loaded["nested"][3]) is bool
    assert loaded["nested"][5][1]["next", "reward"].tolist() == [0, 1, 2]
    assert loaded["shape"] == (2, 3) and loaded["nan"] != loaded["nan"]


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (torch.nn.Linear(1, 1), "Linear"),
        (np.float64(1.0), "float64"),  # a subclass of float, but not loadable
        (np.zeros(2), "ndarray"),
        (Pair(1, 2), "Pair"),
        ({1, 2}, "set"),
        (Path("x"), "PosixPath"),
    ],
)
def test_what_could_not_be_loaded_is_refused_with_its_place(tmp_path: Path, value: object, kind: str) -> None:
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(TypeError, match=rf"state\['collector'\]\[1\]\['policy'\] is a .*{kind}"):
        checkpointer.save(1, {"collector": [0, OrderedDict(policy=value)]})
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_could_not_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\] has the key .* of type float64"):
        Checkpointer(tmp_path).save(1, {"a": {np.float64(1.0): 1}})


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (0, 9, 10, 100_000_000):
        checkpointer.save(step, {"step": step})
    assert checkpointer.steps() == [10, 100_000_000]
    assert checkpointer.load()["step"] == 100_000_000
    assert checkpointer.load(10)["step"] == 10


def test_going_back_removes_the_abandoned_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An older step replaces a later one: counting only by step, ``keep=1`` would keep the abandoned checkpoint."""
    Checkpointer(tmp_path).save(40, {"step": 40})
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(30, {"step": 30})
    assert checkpointer.steps() == [30]
    assert "later steps [40]" in caplog.text


def test_a_missing_step_is_an_error_that_lists_what_is_there(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.load() is None
    checkpointer.save(3, {})
    checkpointer.save(5, {})
    with pytest.raises(FileNotFoundError, match=r"step=4 .*\[3, 5\]"):
        checkpointer.load(4)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "text"])
def test_a_damaged_file_falls_back_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"step": 1})
    newest = checkpointer.save(2, {"step": 2, "weights": torch.zeros(10_000)})
    content = bytearray(newest.read_bytes())
    if damage == "flipped":  # one bit in the middle of the weights
        content[len(content) // 2] ^= 1
    newest.write_bytes(
        {"truncated": content[: len(content) // 2], "empty": b"", "text": b"x" * 100}.get(damage, content)
    )
    with caplog.at_level(logging.WARNING):
        assert checkpointer.load()["step"] == 1
    assert newest.name in caplog.text
    with pytest.raises(RuntimeError, match="step 2"):
        checkpointer.load(2)


def test_only_damaged_files_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "step_00000001.pt").write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"any of the checkpoints \[1\]"):
        Checkpointer(tmp_path).load()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        Checkpointer(tmp_path).save(-1, {})


# A process forks a child that stops in a phase of a save, kills it there, and reports the loadable checkpoints.
# Every value of the tensor is the step, so that a mixture of checkpoints is detected.
_KILLED_SAVES = """
import io, json, os, pathlib, signal, sys
import torch
from torchrl_rloo.run import Checkpointer

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def stopping(function, call=1):
    calls = []
    def stopped(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            stop()
        return function(*args, **kwargs)
    return stopped

def half_written(state, file):
    content = io.BytesIO()
    save(state, content)
    file.write(content.getvalue()[:content.tell() // 2])
    file.flush()
    stop()

torch.set_num_threads(1)  # a fork does not survive a thread pool
save, checkpointer = torch.save, Checkpointer(sys.argv[1])
for step in (1, 2):
    checkpointer.save(step, {"step": step, "weights": torch.full((50_000,), step)})
checkpointer.close()  # each child locks the directory, until it is killed
for phase, (module, name, replacement) in {
    "write": (torch, "save", half_written),
    "flush": (os, "fsync", stopping(os.fsync)),
    "rename": (os, "replace", stopping(os.replace)),
    "sync": (os, "fsync", stopping(os.fsync, 2)),
    "rotate": (pathlib.Path, "unlink", stopping(pathlib.Path.unlink, 2)),
}.items():
    step = checkpointer.steps()[-1] + 1
    child = os.fork()
    if child == 0:
        setattr(module, name, replacement)
        checkpointer.save(step, {"step": step, "weights": torch.full((50_000,), step)})
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    assert os.WIFSTOPPED(status), (phase, status)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state = checkpointer.load()
    print(json.dumps({
        "phase": phase,
        "advanced": state["step"] == step,
        "whole": bool((state["weights"] == state["step"]).all()) and state["step"] in (step - 1, step),
        "leftovers": sum(name.endswith(".tmp") for name in os.listdir(sys.argv[1])),
        "kept": len(checkpointer.steps()),
    }))
"""


def test_a_kill_in_any_phase_of_a_save_loses_nothing(tmp_path: Path, fork_server) -> None:
    done = fork_server.run(_KILLED_SAVES, [tmp_path])
    assert done.returncode == 0, done.stderr
    reports = {report.pop("phase"): report for report in map(json.loads, done.stdout.splitlines())}
    before = {"advanced": False, "whole": True, "leftovers": 1, "kept": 2}
    after = {"advanced": True, "whole": True, "leftovers": 0, "kept": 3}
    behind = after | {"kept": 4}  # as after the kill before it, and its own
    assert reports == {"write": before, "flush": before, "rename": before, "sync": after, "rotate": behind}
    assert "cannot read" not in done.stderr  # the newest file was always complete

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(10**6, {"step": 10**6})
    checkpointer.close()
    assert len(list(tmp_path.iterdir())) == 2  # no leftovers next to the newest two


def test_a_failing_save_leaves_the_older_checkpoint_and_no_litter(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"step": 1})
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # like a full disk, writing fails halfway
    try:
        with pytest.raises(
            OSError, match=r"^cannot write \S+step_00000002.pt: .* size limit .*; raise it \(ulimit -f\)$"
        ):
            checkpointer.save(2, {"weights": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    checkpointer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.pt"]


def tied_state(step: int) -> dict[str, object]:
    """Return a state with tied weights, views, versions of modules and lists."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(30, 40))
    model[1].weight = model[0].weight
    whole = torch.full((100,), float(step))
    return {
        "step": step,
        "model": model.state_dict(),
        "views": [whole[:10], whole[50:]],
        "log": [[step]],
        "t": (1, whole),
    }


def test_an_asynchronous_save_has_the_bytes_of_its_moment(tmp_path: Path) -> None:
    state = tied_state(3)
    wanted = Checkpointer(tmp_path / "a").save(3, state)
    checkpointer = Checkpointer(tmp_path / "b", asynchronous=True)
    path = checkpointer.save(3, state)
    state["views"][1].zero_(), state["model"]["0.weight"].zero_(), state["log"][0].append(4)
    checkpointer.wait()
    assert path.read_bytes() == wanted.read_bytes()
    # The next saves wait for those before; close waits for the last
    for step in (4, 5, 6):
        checkpointer.save(step, {"step": step})
    checkpointer.close()
    assert checkpointer.steps() == [5, 6]


def test_an_error_of_an_asynchronous_save_surfaces_in_the_next_call(tmp_path: Path, monkeypatch) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    checkpointer.save(1, {"step": 1})
    checkpointer.wait()
    assert not checkpointer.failed
    monkeypatch.setattr("os.fsync", _full_disk)
    for call in (lambda: checkpointer.save(3, {}), checkpointer.wait, checkpointer.close):
        checkpointer.save(2, {"step": 2})
        with pytest.raises(OSError, match=r"^cannot write \S+step_00000002.pt: the disk is full; free space"):
            call()
        assert checkpointer.steps() == [1] and not checkpointer.failed
        checkpointer.wait()  # an error is raised once
    with pytest.raises(TypeError, match=r"state\['a'\] is a builtins.set"):
        checkpointer.save(2, {"a": {1}})


def _full_disk(*args) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


_ENDS_EARLY = """
import sys, torch
from torchrl_rloo.run import Checkpointer
checkpointer = Checkpointer(sys.argv[1], asynchronous=True)
save = torch.save
torch.save = lambda *args: (__import__("time").sleep(0.5), save(*args))
checkpointer.save(1, {"step": 1})
"""


def test_an_asynchronous_save_ends_before_the_process(tmp_path: Path, fork_server) -> None:
    done = fork_server.run(_ENDS_EARLY, [tmp_path])
    assert done.returncode == 0, done.stderr
    assert Checkpointer(tmp_path).load() == {"step": 1}


def _draw() -> list[object]:
    return [random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(), torch.randn(3).tolist()]


def test_random_generators_continue_bit_for_bit(tmp_path: Path) -> None:
    random.gauss(0, 1), np.random.randn()  # both keep a second Gaussian for later
    Checkpointer(tmp_path).save(1, {"rng": rng_state()})
    expected = [_draw() for _ in range(3)]
    for _ in range(5):
        _draw()
    set_rng_state(Checkpointer(tmp_path).load()["rng"])
    assert [_draw() for _ in range(3)] == expected


@needs_gpu
def test_cuda_generators_continue_bit_for_bit(tmp_path: Path) -> None:
    devices = range(torch.cuda.device_count())
    Checkpointer(tmp_path).save(1, {"rng": rng_state()})
    expected = [torch.randn(5, device=f"cuda:{device}").cpu() for device in devices]
    set_rng_state(Checkpointer(tmp_path).load()["rng"])
    for device in devices:
        assert torch.equal(torch.randn(5, device=f"cuda:{device}").cpu(), expected[device])


def test_other_number_of_cuda_devices_warns(caplog: pytest.LogCaptureFixture) -> None:
    state = rng_state()
    state["cuda"] = state["cuda"] + [torch.zeros(16, dtype=torch.uint8)]
    set_rng_state(state)
    assert "CUDA devices" in caplog.text


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(8, 4) * random.random() + np.random.randn()
        model(x.float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_resumed_run_reaches_the_same_weights(tmp_path: Path) -> None:
    def build() -> dict[str, object]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return {"model": model, "optimizer": optimizer}

    parts = build()
    _train(**parts, steps=3)
    Checkpointer(tmp_path).save(3, {"step": 3, "rng": rng_state(), "parts": gather_state(**parts)})
    _train(**parts, steps=4)

    resumed = build()
    state = Checkpointer(tmp_path).load()
    restore_state(state["parts"], **resumed)
    set_rng_state(state["rng"])
    _train(**resumed, steps=4)
    for expected, actual in zip(parts["model"].parameters(), resumed["model"].parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_parts_must_match_by_name() -> None:
    model = torch.nn.Linear(1, 1)
    before = model.weight.item()
    state = gather_state(model=torch.nn.Linear(1, 1), buffer=torch.nn.Linear(1, 1))
    with pytest.raises(KeyError, match=r"\['optimizer'\] missing .*\['buffer'\] in the state"):
        restore_state(state, model=model, optimizer=model)
    assert model.weight.item() == before
