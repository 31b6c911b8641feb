"""Verifiable instructions: a program checks whether the completion follows them (google/IFEval, Zhou et al. 2023)."""

from __future__ import annotations

import random
from typing import Any

from torchrl_rloo.envs.tasks.base import Task

_TOPICS = ("rain", "bread", "trains", "the sea", "a lost key", "winter", "gardens", "old maps", "music", "bridges")


def synthetic_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
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
    synthetic_rows=synthetic_rows,
    rewards=({"_target_": "instruction_following", "partial": True},),
    scorer="instruction_following",
    dataset={"source": "google/IFEval", "split": "train"},
)
