"""Code rewards: the program of a completion runs against unit tests in a sandbox."""

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
    """Error of tests that cannot run with any program."""


def same_output(actual: str, expected: str) -> bool:
    """Return whether two outputs have the same words in the same order, ignoring white space."""
    return actual.split() == expected.split()


class CodeTests:
    """Reward of 1.0 where the program in a completion passes all tests of its row, else 0.0.

    The program is the last fenced block of Python or without a language, else the whole text. A dataset column holds
    the tests, as values or as JSON, in one of these forms:

    - **assertions**: a Python snippet or a list of them (MBPP's ``test_list``), each of which is a test. A snippet that
      defines ``check(candidate)`` is called with the function that ``entry_point`` names (HumanEval's ``test``).
    - **input and output**: ``{"inputs": [...], "outputs": [...]}`` of texts (APPS, TACO), also ``input`` and ``output``
      (CodeContests), or a list of ``{"input": ..., "output": ...}``. Each pair is a test: the program reads the input
      and must print the output, ignoring white space. With a ``fn_name`` (APPS), the pairs are the arguments and the
      result of that function or method of ``Solution``.

    A program never runs in a process that knows the expected results. Expected outputs stay in this process.
    Assertions run in a second sandboxed process, which sends calls to the program and gets plain values back (see
    :mod:`torchrl_rloo.rewards.code_peers`). A program that exits early, prints a verdict, patches built-ins or returns
    an object that equals everything therefore fails. Two weaknesses remain:

    - A program that knows the inputs can look up the results instead of computing them.
    - A program can influence tests that compare two objects of its classes, or that check a result with another of its
      functions.

    A row abstains (None) if its tests are missing or broken: unknown form, unequal numbers of inputs and outputs, a
    syntax error, or no entry point for ``check``. It also abstains if a test passes a function, an instance of the
    test's class, or another value that cannot be sent to a process. Any failure of the program, time-outs included,
    scores 0.0.

    Args:
        column: column of tests.
        entry_point: column with the name of the function for ``check``; optional.
        setup: column of code that runs before the assertions (MBPP's ``test_setup_code``). None disables it.
        prelude: column of code that runs before the program, in its process (HumanEval's prompt). None disables it.
        partial: True runs all tests and scores the share that pass; False stops at the first failure. Assertions share
            one time limit, so those after a time-out fail.
        sandbox: sandbox and limits of the programs, which hold for each process. Default: ``Sandbox()``.

    Raises:
        SandboxUnavailableError: if this system cannot isolate programs fully, unless ``sandbox`` allows that.

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
        """Return ``B`` rewards in [0, 1] or None; log the reasons in the column ``code_tests_reason``.

        Raises:
            KeyError: if a column is missing.
            RuntimeError: if the sandbox fails, independently of the program.
        """
        required = [name for name in (self.column, self.setup, self.prelude) if name is not None]
        for name in required:
            if name not in columns:
                raise KeyError(f"code_tests requires column {name!r}; the rows have {sorted(columns)}")
        read = [*required, self.entry_point] if self.entry_point in columns else required
        rows = [{name: columns[name][i] for name in read} for i in range(len(completions))]
        judged = [self._judge(final_text(c), row) for c, row in zip(completions, rows, strict=True)]
        if log_extra is not None:
            log_extra("code_tests_reason", [reason for _, reason in judged])
        return [score for score, _ in judged]

    def _judge(self, text: str, row: Mapping[str, Any]) -> tuple[float | None, str]:
        program = _join_code(row[self.prelude] if self.prelude else None) + last_block(text, _PYTHON)
        try:
            tests = parse_tests(row[self.column], row.get(self.entry_point))
            if isinstance(tests[0], tuple):
                passed, reason = self._run_pairs(program, tests)
            else:
                passed, reason = self._run_assertions(
                    program, tests, _join_code(row[self.setup] if self.setup else None)
                )
        except BrokenTestsError as error:
            return None, f"broken tests: {error}"
        if passed == len(tests):
            return 1.0, "passed"
        return passed / len(tests) if self.partial else 0.0, f"{passed} of {len(tests)} passed; {reason}"

    def _run_pairs(self, program: str, pairs: list[tuple[str, str]]) -> tuple[int, str]:
        """Return the number of passed pairs and the reason of the first failure."""
        passed, reason = 0, ""
        for given, expected in pairs:
            result = self.sandbox.run(program, given)
            if result.ok and same_output(result.stdout, expected):
                passed += 1
                continue
            reason = reason or (f"printed {result.stdout[:100]!r}" if result.ok else _describe_end(result))
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
        return sum(passed for passed, _ in verdicts), reasons[0] if reasons else _describe_end(result)


def _describe_end(result: SandboxResult) -> str:
    lines = result.stderr.strip().splitlines()
    return f"{result.reason} with code {result.exit_code}" + (f": {lines[-1][:200]}" if lines else "")


def _join_code(code: str | Sequence[str] | None) -> str:
    """Join lines of code to one text, "" for None."""
    code = code or ""
    code = code if isinstance(code, str) else "\n".join(code)
    return f"{code}\n" if code else ""


def parse_tests(tests: Any, entry_point: str | None = None) -> list[str] | list[tuple[str, str]]:
    """Parse the tests of a row into assertions or pairs of input and output.

    Args:
        tests: value of the column, in a form that :class:`CodeTests` lists.
        entry_point: name of the function for ``check(candidate)``; None if there is none.

    Returns:
        List of Python snippets, or of pairs ``(input, output)``.

    Raises:
        BrokenTestsError: if the value has none of these forms or holds no test.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("{", "["):
        try:
            tests = json.loads(tests)
        except ValueError:
            pass  # not JSON: a snippet that begins with a literal
    if isinstance(tests, Mapping):
        return _parse_pairs(tests)
    tests = [tests] if isinstance(tests, str) and tests.strip() else tests
    if not tests or not isinstance(tests, Sequence) or isinstance(tests, str):
        raise BrokenTestsError(f"no tests: {tests!r:.100}")
    if all(isinstance(test, Mapping) for test in tests):
        return _parse_pairs({key: [test.get(key) for test in tests] for key in ("input", "output")})
    if not all(isinstance(test, str) for test in tests):
        raise BrokenTestsError(f"tests={tests!r:.100} must be a list of texts or of pairs of input and output")
    return [_with_call(test, entry_point) for test in tests]


