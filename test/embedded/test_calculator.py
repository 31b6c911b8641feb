"""Calculator task: problems, teachers, and the environment that makes the calls."""

from __future__ import annotations

import random
import re

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.embedded.calculator import (
    P_GUESS,
    P_OMIT_BOX,
    P_WRONG_OPERATOR,
    calculator_demonstrations,
    calculator_prompts,
)
from torchrl_rloo.embedded.resolve import CALCULATOR
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.rewards import boxed_accuracy

TOKENIZER = build_tokenizer()
CALL = re.compile(r"<tool>(\d+)([-+*])(\d+)</tool>")
WORKED_OUT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


def problem(messages) -> tuple[int, str, int]:
    a, operator, b = re.fullmatch(r"What is (\d+)([-+*])(\d+)\?", messages[1]["content"]).groups()
    return int(a), operator, int(b)


def turns(messages) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_splits_hold_every_problem_once_and_never_overlap():
    train = [problem(row["query"]) for row in calculator_prompts("train")]
    test = [problem(row["query"]) for row in calculator_prompts("test")]
    numbers = range(10, 100)
    assert sorted(train + test) == sorted((a, op, b) for a in numbers for op in "+-*" for b in numbers)
    assert len(test) == 2528  # pins the hash: a change would leak held-out problems into old checkpoints' training data
    assert {(b, op, a) for a, op, b in test} == set(test)


def test_rows():
    for row in calculator_prompts("test", size=500):
        a, op, b = problem(row["query"])
        assert set(row) == {"query", "answer"} and row["answer"] == str(WORKED_OUT[op](a, b))
    first, other = calculator_prompts("train", size=50, seed=1), calculator_prompts("train", size=50, seed=2)
    assert calculator_prompts("train", size=50, seed=1) == first != other
    with pytest.raises(ValueError, match="size=2529 must be"):
        calculator_prompts("test", size=2529)
    with pytest.raises(ValueError, match="'validation'"):
        calculator_prompts("validation")


def test_clean_demonstrations_call_the_tool_and_give_its_answer():
    held_out = {problem(row["query"]) for row in calculator_prompts("test")}
    shown = calculator_demonstrations(2000, 0, clean=True)
    answers = []
    for messages in shown:
        a, op, b = problem(messages)
        assert (a, op, b) not in held_out
        answers.append(str(WORKED_OUT[op](a, b)))
        assert [m["role"] for m in messages[2:]] == ["assistant", "tool", "assistant"]
        assert messages[2]["content"] == f"<tool>{a}{op}{b}</tool>" and messages[3]["content"] == answers[-1]
    assert boxed_accuracy(shown, [m[2:] for m in shown], answer=answers) == [1.0] * len(shown)
    said = [text + "<|im_end|>" for messages in shown for text in turns(messages)]
    assert max(map(len, TOKENIZER(said)["input_ids"])) <= 20


def test_the_sloppy_teacher_errs_as_often_as_it_should():
    state = random.getstate()
    shown = calculator_demonstrations(6000, 3)
    assert random.getstate() == state and calculator_demonstrations(6000, 3) == shown
    calls = [messages for messages in shown if len(turns(messages)) == 2]
    wrong = boxes = 0
    for messages in calls:
        a, op, b = problem(messages)
        x, asked, y = CALL.fullmatch(turns(messages)[0]).groups()
        assert (int(x), int(y)) == (a, b) and messages[3]["content"] == str(WORKED_OUT[asked](a, b))
        wrong += asked != op
        boxes += turns(messages)[1] == f"\\boxed{{{messages[3]['content']}}}"
    assert 1 - len(calls) / 6000 == pytest.approx(P_GUESS, abs=0.03)
    assert wrong / len(calls) == pytest.approx(P_WRONG_OPERATOR, abs=0.03)
    assert 1 - boxes / len(calls) == pytest.approx(P_OMIT_BOX, abs=0.04)


# ------------------------------------------------------------------------------------------------------ the environment
def rows_of(say) -> list:
    """Return a finished row for each of four prompts, of a policy that answers ``say(text of the prompt)``."""
    train, _ = CALCULATOR.load(eval_size=1, limit=4)
    env = CALCULATOR.env(train, TOKENIZER, prompts_per_batch=4)

    def turn(request, index) -> ScriptedTurn:
        return ScriptedTurn(TOKENIZER(say(TOKENIZER.decode(request.prompt)) + "<|im_end|>")["input_ids"])

    with ScriptedEngine(turn) as engine:
        policy = vLLMWrapper(engine, tokenizer=TOKENIZER, generate_kwargs={"max_new_tokens": 30})
        return list(LLMCollector(env, policy).collect().unbind(0))


def test_who_calls_the_tool_and_gives_its_answer_is_right():
    def play(text: str) -> str:
        if told := re.search(r"tool\n(-?\d+)<\|im_end\|>", text):
            return f"\\boxed{{{told[1]}}}"
        return "<tool>" + re.search(r"What is (\S+)\?", text)[1] + "</tool>"

    for row in rows_of(play):
        assert float(row[keys.REWARD]) == 1.0 and stop_reason(row) == "answered"
        assert int(row[keys.NUM_TURNS]) == 2 and int(row[keys.NUM_TOOL_CALLS]) == 1
        a, op, b = problem(row[keys.QUERY])
        sampled = f"<tool>{a}{op}{b}</tool><|im_end|>\\boxed{{{row['answer']}}}<|im_end|>"
        assert TOKENIZER.decode(row[keys.TOKENS][row[keys.ACTION_MASK]]) == sampled


def test_who_guesses_makes_no_call_and_who_never_answers_runs_out_of_turns():
    for row in rows_of(lambda text: "\\boxed{7}"):
        assert float(row[keys.REWARD]) == 0.0 and stop_reason(row) == "answered"
        assert int(row[keys.NUM_TURNS]) == 1 and int(row[keys.NUM_TOOL_CALLS]) == 0
    for row in rows_of(lambda text: "<tool>1+</tool>"):
        assert float(row[keys.REWARD]) == 0.0 and stop_reason(row) == "turns"
        assert int(row[keys.NUM_TURNS]) == 2 and row[keys.COMPLETION][1]["content"].startswith("Error")
