"""Questions about pictures of colored shapes, the ``shapes`` task of a vision-language model.

::

    user       [picture] How many are red?
    assistant  <think>red circle, red ring</think>2

A picture has 32x32 pixels and up to four shapes, one in each quarter. The chain of thought lists those in question. The
answers to a question are about equally frequent, so without the picture a quarter of all answers is right.
"""

from __future__ import annotations

import base64
import hashlib
import random
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from PIL import Image

Messages = list[dict[str, Any]]

IMAGE_SIZE = 32  # pixels, width and height
QUARTER = IMAGE_SIZE // 2
KINDS = ("circle", "square", "triangle", "ring")
COLORS = {"red": (230, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "black": (20, 20, 20)}
SMALL, LARGE = 8, 13  # pixels
NUM_PROBLEMS = 3072  # of both splits

P_UNSURE = 0.65  # probability per answer that the teacher withholds it
P_OVERLOOK = 0.04  # probability per shape


class Shape(NamedTuple):
    """Shape in a quarter of a picture: 0 is top left, 1 top right, 2 bottom left, 3 bottom right."""

    kind: str
    color: str
    size: int
    quarter: int
    shift: tuple[int, int]  # pixels to the right and down from the center of the quarter


class Problem(NamedTuple):
    """Picture with a question, whose last word is the kind, the color or the size that it is about."""

    shapes: tuple[Shape, ...]
    question: str

    def solve(self, rng: random.Random | None = None) -> str:
        """Write the assistant's text, with errors drawn from ``rng`` unless it is None."""
        topic = self.question.split()[-1].removesuffix("?").removesuffix("s")
        found = [s for s in self.shapes if topic in (s.kind, s.color) or (topic == "largest" and s.size == LARGE)]
        if rng:
            found = [shape for shape in found if rng.random() >= P_OVERLOOK]
        if rng and rng.random() < P_UNSURE:
            answer = "unsure"
        elif self.question.startswith("How many"):
            answer = str(len(found))
        elif found:
            answer = found[0].kind if topic in COLORS else found[0].color
        else:
            answer = "none"
        return f"<think>{', '.join(f'{shape.color} {shape.kind}' for shape in found)}</think>{answer}"


def shapes_prompts(split: Literal["train", "test"], *, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """Return the rows of the shapes task, each with its own picture.

    A hash of the picture, which does not depend on ``seed``, holds out about 10 % of the rows for ``"test"``.

    Args:
        split: ``"train"`` or ``"test"``.
        size: number of rows to keep after shuffling. None keeps all.
        seed: seed of the order.

    Returns:
        Rows ``{"query": [user message of an image part and a text part], "answer": "2"}``. The image is a ``data:``
        URI.

    Raises:
        ValueError: if ``split`` is unknown, or ``size`` is not between 1 and the number of problems in the split.

    Example:
        >>> row = shapes_prompts("test", size=1)[0]
        >>> [part["type"] for part in row["query"][0]["content"]]
        ['image', 'text']
    """
    problems = _problems(split)
    if size is not None and not 1 <= size <= len(problems):
        raise ValueError(f"size={size} must be None or between 1 and {len(problems)} for split={split!r}")
    random.Random(seed).shuffle(problems)
    return [{"query": _query(p), "answer": p.solve().rpartition("</think>")[2]} for p in problems[:size]]


def shapes_demonstrations(n: int, seed: int, *, clean: bool = False) -> list[Messages]:
    """Return conversations of a teacher about training pictures, drawn with replacement.

    The teacher is sloppy: it overlooks each shape with probability ``P_OVERLOOK``, and with probability ``P_UNSURE`` it
    says that it is unsure instead of answering.

    Args:
        n: number of conversations.
        seed: seed of problems and errors.
        clean: True for a teacher without errors.

    Returns:
        ``n`` conversations of a user and an assistant message.
    """
    rng = random.Random(seed)
    problems = rng.choices(_problems("train"), k=n)
    return [[*_query(p), {"role": "assistant", "content": p.solve(None if clean else rng)}] for p in problems]


def draw(shapes: tuple[Shape, ...]) -> Image.Image:
    """Draw shapes on white."""
    from PIL import Image, ImageDraw  # PIL is installed with the packages that read images

    picture = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    brush = ImageDraw.Draw(picture)
    for kind, name, size, quarter, shift in shapes:
        color, margin = COLORS[name], (QUARTER - size) // 2
        left, top = quarter % 2 * QUARTER + margin + shift[0], quarter // 2 * QUARTER + margin + shift[1]
        right, bottom = left + size - 1, top + size - 1
        if kind == "circle":
            brush.ellipse((left, top, right, bottom), color)
        elif kind == "square":
            brush.rectangle((left, top, right, bottom), color)
        elif kind == "triangle":
            brush.polygon([(left, bottom), (right, bottom), (left + size // 2, top)], color)
        else:
            brush.ellipse((left, top, right, bottom), outline=color, width=2)
    return picture


def _problems(split: str) -> list[Problem]:
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r} must be 'train' or 'test'")
    rng = random.Random(0)
    drawn = (_draw_problem(rng) for _ in range(NUM_PROBLEMS))
    problems = {problem.shapes: problem for problem in drawn}  # each picture once
    return [problem for shapes, problem in problems.items() if _is_held_out(shapes) == (split == "test")]


def _draw_problem(rng: random.Random) -> Problem:
    """Draw a question and its answer first, then a picture in which the answer is right."""
    kind, color, count = rng.choice(KINDS), rng.choice(list(COLORS)), rng.randint(1, 4)
    question, fixed, count, avoided = rng.choice(
        [
            (f"How many {kind}s?", (kind, None, None), count, {kind}),
            (f"How many are {color}?", (None, color, None), count, {color}),
            (f"What color is the {kind}?", (kind, color, None), 1, {kind}),
            (f"What shape is {color}?", (kind, color, None), 1, {color}),
            ("What color is the largest?", (None, color, LARGE), 1, {LARGE}),
        ]
    )
    number = rng.randint(count, 4)
    choices = [KINDS, list(COLORS), (SMALL, LARGE)]
    others = [[value for value in values if value not in avoided] for values in choices]
    shapes = []
    for place, quarter in enumerate(rng.sample(range(4), number)):
        drawn = [rng.choice(values) for values in (choices if place < count else others)]
        if place < count:
            drawn = [value or other for value, other in zip(fixed, drawn, strict=True)]
        shapes.append(Shape(*drawn, quarter, (rng.randint(-1, 1), rng.randint(-1, 1))))
    return Problem(tuple(sorted(shapes, key=lambda shape: shape.quarter)), question)


def _is_held_out(shapes: tuple[Shape, ...]) -> bool:
    return hashlib.sha256(repr([tuple(s) for s in shapes]).encode()).digest()[0] < 26  # 26 of 256: about 10 %


def _query(problem: Problem) -> Messages:
    file = BytesIO()
    draw(problem.shapes).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"role": "user", "content": [{"type": "image", "url": url}, {"type": "text", "text": problem.question}]}]
