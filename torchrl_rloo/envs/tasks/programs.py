"""Tasks whose answers are programs: functions and scripts with tests, and repositories with a fault.

Sources: MBPP (Austin et al. 2021), HumanEval (Chen et al. 2021), APPS and TACO. The policy finds and mends the fault of
a repository with a shell and a file editor. The functions that generate rows take the arguments of
``Task.synthetic_rows``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.envs.transforms.repository import RepositoryTransform
from torchrl_rloo.rewards.code_names import reference_names

_FUNCTIONS = (
    ("add_{n}", "adds {n} to a number", "x + {n}", lambda x, n: x + n),
    ("times_{n}", "multiplies a number by {n}", "x * {n}", lambda x, n: x * n),
    ("minus_{n}", "subtracts {n} from a number", "x - {n}", lambda x, n: x - n),
)


def code_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt and the ``tests`` that :class:`~torchrl_rloo.rewards.CodeTests` takes.

    MBPP has ``test_list``, HumanEval ``test`` and ``entry_point``. Others have ``inputs`` and ``outputs`` of a program,
    or with ``fn_name`` of a function; APPS and TACO have them as JSON in ``input_output``. HumanEval's prompt is also
    the ``prelude`` of the program, since its tests call helpers that it defines. MBPP's reference solution ``code``
    gives the names under test: those that it defines and the tests read. Its tests get its imports that they use.
    """
    text = next((example[name] for name in ("text", "prompt", "question") if name in example), None)
    if text is None:
        raise ValueError("a row must have its problem as 'text', 'prompt' or 'question'")
    # MBPP
    if "test_list" in example:
        setup = example.get("test_setup_code") or "\n".join(example.get("test_imports") or [])
        names, imports = reference_names(example.get("code") or "", "\n".join([setup, *example["test_list"]]))
        setup = "\n".join(part for part in (imports, setup) if part)
        tests = [f"{setup}\n{test}" if setup else test for test in example["test_list"]]
        prompt = f"{text}\nYour code should pass this test:\n{example['test_list'][0]}"
        return {"prompt": prompt, "tests": tests, "entry_point": names or None, "prelude": None}
    # HumanEval
    if "entry_point" in example:
        function = example["entry_point"]
        return {"prompt": text, "tests": [example["test"]], "entry_point": function, "prelude": example["prompt"]}
    # Programs or functions with inputs and outputs
    pairs = example.get("input_output", example)
    pairs = json.loads(pairs) if isinstance(pairs, str) else pairs
    if "inputs" not in pairs or "outputs" not in pairs:
        raise ValueError("a row must have 'test_list', 'test' and 'entry_point', or 'inputs' and 'outputs'")
    tests = {name: pairs[name] for name in ("fn_name", "inputs", "outputs") if pairs.get(name)}
    task = f"Write {tests['fn_name']}" if "fn_name" in tests else "Read standard input and write standard output"
    starter = example.get("starter_code")
    prompt = f"{text}\n{task}." if not starter else f"{text}\n{task}. Begin with\n{starter}"
    return {"prompt": prompt, "tests": tests, "entry_point": None, "prelude": None}


def function_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate problems whose solution is a function of one number, in MBPP's columns."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    for i in range(size or 256):
        name, words, code, function = rng.choice(_FUNCTIONS)
        n = 2 * rng.randrange(1, 100) + (split == "test")  # even only in training, so that the splits share no problem
        name, words, code = name.format(n=n), words.format(n=n), code.format(n=n)
        rows.append(
            {
                "task_id": i,
                "text": f"Write a function {name} that {words}.",
                "code": f"def {name}(x):\n    return {code}",
                "test_list": [f"assert {name}({x}) == {function(x, n)}" for x in rng.sample(range(50), 3)],
                "test_setup_code": "",
                "challenge_test_list": [],
            }
        )
    return rows


CODE = Task(
    name="code",
    synthetic_rows=function_problems,
    row_map=code_row,
    rewards=({"_target_": "code_tests", "prelude": "prelude", "partial": True},),
    scorer={"_target_": "code_tests", "prelude": "prelude"},
    dataset={"source": "google-research-datasets/mbpp", "name": "full", "split": "train"},
    eval_split="test",
    system_prompt="Answer with one block of Python code, between ```python and ```.",
)


_N_TESTS = 4


class Problem(NamedTuple):
    """Kind of repository; ``{n}`` in its texts is a number."""

    name: str  # of the function
    purpose: str  # sentence about the function
    code: str  # module with the function
    right: str  # text in the code
    wrong: str  # text that stands there instead, the fault


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


def faulty_repositories(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate repositories with one fault each."""
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
    synthetic_rows=faulty_repositories,
    rewards=(),  # the tests of the repository give the reward
    scorer=None,
    system_prompt="You work in a folder with a small repository. Call tools to read it, to change it and to try it. "
    "When you are done, answer without a call.",
    transforms=lambda: [RepositoryTransform()],
    limits={"max_turns": 8},
)
