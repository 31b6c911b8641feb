"""Several turns with images in each: tools, feedback, history mode and split rows score as they were sampled."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
import torch
from PIL import Image

from support.vision_models import SHOWN, build, picture
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import ragged
from torchrl_rloo.data.segments import split_segments
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.data.templates import image_paths, shows_images
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.tools.parsers import ToolCall
from torchrl_rloo.envs.tools.tool import Tool
from torchrl_rloo.envs.transforms import FeedbackTransform, ToolTransform
from torchrl_rloo.modules import TransformersWrapper

FAMILIES = ("qwen2_5_vl", "idefics3", "gemma3")
SHAPES = ((40, 24), (16, 32), (48, 48), (33, 20))


class Camera(Tool):
    """Tool that returns texts and images: another one at each call."""

    def __init__(self, results: Any = None):
        super().__init__("camera", "Takes a picture.", {"type": "object", "properties": {}})
        self.results, self.calls = results, 0
        self.returns_images = True

    def call(self, state: None, /, **arguments: Any) -> Any:
        self.calls += 1
        if self.results is not None:
            return self.results
        return ["seen:", picture(*SHAPES[self.calls % len(SHAPES)], seed=self.calls), "<|end|><image>"]


def prompts(store, count: int = 2) -> PromptDataset:
    rows = []
    for i in range(count):
        content = [{"type": "text", "text": f"Look {i}: "}, {"type": "image", "url": store.add(picture(*SHAPES[i], i))}]
        rows.append({"query": [{"role": "user", "content": content}]})
    return PromptDataset(rows)


def play(model, tokenizer, dataset, transforms, *, mode: str = "tokens", **limits: Any):
    """Return rows and the policy that sampled them."""
    settings = {"prompts_per_batch": len(dataset), "num_generations": 2, "shuffle": False, "input_mode": mode}
    env = DatasetChatEnv(dataset, tokenizer, transforms=transforms, **settings, **limits)
    stops = {"stop_token_ids": list(range(3, 256, 3))}  # a random model seldom samples the end of turn
    sampling = {"max_new_tokens": 40, "seed": 3, **stops}
    policy = TransformersWrapper(model, tokenizer=tokenizer, input_mode=mode, generate_kwargs=sampling)
    return LLMCollector(env, policy, dialog_turns_per_batch=2 * len(dataset)).collect(), policy


def error_of(rows, policy: TransformersWrapper, packing: str) -> float:
    """Return the largest difference between the sampler's log-probs and those of a scorer."""
    scorer = policy.get_new_version(generate=False, packing=packing)
    with torch.no_grad():
        scored = scorer.score(rows)
    sampled = [t[m] for t, m in zip(ragged(rows, keys.LOG_PROBS), ragged(rows, keys.ACTION_MASK), strict=True)]
    lengths = [int(m.sum()) for m in ragged(rows, keys.ACTION_MASK)]
    found = [row[:n] for row, n in zip(scored.log_probs, lengths, strict=True)]
    return max((a - b).abs().max().item() for a, b in zip(sampled, found, strict=True))


def call_always(text: str) -> list[ToolCall]:
    return [ToolCall("camera", {}), ToolCall("camera", {})]


