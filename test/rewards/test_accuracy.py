from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import pytest

from torchrl_rloo.rewards.accuracy import CosineScaled, MathAccuracy, ReasoningAccuracy
from torchrl_rloo.rewards.judge_worker import wrap_formula
from torchrl_rloo.rewards.matching import boxed_accuracy
from torchrl_rloo.rewards.process_judge import MathJudge

ENDLESS = r"\boxed{9^{9^{9}}}"  # SymPy multiplies it out, in one operation that no signal interrupts


def score(reward, completions, **columns):
    return reward(["?"] * len(completions), completions, [[1]] * len(completions), **columns)


@pytest.fixture(scope="module")
def accuracy():
    return MathAccuracy()


def shared(reward, accuracy):
    """Share the judge of another reward, whose process takes two seconds to start."""
    reward.judge = accuracy.judge
    return reward


def test_the_last_assistant_message_is_judged(accuracy):
    talk = [
        {"role": "assistant", "content": r"\boxed{1}"},
        {"role": "user", "content": r"no, \boxed{5}"},
        {"role": "assistant", "content": r"\boxed{2}"},
        {"role": "tool", "content": r"\boxed{3}"},
    ]
    assert score(accuracy, [talk] * 3, solution=["1", "2", "3"]) == [0, 1, 0]
    assert score(accuracy, [[], [{"role": "assistant", "content": None}]], solution=["1", "1"]) == [0, 0]


def test_the_last_box_counts_and_boxes_close_together_are_one_set(accuracy):
    completions = [rf"\boxed{{5}}{between}\boxed{{7}}" for between in (". So it is ", "," + 70 * "x", " no, ", "\n")]
    assert score(accuracy, completions, solution=["7"] * 4) == [1, 1, 0, 0]
    assert score(accuracy, completions, solution=[r"$\{5,7\}$"] * 4) == [0, 0, 1, 1]


def test_a_gold_that_cannot_be_parsed_abstains(accuracy):
    assert score(accuracy, [r"\boxed{7}"] * 4, solution=["no idea", "", None, "7"]) == [None, None, None, 1]


FORMULAS = {  # golds without dollar signs, as in MATH and DeepMath
    r"2^{10}": ("1024", "2"),
    r"10^{-3}": ("0.001", "10"),
    r"3\sqrt{2}": (r"\sqrt{18}", "3"),
    r"\dfrac{3}{4}": ("0.75", "3"),
    r"\frac12": ("1/2", "12"),
    r"1\frac{1}{2}": ("1.5", "1"),
    "2 1/2": ("2.5", "1"),
    "1.5e3": ("1500", "1.5"),
    "(1,2)": ("(1,2)", "(2,1)"),
    r"\left( 3, \frac{\pi}{2} \right)": (r"(3,\frac{\pi}{2})", "3"),
    "1, 2, 3": ("1,2,3", "3"),
    r"[0,\infty)": (r"[0,\infty)", r"(0,\infty)"),
    "p - q": ("-q+p", "q-p"),
    r"\text{Evelyn}": (r"\text{Evelyn}", r"\text{Carla}"),
    r"50\%": (r"50\%", "5"),
    "50%": (r"50\%", "5"),
    r"\$1,800.50": ("1800.5", "1"),
    r"18 \text{ cm}^2": ("18", "2"),
    r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "2"),
}
OTHERS = {  # plain numbers, units and whole solutions
    "1,234": ("1234", "1"),
    "1 000": ("1000", "0"),
    "42 apples": ("42", "4"),
    "$18": ("18", "1"),
    "\u20ac5": ("5", "4"),
    "5 m": (r"5\text{ m}", "4"),
    r"Let $x=2$ and $y=5$, so $\boxed{3}$. Check: $2+2=4$.": ("3", "4"),
    "48/2 = <<48/2=24>>24, so 48+24 = <<48+24=72>>72.\n#### 1,072": ("1072", "72"),
}


@pytest.mark.parametrize("gold", FORMULAS | OTHERS)
def test_golds_as_datasets_write_them(accuracy, gold):
    right, wrong = (FORMULAS | OTHERS)[gold]
    assert score(accuracy, [rf"\boxed{{{right}}}", rf"\boxed{{{wrong}}}", ""], solution=[gold] * 3) == [1, 0, 0]


