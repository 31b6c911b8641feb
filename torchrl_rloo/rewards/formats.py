"""Whether a completion keeps to a format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import final_text


def think_format(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
) -> list[float | None]:
    """1.0 where a completion starts with reasoning in ``<think>...</think>``, else 0.0.

    It must begin with ``<think>``, without even a space before it, close it, and open no second one. Empty reasoning,
    an empty answer and further ``</think>`` pass, as in TRL. Where the chat template itself writes ``<think>`` into the
    prompt, no completion begins with it and all score 0.0.

    Args:
        prompts: not used.
        completions: ``B`` completions, plain text or a list of messages, of which the last assistant message is judged.
        completion_ids: not used.
        **columns: not used.

    Example:
        >>> think_format(["47+38?"] * 2, ["<think>carry</think>85", "85"], [[1], [2]])
        [1.0, 0.0]
    """
    return [float(_is_think(final_text(completion))) for completion in completions]


def _is_think(text: str) -> bool:
    return text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text
