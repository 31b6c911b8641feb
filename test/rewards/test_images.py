"""Images that reward functions see: only those that ask, each their row's, in every executor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from PIL import Image

from torchrl_rloo.data import load_prompts
from torchrl_rloo.images import ImageStore
from torchrl_rloo.images.parts import image_label, image_paths
from torchrl_rloo.images.store import _to_rgb
from torchrl_rloo.rewards.executors import InlineExecutor, ProcessExecutor, ThreadExecutor
from torchrl_rloo.rewards.judge import _transcript
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward, check_columns
from torchrl_rloo.rewards.runner import RewardRunner
from torchrl_rloo.rewards.wrapping import ForTask

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file


@pytest.fixture
def batch(tmp_path: Path) -> RewardBatch:
    """Return two groups of two: one with images of red 10 and 20, one with none."""
    pictures = [Image.new("RGB", (4, 4), (red, 0, 0)) for red in (10, 20)]
    rows = [{"prompt": "a", "images": pictures}, {"prompt": "b", "images": []}]
    prompts = [row["query"] for row in load_prompts(rows, images=ImageStore(tmp_path / "store")) for _ in range(2)]
    return RewardBatch(prompts, [[{"role": "assistant", "content": str(i)}] for i in range(4)], [[i] for i in range(4)])


def reds(completions, images, image, **columns):
    """Return the sum of the reds of each row's images; 1 for a row without."""
    assert [row[0].tobytes() if row else None for row in images] == [None if i is None else i.tobytes() for i in image]
    assert all(picture.mode == "RGB" for row in images for picture in row)
    return [float(sum(picture.getpixel((0, 0))[0] for picture in row)) or 1.0 for row in images]


@pytest.mark.parametrize(
    "executor",
    [InlineExecutor(), ThreadExecutor(2), ProcessExecutor(2), ProcessExecutor(1, rows_per_call=None)],
    ids=["inline", "thread", "process", "process, one call"],
)
def test_every_executor_passes_the_images_of_each_row(batch, executor):
    runner = RewardRunner(reds, executor=executor)
    assert runner(batch).scores == [[30.0, 30.0, 1.0, 1.0]]
    runner.close()


def test_async_rewards_and_wrapped_ones_see_images(batch):
    async def red(completions, images):
        return reds(completions, images, [row[0] if row else None for row in images])

    with_task = RewardBatch(batch.prompts, batch.completions, batch.completion_ids, {"task": ["x", "y"] * 2})
    assert RewardRunner([red, ForTask("x", reds)])(with_task).scores == [[30, 30, 1, 1], [30, None, 1, None]]


def test_images_of_tools_follow_those_of_the_prompt(batch, tmp_path):
    path = ImageStore(tmp_path / "store").add(Image.new("RGB", (4, 4), (5, 0, 0)))
    shown = [{"role": "tool", "content": [{"type": "image", "url": path}]}, {"role": "assistant", "content": "x"}]
    seen = []

    def last(completions, images):
        seen.extend([picture.getpixel((0, 0))[0] for picture in row] for row in images)
        return [0.0] * len(images)

    call_reward(last, RewardBatch(batch.prompts, [shown] * 4, batch.completion_ids))
    assert seen == [[10, 20, 5]] * 2 + [[5]] * 2


def test_each_file_is_decoded_once_and_each_row_has_a_copy(batch, monkeypatch):
    decoded = []
    monkeypatch.setattr("torchrl_rloo.images.store._to_rgb", lambda *a: decoded.append(a[1]) or _to_rgb(*a))

    def paints(completions, images):
        for row in images:
            for picture in row:
                assert picture.getpixel((0, 0))[0] in (10, 20)
                picture.putpixel((0, 0), (99, 0, 0))
        return [0.0] * len(images)

    assert call_reward(paints, batch).scores == [0.0] * 4 and len(decoded) == 2


def test_rewards_that_do_not_ask_load_nothing(batch, monkeypatch):
    def refuse(*arguments: Any):
        raise AssertionError("loaded an image")

    monkeypatch.setattr(ImageStore, "load", refuse)

    def any_argument(completions, **arguments):
        assert "images" not in arguments and "image" not in arguments
        return [0.0] * len(completions)

    assert RewardRunner([any_argument, lambda completions: [0.0] * len(completions)])(batch).scores[0] == [0.0] * 4
    check_columns([any_argument, reds], [])  # images are no missing column


def test_a_missing_image_fails_its_rows_alone(batch):
    path = Path(batch.prompts[0][0]["content"][0]["url"])
    path.unlink()
    runner = RewardRunner(reds)
    assert runner(batch).scores == [[None, None, 1.0, 1.0]] and runner.counts["reds/raised"] == 2


def test_a_column_of_another_source_comes_first(batch):
    columns = {"image": ["mine"] * 4}

    def named(image, images):
        return [float(value == "mine") for value in image]

    assert (
        call_reward(named, RewardBatch(batch.prompts, batch.completions, batch.completion_ids, columns)).scores
        == [1.0] * 4
    )


def test_judges_of_text_read_marks(batch):
    shown = "".join(map(image_label, image_paths(batch.prompts[0])))
    assert _transcript(batch.prompts[0]) == f"{shown}a"
    assert _transcript([{"role": "system", "content": "s"}, *batch.prompts[0]]) == f"system: s\n\nuser: {shown}a"


def test_text_prompts_have_no_images():
    seen = []

    def empty(images, image):
        seen.extend([images, image])
        return [0.0]

    call_reward(empty, RewardBatch(["?"], ["x"], [[1]]))
    assert seen == [[[]], [None]]
