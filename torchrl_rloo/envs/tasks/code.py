"""Code with tests: MBPP (Austin et al. 2021), HumanEval (Chen et al. 2021), and programs with inputs and outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.code_names import reference_names

_FUNCTIONS = (
    ("add_{n}", "adds {n} to a number", "x + {n}", lambda x, n: x + n),
    ("times_{n}", "multiplies a number by {n}", "x * {n}", lambda x, n: x * n),
    ("minus_{n}", "subtracts {n} from a number", "x - {n}", lambda x, n: x - n),
)


def convert_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt and the ``tests`` that :class:`~torchrl_rloo.rewards.CodeTests` takes.

    MBPP has ``test_list``, HumanEval ``test`` and ``entry_point``. Others have ``inputs`` and ``outputs`` of a program,
    or with ``fn_name`` of a function; APPS and TACO have them as JSON in ``input_output``. HumanEval's prompt is also
    the ``prelude`` of the program, since its tests call helpers that it defines. MBPP's reference solution ``code``
    gives the names under test: those that it defines and the tests read. Its tests get its imports that they use.

    Args:
        example: row of the dataset.

    Returns:
        ``{"prompt", "tests", "entry_point", "prelude"}``.

    Raises:
        ValueError: if the row has no problem or no tests.

    Example:
        >>> row = {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}
        >>> convert_row(row)["tests"]
        ['assert add(1, 2) == 3']
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


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate problems whose solution is a function of one number, in MBPP's columns; see :class:`Task`."""
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
    synthetic_rows=synthetic_rows,
    row_map=convert_row,
    rewards=({"_target_": "code_tests", "prelude": "prelude", "partial": True},),
    scorer={"_target_": "code_tests", "prelude": "prelude"},
    dataset={"source": "google-research-datasets/mbpp", "name": "full", "split": "train"},
    eval_split="test",
    system_prompt="Answer with one block of Python code, between ```python and ```.",
)
