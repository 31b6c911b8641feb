"""Errors of a recipe: one line that says how to fix it, and the traceback in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate

from torchrl_rloo.cli.recipe import run_recipe


@dataclass
class Config:
    output_dir: str
    engine: dict[str, Any] = field(default_factory=dict)


def build(cfg: Config) -> None:
    instantiate(cfg.engine)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"url": "nonsense"}, ["VLLMServer", "url='nonsense' must be like"]),  # refused by the engine itself
        ({"ulr": "http://127.0.0.1:1"}, ["VLLMServer", "unexpected keyword argument 'ulr'"]),
        ({"url": "http://127.0.0.1:1", "connect_timeout": 0.01}, ["no server answers at http://127.0.0.1:1"]),
    ],
    ids=["value", "name", "connection"],
)
def test_an_object_that_cannot_be_built_is_one_line(tmp_path: Path, monkeypatch, capsys, engine, words):
    monkeypatch.syspath_prepend(tmp_path)  # undoes what run_recipe adds to the path
    cfg = Config(str(tmp_path / "out"), {"_target_": "torchrl_rloo.engines.VLLMServer", **engine})
    with pytest.raises(SystemExit) as raised:
        run_recipe(build, cfg)
    (line,) = capsys.readouterr().err.splitlines()
    assert raised.value.code == 1 and line.startswith("error: ") and all(word in line for word in words)
    assert "Traceback" in (tmp_path / "out" / "traceback.txt").read_text()
    run_recipe(lambda cfg: None, cfg)  # a good run leaves no traceback of an earlier start
    assert not (tmp_path / "out" / "traceback.txt").exists()
