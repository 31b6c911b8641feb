"""Runs on two real ranks: stopped, killed, resumed, with parts that only rank 0 has.

As a script, this file runs one rank; its further arguments are a phase and a victim.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support.attacks_files import Executes
from support.fork_server import ForkServer
from support.rank_scripts import EndedRanks, become_rank, run_checks, run_ranks
from torchrl_rloo.run import Checkpointer, Run
from torchrl_rloo.run.shards import STATE, gather_state, restore_state
from torchrl_rloo.runtime.ranks import RankError, Ranks


class Draws:
    """Part that only rank 0 has, like the collector; it refuses states after a step."""

    def __init__(self):
        self.drawn, self.refuses = [], False

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise ValueError("draws of another dataset")
        self.drawn = list(state["drawn"])


def make_parts(ranks: Ranks, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if sharded:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "draws": Draws() if ranks.is_main else None}


def play(
    ranks: Ranks, directory: Path, *, sharded: bool = True, until: int | None = None, parts=None, **settings: Any
) -> tuple[Run, list[torch.Tensor]]:
    """Run six steps with random numbers that differ between ranks, and return the whole weights.

    Rank 1 gets a stop signal in step ``until``.
    """
    parts = parts or make_parts(ranks, sharded)
    settings = {"checkpoint_every": 2, "keep": 9, "loggers": []} | settings
    with Run(directory, 6, parts, ranks=ranks, **settings) as run:
        for step in run.steps():
            torch.rand(1 + ranks.rank)
            loss = parts["model"](torch.rand(4, 5)).square().sum()
            loss.backward()
            for p in parts["model"].parameters():
                if not sharded:
                    torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)
            parts["optimizer"].step()
            parts["optimizer"].zero_grad()
            if ranks.is_main:
                parts["draws"].drawn.append(step)
            run.log({"loss": loss.item()})
            run.log_table("rows", [{"step_seen": step}])
            if step == until and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    weights = [p.full_tensor() if sharded else p for p in parts["model"].parameters()]
    return run, [w.detach().clone() for w in weights]


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, wanted))


def check_resume(ranks: Ranks, folder: Path) -> None:
    """Stop both ranks by a signal to one: the resumed run has the bits and logs of one without a stop."""
    for sharded in (True, False):
        whole, wanted = play(ranks, folder / f"whole-{sharded}", sharded=sharded)
        assert whole.finished and bool(whole.logger.history) == ranks.is_main
        for name, settings in {"plain": {}, "asynchronous": {"asynchronous": True}}.items():
            directory = folder / f"{name}-{sharded}"
            stopped, _ = play(ranks, directory, sharded=sharded, until=3, **settings)
            assert stopped.step == 3 and saved(directory) == [2, 3]
            parts = make_parts(ranks, sharded)
            resumed, found = play(ranks, directory, sharded=sharded, parts=parts, **settings)
            assert resumed.finished and saved(directory) == [2, 3, 4, 6]
            assert_same(found, wanted)
            assert not ranks.is_main or parts["draws"].drawn == [1, 2, 3, 4, 5, 6]
            ranks.all_gather(None)
            for file in ("metrics.jsonl", "completions.jsonl"):
                lines = (directory / file).read_bytes()
                assert lines == (folder / f"whole-{sharded}" / file).read_bytes() and lines.count(b"\n") == 6


def saved(directory: Path) -> list[int]:
    return Checkpointer(directory / "checkpoints").steps()


def check_given_step(ranks: Ranks, folder: Path) -> None:
    """Go back to a step: the run removes the later ones and repeats them."""
    directory = folder / "given"
    _, wanted = play(ranks, directory)
    with pytest.raises(FileNotFoundError, match=r"step=3 must be one of the checkpoints \[2, 4, 6\]"):
        play(ranks, directory, resume=3)
    ranks.all_gather(None)
    stopped, _ = play(ranks, directory, resume=2, until=3)
    assert stopped.step == 3 and saved(directory) == [2, 3]
    _, found = play(ranks, directory)
    assert_same(found, wanted)


def check_errors(ranks: Ranks, folder: Path) -> None:
    """End both ranks by an error of rank 0, or of a save in the background."""
    directory = folder / "errors"
    _, wanted = play(ranks, directory)
    parts = make_parts(ranks, True)
    if ranks.is_main:
        parts["draws"].refuses = True
    with pytest.raises((ValueError, RuntimeError), match=r"cannot restore \S+step_00000006: draws of another dataset"):
        play(ranks, directory, parts=parts)
    assert not ranks.is_main or not (directory / ".lock").exists()
    if ranks.is_main:
        (folder / "linked").mkdir(exist_ok=True)
        (folder / "linked" / "transcripts").symlink_to(folder)
    with pytest.raises(OSError if ranks.is_main else RankError, match="symbolic link"):
        play(ranks, folder / "linked")
    # The checkpoints of step 2 cannot be written: the run ends after step 3, or after step 4 with the next one
    broken = make_parts(ranks, True)
    with pytest.raises((OSError, RuntimeError), match=r"cannot write|rank 0 failed"):
        with Run(folder / "gone", 6, broken, ranks=ranks, checkpoint_every=2, asynchronous=True, loggers=[]) as run:
            for step in run.steps():
                ranks.all_gather(None)
                if step == 1 and ranks.is_main:
                    shutil.rmtree(folder / "gone" / "checkpoints")
    assert run.step in (2, 3, 4) and ranks.all_gather(run.step) == [run.step] * 2


CHECKS = (check_resume, check_given_step, check_errors)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> EndedRanks:
    return run_ranks(fork_server, __file__, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_two_ranks(ran: EndedRanks, check):
    ran.assert_passed(check)


# -------------------------------------------------------------------------------------------------- kills during a save
PHASES = {  # what is called in the phase, and the number of the call
    "shards": ("torchrl_rloo.run.shards", "_sha256", 1),
    "state": ("torch", "save", 1),
    "state's rename": ("os", "replace", 1),
    "rename": ("os", "replace", 2),
    "rotate": ("shutil", "rmtree", 1),
}


def dense(step: int) -> nn.Module:
    """Return a model in which every value is the step, so that a mixture of checkpoints is detected."""
    model = nn.Linear(50, 40)
    for p in model.parameters():
        nn.init.constant_(p, step)
    return model


def kill_at(owner: str, name: str, call: int) -> None:
    """Kill this process at a call of a function."""
    function, calls = getattr(sys.modules[owner], name), []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(sys.modules[owner], name, killed)


def save_until_killed(ranks: Ranks, folder: Path, phase: str, victim: int) -> None:
    """Save steps 1 and 2, and kill a rank in a phase of step 3."""
    checkpointer = Checkpointer(folder / "checkpoints", ranks=ranks)
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2, 3):
        if step == 3 and ranks.rank == victim:
            kill_at(*PHASES[phase])
        parts = gather_state(model=fully_shard(dense(step), mesh=mesh))
        checkpointer.save(step, {"step": step, "parts": parts})


@pytest.mark.parametrize(
    ("phase", "victim", "steps"),
    [("shards", 0, [1, 2]), ("shards", 1, [1, 2]), ("state", 0, [1, 2]), ("state's rename", 0, [1, 2])]
    + [("rename", 0, [1, 2]), ("rotate", 0, [2, 3])],
)
def test_a_kill_of_a_rank_in_any_phase_of_a_save_loses_nothing(tmp_path, fork_server, phase, victim, steps):
    _, codes, output = run_ranks(fork_server, __file__, tmp_path, 2, phase, victim)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, -signal.SIGKILL), output
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    assert checkpointer.steps() == steps
    for step in steps:
        model, state = dense(0), checkpointer.load(step)
        restore_state(state["parts"], model=model)
        assert state["step"] == step and all((p == step).all() for p in model.parameters())
    # The next save removes what is left
    checkpointer.save(9, {"step": 9})
    assert len([path for path in (tmp_path / "checkpoints").iterdir() if path.name != ".lock"]) == 2
    checkpointer.close()


# ----------------------------------------------------------------------------------------------- damaged folders
@pytest.fixture(scope="module")
def folder_of_two(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """Checkpoints of steps 2 and 3, written by two ranks."""
    folder = tmp_path_factory.mktemp("damaged")
    _, codes, output = run_ranks(fork_server, __file__, folder, 2, "none", -1)
    assert codes == [0, 0], output
    return folder / "checkpoints"


def flip(path: Path, at: bytes | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else content.index(at)] ^= 1
    path.write_bytes(content)


def forge_state(folder: Path, change) -> None:
    """Rewrite the state with correct checksums."""
    content = torch.load(folder / STATE)
    change(content)
    torch.save(content, folder / STATE)


def place(content: dict[str, Any]) -> dict[str, Any]:
    return content["state"]["parts"]["model"]["weight"]


DAMAGES = {
    "a bit": lambda folder: flip(sorted(folder.glob("*.safetensors"))[1]),
    "the end": lambda folder: os.truncate(sorted(folder.glob("*.safetensors"))[0], 900),
    "missing": lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(),
    "another": lambda folder: shutil.copy(sorted(folder.glob("*.safetensors"))[0], folder / "x.safetensors"),
    "link": lambda folder: (
        sorted(folder.glob("*.safetensors"))[0].rename(folder / "moved"),
        (folder / "shard-00001-model-00001-of-00001.safetensors").symlink_to(folder / "moved"),
    ),
    "bit of the state": lambda folder: flip(folder / STATE, b"parts"),
    "empty state": lambda folder: (folder / STATE).write_bytes(b""),
    "code": lambda folder: torch.save({"state": Executes(0), "files": {}}, folder / STATE),
    "other entries": lambda folder: torch.save({"step": 3}, folder / STATE),
    "checksum is no list": lambda folder: forge_state(
        folder, lambda c: c["files"].update(dict.fromkeys(c["files"], 1))
    ),
    "outside": lambda folder: forge_state(folder, lambda c: c["files"].update({"../step_00000002/x": [1, "x"]})),
    "dtype": lambda folder: forge_state(folder, lambda c: place(c).update(dtype="load")),
    "shape is text": lambda folder: forge_state(folder, lambda c: place(c).update(shape=["a"])),
    "larger": lambda folder: forge_state(folder, lambda c: place(c).update(shape=[2**40, 2**20])),
    "unknown name": lambda folder: forge_state(folder, lambda c: place(c).update(__sharded_tensor__="x")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_falls_back_to_the_one_before(tmp_path, folder_of_two, caplog, damage):
    shutil.copytree(folder_of_two, tmp_path / "checkpoints", symlinks=True)
    Executes.marker = str(tmp_path / "executed")
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    DAMAGES[damage](tmp_path / "checkpoints" / "step_00000003")
    path, state = checkpointer.newest()
    assert path.name == "step_00000002" and "step_00000003, the one before it is used" in caplog.text
    model = dense(0)
    restore_state(state["parts"], model=model)
    assert all((p == 2).all() for p in model.parameters()) and not Path(Executes.marker).exists()
    with pytest.raises(RuntimeError, match="step 3, "):
        checkpointer.load(3)


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_foreign_thing_with_the_name_of_a_folder_is_kept(tmp_path, folder_of_two, kind):
    path = tmp_path / "step_00000003"
    if kind == "file":
        path.write_text("mine")
    elif kind == "folder":
        (path / "sub").mkdir(parents=True)
    else:
        path.symlink_to(folder_of_two / "step_00000003")
    checkpointer = Checkpointer(tmp_path, keep=1)
    assert checkpointer.steps() == []
    checkpointer.save(4, {"step": 4})
    checkpointer.close()
    assert checkpointer.steps() == [4] and (path.exists() or path.is_symlink())


if __name__ == "__main__":
    if more := sys.argv[4:]:
        become_rank(lambda ranks, folder: save_until_killed(ranks, folder, more[0], int(more[1])))
    become_rank(lambda ranks, folder: run_checks(CHECKS, folder, ranks, folder))
