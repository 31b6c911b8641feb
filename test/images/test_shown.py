"""Images for people: labels, thumbnails, transcripts, reports and loggers, also of missing and hostile images."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensordict import NonTensorData, TensorDict

from support.vision_models import build, picture
from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import pack_rows, unpack_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.templates import encode_prompt, image_paths
from torchrl_rloo.diagnostics.checks.prompts import prompt_text
from torchrl_rloo.diagnostics.report import write_report
from torchrl_rloo.diagnostics.transcripts import write_transcripts
from torchrl_rloo.evaluation.evaluation import completion_table
from torchrl_rloo.images import ImageStore
from torchrl_rloo.images.encoder import digests
from torchrl_rloo.images.parts import content_text, image_label, join_contents
from torchrl_rloo.images.shown import data_uri, thumbnail
from torchrl_rloo.images.store import ImageError, digest_of
from torchrl_rloo.replay import RolloutFiles, RolloutWriter
from torchrl_rloo.rewards.protocol import final_text
from torchrl_rloo.run.logging import RunLogger


@pytest.fixture
def stored(tmp_path) -> str:
    return ImageStore(tmp_path / "store").add(picture(64, 48))


def finished(tokenizer, path: str) -> TensorDict:
    """Return a row whose prompt and feedback have an image each."""
    shown = {"type": "image", "url": path}
    query = [{"role": "user", "content": [{"type": "text", "text": "What <b>is</b> it?"}, shown]}]
    said, asked = {"role": "assistant", "content": "A cup."}, {"role": "user", "content": [shown]}
    ids = encode_prompt(tokenizer, [*query, said, asked])
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[-1] = True
    return TensorDict(
        {
            keys.QUERY: NonTensorData(query),
            keys.COMPLETION: NonTensorData([said, asked, said]),
            keys.TOKENS: torch.tensor(ids),
            keys.ACTION_MASK: mask,
            keys.LOG_PROBS: torch.zeros(len(ids)),
            keys.IMAGES: digests([path, path]),
            keys.GROUP_ID: torch.tensor(0),
            keys.POLICY_VERSION: torch.tensor(0),
            "next": TensorDict({"reward": torch.ones(1, 1), "truncated": torch.zeros(1, dtype=torch.bool)}, []),
        },
        [],
    )


def data_of(page: Path) -> dict:
    return json.loads(re.search(r'id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)[1])


def test_texts_of_contents(stored: str) -> None:
    label = f"[image 64x48 {digest_of(stored)[:8]}]"
    content = [{"type": "text", "text": "a "}, {"type": "image", "url": stored}]
    assert image_label(stored) == label and content_text(content) == f"a {label}" == final_text([{"content": content}])
    assert content_text(None) == "" and content_text("b") == "b" and final_text([{"content": None}]) == ""
    assert join_contents("a", "b", between=" ") == "a b"
    assert content_text(join_contents("x", content, between="-")) == f"x-a {label}"
    query = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    assert prompt_text(query) == f"a {label}"
    Path(stored).unlink()
    assert image_label(stored) == f"[image missing {digest_of(stored)[:8]}]"
    assert image_label("/etc/passwd") == image_label(None) == "[image that is not in a store]"


def test_thumbnails_are_small_and_only_of_images_of_a_store(stored: str, tmp_path: Path) -> None:
    wide = ImageStore(tmp_path / "store").add(picture(900, 30))
    small = Image.open(io.BytesIO(base64.b64decode(thumbnail(wide).partition(",")[2])))
    assert small.size == (224, 7) and small.format == "JPEG"
    assert data_uri(stored).startswith("data:image/png;base64,")
    assert ImageStore(tmp_path / "other").add(data_uri(stored)).endswith(Path(stored).name)
    outside = tmp_path / "outside.png"
    picture(8, 8).save(outside)
    changed = tmp_path / Path(stored).name
    changed.write_bytes(outside.read_bytes())
    for path in (outside, changed, tmp_path / "missing.png"):
        assert thumbnail(str(path)) is None
        with pytest.raises(ImageError):
            data_uri(str(path))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_transcripts_show_thumbnails_in_the_places_of_images(family: str, tmp_path: Path) -> None:
    _, tokenizer, store = build(family, tmp_path / "store")
    path = store.add(picture(40, 24))
    row = finished(tokenizer, path)
    data = data_of(write_transcripts(tmp_path / "page.html", [row, row], tokenizer))
    name = digest_of(path)
    assert data["images"] == {name: {"label": image_label(path), "picture": thumbnail(path)}}
    (part,) = data["rows"][0]["parts"]
    spans = tokenizer.images.spans(row[keys.TOKENS].tolist(), [path, path])
    assert part["images"] == [[span.start, span.stop, name] for span in spans]
    assert data["rows"][0]["prompt"] == f"What <b>is</b> it?{image_label(path)}"
    assert [block[1] for block in part["blocks"]][0] == "user"
    # Without the encoder, their places are not known; without messages, neither are their files
    tokenizer.images = None
    plain = data_of(write_transcripts(tmp_path / "page.html", [row], tokenizer))
    assert plain["images"] == data["images"] and plain["rows"][0]["parts"][0]["images"] == [[0, 0, name]] * 2
    row = row.exclude(keys.QUERY, keys.COMPLETION)
    bare = data_of(write_transcripts(tmp_path / "page.html", [row], tokenizer))
    assert bare["images"] == {name: {"label": f"[image missing {name[:8]}]", "picture": None}}


def test_a_missing_image_is_a_text_in_a_page(tmp_path: Path) -> None:
    _, tokenizer, store = build("qwen2_5_vl", tmp_path / "store")
    path = store.add(picture(40, 24))
    row = finished(tokenizer, path)
    Path(path).unlink()
    page = write_transcripts(tmp_path / "page.html", [row], tokenizer)
    data = data_of(page)
    assert data["images"] == {digest_of(path): {"label": image_label(path), "picture": None}}
    assert "<b>is</b>" not in page.read_text()


def test_tables_reports_and_loggers(tmp_path: Path) -> None:
    _, tokenizer, store = build("qwen2_5_vl", tmp_path / "store")
    path, missing = store.add(picture(40, 24)), store.add(picture(8, 8))
    Path(missing).unlink()
    (record,) = completion_table([finished(tokenizer, path)])
    assert record["images"] == [path, path] and record["prompt"] == f"user: What <b>is</b> it?{image_label(path)}"
    with RunLogger(tmp_path / "run", progress=False) as logger:
        logger.log(0, {"reward": 1.0})
        text = logger.log_table(0, "completions", [record | {"images": [path, missing, "/etc/passwd"]}])
        assert image_label(path) in text
        tables = logger.tables
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert events.Tags()["images"] == ["completions/images/0"]
    shown = write_report(tmp_path / "run", history=[{"step": 0, "reward": 1.0}], summary={}, tables=tables).read_text()
    assert shown.count('<img src="data:image/jpeg;base64,') == 1 and thumbnail(path) in shown
    assert shown.count(", cannot be shown") == 2 and "<b>is</b>" not in shown


def test_stored_rows_keep_references(tmp_path: Path) -> None:
    _, tokenizer, store = build("qwen2_5_vl", tmp_path / "store")
    path = store.add(picture(40, 24))
    row = finished(tokenizer, path)
    rows = stack_rows([row, row.copy().exclude(keys.IMAGES)])
    again = unpack_rows(pack_rows(rows))
    assert torch.equal(again[0][keys.IMAGES], row[keys.IMAGES]) and again[1].get(keys.IMAGES, None) is None
    RolloutWriter(tmp_path / "rollouts", model="m", tokenizer=tokenizer).extend(stack_rows([row]))
    ((_, read),) = RolloutFiles(tmp_path / "rollouts").groups()
    assert torch.equal(read[0][keys.IMAGES], row[keys.IMAGES])
    assert image_paths(read[0][keys.QUERY]) == [path]
    assert tokenizer.images.paths(read[0][keys.IMAGES]) == [path, path]
    Path(path).unlink()
    with pytest.raises(ImageError, match="has no image"):
        tokenizer.images.paths(read[0][keys.IMAGES])
