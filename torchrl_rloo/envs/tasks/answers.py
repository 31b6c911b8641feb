"""Tasks whose answers are text that a function checks: numbers, formulas, letters and instructions.

Sources: GSM8K (Cobbe et al. 2021, arXiv 2110.14168), MATH (Hendrycks et al. 2021), DeepMath (He et al. 2025), Countdown
(Jiayi-Pan/Countdown-Tasks-3to4, the task of TinyZero), MMLU (Hendrycks et al. 2020), ARC (Clark et al. 2018) and IFEval
(Zhou et al. 2023). The functions that generate rows take the arguments of ``Task.synthetic_rows``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.choices import MultipleChoice
from torchrl_rloo.rewards.matching import NumericMatch, find_number, last_boxed, number_form
from torchrl_rloo.rewards.process_judge import shared_judge

_STORIES = (
    "{name} has {a} apples and buys {b} more. How many apples does {name} have now?",
    "{name} read {a} pages on Monday and {b} on Tuesday. How many pages did {name} read?",
    "A bus carries {a} people and {b} more get on with {name}. How many people besides {name} are on the bus?",
)
_NAMES = ("Ann", "Ben", "Carla", "Dan", "Eve", "Finn")


def gsm8k_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt and an answer: the number after ``####``, without thousands separators."""
    solution, marker, answer = example["answer"].rpartition("####")
    if not marker:
        raise ValueError(f"the answer must have '####' before its number, got {example['answer'][-100:]!r}")
    return {"prompt": example["question"], "answer": answer.strip().replace(",", "")}


