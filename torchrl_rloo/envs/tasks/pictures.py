"""Tasks with images: problems on geometric figures, and questions about charts.

Sources: Geometry3K (Lu et al. 2021, arXiv 2105.04165) as hiyouga/geometry3k publishes it, and ChartQA (Masry et al.
2022, arXiv 2203.10244). The functions that generate rows take the arguments of ``Task.synthetic_rows``.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.envs.tasks.answers import formula_vote, math_row
from torchrl_rloo.envs.tasks.base import Task
from torchrl_rloo.rewards.matching import ExactMatch, NumericMatch, read_number
from torchrl_rloo.rewards.protocol import RowReward

_SIZE = (168, 120)  # pixels of a generated picture


def geometry_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt without its marks ``<image>``, its images, and an answer as in the task ``math``."""
    images = list(example["images"])
    return math_row({**example, "problem": example["problem"].replace("<image>", "").strip()}) | {"images": images}


def figure_problems(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Draw triangles, rectangles and circles with labeled lengths, in the columns of hiyouga/geometry3k."""
    from PIL import Image, ImageDraw

    rng = random.Random(f"{seed} {split}")
    rows = []
    for i in range(size or 256):
        # The first length is even in training and odd in the test, so that the splits share no picture
        a, b = 2 * rng.randrange(2, 50) + (split == "test"), rng.randrange(3, 60)
        picture = Image.new("RGB", _SIZE, "white")
        draw = ImageDraw.Draw(picture)
        kind = ("triangle", "rectangle", "circle")[i % 3]
        if kind == "circle":
            draw.ellipse((34, 10, 134, 110), outline="black", width=2)
            draw.line((84, 60, 134, 60), fill="black", width=2)
            draw.text((100, 44), str(a), fill="black")
            question, answer = "Find the diameter of the circle.", str(2 * a)
        else:
            corners = (
                [(30, 96), (150, 96), (30, 16)] if kind == "triangle" else [(30, 16), (150, 16), (150, 96), (30, 96)]
            )
            draw.polygon(corners, outline="black", width=2)
            draw.text((84, 102), str(a), fill="black")
            draw.text((8, 52), str(b), fill="black")
            if kind == "triangle":
                question, answer = "Find the area of the right triangle.", f"{a * b / 2:g}"
            else:
                question, answer = "Find the perimeter of the rectangle.", str(2 * a + 2 * b)
        rows.append({"images": [picture], "problem": f"<image>{question}", "answer": answer})
    return rows


GEOMETRY3K = Task(
    name="geometry3k",
    synthetic_rows=figure_problems,
    row_map=geometry_row,
    rewards=("accuracy",),
    scorer="accuracy",
    dataset={"source": "hiyouga/geometry3k", "split": "train"},
    eval_split="test",
    system_prompt="Think step by step, then put the final answer in \\boxed{}.",
    extract_answer=formula_vote,
)


def chart_row(example: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row to a prompt, its image, and a list of accepted answers."""
    return {"prompt": example["query"], "image": example["image"], "answer": [str(each) for each in example["label"]]}


def chart_questions(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Draw bar charts with a question each, in the columns of HuggingFaceM4/ChartQA."""
    from PIL import Image, ImageDraw

    rng = random.Random(f"{seed} {split}")
    rows = []
    for i in range(size or 256):
        names = rng.sample(("Tea", "Rice", "Oats", "Figs", "Kale", "Beans"), 4)
        # The heights are even in training and odd in the test, so that the splits share no picture
        heights = [2 * half + (split == "test") for half in rng.sample(range(4, 46), 4)]
        picture = Image.new("RGB", _SIZE, "white")
        draw = ImageDraw.Draw(picture)
        for k, (name, height) in enumerate(zip(names, heights, strict=True)):
            left, top = 8 + 40 * k, 106 - height
            draw.rectangle((left, top, left + 26, 106), fill=("navy", "teal", "orange", "maroon")[k])
            draw.text((left, top - 12), str(height), fill="black")
            draw.text((left, 108), name, fill="black")
        k = rng.randrange(4)
        question, answer = (
            (f"What is the value of {names[k]}?", heights[k]),
            ("Which bar is the highest?", names[heights.index(max(heights))]),
            ("What is the difference between the highest and the lowest bar?", max(heights) - min(heights)),
        )[i % 3]
        rows.append({"image": picture, "query": question, "label": [str(answer)], "human_or_machine": 0})
    return rows


class RelaxedAccuracy(RowReward):
    """Reward of 1.0 for a number within 5% of the gold, or for its text where the gold is none, else 0.0.

    This is the metric of ChartQA. The answer is in the last box, else a number is the last of the text, and other text
    the last line.

    Example:
        >>> RelaxedAccuracy()(["?"] * 2, ["It is 104.", "rice"], [[1]] * 2, answer=[["100"], ["Rice"]])
        [1.0, 1.0]
    """

    __name__ = "relaxed_accuracy"
    reads = ("answer",)

    def __init__(self) -> None:
        self._number = NumericMatch(where=("boxed", "text"), rel_tol=0.05)
        self._text = ExactMatch(where=("boxed", "last_line"), ignore_case=True)

    def score(self, text: str, golds: Sequence[str] | None) -> float | None:
        """Return the best score for one of the golds; None without any."""
        scores = [(self._text if read_number(gold) is None else self._number).score(text, gold) for gold in golds or ()]
        return max((score for score in scores if score is not None), default=None)


CHARTQA = Task(
    name="chartqa",
    synthetic_rows=chart_questions,
    row_map=chart_row,
    rewards=(f"{__name__}.RelaxedAccuracy",),
    scorer=f"{__name__}.RelaxedAccuracy",
    dataset={"source": "HuggingFaceM4/ChartQA", "split": "train"},
    eval_split="test",
    system_prompt="Think, then put the answer, a number or a few words, in \\boxed{}.",
)  # no votes: numbers within 5% of a gold need not be equal
