"""Corpus of programs that try to pass tests without solving the task, and of right programs in unusual forms."""

from __future__ import annotations

from typing import Any

# Programs against tests of `double`
CHEATS = [
    "import sys; sys.exit(0)",
    "import os; os._exit(0)",
    "quit()",
    "def double(x):\n    import os; os._exit(0)",
    "def double(x): raise SystemExit(0)",
    "def double(x): raise KeyboardInterrupt",
    "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef double(x): return 0",
    "import threading, sys\nthreading.Thread(target=sys.exit, args=(0,)).start()\ndef double(x): return 0",
    "print('[true, null]'); print('passed'); print(3)\ndef double(x): print('[true, null]')",
    "import os\ndef double(x):\n    for f in range(9):\n"
    "        try: os.write(f, b'[true, null]\\n')\n        except OSError: pass",
    "import os\ndef double(x):\n    while True: os.write(3, b'[\"value\", true, []]\\n')",
    "import os; os.write(3, b'[' * 100_000 + b'\\n')",
    'import os; os.write(3, b\'["value", {"a": 1}]\\n["value", [1], [[2]]]\\n\')',
    "import os; os.close(3)\ndef double(x): return 2 * x",
    "class Any:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
    "    def __bool__(s): return True\n    def __hash__(s): return 0\ndef double(x): return Any()",
    "class Any(int):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\n"
    "def double(x): return Any()",
    "class Any(list):\n    def __eq__(s, o): return True\ndef double(x): return [Any()]",
    "import builtins\nbuiltins.AssertionError = builtins.isinstance = builtins.all = lambda *a: True\n"
    "def double(x): return 0",
    "from torchrl_rloo.sandbox import code_peers as p\np.ProgramValues.encode = p.Stream.send = lambda *a: True\n"
    "def double(x): return 0",
    "import operator, json\noperator.eq = lambda *a: True\njson.dumps = lambda *a: '[true, null]'\n"
    "def double(x): return 0",
    "def double(x): return 0\ndef all(x): return True\nisinstance = print = len = abs = double",
    "import sys, gc\ndef double(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        for v in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
    "            if isinstance(v, str) and 'assert' in v: exec(v.split('==')[1], globals()); return\n"
    "        frame = frame.f_back\n"
    "    texts = [o for o in gc.get_objects() if 'abab' in repr(o)[:999]]\n    return texts",
    "import os, sys\nprint(os.pread(0, 9999, 0), sys.argv, os.listdir('.'))\ndef double(x): return 0",
    "while True: pass",
    "def double(x):\n    while True: pass",
    "def double(x): return [0] * 10**9",
    "def double(x): return 'x' * 60_000_000",
    "def double(x):\n    a = []\n    a.append(a)\n    return a",
    "def double(x): return double(x)",
    "import ctypes\ndef double(x): ctypes.string_at(0)",
    "def double(x): return lambda: x",
    "def double(x: return",
    "",
]


ROOT = ["assert abs(root(2) - 1.41421) < 1e-3", "assert abs(root(9) - 3) < 1e-6"]
SIMILAR = ["assert set(similar((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))", "assert sorted(similar([2], [2])) == [2]"]
SUM = {"fn_name": "sum", "inputs": [[1, 2]], "outputs": [3]}
SORTED = {"fn_name": "sorted", "inputs": [[[2, 1]]], "outputs": [[1, 2]]}
LARGEST = ["assert largest([]) is None", "assert largest([4]) == 4"]
POLY = "import math\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
ZERO = {"prelude": POLY + 'def zero(xs):\n    """Find a zero."""\n', "entry_point": "zero"}
ZERO_TEST = ["assert abs(poly([1, 2], zero([1, 2]))) < 1e-4"]
ZERO_CHECK = "def check(candidate):\n    assert poly([1, 2], candidate([1, 2])) == 0"
SIX = ["assert f(3) == 6", "assert 6 == f(3)"]
PICKLED = """
import pickle
class X:
    def __reduce__(s): return exec, ("import os; os.write(1, b'[true, null]\\\\n' * 9); os._exit(0)",)
DATA = pickle.dumps(X())
def similar(a, b): return DATA
"""
LIAR = "class Liar:\n    def __init__(s, *a): pass\n    def __eq__(s, o): return True\n"
KEEPS = LIAR.replace("pass", "s.a = a")
OPERATED = "class f:\n    def __init__(s, *a): pass\n    %s\n"
WRITE = "import os\ndef f(x): os.write(3, b'%s')"