def word_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate word problems on sums, in GSM8K's columns."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    for _ in range(size or 512):
        # The first number is even in training and odd in the test, so that the splits share no problem
        a, b = 2 * rng.randrange(5, 50) + (split == "test"), rng.randrange(2, 50)
        story = rng.choice(_STORIES).format(name=rng.choice(_NAMES), a=a, b=b)
        rows.append({"question": story, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}"})
    return rows


_SEARCH_PLACES = NumericMatch().where


def number_vote(text: str) -> str | None:
    """Return the number that a completion answers, found as the reward finds it: equal numbers are one vote."""
    return number_form(find_number(text, _SEARCH_PLACES))


GSM8K = Task(
    name="gsm8k",
    synthetic_rows=word_problems,
    row_map=gsm8k_row,
    rewards=("numeric_match",),
    scorer="numeric_match",
    dataset={"source": "openai/gsm8k", "name": "main", "split": "train"},
    eval_split="test",
    system_prompt="Think step by step, then put the final number in \\boxed{}.",
    extract_answer=number_vote,
)


def sum_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Return sums of a number below 100 and a digit, each once in one of the splits, in an order by ``seed``."""
    problems = [(a, b) for a in range(10, 100) for b in range(1, 10) if ((7 * a + b) % 8 == 0) == (split == "test")]
    random.Random(f"{seed} {split}").shuffle(problems)
    return [{"prompt": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in problems[:size]]


# For base models: data.examples=3 generate.stop_strings=["\n"]
SUMS = Task(name="sums", synthetic_rows=sum_problems, rewards=("exact_match",), scorer="exact_match")


_PROBLEMS = ("problem", "question", "prompt")
_ANSWERS = ("final_answer", "answer", "solution")
_WORDS = ("True", "False", "Yes", "No")  # DeepMath has these answers without dollar signs


def math_row(example: Mapping[str, Any]) -> dict[str, Any]:
    r"""Convert a row to a prompt and an answer; the answer of a worked solution is the content of its last box.

    Yes, no, true and false become ``\text{...}``, since math-verify cannot parse plain words.
    """
    problem = next((example[name] for name in _PROBLEMS if name in example), None)
    answer = next((example[name] for name in _ANSWERS if name in example), None)
    if problem is None or answer is None:
        raise ValueError(f"a row must have one of {_PROBLEMS} and one of {_ANSWERS}")
    answer = str(answer).strip()
    boxed = last_boxed(answer.replace(r"\fbox", r"\boxed"))
    if boxed == "":
        raise ValueError(
            f"the box must hold an answer, got {answer[-100:]!r}; remove the row, or set drop_bad_rows=True"
        )
    return {"prompt": problem, "solution": rf"\text{{{answer}}}" if answer in _WORDS else boxed or answer}


def formula_vote(text: str) -> str | None:
    r"""Return the canonical form of a completion's answer, as the reward compares it: equal answers are one vote.

    Formulas are equal where their values are. The name in ``x=5`` does not count, except in lines such as ``y=5``.
    """
    return shared_judge().form(text)


def formula_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate linear equations, sums of fractions and powers, in MATH's columns."""
    rng = random.Random(f"{seed} {split}")
    parity = int(split == "test")  # of the first number, so that the splits share no problem
    rows = []
    for i in range(size or 512):
        a, b, c = 2 * rng.randrange(1, 40) + parity, rng.randrange(2, 20), rng.randrange(1, 30)
        kinds = (
            (f"Solve ${b}x + {a} = {a + b * c}$ for $x$.", str(c), "Algebra"),
            (rf"What is $\frac{{1}}{{{a}}} + \frac{{1}}{{{b}}}$?", rf"\frac{{{a + b}}}{{{a * b}}}", "Prealgebra"),
            (f"What is ${a}^2 - {b}$?", str(a * a - b), "Prealgebra"),
        )
        problem, answer, kind = kinds[i % len(kinds)]
        solution = rf"The answer is $\boxed{{{answer}}}$."
        rows.append({"problem": problem, "level": "Level 1", "type": kind, "solution": solution})
    return rows


MATH = Task(
    name="math",
    synthetic_rows=formula_problems,
    row_map=math_row,
    rewards=("accuracy",),
    scorer="accuracy",
    dataset={"source": "trl-lib/DeepMath-103K", "split": "train"},
    system_prompt="Think step by step, then put the final answer in \\boxed{}.",
    extract_answer=formula_vote,
)


_COUNTDOWN = (
    "Using the numbers {numbers}, make an expression that equals {target}. You may use + - * / and parentheses, and "
    "must use each number exactly once. Think first, then give the expression in <answer> </answer> tags, as in "
    "<answer>(1 + 2) * 3</answer>."
)


def countdown_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to one with a prompt in words."""
    numbers, target = [int(n) for n in example["nums"]], int(example["target"])
    prompt = _COUNTDOWN.format(numbers=", ".join(map(str, numbers)), target=target)
    return {"prompt": prompt, "nums": numbers, "target": target}


def countdown_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate rows of three numbers and a target that some expression of them reaches."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    while len(rows) < (size or 512):
        a, b, c = rng.randrange(1, 20), rng.randrange(1, 20), rng.randrange(1, 10)
        target = rng.choice((a + b + c, a + b - c, (a + b) * c, a * b - c, a - b + c))
        # Only test targets end in 0, so that the splits share no prompt
        if target > 0 and (target % 10 == 0) == (split == "test"):
            numbers = [a, b, c]
            rng.shuffle(numbers)
            rows.append({"target": target, "nums": numbers})
    return rows


COUNTDOWN = Task(
    name="countdown",
    synthetic_rows=countdown_problems,
    row_map=countdown_row,
    rewards=({"_target_": "countdown", "format_score": 0.1},),
    scorer="countdown",
    dataset={"source": "Jiayi-Pan/Countdown-Tasks-3to4", "split": "train"},
)


LETTERS = "ABCDEFGHIJ"
_PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")


def choice_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt with lettered choices, and the letter of the right one.

    MMLU has a list of ``choices`` and an index as ``answer``. ARC has a mapping of ``text`` and ``label``, and
    ``answerKey``.
    """
    choices, answer = example["choices"], example.get("answer", example.get("answerKey"))
    labels = list(LETTERS)
    if isinstance(choices, Mapping):
        labels, choices = list(choices["label"]), choices["text"]
    index = answer if isinstance(answer, int) else (labels if answer in labels else list(LETTERS)).index(answer)
    if not 2 <= len(choices) <= len(LETTERS) or not 0 <= index < len(choices):
        raise ValueError(
            f"answer={answer!r} must be one of {len(choices)} choices, of which there must be 2 to {len(LETTERS)}"
        )
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return {"prompt": "\n".join([example["question"], *lines]), "answer": LETTERS[index]}


def choice_questions(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate questions on the order of planets and of numbers, in MMLU's columns."""
    rng = random.Random(f"{seed} {split}")
    rows = []
    for i in range(size or 512):
        # Training asks for the largest, the test for the smallest, so that the splits share no prompt
        if i % 2:
            choices = [str(n) for n in rng.sample(range(10, 1000), 4)]
            order, subject = [int(c) for c in choices], "elementary_mathematics"
            question = f"Which of the numbers {', '.join(choices)} is the {{}}?".format(_END[split][0])
        else:
            choices = rng.sample(_PLANETS, 4)
            order, subject = [_PLANETS.index(c) for c in choices], "astronomy"
            question = f"Which of {', '.join(choices)} is the {{}} the Sun?".format(_END[split][1])
        answer = order.index(_END[split][2](order))
        rows.append({"question": question, "subject": subject, "choices": choices, "answer": answer})
    return rows


_END = {"train": ("largest", "farthest from", max), "test": ("smallest", "closest to", min)}

MULTIPLE_CHOICE = Task(
    name="multiple_choice",
    synthetic_rows=choice_questions,
    row_map=choice_row,
    rewards=("multiple_choice",),
    scorer="multiple_choice",
    dataset={"source": "cais/mmlu", "name": "all", "split": "auxiliary_train"},
    eval_split="test",
    system_prompt="Think, then put the letter of the right choice in \\boxed{}.",
    extract_answer=MultipleChoice().find_choice,
)


_TOPICS = ("rain", "bread", "trains", "the sea", "a lost key", "winter", "gardens", "old maps", "music", "bridges")


def instruction_requests(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Generate requests for a few words on a topic with one or two instructions, in IFEval's columns.

    See :class:`Task`.
    """
    rng = random.Random(f"{seed} {split}")
    topics = _TOPICS[:7] if split == "train" else _TOPICS[7:]  # the splits share no topic
    rows = []
    for i in range(size or 256):
        n, topic = rng.randrange(3, 30), rng.choice(topics)
        # Instructions that code can verify
        instructions = [
            ("Do not use any commas.", "punctuation:no_comma", {}),
            ("Use lowercase letters only.", "change_case:english_lowercase", {}),
            (f"Use at least {n} words.", "length_constraints:number_words", {"num_words": n, "relation": "at least"}),
            (f"Use the word {topic.split()[-1]}.", "keywords:existence", {"keywords": [topic.split()[-1]]}),
            ("Wrap the whole answer in double quotation marks.", "startend:quotation", {}),
        ]
        chosen = rng.sample(instructions, rng.choice((1, 2)))
        rows.append(
            {
                "key": i,
                "prompt": " ".join([f"Write about {topic}.", *(words for words, _, _ in chosen)]),
                "instruction_id_list": [name for _, name, _ in chosen],
                "kwargs": [arguments for _, _, arguments in chosen],
            }
        )
    return rows


INSTRUCTIONS = Task(
    name="instructions",
    synthetic_rows=instruction_requests,
    rewards=({"_target_": "instruction_following", "partial": True},),
    scorer="instruction_following",
    dataset={"source": "google/IFEval", "split": "train"},
)