VERDICTS = {  # gold: right answers, wrong answers
    "1/3": ([r"0.\overline{3}", r"0.\overline 3", r"0.\bar{3}", r"0.\dot{3}", "0.(3)"], [r"0.\overline{6}", "0.3"]),
    r"1.1\overline{6}": ([r"\frac{7}{6}", r"1.1\overline{6}"], ["1.1", r"1.\overline{16}", "1.16"]),
    r"\frac{3}{7}": ([r"0.\overline{428571}", r"0.\dot{4}2857\dot{1}"], [r"0.4\overline{28571}"]),
    r"-\frac{3}{2}": (["-(3/2)", r"-\left(\frac{3}{2}\right)"], ["(3/2)"]),
    r"[0,\frac19)": ([r"[0,0.\overline{1})"], [r"(0,0.\overline{1})"]),
    r"\log_3 81": (["4", r"\log_2 16"], ["81", "3"]),
    r"\log_{2} 5": ([r"\frac{\ln 5}{\ln 2}", r"\log_2 5"], ["5"]),
    r"\ln e": (["1"], ["e"]),
    r"\frac 1 8": (["0.125"], ["8"]),
    "120_3": (
        ["120_3", "120_{3}", r"120_{\text{three}}", "x = 120_3", "120"],
        ["120_4", "120_{(5)}", "15", "x=120_{12}"],
    ),
    r"10_{\text{two}}": (["10_2"], [r"10_{\text{four}}"]),
    "12_3, 10_3": (["10_3, 12_3"], ["12_4, 10_4"]),
    "9": (
        [
            "4+5=9",
            "x=4+5=9",
            r"\sqrt{81}=9",
            "18/2=9",
            "9",
            "9, 9",
            "100_3=9",
            r"\sum_{i=4}^{5} i = 9",
            "2.25\\cdot 4=9",
        ],
        ["8=9", "4+4=9", "x=8=9", "8=x=9", "4+4=8=9", "8.5=9", r"\frac{17}{2} = 9", r"9^{9^9} = 9", r"\sqrt{80}=9"],
    ),
    "0.67": ([r"\frac{2}{3}=0.67"], [r"\frac{1}{3}=0.67", r"\frac{3}{5}=0.67"]),
    r"\pi": ([r"180^\circ = \pi"], [r"3 = \pi"]),
    "101_2 = 5": (["5"], ["4"]),
    "x=5": (["x=2+3=5"], ["x=6=5", "y=2+3=5"]),
    "n": (["N"], ["m"]),
}


def test_verdicts(accuracy):
    rows = [(gold, answer, right) for gold, v in VERDICTS.items() for right in (1, 0) for answer in v[1 - right]]
    scores = score(accuracy, [rf"\boxed{{{answer}}}" for _, answer, _ in rows], solution=[gold for gold, *_ in rows])
    assert [row for row, found in zip(rows, scores, strict=True) if found != row[2]] == []
    assert accuracy.judge.timeouts == 0
    forms = [accuracy.judge.form(rf"\boxed{{{answer}}}") for answer in ("11_2", "11_{2}", "11_3", "11", "6=5", "7=5")]
    assert forms == ["11_2", "11_2", "11_3", "11", "6 == 5", "7 == 5"]


def test_boxes_without_braces(accuracy):
    texts = [r"So $\boxed 7$ is it.", r"It is \boxed7.", r"\boxed {7}, as asked", r"\boxed{7}. Note \boxed as asked."]
    assert score(accuracy, [*texts, r"\boxed{7}, rather \boxed 8"], solution=["7"] * 5) == [1, 1, 1, 1, 0]
    assert score(accuracy, [r"$\boxed\frac12$, so"], solution=["0.5"]) == [1]


def test_a_gold_that_is_a_percentage(accuracy):
    assert score(accuracy, [r"\boxed{5\%}", r"\boxed{5}", r"\boxed{0.05}", r"\boxed{0.5}"], solution=["5%"] * 4) == [
        1,
        1,
        1,
        0,
    ]


@pytest.mark.parametrize("gold", FORMULAS)
def test_formulas_without_dollar_signs_are_as_with_them(gold):
    assert wrap_formula(gold) is not None


@pytest.mark.parametrize("gold", [*sorted(OTHERS.keys() - {"1,234", "5 m"}), "no idea", "Yes", r"\(x\)", r"\boxed{2}"])
def test_other_golds_are_left_to_math_verify(gold):
    assert wrap_formula(gold) is None