def _with_call(test: str, entry_point: str | None) -> str:
    if not re.search(r"^def check\(", test, re.MULTILINE):
        return test
    if not entry_point:
        raise BrokenTestsError("check(candidate) requires an entry point: a column with the name of the function")
    return f"{test}\ncheck({entry_point})\n"


def _parse_pairs(tests: Mapping[str, Any]) -> list[str] | list[tuple[str, str]]:
    given = tests.get("inputs", tests.get("input"))
    expected = tests.get("outputs", tests.get("output"))
    if not given or not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
        raise BrokenTestsError(f"tests={dict(tests)!r:.100} must have as many inputs as outputs, at least one")
    if name := tests.get("fn_name"):
        return [_call_test(name, arguments, result) for arguments, result in zip(given, expected, strict=True)]
    return [(_join_lines(i), _join_lines(o)) for i, o in zip(given, expected, strict=True)]


def _join_lines(text: Any) -> str:
    """Join standard input or output, which some datasets store as a list of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if not isinstance(text, str):
        raise BrokenTestsError(f"input or output {text!r:.100} must be a text or a list of lines")
    return text


def _call_test(name: str, arguments: Any, expected: Any) -> str:
    """Build an assertion that a function returns ``expected``, as JSON or as the only entry of a list."""
    if not str(name).isidentifier() or not isinstance(arguments, list):
        raise BrokenTestsError(f"fn_name={name!r} requires a list of arguments per call, got {arguments!r:.100}")
    return (
        "import json\n"
        f"try: _function = {name}\n"
        f"except NameError: _function = Solution().{name}\n"
        f"_result = json.loads(json.dumps(_function(*{arguments!r})))\n"
        f"assert _result == {expected!r} or [_result] == {expected!r}, f'{{_result!r:.100}}'\n"
    )
