"""Code rewards: the program of a completion runs against unit tests in a sandbox."""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrl_rloo.rewards.code_names import BrokenTestsError, TestNames, check_names, read_names, resolve_names
from torchrl_rloo.rewards.formats import find_program
from torchrl_rloo.rewards.protocol import final_text
from torchrl_rloo.rewards.remote import RemoteRewardError
from torchrl_rloo.rewards.remote_sandbox import RemoteSandbox, make_sandbox

if TYPE_CHECKING:
    from torchrl_rloo.sandbox import Sandbox, SandboxResult

_LOGGER = logging.getLogger(__name__)
_READS = re.compile(r"\binput\b|\bstdin\b|\bopen\(0|\bfileinput\b")
_CHECK = re.compile(r"^def check\(", re.MULTILINE)
_STATEMENT = re.compile(r"^[ \t]*[^#\s]", re.MULTILINE)
_BYTE_ORDER_MARK = "\ufeff"  # Python ignores it at the start of a file
_TIME_LIMITS = ("timed_out", "cpu")
_LARGE_SHARE = 0.5  # of the time of a call, in programs that reach a time limit


@dataclass(frozen=True)
class Call:
    """Test that a function or method of ``Solution`` returns ``expected``, or a list with it; both sides are JSON."""

    name: str
    arguments: Any
    expected: Any


class Verdict(NamedTuple):
    """Score of a program, its reason, and the seconds of its processes: all, and in runs that reached a time limit."""

    score: float | None
    reason: str
    seconds: float = 0.0
    stalled: float = 0.0


def same_output(actual: str, expected: str) -> bool:
    """Return whether two outputs have the same words in the same order, ignoring white space."""
    return actual.split() == expected.split()


