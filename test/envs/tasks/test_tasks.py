"""Standard tasks: formats of the published datasets, synthetic rows, and matching rewards and metrics."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.envs.tasks import load_task
from torchrl_rloo.envs.tasks.environments import EnvironmentTask
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward

# custom and environments have no dataset, rewards or scorer
STANDARD = [name for name, task in TASKS.items() if name != "custom" and not isinstance(task, EnvironmentTask)]
PICTURES = ["geometry3k", "chartqa"]  # for vision-language models


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a task, which this system can run."""
    if request.param == "code":
        request.getfixturevalue("sandboxed")
    return request.param


CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n"
HUMANEVAL = {
    "prompt": 'def mirrored(s):\n    return s[::-1]\n\n\ndef undo(s):\n    """Undoes mirrored."""\n',
    "test": "def check(candidate):\n    assert candidate(mirrored('ab')) == 'ab'\n",
    "entry_point": "undo",
}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
APPS = {"question": "Add.", "input_output": json.dumps(CALLS), "starter_code": "def add(a, b):"}
# task, published row, converted columns
PICTURE = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAAAAAAALAAAAAABAAEAAAIBRAA7"
PUBLISHED = [
    (
        "geometry3k",
        {"images": [PICTURE, PICTURE], "problem": "<image><image>Find $x$.", "answer": r"2 \sqrt { 3 }"},
        {"images": [PICTURE, PICTURE], "prompt": "Find $x$.", "solution": r"2 \sqrt { 3 }"},
    ),
    (
        "chartqa",
        {"image": PICTURE, "query": "q", "label": ["14%"], "human_or_machine": 1},
        {"image": PICTURE, "prompt": "q", "answer": ["14%"]},
    ),
    ("gsm8k", {"question": "2+2?", "answer": "2+2=<<2+2=4>>4\n#### 4"}, {"prompt": "2+2?", "answer": "4"}),
    ("gsm8k", {"question": "k?", "answer": "so\n#### -1,234.50 "}, {"prompt": "k?", "answer": "-1234.50"}),
    (
        "math",
        {"problem": "p", "level": "Level 5", "type": "Algebra", "solution": r"so $\boxed{\frac{1}{2}}$."},
        {"prompt": "p", "solution": r"\frac{1}{2}"},
    ),
    ("math", {"problem": "p", "solution": r"$3$, so $\boxed 12$ and not 4."}, {"solution": "12"}),
    ("math", {"problem": "p", "solution": r"$\boxed{3}$, no, $\fbox{x^{2}}$."}, {"solution": "x^{2}"}),
    ("math", {"prompt": [{"role": "user", "content": "p"}], "solution": "Yes"}, {"solution": r"\text{Yes}"}),
    ("math", {"question": "p", "final_answer": "2\\pi", "difficulty": 5.0}, {"prompt": "p", "solution": "2\\pi"}),
    (
        "math",
        {"prompt": [{"role": "user", "content": "p"}], "solution": "$0$"},
        {"prompt": [{"role": "user", "content": "p"}], "solution": "$0$"},
    ),
    ("multiple_choice", {"question": "q", "subject": "s", "choices": ["x", "y"], "answer": 1}, {"answer": "B"}),
    (
        "multiple_choice",
        {"id": "1", "question": "q", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "3"},
        {"answer": "C", "prompt": "q\nA. x\nB. y\nC. z"},
    ),
    (
        "code",
        {"text": "t", "code": "c", "test_list": ["assert f()"], "test_setup_code": "import x"},
        {"tests": ["import x\nassert f()"]},
    ),
    (
        "code",
        {"task_id": "HumanEval/0", "prompt": "def f", "test": CHECK, "entry_point": "f", "canonical_solution": ""},
        {"prompt": "def f", "tests": [CHECK], "entry_point": "f", "prelude": "def f"},
    ),
    (
        "code",
        {"question": "Add.", "input_output": json.dumps({"inputs": ["1 2"], "outputs": ["3"]})},
        {
            "prompt": "Add.\nRead standard input and write standard output.",
            "tests": {"inputs": ["1 2"], "outputs": ["3"]},
        },
    ),
    ("code", APPS, {"prompt": "Add.\nWrite add. Begin with\ndef add(a, b):"}),
]


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def countdown_solution(row: dict[str, Any]) -> str:
    for numbers in itertools.permutations(row["nums"]):
        for x, y in itertools.product("+-*/", repeat=2):
            for form in ("({}{}{}){}{}", "{}{}({}{}{})"):
                text = form.format(numbers[0], x, numbers[1], y, numbers[2])
                try:
                    if eval(text) == row["target"]:
                        return f"<answer>{text}</answer>"
                except ZeroDivisionError:
                    pass
    raise AssertionError(f"{row} has no solution")


