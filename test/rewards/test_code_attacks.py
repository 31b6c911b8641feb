"""Attacks on the judge of code, and right programs that look like attacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import attacks_judge as attacks
from support.cheats import FORGERIES, RIGHT, UNUSABLE
from torchrl_rloo.envs.tasks import load_task
from torchrl_rloo.rewards.code import CodeTests
from torchrl_rloo.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("sandboxed")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(timeout=60, cpu_seconds=1, memory=128 << 20, max_output=100_000)
    yield sandbox
    sandbox.close()


def score(sandbox: Sandbox, programs: list[str], tests: Any, partial: bool, columns: dict[str, Any]) -> list[Any]:
    """Score programs on one row."""
    function = CodeTests(sandbox=sandbox, partial=partial, prelude="prelude", setup="setup")
    columns = {name: [columns.get(name)] * len(programs) for name in ("prelude", "setup", "entry_point")}
    return function(["?"] * len(programs), programs, [[1]] * len(programs), tests=[tests] * len(programs), **columns)


@pytest.mark.parametrize(("program", "tests", "columns"), FORGERIES, ids=range(len(FORGERIES)))
def test_forgeries_score_zero(sandbox: Sandbox, program: str, tests: Any, columns: dict[str, Any]):
    for partial in (False, True):
        assert score(sandbox, [program], tests, partial, columns) == [0.0]


@pytest.mark.parametrize(("program", "change", "tests", "columns"), RIGHT, ids=range(len(RIGHT)))
def test_right_programs_pass(
    sandbox: Sandbox, program: str, change: tuple[str, str], tests: Any, columns: dict[str, Any]
):
    wrong = program.replace(*change)
    assert wrong != program
    assert score(sandbox, [program, wrong, "pass"], tests, False, columns) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("tests", "columns"), UNUSABLE, ids=range(len(UNUSABLE)))
def test_unusable_names_abstain(sandbox: Sandbox, tests: Any, columns: dict[str, Any]):
    assert score(sandbox, ["def f(x): return 1", ""], tests, True, columns) == [None, None]


# Name of the function under test, right body, arguments and result
NAMES = [
    ("sum", "a + b", "(10, 15)", "25"),
    ("sorted", "[x for x in range(9) if x in a]", "([2, 1],)", "[1, 2]"),
    ("select", "a", "(1,)", "1"),
    ("calendar", "a * 2", "(1,)", "2"),
    ("heapq", "a[::-1]", "([1, 2],)", "[2, 1]"),
    ("len", "a.__len__()", "('ab',)", "2"),
    ("math", "a", "('x',)", "'x'"),
    ("set", "[*a]", "((1, 1),)", "[1, 1]"),
    ("print", "a", "(3,)", "3"),
    ("type", "str(a)", "(3,)", "'3'"),
    ("isinstance", "a is b", "(None, None)", "True"),
    ("json", "{'k': a}", "(3,)", "{'k': 3}"),
    ("candidate", "a", "(3,)", "3"),
    ("check", "a", "(3,)", "3"),
    ("Solution", "a", "(3,)", "3"),
    ("tests", "a", "(3,)", "3"),
]


@pytest.fixture(scope="module")
def rewards() -> list[CodeTests]:
    """Build the rewards of the task and its scorer, once."""
    task = load_task("code")
    return [*task.make_rewards(), task.make_scorer()]


@pytest.mark.parametrize(("name", "body", "arguments", "result"), NAMES, ids=[name for name, *_ in NAMES])
def test_any_name_in_published_rows(rewards: list[CodeTests], name: str, body: str, arguments: str, result: str):
    # The shapes of MBPP, its sanitized part, and HumanEval
    right = f"def {name}(a, b=None):\n    return {body}"
    test = f"assert {name}(*{arguments}) == {result}"
    check = f"def check(candidate):\n    assert candidate(*{arguments}) == {result}\n"
    prompt = f'def {name}(a, b=None):\n    """Solve."""\n'
    rows = [
        {"text": "t", "code": right, "test_list": [test], "test_setup_code": ""},
        {"prompt": "t", "code": f"import math\n{right}", "test_list": [test], "test_imports": ["import math"]},
        {"prompt": prompt, "test": check, "entry_point": name},
    ]
    # A right, a wrong and no program for each
    rows = [load_task("code").row_map(row) for row in rows for _ in range(3)]
    programs = [right, right.replace("return ", "return 77, "), "import os"] * 3
    columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
    for function in rewards:
        assert function(["?"] * 9, programs, [[1]] * 9, **columns) == [1.0, 0.0, 0.0] * 3


PARTS = [attacks.TARGETS, attacks.VALUES, attacks.BINDINGS, attacks.BASES, [None, *attacks.BODIES], attacks.CARRIERS]


@settings(max_examples=10, derandomize=True, deadline=None)
@given(drawn=st.data())
def test_combined_attacks(sandbox: Sandbox, drawn: st.DataObject):
    batch = []
    for problem, row in enumerate(attacks.PROBLEMS):
        target, *parts = (drawn.draw(st.sampled_from(part)) for part in PARTS)
        target = drawn.draw(st.sampled_from([target, *row.reads.split()]))
        batch.append(attacks.build_attack(problem, target, *parts))
    for tried, found in zip(batch, attacks.score_attacks(batch, sandbox), strict=True):
        assert attacks.is_contained(tried, found), (tried.program, found)


def test_random_attacks_are_contained():
    assert attacks.attack(48, seed=2) == {"tried": 48, "contained": 48, "failures": []}


def test_the_attacks_can_fail(sandbox: Sandbox):
    """Confirm that right programs pass all problems, and count as failures where they should score 0."""
    rights = [attacks.Attack(i, problem.right, False) for i, problem in enumerate(attacks.PROBLEMS)]
    scores = attacks.score_attacks(rights, sandbox)
    assert scores == [1.0] * len(attacks.PROBLEMS)
    assert not any(attacks.is_contained(*pair) for pair in zip(rights, scores, strict=True))
