r"""Smoke test of reward functions: constructed completions, right, wrong, empty and hostile, and their scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.diagnostics.checks.base import Probe
from torchrl_rloo.diagnostics.checks.prompts import prompt_text
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.rewards.executors import Executor, InlineExecutor
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    RewardFunction,
    find_missing_columns,
    reward_name,
)
from torchrl_rloo.rewards.runner import form_hint
from torchrl_rloo.runtime.lookup import is_async

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = 4  # prompts of each task to probe
ANSWERS = ("answer", "final_answer", "ground_truth", "solution")  # columns that hold the text of an answer
FORMATS = (  # texts that state an answer
    "{}",
    "<think>Let me see.</think>\\boxed{{{}}}",
    "So the answer is $\\boxed{{{}}}$.",
    "The answer is {}",
    "<think>Let me see.</think>{}",
    "<think>Let me see.</think><answer>{}</answer>",
    "Step by step.\n#### {}",
)
MANY = 12  # wrong answers in the hostile list of guesses
CALLS = 32  # calls between two looks at time-outs
MAX_TIMEOUTS = 4
TEXT = (  # plain text that every language model of English has learned to expect
    "The sun rises in the east and sets in the west. In summer the days are long and warm, and in winter they are "
    "short and cold. Most people work during the day and sleep at night. Water freezes at zero degrees and boils at "
    "one hundred degrees."
)
LONG = 20_000  # characters of the hostile long completion


def probe_rewards(
    functions: Sequence[RewardFunction],
    dataset: PromptDataset,
    tokenizer: Any,
    *,
    weights: Sequence[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    executor: Executor | Mapping[str, Executor] | None = None,
) -> list[Probe]:
    r"""Score constructed completions of some prompts, one call each, so that a failure has one cause.

    If the dataset has a column of answers, it states the right answer and that of another prompt in several formats.

    Args:
        functions: reward functions.
        dataset: training prompts.
        tokenizer: tokenizer, for the ids of completions.
        weights: one weight per function. None means 1 each.
        clip_range: bounds of the weighted sum.
        executor: executor of the functions, or a mapping from their names. None runs them inline.

    Returns:
        A probe for each prompt and completion.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> from torchrl_rloo.embedded import addition_prompts, build_tokenizer
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> prompts = load_prompts(addition_prompts("train", size=8))
        >>> probes = probe_rewards([boxed_accuracy], prompts, build_tokenizer())
        >>> {kind: max(p.value for p in probes if p.kind == kind) for kind in ("right", "wrong", "empty")}
        {'right': 1.0, 'wrong': 0.0, 'empty': 0.0}
    """
    if not functions:
        return []
    cases, batch = _make_batch(_choose_rows(dataset), dataset, tokenizer)
    scores, failures = [], [{} for _ in cases]
    for function in functions:
        results = score_each(function, batch, executor)
        scores.append([r.scores[0] if isinstance(r, RewardCall) else None for r in results])
        for case, result in zip(failures, results, strict=True):
            if isinstance(result, RewardFailure):
                case[reward_name(function)] = result.message
    values = total_values(scores, weights, clip_range)
    return [Probe(i, kind, value, f) for (i, kind, _), value, f in zip(cases, values, failures, strict=True)]


def find_form_hints(
    functions: Sequence[RewardFunction],
    dataset: PromptDataset,
    tokenizer: Any,
    executor: Executor | Mapping[str, Executor] | None = None,
) -> dict[str, str]:
    """Return advice by name of each function that expects the other form of completions, text or messages."""
    _, batch = _make_batch(dataset.rows[:1], dataset, tokenizer)
    hints = {reward_name(f): form_hint(f, batch, partial(_choose_executor(f, executor).run, f)) for f in functions}
    return {name: hint for name, hint in hints.items() if hint}


def _make_batch(
    rows: Sequence[dict[str, Any]], dataset: PromptDataset, tokenizer: Any
) -> tuple[list[tuple[int, str, str]], RewardBatch]:
    """Return index of the row, kind and text of each completion to probe, and all of them as a batch."""
    cases = [(i, kind, text) for i, row in enumerate(rows) for kind, text in completions(row, dataset)]
    chat = dataset.conversational
    return cases, RewardBatch(
        prompts=[rows[i][keys.QUERY] for i, _, _ in cases],
        completions=[[{"role": "assistant", "content": text}] if chat else text for _, _, text in cases],
        completion_ids=[_encode(tokenizer, text) for _, _, text in cases],
        columns={name: [rows[i][name] for i, _, _ in cases] for name in dataset.columns},
        truncated=[False] * len(cases),
    )


def completions(row: Mapping[str, Any], dataset: PromptDataset) -> Iterable[tuple[str, str]]:
    """Yield the kind and the text of each completion to probe for a row."""
    column = answer_column(dataset)
    answer = None if column is None else row[column]
    if answer is not None:
        others = _other_answers(row, column, dataset)
        for form in FORMATS:
            yield "right", form.format(answer)
            yield from (("wrong", form.format(other)) for other in others[:1])
        if len(others) > 1:  # wrong ones first and last
            guesses = [others[0], answer, *others[1:]]
            yield "a list of many answers", " ".join(form.format(each) for each in guesses for form in FORMATS[:3])
    yield "empty", ""
    yield "white space", " \n\t "
    yield "gibberish", "ꙮ}{\\boxed{<think>]]>\x00\u202e%s{{0}}"
    yield "nested brackets", "\\boxed{" * 500 + "(" * 500
    yield "the prompt repeated", prompt_text(row[keys.QUERY])
    yield "a very long text", "So 1 + 1 = 2, and then " * (LONG // 23)


def scripted_texts(dataset: PromptDataset, probes: Sequence[Probe]) -> list[list[str]]:
    """Return a right and a wrong text of each prompt, in the format that earned most; none if nothing earns more.

    The probes are those of prompts of the same source.
    """
    column = answer_column(dataset)
    earned = [[probe.value or 0.0 for probe in probes if probe.kind == kind] for kind in ("right", "wrong")]
    means = [[fmean(values[i :: len(FORMATS)]) for i in range(len(FORMATS)) if values] for values in earned]
    gains = [right - wrong for right, wrong in zip(*means, strict=False)]
    if column is None or max(gains, default=0.0) <= 0:
        return [[] for _ in dataset.rows]
    form = FORMATS[gains.index(max(gains))]
    texts = []
    for row in dataset.rows:
        other = _other_answers(row, column, dataset, 1)
        texts.append([form.format(each) for each in (row[column], *other)] if row[column] is not None else [])
    return texts


def answer_column(dataset: PromptDataset) -> str | None:
    """Return the column that holds the text or number of an answer, or None."""
    row = dataset.rows[0]
    return next((name for name in ANSWERS if isinstance(row.get(name), str | int | float)), None)


def required_columns(functions: Sequence[RewardFunction], columns: Sequence[str]) -> list[str]:
    """Return the columns of the dataset that reward functions require, and those of answers."""
    required = {name for function in functions for name in find_missing_columns(function, [])}
    return [name for name in columns if name in required or (functions and name in ANSWERS)]


def score_each(
    function: RewardFunction, batch: RewardBatch, executor: Executor | Mapping[str, Executor] | None
) -> list[RewardCall | RewardFailure]:
    """Call a function with one trajectory at a time; one that compares trajectories, with the whole batch.

    After :data:`MAX_TIMEOUTS` calls without an answer, the others are taken for the same.
    """
    executor = _choose_executor(function, executor)
    if not getattr(function, "whole_batch", False):
        results, late = [], []
        while len(results) < len(batch) and len(late) < MAX_TIMEOUTS:
            part = range(len(results), min(len(results) + max(CALLS, executor.workers), len(batch)))
            results += executor.run(function, [batch.select([i]) for i in part])
            late = [r for r in results if isinstance(r, RewardFailure) and r.kind == "timed_out"]
        return results + late[:1] * (len(batch) - len(results))
    result = executor.run(function, [batch])[0]
    if isinstance(result, RewardFailure):
        return [result] * len(batch)
    return [RewardCall([score], seconds=result.seconds / len(batch)) for score in result.scores]


def _choose_executor(function: RewardFunction, executor: Executor | Mapping[str, Executor] | None) -> Executor:
    executor = executor.get(reward_name(function)) if isinstance(executor, Mapping) else executor
    return InlineExecutor() if executor is None or is_async(function) else executor


def total_values(
    scores: Sequence[Sequence[float | None]],
    weights: Sequence[float] | None,
    clip_range: tuple[float, float] | None,
) -> list[float | None]:
    """Return the weighted sums of ``F`` lists of ``B`` scores; None where all functions abstain."""
    matrix = torch.tensor([[torch.nan if score is None else score for score in column] for column in scores]).T
    total = combine_rewards(matrix, [1.0] * len(scores) if weights is None else list(weights), clip_range)
    return [None if value != value else value for value in total.tolist()]


def _choose_rows(dataset: PromptDataset) -> list[dict[str, Any]]:
    """Return the first rows of each task."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for row in dataset.rows:
        part = found.setdefault(row.get(keys.TASK), [])
        if len(part) < PROMPTS:
            part.append(row)
    return [row for part in found.values() for row in part]


