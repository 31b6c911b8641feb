"""Repository tasks: rewards of policies that mend, fail, and cheat; resets, lost workspaces, broken tests."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Callable, Sequence

import pytest

from support.processes import children
from support.waiting import wait_until
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import resolve_task
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tasks.programs import PROBLEMS, REPOSITORY, faulty_repositories
from torchrl_rloo.envs.tools import Workspace
from torchrl_rloo.envs.transforms import RepositoryTransform
from torchrl_rloo.envs.transforms.repository import split_tests
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.rewards.code_names import BrokenTestsError

FILES = {"shapes.py": "def area(side):\n    return side\n\n\ndef name():\n    return 'square'\n"}
TESTS = [
    "from shapes import area\nassert area(3) == 9",
    "import shapes\nassert shapes.area(4) == 16",
    "from shapes import name\nimport math\nassert name() == 'square' and math.pi > 3",
]


def keepers() -> list[int]:
    """Return the processes that keep workspaces of this one."""
    return [keeper for starter in children(os.getpid(), "starter.py") for keeper in children(starter)]


def edit(**arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': 'edit', 'arguments': arguments})}</tool_call>"


def shell(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


def play(env, tokenizer, say: Callable[[str, int], str]) -> list:
    """Return the finished rows of a policy that says ``say(prompt, turns taken)``."""

    def turn(request, index) -> ScriptedTurn:
        prompt = tokenizer.decode(request.prompt)
        said = say(prompt, prompt.count("<|im_start|>assistant") - 1)
        return ScriptedTurn([*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id])

    with ScriptedEngine(turn) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 20_000})
        rows = list(LLMCollector(env, policy).collect().unbind(0))
    wait_until(lambda: not keepers(), what="the end of all workspaces")
    return rows


def outcome(row) -> tuple[float, str]:
    return float(row[keys.REWARD]), row[keys.LOG_EXTRA]["repository_reason"]


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(timeout=10)


@pytest.fixture
def attempt(tokenizer, workspace):
    """Return a function that plays conversations about ``FILES`` and returns their rows."""

    def attempt(*conversations: Sequence[str], tests=TESTS, files=FILES, **options) -> list:
        data = [
            {"query": [{"role": "user", "content": f"Task {i}."}], "files": files, "tests": tests}
            for i in range(len(conversations))
        ]
        transform = RepositoryTransform(workspace, show_schemas=False, **options)
        limits = {"prompts_per_batch": len(data), "shuffle": False, "transforms": [transform], "max_turns": 6}
        env = DatasetChatEnv(load_prompts(data), tokenizer, **limits)
        return play(env, tokenizer, lambda text, n: conversations[int(re.search(r"Task (\d+)\.", text)[1])][n])

    return attempt


MEND = edit(action="replace", path="shapes.py", old="return side", new="return side * side")
DONE = "It is done."


# ---------------------------------------------------------------------------------------------------- the built-in task
def test_a_policy_that_mends_earns_1_and_one_that_does_not_earns_0(tokenizer):
    task = resolve_task("repository")
    train, held_out = task.load(eval_size=2, limit=8)
    assert not {str(r["query"]) for r in train.rows} & {str(r["query"]) for r in held_out.rows}

    def mend(text: str, turn: int) -> str:
        name, n, module = re.search(r"The function (\w+)_(\d+) in lib/(\w+)\.py", text).groups()
        problem = next(p for p in PROBLEMS if p.name == f"{name}_{{n}}")
        old, new = (part.replace("{n}", n) for part in (problem.wrong, problem.right))
        path = f"lib/{module}.py"
        return [edit(action="view", path=path), edit(action="replace", path=path, old=old, new=new), DONE][turn]

    solved = play(task.env(train, tokenizer, prompts_per_batch=8), tokenizer, mend)
    assert [outcome(row) for row in solved] == [(1.0, "passed")] * 8
    idle = play(task.env(train, tokenizer, prompts_per_batch=8), tokenizer, lambda text, turn: DONE)
    assert {float(row[keys.REWARD]) for row in idle} == {0.0}


def test_rows_are_the_same_for_a_seed_and_have_a_fault_each():
    rows = faulty_repositories("train", 40)
    assert rows == faulty_repositories("train", 40) != faulty_repositories("train", 40, seed=1)
    assert len({row["prompt"].split("_")[0] for row in rows}) == len(PROBLEMS)
    assert all(problem.code.count(problem.right) == 1 for problem in PROBLEMS)
    assert REPOSITORY.limits["max_turns"] >= 3


# -------------------------------------------------------------------------------------------------------------- rewards
def test_all_tests_or_their_share(attempt):
    rows = attempt([MEND, DONE], [DONE], [shell("rm shapes.py"), DONE], [shell("echo 'x = (' > shapes.py"), DONE])
    assert [float(row[keys.REWARD]) for row in rows] == [1.0, 0.0, 0.0, 0.0]
    assert outcome(rows[1]) == (0.0, "0 of 3 passed; AssertionError: ")
    shares = attempt([MEND, DONE], [DONE], [shell("rm shapes.py"), DONE], partial=True)
    assert [float(row[keys.REWARD]) for row in shares] == pytest.approx([1, 1 / 3, 0])


def test_the_folder_counts_after_a_limit_too(attempt):
    (row,) = attempt([MEND, *[shell("true")] * 5])
    assert stop_reason(row) == "turns" and float(row[keys.REWARD]) == 1.0


def plant(name: str, text: str) -> str:
    return edit(action="create", path=name, content=text)


EVIL = {
    "conftest": [plant("conftest.py", "import os; os._exit(0)\n")],
    "sitecustomize": [
        plant("sitecustomize.py", "import os; os._exit(0)\n"),
        plant("usercustomize.py", "raise SystemExit(0)"),
    ],
    "unittest": [plant("unittest.py", "def main(): print('OK')\n"), plant("math.py", "pi = 1\n")],
    "exit at import": [plant("shapes.py", "import os; os._exit(0)\n")],
    "exit in a call": [plant("shapes.py", "import os\ndef area(side): os._exit(0)\n")],
    "system exit": [plant("shapes.py", "raise SystemExit(0)\n")],
    "verdict on every file": [
        plant(
            "shapes.py",
            "import os\nfor i in range(64):\n    try: os.write(i, b'[true, null]\\n' * 3)\n    except OSError: pass\n",
        )
    ],
    "verdict from a call": [
        plant(
            "shapes.py",
            "import os\ndef area(side):\n    os.write(1, b'[true, null]\\n'); os.write(3, b'[true, null]\\n')\n",
        )
    ],
    "equals all": [
        plant(
            "shapes.py",
            "class All(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
            "def area(side): return All()\ndef name(): return All()\n",
        )
    ],
    "patches": [
        plant("shapes.py", "import builtins\nbuiltins.AssertionError = int\n__debug__ or 1\ndef area(side): return 0\n")
    ],
    "kills all": [plant("shapes.py", "import os\nos.kill(-1, 9)\n")],
    "reads the judge": [
        plant(
            "shapes.py",
            "import os, glob\nfound = []\nfor path in glob.glob('/proc/[0-9]*/mem') + glob.glob('/proc/[0-9]*/fd/*'):\n"
            "    if f'/{os.getpid()}/' not in path:\n        try: found.append(open(path, 'rb+'))\n"
            "        except OSError: pass\ndef area(side): return side ** 2 if found else 0\n",
        )
    ],
    "finds the tests in its memory": [
        plant(
            "shapes.py",
            "import gc, os\ntext = ''.join(repr(o) for o in gc.get_objects() if type(o) in (dict, list))\n"
            "for i in range(64):\n    try: text += os.pread(i, 9999, 0).decode()\n    except OSError: pass\n"
            "def area(side): return side ** 2 if 'assert' + ' area' in text else 0\n",
        )
    ],
    "a daemon from before": [
        shell("(setsid sh -c 'sleep 1; while true; do echo \"def area(s): return s ** 2\" > shapes.py; done' &) ; true")
    ],
    "import hook": [plant("shapes/__init__.py", "import sys\nsys.modules['operator'] = None\ndef area(s): return 1\n")],
}


def test_cheats_earn_nothing(attempt):
    rows = attempt(*([*turns, DONE] for turns in EVIL.values()), partial=True)
    earned = dict(zip(EVIL, (float(row[keys.REWARD]) for row in rows), strict=True))
    honest = {"conftest", "sitecustomize", "unittest", "a daemon from before"}  # leave name() as it is
    assert {name for name, reward in earned.items() if reward} == honest
    assert [earned[name] for name in honest] == pytest.approx([1 / 3] * len(honest))


def test_a_cheat_does_not_hide_that_the_work_is_done(attempt):
    rows = attempt(*([*EVIL[name], MEND, DONE] for name in ("conftest", "sitecustomize", "unittest")))
    assert [float(row[keys.REWARD]) for row in rows] == [1.0] * 3


def test_endless_code_ends_as_a_failure(attempt):
    (row,) = attempt([plant("shapes.py", "while True: pass\n"), DONE], test_timeout=0.5)
    assert float(row[keys.REWARD]) == 0.0 and "test_timeout=0.5 s" in outcome(row)[1]


# ---------------------------------------------------------------------------------------------------- rows that abstain
@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (["assert 1 == 1"], "must import names from the repository"),
        (["from shapes import area\nassert area(("], "SyntaxError"),
        (["from shapes import area\nassert area(unknown) == 4"], "unknown"),
        ([], "at least one"),
        (["from shapes import *\nassert area(2) == 4"], "must import names"),
        (["from shapes import area\nassert area(lambda: 1) == 4"], "cannot be sent"),
        (
            [
                "import os\nfrom shapes import area\nfor i in range(4, 9):\n    try: os.write(i, b'7\\n')\n"
                "    except OSError: pass"
            ],
            "file of the verdicts",
        ),
    ],
)
def test_broken_tests_abstain(attempt, tests: list[str], reason: str):
    (row,) = attempt([MEND, DONE], tests=tests)
    assert math.isnan(outcome(row)[0]) and reason in outcome(row)[1]


def test_a_lost_workspace_abstains(attempt):
    def lose(*args: object) -> str:
        for pid in keepers():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not keepers())
        return DONE

    class Losing(list):
        def __getitem__(self, turn: int) -> str:
            return super().__getitem__(turn) if turn == 0 else lose()

    (row,) = attempt(Losing([MEND]))
    assert stop_reason(row) == "failed" and math.isnan(float(row[keys.REWARD]))


def test_first_files_that_lead_out_are_refused(attempt):
    (row,) = attempt([DONE], files=FILES | {"../x.py": ""})
    assert stop_reason(row) == "failed" and math.isnan(float(row[keys.REWARD]))


def test_settings_that_cannot_be_are_refused(workspace):
    with pytest.raises(ValueError, match="tools_column='names' cannot"):
        RepositoryTransform(workspace, tools_column="names")
    with pytest.raises(ValueError, match="test_timeout=0 "):
        RepositoryTransform(workspace, test_timeout=0)
    with pytest.raises(ValueError, match="timeout=10 must be above workspace.timeout=10"):
        RepositoryTransform(workspace, timeout=10)
    with pytest.raises(BrokenTestsError, match="list of texts"):
        split_tests("assert True", FILES)
