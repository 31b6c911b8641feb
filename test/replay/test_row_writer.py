"""Writers of a run's rows: bounded disk, steps, and runs that resume, start over or share a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.stored_rows import make_groups
from torchrl_rloo.replay import RolloutFiles, RolloutWriter, run_id

HASH = "0" * 64


def writer(folder: Path, **kwargs) -> RolloutWriter:
    return RolloutWriter(folder, **{"model": "tiny", "tokenizer": HASH} | kwargs)


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
