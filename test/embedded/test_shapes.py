"""Pictures and questions of the shapes task, its teacher, and the model that sees them."""

from __future__ import annotations

import io
import random
from base64 import b64decode
from collections import Counter, defaultdict

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from torchrl_rloo.data.templates import encode_conversation
from torchrl_rloo.embedded import resolve_task, shapes_prompts, warm_start
from torchrl_rloo.embedded.shapes import (
    COLORS,
    IMAGE_SIZE,
    LARGE,
    P_UNSURE,
    Problem,
    Shape,
    _problems,
    draw,
    shapes_demonstrations,
)
from torchrl_rloo.images.parts import image_paths
from torchrl_rloo.modules import load_model, save_model

SHAPES = (
    Shape("circle", "red", LARGE, 0, (0, 0)),
    Shape("ring", "red", 8, 1, (1, -1)),
    Shape("square", "blue", 8, 3, (0, 0)),
)


def picture(row) -> Image.Image:
    url = row["query"][0]["content"][0]["url"]
    return Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")


def question(row) -> str:
    return row["query"][0]["content"][1]["text"]


# ----------------------------------------------------------------------------------------------------------------- rows
def test_splits_never_share_a_picture_and_rows_are_the_same_again():
    train, test = shapes_prompts("train"), shapes_prompts("test")
    assert (len(train), len(test)) == (2663, 301)  # pins the hash, see test_addition.py
    pictures = [picture(row).tobytes() for row in train + test]
    assert len(set(pictures)) == len(pictures)
    assert shapes_prompts("test") == test and shapes_prompts("test", size=9) == test[:9]
    assert shapes_prompts("test", seed=1) != test
    with pytest.raises(ValueError, match="size=302 must be"):
        shapes_prompts("test", size=302)
    with pytest.raises(ValueError, match="'validation'"):
        shapes_prompts("validation")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("How many are red?", "<think>red circle, red ring</think>2"),
        ("How many squares?", "<think>blue square</think>1"),
        ("What color is the ring?", "<think>red ring</think>red"),
        ("What shape is blue?", "<think>blue square</think>square"),
        ("What color is the largest?", "<think>red circle</think>red"),
        ("What color is the triangle?", "<think></think>none"),
    ],
)
def test_answers(asked, said):
    assert Problem(SHAPES, asked).solve() == said


def test_pictures_show_each_shape_in_its_quarter():
    image = draw(SHAPES)
    assert image.size == (IMAGE_SIZE, IMAGE_SIZE)
    half = IMAGE_SIZE // 2
    quarters = [image.crop((x, y, x + half, y + half)) for y in (0, half) for x in (0, half)]
    found = [{color: count for count, color in quarter.getcolors()} for quarter in quarters]
    white, red, blue = (255, 255, 255), COLORS["red"], COLORS["blue"]
    assert set(found[0]) == set(found[1]) == {white, red} and set(found[2]) == {white}
    assert found[3] == {white: half * half - 64, blue: 64}
    assert found[0][red] > found[1][red] > 0


def test_without_the_picture_a_quarter_is_right():
    answers = defaultdict(Counter)
    for row in shapes_prompts("train"):
        answers[question(row)][row["answer"]] += 1
    assert len(answers) == 17 and all(len(counts) == 4 for counts in answers.values())
    assert sum(max(counts.values()) for counts in answers.values()) / 2663 < 0.3


# -------------------------------------------------------------------------------------------------------------- teacher
def test_rewards_of_the_teacher():
    task = resolve_task("shapes")
    (reward,) = task.make_rewards()
    problems = _problems("train")
    answers = [problem.solve().rpartition(">")[2] for problem in problems]

    def score(texts: list[str]) -> float:
        return sum(reward([""] * len(texts), texts, [[1]] * len(texts), answer=answers)) / len(texts)

    assert score([problem.solve() for problem in problems]) == 1.0
    assert score(answers) == 0.0  # without the end of a thought there is no answer
    rng = random.Random(0)
    texts = [problem.solve(rng) for problem in problems]
    assert sum(text.endswith("unsure") for text in texts) / len(texts) == pytest.approx(P_UNSURE, abs=0.03)
    assert 0.28 < score(texts) < 0.35


def test_demonstrations_are_deterministic_and_of_training_pictures():
    first = shapes_demonstrations(64, 3)
    assert shapes_demonstrations(64, 3) == first != shapes_demonstrations(64, 4)
    train = {row["query"][0]["content"][0]["url"] for row in shapes_prompts("train")}
    assert {url for messages in first for url in image_paths(messages)} <= train


# ---------------------------------------------------------------------------------------------------------------- model
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return warm_start(0, "shapes", steps=2, cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_model_sees_the_picture(folder):
    model, tokenizer = load_model(folder)
    assert sum(p.numel() for p in model.parameters()) == 255_552
    assert model.config.text_config.vocab_size == len(tokenizer) == 320
    pairs = [p for p in _problems("train") if p.question == "How many are red?"][:2]
    paths = [tokenizer.images.store.add(draw(problem.shapes)) for problem in pairs]
    shown = [[{"type": "image", "url": path}, {"type": "text", "text": pairs[0].question}] for path in paths]
    rows = [encode_conversation(tokenizer, [{"role": "user", "content": content}])[0] for content in shown]
    assert rows[0] == rows[1]  # so only the pixels tell them apart
    logits = [
        model(input_ids=torch.tensor([row]), **tokenizer.images.tensors(path)).logits
        for row, path in zip(rows, paths, strict=True)
    ]
    assert (logits[0] - logits[1])[0, -1].abs().max() > 1e-2


def test_the_processor_expands_as_the_encoder_does(folder, tmp_path):
    """vLLM reads the processor from the folder, also from that of a finished run."""
    save_model(*load_model(folder), tmp_path)
    processor, (_, tokenizer) = AutoProcessor.from_pretrained(tmp_path), load_model(tmp_path)
    image = draw(SHAPES)
    message = {"role": "user", "content": [{"type": "image", "url": tokenizer.images.store.add(image)}]}
    message["content"].append({"type": "text", "text": "How many are red?"})
    text = processor.apply_chat_template([message], tokenize=False)
    out = processor(images=[image], text=text, return_tensors="pt")
    assert out["input_ids"][0].tolist() == encode_conversation(tokenizer, [message])[0]
    (path,) = image_paths([message])
    assert torch.equal(out["pixel_values"], tokenizer.images.tensors(path)["pixel_values"])
