"""The prose rules that a script can check: openings, words that the house does not use, sentence length."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("prose", ROOT / ".ci" / "prose.py")
prose = importlib.util.module_from_spec(SPEC)
sys.modules["prose"] = prose
SPEC.loader.exec_module(prose)


def test_the_repository_keeps_the_rules():
    assert prose.findings() == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('def f():\n    """What comes next."""', "opens with 'what'"),
        ('def f():\n    """The next row."""', "not with an imperative verb"),
        ('class A:\n    """How rows are stored."""', "opens with 'how'"),
        ('def f():\n    """Return the weights in force."""', "'in force' -> current"),
        ('def f():\n    """Return the row, too."""', "trailing 'too'"),
        ('def f():\n    raise ValueError("x is no setting of y")', "'is no setting' -> unknown"),
        ("# the behaviour of rows that are stale\nx = 1", "American spelling"),
        (f'def f():\n    """Return {"one " * 30}."""', "words in a sentence"),
    ],
)
def test_a_fault_is_found(source: str, problem: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(source)
    found = prose.findings(["a.py"])
    assert len(found) == 1 and problem in found[0]


def test_good_prose_has_no_findings(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        '"""Rows and groups."""\n\n\ndef f(rows):\n    """Return the rows.\n\n    Args:\n        rows: N rows.\n'
        '\n    Example:\n        >>> f([])  # whoever\n        []\n    """\n    return rows  # copied later\n'
    )
    assert prose.findings(["a.py"]) == []