def test_only_reasoning(accuracy):
    texts = [r"<think>\boxed{7}", r"<think>7</think>", "<think>"]
    assert score(accuracy, texts, solution=["7"] * 3) == [1, 0, 0]
    reasoning = shared(ReasoningAccuracy(), accuracy)
    assert score(reasoning, texts, solution=["7"] * 3) == [0, 0, 0]


def test_text_that_is_no_ascii(accuracy):
    assert score(accuracy, ["π\n\ud800 \u2028 \\boxed{7}"], solution=["7"]) == [1]


def test_the_column_can_be_named(accuracy):
    reward = shared(MathAccuracy(column="answer"), accuracy)
    assert score(reward, [r"\boxed{7}"], answer=["7"], solution=["8"]) == [1]
    with pytest.raises(KeyError, match="requires column 'answer'.*'solution'"):
        score(reward, [r"\boxed{7}"], solution=["7"])


def test_a_gold_that_is_no_string_is_named(accuracy):
    with pytest.raises(TypeError, match=r"solution=7 \(int\) must be a string or None"):
        score(accuracy, [r"\boxed{7}"], solution=[7])


def test_a_hang_ends_in_time_is_logged_and_costs_no_other_row(caplog):
    reward = MathAccuracy(timeout=1.0)
    completions, solutions = [r"\boxed{7}", ENDLESS, r"\boxed{7}", r"\boxed{7}"], ["7", "7", "$9^{9^{9}}$", "7"]
    with caplog.at_level(logging.WARNING):
        scores = score(reward, completions, solution=solutions)
    assert scores[:2] == [1, 0] and scores[3] == 1
    assert reward.judge.timeouts == 2 and scores[2] in (None, 0)  # None if parsing the gold hangs
    assert "2 of 4 answers exceeded timeout=1 s" in caplog.text and "gold '$9^{9^{9}}$'" in caplog.text


def test_threads_judge_at_the_same_time(accuracy):
    results = {}

    def judge(i: int) -> None:
        answers = [rf"\boxed{{{n}}}" for n in range(20)]
        results[i] = score(accuracy, answers, solution=[str(i)] * 20)

    threads = [threading.Thread(target=judge, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [float(n == i) for n in range(20)] for i in range(2)}


def test_a_used_reward_pickles_and_its_copy_judges(accuracy):
    score(accuracy, [r"\boxed{7}"], solution=["7"])
    copy = pickle.loads(pickle.dumps(ReasoningAccuracy(["</r>"], column="answer", timeout=3)))
    assert (copy.reasoning_delimiters, copy.column, copy.judge.timeout) == (("</r>",), "answer", 3)
    again = pickle.loads(pickle.dumps(accuracy))
    assert score(again, [r"\boxed{7}"], solution=["7"]) == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_starts_a_worker_of_its_own(accuracy):
    score(accuracy, [r"\boxed{7}"], solution=["7"])

    def judge(connection) -> None:
        connection.send(score(accuracy, [r"\boxed{7}", r"\boxed{8}"], solution=["7"] * 2))

    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=judge, args=(there,), daemon=True)
    process.start()
    assert here.poll(60) and here.recv() == [1, 0]
    process.join()
    assert score(accuracy, [r"\boxed{7}"], solution=["7"]) == [1]


def test_a_worker_killed_between_calls_is_replaced():
    judge = MathJudge()
    assert judge.judge("7", r"\boxed{7}") is True
    judge._idle[0].process.kill()
    judge._idle[0].process.wait()
    assert judge.judge("7", r"\boxed{8}") is False and judge.timeouts == 0


def test_workers_end_with_the_judge():
    judge = MathJudge()
    judge.judge("7", r"\boxed{7}")
    process = judge._idle[0].process
    del judge
    assert process.wait(30) is not None


