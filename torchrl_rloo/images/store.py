"""Folder of images, each named by the hash of its bytes: what a row, a prompt and an engine name is what they read."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from torchrl_rloo.runtime.files import cache_folder, explained, make_folder, regular_size, temporary_name

if TYPE_CHECKING:
    from PIL import Image

# Suffix by PIL's name of the format; MPO is a JPEG file with further pictures behind the first
SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp", "GIF": ".gif", "BMP": ".bmp"}
_FORMATS = [name for name in SUFFIXES if name != "MPO"]
_NAME = re.compile(r"([0-9a-f]{64})\.(?:png|jpg|webp|gif|bmp)")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_ORIENTATION = 0x0112  # EXIF tag


class ImageError(ValueError):
    """An image that cannot be used: missing, changed, damaged, too large, or of another format."""


class ImageStore:
    """Folder of image files named ``<SHA-256 of the bytes>.<suffix>``.

    Rows carry the hash and prompts the path, so both name one sequence of bytes on any machine. :meth:`load` checks
    the hash, so an image that changed after it was added is an error. Stores are cheap, picklable and thread-safe.

    Args:
        folder: Folder of the files, created by the first :meth:`add`. None is ``images`` in the user's cache.
        max_pixels: Largest width times height that :meth:`add` accepts, checked before decoding. A file may have at
            most eight bytes for each of these pixels.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> store = ImageStore(tempfile.mkdtemp())
        >>> path = store.add(Image.new("RGB", (4, 2), "red"))
        >>> store.load(path).getpixel((0, 0)), store.path(digest_of(path)) == Path(path)
        ((255, 0, 0), True)
    """

    def __init__(self, folder: str | os.PathLike | None = None, max_pixels: int = 2**26) -> None:
        if max_pixels < 1:
            raise ValueError(f"max_pixels={max_pixels} must be at least 1")
        self.folder = Path(folder if folder is not None else cache_folder() / "images").absolute()
        self.max_pixels = max_pixels

    def add(self, image: Any, base: str | os.PathLike | None = None) -> str:
        """Store an image and return the absolute path of its file.

        Args:
            image: Path, ``file://`` URL, ``data:`` URI, bytes, ``PIL.Image``, or mapping with ``bytes`` or ``path``, as
                in Arrow files. A local file is linked, everything else is written; a ``PIL.Image`` becomes an RGB PNG.
            base: Folder of relative paths. None is the working directory.

        Raises:
            ImageError: The image cannot be read or decoded, has more than ``max_pixels``, or is to be downloaded.
        """
        name = describe(image)
        if isinstance(image, Mapping):
            image = image.get("bytes") if image.get("bytes") is not None else image.get("path")
        file = None
        if isinstance(image, (bytes, bytearray, memoryview)):
            content = bytes(image)
        elif isinstance(image, str) and image[:5].lower() == "data:":
            content = _decode_data_uri(image, name)
        elif isinstance(image, (str, os.PathLike)):
            file = Path(base or "") / _local_path(image, name)
            content = _read(file, name, 8 * self.max_pixels)
        elif is_picture(image):
            self._check_size(image, name)
            buffer = io.BytesIO()
            _to_rgb(image, name).save(buffer, "PNG", compress_level=1)  # depends on the pixels alone
            content = buffer.getvalue()
        else:
            raise ImageError(f"{name} is no image: give a path, a data: URI, bytes or a PIL.Image")
        picture = _open(content, name)
        self._check_size(picture, name)
        target = self.folder / (hashlib.sha256(content).hexdigest() + SUFFIXES[picture.format])
        source = None if file is None else os.path.realpath(file)
        # Decode an image that is new. A link may lead to a file that has changed since: replace it
        if not os.path.exists(target):
            _to_rgb(picture, name)
        elif os.path.realpath(target) == source:
            return str(target)
        elif not os.path.islink(target) and os.path.getsize(target) == len(content):
            return str(target)
        make_folder(self.folder)
        temporary = temporary_name(target)
        with explained(target):
            try:
                if source is None:
                    temporary.write_bytes(content)
                else:
                    temporary.symlink_to(source)
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        return str(target)

    def path(self, digest: str | bytes) -> Path:
        """Return the file of a hash, given as 64 hexadecimal digits or 32 bytes.

        Raises:
            ImageError: The store has no such image.
        """
        digest = digest if isinstance(digest, str) else bytes(digest).hex()
        for suffix in dict.fromkeys(SUFFIXES.values()):
            path = self.folder / (digest + suffix)
            if path.exists():
                return path
        raise ImageError(
            f"{self.folder} has no image {digest}: load the prompts again, or name the folder they were in"
        )

    def load(self, path: str | os.PathLike) -> Image.Image:
        """Return an image of a store as RGB, upright by its EXIF orientation, with transparency on white.

        Raises:
            ImageError: The file is missing, its bytes are not those of its name, or they cannot be decoded.
        """
        name = describe(path)
        digest = digest_of(path)
        content = _read(Path(path), name)
        if hashlib.sha256(content).hexdigest() != digest:
            raise ImageError(f"{name} changed since it was added: restore the file, or load the prompts again")
        return _to_rgb(_open(content, name), name)

    def _check_size(self, picture: Image.Image, name: str) -> None:
        width, height = picture.size
        if not 0 < width * height <= self.max_pixels:
            raise ImageError(f"{name} has {width} x {height} pixels, allowed are 1 to max_pixels={self.max_pixels}")


def digest_of(path: str | os.PathLike) -> str:
    """Return the SHA-256 in the name of a stored image, as 64 hexadecimal digits.

    Raises:
        ImageError: The path is not one that :meth:`ImageStore.add` returns.
    """
    if isinstance(path, (str, os.PathLike)) and (found := _NAME.fullmatch(os.path.basename(path))):
        return found[1]
    raise ImageError(f"{describe(path)} is no path of a stored image: give what ImageStore.add returned")


def describe(image: Any) -> str:
    """Name an image in an error: its path, or its kind and size."""
    if isinstance(image, Mapping):
        image = image.get("path") or image.get("bytes")
    if isinstance(image, os.PathLike):
        image = os.fspath(image)
    if isinstance(image, (bytes, bytearray, memoryview)):
        return f"image of {len(image)} bytes"
    if isinstance(image, str):
        return f"image {image if len(image) <= 200 else image[:60] + '...'!r}"
    return f"image of type {type(image).__name__}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def is_picture(image: Any) -> bool:
    """Return whether an object is a PIL image, without importing PIL."""
    return (pil := sys.modules.get("PIL.Image")) is not None and isinstance(image, pil.Image)


def upright_size(path: str) -> tuple[int, int]:
    """Read width and height from the header of a stored file; :meth:`ImageStore.load` later checks its bytes."""
    from PIL import Image

    try:
        with Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            turned = image.getexif().get(_ORIENTATION, 1) >= 5
    except Exception as error:
        reason = getattr(error, "strerror", None) or _one_line(error)
        raise ImageError(f"image {path!r} cannot be read: {reason}; restore the file") from error
    return (height, width) if turned else (width, height)


def _decode_data_uri(uri: str, name: str) -> bytes:
    head, comma, payload = uri.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        if head.lower().endswith(";base64"):
            return base64.b64decode("".join(unquote(payload).split()), validate=True)
        return unquote_to_bytes(payload)
    except (ValueError, binascii.Error) as error:
        raise ImageError(f"{name} is no valid data: URI: {_one_line(error)}") from error


def _local_path(image: str | os.PathLike, name: str) -> Path:
    """Return the path of a local file, given as a path or a ``file://`` URL."""
    if not isinstance(image, str) or not (scheme := _SCHEME.match(image)):
        return Path(os.fsdecode(image))
    if scheme[1].lower() != "file":
        raise ImageError(f"{name} is not local, and images are not downloaded: save it and give the path")
    url = urlsplit(image)
    if url.netloc not in ("", "localhost"):
        raise ImageError(f"{name} names the host {url.netloc!r}: give a path on this machine")
    return Path(unquote(url.path))


