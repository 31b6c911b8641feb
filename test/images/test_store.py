"""Store of images: any file becomes its own correct RGB image, or one line that says what is wrong with it."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pickle
import re
import struct
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from torchrl_rloo.images import ImageError, ImageStore
from torchrl_rloo.images.store import digest_of

RGB = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
PICTURE = Image.fromarray(RGB)


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "store")


def encode(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


PNG = encode(PICTURE)


def pixels(store: ImageStore, image: Any) -> np.ndarray:
    picture = store.load(store.add(image))
    assert picture.mode == "RGB" and picture.info == {}
    return np.asarray(picture)


def refused(store: ImageStore, image: Any) -> str:
    """Return the error of an image, which must be one line and leave nothing in the store."""
    before = sorted(store.folder.glob("*"))
    with pytest.raises(ImageError) as caught:
        store.add(image)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert sorted(store.folder.glob("*")) == before
    return message


# ------------------------------------------------------------------------------------------------------------ add, load
def forms(folder: Path) -> dict[str, Any]:
    """Return one image in every form that the store accepts."""
    path = folder / "a b.png"
    path.write_bytes(PNG)
    (folder / "link").symlink_to(path)
    coded = base64.b64encode(PNG).decode()
    return {
        "text": str(path),
        "path": path,
        "link": folder / "link",
        "url": path.as_uri(),
        "host": path.as_uri().replace("file://", "file://localhost"),
        "data": f"data:image/png;base64,{coded}",
        "data without type": f"DATA:;base64,{coded[:30]}\n{coded[30:]}",
        "data in percent": "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG),
        "bytes": PNG,
        "buffer": bytearray(PNG),
        "arrow bytes": {"bytes": PNG, "path": "other.png"},
        "arrow path": {"bytes": None, "path": str(path)},
    }


def test_every_form_of_an_image_is_one_file(store, tmp_path):
    paths = {name: store.add(form) for name, form in forms(tmp_path).items()}
    path = str(store.folder / f"{hashlib.sha256(PNG).hexdigest()}.png")
    assert set(paths.values()) == {path} and [str(p) for p in store.folder.iterdir()] == [path]
    assert np.array_equal(np.asarray(store.load(path)), RGB)
    assert store.add(path) == path  # what it returned is an image as well
    digest = digest_of(path)
    assert store.path(digest) == store.path(bytes.fromhex(digest)) == Path(path)


def test_files_are_linked_and_bytes_are_written(store, tmp_path):
    image = forms(tmp_path)
    assert os.readlink(store.add(image["link"])) == str(image["path"])  # the file itself, not a link to it
    path = store.add(image["bytes"])
    assert Path(path).is_file() and not Path(path).is_symlink()  # a file may change, bytes cannot
    assert store.add(image["path"]) == path and not Path(path).is_symlink()


def test_a_picture_is_named_by_its_pixels(store):
    noted = PICTURE.copy()
    noted.info |= {"comment": "x", "dpi": (3, 3), "icc_profile": b"profile"}
    assert store.add(PICTURE) == store.add(noted) == store.add(Image.open(io.BytesIO(PNG)))
    assert noted.info["comment"] == "x" and noted.mode == "RGB"
    assert np.array_equal(pixels(store, PICTURE), RGB)


def test_relative_paths_start_from_a_base(store, tmp_path, monkeypatch):
    forms(tmp_path)
    path = store.add("a b.png", base=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert store.add("a b.png") == store.add(str(tmp_path / "a b.png"), base="/nowhere") == path


def test_formats_keep_their_suffix(store):
    for kind, suffix in (("PNG", "png"), ("JPEG", "jpg"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp")):
        path = store.add(encode(PICTURE, kind))
        assert path.endswith("." + suffix) and store.load(path).size == PICTURE.size
    for kind in ("TIFF", "ICO", "PPM"):
        assert "is no PNG, JPEG, WEBP, GIF or BMP image" in refused(store, encode(PICTURE, kind))


def test_a_default_store_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHRL_RLOO_CACHE", str(tmp_path))
    assert Path(ImageStore().add(PNG)).parent == tmp_path / "images"
    monkeypatch.chdir(tmp_path)
    assert os.path.isabs(ImageStore("here").add(PNG))


# ---------------------------------------------------------------------------------------------------------------- modes
def test_gray_and_palettes_and_cmyk(store):
    gray = PICTURE.convert("L")
    assert np.array_equal(pixels(store, encode(gray)), np.asarray(gray.convert("RGB")))
    for mode in ("1", "P"):
        picture = PICTURE.convert(mode)
        assert np.array_equal(pixels(store, encode(picture)), np.asarray(picture.convert("RGB")))
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = np.full((8, 8, 3), (255, 0, 0))
    assert np.array_equal(pixels(store, cmyk), red)
    assert np.abs(pixels(store, encode(cmyk, "JPEG", quality=95)).astype(int) - red).max() <= 3


def test_sixteen_bits_are_scaled(store):
    deep = np.array([[0, 128, 257 * 100, 65535]], dtype=np.uint16)
    expected = [0, 0, 100, 255]
    assert pixels(store, encode(Image.fromarray(deep)))[0, :, 0].tolist() == expected
    assert pixels(store, Image.fromarray(deep.astype(np.int32)))[0, :, 0].tolist() == expected


def test_transparency_is_white(store):
    clear, half = (200, 0, 0, 0), (0, 0, 0, 128)
    rgba = Image.new("RGBA", (2, 1), clear)
    rgba.putpixel((1, 0), half)
    expected = [[255, 255, 255], [127, 127, 127]]
    for picture in (encode(rgba), encode(rgba, "WEBP", lossless=True), rgba, rgba.convert("RGBa")):
        assert np.abs(pixels(store, picture)[0].astype(int) - expected).max() <= 1
    assert np.abs(pixels(store, encode(rgba.convert("LA")))[0].astype(int) - expected).max() <= 1
    indexed = Image.new("P", (2, 1))
    indexed.putpalette([10, 20, 30, 40, 50, 60])
    indexed.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF"):
        found = pixels(store, encode(indexed, kind, transparency=0))
        assert found[0].tolist() == [[255, 255, 255], [40, 50, 60]]
    keyed = encode(Image.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert pixels(store, keyed).tolist() == [[[255, 255, 255]]]


TURNS = {  # EXIF orientation: how the stored pixels become upright
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", TURNS)
def test_rotated_photographs_are_upright(store, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(pixels(store, encode(PICTURE, exif=exif)), TURNS[orientation](RGB))


def test_of_several_frames_the_first_counts(store):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")] * 200
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        moving = encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=10, **options)
        assert np.array_equal(pixels(store, moving), np.full((8, 8, 3), (255, 0, 0)))
    stereo = encode(frames[0], "MPO", save_all=True, append_images=frames[1:2])
    path = store.add(stereo)
    assert path.endswith(".jpg") and store.load(path).getpixel((4, 4))[0] > 250


# -------------------------------------------------------------------------------------------------------------- hostile
def png_header(width: int, height: int) -> bytes:
    """Return a PNG that promises a size and has almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