UNITTEST = """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(3), 6)
unittest.main()
"""

# Program, tests, other columns
FORGERIES: list[tuple[str, Any, dict[str, Any]]] = [
    # Library functions under names that tests read
    ("from math import isnan as abs\ndef root(x): return 0.0", ROOT, {}),
    ("import math; abs = math.isnan\ndef root(x): return float('nan')", ROOT, {"entry_point": "root"}),
    ("from operator import truth as set, truth as sorted\ndef similar(a, b): return [0]", SIMILAR, {}),
    ("from pickle import loads as set, loads as sorted" + PICKLED, SIMILAR, {}),
    ("from marshal import loads as set\ndef similar(a, b): return b'N'", SIMILAR, {}),
    ("from unittest.mock import _ANY as answer", ["assert answer() == 42"], {}),
    ("from unittest.mock import MagicMock as answer", ["assert answer() == 42", "assert not answer() != 42"], {}),
    ("from math import *\nfrom operator import *\nabs = not_\ndef root(x): return 0", ROOT, {}),
    # Names that tests read without importing them
    ("isclose = lambda *a: True\ndef f(): return 9", ["assert isclose(f(), 0.3)"], {}),
    ("pi = 0\ndef area(): return 0", ["assert abs(area() - pi) < 1e-3"], {}),
    ("class math: pi, isclose = 0, min\ndef f(): return 9", ["assert math.isclose(f(), math.pi)"], {}),
    (LIAR + "Counter = Liar\ndef f(x): return Liar()", ["assert Counter(f('ab')) == Counter('ab')"], {}),
    ("def abs(x): return 0\ndef root(x): return 0", ROOT, {"entry_point": ["root"]}),
    # Functions of the prelude, and its stubs
    ("def poly(xs, x): return 0\ndef zero(xs): return 7", ZERO_TEST, ZERO),
    ("poly = lambda *a: 0\ndef zero(xs): return 7", ZERO_CHECK, ZERO),
    ("pass", LARGEST, {"prelude": "def largest(x):\n    pass\n", "entry_point": "largest"}),
    ("x = 1", LARGEST, {"prelude": 'def largest(x):\n    """Return the largest."""\n'}),
    ("# largest\n\n  # largest", LARGEST, {"prelude": "def largest(x): ...\n"}),
    # Names under test that others also have, and no program
    ("pass", SORTED, {}),
    ("'sorted'", SORTED, {}),
    ("", ["assert len([1, 2]) == 2"], {}),
    ("x = 1", ["assert len([1, 2]) == 2", "assert len([]) == 0"], {}),
    ("x = 1", ["assert sorted([2, 1]) == [1, 2]"], {"entry_point": "sorted"}),
    ("x = 1", ["from math import gcd\nassert gcd(4, 6) == 2"], {}),
    ("x = 1", ["from math import *\nassert factorial(3) == 6"], {}),
    ("x = 1", ["from heapq import nsmallest\nassert nsmallest(1, [2, 1]) == [1]"], {"entry_point": "nsmallest"}),
    ("x = 1", "def check(candidate):\n    assert candidate([1, 2]) == 2\n", {"entry_point": "len"}),
    ("from math import factorial as f", {"fn_name": "factorial", "inputs": [[3]], "outputs": [6]}, {}),
    ("import json\njson.loads = lambda x: 3", {"fn_name": "json", "inputs": [[1]], "outputs": [3]}, {}),
    (
        "x = 1",
        {"fn_name": "f", "inputs": [[0]], "outputs": [[None]]},
        {"prelude": "class Solution:\n    def f(self, x): ...\n"},
    ),
    ("# sum", {"inputs": ["1"], "outputs": [""]}, {}),
    # Objects whose methods answer for the program
    (LIAR + "Point = Liar\ndef f(x): return Liar()", ["assert f(3) == Point(6, 0)", "assert Point(6) == f(3)"], {}),
    (KEEPS + "Point = Liar\ndef f(x): return Liar(x)", ["assert f(3) == Point(6)"], {}),
    ("class S(str):\n    def __eq__(s, o): return True\ndef f(x): return S('no')", SIX, {}),
    (
        "class L(list):\n    def __len__(s): return 3\ndef f(x): return L()",
        ["assert len(f(1)) == 3", "assert f(1)"],
        {},
    ),
    ("class I(int):\n    __abs__ = lambda s: 0\n    __sub__ = lambda s, o: 0\ndef root(x): return I(7)", ROOT, {}),
    ("class B:\n    def __bool__(s): return False\ndef f(x): return B()", ["assert not f(1)"], {}),
    ("class C:\n    __class__ = property(lambda s: int)\ndef f(x): return C()", ["assert isinstance(f(1), int)"], {}),
    ("class D(dict):\n    def __contains__(s, k): return True\ndef f(x): return D()", ["assert 6 in f(3)"], {}),
    (
        "class H:\n    def __hash__(s): return hash(6)\n    def __eq__(s, o): return True\ndef f(x): return H()",
        ["assert f(3) in {6}", "assert f(3) in (6, 7)", "assert {6: 1}[f(3)] == 1"],
        {},
    ),
    ("class F:\n    __float__ = lambda s: 6.0\ndef f(x): return F()", [*SIX, "assert float(f(3)) == 6"], {}),
    ("class Z:\n    def __iter__(s): return iter([6])\ndef f(x): return Z()", [*SIX, "assert f(3) == [6]"], {}),
    ("def f(x): return float('nan')", ["assert f(1) == f(1)", "assert [f(1)] == [f(1)]", "assert f(2) in [f(2)]"], {}),
    ("def f(x): return [float('nan')] * 2", ["assert f(1) == f(1)", "assert [f(1)[0]] == [f(1)[1]]"], {}),
    ("def f(x): return type(x)", [*SIX, "assert f(3)() == 6"], {}),
    ("class M(type):\n    def __eq__(c, o): return True\nclass f(metaclass=M): pass", [*SIX, "assert f == 6"], {}),
    ("class A:\n    __getattr__ = lambda s, n: print\ndef f(x): return A()", [*SIX, "assert f(1).shape == (2, 2)"], {}),
    (
        "class A:\n    __getitem__ = lambda s, n: s\ndef f(x): return A()",
        ["assert f(1)[0] == 5", "assert f(1)[0][1] == []"],
        {},
    ),
    ("class int2(int): pass\nint2.__module__ = 'builtins'; int2.__name__ = 'int'\ndef f(x): return int2(5)", SIX, {}),
    # Operators of objects: they must not see a value of the tests, nor answer for a plain value
    *(
        (OPERATED % method, [test], {"entry_point": "f"})
        for method, test in (
            ("__sub__ = lambda s, o: 0.0", "assert abs(f(2) - 1.41) < 1e-3"),
            ("__rsub__ = lambda s, o: 0.0", "assert abs(1.41 - f(2)) < 1e-3"),
            ("__lt__ = __gt__ = lambda s, o: True", "assert 5 < f(2) < 7"),
            ("__mul__ = __rmul__ = lambda s, o: 6", "assert f(2) * 3 == 6 and 3 * f(2) == 6"),
            ("__add__ = lambda s, o: o", "assert f(2) + [6] == [6]"),
            ("__abs__ = lambda s: s\n    __le__ = lambda s, o: True", "assert abs(f(2)) <= 1e-3"),
            ("__contains__ = lambda s, o: True", "assert 6 in f(3)"),
            ("__instancecheck__ = lambda s, o: True", "assert isinstance(6, f)"),
            ("__hash__ = lambda s: hash(6)", "assert f(3) in {6, 7} and {6: 1}[f(3)]"),
            ("__float__ = __int__ = __index__ = lambda s: 6", "assert int(f(3)) == 6 and [0] * f(3)"),
        )
    ),
    ("class I(float):\n    __sub__ = lambda s, o: 0.0\ndef root(x): return I(7)", ROOT, {}),
    ("class I(float):\n    __lt__ = __gt__ = lambda s, o: True\ndef f(x): return I(7)", ["assert 5 < f(3) < 7"], {}),
    ("class N(float): pass\ndef f(x): return N('nan')", ["assert f(1) == f(1)", "x = f(1)\nassert x == x"], {}),
    (
        "from collections import Counter\nclass C(Counter):\n    __missing__ = lambda s, k: 2\ndef f(x): return C()",
        ["assert f('aa') == Counter('aa')"],
        {},
    ),
    (
        "import datetime\nclass D(datetime.date):\n    __eq__ = __lt__ = lambda s, o: True\ndef f(): return D(1, 1, 1)",
        ["from datetime import date\nassert f() == date(2020, 1, 2)"],
        {},
    ),
    (WRITE % r'["value", ["date", "2020-13-99"], []]\n["value", ["timedelta", "x"], []]\n', SIX, {}),
    ("\ufeff# f\n", SIX, {"prelude": "def f(x): return 6\n"}),
    # The module of the program, and the setup of the tests
    (
        "import sys\nclass M(type(sys)):\n    __getattr__ = lambda s, n: s\nsys.modules['candidate'] = M('candidate')",
        SIX,
        {},
    ),
    (
        "import builtins\nbuiltins.vars = lambda m: {'f': int, 'abs': bool}",
        ["assert abs(f(3) - 6) < 1"],
        {"entry_point": "f"},
    ),
    (
        "def isclose(a, b): return True\ndef f(): return 9",
        ["assert isclose(f(), 1)"],
        {"setup": "from math import isclose"},
    ),
    (
        "def same(a, b): return True\ndef f(): return 9",
        ["assert same(f(), 1)"],
        {"setup": "def same(a, b): return a == b"},
    ),
    ("def Node(v): return 7\ndef f(n): return 6", ["assert f(root) == 5"], {"setup": "root = Node(1)"}),
    # Exceptions that end an iteration of the tests
    (
        "def f(x): raise StopIteration",
        ["assert all(map(lambda x: f(x) == 2 * x, [1, 2]))", "assert not any(map(lambda x: f(x) != 2 * x, [1]))"],
        {},
    ),
    ("class E(StopIteration): pass\ndef f(x): raise E", ["assert all(map(lambda x: f(x) == 2 * x, [1, 2]))"], {}),
    (WRITE % r'["raised", "StopIteration", ""]\n', ["assert all(map(lambda x: f(x) == 2, [1]))"], {}),
    ("def f(): raise StopIteration", ["assert list(iter(f, 1)) == [] and not list(iter(f, 2))"], {}),
    # Bytes on the channel
    (
        'import os; os.write(3, b\'["value", null, []]\\n'
        '["value", ["dict", ["abs", true], ["set", 1], ["root", 1]], [null]]\\n\')',
        ROOT,
        {},
    ),
    ('import os; os.write(3, b\'["value", ["object", -1, true], []]\\n\' * 99)\ndef root(x): return 1', ROOT, {}),
    (WRITE % r'["value", ["object", {}, 6], [null, null]]\n', SIX, {}),
    (WRITE % r'["value", ["scalar", [6]], [null, ["list"]]]\n', SIX, {}),
    (WRITE % r'["value", ["eval", "6"], []]\n', SIX, {}),
    (WRITE % r'["value", 5, 5]\n["raised", 5, 5]\n["raised", "exec", "1"]\n7\n', SIX * 2, {}),
    ("from torchrl_rloo.sandbox import code_judge\ncode_judge.judge()\ndef f(x): return 5", SIX, {}),
    # Objects that have an answer to all: their class is not one that the tests name
    *(
        (f"class X:\n    {method}\ndef f(*a): return X()", [f"assert {test}"], {})
        for method, test in (
            ("__getattr__ = lambda s, n: lambda *a: True", "f('Bob').startswith('Hello')"),
            ("__getattr__ = lambda s, n: lambda *a: True", "f(3).equals([1, 2, 3])"),
            ("__getattribute__ = lambda s, n: lambda *a: True", "f(3).issubset({1, 2})"),
            ("isdigit = startswith = issubset = lambda s, *a: True", "f('5').isdigit()"),
            ("__len__ = lambda s: 0", "not f([1])"),
            ("__float__ = __round__ = __int__ = lambda s, n=0: 6", "round(f(3)) == 6"),
            ("__iter__ = lambda s: iter([1])\n    __contains__ = lambda s, o: True", "6 in f(3)"),
            (
                "__enter__ = lambda s: s\n    __exit__ = lambda s, *a: True\n    y = 1",
                "[1 for x in [f(3)] if x.y == 2]",
            ),
        )
    ),
    (
        "class L(list):\n    __getitem__ = lambda s, i: i\ndef f(x): return L(x)",
        ["r = f([3, 1, 2])\nassert all(r[i] <= r[i + 1] for i in range(2)) and sorted(r) == [1, 2, 3]"],
        {},
    ),
    (
        "class L(list):\n    __bool__ = __contains__ = lambda *a: 1\n    __str__ = lambda s: '6'\ndef f(x): return L()",
        ["assert f(3)", "assert str(f(3)) == '6'", "assert 6 in f(3)"],
        {},
    ),
    ("class D(dict):\n    __missing__ = lambda s, k: 6\ndef f(x): return D()", ["assert f(3)[3] == 6"], {}),
    ("class T:\n    __enter__ = lambda s: s\n    __exit__ = lambda s, *a: True", ["with T() as t: assert t == 3"], {}),
    ("import unittest\ndef f(x): raise unittest.SkipTest('no')", [UNITTEST], {}),
    ("def f(x): raise SystemExit(0)", [*SIX, UNITTEST], {}),
    ("class P:\n    def __eq__(s, o): raise TypeError", ["assert P() == P()", "assert P() != P()"], {}),
    ("class P:\n    __eq__ = lambda s, o: False", ["assert P() == P()", "p = P()\nassert p == p"], {}),
    ("class P:\n    __eq__ = lambda s, o: True", ["assert P() == P()", "assert hash(P()) == hash(P())"], {}),
    (
        "class P: pass\ndef f(x): pass",
        ["assert callable(P())", "assert hasattr(P(), '__iter__')", "assert f.__doc__"],
        {},
    ),
    # Texts of errors
    ("class T:\n    def __str__(s): raise SystemExit\ndef f(x): return T()", ["assert f(3) == 6, f(3)"], {}),
    (
        "import os\nclass T:\n    def __str__(s): os._exit(0)\ndef f(x): return T()",
        ["assert f(3) == 6, f(3)", "assert True"],
        {},
    ),
    ("def f(x): raise ValueError('\\U0001f600' * 1000)", SIX * 40, {}),
    # A value that the tests cannot read, for the lack of a package
    (
        "import io, struct, zoneinfo\nDATA = b'TZif' + bytes(16) + struct.pack('>6llbb', 0, 0, 0, 0, 1, 4, 0, 0, 0)\n"
        "def f(x): return zoneinfo.ZoneInfo.from_file(io.BytesIO(DATA + b'UTC\\0'), key='No/Such')",
        SIX,
        {},
    ),
]
# Rows whose tests no program can run
UNUSABLE: list[tuple[Any, dict[str, Any]]] = [
    *(({"fn_name": name, "inputs": [[1]], "outputs": [1]}, {}) for name in ("class", "None", "__import__", "f; x", 7)),
    ({"fn_name": "f", "inputs": [[print]], "outputs": [1]}, {}),
    (["assert f(1) == helper(1)"], {"entry_point": "f"}),
    (["assert f(1) == 1"], {"entry_point": "lambda"}),
    (["assert f(1) == 1"], {"entry_point": 7}),
    (["assert f(1) == 1"], {"entry_point": "f().g().h"}),
    (["assert f(1) == 1"], {"entry_point": "Solution()."}),
    (["assert f(1) == 1"], {"entry_point": [["f"]]}),
    (["assert f(1) == " + "-" * 50_000 + "1"], {}),
    ("[" * 50_000, {}),
    (["assert f(1) == 1"], {"entry_point": ["f", "__builtins__"]}),
    ("def check(candidate):\n    assert candidate(1) == other(2)\n", {"entry_point": "f"}),
]
NODE = "class Node:\n    def __init__(self, v, n=None):\n        self.v, self.n = v, n\n"
TOTAL = "def total(n): return n.v + total(n.n) if n else 0"
CHAIN = NODE + "def chain(xs): return Node(xs[0], chain(xs[1:])) if xs else None\ndef total(n):\n    pass\n"
POINT = "class P:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n"
# Right program, what makes it wrong, tests, other columns
RIGHT: list[tuple[str, tuple[str, str], Any, dict[str, Any]]] = [
    # Names of built-ins and modules
    ("def sum(a, b): return a + b", ("+", "-"), ["assert sum(10, 15) == 25"], {}),
    ("def sum(a, b): return a + b", ("+", "-"), SUM, {}),
    ("def select(a): return a", ("return a", "return 7"), ["assert select(1) == 1"], {}),
    ("def calendar(a): return a", ("return a", "return 7"), ["assert calendar(1) == 1"], {}),
    (
        "def heapq(x):\n    import heapq as h\n    return h.nsmallest(9, x)",
        ("9", "1"),
        ["assert heapq([2, 1]) == [1, 2]"],
        {},
    ),
    ("def json(x): return x", ("return x", "return 7"), {"fn_name": "json", "inputs": [[[1]]], "outputs": [[1]]}, {}),
    ("def sorted(x):\n    x.sort()\n    return x", ("x.sort()", "pass"), ["assert sorted([3, 1]) == [1, 3]"], {}),
    ("def len(x): return sum(1 for _ in x)", ("(1", "(2"), ["assert len(range(3)) == 3"], {}),
    (
        "def len(x): return x.__len__()",
        ("__len__", "__str__"),
        "def check(candidate):\n    assert candidate([1]) == len([1]) == 1\n",
        {"entry_point": "len"},
    ),
    ("def abs(x): return max(x, -x)", ("max", "min"), ["assert set([abs(3)]) == {3}"], {"entry_point": "abs"}),
    ("def factorial(n): return 24 // (5 - n)", ("5", "6"), ["from math import *\nassert factorial(4) == 24"], {}),
    (
        "def copy(x): return list(x)",
        ("list(x)", "[]"),
        ["import copy\nassert copy([1]) == [1]"],
        {"entry_point": ["copy"]},
    ),
    # What tests own
    ("def root(x): return x ** 0.5", ("0.5", "0.4"), ROOT, {}),
    ("def similar(a, b): return tuple(set(a) & set(b))", ("&", "-"), SIMILAR, {}),
    ("def f(): return 0.1 + 0.2", ("0.2", "0.3"), ["import math\nassert math.isclose(f(), 0.3)"], {}),
    ("def f(): return 0.1 + 0.2", ("0.2", "0.3"), ["assert isclose(f(), 0.3)"], {}),
    ("def f(x): return x", ("return x", "return 7"), ["assert Counter(f('aab')) == Counter(a=2, b=1)"], {}),
    (
        "import collections\ndef f(x): return collections.Counter(x)",
        ("r(x)", "r()"),
        ["assert f('aab') == {'a': 2, 'b': 1} and isinstance(f(''), dict)"],
        {},
    ),
    (
        "import collections\ndef f(x): return collections.deque(x)",
        ("e(x)", "e()"),
        ["from collections import deque\nassert f([1]) == deque([1]) and list(f([1])) == [1]"],
        {},
    ),
    (
        "import collections\nP = collections.namedtuple('P', 'x y')\ndef f(): return [P(1, 2)]",
        ("1, 2", "2, 1"),
        ["assert f() == [(1, 2)] and f()[0].x == 1 and set(f()) == {(1, 2)} and sorted(f()) == [(1, 2)]"],
        {},
    ),
    ("import re\ndef f(x): return re.match('a+$', x)", ("a+", "b+"), ["assert f('aa')", "assert not f('ab')"], {}),
    (
        "def f(x): return b'\\xff'.decode()",
        ("xff", "x41"),
        ["try: f(1)\nexcept UnicodeError: pass\nelse: assert f == 1"],
        {},
    ),
    ("def f(x): return '\\ud800' + x", ("ud800", "ud801"), ["assert f('\\ud801') == '\\ud800\\ud801'"], {}),
    (
        "class set:\n    n = 0\n    def add(s, x): s.n += x",
        ("+=", "-="),
        ["s = set()\ns.add(3)\nassert s.n == 3"],
        {"entry_point": "set"},
    ),
    (
        "def f(x): return 2 * x",
        ("2 *", "3 *"),
        [
            "for i in (1, 2):\n    assert f(i) == i * 2",
            "def t(n):\n    return f(n)\nassert t(1) == 2",
            "assert [f(x) for x in range(3)] == [0, 2, 4] and (y := f(3)) == y == 6",
        ],
        {},
    ),
    # Results and arguments of the standard library
    (
        "from collections import Counter\ndef f(x): return Counter(x)",
        ("r(x)", "r()"),
        ["assert f('aab').most_common(1) == [('a', 2)] and f('a')['z'] == 0 and f('a') == {'a': 1}"],
        {},
    ),
    (
        "def f(c): return c.most_common(1)[0][0]",
        ("[0][0]", "[0]"),
        ["from collections import Counter\nassert f(Counter('aab')) == 'a'"],
        {},
    ),
    (
        "def f(d): d.move_to_end(1)",
        ("(1)", "(2)"),
        ["d = OrderedDict([(1, 1), (2, 2)])\nf(d=d)\nassert list(d) == [2, 1] and d != OrderedDict({1: 1, 2: 2})"],
        {},
    ),
    (
        "import datetime\ndef f(d): return d + datetime.timedelta(1)",
        ("(1)", "(2)"),
        [
            "from datetime import date, datetime, timedelta, timezone\n"
            "assert f(date(2020, 2, 28)) == date(2020, 2, 29) and f(date(2020, 1, 1)).day == 2\n"
            "utc = datetime(2020, 1, 1, tzinfo=timezone.utc)\nassert f(utc) - utc == timedelta(days=1)"
        ],
        {},
    ),
    (
        "import datetime\ndef f(h): return datetime.time(h)",
        ("(h)", "(0)"),
        ["from datetime import time\nassert f(3) == time(3)"],
        {},
    ),
    ("def f(x, out): out.append(x)", ("(x)", "(7)"), ["a = []\nf(1, out=a)\nassert a == [1]"], {}),
    ("\ufeffdef f(x): return x", ("return x", "return 7"), ["assert f(1) == 1"], {}),
    ("\ufeffprint(1)", ("1", "2"), {"inputs": [""], "outputs": ["1"]}, {}),
    ("\ufeff```python\nprint(1)\n```", ("(1", "(2"), {"inputs": [""], "outputs": ["1"]}, {}),
    ("```python\n\ufeffprint(1)\n```", ("(1", "(2"), {"inputs": [""], "outputs": ["1"]}, {}),
    # Operators between objects, and on plain values
    (
        POINT + "    __add__ = lambda s, o: P(s.x + o.x)\n    __lt__ = lambda s, o: s.x < o.x\n"
        "    __neg__ = lambda s: P(-s.x)\n    __hash__ = lambda s: s.x",
        ("-s.x", "s.x + 1"),
        [
            "assert P(1) + P(2) == P(3) and -P(1) == P(-1) and len({P(1), P(1)}) == 1",
            "assert sorted([P(2), P(1)]) == [P(1), P(2)]",
        ],
        {},
    ),
    (
        "class A: pass\nclass B(A): pass\ndef f(): return B()",
        ("return B()", "return 7"),
        ["assert isinstance(f(), A) and isinstance(f(), B) and issubclass(B, A) and not issubclass(A, B)"],
        {},
    ),
    (
        "import enum\nclass E(enum.IntEnum):\n    A = 1\n    B = 2\ndef f(): return E.A",
        ("return E.A", "return E.B"),
        ["assert f() is E.A and 0 < f() < 2 and 1 + f() == 2 and f() + 1 == 2 and isinstance(f(), int)"],
        {},
    ),
    (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(a): return P(a, a)",
        ("(a, a)", "(a, 0)"),
        ["assert sorted([f(2), f(1)]) == [(1, 1), (2, 2)] and f(1) + (3,) == (1, 1, 3) and isinstance(f(1), tuple)"],
        {},
    ),
    # Several functions and classes
    (
        "def a(x): return x + 1\ndef b(x): return a(x) * 2",
        ("* 2", "* 3"),
        ["assert a(1) == 2 and b(1) == 4 and a(b(1)) == 5"],
        {},
    ),
    ("def g(x): return x + 1\ndef f(x): return g(x)", ("+ 1", "+ 2"), ["assert f(1) == 2"], {"entry_point": "f"}),
    (NODE + TOTAL, ("else 0", "else 1"), ["assert total(Node(1, Node(2))) == 3"], {"entry_point": ["Node", "total"]}),
    (
        NODE + "def f(n): return Node(n.v + 1)",
        ("+ 1", "+ 2"),
        ["root = Node(1)\nroot.n = Node(2)\nassert f(root).v == 2 and f(root.n).v == 3"],
        {},
    ),
    (
        POINT + "def f(x): return P(x + 1)",
        ("+ 1", "+ 2"),
        ["assert f(1) == P(2) and f(1) != P(1) and [f(1)] == [P(2)]"],
        {},
    ),
    (
        "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(): return E.A",
        ("return E.A", "return E.B"),
        ["assert f() == E.A and f() is not None"],
        {},
    ),
    ("class Solution:\n    def sum(self, a, b): return a + b", ("+", "-"), SUM, {}),
    ("class Solution:\n    def f(self, x): return x", ("return x", "return 7"), ["assert Solution().f(3) == 3"], {}),
    (
        "class Solution:\n    def f(self, x): return x",
        ("return x", "return 7"),
        "def check(candidate):\n    assert candidate(x=3) == 3\n",
        {"entry_point": "Solution().f"},
    ),
    (
        "class Solution:\n    def f(self, x): return x or None",
        ("return x", "return 7"),
        {"fn_name": "f", "inputs": [[0], [4]], "outputs": [[None], [4]]},
        {"prelude": "class Solution:\n    def f(self, x):\n        pass\n"},
    ),
    (
        "class Own(ValueError): pass\ndef f(): raise Own('no')",
        ("ValueError", "KeyError"),
        ["try: f()\nexcept ValueError: pass"],
        {},
    ),
    # Preludes
    (
        "def f(x): return g(x)",
        ("g(x)", "x"),
        ["assert f(1) == g(1) == 2"],
        {"prelude": '"""Text."""\npass\ndef g(x): return 2\n'},
    ),
    ("def zero(xs): return -xs[0] / xs[1]", ("-xs", "+xs"), ZERO_TEST, ZERO),
    ("def zero(xs): return -xs[0] / xs[1]", ("-xs", "+xs"), ZERO_CHECK, ZERO),
    ("    return -xs[0] / xs[1]", ("-xs", "+xs"), ZERO_TEST, ZERO),
    (
        "def largest(x): return max(x, default=None)",
        ("max", "min"),
        [*LARGEST, "assert largest([1, 2]) == 2"],
        {"prelude": "def largest(x): ...\n"},
    ),
    (TOTAL, ("else 0", "else 1"), ["assert total(chain([1, 2])) == 3"], {"prelude": CHAIN, "entry_point": "total"}),
]