def follow(row: dict[str, Any]) -> str:
    text = " ".join(["we walk in the rain"] * 6)
    arguments = {k: v for given in row["kwargs"] for k, v in given.items() if v is not None}
    text += " " + " ".join(arguments.get("keywords", []))
    return f'"{text}"' if "startend:quotation" in row["instruction_id_list"] else text


SOLUTIONS = {
    "sums": lambda row: f" {row['answer']}\n",
    "gsm8k": lambda row: rf"So it is \boxed{{{row['answer']}}}.",
    "math": lambda row: rf"So it is $\boxed{{{row['solution']}}}$.",
    "countdown": countdown_solution,
    "instructions": follow,
    "multiple_choice": lambda row: rf"It is \boxed{{{row['answer']}}}.",
    "geometry3k": lambda row: rf"So it is $\boxed{{{row['solution']}}}$.",
    "chartqa": lambda row: rf"It is \boxed{{{row['answer'][0]}}}.",
    "code": lambda row: f"Here it is:\n```python\n{row['code']}\n```",
}


@pytest.mark.parametrize(("task", "published", "expected"), PUBLISHED, ids=lambda v: v if isinstance(v, str) else "")
def test_rows_as_published(task, published, expected):
    row = load_task(task).row_map(published)
    assert {k: row[k] for k in expected} == expected
    columns = tuple(k for k in row if k not in ("prompt", "image", "images"))
    assert load_prompts([published], row_map=load_task(task).row_map).columns == columns


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("gsm8k", {"question": "q", "answer": "no marker"}, "must have '####' before its number"),
        ("math", {"problem": "p"}, "one of .*'solution'"),
        ("multiple_choice", {"question": "q", "choices": ["a", "b"], "answer": 2}, "answer=2 must be one of 2 choices"),
        ("multiple_choice", {"question": "q", "choices": ["a", "b"], "answer": "Z"}, "ValueError"),
        ("code", {"text": "t"}, "'test_list', 'test' and 'entry_point', or 'inputs'"),
        ("countdown", {"numbers": [1], "target": 1}, "KeyError: 'nums'"),
    ],
)
def test_rows_out_of_format(task, row, message):
    with pytest.raises(ValueError, match=f"row 0 does not have the expected format: .*{message}"):
        load_prompts([row], row_map=load_task(task).row_map)


def test_unknown_tasks_are_refused():
    with pytest.raises(ValueError, match=r"'gsm' is unknown.*'countdown'"):
        load_task("gsm")


@pytest.mark.parametrize("name", STANDARD)
def test_generated_rows(name):
    task = TASKS[name]
    options = {"eval_size": 20} | ({} if name in PICTURES else {"tokenizer": build_tokenizer()})
    train, held_out = task.load("embedded", **options)
    assert train.rows == task.load("embedded", **options)[0].rows != task.load("embedded", seed=1, **options)[0].rows
    assert len(held_out) == 20
    assert not {str(row["query"]) for row in train} & {str(row["query"]) for row in held_out}
    assert train.conversational and train.columns == held_out.columns


@pytest.mark.parametrize("name", [n for n in STANDARD if n in SOLUTIONS], indirect=True)
def test_right_answers_earn_all_and_wrong_ones_less(name):
    task = TASKS[name]
    raw = task.synthetic_rows("train", 24, 0)
    rows = [row if task.row_map is None else task.row_map(row) for row in raw]
    right = [message(SOLUTIONS[name](published | row)) for row, published in zip(rows, raw, strict=True)]
    wrong = [message("" if name == "instructions" else "I do not know"), message("")] * 12
    columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
    for function in [*task.make_rewards(), task.make_scorer()]:
        for completions, most in ((right, 1.0), (wrong, 0.99)):
            batch = RewardBatch([row["prompt"] for row in rows], completions, [[1]] * 24, columns)
            scores = call_reward(function, batch).scores
            assert max(scores) <= most if most < 1 else scores == [1.0] * 24, (name, scores)


