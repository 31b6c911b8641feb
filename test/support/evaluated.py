"""Evaluation for processes that tests hold, kill and let fail."""

from __future__ import annotations

import os
from pathlib import Path

from support.waiting import wait_until
from torchrl_rloo.evaluation import EvaluationResult
from torchrl_rloo.evaluation.result import EvaluatedSample, EvaluationSettings


def make_evaluate(folder: Path):
    """Return an evaluation whose score is in the saved file; a file ``hold`` makes it wait, ``fail`` fail."""
    with open(folder / "processes", "a") as file:
        file.write(f"{os.getpid()}\n")

    def evaluate(model: Path, step: int) -> dict[str, EvaluationResult]:
        score = float((model / "score").read_text())
        (folder / f"began_{step}_{os.getpid()}").touch()
        wait_until(lambda: not (folder / "hold").exists())
        if (folder / "fail").exists():
            raise ValueError("no prompts")
        samples = [EvaluatedSample(i, None, "p", "c", {"right": score + i}) for i in range(2)]
        result = EvaluationResult(samples, EvaluationSettings(("right",), num_samples=0), {"right": 1})
        return {"": result, "hard": result}

    return evaluate
