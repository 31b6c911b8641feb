"""Measure how often the judge of code agrees with CPython about right and wrong programs.

    python benchmarks/bench_judge.py
    python benchmarks/bench_judge.py --corpus my_corpus.txt

The corpus (``judge_corpus.txt``) holds problems in the styles of MBPP, HumanEval, LiveCodeBench and of classes with
tests. A problem begins with ``=== kind``. The program follows, then ``---`` and the tests, then ``+++`` and edits
``old => new`` of the program, each of which gives a further program. CPython decides which programs are right: each
runs with its tests in one process. The table counts the scores of the judge; all that disagree are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_rloo.rewards.code import CodeTests, same_output
from torchrl_rloo.sandbox import Sandbox

CORPUS = Path(__file__).with_name("judge_corpus.txt")
# Runs in CPython: the program, then its tests, all in one module
_TRUTH = """
import json as _json, sys as _sys
_task = _json.load(_sys.stdin)
exec(compile(_task["program"], "program", "exec"), globals())
for _test in _task["tests"]:
    exec(compile(_test, "test", "exec"), globals())
if _task["kind"] != "asserts":
    _name = _task["entry_point"]
    _function = globals().get(_name) or getattr(globals()["Solution"](), _name)
if _task["kind"] == "check":
    check(_function)
for _given, _expected in _task["calls"]:
    assert _json.loads(_json.dumps(_function(*_given))) == _expected
"""


class Case(NamedTuple):
    """Program with its tests.

    Attributes:
        kind: ``asserts``, ``check``, ``call`` or ``io``.
        entry_point: name of the function for ``check`` and ``call``.
        program: source code.
        tests: what the column of tests has.
        title: first definition of the program, and the edit that made it.
    """

    kind: str
    entry_point: str | None
    program: str
    tests: Any
    title: str


def read_corpus(text: str) -> Iterator[Case]:
    """Yield the programs of a corpus: each as it stands, then with each of its edits."""
    for record in ("\n" + text).split("\n=== ")[1:]:
        head, _, body = record.partition("\n")
        kind, _, name = head.partition(" ")
        program, divider, rest = body.partition("\n---\n")
        program += divider[:1]
        tests, _, edits = rest.partition("\n+++\n")
        tests = parse_tests(kind, tests)
        first = next((line for line in program.splitlines() if line.startswith(("def ", "class "))), program)
        yield Case(kind, name or None, program, tests, first[:50])
        for edit in edits.splitlines():
            old, _, new = (part.replace("\\n", "\n") for part in (edit + " ").partition(" =>"))
            changed = program.replace(old, new[1:-1] if new != " " else "")
            if changed == program:
                raise ValueError(f"edit {edit!r} of {first!r} changes nothing")
            yield Case(kind, name or None, changed, tests, f"{first[:50]} | {edit}")


def parse_tests(kind: str, text: str) -> Any:
    """Return the tests of a problem: pairs, calls, a list of assertions or one snippet."""
    if kind == "call":
        return json.loads(text)
    lines = text.splitlines()
    if kind == "io":
        return {"inputs": [json.loads(line)[0] for line in lines], "outputs": [json.loads(line)[1] for line in lines]}
    return lines if all(line.startswith("assert ") for line in lines) else [text]


def ask_cpython(case: Case) -> bool:
    """Return whether a program passes its tests in CPython."""
    if case.kind == "io":
        return all(
            (run := _run(case.program, given)).returncode == 0 and same_output(run.stdout, expected)
            for given, expected in zip(case.tests["inputs"], case.tests["outputs"], strict=True)
        )
    calls = zip(case.tests["inputs"], case.tests["outputs"], strict=True) if case.kind == "call" else ()
    task = {"kind": case.kind, "program": case.program, "calls": list(calls)}
    task["entry_point"] = case.tests["fn_name"] if case.kind == "call" else case.entry_point
    task["tests"] = [] if case.kind == "call" else case.tests
    return _run(_TRUTH, json.dumps(task)).returncode == 0


def _run(program: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, text=True, timeout=60)


def ask_judge(cases: list[Case]) -> tuple[list[float | None], list[str], float]:
    """Return the scores of the programs, their reasons, and the seconds that they took."""
    log: dict[str, list[str]] = {}
    columns = {
        "tests": [case.tests for case in cases],
        "entry_point": [case.entry_point if case.kind == "check" else None for case in cases],
    }
    answers = [f"```python\n{case.program}\n```" for case in cases]
    start = time.perf_counter()
    function = CodeTests(sandbox=Sandbox(timeout=20))
    scores = function(
        ["?"] * len(cases), answers, [[1]] * len(cases), lambda name, values: log.update({name: values}), **columns
    )
    return scores, log["code_tests_reason"], time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    cases = list(read_corpus(parser.parse_args().corpus.read_text()))
    with ThreadPoolExecutor() as pool:
        truths = list(pool.map(ask_cpython, cases))
    scores, reasons, seconds = ask_judge(cases)
    counts = Counter(zip(truths, scores, strict=True))
    print(f"| {len(cases)} programs, {seconds:.0f} s | score 1 | score 0 | abstains |\n| --- | --- | --- | --- |")
    for truth, name in ((True, "right"), (False, "wrong")):
        print(f"| {name} in CPython | " + " | ".join(str(counts[truth, score]) for score in (1.0, 0.0, None)) + " |")
    for case, truth, score, reason in zip(cases, truths, scores, reasons, strict=True):
        if score != truth:
            print(f"\n{'right' if truth else 'wrong'}, score {score}: {case.title}\n    {reason}")


if __name__ == "__main__":
    main()