class CodeTests:
    """Reward of 1.0 where the program in a completion passes all tests of its row, else 0.0.

    The program is a fenced block of Python, or without a language if there is none, else the whole text. Of several
    blocks it is the last that defines the names under test, or that reads standard input. A dataset column holds the
    tests, as values or as JSON, in one of these forms:

    - **assertions**: a Python snippet or a list of them (MBPP's ``test_list``), each of which is a test. A snippet that
      defines ``check(candidate)`` is called with the function that ``entry_point`` names (HumanEval's ``test``).
    - **input and output**: ``{"inputs": [...], "outputs": [...]}`` of texts (APPS, TACO), also ``input`` and ``output``
      (CodeContests), or a list of ``{"input": ..., "output": ...}``. Each pair is a test: the program reads the input
      and must print the output, ignoring white space. With a ``fn_name`` (APPS), the pairs are the arguments and the
      result of that function or method of ``Solution``.

    **Names.** Tests take only the names under test from the program: ``fn_name``, those of ``entry_point``, or else
    those that nothing but the program can give. A missing one is a failure, even if it is the name of a built-in. All
    other names are the tests' own: built-ins, imports, definitions of ``setup``, functions of ``prelude``, and pure
    modules of the standard library.

    **Cheats.** A program never runs in a process that knows the expected results. Expected outputs stay in this
    process. Assertions run in a second sandboxed process, which sends calls to the program and gets plain values back.
    A program that exits early, prints a verdict, patches built-ins or returns an object that equals everything
    therefore fails. These weaknesses remain:

    - A program that knows the inputs can look up the results. It can change an argument with which a test compares.
    - A program can influence tests that check a result with another name under test, such as a class of the results.
    - Methods of an object (``f(1).is_valid()``) and operators of a class under test are the program's opinion.
    - NaN passes tests that only refute a comparison, such as ``not abs(f(2) - 4) > 1e-6``.

    **Objects.** An object of the program acts in the tests like in one process: its methods, operators, attributes,
    classes and exceptions are the program's. Lists, dicts and other containers are the same on both sides, up to 2000
    items. A class counts as under test if its name in the tests is capitalized, such as ``Stack``; ``Solution`` and
    names with underscores do not. Objects of other classes have less say: their operators never see a value of the
    tests, and they stand for no number, false value or text. Subclasses of plain types such as ``list`` act as these.

    **Time.** A call takes at most ``ceil(B / workers) * (row_timeout + sandbox.timeout)`` seconds, plus the start of
    the sandbox, for any programs. Rows run concurrently. The assertions of a row share one time limit of the sandbox.
    Its pairs end at the first that reaches a time limit, and when they have taken ``row_timeout`` seconds; the
    remaining ones fail.

    A row abstains (None) if its tests are missing or broken: unknown form, unequal numbers of inputs and outputs, a
    syntax error, a name that nothing defines, no entry point for ``check``. It also abstains if a test

    - passes a function, an instance of the test's class, or another value that cannot be sent to a process;
    - derives a class from one of the program, or pickles an object of it;
    - patches a module, or replaces the input, the environment or the warnings of the program;
    - needs a package, a file, ``asyncio`` or ``tempfile``, or writes to the file of the verdicts.

    Any failure of the program, time-outs included, scores 0.0. So does a program that needs what the sandbox lacks, and
    a test of its log, its threads or the lifetime of its objects.

    Args:
        column: column of tests.
        entry_point: column with the name under test, or a list of names; optional. The first is the function for
            ``check``, also a method such as ``Solution().f``. A row with None derives the names from its tests.
        setup: column of code that runs before the assertions (MBPP's ``test_setup_code``). None disables it.
        prelude: column of code that runs before the program, in its process (HumanEval's prompt). Tests use its
            functions. None disables it.
        partial: True runs all tests and scores the share that pass; False stops at the first failure. Assertions share
            one time limit, so those after a time-out fail.
        sandbox: sandbox and limits of the programs, which hold for each process, as an object or a mapping of
            arguments. Default: ``Sandbox()``. A URL, or a mapping with ``url``, makes a :class:`RemoteSandbox`. A row
            that its server fails on is counted as a failure and abstains.
        workers: number of rows that run concurrently. Default: number of CPUs of this process.
        row_timeout: seconds after which no further pair of a row starts. Default: twice ``sandbox.timeout``.
        max_chars: longest program in characters; a longer one scores 0.0 unread.

    Raises:
        ValueError: if ``workers``, ``row_timeout`` or ``max_chars`` is not positive.
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
        sandbox: Sandbox | RemoteSandbox | str | Mapping[str, Any] | None = None,
        workers: int | None = None,
        row_timeout: float | None = None,
        max_chars: int = 100_000,
    ):
        self.column, self.entry_point, self.setup, self.prelude = column, entry_point, setup, prelude
        self.partial, self.max_chars = partial, max_chars
        self.sandbox = make_sandbox(sandbox)
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self.row_timeout = 2 * self.sandbox.policy.timeout if row_timeout is None else row_timeout
        for name in ("workers", "row_timeout", "max_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Return ``B`` rewards in [0, 1] or None; log the reasons in the column ``code_tests_reason``."""
        # Collect the rows
        required = [name for name in (self.column, self.setup, self.prelude) if name is not None]
        for name in required:
            if name not in columns:
                raise KeyError(f"code_tests requires column {name!r}; the rows have {sorted(columns)}")
        read = [*required, self.entry_point] if self.entry_point in columns else required
        rows = [{name: columns[name][i] for name in read} for i in range(len(completions))]
        texts = [final_text(completion) for completion in completions]
        # Judge them, each in a thread that waits for its processes
        if min(self.workers, len(rows)) <= 1:
            verdicts = [self._judge(text, row) for text, row in zip(texts, rows, strict=True)]
        else:
            with ThreadPoolExecutor(min(self.workers, len(rows))) as pool:
                verdicts = list(pool.map(self._judge, texts, rows))
        # Report
        self._warn_of_time_outs(verdicts)
        if log_extra is not None:
            log_extra("code_tests_reason", [verdict.reason for verdict in verdicts])
        return [verdict.score for verdict in verdicts]

    def _warn_of_time_outs(self, verdicts: Sequence[Verdict]) -> None:
        stalled, seconds = sum(v.stalled for v in verdicts), sum(v.seconds for v in verdicts)
        if stalled > _LARGE_SHARE * seconds:
            _LOGGER.warning(
                "time-outs took %.1f of %.1f s of code_tests, in %d of %d rows: reduce the timeout=%g of the sandbox "
                "or raise workers=%d",
                *(stalled, seconds, sum(v.stalled > 0 for v in verdicts), len(verdicts)),
                *(self.sandbox.policy.timeout, self.workers),
            )

    def _judge(self, text: str, row: Mapping[str, Any]) -> Verdict:
        prelude, setup = (join_code(row[name] if name else None) for name in (self.prelude, self.setup))
        try:
            # Parse the tests first: a broken row abstains whatever its program is
            given = as_names(row.get(self.entry_point))
            tests = parse_tests(row[self.column], given)
            pairs = isinstance(tests[0], tuple)
            tasks = None if pairs else make_tasks(tests, setup, prelude, given)
            wanted = None if pairs else {*tasks[0]["program"], *tasks[0]["candidate"]}
            program = find_program(text, lambda block: rank_block(block, wanted)).removeprefix(_BYTE_ORDER_MARK)
            if len(program) > self.max_chars:
                return Verdict(0.0, f"program has {len(program)} characters, more than max_chars={self.max_chars}")
            if not _STATEMENT.search(program):
                return Verdict(0.0, "program has no statement")
            if pairs:
                passed, reason, runs = self._run_pairs(prelude + program, tests)
            else:
                passed, reason, runs = self._run_assertions(program, *tasks)
        except (BrokenTestsError, RecursionError) as error:  # only tests are parsed here
            return Verdict(None, f"broken tests: {error}")
        except RemoteRewardError as error:
            return Verdict(math.nan, f"the sandbox failed: {error}")  # the runner counts a NaN as a failure of the row
        seconds, stalled = (sum(r.seconds for r in runs if not s or is_stalled(r)) for s in (False, True))
        if passed == len(tests):
            return Verdict(1.0, "passed", seconds, stalled)
        score = passed / len(tests) if self.partial else 0.0
        return Verdict(score, f"{passed} of {len(tests)} passed; {reason}", seconds, stalled)

    def _run_pairs(self, program: str, pairs: list[tuple[str, str]]) -> tuple[int, str, list[SandboxResult]]:
        """Return the number of passed pairs, the reason of the first failure, and the runs."""
        passed, reason, runs = 0, "", []
        for given, expected in pairs:
            if sum(run.seconds for run in runs) >= self.row_timeout:
                return passed, reason or f"row_timeout={self.row_timeout:g} s", runs
            result = self.sandbox.run(program, given)
            runs.append(result)
            if result.ok and same_output(result.stdout, expected):
                passed += 1
                continue
            reason = reason or (f"printed {result.stdout[:100]!r}" if result.ok else _describe_end(result))
            if not self.partial or is_stalled(result):
                break
        return passed, reason, runs

    def _run_assertions(
        self, program: str, judge: Mapping[str, Any], guest: Mapping[str, Any]
    ) -> tuple[int, str, list[SandboxResult]]:
        """Return the number of passed assertions, the reason of the first failure, and the run."""
        result = self.sandbox.judge({**judge, "partial": self.partial}, {**guest, "program": program})
        verdicts = read_verdicts(result.stdout, len(judge["tests"]))
        reasons = [reason for passed, reason in verdicts if not passed]
        return sum(passed for passed, _ in verdicts), reasons[0] if reasons else _describe_end(result), [result]


