"""Code rewards: dataset formats, and programs that try to pass tests without solving the task."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.cheats import CHEATS
from torchrl_rloo.rewards.code import BrokenTestsError, CodeTests, parse_tests, read_verdicts, same_output
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward
from torchrl_rloo.sandbox import Sandbox

pytestmark = pytest.mark.usefixtures("sandboxed")

DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = ["assert double(3) == 6", "assert double('ab') == 'abab'", "assert double([1]) == [1, 1]"]
ADD = {"inputs": ["1 2\n", "30 12\n"], "outputs": ["3\n", "42\n"]}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(timeout=20, cpu_seconds=1, memory=128 << 20, max_output=100_000)


def score(sandbox: Sandbox, text: str, tests: Any, *, partial: bool = False, **columns: Any) -> float | None:
    names = {name: columns.pop(name) for name in ("setup", "prelude") if name in columns}
    function = CodeTests(sandbox=sandbox, partial=partial, **{name: name for name in names})
    rows = {name: [value] for name, value in {"tests": tests, **names, **columns}.items()}
    call = call_reward(function, RewardBatch(["?"], [text], [[1]], rows))
    (reason,) = call.extra["code_tests_reason"]
    assert (reason == "passed") == (call.scores[0] == 1.0)
    assert reason.startswith("broken tests: ") == (call.scores[0] is None)
    return call.scores[0]


def test_forms_of_tests(sandbox: Sandbox):
    assert score(sandbox, DOUBLE, ASSERTS) == 1.0
    assert score(sandbox, DOUBLE, json.dumps(ASSERTS)) == 1.0
    assert score(sandbox, DOUBLE, "\n".join(ASSERTS)) == 1.0
    check = "META = {}\n\ndef check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n"
    assert score(sandbox, DOUBLE, check, entry_point="double") == 1.0
    assert score(sandbox, DOUBLE.replace("2 *", "3 *"), check, entry_point="double") == 0.0
    add = "a, b = map(int, input().split())\nprint(a + b)"
    for form in (
        ADD,
        json.dumps(ADD),
        {"input": ADD["inputs"], "output": ADD["outputs"]},
        [{"input": i, "output": o} for i, o in zip(ADD["inputs"], ADD["outputs"], strict=True)],
        {"inputs": [["1 2"]], "outputs": [["3"]]},
    ):
        assert score(sandbox, add, form) == 1.0
        assert score(sandbox, "print('3', '42')", form) == 0.0
    call = {"fn_name": "double", "inputs": [[3], ["ab"]], "outputs": [6, ["abab"]]}
    assert score(sandbox, DOUBLE, call) == 1.0
    assert score(sandbox, "class Solution:\n    def double(self, x): return x + x", json.dumps(call)) == 1.0
    assert score(sandbox, "def double(x): return 6", call) == 0.0


def test_partial_credit(sandbox: Sandbox):
    wrong_for_texts = "def double(x):\n    assert not isinstance(x, str)\n    return 2 * x"
    assert score(sandbox, wrong_for_texts, ASSERTS, partial=True) == pytest.approx(2 / 3)
    assert score(sandbox, wrong_for_texts, ASSERTS) == 0.0
    assert score(sandbox, "print(3)", ADD, partial=True) == 0.5
    assert score(sandbox, "def", ADD, partial=True) == score(sandbox, "def", ASSERTS, partial=True) == 0.0
    stuck = "def double(x):\n    while isinstance(x, list): pass\n    return 2 * x"
    assert score(sandbox, stuck, ASSERTS, partial=True) == pytest.approx(2 / 3)


def test_setup_and_prelude(sandbox: Sandbox):
    assert (
        score(sandbox, "def f(): return 0.1 + 0.2", ["assert isclose(f(), 0.3)"], setup="from math import isclose") == 1
    )
    assert score(sandbox, "def f(): return 1", ["assert f() == ONE"], setup=["ONE = 1", "TWO = 2"]) == 1
    assert score(sandbox, "def f(): return helper()", ["assert f() == 7"], prelude="def helper(): return 7") == 1
    with pytest.raises(KeyError, match="'setup'"):
        CodeTests(sandbox=sandbox, setup="setup")(["?"], [""], [[1]], tests=[["assert 1"]])
    with pytest.raises(KeyError, match="'tests'"):
        CodeTests(sandbox=sandbox)(["?"], [""], [[1]], answer=["1"])


VALUES = [  # program, test that passes
    ("def f(): return None, True, 1, 2.5, 'x', b'y', 1j", "assert f() == (None, True, 1, 2.5, 'x', b'y', 1j)"),
    ("def f(x): return x", "assert f({(1, 2): [{3}, frozenset({4})]}) == {(1, 2): [{3}, frozenset({4})]}"),
    ("def f(x): return x", "assert type(f((1,))) is tuple and f(float('inf')) > 9 and f(10**5000) == 10**5000"),
    ("def f(x): return x", "assert f('\\ud800 \\n\\0') == '\\ud800 \\n\\0' and f(bytearray(b'a')) == bytearray(b'a')"),
    ("from fractions import Fraction as F\ndef f(): return F(1, 3)", "assert f() * 3 == 1"),
    ("from decimal import Decimal\ndef f(): return [Decimal('0.10')]", "assert str(f()[0]) == '0.10'"),
    ("from collections import *\ndef f(x): return Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}"),
    (
        "from collections import *\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert f() == (1, 2) and f().x == 1",
    ),
    ("import enum\nclass E(enum.IntEnum): A = 1\ndef f(): return E.A", "assert f() == 1 and f() == E.A"),
    ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
    ("def f(x): x.sort(); x.append(9)", "a = [2, 1]\nassert f(a) is None\nassert a == [1, 2, 9]"),
    ("def f(x): x['k'] = 1", "a = {}\nf(a)\nassert a == {'k': 1}"),
    ("def f(x, *, y): return x - y", "assert f(y=1, x=3) == 2"),
    ("def f(): raise ValueError('no')", "try: f()\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert False"),
    ("class Own(Exception): pass\ndef f(): raise Own('no')", "try: f()\nexcept Exception: pass\nelse: assert False"),
    (
        "class N:\n    def __init__(s, v): s.v, s.n = v, None\ndef f(n): return n.n.v",
        "a = N(1)\na.n = N(5)\nassert f(a) == 5",
    ),
    (
        "class S(list):\n    def top(s): return s[-1]",
        "s = S()\ns.append(4)\nassert s.top() == 4 and len(s) == 1 and s[0] == 4",
    ),
    (
        "class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x",
        "assert P(1) == P(1) != P(2)",
    ),
    ("import math\nfrom random import randint\nf = math.sqrt", "assert math.isclose(f(4), 2) and randint(1, 1) == 1"),
    ("X = 5\ndef f(): return X", "assert X == f()"),
    ("def f(): return 1\nif __name__ == '__main__': print(f(input()))", "assert f() == 1"),
    ("def f(): print('True', '[true, null]'); return 1", "assert f() == 1"),
    ("from dataclasses import dataclass\n@dataclass\nclass D:\n    x: int", "assert D(1) == D(1) and D(2).x == 2"),
    (
        "from datetime import *\ndef f(d): return d + timedelta(hours=25), time(1, 2), datetime.now(timezone.utc)",
        "from datetime import *\na, b, c = f(date(2020, 2, 29))\n"
        "assert a == date(2020, 3, 1) and b == time(1, 2) and c - c == timedelta(0) and c.tzinfo == timezone.utc",
    ),
    ("def f(a, b): return a - b", "from datetime import *\nassert f(date(2020, 3, 1), date(2020, 2, 1)).days == 29"),
    (
        "from collections import *\ndef f(x): return Counter(x), OrderedDict(a=1, b=2)",
        "c, d = f('aab')\nassert c.most_common(1) == [('a', 2)] and c['z'] == 0 and c + c == Counter('aabaab')\n"
        "assert d == {'b': 2, 'a': 1} and d != OrderedDict(b=2, a=1) and d.popitem() == ('b', 2)",
    ),
    ("def f(*, x): x.append(9)", "a = [2]\nf(x=a)\nassert a == [2, 9]"),
    (
        "class K:\n    def __init__(s, **k): s.k = k\n    def __call__(s, **k): return k\ndef f(**k): return k",
        "k = dict.fromkeys('self cls name value operation function args kwargs link'.split(), 1)\n"
        "assert f(**k) == K(**k).k == K()(**k) == k",
    ),
    (
        "from collections import *\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        "assert isinstance(f(), tuple) and isinstance(f(), P) and f() + (3,) == (1, 2, 3) and f() < (1, 3)\n"
        "assert issubclass(P, P) and not isinstance((1, 2), P) and P(1, 2) in {P(1, 2)}",
    ),
    (
        "class V:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n"
        "    def __add__(s, o): return V(s.x + o.x)\n    def __lt__(s, o): return s.x < o.x\n"
        "    def __neg__(s): return V(-s.x)",
        "assert V(1) + V(2) == V(3) and -V(1) == V(-1) and max(V(3), V(4)).x == 4\n"
        "assert [v.x for v in sorted([V(2), V(1)])] == [1, 2] and isinstance(V(1), V) and not isinstance(1, V)",
    ),
    ("class N(int): pass\ndef f(): return N(3)", "assert int(f()) == 3 and 'abcd'[f()] == 'd' and abs(f() - 3) < 1"),
    ("\ufeffdef f(): return 1", "assert f() == 1"),
    ("\ufeff```python\ndef f(): return 1\n```", "assert f() == 1"),
    ("```python\n\ufeffdef f(): return 1\n```", "assert f() == 1"),
]


@pytest.mark.parametrize(("program", "test"), VALUES, ids=range(len(VALUES)))
def test_values_between_program_and_tests(sandbox: Sandbox, program: str, test: str):
    assert score(sandbox, program, [test]) == 1.0
    assert score(sandbox, program, [test + "\nassert False"]) == 0.0


LOOP = "while True: pass"  # uses all of its CPU time


@pytest.mark.parametrize(
    ("cheat", "partial"),
    [
        pytest.param(cheat, partial, id=f"{i}-{partial}")
        for i, cheat in enumerate(CHEATS)
        for partial in ([False] if LOOP in cheat else [False, True])
    ],
)
def test_cheats_score_zero(sandbox: Sandbox, cheat: str, partial: bool):
    assert score(sandbox, cheat, ASSERTS[:2], partial=partial) == 0.0
    outcome = score(sandbox, cheat, {"inputs": ["40 2"], "outputs": ["42"]}, partial=partial)
    assert outcome == 0.0


OBEDIENT = (
    "class A:\n    def __sub__(s, o): return 0\n"
    "    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda s, o: True\n"
    "    __rsub__ = __mul__ = __mod__ = __pow__ = __and__ = __or__ = __xor__ = __add__ = __radd__ = __sub__\n"
    "    __abs__ = __neg__ = __index__ = __len__ = lambda s: 0\n    __hash__ = lambda s: hash(4)\n"
    "    __bool__ = lambda s: True\n    __iter__ = lambda s: iter([A()])\n"
)
OBEYED = (
    "abs(f(2) - 4) < 1e-6",
    "abs(4 - f(2)) < 1e-6",
    "3 < f(2) < 5",
    "f(2) < f(3) < 7",
    "4 in f([4])",
    "f(2) in (4, 5)",
    "set(f([4])) == {4}",
    "{f(2)} == {4}",
    "sorted(f([4])) == [4]",
    "f(2) % 5 == 4",
    "isinstance(f(2), (int, str, dict, list))",
    "[0, 1, 2, 3, 4][f(2)] == 4",
)


@pytest.mark.parametrize("value", ["A()", "[A()]", "{A(): 1}"])
def test_operators_of_an_object_do_not_decide(sandbox: Sandbox, value: str):
    program = OBEDIENT + f"def f(x): return {value}"
    tests = [f"assert {test}" for test in OBEYED if value == "A()" or not test.startswith("isinstance")]
    assert score(sandbox, program, tests, partial=True) == 0.0


def test_what_a_program_is_told(sandbox: Sandbox):
    """Confirm that the process of a program holds only the arguments of the calls."""
    spy = (
        "import gc, sys\ndef double(x):\n"
        "    texts = ' '.join(repr(o) for o in gc.get_objects() if type(o) in (str, list, dict)) + str(sys.argv)\n"
        "    return 'SECRET' + 'ARGUMENT' in texts + x, 'SECRET' + 'RESULT' in texts"
    )
    test = "told = double('SECRETARGUMENT'); assert told == (True, False), told; assert 'SECRETRESULT'"
    assert score(sandbox, spy, [test]) == 1.0


def test_a_library_that_tests_borrow_from_the_program_is_the_real_one(sandbox: Sandbox):
    assert score(sandbox, "import math\ndef f(): return 0.1 + 0.2", ["assert math.isclose(f(), 0.3)"]) == 1.0
    fake = "class math:\n    isclose = lambda *a: True\ndef f(): return 9"
    assert score(sandbox, fake, ["assert math.isclose(f(), 0.3)"]) == 0.0
    patched = "import math\nmath.isclose = lambda *a: True\ndef f(): return 9"
    assert score(sandbox, patched, ["assert math.isclose(f(), 0.3)"]) == 0.0


def test_a_test_cannot_catch_the_end_of_the_program(sandbox: Sandbox):
    test = "try: double(1)\nexcept BaseException: pass"
    assert score(sandbox, "import os\ndef double(x): os._exit(0)", [test, "assert True"], partial=True) == 0.0
    assert score(sandbox, "def double(x): raise ValueError", [test]) == 1.0


BROKEN = [
    None,
    "",
    [],
    {},
    [1, 2],
    7,
    {"inputs": ["1"], "outputs": []},
    {"inputs": ["1"]},
    {"inputs": [1], "outputs": [2]},
    {"fn_name": "a b", "inputs": [[1]], "outputs": [2]},
    {"fn_name": "double", "inputs": [1], "outputs": [2]},
    ["assert double(1 == 2"],
    ["assert double(1) == 2", "def"],
    "def check(candidate):\n    assert candidate(1) == 2",
    ["assert double(lambda: 1) == 2"],
    ["class A: pass\ntry: double(A())\nexcept Exception: pass"],
]


@pytest.mark.parametrize("tests", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("partial", [False, True])
def test_broken_tests_abstain(sandbox: Sandbox, tests: Any, partial: bool):
    assert score(sandbox, DOUBLE, tests, partial=partial) is None


def test_a_broken_row_costs_itself_alone(sandbox: Sandbox):
    call = call_reward(
        CodeTests(sandbox=sandbox),
        RewardBatch(["?"] * 3, [DOUBLE, DOUBLE, "x"], [[1]] * 3, {"tests": [ASSERTS, "assert (", ASSERTS]}),
    )
    assert call.scores == [1.0, None, 0.0]
    assert call.extra["code_tests_reason"][2] == "0 of 3 passed; NameError: name 'x' is not defined"


def test_code_in_a_completion():
    for fence in ("```python", "```Python3 title=x", "```py", "```"):
        text = f"So:\n{fence}\n{DOUBLE}\n```\nand\n```json\n{{}}\n```\n"
        assert CodeTests()(["?"], [text], [[1]], tests=[ASSERTS]) == [1.0]
    messages = [{"role": "assistant", "content": f"So:\n```python\n{DOUBLE}```\n"}]
    assert CodeTests()(["?"], [messages], [[1]], tests=[ASSERTS]) == [1.0]


def test_output_is_compared_without_white_space():
    assert same_output("1  2 \n3\n\n", "1 2\r\n3")
    assert not same_output("12", "1 2") and not same_output("1 2 3", "1 2") and not same_output("", "1")


def test_a_snippet_that_begins_with_a_bracket_is_a_snippet():
    assert parse_tests("[double(1)]\nassert double(2) == 4") == ["[double(1)]\nassert double(2) == 4"]
    with pytest.raises(BrokenTestsError, match="as many inputs as outputs"):
        parse_tests({"inputs": ["1", "2"], "outputs": ["1"]})


def test_off_the_main_thread_and_pickled(sandbox: Sandbox):
    function = pickle.loads(pickle.dumps(CodeTests(sandbox=sandbox, partial=True)))
    assert function.__name__ == "code_tests" and function.partial
    with ThreadPoolExecutor(3) as pool:
        programs = [DOUBLE, "def double(x): return 6", "def double(x): return 0"] * 4
        scores = pool.map(lambda p: function(["?"], [p], [[1]], tests=[ASSERTS])[0], programs)
        assert list(scores) == [1.0, 1 / 3, 0.0] * 4


def test_loads_no_torch():
    text = "import sys, torchrl_rloo.rewards.code\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], capture_output=True, text=True).stdout.strip() == "False"


BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_judge.py"


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
