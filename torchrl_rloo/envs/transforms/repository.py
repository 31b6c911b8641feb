"""RepositoryTransform: conversations that work on a small repository, rewarded by its tests."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase

from torchrl_rloo.data.rows import non_tensor_value
from torchrl_rloo.data.stop_reasons import abstains, stop_reason
from torchrl_rloo.envs.tools.parsers import Parser
from torchrl_rloo.envs.tools.tool import Tool
from torchrl_rloo.envs.tools.workspace import FileEditTool, ShellTool, Workspace
from torchrl_rloo.envs.transforms.tools import ToolTransform
from torchrl_rloo.rewards.code import make_tasks, read_verdicts
from torchrl_rloo.rewards.code_names import BrokenTestsError
from torchrl_rloo.runtime.call_pool import CallLimit

_IMPORT = """
try:
    {}
except Exception:  # the tests that need it fail
    pass
"""


class RepositoryTransform(ToolTransform):
    """Transform that gives the policy tools for its conversation's folder, and rewards what the folder's tests say.

    A row has its files in the workspace's column, as a mapping of paths to texts. It has its tests in another column, a
    list of Python snippets. A snippet imports what it tests from the modules in the folder, and asserts. The tests run
    when the conversation has ended, on the folder as it is then. Put the transform after others that may continue it. A
    call that the environment's ``max_seconds`` cuts off loses the folder, so the tests run on the first files.

    The environment's reward ``("next", "reward")`` ``[1, 1]`` is 1.0 if all tests pass, else 0.0 or, with ``partial``,
    their share. ``("next", "log_extra")`` says why, as ``"repository_reason"``. A conversation abstains if its tests
    are broken (:class:`~torchrl_rloo.rewards.CodeTests` says when) or its workspace was lost; the latter counts as
    ``"tools/failed"``, the former as ``"tools/broken_tests"``.

    **Cheats.** The tests are never in the folder, and run in another process than the repository. That one only gets
    their calls and only gives plain values back. It cannot see the expected results. What the policy leaves behind
    (``conftest.py``, ``sitecustomize.py``, its own ``unittest.py``, code that exits, patches or prints) therefore
    changes what its modules return, and nothing else. The weaknesses that :class:`~torchrl_rloo.rewards.CodeTests`
    names remain.

    Args:
        workspace: folders and limits. None is ``Workspace()``.
        parser: see :class:`ToolTransform`.
        tests: column of the tests.
        partial: True runs all tests and rewards the share that pass; False stops at the first failure.
        test_timeout: limit of all tests of a conversation, in seconds.
        workers: number of conversations whose tests run concurrently. None is the number of CPUs of this process.
        tools: tools in addition to ``shell`` and ``edit``.
        **options: further arguments of :class:`ToolTransform`, except ``tools_column``.

    Raises:
        ValueError: for options that :class:`ToolTransform` refuses, ``tools_column``, or a limit of 0 or less.
        SandboxUnavailableError: if the system cannot isolate commands.

    Example:
        >>> RepositoryTransform(Workspace(timeout=5), partial=True).tools["shell"].workspace.timeout
        5
    """

    def __init__(
        self,
        workspace: Workspace | None = None,
        parser: str | Parser = "hermes",
        *,
        tests: str = "tests",
        partial: bool = False,
        test_timeout: float = 20.0,
        workers: int | None = None,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        **options: Any,
    ):
        if options.get("tools_column") is not None:
            raise ValueError(
                f"tools_column={options['tools_column']!r} cannot be combined with a repository, whose rows all "
                "have the same tools; leave it out"
            )
        if not test_timeout > 0:
            raise ValueError(f"test_timeout={test_timeout} must be above 0 seconds")
        workspace = Workspace() if workspace is None else workspace
        if not options.get("timeout", 30.0) > workspace.timeout:
            raise ValueError(
                f"timeout={options.get('timeout', 30.0):g} must be above workspace.timeout={workspace.timeout:g}: "
                "a call that is abandoned loses the folder; set a longer timeout"
            )
        super().__init__([ShellTool(workspace), FileEditTool(workspace), *tools], parser, **options)
        self.tests, self.partial, self.test_timeout = tests, partial, test_timeout
        self._testing = CallLimit(len(os.sched_getaffinity(0)) if workers is None else workers)

    async def step_row(self, row: TensorDictBase, next_row: TensorDictBase) -> None:
        """Run the calls of a turn, and the tests if it was the last one."""
        await super().step_row(row, next_row)
        if not next_row["done"].any() or abstains(stop_reason(next_row)):
            return
        reward, reason = await self._score(row)
        next_row.set("reward", next_row["reward"] + torch.tensor(reward))
        extra = next_row["log_extra"] if "log_extra" in next_row.keys() else {}
        next_row.set("log_extra", NonTensorData({**extra, "repository_reason": reason}))

    async def _score(self, row: TensorDictBase) -> tuple[float, str]:
        """Return the reward and its reason."""
        tests, files = (non_tensor_value(row, name) for name in (self.tests, self.tools["shell"].workspace.files))
        try:
            judge, program = split_tests(tests, files)
            async with self._testing:
                folder = await self._session(row).open_state(self.tools["shell"])
                output = await folder.judge(judge | {"partial": self.partial}, program, self.test_timeout)
            verdicts = read_verdicts(output, len(judge["tests"]))
        except (BrokenTestsError, RecursionError) as error:
            self.counts["tools/broken_tests"] += 1
            return float("nan"), f"broken tests: {error}"
        passed, failures = sum(ok for ok, _ in verdicts), [reason for ok, reason in verdicts if not ok]
        if passed == len(tests):
            return 1.0, "passed"
        reason = failures[0] if failures else f"test_timeout={self.test_timeout:g} s or another limit ended them"
        return passed / len(tests) if self.partial else 0.0, f"{passed} of {len(tests)} passed; {reason}"


def split_tests(tests: Sequence[str], files: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the task of the tests' process and that of the repository's, which gets the tests' imports of it."""
    if isinstance(tests, str) or not tests or not all(isinstance(test, str) for test in tests):
        raise BrokenTestsError(f"tests={tests!r:.100} must be a list of texts, at least one")
    modules = {path.partition("/")[0].removesuffix(".py") for path in files}
    names, imports, rest = [], [], []
    for test in tests:
        try:
            tree = ast.parse(test)
        except (SyntaxError, ValueError, MemoryError) as error:
            raise BrokenTestsError(f"{type(error).__name__}: {error}") from None
        own = [node for node in tree.body if _module(node) in modules]
        names += [alias.asname or alias.name.partition(".")[0] for node in own for alias in node.names]
        imports += [ast.unparse(node) for node in own]
        tree.body = [node for node in tree.body if node not in own]
        rest.append(ast.unparse(tree))
    if not names or "*" in names:
        raise BrokenTestsError(f"the tests must import names from the repository, whose modules are {sorted(modules)}")
    judge, program = make_tasks(rest, "", "", tuple(dict.fromkeys(names)))
    lines = "".join(_IMPORT.format(line) for line in dict.fromkeys(imports))
    return judge, program | {"program": f"import sys\nsys.path.insert(0, '.')\n{lines}"}


def _module(node: ast.stmt) -> str | None:
    """Return the top-level module of an import; None of another statement."""
    if isinstance(node, ast.Import):
        return node.names[0].name.partition(".")[0]
    return (node.module or "").partition(".")[0] if isinstance(node, ast.ImportFrom) and not node.level else None