def read_verdicts(output: str, count: int) -> list[tuple[bool, str | None]]:
    """Return the verdicts that :func:`torchrl_rloo.sandbox.code_judge.judge` has printed, of ``count`` tests.

    The last line is incomplete if a limit ended the judge. Raise ``BrokenTestsError`` if the judge says so, or if tests
    have written to the file of the verdicts.
    """
    verdicts: list[tuple[bool, str | None]] = []
    for line in output.split("\n")[:-1]:
        try:
            verdict = json.loads(line)
        except (ValueError, RecursionError):
            verdict = None
        match verdict:
            case {"broken": str(reason)}:
                raise BrokenTestsError(reason)
            case [True, None] | [False, str()]:
                verdicts.append(tuple(verdict))
            case _:
                raise BrokenTestsError("a test wrote to the file of the verdicts")
    if len(verdicts) > count:
        raise BrokenTestsError(f"there are {len(verdicts)} verdicts of {count} tests")
    return verdicts


def rank_block(block: str, wanted: set[str] | None) -> int:
    """Return how many of the ``wanted`` names a block defines. None ranks programs by whether they read and print."""
    if wanted is None:
        return 2 * bool(_READS.search(block)) + ("print" in block or "write" in block)
    try:
        names = read_names(block)
    except BrokenTestsError:
        return 0
    return len((names.defined | names.imported) & wanted)


