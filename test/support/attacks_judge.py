"""Hostile programs against the judge of code: a corpus, and a generator that combines ways, targets and carriers.

``attack`` runs generated programs in the real sandbox. A program that does not compute the function must score 0. A
hostile prelude must leave a right program's score at 0 or 1, and the other rows of the batch at theirs.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from torchrl_rloo.rewards.code import CodeTests
from torchrl_rloo.sandbox import Sandbox


class Problem(NamedTuple):
    """Tests of a function, a right program, other names that the tests read, and columns of the row."""

    name: str
    right: str
    reads: str
    tests: Any
    columns: dict[str, Any] = {}


CHECK = "def check(candidate):\n    assert candidate([3, 1]) == [1, 3]\n    assert len(candidate([2])) == 1\n"
PROBLEMS = [
    Problem(
        "root",
        "def root(x): return x ** 0.5",
        "abs",
        ["assert abs(root(2) - 1.41421) < 1e-3", "assert abs(root(9) - 3) < 1e-6"],
    ),
    Problem(
        "similar",
        "def similar(a, b): return tuple(set(a) & set(b))",
        "set sorted",
        [
            "assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))",
            "assert sorted(similar([2, 1], [1, 3])) == [1]",
        ],
    ),
    Problem("sum", "def sum(a, b): return a + b", "abs", ["assert sum(10, 15) == 25", "assert sum(-1, 4) == 3"]),
    Problem(
        "heapq",
        "def heapq(x): return sorted(x)",
        "json Solution",
        {"fn_name": "heapq", "inputs": [[[2, 1]]], "outputs": [[1, 2]]},
    ),
    Problem(
        "sorted",
        "def sorted(x): return [i for i in range(9) if i in x]",
        "json list",
        ["assert sorted([2, 1]) == [1, 2]", "assert list(sorted((1, 0))) == [0, 1]"],
        {"entry_point": "sorted"},
    ),
    Problem(
        "order",
        "def order(x): return sorted(x)",
        "len check order",
        [CHECK],
        {"entry_point": "order", "prelude": 'def order(x):\n    """Sort."""\n'},
    ),
    Problem(
        "pairs",
        "def pairs(x): return [[i, i * i] for i in x]",
        "all map len",
        ["assert all(map(lambda p: p[1] == p[0] ** 2, pairs([2, 3]))) and len(pairs([2, 3])) == 2"],
        {"entry_point": ["pairs"]},
    ),
    Problem(
        "decode",
        "def decode(s): return s[::-1]",
        "encode math len",
        ["assert decode(encode('abc')) == 'abc'", "assert math.isclose(len(decode('ab')), 2) and decode('xy') == 'yx'"],
        {"entry_point": "decode", "prelude": "def encode(s):\n    return s[::-1]\ndef decode(s):\n    pass\n"},
    ),
]
# Names that tests take from elsewhere, besides those that a problem reads
TARGETS = ["isinstance", "AssertionError", "json", "check", "encode", "__build_class__", "__import__", "code_judge"]

# Library functions and modules, some of which answer True to anything or execute data
LIBRARY = [f"math.{name}" for name in ("isnan", "isfinite", "ceil", "fabs", "isclose", "factorial")]
LIBRARY += [f"operator.{name}" for name in ("truth", "not_", "neg", "eq", "is_not", "length_hint", "countOf", "call")]
LIBRARY += ["pickle.loads", "marshal.loads", "ast.literal_eval", "json.loads", "copy.copy", "functools.partial"]
LIBRARY += ["itertools.repeat", "itertools.count", "itertools.chain", "types.SimpleNamespace", "typing.cast"]
LIBRARY += ["collections.Counter", "random.random", "inspect.isfunction", "contextlib.nullcontext", "os.getpid"]
LIBRARY += ["builtins.bool", "builtins.type", "builtins.print", "builtins.any", "builtins.object", "builtins.exec"]
LIBRARY = [f"__import__('{path.split('.')[0]}').{path.split('.')[1]}" for path in LIBRARY]
# Values that a program binds to a name
VALUES = [
    "lambda *a, **k: True",
    "lambda *a, **k: 0",
    "lambda *a, **k: Lie()",
    "Lie()",
    "Lie",
    "__import__('unittest.mock').mock.ANY",
    "__import__('unittest.mock').mock.MagicMock()",
    "type('T', (), {'isclose': staticmethod(lambda *a: True)})",
    *LIBRARY,
]
# Ways to bind it
BINDINGS = [
    "{name} = {value}",
    "globals()['{name}'] = {value}",
    "import builtins; builtins.{name} = {value}",
    "import builtins; builtins.__dict__.update({name}={value})",
    "__builtins__['{name}'] = {value}",
    "import sys; sys.modules['{name}'] = {value}",
    "import sys; setattr(sys.modules['candidate'], '{name}', {value})",
    "import sys; sys.modules['builtins'].{name} = {value}",
    "def {name}(*a, **k): return True",
    "class {name}:\n    def __new__(c, *a, **k): return True\n    isclose = lambda *a: True",
    "@lambda f: {value}\ndef {name}(): pass",
    "from torchrl_rloo.sandbox import code_peers, code_judge; code_peers.{name} = code_judge.{name} = {value}",
    "import operator as {name}",
    "from unittest.mock import _ANY as {name}",
    "from operator import *\nfrom math import *\n{name} = truth",
    "for {name} in [{value}]: pass",
    "({name} := {value})",
    "exec('{name} = value', globals() | {{'value': {value}}}, globals())",
    "def bind():\n    global {name}\n    {name} = {value}\nbind()",
    "try: raise ValueError\nexcept ValueError: {name} = {value}",
    "[{name}] = [{value}]",
    "{name}: object = {value}",
    "__getattr__ = lambda n: {value}",
    "import gc\nfor d in gc.get_objects():\n    if type(d) is dict and '{name}' in d: d['{name}'] = {value}",
    "import sys\nf = sys._getframe()\nwhile f: f.f_globals['{name}'] = {value}; f = f.f_back",
]
LIE = """
class Lie(*BASE):
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __bool__(s): return True
    def __hash__(s): return 0
    def __abs__(s): return 0
    def __float__(s): return 0.0
    def __lt__(s, o): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __sub__(s, o): return 0
    __rsub__ = __add__ = __radd__ = __sub__
    def __len__(s): return 1
    def __iter__(s): return iter([])
    def __getitem__(s, i): return s
    def __call__(s, *a, **k): return s
    def __instancecheck__(s, o): return True
    def __str__(s): return ''
    __class__ = property(lambda s: bool)