def _read(path: Path, name: str, limit: int | None = None) -> bytes:
    """Read a regular file of at most ``limit`` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
        with open(descriptor, "rb") as file:
            size = regular_size(descriptor)
            content = file.read() if limit is None or size <= limit else None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ImageError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if content is None:
        raise ImageError(f"{name} has {size} bytes, more than the {limit} that max_pixels allows")
    return content


def _open(content: bytes, name: str) -> Image.Image:
    """Read the header of an image and check its format."""
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise ImageError(f"{name} is empty")
    try:
        return Image.open(io.BytesIO(content), formats=_FORMATS)
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} is no PNG, JPEG, WEBP, GIF or BMP image: convert it") from error
    except Exception as error:  # a decoder may raise anything for a damaged header
        raise ImageError(f"{name} cannot be decoded: {_one_line(error)}") from error


def _to_rgb(picture: Image.Image, name: str) -> Image.Image:
    """Decode the first frame to RGB: upright, transparency on white, 16 bits scaled to 8, no metadata."""
    from PIL import Image, ImageOps

    try:
        picture.load()
        if picture.getexif().get(_ORIENTATION, 1) != 1:
            picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I"):  # convert() would clip at 255
            picture = picture.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            white = Image.new("RGB", picture.size, "white")
            white.paste(picture, mask=picture.getchannel("A"))
            picture = white
        # A copy, since convert() may return the caller's picture, whose metadata must stay
        picture = picture.convert("RGB") if picture.mode != "RGB" else picture.copy()
    except Exception as error:
        raise ImageError(f"{name} cannot be decoded: {_one_line(error)}") from error
    picture.info = {}
    return picture