def scores(task, rows: list[dict[str, Any]], completions: list[str]) -> list[list[float | None]]:
    """Return the scores of each reward of a task and of its scorer on published rows."""
    rows = [task.row_map(row) for row in rows]
    columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
    batch = RewardBatch([row["prompt"] for row in rows], completions, [[1]] * len(rows), columns)
    return [call_reward(function, batch).scores for function in [*task.make_rewards(), task.make_scorer()]]


@pytest.mark.usefixtures("sandboxed")
def test_functions_of_humaneval_and_apps_are_judged():
    programs = ["def undo(s):\n    return s[::-1]", "def undo(s):\n    return s"]
    programs += ["def add(a, b):\n    return a + b", "def add(a, b):\n    return a - b"]
    assert scores(TASKS["code"], [HUMANEVAL, HUMANEVAL, APPS, APPS], programs) == [[1.0, 0.0, 1.0, 0.0]] * 2


def test_numbers_of_charts_may_be_five_percent_off_and_texts_may_not():
    image = {"image": PICTURE, "query": "q", "human_or_machine": 0}
    rows = [image | {"label": [label]} for label in ("200", "200", "14%", "2014", "Rice", "Rice", "United States")]
    texts = [r"\boxed{190}", r"\boxed{189}", r"\boxed{0.142}", "1990", r"\boxed{rice}", "Rye", "So:\nunited  states"]
    assert scores(TASKS["chartqa"], rows, texts) == [[1, 0, 1, 1, 1, 0, 1]] * 2


@pytest.mark.parametrize("name", PICTURES)
def test_generated_pictures_show_the_question_of_their_row(name):
    rows = TASKS[name].synthetic_rows("train", 12, 0)
    pictures = [row["images"][0] if "images" in row else row["image"] for row in rows]
    assert len({picture.tobytes() for picture in pictures}) == len(rows)  # equal questions differ in the picture
    assert [TASKS[name].synthetic_rows("train", 12, 0)[i] for i in (0, 11)] == [rows[i] for i in (0, 11)]


def test_yes_and_no_are_answers():
    rows = [{"question": "p", "final_answer": answer} for answer in ("Yes", "No", "True", "False")]
    assert (
        scores(TASKS["math"], rows, [r"\boxed{Yes}", r"\boxed{\text{No}}", r"\boxed{False}", "no"])
        == [[1, 1, 0, 0]] * 2
    )


@pytest.mark.parametrize(
    ("name", "one", "another", "none"),
    [
        ("gsm8k", [r"\boxed{1,200}", "#### 1200.0", "So it is $1,200."], [r"\boxed{12}"], ["I do not know."]),
        ("math", [r"\boxed{\frac{1}{2}}", r"\boxed{ \dfrac12 }", r"\boxed{$\frac{1}{2}$}"], [r"\boxed{2}"], ["1/2"]),
        ("multiple_choice", [r"\boxed{C}", r"\boxed{\text{(C) 7}}", "The answer is C."], ["D"], ["It is 7."]),
    ],
)
def test_what_the_reward_takes_for_one_answer_is_one_vote(name, one, another, none):
    vote = TASKS[name].extract_answer
    assert len({vote(text) for text in one}) == 1 and vote(one[0]) not in (None, *map(vote, another))
    assert [vote(text) for text in none] == [None]


@pytest.mark.parametrize("name", [name for name in STANDARD if name not in PICTURES], indirect=True)
def test_a_policy_is_rewarded_in_every_task(name):
    """Run the whole path with a randomly initialized model: prompts, sampling, rewards, rows."""
    task, tokenizer = TASKS[name], build_tokenizer()
    train, _ = task.load("embedded", tokenizer=tokenizer)
    policy = TransformersWrapper(
        build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0}
    )
    rows = LLMCollector(task.env(train, tokenizer, prompts_per_batch=2, num_generations=2), policy).collect()
    assert rows[keys.REWARD].shape == (4, 1, 1) and bool((rows[keys.REWARD] < 1).all())
