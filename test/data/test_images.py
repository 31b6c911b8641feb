"""Images of prompts: every form of a source gives the same rows, and errors name the row."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from torchrl_rloo.data.prompts import PromptCounts, PromptDataset, load_prompts, show_examples, split_prompts
from torchrl_rloo.data.sources import check_query
from torchrl_rloo.data.templates import from_history, image_paths, to_history
from torchrl_rloo.envs.tasks.mixture import mix_prompts
from torchrl_rloo.images import ImageStore
from torchrl_rloo.images.store import digest_of

COLORS = ("red", "green", "blue")


def encode(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(buffer, "PNG", compress_level=9)  # unlike what the store writes
    return buffer.getvalue()


PNGS = [encode(color) for color in COLORS]
PICTURES = [Image.open(io.BytesIO(png)) for png in PNGS]


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    for color, png in zip(COLORS, PNGS, strict=True):
        (tmp_path / "files" / f"{color}.png").write_bytes(png)
    return tmp_path / "files"


def raises(message: str):
    return pytest.raises(ValueError, match=re.escape(message))


def colors(store: ImageStore, query: Any) -> list[str]:
    """Return the colors of the images of a prompt, in order."""
    names = {(255, 0, 0): "red", (0, 128, 0): "green", (0, 0, 255): "blue"}
    return [names[store.load(path).getpixel((0, 0))] for path in image_paths(query)]


def kinds(content: list[dict[str, str]]) -> list[str]:
    return [part.get("text", part["type"]) for part in content]


# -------------------------------------------------------------------------------------------------------------- sources
def save(kind: str, folder: Path) -> Any:
    """Return a source of three rows with an image each: its kind and column are in the name."""
    names, column = [f"{color}.png" for color in COLORS], "images" if "list" in kind else "image"

    def rows(values: list[Any]) -> list[dict[str, Any]]:
        values = [[value] for value in values] if column == "images" else values
        return [{"prompt": f"q{i}", column: value, "answer": i} for i, value in enumerate(values)]

    if "file" in kind:
        values = names if "relative" in kind else [(folder / name).as_uri() for name in names]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(values)))
        return folder / "rows.jsonl"
    if "rows" in kind:
        return rows(PNGS if "bytes" in kind else [folder / name for name in names])
    feature = datasets.List(datasets.Image()) if column == "images" else datasets.Image()
    features = datasets.Features(prompt=datasets.Value("string"), answer=datasets.Value("int64"), **{column: feature})
    dataset = datasets.Dataset.from_list(rows([{"bytes": png, "path": None} for png in PNGS]), features=features)
    if "parquet" in kind:
        dataset.to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet"
    if "directory" in kind:
        dataset.save_to_disk(folder / "saved")
        return folder / "saved"
    return dataset.to_iterable_dataset() if "stream" in kind else dataset


@pytest.mark.parametrize("column", ["image", "list of images"])
@pytest.mark.parametrize(
    "kind", ["relative file", "file", "rows", "bytes rows", "parquet", "directory", "set", "stream"]
)
def test_every_source_gives_the_same_rows(kind, column, files, store):
    dataset = load_prompts(save(f"{kind} {column}", files), images=store)
    assert [colors(store, row["query"]) for row in dataset] == [[color] for color in COLORS]
    for i, row in enumerate(dataset):
        assert [m["role"] for m in row["query"]] == ["user"] and kinds(row["query"][0]["content"]) == ["image", f"q{i}"]
    assert dataset.columns == ("answer",) and json.loads(json.dumps(dataset.rows)) == dataset.rows
    assert dataset.counts == PromptCounts(3, 0, duplicates=0, kept=3)
    digests = [digest_of(path) for row in dataset for path in image_paths(row["query"])]
    assert dataset.fingerprint == load_prompts(save("bytes rows", files), images=store.folder / "other").fingerprint
    assert len(set(digests)) == 3


def test_the_store_is_that_of_the_tokenizer_or_in_the_cache(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_RLOO_CACHE", str(tmp_path / "cache"))
    tokenizer = SimpleNamespace(images=SimpleNamespace(store=store), chat_template="{{ messages }}")
    for arguments, folder in (({"tokenizer": tokenizer}, store.folder), ({}, tmp_path / "cache" / "images")):
        monkeypatch.setattr("torchrl_rloo.data.prompts.encode_prompts", lambda *a, **k: [[1]])
        dataset = load_prompts([{"prompt": "a", "image": PNGS[0]}], **arguments)
        assert Path(image_paths(dataset[0]["query"])[0]).parent == folder


def test_pictures_in_memory_are_stored_by_their_pixels(store):
    rows = [{"prompt": "a", "image": picture} for picture in PICTURES]
    dataset = load_prompts(rows, images=store)
    assert [colors(store, row["query"]) for row in dataset] == [[color] for color in COLORS]
    assert dataset.fingerprint == load_prompts(rows, images=store.folder / "other").fingerprint


def test_a_row_map_sees_the_files_of_a_dataset(files, store):
    seen = []
    dataset = load_prompts(save("set image", files), row_map=lambda row: seen.append(row["image"]) or row, images=store)
    assert [value["bytes"] for value in seen] == PNGS and colors(store, dataset[1]["query"]) == ["green"]


# ------------------------------------------------------------------------------------------------------------- messages
SYSTEM = {"role": "system", "content": "Be brief."}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


SLOT = {"type": "image"}


def test_images_come_before_the_first_user_message(store):
    messages = [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, user("c")]
    query = load_prompts([{"prompt": messages, "images": PNGS[:2]}], images=store)[0]["query"]
    assert query[0] == SYSTEM and query[2:] == messages[2:]
    assert kinds(query[1]["content"]) == ["image", "image", "a"] and colors(store, query) == ["red", "green"]
    listed = load_prompts([{"prompt": [user("a", "b")], "images": PNGS[:1]}], images=store)[0]["query"]
    assert kinds(listed[0]["content"]) == ["image", "a", "b"]


def test_parts_without_an_image_are_filled_in_order(files, store):
    coded = base64.b64encode(PNGS[2]).decode()
    messages = [user("a", SLOT, "b"), user({**SLOT, "image": files / "blue.png"}, SLOT)]
    query = load_prompts([{"prompt": messages, "images": PNGS[:2]}], images=store)[0]["query"]
    assert colors(store, query) == ["red", "blue", "green"] and kinds(query[0]["content"]) == ["a", "image", "b"]
    # Every form of a part that holds its image
    for part in (
        {"type": "image", "image": PICTURES[2]},
        {"type": "image", "image": {"bytes": PNGS[2], "path": None}},
        {"type": "image", "url": str(files / "blue.png"), "text": None},
        {"type": "image", "path": (files / "blue.png").as_uri()},
        {"type": "image", "base64": coded, "mime_type": "image/png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}},
        {"type": "image_url", "image_url": str(files / "blue.png")},
    ):
        query = load_prompts([{"prompt": [user("a", part)]}], images=store)[0]["query"]
        assert colors(store, query) == ["blue"] and query[0]["content"][1].keys() == {"type", "url"}


def test_messages_of_arrow_lose_the_fields_that_it_adds(store):
    rows = [{"prompt": [user("a", {"type": "image", "url": "data:;base64," + base64.b64encode(PNGS[0]).decode()})]}]
    query = load_prompts(datasets.Dataset.from_list(rows), images=store)[0]["query"]
    assert [sorted(part) for part in query[0]["content"]] == [["text", "type"], ["type", "url"]]


def test_content_of_text_parts_is_text():
    assert load_prompts([{"prompt": [SYSTEM, user("a", " b")]}])[0]["query"] == [
        SYSTEM,
        {"role": "user", "content": "a b"},
    ]


def test_rows_without_images_may_stand_among_others(store):
    rows = [{"prompt": "a", "image": PNGS[0]}, {"prompt": "b", "image": None}]
    loaded = load_prompts(rows, images=store)
    assert loaded[1]["query"] == [{"role": "user", "content": "b"}] and loaded.conversational
    assert kinds(load_prompts([{"prompt": [{"role": "user", "content": ""}], "image": PNGS[0]}], images=store)[0][
        "query"][0]["content"]) == ["image"]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [user(SLOT)], "images": PNGS[:2]}, "row 0 has 1 image parts to fill, but 2 images in its column"),
        ({"prompt": [user("a", SLOT)]}, "row 0 has 1 image parts to fill, but 0 images in its column"),
        (
            {"prompt": [user({**SLOT, "image": PNGS[0]})], "image": PNGS[0]},
            "row 0 has 0 image parts to fill, but 1 images in its column",
        ),
        ({"prompt": [{"role": "tool", "content": "a"}], "image": PNGS[0]}, "row 0 has images but no user message"),
        ({"prompt": "a", "images": PNGS[0]}, "row 0: column 'images' must be lists of images, got image of 74 bytes"),
        (
            {"prompt": "a", "images": PICTURES[0]},
            "row 0: column 'images' must be lists of images, got image of type Png",
        ),
        ({"prompt": "a", "image": PNGS[0], "images": []}, "columns ['image', 'images'] both hold images"),
        (
            {"prompt": [user({"type": "video", "url": "a.mp4"})]},
            "row 0: message 0 of prompt column 'prompt': part 0 of",
        ),
        ({"prompt": [user("a", {"type": "text"})]}, "part 1 of its content must be {'type': 'text', 'text': ...} or"),
        (
            {"prompt": [user({**SLOT, "image": PNGS[0], "max_pixels": 9})]},
            "row 0 has an image part with fields ['max_pixels'], which would have no effect; remove them",
        ),
        ({"prompt": 5, "image": PNGS[0]}, "row 0: prompt column 'prompt' must contain text or messages, got 5"),
        ({"prompt": "", "image": PNGS[0]}, "row 0: prompt column 'prompt' must contain text or messages, got ''"),
        ({"prompt": [user(SLOT), 5], "image": PNGS[0]}, "row 0: message 1 of prompt column 'prompt' must have text as"),
    ],
)
def test_malformed_rows_are_named(store, row, message):
    with raises(message):
        load_prompts([row], images=store)


def test_images_need_messages(store):
    with raises("chat=False requires text prompts, but source of type list has messages or images; remove chat"):
        load_prompts([{"prompt": "a", "image": PNGS[0]}], images=store, chat=False)


def test_a_column_may_be_renamed(store):
    rows = [{"prompt": "a", "image": "no image", "photo": PNGS[0]}]
    assert load_prompts(rows, column_map={"image": "picture"}, columns=["picture"]).rows == [
        {"query": "a", "picture": "no image"}
    ]
    renamed = load_prompts(rows, column_map={"image": "name", "photo": "image"}, columns=["name"], images=store)
    assert colors(store, renamed[0]["query"]) == ["red"] and renamed.columns == ("name",)
    assert (
        load_prompts(rows[:1], column_map={"image": "name", "photo": "image"}, columns=[], images=store).columns == ()
    )


# ------------------------------------------------------------------------------------------------------ unreadable rows
def test_rows_with_unreadable_images_are_dropped_and_counted(files, store, caplog):
    path = files / "rows.jsonl"
    values = ["red.png", "missing.png", "http://host/a.png", "blue.png"]
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "image": v}) + "\n" for i, v in enumerate(values)))
    dataset = load_prompts(path, images=store)
    assert dataset.counts == PromptCounts(4, 0, duplicates=0, kept=2, unreadable=2)
    assert str(dataset) == "2 chat prompts (2 with unreadable images and dropped)"
    (record,) = caplog.records
    assert record.getMessage() == (
        f"images of 2 of 4 rows of source={str(path)!r} cannot be read, so these rows are dropped; the first: {path}, "
        "line 2: image 'missing.png' cannot be read: No such file or directory"
    )
    assert mix_prompts({"a": dataset, "b": dataset}).counts.unreadable == 4
    assert dataset.select([0]).counts == PromptCounts(1, 0, duplicates=0, kept=1)


def test_all_rows_with_unreadable_images_are_an_error(store):
    with raises("images of 1 of 1 rows of source of type list cannot be read: row 0: image 'a.png' cannot be read"):
        load_prompts([{"prompt": "a", "image": "a.png"}], images=store)


# ------------------------------------------------------------------------------------------------- parts of a dataset
def mixed(store: ImageStore) -> PromptDataset:
    return load_prompts([{"prompt": "same", "image": png, "answer": "a"} for png in (*PNGS, PNGS[0])], images=store)


def test_prompts_differ_by_their_images(store, tmp_path):
    dataset = mixed(store)
    assert dataset.counts.duplicates == 1  # the first image, twice
    train, held_out = split_prompts(dataset, 1, seed=0)
    assert len(train) + len(held_out) == 4
    shown = [{digest_of(p) for row in part for p in image_paths(row["query"])} for part in (train, held_out)]
    assert not shown[0] & shown[1]
    moved = mixed(ImageStore(tmp_path / "moved"))
    assert moved.rows != dataset.rows and moved.fingerprint == dataset.fingerprint
    again = split_prompts(moved, 1, seed=0)
    assert [part.fingerprint for part in again] == [train.fingerprint, held_out.fingerprint]
    assert dataset.select([0]).fingerprint != dataset.select([1]).fingerprint


def test_the_fingerprint_of_text_has_not_changed():
    rows = [{"prompt": "a", "answer": 1}, {"prompt": 'b "type": "image"', "x": None, "answer": {"type": "image"}}]
    rows[0]["x"] = [{"type": "image", "url": 5}]
    text = "\n".join(
        json.dumps({"query": row["prompt"], **{k: v for k, v in row.items() if k != "prompt"}}, sort_keys=True)
        for row in rows
    )
    assert load_prompts(rows).fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_examples_and_text_are_refused_next_to_images(store):
    dataset, text = mixed(store), load_prompts([{"prompt": "a", "answer": "b"}])
    with raises("examples=1 requires text prompts with a column 'answer', got PromptDataset(4 conversational prompts"):
        show_examples(1, dataset)
    with raises("prompts are messages in some datasets and text in others"):
        mix_prompts({"a": dataset, "b": text})
    both = mix_prompts({"a": dataset, "b": load_prompts([{"prompt": "a", "answer": "b"}], chat=True)})
    assert [colors(store, row["query"]) for row in both][-2:] == [["red"], []]


def test_system_prompts_stand_before_images(store):
    query = load_prompts([{"prompt": "a", "image": PNGS[0]}], images=store, system_prompt="Be brief.")[0]["query"]
    assert query[0] == SYSTEM and kinds(query[1]["content"]) == ["image", "a"]


PARTS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, st.text("ab \n", max_size=4)),
    st.builds(lambda c: {"type": "image", "url": f"/store/{c * 64}.png"}, st.sampled_from("0af")),
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(st.text("ab", min_size=1, max_size=4), st.lists(PARTS, min_size=1, max_size=4)),
        }
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(MESSAGES)
def test_a_history_keeps_the_parts(messages):
    assert from_history(to_history([messages])[0]) == messages


@settings(deadline=None, max_examples=60)
@given(MESSAGES)
def test_a_valid_prompt_is_itself_or_text(messages):
    try:
        checked = check_query(messages, "row 0", "prompt")
    except ValueError as error:
        assert "must not be blank" in str(error)
        return
    if image_paths(messages):
        assert checked == messages
    else:
        assert all(isinstance(message["content"], str) for message in checked)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_is_loaded_or_refused(store, data):
    """Rows that a file may hold never raise anything but ``ValueError``."""
    scalars = st.sampled_from(["image", "text", "user", "a", "", None, 5, "data:;base64,AA", "/missing", [], {}])
    parts = st.dictionaries(st.sampled_from(["type", "text", "image", "url", "image_url", "x"]), scalars, max_size=3)
    content = st.one_of(scalars, st.lists(st.one_of(parts, scalars), max_size=3))
    messages = st.lists(st.one_of(st.fixed_dictionaries({"role": scalars, "content": content}), scalars), max_size=2)
    row = {
        "prompt": data.draw(st.one_of(scalars, messages)),
        "images": data.draw(st.one_of(scalars, st.lists(scalars))),
    }
    try:
        load_prompts([row, {"prompt": "ok", "images": [PNGS[0]]}], images=store)
    except ValueError as error:
        assert "\n" not in str(error)


def test_text_alone_imports_no_pil(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}')
    code = f"import sys, torchrl_rloo.data as data; data.load_prompts({str(path)!r}); assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
