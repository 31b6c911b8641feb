"""Images for people, judges and the policy: texts, thumbnails and ``data:`` URIs, and the images of a tool's result."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_rloo.images.parts import content_text
from torchrl_rloo.images.store import SUFFIXES, ImageError, ImageStore, describe, is_picture

if TYPE_CHECKING:
    from torchrl_rloo.images.encoder import ImageEncoder

MAX_IMAGES, MAX_PARTS = 8, 64  # of a tool's result
_EDGE = 224  # largest width and height of a thumbnail, in pixels
_MIME = {suffix: f"image/{name.lower()}" for name, suffix in SUFFIXES.items() if name != "MPO"}


def data_uri(path: str) -> str:
    """Return a stored image as a ``data:`` URI; ``ImageError`` if it is missing or changed."""
    ImageStore().load(path)
    return f"data:{_MIME[Path(path).suffix]};base64,{base64.b64encode(Path(path).read_bytes()).decode()}"


def thumbnail(path: str) -> str | None:
    """Return a small picture of a stored image as a ``data:`` URI, or None if it cannot be shown."""
    try:
        picture = ImageStore().load(path)
        picture.thumbnail((_EDGE, _EDGE))
    except (ImageError, OSError):
        return None
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def stored_messages(messages: list[dict[str, Any]], encoder: ImageEncoder | None) -> list[dict[str, Any]]:
    """Return messages with their images in the store; as ``[image WxH]`` for a model without an encoder.

    An item of a content is a text, a PIL image, or a part with its ``"image"`` or ``"url"``. ``ImageError`` if an image
    cannot be read.
    """

    def convert(content: list[Any]) -> Any:
        if not any(isinstance(part, str) or is_picture(part) or _is_image(part) for part in content):
            return content
        parts = [_stored_part(part, None if encoder is None else encoder.store) for part in content]
        return content_text(parts) if encoder is None else parts

    return [m | {"content": convert(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]


def _stored_part(part: Any, store: ImageStore | None) -> dict[str, Any]:
    if isinstance(part, str):
        return _text_part(part)
    if not (is_picture(part) or _is_image(part)):
        return part
    image = part if is_picture(part) else part["image"] if part.get("image") is not None else part.get("url")
    if store is None:
        return _text_part("[image {}x{}]".format(*_size(image)))
    is_stored = isinstance(image, str) and Path(image).parent == store.folder
    return {"type": "image", "url": image if is_stored else store.add(image)}


def has_images(value: Any) -> bool:
    """Return whether a tool's result is an image, or a list with one: a PIL image, or a part with a ``data:`` URI."""
    return any(map(_is_result, _items(value)))


def _items(value: Any) -> Iterable[Any]:
    return islice(value, MAX_PARTS) if isinstance(value, list | tuple) else [value]  # a list may be endless


def result_content(value: Any, to_text: Callable[[Any, int], str], max_chars: int, store: ImageStore | None) -> Any:
    """Return the content of a message that shows a tool's result with images.

    Without a store, for a model that reads text only, images become texts ``[image WxH]``. So do images that cannot be
    read, with the reason, and all after the first :data:`MAX_IMAGES`. Only the first :data:`MAX_PARTS` items are shown.
    """
    parts: list[dict[str, Any]] = []
    count = 0
    for item in _items(value):
        if _is_result(item):
            count += 1
            parts.append(_result_part(item, store) if count <= MAX_IMAGES else _text_part("[image left out]"))
            continue
        text = item["text"] if isinstance(item, Mapping) and set(item) == {"type", "text"} else item
        parts.append(_text_part(to_text(text, max_chars)))
        max_chars = max(0, max_chars - len(parts[-1]["text"]))
    if any(map(_is_image, parts)):
        return parts
    return "\n".join(part["text"] for part in parts)


def _result_part(item: Any, store: ImageStore | None) -> dict[str, Any]:
    try:
        image = item["url"] if isinstance(item, Mapping) else item  # no other field: it might name a local file
        return _stored_part({"type": "image", "image": image}, store)
    except Exception as error:  # a decoder may raise anything
        reason = str(error) if isinstance(error, ImageError) else f"{describe(image)} cannot be read"
        return _text_part(f"[image that cannot be shown: {' '.join(reason.split())[:200]}]")


def _size(image: Any) -> tuple[int, int]:
    from PIL import Image

    if is_picture(image):
        return image.size
    is_uri = isinstance(image, str) and image[:5].lower() == "data:"
    file = io.BytesIO(base64.b64decode(image.partition(",")[2])) if is_uri else image
    return Image.open(file, formats=[name for name in SUFFIXES if name != "MPO"]).size


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _is_result(item: Any) -> bool:
    if _is_image(item):
        return isinstance(item.get("url"), str) and item["url"][:5].lower() == "data:"
    return is_picture(item)
