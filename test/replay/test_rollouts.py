"""Folders of rollouts: writers, readers, damaged files, and writers that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path

import pytest
import torch

from support.collected_rows import check_same_rows
from support.fork_server import ForkServer
from support.stored_rows import make_groups, make_row
from support.waiting import PATIENCE, wait_until
from torchrl_rloo.data import concatenate, keys, stack_rows, tensor_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.replay import RolloutFiles, RolloutWriter
from torchrl_rloo.replay.rollouts import RolloutFileError, StoredGroup, run_id, vocabulary_hash

HASH = "0" * 64


def writer(folder: Path, **kwargs) -> RolloutWriter:
    return RolloutWriter(folder, **{"model": "tiny", "tokenizer": HASH} | kwargs)


def stored(folder: Path, **limits) -> list[int]:
    return [group.group_id for group, _ in RolloutFiles(folder).groups(**limits)]


def test_groups_return_in_the_order_of_their_files(tmp_path: Path) -> None:
    first, second = writer(tmp_path), writer(tmp_path, groups_per_file=2)
    batches = [make_groups(5, 1), make_groups(9, 7, 8), make_groups(2, version=3)]
    for one, rows in zip((first, second, first), batches, strict=True):
        assert one(rows) is rows
    assert stored(tmp_path) == [1, 5, 7, 8, 9, 2]
    for (group, rows), expected in zip(RolloutFiles(tmp_path).groups(), (1, 5, 7, 8, 9, 2), strict=True):
        check_same_rows(rows, make_groups(expected, version=3 if expected == 2 else 0))
        assert group == StoredGroup(expected, 2, 25, *(2 * [3 if expected == 2 else 0]), 0.5)
    assert second.counts["storage/files"] == 2 and second.counts["storage/groups"] == 3
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size == first.counts["storage/bytes"] + second.counts["storage/bytes"]


def test_text_may_be_left_out(tmp_path: Path) -> None:
    writer(tmp_path, text=False).extend(make_groups(1))
    ((_, rows),) = RolloutFiles(tmp_path).groups()
    check_same_rows(rows, tensor_rows(make_groups(1)))


def test_statistics_and_filters_read_headers_only(tmp_path: Path) -> None:
    out = writer(tmp_path)
    for version in range(4):
        out.extend(make_groups(2 * version, 2 * version + 1, version=version))
    mixed = make_row(8, 0, size=1, version=1)
    mixed[keys.ACTION_VERSIONS][-1] = 3
    mixed.set(keys.REWARD, torch.full((1, 1), torch.nan))
    out.extend(stack_rows([mixed]))
    files = RolloutFiles(tmp_path)
    statistics = files.statistics()
    assert statistics.pop("bytes") == out.counts["storage/bytes"]
    counts = {"files": 5, "writers": 1, "groups": 9, "repeated_groups": 0, "rows": 17, "tokens": 8 * 25 + 12}
    assert statistics == {**counts, "versions": {0: 2, 1: 3, 2: 2, 3: 2}, "mean_reward": 0.5}
    assert RolloutFiles(tmp_path).files()[-1].groups == (StoredGroup(8, 1, 12, 1, 3, None),)
    # Damage the values of the files that no filter chooses
    for file in files.files()[:2]:
        with open(file.path, "r+b") as handle:
            handle.seek(-1, os.SEEK_END)
            handle.write(b"\xff")
    assert stored(tmp_path, oldest=2) == [4, 5, 6, 7]
    assert stored(tmp_path, oldest=2, newest=2) == [4, 5]
    with pytest.raises(RolloutFileError):
        stored(tmp_path, newest=1)


def test_a_group_that_is_stored_again_is_read_once(tmp_path: Path) -> None:
    for group_ids in ((1, 2), (2, 3)):
        writer(tmp_path).extend(make_groups(*group_ids))
    assert stored(tmp_path) == [1, 2, 3]
    statistics = RolloutFiles(tmp_path).statistics()
    assert statistics["groups"] == 3 and statistics["repeated_groups"] == 1


def test_an_incomplete_group_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="group 2 has 1 of 2 rows; store whole groups"):
        writer(tmp_path).extend(make_groups(1, 2)[:3])
    assert RolloutFiles(tmp_path).files() == []


def test_rows_of_another_model_or_tokenizer_are_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    writer(tmp_path, tokenizer=tokenizer).extend(make_groups(1))
    with pytest.raises(ValueError, match="has rollouts of model='tiny', not 'large'; use another folder"):
        writer(tmp_path, model="large", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="has rollouts of tokenizer="):
        writer(tmp_path)
    with pytest.raises(ValueError, match="has rollouts of tokenizer="):
        RolloutFiles(tmp_path, tokenizer=HASH)
    with pytest.raises(ValueError, match="must be a tokenizer or its vocabulary_hash"):
        vocabulary_hash("Qwen/Qwen3-0.6B")
    assert RolloutFiles(tmp_path, model="tiny", tokenizer=tokenizer).statistics()["rows"] == 2
    # A file that was copied from another folder
    writer(tmp_path / "other", model="large").extend(make_groups(2))
    (file,) = RolloutFiles(tmp_path / "other").files()
    os.rename(file.path, tmp_path / file.path.name)
    with pytest.raises(RolloutFileError, match=f"{file.path.name} cannot be read: its model='large' differs"):
        stored(tmp_path)


def test_a_manifest_that_is_missing_damaged_or_newer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no manifest.json; store rollouts there first"):
        RolloutFiles(tmp_path)
    manifest = {"schema": 2, "model": "tiny", "tokenizer": HASH}
    for text, reason in (
        (json.dumps(manifest), "schema=2, not 1"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("", "damaged"),
    ):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=reason):
            RolloutFiles(tmp_path)


def test_a_flipped_bit_anywhere_in_a_file_is_found_and_named(tmp_path: Path) -> None:
    writer(tmp_path).extend(make_groups(1))
    (file,) = RolloutFiles(tmp_path).files()
    content, places = file.path.read_bytes(), random.Random(0)
    for _ in range(200):
        damaged = bytearray(content)
        damaged[places.randrange(len(content))] ^= 1 << places.randrange(8)
        file.path.write_bytes(damaged)
        with pytest.raises(RolloutFileError, match=f"{file.path.name} cannot be read: .*remove it"):
            list(RolloutFiles(tmp_path).groups())
    for size in range(0, len(content), 97):
        file.path.write_bytes(content[:size])
        with pytest.raises(RolloutFileError, match=re.escape(file.path.name)):
            list(RolloutFiles(tmp_path).groups())
    file.path.write_bytes(content)
    assert stored(tmp_path) == [1]


def test_a_fifo_or_a_link_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    writer(tmp_path).extend(make_groups(1))
    (file,) = RolloutFiles(tmp_path).files()
    outside = file.path.rename(tmp_path / "outside")
    for make in (os.mkfifo, lambda path: os.symlink(outside, path)):
        make(file.path)
        with pytest.raises(OSError):
            RolloutFiles(tmp_path).files()
        file.path.unlink()


_WRITE = """
import sys, time
from support.fork_server import ForkServer
from support.stored_rows import make_groups
from torchrl_rloo.replay import RolloutWriter
start = int(sys.argv[2])
writer = RolloutWriter(sys.argv[1], model="tiny", tokenizer="0" * 64, groups_per_file=2)
for i in range(start, start + 100_000, 4):
    writer.extend(make_groups(*range(i, i + 4), size=3))
    time.sleep(0.05)