@pytest.mark.parametrize(("role", "mode"), [("tool", "tokens"), ("user", "tokens"), ("tool", "history")])
@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_tools_are_seen_and_scored_exactly(family: str, role: str, mode: str, tmp_path) -> None:
    model, tokenizer, store = build(family, tmp_path)
    tools = ToolTransform([Camera()], call_always, show_schemas=False, result_role=role)
    rows, policy = play(model, tokenizer, prompts(store), [tools], max_turns=3, mode=mode)
    assert not tools.counts["tools/failed"] and len(rows) == 4
    for row in rows.unbind(0):
        messages = [*row[keys.QUERY], *row[keys.COMPLETION]]
        paths = image_paths(messages)
        assert len(paths) == 5 and stop_reason(row) == "turns"
        assert policy.images.paths(row[keys.IMAGES]) == paths
        assert int((row[keys.TOKENS] == policy.images.family.image_id).sum()) == sum(map(policy.images.number, paths))
    for packing in ("none", "packed", "shared_prefix"):
        assert error_of(tensor_rows(rows), policy, packing) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_history_mode_with_images_of_feedback(family: str, tmp_path) -> None:
    model, tokenizer, store = build(family, tmp_path)

    def respond(conversation, row):
        shown = picture(*SHAPES[len(conversation) % len(SHAPES)], seed=len(conversation))
        return [{"role": "user", "content": [shown, "and now?", {"type": "image", "image": shown}]}]

    rows, policy = play(model, tokenizer, prompts(store), [FeedbackTransform(respond, max_turns=3)], mode="history")
    plain, _ = play(model, tokenizer, prompts(store), [FeedbackTransform(respond, max_turns=3)])
    for row, other in zip(rows.unbind(0), plain.unbind(0), strict=True):
        assert torch.equal(row[keys.TOKENS], other[keys.TOKENS]) and torch.equal(row[keys.IMAGES], other[keys.IMAGES])
        assert len(row[keys.IMAGES]) == 5 and len(set(map(tuple, row[keys.IMAGES].tolist()))) == 3
    for packing in ("none", "shared_prefix"):
        assert error_of(tensor_rows(rows), policy, packing) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_split_rows_keep_the_images_of_each_sample(family: str, tmp_path) -> None:
    model, tokenizer, store = build(family, tmp_path)
    # The template shows the assistant's past turns in capitals, so that the past is rewritten
    shown = "{{ part['text'] if m['role'] != 'assistant' or outer.last else part['text'] | upper }}"
    template = tokenizer.chat_template.replace("{{ part['text'] }}", shown)
    tokenizer.chat_template = template.replace("{% for part", "{% set outer = loop %}{% for part")

    def respond(conversation, row):
        first = len(conversation) == 2
        return [{"role": "user", "content": ["again?"] if first else ["again?", picture(24, 24, seed=7)]}]

    # The first prompt has no image: its first two samples have none, and the last one has
    rows = [{"query": [{"role": "user", "content": "No image."}]}, prompts(store).rows[0]]
    feedback = FeedbackTransform(respond, max_turns=3)
    rows, policy = play(model, tokenizer, PromptDataset(rows), [feedback], on_rewrite="split")
    assert not feedback.counts["feedback/failed"]
    samples = split_segments(tensor_rows(rows))
    assert len(samples) > len(rows)  # some were split
    assert error_of(samples, policy, "none") < 1e-5
    assert error_of(samples, policy, "packed") < 1e-5
    numbers = {0 if (images := s.get(keys.IMAGES, None)) is None else len(images) for s in samples.unbind(0)}
    assert {0, 1, 2} <= numbers


