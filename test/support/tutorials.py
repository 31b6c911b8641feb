"""Tutorials with shorter warm starts, fewer steps and easier rewards; imports only the standard library."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
WARM_START_STEPS = {"addition": 150, "calculator": 120, "guessing": 40, "shapes": 250}  # enough to earn some rewards
NOTEBOOKS = {  # task, settings of a short run, a pattern in what it prints
    "first_loop.py": ("addition", {"STEPS = 30": "STEPS = 2"}, r"gradient norm \d+\.\d\d; after one step the clip"),
    "own_data_and_reward.py": ("addition", {"STEPS = 40": "STEPS = 2"}, r"requires \['answer'\].*step 0: right_number"),
    "pictures.py": ("shapes", {"STEPS = 24": "STEPS = 1"}, r"step 0: reward 0\.\d\d.*that of the next prompt 0\.\d\d"),
    "multi_turn_game.py": (
        "guessing",
        {"STEPS = 18": "STEPS = 1", "prompts_per_batch=16": "prompts_per_batch=4"},
        r"ended as '.*step 0: reward .*ended as '",
    ),
    "self_play.py": (
        "addition",
        {
            "LESSONS = 80": "LESSONS = 30",
            "STEPS = 16": "STEPS = 1",
            "range(2, 8)": "range(2, 4)",
            "batch=6": "batch=2",
        },
        r"first of 2 stones, group \d+: return .*step 0: right moves 0\.\d\d",
    ),
    "async_staleness.py": (
        "addition",
        {
            "UPDATES, OLD_PROMPTS = 10, 10, 6, 64": "UPDATES, OLD_PROMPTS = 2, 2, 2, 4",
            "prompts_per_batch=16": "prompts_per_batch=4",
            "sleep(0.2)": "sleep(0.01)",
        },
        "",
    ),
    "postprocess_buffer.py": (
        "addition",
        {"(last_boxed(text) == a)": '("boxed" in text)'},  # which the short warm start does in two of five answers
        r"sum of the advantages.*filled up: 36 groups.*log-prob of the completion",
    ),
    "tool_environment.py": ("calculator", {"STEPS = 26": "STEPS = 1"}, r"reward -?\d\.\d\d"),
    "own_method.py": (
        "addition",
        {"STEPS = 24": "STEPS = 1"},
        r"equals its loops.*by loops.*RLOO with a clip: 0\.\d\d ->",
    ),
}


def replaced(source: str, *changes: tuple[str, str]) -> str:
    """Return ``source`` after replacements ``(old, new)``, each of which must match."""
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


def shortened(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, source and a pattern of the output of each tutorial; ``folder`` gets what it writes."""
    for name, (task, changes, printed) in NOTEBOOKS.items():
        source = replaced((TUTORIALS / name).read_text(), *changes.items())
        start = f"warm_start(seed=0, task={task!r}, steps={WARM_START_STEPS[task]})"
        source, number = re.subn(r"warm_start\([^()]*\)", start, source)
        assert number > 0, name
        yield name, source.replace("tempfile.mkdtemp()", repr(str(folder))), printed