"""
_DIE = """
import os, signal, sys
from support.fork_server import ForkServer
from support.stored_rows import make_groups
from torchrl_rloo.replay import RolloutWriter
writer = RolloutWriter(sys.argv[1], model="tiny", tokenizer="0" * 64)
writer.extend(make_groups(1))
setattr(os, sys.argv[2], lambda *args: os.kill(os.getpid(), signal.SIGKILL))
writer.extend(make_groups(2))
"""


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_writer_killed_within_a_write_leaves_whole_files(call: str, tmp_path: Path, fork_server: ForkServer) -> None:
    child = fork_server.start(_DIE, [tmp_path, call])
    assert child.wait(PATIENCE) == -signal.SIGKILL, child.stderr
    assert stored(tmp_path) == [1]
    writer(tmp_path).extend(make_groups(2))
    assert stored(tmp_path) == [1, 2]


def test_killed_writers_leave_whole_groups_and_others_go_on(tmp_path: Path, fork_server: ForkServer) -> None:
    """Kill three processes that write to one folder, one after the other, while the folder is read."""
    starts = [1_000_000 * number for number in range(3)]
    children = [fork_server.start(_WRITE, [tmp_path, start]) for start in starts]
    try:
        wait_until(lambda: len({path.name.split("-")[1] for path in tmp_path.glob("*.safetensors")}) == 3)
        for child in children:
            before = len(list(tmp_path.glob("*.safetensors")))
            wait_until(lambda seen=before: len(list(tmp_path.glob("*.safetensors"))) > seen + 3)
            child.send_signal(signal.SIGKILL)
            assert child.wait(PATIENCE) == -signal.SIGKILL, child.stderr
            assert stored(tmp_path)
    finally:
        for child in children:
            child.kill()
    files = RolloutFiles(tmp_path)
    found = {group.group_id: rows for group, rows in files.groups()}
    for start in starts:
        mine = [group_id for group_id in found if start <= group_id < start + 1_000_000]
        assert mine == list(range(start, start + len(mine))) and mine  # in order, and none is missing
    for group_id in random.Random(0).sample(sorted(found), 5):
        check_same_rows(found[group_id], make_groups(group_id, size=3))
    # What a kill leaves behind is removed once no writer can be writing it
    left = tmp_path / ".incomplete-1-0123456789ab.tmp"
    left.write_bytes(b"part")
    writer(tmp_path)
    assert left.exists()
    os.utime(left, (0, 0))
    writer(tmp_path)
    assert not left.exists()


def test_rows_read_by_group_join_to_the_stored_batch(tmp_path: Path) -> None:
    writer(tmp_path, groups_per_file=1).extend(make_groups(1, 2, 3))
    check_same_rows(concatenate([rows for _, rows in RolloutFiles(tmp_path).groups()]), make_groups(1, 2, 3))


def steps(folder: Path) -> list[int | None]:
    return [file.step for file in RolloutFiles(folder).files()]


def test_the_oldest_files_beyond_the_limit_are_removed(tmp_path):
    out = writer(tmp_path, writer="0123abcd")
    for step in range(1, 6):
        out.step = step
        out.extend(make_groups(step))
    size = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    again = writer(tmp_path, writer="0123abcd", max_bytes=3 * size + 10)  # counts the files of the first
    again.step = 6
    again.extend(make_groups(6))
    assert steps(tmp_path) == [4, 5, 6] and again.counts["storage/removed_files"] == 3
    small = writer(tmp_path, writer="0123abcd", max_bytes=1)
    small.step = 7
    small.extend(make_groups(7))
    assert steps(tmp_path) == [7]


def test_a_resumed_run_removes_the_rows_of_later_steps(tmp_path):
    out = writer(tmp_path / "rows", writer=run_id(tmp_path), notes={"rewards": ["a"]})
    for step in (1, 2, 3):
        out.step = step
        out.extend(make_groups(step))
    again = writer(tmp_path / "rows", writer=run_id(tmp_path))
    again.rewind(2)
    again.step = 3
    again.extend(make_groups(9))
    files = RolloutFiles(tmp_path / "rows")
    assert steps(tmp_path / "rows") == [1, 2, 3] and files.notes() == {"rewards": ["a"]}
    assert [group.group_id for group, _ in files.groups(step=3)] == [9]
    again.rewind(0)
    assert steps(tmp_path / "rows") == [] and files.notes() == {}


def test_the_rows_of_another_run_are_kept(tmp_path):
    writer(tmp_path / "rows", writer=run_id(tmp_path / "one")).extend(make_groups(1))
    other = writer(tmp_path / "rows", writer=run_id(tmp_path / "two"))
    with pytest.raises(ValueError, match="has rows of another run .* set another folder, or remove it"):
        other.rewind(0)
    assert steps(tmp_path / "rows") == [None]


def test_ids_and_limits_are_checked(tmp_path):
    assert run_id(tmp_path) == run_id(tmp_path)
    (tmp_path / "run_id").write_text("../../x")
    with pytest.raises(ValueError, match="must be 8 hexadecimal digits"):
        run_id(tmp_path)
    with pytest.raises(ValueError, match="max_bytes=0 must be None or at least 1"):
        writer(tmp_path / "rows", max_bytes=0)