def _other_answers(row: Mapping[str, Any], column: str, dataset: PromptDataset, number: int = MANY) -> list[Any]:
    """Return different answers of other prompts of the same task, at most a number of them."""
    same = (other for other in dataset.rows if other.get(keys.TASK) == row.get(keys.TASK))
    found: dict[str, Any] = {}
    for other in same:
        if other[column] is not None and str(other[column]) != str(row[column]):
            found.setdefault(str(other[column]), other[column])
        if len(found) == number:
            break
    return list(found.values())


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return ids if end is None else [*ids, end]


@torch.no_grad()
def beginning_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]
) -> tuple[float, float] | None:
    """Return the mean losses of a plain text without and with the beginning-of-text token, in nats a token.

    None if the tokenizer has no such token, or the ids of a prompt begin with it.
    """
    bos = tokenizer.bos_token_id
    if bos is None or bos in prompt_ids[:1]:
        return None
    ids = torch.tensor([[bos, *tokenizer(TEXT, add_special_tokens=False)["input_ids"]]], device=model.device)
    losses = []
    for start in (1, 0):  # both over the same tokens: all but the first of the text
        logits = model(input_ids=ids[:, start:], use_cache=False).logits[0, -ids.shape[1] + 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits.float(), ids[0, 2:]).item())
    return losses[0], losses[1]
