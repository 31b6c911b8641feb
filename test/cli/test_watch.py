"""Command torchrl-rloo watch: it follows a run that another process writes, and ends with it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from torchrl_rloo.cli.main import main
from torchrl_rloo.cli.watch import follow
from torchrl_rloo.run.lock import DirectoryLock


def write(directory: Path, kind: str, *entries: dict, end: str = "\n") -> None:
    with (directory / f"{kind}.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, entries)) + end)


def test_an_ended_run_is_printed_at_once(tmp_path, capsys):
    write(tmp_path, "metrics", {"step": 0, "eval/greedy": 0.25}, {"step": 1, "reward": 0.5, "loss": 0.01, "kl": 0.002})
    write(tmp_path, "timings", {"step": 1, "time/step": 1.5})
    (tmp_path / "metrics.jsonl").open("a").write('damaged\n{"step": 2, "rew')
    main(["watch", str(tmp_path)])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"report: {(tmp_path / 'report.html').resolve()}"
    assert lines == [
        "step      0  accuracy 0.25",
        "step      1  reward 0.5  KL 0.002  loss 0.01  seconds 1.5",
    ]
    with pytest.raises(SystemExit):
        main(["watch", str(tmp_path / "missing")])
    assert "is no folder; name the output_dir of a run" in capsys.readouterr().err


def test_a_run_is_followed_until_it_ends_and_its_steps_are_printed_once(tmp_path):
    lock = DirectoryLock(tmp_path)
    write(tmp_path, "metrics", {"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2})
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(follow(tmp_path, period=0.01)))
    reader.start()
    # A resumed run drops its last step and writes it again
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.1}\n')
    write(tmp_path, "metrics", {"step": 2, "reward": 0.2}, {"step": 3, "reward": 0.3})
    lock.close()
    reader.join(60)
    assert not reader.is_alive()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
