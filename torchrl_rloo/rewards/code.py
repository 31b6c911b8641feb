"""Rewards by running the program that a completion holds against unit tests, in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.fences import last_block
from torchrl_rloo.rewards.protocol import final_text
from torchrl_rloo.rewards.sandbox import Sandbox, SandboxResult

_PYTHON = ("", "py", "python", "python3")
_SERVE, _JUDGE = "import code_peers; code_peers.serve()", "import code_peers; code_peers.judge()"


class BrokenTestsError(ValueError):
    """A row's tests cannot be run, whatever the program is."""


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs have the same words in the same order, whatever white space is between them."""
    return actual.split() == expected.split()


class CodeTests:
    """1.0 if the program in a completion passes all tests of its row, else 0.0.

    The program is the last fenced block of Python or of no language, or all of the text. The tests are in a column of
    the dataset, as values or as JSON, in one of these forms:

    - **assertions**: a snippet of Python, or a list of them (MBPP's ``test_list``); each is a test. A snippet that
      defines ``check(candidate)`` is called with the function that the row's ``entry_point`` names (HumanEval's
      ``test``).
    - **input and output**: ``{"inputs": [...], "outputs": [...]}`` of texts (APPS, TACO; also ``input`` and ``output``
      as in CodeContests), or a list of ``{"input": ..., "output": ...}``. Each pair is a test: the program reads the
      input and has to print the output, where only white space may differ. With a ``fn_name`` (APPS), they are the
      arguments and the result of that function, or of that method of ``Solution``.

    A program is never in a process that knows what is expected. With inputs and outputs, the outputs stay in this one.
    Assertions run in a second sandboxed process: calls go over to the program and plain values come back (see
    :mod:`torchrl_rloo.rewards.code_peers`). To leave early, print a verdict, patch built-ins, or return an object that
    equals everything, therefore fails the tests. What remains: the results that a test compares may be looked up
    instead of computed, by a program that knows the inputs; and where a test compares two objects of the program's own
    classes, or calls another of its functions to check a result, the program has a say in the outcome.

    A row abstains (None) if its tests are missing or broken: not in a form above, of inputs and outputs in unequal
    number, with a syntax error, without the entry point that ``check`` needs, or passing to the program what cannot be
    sent to another process, such as a function or an instance of a test's own class. Whatever the program does, its
    time-out included, scores 0.0.

    Args:
        column: the column of tests.
        entry_point: the column with the name of the function that ``check`` gets; only read if there is one.
        setup: a column of code that runs before the assertions (MBPP's ``test_setup_code``); None: none.
        prelude: a column of code that runs before the program, in its process (HumanEval's prompt); None: none.
        partial: the share of the tests that pass instead. All tests are run, where otherwise the first failure ends
            it. Assertions share one time limit: those after a time-out have failed.
        sandbox: how programs are contained and limited; default: ``Sandbox()``. The limits hold for each process.

    Raises:
        SandboxUnavailableError: if this system cannot contain programs fully, unless ``sandbox`` allows that.

    Example:
        >>> CodeTests()(["?"], ["def double(x): return 2 * x"], [[1]], tests=[["assert double(4) == 8"]])
        [1.0]
    """

    __name__ = "code_tests"

    def __init__(
        self,
        column: str = "tests",
        *,
        entry_point: str = "entry_point",
        setup: str | None = None,
        prelude: str | None = None,
        partial: bool = False,
        sandbox: Sandbox | None = None,
    ):
        self.column, self.entry_point, self.setup, self.prelude = column, entry_point, setup, prelude
        self.partial = partial
        self.sandbox = Sandbox() if sandbox is None else sandbox

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """``B`` rewards in [0, 1] or None; logs why as the column ``code_tests_reason``.

        Raises:
            KeyError: if a column is missing.
            RuntimeError: if the sandbox cannot say how a program ended, which is no fault of the program.
        """
        needed = [name for name in (self.column, self.setup, self.prelude) if name is not None]
        for name in needed:
            if name not in columns:
                raise KeyError(f"code_tests needs the column {name!r}; the rows have {sorted(columns)}")
        read = [*needed, self.entry_point] if self.entry_point in columns else needed
        rows = [{name: columns[name][i] for name in read} for i in range(len(completions))]
        judged = [self._judge(final_text(c), row) for c, row in zip(completions, rows, strict=True)]
        if log_extra is not None:
            log_extra("code_tests_reason", [reason for _, reason in judged])
        return [score for score, _ in judged]

    def _judge(self, text: str, row: Mapping[str, Any]) -> tuple[float | None, str]:
        program = _joined(row[self.prelude] if self.prelude else None) + last_block(text, _PYTHON)
        try:
            tests = parse_tests(row[self.column], row.get(self.entry_point))
            if isinstance(tests[0], tuple):
                passed, reason = self._run_pairs(program, tests)
            else:
                passed, reason = self._run_assertions(program, tests, _joined(row[self.setup] if self.setup else None))
        except BrokenTestsError as error:
            return None, f"broken tests: {error}"
        if passed == len(tests):
            return 1.0, "passed"
        return passed / len(tests) if self.partial else 0.0, f"{passed} of {len(tests)} passed; {reason}"

    def _run_pairs(self, program: str, pairs: list[tuple[str, str]]) -> tuple[int, str]:
        """How many pairs pass, and why the first that does not does not."""
        passed, reason = 0, ""
        for given, expected in pairs:
            result = self.sandbox.run(program, given)
            if result.ok and same_output(result.stdout, expected):
                passed += 1
                continue
            reason = reason or (f"printed {result.stdout[:100]!r}" if result.ok else _ending(result))
            if not self.partial:
                break
        return passed, reason

    def _run_assertions(self, program: str, tests: list[str], setup: str) -> tuple[int, str]:
        task = json.dumps({"setup": setup, "tests": tests, "partial": self.partial})
        result = self.sandbox.run(_JUDGE, task, guest=_SERVE, guest_stdin=program)
        verdicts = [json.loads(line) for line in result.stdout.splitlines()]
        for verdict in verdicts:
            if isinstance(verdict, dict):
                raise BrokenTestsError(verdict["broken"])
        reasons = [reason for passed, reason in verdicts if not passed]
        return sum(passed for passed, _ in verdicts), reasons[0] if reasons else _ending(result)


def _ending(result: SandboxResult) -> str:
    lines = result.stderr.strip().splitlines()
    return f"{result.reason} with code {result.exit_code}" + (f": {lines[-1][:200]}" if lines else "")


def _joined(code: str | Sequence[str] | None) -> str:
    """Code in one text, or "" without any."""
    code = code or ""
    code = code if isinstance(code, str) else "\n".join(code)
    return f"{code}\n" if code else ""


def parse_tests(tests: Any, entry_point: str | None = None) -> list[str] | list[tuple[str, str]]:
    """A column's value as assertions, or as pairs of input and output: the forms that :class:`CodeTests` lists.

    Raises:
        BrokenTestsError: if it has none of these forms, or holds no test.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        try:
            tests = json.loads(tests)
        except ValueError:
            pass  # a snippet that begins with a literal
    if isinstance(tests, Mapping):
        return _parse_pairs(tests)
    tests = [tests] if isinstance(tests, str) and tests.strip() else tests
    if not tests or not isinstance(tests, Sequence) or isinstance(tests, str):
        raise BrokenTestsError(f"no tests: {tests!r:.100}")
    if all(isinstance(test, Mapping) for test in tests):
        return _parse_pairs({key: [test.get(key) for test in tests] for key in ("input", "output")})
    if not all(isinstance(test, str) for test in tests):
        raise BrokenTestsError(f"a list of tests must hold texts or pairs of input and output, not {tests!r:.100}")
    return [_with_call(test, entry_point) for test in tests]


def _with_call(test: str, entry_point: str | None) -> str:
    if not re.search(r"^def check\(", test, re.MULTILINE):
        return test
    if not entry_point:
        raise BrokenTestsError("check(candidate) needs an entry point: a column with the name of the function")
    return f"{test}\ncheck({entry_point})\n"


def _parse_pairs(tests: Mapping[str, Any]) -> list[str] | list[tuple[str, str]]:
    given = tests.get("inputs", tests.get("input"))
    expected = tests.get("outputs", tests.get("output"))
    if not given or not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
        raise BrokenTestsError(f"tests need equally many inputs and outputs, at least one; got {dict(tests)!r:.100}")
    if name := tests.get("fn_name"):
        return [_call_test(name, arguments, result) for arguments, result in zip(given, expected, strict=True)]
    return [(_lines(i), _lines(o)) for i, o in zip(given, expected, strict=True)]


def _lines(text: Any) -> str:
    """Standard input or output, which some datasets give as a list of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if not isinstance(text, str):
        raise BrokenTestsError(f"an input or output must be text or lines of it, not {text!r:.100}")
    return text


def _call_test(name: str, arguments: Any, expected: Any) -> str:
    """The assertion that a function's result is the expected one, as JSON or as the one entry of a list."""
    if not str(name).isidentifier() or not isinstance(arguments, list):
        raise BrokenTestsError(f"fn_name={name!r} needs a list of arguments for each call, not {arguments!r:.100}")
    return (
        "import json\n"
        f"try: _function = {name}\n"
        f"except NameError: _function = Solution().{name}\n"
        f"_result = json.loads(json.dumps(_function(*{arguments!r})))\n"
        f"assert _result == {expected!r} or [_result] == {expected!r}, f'{{_result!r:.100}}'\n"
    )
