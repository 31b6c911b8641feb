"""RewardRunner: isolation of bad samples, counters, quarantine, duplicates and concurrency."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics.checks import CHECKS, Facts, probe_rewards
from torchrl_rloo.diagnostics.checks.probes import find_form_hints
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.rewards.executors import InlineExecutor, ProcessExecutor, ThreadExecutor
from torchrl_rloo.rewards.protocol import RewardBatch, TrainerState
from torchrl_rloo.rewards.runner import MAX_LINES, Quarantine, RewardFailureError, RewardRunner, find_distinct


def batch_of(*completions: str, **columns: Sequence[Any]) -> RewardBatch:
    return RewardBatch(
        [[{"role": "user", "content": f"say {c}"}] for c in completions],
        list(completions),
        [[ord(x) for x in c] for c in completions],
        columns,
        [False] * len(completions),
        TrainerState(global_step=7),
    )


class Number:
    """Reward that returns the number in the completion or raises, and records its calls."""

    def __init__(self, name: str = "number", **attributes: Any):
        self.__name__, self.calls = name, []
        self.__dict__.update(attributes)

    def __call__(self, completions, **_):
        self.calls.append(list(completions))
        return [None if c == "none" else float(c) for c in completions]


def named(name: str, function: Callable) -> Callable:
    function.__name__ = name
    return function


EXECUTORS = [InlineExecutor(), ThreadExecutor(2), ThreadExecutor(1, rows_per_call=3), ThreadExecutor(1, None, None)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_only_bad_rows_get_no_score(executor, caplog):
    runner = RewardRunner([Number(), Number("other")], executor=executor)
    batch = batch_of("1", "nan", "bad", "none", "-inf", "1e39", "2", "worse")
    with caplog.at_level(logging.WARNING):
        scored = runner(batch)
    assert scored.scores == [[1.0, None, None, None, None, None, 2.0, None]] * 2
    counts = {k: v for k, v in runner.counts.items() if not k.endswith("/repeated")}
    assert counts == {f"{n}/{k}": v for n in ("number", "other") for k, v in (("raised", 2), ("not_finite", 3))}
    warnings = [r.getMessage() for r in caplog.records if r.name == "torchrl_rloo.rewards.runner"]
    assert len(warnings) == 4  # one for each function and kind
    assert "reward number: raised on 2 samples" in warnings[0] + warnings[1] and "say bad" in caplog.text


@pytest.mark.parametrize("rows_per_call", [1, 2, None])
def test_rows_of_a_failed_call_are_tried_alone(rows_per_call):
    number = Number()
    runner = RewardRunner(number, executor=ThreadExecutor(1, rows_per_call=rows_per_call))
    assert runner(batch_of("1", "2", "bad", "4")).scores == [[1.0, 2.0, None, 4.0]]
    calls = {
        1: [["1"], ["2"], ["bad"], ["4"]],
        2: [["1", "2"], ["bad", "4"], ["bad"], ["4"]],
        None: [["1", "2", "bad", "4"], ["1"], ["2"], ["bad"], ["4"]],
    }
    assert number.calls == calls[rows_per_call]
    assert runner.counts["number/repeated"] == {1: 0, 2: 2, None: 4}[rows_per_call]
    assert runner.latency["number/call"].n == len(number.calls)
    assert runner.latency["number/sample"].n == sum(map(len, number.calls))


@pytest.mark.parametrize("returned", [[], [1.0] * 5, None, "abcd", 1.0])
def test_what_is_no_list_of_scores_is_no_score(returned):
    runner = RewardRunner(named("odd", lambda **_: returned))
    assert runner(batch_of(*"1234")).scores == [[None] * 4]
    assert runner.counts["odd/malformed"] == 4


def test_identical_trajectories_are_scored_once():
    number = Number()
    runner = RewardRunner(number)
    batch = batch_of("1", "2", "1", "1", "bad", "bad", level=[1, 1, 1, 2, 1, 1])
    assert runner(batch).scores == [[1.0, 2.0, 1.0, 1.0, None, None]]
    assert number.calls[0] == ["1", "2", "1", "bad"]
    assert runner.counts == {"number/duplicates": 2, "number/raised": 2, "number/repeated": 4}
    every = RewardRunner(Number(), deduplicate=False)
    every(batch_of("1", "1"))
    assert every.functions[0].calls == [["1", "1"]] and not every.counts


def test_what_identical_is():
    rows = {"prompts": "pqpppp", "completions": "aaabaa", "ids": [[1]] * 4 + [[2], [1]], "answer": "xxxxxy"}
    batch = RewardBatch(list(rows["prompts"]), list(rows["completions"]), rows["ids"], {"answer": rows["answer"]})
    assert find_distinct(batch) == ([0, 1, 3, 4, 5], [0, 1, 0, 2, 3, 4])
    cut = RewardBatch(["p"] * 3, ["a"] * 3, [[1]] * 3, {}, [False, True, False])
    assert find_distinct(cut) == ([0, 1], [0, 1, 0])

    class Odd:
        def __eq__(self, other):
            raise ValueError("ambiguous")

    odd = Odd()
    assert find_distinct(RewardBatch(["p"] * 3, ["a"] * 3, [[1]] * 3, {"x": [odd, Odd(), odd]}))[1] == [0, 1, 0]
    assert find_distinct(RewardBatch([], [], [])) == ([], [])


@pytest.mark.parametrize("executor", [InlineExecutor(), ThreadExecutor(2)])
def test_a_function_that_compares_rows_sees_all_of_them_in_one_call(executor):
    number = Number(whole_batch=True)
    runner = RewardRunner(number, executor=executor)
    assert runner(batch_of("1", "1", "2")).scores == [[1.0, 1.0, 2.0]]
    assert number.calls == [["1", "1", "2"]] and not runner.counts
    assert runner(batch_of("1", "bad", "2")).scores == [[None] * 3] and len(number.calls) == 2
    assert runner.counts == {"number/raised": 3}


def test_extras_and_metrics_come_together():
    def logs(completions, log_extra, log_metric, **_):
        if "bad" in completions:
            raise ValueError
        log_extra("length", [len(c) for c in completions])
        for c in completions:
            log_metric("length", len(c))
        return [0.0] * len(completions)

    def more(completions, log_extra, **_):
        log_extra("shout", [c.upper() for c in completions])
        log_extra("length", [None, *[-1] * (len(completions) - 1)])
        return [0.0] * len(completions)

    scored = RewardRunner([logs, more])(batch_of("a", "bb", "a", "bad"))
    assert scored.extra == {"length": [1, -1, 1, -1], "shout": ["A", "BB", "A", "BAD"]}
    assert scored.metrics == {"length": 1.5}  # of the two distinct trajectories


def test_failures_in_a_row_end_the_run_with_evidence(tmp_path):
    path = tmp_path / "bad.jsonl"
    fine = named("fine", lambda completions, **_: [0.0] * len(completions))
    runner = RewardRunner([Number(), fine], max_consecutive_failures=6, quarantine=path)
    for completions in (("bad", "bad", "b1"), ("b2", "b3", "1"), ("b4", "nan", "b5"), ("b6", "none", "b7")):
        runner(batch_of(*completions))
    runner(batch_of("b8", "b9"))
    runner(batch_of())  # does not reset the consecutive failures
    with pytest.raises(RewardFailureError, match=r"reward number failed on 6 samples in a row") as caught:
        runner(batch_of("x1", "x2", "x3", "4"))
    message = str(caught.value)
    assert "ValueError: could not convert string to float: 'x3'" in message and str(path) in message
    assert "max_consecutive_failures=6" in message and "'raised': 14" in message
    assert isinstance(caught.value, RuntimeError)
    patient = RewardRunner(Number(), max_consecutive_failures=None)
    assert patient(batch_of(*["bad"] * 500)).scores == [[None] * 500]


def test_the_counters_survive_a_restart(tmp_path):
    path = tmp_path / "bad.jsonl"
    runner = RewardRunner(Number(), max_consecutive_failures=3, quarantine=path)
    runner(batch_of("1", "a", "b"))
    resumed = RewardRunner(Number(), max_consecutive_failures=3, quarantine=path)
    counts = resumed.counts
    resumed.load_state_dict(json.loads(json.dumps(runner.state_dict())))
    assert resumed.state_dict() == runner.state_dict() and resumed.counts is counts and counts["number/raised"] == 2
    with pytest.raises(RewardFailureError):
        resumed(batch_of("c"))
    assert resumed.quarantine.lines["number"] == 3 == len(path.read_text().splitlines())


def test_the_quarantine_has_all_that_it_takes_to_see_why(tmp_path):
    path = tmp_path / "new" / "bad.jsonl"
    runner = RewardRunner(Number(), quarantine=path)
    runner(batch_of("1", "bad", "inf", answer=["x", object, {("a", 1): math.nan}]))
    raised, infinite = map(json.loads, path.read_text().splitlines())
    assert raised["function"] == "number" and raised["kind"] == "raised" and raised["step"] == 7
    assert raised["error"] == "ValueError: could not convert string to float: 'bad'"
    assert "Traceback" in raised["traceback"] and "float(c)" in raised["traceback"]
    assert raised["prompt"] == [{"role": "user", "content": "say bad"}] and raised["completion"] == "bad"
    assert raised["completion_ids"] == [98, 97, 100] and raised["columns"] == {"answer": "<class 'object'>"}
    assert raised["truncated"] is False and raised["seconds"] >= 0
    assert infinite["kind"] == "not_finite" and infinite["columns"] == "{'answer': {('a', 1): nan}}"


def test_the_quarantine_never_fails_a_run_and_never_fills_the_disk(tmp_path, caplog):
    class Rude:
        def __repr__(self):
            raise RuntimeError("no")

    path = tmp_path / "bad.jsonl"
    quarantine = Quarantine(path)
    cycle: list = []
    cycle.append(cycle)
    quarantine.add("f", {"value": cycle, "lone": "\ud800"})
    quarantine.add("g", {"value": Rude()})
    for i in range(MAX_LINES + 5):
        quarantine.add("f", {"i": i})
    assert len(path.read_text().splitlines()) == MAX_LINES and "RuntimeError: no" in caplog.text
    assert quarantine.lost == {"g": 1}
    Quarantine(tmp_path / "bad.jsonl" / "below_a_file").add("f", {})
    Quarantine(None).add("f", {})
    with pytest.raises(ValueError, match="is a folder"):
        Quarantine(tmp_path)


def test_async_functions_run_beside_each_other_and_beside_the_rest():
    under_way: set[str] = set()

    def make(name: str) -> Callable:
        async def waits_for_the_others(completions, **_):
            under_way.add(name)
            while len(under_way) < 4:
                await asyncio.sleep(0.01)
            return [1.0] * len(completions)

        return named(name, waits_for_the_others)

    def here(completions, **_):
        there(completions, "here")
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    def there(completions, name="there", **_):
        under_way.add(name)
        end = time.monotonic() + 60
        while len(under_way) < 4:
            assert time.monotonic() < end, f"only {under_way} run at the same time"
            time.sleep(0.01)
        return [1.0] * len(completions)

    executors = {"there": ThreadExecutor(4, 60.0), "b": ThreadExecutor(4, 60.0)}
    runner = RewardRunner([make("a"), here, there, make("b")], executor=executors)
    assert runner(batch_of("x", "y", "z")).scores == [[1.0] * 3] * 4
    assert runner.latency["a/call"].n == 1 and runner.latency["b/call"].n == 3  # rows_per_call of its executor
    runner.close()


def test_an_async_function_has_the_time_limit_of_its_executor():
    async def judge(completions, **_):
        await asyncio.sleep(1000 if completions == ["hang"] else 0)
        return [1.0] * len(completions)

    runner = RewardRunner(judge, executor=ProcessExecutor(1, 1.0))
    assert runner(batch_of("a", "hang", "b")).scores == [[1.0, None, 1.0]]
    assert runner.counts == {"judge/timed_out": 1}
    runner.close()


def test_an_interrupt_is_not_taken_for_a_failure():
    def interrupted(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RewardRunner(interrupted)(batch_of("a"))


def test_an_empty_batch_and_a_copy():
    async def judge(completions, **_):
        return [1.0] * len(completions)

    runner = RewardRunner([Number(), judge])
    assert runner(batch_of()).scores == [[], []]
    runner(batch_of("1"))
    copy = pickle.loads(pickle.dumps(RewardRunner(Number(), executor=ThreadExecutor(2))))
    assert copy(batch_of("1", "2")).scores == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("functions", "settings", "message"),
    [
        ([Number(), Number()], {}, r"'number', 'number'"),
        ([Number()], {"max_consecutive_failures": 0}, "max_consecutive_failures=0"),
        ([Number()], {"executor": {"nombre": InlineExecutor()}}, r"\['nombre'\].*\['number'\]"),
    ],
)
def test_bad_arguments_are_refused(functions, settings, message):
    with pytest.raises(ValueError, match=message):
        RewardRunner(functions, **settings)


def test_a_function_that_a_worker_cannot_get_is_refused_at_once():
    with pytest.raises(TypeError, match="cannot be sent"):
        RewardRunner(Number(lock=threading.Lock()), executor=ProcessExecutor())


ROWS = [{"prompt": f"{i}+{i}?", "answer": str(2 * i)} for i in range(6)]
TO_TEXT, TO_CHAT = "it expects texts, but gets chat messages: set data.chat=false", "it expects chat messages, but gets"


def unique(completions, **columns):  # the first four are for texts
    return [len(set(completion)) for completion in completions]


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


async def matches(prompts, completions, answer, **columns):
    return [float(bool(re.search(gold, text))) for text, gold in zip(completions, answer, strict=True)]


def says(completions, answer, **columns):
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


def last_message(completions, **columns):  # for messages
    return [float(len(completion[-1]["content"])) for completion in completions]


def broken(completions, other, **columns):  # for nothing
    return [other[0]["missing"]]


def flat(completions, **columns):
    return [1.0] * len(completions)


TEXTS = [unique, length, matches, says]


@pytest.mark.parametrize("function", [*TEXTS, last_message, broken, flat, boxed_accuracy], ids=lambda f: f.__name__)
def test_only_a_function_that_scores_the_other_form_alone_is_advised(function):
    tokenizer = build_tokenizer()
    for chat in (True, False):
        hints = find_form_hints([function], load_prompts(ROWS, chat=chat), tokenizer)
        expected = TO_TEXT if chat and function in TEXTS else TO_CHAT if not chat and function is last_message else None
        assert list(hints) == [function.__name__] * bool(expected) and all(expected in h for h in hints.values())


@pytest.mark.parametrize(("function", "check"), [(unique, "reward failures"), (length, "reward order")])
def test_the_checks_before_a_run_advise(function, check):
    train, tokenizer = load_prompts(ROWS, chat=True), build_tokenizer()
    facts = Facts(
        None,
        train,
        train,
        tokenizer,
        functions=[function.__name__],
        probes=probe_rewards([function], train, tokenizer),
        form_hints=find_form_hints([function], train, tokenizer),
    )
    found = CHECKS[check](facts)
    (finding,) = [found] if not hasattr(found, "__next__") else found
    assert finding.level == "error" and finding.remedy.startswith(TO_TEXT)


def test_a_run_that_it_fails_says_so_and_a_failure_of_another_kind_does_not(caplog):
    said = [[{"role": "assistant", "content": text}] for text in ("a", "bc", "")]
    batch = RewardBatch(
        [[{"role": "user", "content": "?"}]] * 3, said, [[1]] * 3, {"answer": ["2"] * 3, "other": [{}] * 3}
    )
    for function, advised in ((unique, True), (matches, True), (broken, False)):
        with pytest.raises(RewardFailureError, match="samples in a row") as failure:
            RewardRunner(function, max_consecutive_failures=3)(batch)
        assert (TO_TEXT in str(failure.value)) == (TO_TEXT in caplog.records[-1].getMessage()) == advised
