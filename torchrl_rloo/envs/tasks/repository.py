"""Repositories with a fault, which the policy finds and mends with a shell and a file editor."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.envs.transforms.repository import RepositoryTransform

_N_TESTS = 4


class Problem(NamedTuple):
    """Kind of repository; ``{n}`` in its texts is a number.

    Attributes:
        name: name of the function.
        purpose: sentence about the function.
        code: module with the function.
        right: text in the code.
        wrong: text that stands there instead, the fault.
    """

    name: str
    purpose: str
    code: str
    right: str
    wrong: str


PROBLEMS = (
    Problem(
        "clamp_{n}",
        "returns a number, or 0 if it is below 0, or {n} if it is above {n}",
        "LIMIT = {n}\n\n\ndef clamp_{n}(value):\n    return max(0, min(value, LIMIT))\n",
        "max(0, min(value, LIMIT))",
        "min(0, max(value, LIMIT))",
    ),
    Problem(
        "scale_{n}",
        "returns a list with each number of a list times {n}",
        "def scale_{n}(values):\n    scaled = []\n    for i in range(len(values)):\n"
        "        scaled.append(values[i] * {n})\n    return scaled\n",
        "range(len(values))",
        "range(1, len(values))",
    ),
    Problem(
        "sums_{n}",
        "returns the sum of each {n} consecutive numbers of a list, from left to right",
        "SIZE = {n}\n\n\ndef sums_{n}(values):\n    places = range(len(values) - SIZE + 1)\n"
        "    return [sum(values[i : i + SIZE]) for i in places]\n",
        "len(values) - SIZE + 1",
        "len(values) - SIZE",
    ),
    Problem(
        "last_{n}",
        "returns the last {n} items of a list, or all if there are fewer",
        "def last_{n}(values):\n    start = max(0, len(values) - {n})\n    return values[start:]\n",
        "len(values) - {n})",
        "len(values) - {n} - 1)",
    ),
)


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate repositories with one fault each; see :class:`Task`.

    Returns:
        Rows ``{"prompt", "files", "tests"}``; see :class:`~torchrl_rloo.envs.transforms.RepositoryTransform`.
    """
    rng = random.Random(f"{seed} {split}")
    return [_make_row(rng, 2 * rng.randrange(1, 20) + (split == "test")) for _ in range(size or 256)]


def _make_row(rng: random.Random, n: int) -> dict[str, Any]:
    """Make a repository; the numbers are even in training only, so the splits share no problem."""
    problem = Problem(*(text.replace("{n}", str(n)) for text in rng.choice(PROBLEMS)))
    module = rng.choice(("values", "items", "series"))
    # Expected results are those of the module without the fault
    namespace: dict[str, Any] = {}
    exec(problem.code, namespace)
    cases = [rng.randrange(-n, 3 * n) for _ in range(_N_TESTS - 2)] + [-1, 2 * n + 1]
    if not problem.name.startswith("clamp"):
        cases = [[rng.randrange(100) for _ in range(length)] for length in (n, n + 1, n + 3, 0)]
    results = [namespace[problem.name](case) for case in cases]
    head = f"from lib.{module} import {problem.name}\n"
    return {
        "prompt": f"The function {problem.name} in lib/{module}.py has a fault. It {problem.purpose}. Mend it.",
        "files": {
            "README.md": f"# lib\n\n`{problem.name}` {problem.purpose}.\n",
            "lib/__init__.py": "",
            f"lib/{module}.py": problem.code.replace(problem.right, problem.wrong),
        },
        "tests": [
            f"{head}assert {problem.name}({case}) == {result}" for case, result in zip(cases, results, strict=True)
        ],
    }


REPOSITORY = Task(
    name="repository",
    synthetic_rows=synthetic_rows,
    rewards=(),  # the tests of the repository give the reward
    scorer=None,
    system_prompt="You work in a folder with a small repository. Call tools to read it, to change it and to try it. "
    "When you are done, answer without a call.",
    transforms=lambda: [RepositoryTransform()],
    limits={"max_turns": 8},
)