def test_without_math_verify_the_extra_is_named():
    code = """
        import sys
        sys.modules["math_verify"] = None
        from torchrl_rloo.rewards.accuracy import CosineScaled, MathAccuracy
        from torchrl_rloo.rewards.matching import boxed_accuracy
        CosineScaled(10, correctness=boxed_accuracy)
        MathAccuracy()
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert 'pip install "torchrl_rloo[rewards]"' in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_timeouts_out_of_range(value):
    with pytest.raises(ValueError, match=f"timeout={value}"):
        MathAccuracy(timeout=value)
    with pytest.raises(ValueError, match="column=''"):
        MathAccuracy(column="")
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        MathJudge(workers=0)


def test_reasoning_delimiters(accuracy):
    reward = shared(ReasoningAccuracy(["</a>", "</b>"]), accuracy)
    texts = [r"\boxed{7}", r"x</b>\boxed{7}", r"\boxed{8}</b>\boxed{7}", r"\boxed{7}</b>", r"</a>\boxed{7}</b>"]
    assert score(reward, texts, solution=["7"] * 5) == [0, 1, 1, 0, 1]  # last row: </a> is the first in the list
    assert score(reward, ["no end", "</a>"], solution=["no idea"] * 2) == [0, None]


@pytest.mark.parametrize("value", ["</think>", [], [""], [3]], ids=repr)
def test_reasoning_delimiters_out_of_range(value):
    with pytest.raises(ValueError, match="reasoning_delimiters="):
        ReasoningAccuracy(value)


def test_cosine_of_correct_and_wrong():
    reward = CosineScaled(80, -10.0, 0.0, 1.0, 2.0, correctness=boxed_accuracy)
    lengths = [0, 40, 80, 200]
    ids = [[1] * n for n in lengths] * 2
    scores = reward(["?"] * 8, [r"\boxed{7}"] * 4 + ["8"] * 4, ids, answer=["7"] * 8)
    assert scores == pytest.approx([2, 1.5, 1, 1, -10, -5, 0, 0])


def test_cosine_abstains_where_the_correctness_does():
    reward = CosineScaled(80, correctness=boxed_accuracy)
    assert reward(["?"], [r"\boxed{7}"], [[1]], answer=[None]) == [None]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_len": 0}, "max_len=0"),
        ({"max_len": 9, "min_value_wrong": 0.0}, "min_value_wrong=0.0 and max_value_wrong=-0.5"),
        ({"max_len": 9, "max_value_correct": math.inf}, "max_value_correct=inf"),
        ({"max_len": 9, "min_value_correct": math.nan}, "min_value_correct=nan"),
    ],
)
def test_cosine_settings_out_of_range(arguments, named):
    with pytest.raises(ValueError, match=named):
        CosineScaled(**arguments, correctness=boxed_accuracy)


DEGENERATE = [
    rf"\boxed{{{'(' * 5000}1{')' * 5000}}}", rf"\boxed{{{'{' * 20000}{'}' * 20000}}}", rf"\boxed{{{'x' * 20000}}}",
    rf"\boxed{{{'sqrt{' * 3000}{'}' * 3000}}}", r"\boxed{" * 3000 + "7", "7" * 40_000,
    "the answer is $" * 3000, "\\[" * 9000,
]  # fmt: skip


def test_long_answers_are_wrong_unread(accuracy):
    before, start = accuracy.judge.timeouts, sum(os.times()[:2])
    rows = [text for text in DEGENERATE for _ in range(16)]
    assert score(accuracy, rows, solution=["7"] * len(rows)) == [0] * len(rows)
    assert accuracy.judge.timeouts == before and sum(os.times()[:2]) - start < 20
    assert score(accuracy, [rf"\boxed{{{'x' * 501}}}"] * 2, solution=["no idea", "7"]) == [None, 0]


def test_hanging_rows_are_bounded_and_cost_no_other_row(caplog):
    hanging = [r"\boxed{9^{9^{9}}}", r"\boxed{(10^7)!}", r"\boxed{2^{10^{11}}}", r"\boxed{9^{9^{9^9}}}"] * 6
    reward = MathAccuracy(timeout=0.5)
    with caplog.at_level(logging.WARNING):
        scores = score(reward, [*hanging, r"\boxed{7}", r"\boxed{8}"], solution=["7"] * 26)
    assert scores == [0] * 24 + [1, 0] and reward.judge.timeouts >= 12
    (record,) = [r for r in caplog.records if "exceeded timeout=0.5 s and took most of the time" in r.message]
    assert "of 26 answers" in record.message


def test_the_worker_has_a_short_environment_and_limits(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-trainer")
    judge = MathJudge()
    assert judge.judge("7", r"\boxed{7}") is True
    pid = judge._idle[0].process.pid
    assert "secret-of-the-trainer" not in open(f"/proc/{pid}/environ").read()
    limits = open(f"/proc/{pid}/limits").read()
    assert "2000000000" in next(line for line in limits.splitlines() if line.startswith("Max address space"))