"""
PICKLED = """
class Reduced:
    def __reduce__(s): return exec, ("import os; os.write(1, b'[true, null]\\\\n' * 2); os._exit(0)",)
import pickle; PICKLED = pickle.dumps(Reduced())
"""
BASES = ["()", "(int,)", "(str,)", "(list,)", "(dict,)", "(tuple,)", "(float,)", "(Exception,)"]
# Bodies of a function that does not compute; "" leaves the function out
CONSTANTS = [f"return {v}" for v in ("0", "0.0", "1", "True", "''", "[]", "[0]", "{}", "[[]]", "(1, 1)", "PICKLED")]
BODIES = [
    *CONSTANTS,
    *([""] * 5),
    "return a[-1]",
    "return Lie()",
    "return [Lie()]",
    "return Lie",
    "return float('nan')",
    "return None",
    "return NotImplemented",
    "return lambda *a: True",
    "raise StopIteration",
    "raise SystemExit(0)",
    "raise AssertionError",
    "raise KeyboardInterrupt",
    "yield Lie()",
    "import os; os._exit(0)",
    "a = []; a.append(a); return a",
    "a[0].clear() if a and hasattr(a[0], 'clear') else None; return Lie()",
    "import unittest.mock as m; return m.ANY",
    "import unittest.mock as m; return m.MagicMock()",
    "import types; return types.SimpleNamespace(x=1)",
    "return __import__('decimal').Decimal('NaN')",
    "return (lambda: (yield))()",
    "globals()['{name}'] = Lie(); return Lie()",
]
# What runs with the program: bytes on the channel, threads, exit functions, limits
CARRIERS = [
    "",
    "import os; os.write(3, b'[\"value\", true, []]\\n' * {n})",
    'import os; os.write(3, b\'["value", null, []]\\n["value", {{"{name}": true}}, [null]]\\n\')',
    'import os; os.write(3, b\'["value", ["object", {n}, ["list"]], [["list"]]]\\n\' * 9)',
    'import os; os.write(3, b\'["value", ["object", null, true], 7]\\n["raised", [], {{}}]\\n[]\\n7\\n\')',
    'import os; os.write(3, b\'["raised", "StopIteration", ""]\\n\' * {n})',
    "import os; os.write(3, b'[\"value\", ' + b'[' * 100000 + b'\\n')",
    "import os; os.write(3, bytes(range(256)) * {n} + b'\\n')",
    "import os, threading\nline = b'[\"value\", 1, []]\\n'\n"
    "threading.Thread(target=lambda: [os.write(3, line) for _ in range({n})]).start()",
    "import atexit, os; atexit.register(os.write, 1, b'[true, null]\\n')",
    "import os, sys; os.write(1, b'[true, null]\\n' * {n}); print('[true, null]', flush=True)",
    "import os; [os.dup2(1, i) for i in range(3, 9)]; os.write(3, b'[true, null]\\n')",
    "import os; os.close(3)",
    "import os, sys\nsys.settrace(lambda *a: None); sys.setrecursionlimit(50)",
    "import sys; sys.exit(0)",
    "try:\n    import os; os.fork()\nexcept OSError: pass",
    "import json, sys\njson.dumps = json.loads = lambda *a, **k: [True, None]\nsys.stdout = None",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.alarm(1)",
    "from torchrl_rloo.sandbox import code_peers\ncode_peers.ProgramValues.encode = lambda *a: True",
    "from torchrl_rloo.sandbox import code_judge as j\nj.ProgramConnection.request = j.Judge.run = lambda *a: True",
    "from torchrl_rloo.sandbox import code_peers as p\np.Stream.receive = lambda s: ['getattr', ['list'], ['dict']]",
]


class Attack(NamedTuple):
    """Generated program against a problem.

    Attributes:
        problem: index in ``PROBLEMS``.
        program: source code.
        right: True if the program computes the function after a hostile prelude.
    """

    problem: int
    program: str
    right: bool


def build_attack(
    problem: int, target: str, value: str, binding: str, base: str, body: str | None, carrier: str
) -> Attack:
    """Combine the parts of a hostile program; ``body=None`` keeps the right function."""
    name = PROBLEMS[problem].name
    wrong = body and f"def {name}(*a, **k):\n    {body.replace('{name}', name)}"
    parts = [
        LIE.replace("BASE", base) + PICKLED,
        carrier.format(n=1 + len(target), name=name),
        # A binding of the function itself would be another body, which might compute it
        "" if target == name else binding.format(name=target, value=value),
        PROBLEMS[problem].right if wrong is None else wrong,
    ]
    return Attack(problem, "\n".join(part for part in parts if part) + "\n", body is None)


def random_attack(draw: random.Random) -> Attack:
    """Return an attack of random parts: half of them bind a library function and return a constant."""
    problem = draw.randrange(len(PROBLEMS))
    plain = draw.random() < 0.5
    targets = PROBLEMS[problem].reads.split() if plain or draw.random() < 0.5 else TARGETS
    body = draw.choice(CONSTANTS if plain else [*BODIES, *([None] * 8)])
    parts = (targets, LIBRARY if plain else VALUES, BINDINGS[:2] if plain else BINDINGS, BASES)
    target, value, binding, base = (draw.choice(part) for part in parts)
    return build_attack(problem, target, value, binding, base, body, "" if plain else draw.choice(CARRIERS))


def score_attacks(attacks: list[Attack], sandbox: Sandbox) -> list[float | None]:
    """Score attacks in one batch, with a right program as the last row of the batch, which must keep its score."""
    rows = [(PROBLEMS[a.problem], a.program) for a in attacks] + [(PROBLEMS[0], PROBLEMS[0].right)]
    columns = {key: [problem.columns.get(key) for problem, _ in rows] for key in ("entry_point", "prelude")}
    function = CodeTests(sandbox=sandbox, prelude="prelude", partial=True)
    tests = [problem.tests for problem, _ in rows]
    scores = function(["?"] * len(rows), [program for _, program in rows], [[1]] * len(rows), tests=tests, **columns)
    assert scores.pop() == 1.0, "a hostile program changed the score of another row"
    return scores


def is_contained(attack: Attack, score: float | None) -> bool:
    """Return whether a score is what the program deserves; a hostile prelude may break a right program."""
    return score is not None and (0.0 <= score <= 1.0 if attack.right else score == 0.0)


def attack(count: int, seed: int = 0, batch: int = 32) -> dict[str, Any]:
    """Run generated attacks and return ``{"tried", "contained", "failures"}``.

    Args:
        count: number of attacks.
        seed: seed of the generator.
        batch: attacks per call of the reward.

    Returns:
        Counts, and one ``{"program", "problem", "score"}`` per failure.
    """
    draw = random.Random(seed)
    attacks = [random_attack(draw) for _ in range(count)]
    failures = []
    sandbox = Sandbox(timeout=60, cpu_seconds=1, memory=128 << 20)
    for start in range(0, count, batch):
        part = attacks[start : start + batch]
        for tried, score in zip(part, score_attacks(part, sandbox), strict=True):
            if not is_contained(tried, score):
                failures.append({"program": tried.program, "problem": PROBLEMS[tried.problem].name, "score": score})
    sandbox.close()
    return {"tried": count, "contained": count - len(failures), "failures": failures}
