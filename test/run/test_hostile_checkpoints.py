"""Damaged, forged and foreign files in the place of checkpoints: never code, never another state, always a remedy."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import attacks_files
from support.attacks_files import CHECKPOINT_ATTACKS, attack, attack_checkpoint, saved_state
from torchrl_rloo.run import Checkpointer, Run
from torchrl_rloo.run.state import check_state, read_state


def test_the_attacks_notice_a_loader_without_checksums(monkeypatch):
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: None)
    assert any("another state" in failure["fault"] for failure in attack(150, 0)["failures"])


def test_the_attacks_notice_a_loader_that_runs_code(monkeypatch):
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, weights_only, **kwargs: load(*args, weights_only=False, **kwargs))
    assert any("code was executed" in failure["fault"] for failure in attack(150, 0)["failures"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, bytes]:
    """Folder of two checkpoints and the bytes of the second."""
    folder = tmp_path_factory.mktemp("checkpoints")
    attacks_files.Executes.marker = str(folder.parent / "executed")
    checkpointer = Checkpointer(folder)
    paths = [checkpointer.save(step, saved_state(step)) for step in (1, 2)]
    return folder, paths[1].read_bytes()


@given(way=st.sampled_from(CHECKPOINT_ATTACKS), random=st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_any_attack_is_contained(checkpoints, way, random):
    folder, content = checkpoints
    assert attack_checkpoint(folder, way(content, random), way) is None


@given(place=st.integers(0, 10**9), bit=st.integers(0, 7))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_flipped_bit_is_found_or_without_effect(checkpoints, place, bit):
    folder, content = checkpoints
    changed = bytearray(content)
    changed[place % len(content)] ^= 1 << bit
    assert attack_checkpoint(folder, bytes(changed), attacks_files.flip) is None


def test_every_length_but_the_whole_is_refused(checkpoints, tmp_path):
    _, content = checkpoints
    for size in [*range(0, len(content), 97), len(content) - 1]:
        (tmp_path / "part.pt").write_bytes(content[:size])
        with pytest.raises((ValueError, zipfile.BadZipFile)):
            read_state(tmp_path / "part.pt")


def shared(levels: int, make: Callable[[object, object], object]) -> object:
    """Return a value that contains another one twice, over and over: tiny in a file, without end in a copy."""
    value: object = [0]
    for _ in range(levels):
        value = make(value, value)
    return value


def endless() -> list:
    value: list = []
    value.append((value,))
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (shared(60, lambda a, b: [a, b]), "a copy of state would have .* values"),
        (shared(40, lambda a, b: {"a": (a, b)}), "a copy of state would have .* values"),
        (endless(), "contains itself"),
        (shared(200, lambda a, _: [a]), "nested deeper than 100 levels"),
        (torch.ones(1).expand(10**6, 10**6), "a copy of state would have .* bytes"),
        ([torch.ones(2**18).view(2**9, 2**9) for _ in range(2)] * 500, "a copy of state would have .* bytes"),
        (torch.ones(2**24)[1:].as_strided((2**20, 2**10), (0, 1)), "a copy of state would have .* bytes"),
    ],
    ids=["lists", "mappings", "cycle", "deep", "expanded", "views", "strided"],
)
def test_a_state_without_an_end_is_refused(tmp_path, value, words):
    torch.save({"step": 1, "a": value}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=words):
        read_state(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=words):  # before a file is written: a run that saved it could not resume
        check_state({"step": 1, "a": value}, "state")


def test_ordinary_sharing_is_kept(tmp_path):
    weight, settings = torch.ones(2**20), {"lr": [0.1, 0.2]}
    state = {
        "tied": [weight] * 4,
        "rows": [settings] * 10_000,
        "zeros": torch.zeros(1).expand(9),
        "many": [0.5] * 300_000,
    }
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    loaded = checkpointer.load()
    assert loaded["rows"] == state["rows"] and loaded["many"] == state["many"]
    assert torch.equal(loaded["zeros"], state["zeros"]) and all(torch.equal(each, weight) for each in loaded["tied"])


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "text", "empty", "zip"])
def test_a_foreign_thing_with_the_name_of_a_checkpoint_is_not_fatal(tmp_path, kind):
    precious, path = tmp_path / "precious", tmp_path / "run" / "checkpoints" / "step_00000002.pt"
    precious.write_text("precious")
    path.parent.mkdir(parents=True)
    if kind in ("link", "dangling"):
        path.symlink_to(precious if kind == "link" else tmp_path / "nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        with Run(tmp_path / "run", 1, {}, loggers=[]) as run:  # an earlier checkpoint to fall back to
            list(run.steps())
        path.write_bytes({"text": b"hello", "empty": b"", "zip": b"PK\x05\x06" + bytes(18)}[kind])
    with Run(tmp_path / "run", 4, {}, loggers=[], checkpoint_every=1, resume="auto") as run:
        assert list(run.steps())[-1] == 4
    assert Checkpointer(path.parent).steps() == [3, 4] and precious.read_text() == "precious"


def test_a_folder_with_the_name_of_a_checkpoint_is_named_and_kept(tmp_path):
    folder = tmp_path / "step_00000002.pt"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    with pytest.raises(OSError, match=r"cannot write .*step_00000002.pt: it is a folder; move it away"):
        Checkpointer(tmp_path).save(2, {"step": 2})
    assert (folder / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    "name",
    ["step_1.pt", "step_000000010.pt", "step_00000001.pt.bak", "step_" + "\u0661" * 8 + ".pt", "STEP_00000001.pt",
     "step_-0000001.pt", "step_" + "9" * 200 + ".pt", "step_00000001.PT", " step_00000001.pt"],
)  # fmt: skip
def test_a_name_that_is_no_checkpoint_is_ignored_and_kept(tmp_path, name):
    (tmp_path / name).write_text("mine")
    checkpointer = Checkpointer(tmp_path, keep=1)
    assert checkpointer.load() is None
    checkpointer.save(3, {"step": 3})
    assert checkpointer.load() == {"step": 3} and (tmp_path / name).read_text() == "mine"


class Part:
    """Part that records whether it was restored."""

    restored = False

    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        self.restored = True
        assert state == {"a": 1}, "the state must be that of this part"


def enter(directory: Path, steps: int = 9) -> Part:
    part = Part()
    with Run(directory, steps, {"part": part}, loggers=[]):
        pass
    return part


BAD_ENTRIES = {
    "no dict": lambda s: s.clear(),
    "step is text": lambda s: s.update(step="2"),
    "step is another": lambda s: s.update(step=1),
    "no rng": lambda s: s.pop("rng"),
    "more": lambda s: s.update(more=1),
    "key is a number": lambda s: s.update({3: 1}),
}
BAD_PARTS = {
    "rng is empty": lambda s: s.update(rng={}),
    "rng is of another kind": lambda s: s["rng"][0].update(torch="text"),
    "other parts": lambda s: s.update(parts={"other": 1}),
    "part of another type": lambda s: s["parts"].update(part={"a": 2}),
    "logger is text": lambda s: s["parts"].update(logger="text"),
    "logger is longer": lambda s: s["parts"]["logger"].update(metrics=10**9),
    "logger is below 0": lambda s: s["parts"]["logger"].update(metrics="1"),
}


@pytest.mark.parametrize("name", [*BAD_ENTRIES, *BAD_PARTS])
def test_a_state_of_another_kind_names_file_and_remedy(tmp_path, name):
    with Run(tmp_path, 2, {"part": Part()}, loggers=[], checkpoint_every=1) as run:
        for step in run.steps():
            run.log({"a": step})
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    state = checkpointer.load(2)
    (BAD_ENTRIES | BAD_PARTS)[name](state)
    path = checkpointer.save(2, state)
    checkpointer.close()
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.*remove it to continue from the"):
        enter(tmp_path)
    assert not (tmp_path / ".lock").exists()
    path.unlink()
    assert enter(tmp_path).restored  # the remedy works


def test_too_few_steps_are_refused_before_anything_is_restored(tmp_path):
    with Run(tmp_path, 4, {"part": Part()}, loggers=[]) as run:
        list(run.steps())
    part = Part()
    random_state = torch.get_rng_state()
    torch.rand(1)
    changed = torch.get_rng_state()
    with pytest.raises(ValueError, match="total_steps=2 must be at least step 4"):
        Run(tmp_path, 2, {"part": part}, loggers=[]).__enter__()
    assert not part.restored and torch.equal(torch.get_rng_state(), changed) and not torch.equal(changed, random_state)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10**5, b'{"a": 1} x'])
def test_damaged_settings_are_read_from_the_checkpoint(tmp_path, content, caplog):
    from torchrl_rloo.run import check_resumable

    arguments = {"settings": {"lr": 1}, "defaults": {}, "resume": "auto"}
    with Run(tmp_path, 1, {}, loggers=[], **arguments) as run:
        list(run.steps())
    (tmp_path / "settings.json").write_bytes(content)
    check_resumable(tmp_path, **arguments)
    assert "settings.json" in caplog.text
    with pytest.raises(ValueError, match="lr: 1 -> 2"):
        Run(tmp_path, 1, {}, loggers=[], **arguments | {"settings": {"lr": 2}}).__enter__()


@pytest.mark.parametrize(
    "content", [b"\xff" * 99, b"[]\n" * 40, b'{"a": 1}\n' * 20, b"{" * 99 + b"\n", b'{"step": "x"}\n' * 9]
)
def test_a_damaged_log_is_named(tmp_path, content):
    with Run(tmp_path, 1, {}, loggers=[]) as run:
        for step in run.steps():
            run.log({"a": step})
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: .*resume=never"):
        Run(tmp_path, 2, {}, loggers=[]).__enter__()