HOSTILE = {
    "truncated": lambda data: data[:40],
    "text": lambda data: b"no image",
    "empty": lambda data: b"",
    "changed": lambda data: data[:60] + b"\x00" * 60 + data[120:],
}


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def part(data: bytes) -> dict[str, str]:
    return {"type": "image", "url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_image_becomes_a_text(kind: str, tmp_path) -> None:
    model, tokenizer, store = build("qwen2_5_vl", tmp_path)
    results = ["a", part(HOSTILE[kind](png(picture(40, 40)))), part(png(picture(20, 20)))]
    tools = ToolTransform([Camera(results)], call_always, show_schemas=False)
    rows, _ = play(model, tokenizer, prompts(store, 1), [tools], max_turns=2)
    assert stop_reason(rows[0]) == "turns" and not tools.counts["tools/camera/failed"]
    shown = rows[0][keys.COMPLETION][1]["content"]
    assert [p["type"] for p in shown] == ["text", "text", "image"]
    assert shown[1]["text"].startswith("[image that cannot be shown: image ") and len(shown[1]["text"]) < 300


def test_results_read_no_local_file_and_nothing_remote(tmp_path) -> None:
    model, tokenizer, store = build("qwen2_5_vl", tmp_path / "store")
    secret = tmp_path / "secret.png"
    picture(20, 20).save(secret)
    results = [{"type": "image", "url": str(secret)}, {"type": "image", "url": "http://localhost/a.png"}]
    results += [part(b"x") | {"image": str(secret)}]
    rows, _ = play(
        model, tokenizer, prompts(store, 1), [ToolTransform([Camera(results)], call_always, show_schemas=False)],
        max_turns=2,
    )  # fmt: skip
    content = rows[0][keys.COMPLETION][1]["content"]
    assert isinstance(content, str) and len(image_paths(rows[0][keys.QUERY] + rows[0][keys.COMPLETION])) == 1


def test_too_many_images_and_images_within_a_result(tmp_path) -> None:
    model, tokenizer, store = build("qwen2_5_vl", tmp_path)
    for results, ok in (([picture(16, 16)] * 20, True), ({"plot": picture(16, 16)}, False)):
        tools = ToolTransform([Camera(results)], call_always, show_schemas=False)
        rows, _ = play(model, tokenizer, prompts(store, 1), [tools], max_turns=2)
        content = rows[0][keys.COMPLETION][1]["content"]
        if ok:
            assert [p["type"] for p in content] == ["image"] * 8 + ["text"] * 12
        else:
            assert "an image within a result cannot be shown" in content


def test_a_text_model_reads_the_sizes_of_images(random_model, bpe) -> None:
    dataset = PromptDataset([{"query": [{"role": "user", "content": "Look."}]}])
    results = ["seen", part(png(picture(20, 10))), picture(8, 9), part(b"no image")]
    tools = ToolTransform([Camera(results)], call_always, show_schemas=False)
    rows, _ = play(random_model, bpe, dataset, [tools], max_turns=2)
    first, *_, last = rows[0][keys.COMPLETION][1]["content"].split("\n")
    assert rows[0][keys.COMPLETION][1]["content"].split("\n")[:3] == ["seen", "[image 20x10]", "[image 8x9]"]
    assert first == "seen" and last.startswith("[image that cannot be shown: ")
    assert rows[0].get(keys.IMAGES, None) is None
    feedback = FeedbackTransform(lambda *_: [{"role": "user", "content": ["so ", picture(8, 9)]}], max_turns=2)
    rows, _ = play(random_model, bpe, dataset, [feedback])
    assert rows[0][keys.COMPLETION][1]["content"] == "so [image 8x9]"


def test_a_template_without_images_of_tools_is_an_error_before_the_run(tmp_path) -> None:
    model, tokenizer, store = build("idefics3", tmp_path)
    mark = SHOWN["idefics"]
    tokenizer.chat_template = tokenizer.chat_template.replace(
        mark, "{% if m['role'] == 'user' %}" + mark + "{% endif %}"
    )
    assert shows_images(tokenizer, "user") and not shows_images(tokenizer, "tool")
    with pytest.raises(ValueError, match=r"tools \['camera'\] return images.*result_role='tool'; set it to 'user'"):
        play(model, tokenizer, prompts(store, 1), [ToolTransform([Camera()], call_always, show_schemas=False)])
    # A tool that does not tell costs its row
    camera = Camera()
    camera.returns_images = False
    tools = ToolTransform([camera], call_always, show_schemas=False)
    rows, _ = play(model, tokenizer, prompts(store, 1), [tools], max_turns=2)
    assert {stop_reason(row) for row in rows.unbind(0)} == {"failed"} and tools.counts["tools/failed"] == 2


def test_feedback_that_cannot_be_read_costs_its_row(tmp_path) -> None:
    model, tokenizer, store = build("gemma3", tmp_path)
    missing = {"type": "image", "image": str(tmp_path / "missing.png")}
    feedback = FeedbackTransform(lambda *_: [{"role": "user", "content": [missing]}])
    rows, _ = play(model, tokenizer, prompts(store, 1), [feedback])
    assert {stop_reason(row) for row in rows.unbind(0)} == {"failed"} and feedback.counts["feedback/failed"] == 2
