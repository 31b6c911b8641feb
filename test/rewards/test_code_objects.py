"""Objects of a program in its tests: a sample of the corpus, what the judge cannot run, and where its verdicts go."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrl_rloo.rewards.code import BrokenTestsError, CodeTests, read_verdicts
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward
from torchrl_rloo.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("sandboxed")

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_judge.py"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(timeout=60, cpu_seconds=2)
    yield sandbox
    sandbox.close()


def judge(sandbox: Sandbox, rows: list[tuple[str, list[str]]], partial: bool = False) -> list[tuple[float | None, str]]:
    """Return the score and the reason of each program with its tests."""
    programs, tests = zip(*rows, strict=True)
    batch = RewardBatch(["?"] * len(rows), programs, [[1]] * len(rows), {"tests": tests})
    call = call_reward(CodeTests(sandbox=sandbox, partial=partial), batch)
    return list(zip(call.scores, call.extra["code_tests_reason"], strict=True))


def test_the_judge_agrees_with_cpython():
    spec = importlib.util.spec_from_file_location("bench_judge", BENCH)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    cases = list(bench.read_corpus(bench.CORPUS.read_text()))[::8]
    scores, reasons, _ = bench.ask_judge(cases)
    for case, score, reason in zip(cases, scores, reasons, strict=True):
        assert score is None or score == bench.ask_cpython(case), (case.title, reason)
    assert scores.count(None) < 5 and {0.0, 1.0} < {*scores}


F = "def f(x): return x\n"
LIMITS = [  # a program, its test, and the beginning of the reason
    (F, "import numpy as np\nassert f(1) == 1", "ModuleNotFoundError: No module named 'numpy'"),
    (
        F,
        "def t():\n    import pytest\n    assert f(1) == 1\nt()",
        "a test needs what the sandbox lacks: ModuleNotFound",
    ),
    (F, "import tempfile\ntempfile.mkdtemp()", "a test needs what the sandbox lacks: FileNotFoundError"),
    (
        F,
        "try: open('x', 'w')\nexcept OSError: assert f(1) == 2",
        "a test needs what the sandbox lacks: PermissionError",
    ),
    (F, "assert f(lambda: 1)", "a test passes a function"),
    (F, "from unittest.mock import patch\nwith patch('builtins.input', str): f(1)", "a test patches input"),
    (F, "import io, sys\nsys.stdin = io.StringIO()\nf(1)", "a test replaces the input"),
    ("class A: pass", "class B(A): pass", "a test derives B from a class of the program"),
    ("class A: pass", "import pickle\npickle.dumps(A())", "a test pickles a A"),
]


def test_limits_of_the_judge_abstain(sandbox: Sandbox):
    found = judge(sandbox, [(program, [test]) for program, test, _ in LIMITS])
    for (score, reason), (_, test, expected) in zip(found, LIMITS, strict=True):
        assert score is None and reason.startswith(f"broken tests: {expected}"), (test, score, reason)
    # A program that raises the same has failed
    assert judge(sandbox, [("def f(x): raise PermissionError(13, 'no')", ["f(1)"]), ("import numpy", ["f(1)"])]) == [
        (0.0, "0 of 1 passed; PermissionError: [Errno 13] no"),
        (0.0, "0 of 1 passed; ModuleNotFoundError: No module named 'numpy'"),
    ]


@pytest.mark.parametrize("partial", [False, True])
def test_what_tests_print_is_no_verdict(sandbox: Sandbox, partial: bool):
    prints = [
        "import os\nos.write(1, b'[true, null]\\n' * 9)\nassert f(1) == 2",
        "import sys\nprint('[5, null]', file=sys.__stdout__, flush=True)\nassert f(1) == 1",
        "import os\nfor i in range(3, 64):\n    try: os.write(i, b'[5, null]\\n')\n    except OSError: pass",
        "import os\nfor i in range(4, 64):\n    try: os.write(i, b'[true, null]\\n' * 9)\n    except OSError: pass",
    ]
    scores = [score for score, _ in judge(sandbox, [(F, [test]) for test in prints], partial)]
    assert scores[:2] == [0.0, 1.0]
    assert set(scores[2:]) <= {None, 0.0}


@pytest.mark.parametrize(
    "line", ["x", "7", "[]", "{}", "[5, null]", "[true, 1]", "[false, null]", '["a", "b"]', "[[[", '{"broken": 1}']
)
def test_verdicts_of_another_form_are_broken(line: str):
    assert read_verdicts('[true, null]\n[false, "no"]\n[true', 2) == [(True, None), (False, "no")]
    with pytest.raises(BrokenTestsError, match="wrote to the file of the verdicts"):
        read_verdicts(f"[true, null]\n{line}\n", 9)
    with pytest.raises(BrokenTestsError, match="2 verdicts of 1 tests"):
        read_verdicts("[true, null]\n" * 2, 1)