HOSTILE: dict[str, tuple[Any, str]] = {
    "nothing": (b"", "image of 0 bytes is empty"),
    "text": (b"hello", "image of 5 bytes is no PNG, JPEG, WEBP, GIF or BMP image: convert it"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG, WEBP, GIF or BMP image"),
    "cut": (PNG[:-30], "cannot be decoded: .*trunc"),
    "cut header": (PNG[:20], "cannot be decoded: Truncated File Read"),
    "promise": (png_header(60, 60), "cannot be decoded"),
    "bomb": (png_header(60_000, 60_000), "cannot be decoded: Image size"),
    "large": (png_header(9_000, 9_000), "has 9000 x 9000 pixels, allowed are 1 to max_pixels=67108864"),
    "http": ("http://host/a.png", "'http://host/a.png' is not local, and images are not downloaded: save it"),
    "bucket": ("s3://bucket/a.png", "is not local, and images are not downloaded"),
    "host": ("file://host/a.png", "names the host 'host': give a path on this machine"),
    "missing": ("/missing/a.png", "image '/missing/a.png' cannot be read: No such file or directory"),
    "device": ("/dev/zero", "image '/dev/zero' cannot be read"),
    "null": ("a\0b", "cannot be read: embedded null byte"),
    "long": ("x" * 10_000, "cannot be read: File name too long"),
    "empty text": ("", "cannot be read: Is a directory"),
    "data": ("data:image/png;base64,@@@", "is no valid data: URI: Only base64 data is allowed"),
    "no data": ("data:image/png", "is no valid data: URI: it has no comma"),
    "long data": ("data:image/png;base64," + "A" * 9999, r"data:image/png.*\.\.\.' is no valid data: URI"),
    "number": (3, "image of type int is no image: give a path, a data: URI, bytes or a PIL.Image"),
    "none": (None, "image of type NoneType is no image"),
    "empty mapping": ({"bytes": None, "path": None}, "image of type NoneType is no image"),
    "array": (RGB, "image of type ndarray is no image"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_hostile_images_are_one_line(store, name):
    image, message = HOSTILE[name]
    found = refused(store, image)
    assert re.search(message, found), found


def test_hostile_files_are_one_line(store, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(2**40)
    for name, message in (
        ("pipe", "cannot be read"),
        ("dangling", "cannot be read: No such file or directory"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("huge", "has 1099511627776 bytes, more than the 536870912 that max_pixels allows"),
        ("", "cannot be read: Is a directory"),
    ):
        assert re.search(message, refused(store, tmp_path / name)), name


def test_the_largest_image_is_the_largest(tmp_path):
    with pytest.raises(ValueError, match="max_pixels=0 must be at least 1"):
        ImageStore(max_pixels=0)
    assert ImageStore(tmp_path, max_pixels=48).add(PNG)
    small = ImageStore(tmp_path, max_pixels=47)
    for image in (PNG, PICTURE):
        assert "has 8 x 6 pixels, allowed are 1 to max_pixels=47" in refused(small, image)
    assert small.load(ImageStore(tmp_path).add(PNG)).size == (8, 6)  # decided when an image was added


def test_a_file_that_changes_is_noticed(store, tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    path = store.add(file)
    file.write_bytes(encode(PICTURE.transpose(Image.Transpose.ROTATE_180)))
    with pytest.raises(ImageError, match="changed since it was added: restore the file, or load the prompts again"):
        store.load(path)
    assert store.add(file) != path
    assert store.add(PNG) == path and np.array_equal(np.asarray(store.load(path)), RGB)  # replaces the link
    # A link to a file that is gone is replaced as well
    file.write_bytes(encode(PICTURE, "BMP"))
    path = store.add(file)
    file.rename(tmp_path / "b.png")
    with pytest.raises(ImageError, match="cannot be read: No such file or directory"):
        store.load(path)
    with pytest.raises(ImageError, match=f"has no image {digest_of(path)}: load the prompts again"):
        store.path(digest_of(path))
    assert store.add(tmp_path / "b.png") == path and np.array_equal(np.asarray(store.load(path)), RGB)


def test_a_file_cut_by_a_crash_is_written_again(store):
    path = Path(store.add(PNG))
    path.write_bytes(PNG[:10])
    assert store.add(PNG) == str(path) and path.read_bytes() == PNG


def test_only_stored_images_have_a_digest(store, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    for path in (tmp_path / "a.png", "A" * 64 + ".png", "a" * 64, "a" * 63 + ".png", "a" * 64 + ".tiff", 5, None):
        with pytest.raises(ImageError, match="is no path of a stored image: give what ImageStore.add returned"):
            digest_of(path)
        with pytest.raises(ImageError, match="is no path of a stored image"):
            store.load(path)


def test_a_store_that_cannot_be_written_is_no_fault_of_the_image(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write .*move that file away|cannot write .*it is no folder"):
        ImageStore(tmp_path / "file").add(PNG)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=8),
    end=st.integers(0, 2000),
)
@pytest.mark.filterwarnings("ignore")
def test_any_damage_is_an_error_or_a_picture(store, kind, changes, end):
    content = bytearray(encode(PICTURE, kind))
    for place, byte in changes:
        content[place % len(content)] = byte
    small = ImageStore(store.folder, max_pixels=10_000)
    try:
        path = small.add(bytes(content[:end]))
    except ImageError as error:
        assert "\n" not in str(error)
    else:
        assert small.load(path).mode == "RGB" and digest_of(path) == hashlib.sha256(content[:end]).hexdigest()


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=100), st.text(max_size=100)))
def test_any_bytes_and_texts_are_errors(image):
    with pytest.raises(ImageError):
        ImageStore("/nonexistent").add(image)


# -------------------------------------------------------------------------------------------------------------- sharing
def test_threads_share_a_store(store, tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    images = [PNG, tmp_path / "a.png", PICTURE] * 20
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(store.add, images))
        loaded = list(pool.map(store.load, paths))
    assert len(set(paths)) <= 2 and all(np.array_equal(np.asarray(picture), RGB) for picture in loaded)
    assert not list(store.folder.glob(".*"))  # no temporary file stays


def test_a_copy_of_a_store_is_the_store(store):
    copy = pickle.loads(pickle.dumps(store))
    assert np.array_equal(np.asarray(copy.load(store.add(PNG))), RGB) and copy.max_pixels == store.max_pixels


def test_a_store_of_files_needs_neither_torch_nor_pil():
    code = "import sys, torchrl_rloo.images.parts; assert not {'torch', 'PIL', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
