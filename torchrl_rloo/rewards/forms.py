"""Two forms of a completion, text and chat messages, and advice for a reward that expects the other one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure, RewardFunction, final_text

MAX_SAMPLES = 8  # completions that are scored in both forms
FORM_ERRORS = ("TypeError", "AttributeError", "KeyError", "IndexError")  # what the wrong form usually raises

_TEXT = (
    "it expects texts, but gets chat messages: set data.chat=false (load_prompts(chat=False)) for text prompts, or "
    "read completion[-1]['content']"
)
_MESSAGES = (
    "it expects chat messages, but gets texts: set data.chat=true with a tokenizer that has a chat template "
    "(model.chat_template), or read the completion itself"
)

Run = Callable[[Sequence[RewardBatch]], "list[RewardCall | RewardFailure]"]


def form_hint(function: RewardFunction, batch: RewardBatch, run: Run) -> str:
    """Return advice if a function tells completions apart only in their other form; "" otherwise.

    Functions for TRL's standard format expect texts. On messages they fail, or give all the same score (``len``).

    Args:
        function: reward function. Those of this package read both forms.
        batch: trajectories in the form that the run has.
        run: function that scores batches with ``function``.
    """
    while (inner := getattr(function, "function", None) or getattr(function, "func", None)) is not None:
        function = inner
    if (getattr(function, "__module__", None) or "").startswith(__package__):
        return ""
    first = {final_text(completion): i for i, completion in enumerate(batch.completions)}  # a row of each text
    batch = batch.select(list(first.values())[:MAX_SAMPLES])
    if not len(batch) or (other := _other_form(batch)) is None:
        return ""
    # All fail, or earn the same: try the other form
    scores = _scores(run, batch)
    if scores is None or len(set(scores)) > 1:
        return ""
    other_scores = _scores(run, other)
    if not other_scores or scores and len(set(other_scores)) == 1:
        return ""
    return _MESSAGES if isinstance(batch.completions[0], str) else _TEXT


def _scores(run: Run, batch: RewardBatch) -> list[float | None] | None:
    """Return the score of each trajectory; an empty list if all raise, None if only some do, or time out."""
    results = run([batch.select([i]) for i in range(len(batch))])
    scores = [result.scores[0] for result in results if isinstance(result, RewardCall)]
    raised = [r for r in results if isinstance(r, RewardFailure) and r.kind in ("raised", "malformed")]
    return scores if len(batch) in (len(scores), len(raised)) else None


def _other_form(batch: RewardBatch) -> RewardBatch | None:
    """Return texts as messages, or single messages as texts; None for longer conversations."""
    if isinstance(batch.completions[0], str):
        prompts, completions = (
            [_said(role, text) for text in texts]
            for role, texts in (("user", batch.prompts), ("assistant", batch.completions))
        )
    elif all(len(completion) == 1 for completion in batch.completions):
        prompts = [prompt if isinstance(prompt, str) else prompt[-1].get("content", "") for prompt in batch.prompts]
        completions = [final_text(completion) for completion in batch.completions]
    else:
        return None
    return replace(batch, prompts=prompts, completions=completions)


def _said(role: str, text: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}]
