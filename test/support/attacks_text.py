"""Hostile completions, and every reader of completions: rewards, parsers of tool calls, extractors of answers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from torchrl_rloo.diagnostics.transcripts import find_calls
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.envs.tools.parsers import PARSERS, RegexParser, without_thinking
from torchrl_rloo.rewards.formats import last_block
from torchrl_rloo.rewards.instructions import CHECKS
from torchrl_rloo.rewards.judge import NoScoreError, parse_verdict
from torchrl_rloo.rewards.matching import final_answer
from torchrl_rloo.rewards.registry import REWARDS, load_reward
from torchrl_rloo.runtime.http import ReplyError, strict_json
from torchrl_rloo.runtime.masking import mask_command, mask_settings

# Rewards that run programs, models or services, which have separate limits and tests
ELSEWHERE = {"code_tests", "ensemble", "llm_judge", "remote_scorer", "sequence_classifier"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SETTINGS: dict[str, dict[str, Any]] = {
    "accuracy": {"timeout": 0.5},
    "reasoning_accuracy": {"timeout": 0.5},
    "cosine_scaled": {"max_len": 100, "correctness": "boxed_accuracy"},
    "for_task": {"task": "t", "function": "boxed_accuracy"},
    "json_schema": {"schema": _SCHEMA},
    "length": {},
    "multiple_choice": {"choices": "12345678"},
    "length_budget": {"function": "boxed_accuracy", "budget": 10},
    "regex_format": {"pattern": r"<think>[^<]*</think>\s*<answer>[^<]*</answer>"},
    "repetition_penalty": {"ngram_size": 3, "max_penalty": -1.0},
    "shuffled": {"function": "boxed_accuracy"},
    "soft_overlong": {"max_completion_len": 100, "soft_punish_cache": 10},
    "stop_properly": {"function": "boxed_accuracy"},
}
COLUMNS: dict[str, Any] = {
    "answer": "7",
    "solution": "7",
    "nums": [3, 5],
    "target": 8,
    "task": "t",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{}],
    "token_budget": 10,
    "truncated": False,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "keywords:existence": {"keywords": ["rain", "*"]},
    "keywords:frequency": {"keyword": "a.a", "frequency": 2, "relation": "at least"},
    "keywords:forbidden_words": {"forbidden_words": ["aa", "<<"]},
    "keywords:letter_frequency": {"letter": "a", "let_frequency": 2, "let_relation": "at least"},
    "language:response_language": {"language": "en"},
    "length_constraints:number_sentences": {"num_sentences": 2, "relation": "at least"},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 2, "relation": "at least"},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.P.S"},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:multiple_sections": {"section_spliter": "SECTION", "num_sections": 2},
    "combination:repeat_prompt": {"prompt_to_repeat": "aaa"},
    "startend:end_checker": {"end_phrase": "aaa"},
    "change_case:capital_word_frequency": {"capital_frequency": 2, "capital_relation": "at least"},
}
PIECES = (
    "a", "A", "1", ".", ",", ";", ":", "!", "?", "*", "_", "-", "+", "=", "/", "\\", "(", "[", "{", "<", ")", "]",
    "}", ">", "|", "`", "'", '"', "#", "$", "%", "^", "~", "&", "@", "x", " ", "\n", "\t", "\r\n", "\xa0", "\u2003",
    "\u3002", "\xe9", "\u6f22", "\U0001f600", "\u0301", "\u202e", "\ud800", "**", "**a", "*a", "* a\n", "- a\n",
    "***", "******", "<<", "<<a", ">>", "<<>>", "[]", "[a", "((", "()", "{}", "{{", "\\boxed{", "\\boxed{1}",
    "\\frac{", "\\frac{1}{", "\\frac1", "\\sqrt{", "\\text{", "\\text{a", "x^{", "x_{", "^", "1,", "1,234", "1 000 ",
    "1/", "1e9", "-1", "$1", "1%", "0.1", "1_", "####", "#### 1\n", "#### a\n", "=1", "\\", "\\(", "\\[", "<think>",
    "</think>", "<think></think>", "<answer>", "</answer>", "<answer>1", "<tool_call>", "</tool_call>",
    '<tool_call>{"', '<tool_call>{"name": "f", "arguments": {', "<function=", "<function=f>", "<parameter=a>",
    "</parameter>", "</function>", "<function=f><parameter=a>1</parameter>", "[TOOL_CALLS]", "[TOOL_CALLS][",
    "[TOOL_CALLS]f[ARGS]{", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '<|python_tag|>{"name": "',
    '{"name": "f", "parameters": {}};', "a.call(", "a.call(b=1)", "```", "```\n", "```python\n", "```json\n{",
    "~~~\n", '{"a":', '"a": [', "'a", '\\"', "answer is ", "answer ", "Answer: A ", "the answer is not A, ", "A or ",
    "(A) ", "A) \n", "I choose ", "so it is ", "P.", "p. s", "SECTION 1", "Mr. ", "p.m. ", "a.b ", "Dr", "n't",
    "It's ", "word ", "AA ", "rain", "if ", "\n\n", "a\n\n", "error", "<tool_response>", "<|", "<0x41>",
)  # fmt: skip


@cache
def readers() -> dict[str, Callable[[str], Any]]:
    """Return functions of a text by name; those that return scores return None or a list of them."""
    found: dict[str, Callable[[str], Any]] = {}
    for name in sorted(REWARDS.keys() - ELSEWHERE):
        found[f"reward {name}"] = _reader(load_reward({"_target_": name, **SETTINGS.get(name, {})}))
    for name, check in CHECKS.items():
        found[f"check {name}"] = _check(partial(check, **ARGUMENTS.get(name, {})))
    for name, parser in PARSERS.items():
        found[f"parser {name}"] = lambda text, parser=parser: parser(text) and None
    calculator = RegexParser(r"<tool>(?P<expression>[^<]*)</tool>", tool="calculator")
    found["parser regex"] = lambda text: calculator(text) and None
    found["vote final_answer"] = lambda text: final_answer(text) and None
    for name, task in TASKS.items():
        if task.extract_answer is not None:
            found[f"vote {name}"] = lambda text, vote=task.extract_answer: vote(text) and None
    found["thinking"] = lambda text: without_thinking(text) and None
    found["code"] = lambda text: last_block(text, ("python", "py")) and None
    found["verdict"] = partial(_quietly, partial(parse_verdict, scale=(0, 10)))
    found["JSON"] = lambda text: _quietly(strict_json, text.encode(errors="replace"))
    found["masks"] = lambda text: mask_settings({"a": [text, mask_command(text)]}) and None
    found["transcript"] = lambda text: find_calls(list(text), [True] * len(text)) and None
    return found


def _quietly(read: Callable[[Any], Any], text: Any) -> None:
    """Read a text that may be refused."""
    with suppress(NoScoreError, ReplyError):
        read(text)


def _reader(reward: Callable[..., list[float | None]]) -> Callable[[str], list[float | None]]:
    columns = {name: [value] for name, value in COLUMNS.items()}
    return lambda text: reward(prompts=["?"], completions=[text], completion_ids=[[1] * 20], **columns)


def _check(check: Callable[[str], bool]) -> Callable[[str], list[float]]:
    return lambda text: [float(check(text))]


def hostile_text(rng: random.Random, chars: int = 3_000) -> str:
    """Return a text of repeated, mixed and nested pieces."""
    text = ""
    while len(text) < chars:
        pieces = rng.choices(PIECES, k=rng.choice((1, 1, 2, 4)))
        text += "".join(pieces) * rng.choice((1, 2, 10, 100, 1000))
    return text[: rng.randrange(1, chars)]


def attack(count: int, seed: int, max_seconds: float = 1.0) -> dict[str, Any]:
    """Give hostile texts to every reader.

    A text is contained if no reader raises, no score is NaN or infinite, and each takes little CPU time.

    Args:
        count: number of texts.
        seed: seed of the texts.
        max_seconds: limit of CPU time of this thread per reader and text.

    Returns:
        ``{"tried": pairs of reader and text, "contained": of them, "failures": messages}``.
    """
    rng, tried, failures = random.Random(seed), 0, []
    for _ in range(count):
        text = hostile_text(rng)
        for name, reader in readers().items():
            tried, start = tried + 1, time.thread_time()
            try:
                scores = reader(text)
                bad = [score for score in scores or [] if score is not None and not math.isfinite(score)]
                fault = f"scores {bad}" if bad else ""
            except Exception as error:
                fault = repr(error)
            if not fault and (seconds := time.thread_time() - start) > max_seconds:
                fault = f"{seconds:.1f} s of CPU time"
            if fault:
                failures.append(f"{name}: {fault} on {text[:80]!r}... of {len(text)} characters")
    return {"tried": tried, "contained": tried - len(failures), "failures": failures}