def is_stalled(result: SandboxResult) -> bool:
    """Return whether a time limit ended a program."""
    return result.reason in _TIME_LIMITS


def make_tasks(
    tests: Sequence[str] | Sequence[Call], setup: str, prelude: str, given: tuple[str, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tasks of the judge and of the program's process, for tests of :func:`parse_tests` except pairs.

    Without ``given`` names under test, they are derived from the tests. Raise ``BrokenTestsError`` if the tests cannot
    run with any program.
    """
    # Separate the function that the judge calls from the names that the tests read
    kinds = ["call" if isinstance(test, Call) else "check" if _CHECK.search(test) else "assert" for test in tests]
    called = tests[0].name if kinds[0] == "call" else given[0] if "check" in kinds else ""
    owner, _, name = called.rpartition("().")
    if kinds[0] == "call":
        names = TestNames((), (), (), False)
        entries = [["call", test.arguments, test.expected] for test in tests]
    else:
        given = tuple(text.partition("().")[0] for text in (given[1:] if called else given))
        names = resolve_names(tuple(tests), setup, prelude, given, owner or name)
        entries = [list(entry) for entry in zip(kinds, tests, strict=True)]
    candidate = [name, owner or "Solution"] if called else []
    judge = {
        "prelude": prelude if names.prelude else "",
        "setup": setup,
        "tests": entries,
        "program": names.program,
        "library": names.library,
        "candidate": candidate,
    }
    return judge, {"prelude": prelude, "names": sorted({*names.program, *candidate} - {*names.instances})}


def as_names(entry_point: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names under test, such as ``f`` or ``Solution().f``; none for None."""
    names = [entry_point] if entry_point and isinstance(entry_point, str) else entry_point or ()
    if not isinstance(names, Sequence):
        raise BrokenTestsError(f"entry_point={entry_point!r:.100} must be a name or a list of names")
    check_names([part for name in names for part in (name.split("().", 1) if isinstance(name, str) else [name])])
    return tuple(names)


def _describe_end(result: SandboxResult) -> str:
    lines = result.stderr.strip().splitlines()
    return f"{result.reason} with code {result.exit_code}" + (f": {lines[-1][:200]}" if lines else "")


def join_code(code: str | Sequence[str] | None) -> str:
    """Join lines of code to one text, "" for None."""
    code = code or ""
    code = code if isinstance(code, str) else "\n".join(code)
    return f"{code}\n" if code else ""


def parse_tests(tests: Any, given: Sequence[str] = ()) -> list[str] | list[Call] | list[tuple[str, str]]:
    """Parse the tests of a row, in a form of :class:`CodeTests`: snippets, calls, or pairs of input and output."""
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
    if not given and any(_CHECK.search(test) for test in tests):
        raise BrokenTestsError("check(candidate) requires an entry point: a column with the name of the function")
    return list(tests)


def _parse_pairs(tests: Mapping[str, Any]) -> list[Call] | list[tuple[str, str]]:
    given = tests.get("inputs", tests.get("input"))
    expected = tests.get("outputs", tests.get("output"))
    if not given or not isinstance(given, list) or not isinstance(expected, list) or len(given) != len(expected):
        raise BrokenTestsError(f"tests={dict(tests)!r:.100} must have as many inputs as outputs, at least one")
    if name := tests.get("fn_name"):
        return [_make_call(name, arguments, result) for arguments, result in zip(given, expected, strict=True)]
    return [(_join_lines(i), _join_lines(o)) for i, o in zip(given, expected, strict=True)]


def _join_lines(text: Any) -> str:
    """Join standard input or output, which some datasets store as a list of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    if not isinstance(text, str):
        raise BrokenTestsError(f"input or output {text!r:.100} must be a text or a list of lines")
    return text


def _make_call(name: Any, arguments: Any, expected: Any) -> Call:
    check_names((name,))
    if not isinstance(arguments, list):
        raise BrokenTestsError(f"fn_name={name!r} requires a list of arguments per call, got {arguments!r:.100}")
    try:
        return Call(name, *json.loads(json.dumps([arguments, expected])))
    except (TypeError, ValueError, RecursionError) as error:
        raise BrokenTestsError(f"fn_name={name!r} has a call that is not plain data: {error}") from None
