"""Images in chat messages: parts of any form become the paths of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchrl_rloo.images.store import ImageError, describe, digest_of, upright_size

_FIELDS = ("image", "url", "path", "base64", "image_url")  # of a part, the first with a value is its image
_KNOWN = {"type", "text", "mime_type", *_FIELDS}


def image_paths(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the paths of the images of messages, in order; each is ``{"type": "image", "url": <path>}``."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    return [part["url"] for content in contents for part in content if part.get("type") == "image"]


def image_label(url: Any) -> str:
    """Return the text that stands for a stored image, such as ``[image 64x48 1a2b3c4d]``."""
    try:
        digest = digest_of(url)[:8]
    except ImageError:
        return "[image that is not in a store]"
    try:
        return "[image {}x{} {}]".format(*upright_size(url), digest)
    except ImageError:
        return f"[image missing {digest}]"


def content_text(content: Any) -> str:
    """Return the content of a message as text, with a label for each image; None is empty."""
    if isinstance(content, list | tuple):
        return "".join(image_label(part.get("url")) if _is_image(part) else part.get("text") or "" for part in content)
    return "" if content is None else str(content)


def join_contents(*contents: Any, between: str = "") -> Any:
    """Join the contents of messages: texts to a text, and texts and images to parts."""
    if all(isinstance(content, str) for content in contents):
        return between.join(contents)
    parts: list[dict[str, Any]] = []
    for k, content in enumerate(contents):
        parts += [{"type": "text", "text": between}] if k and between else []
        parts += content_parts(content)
    return parts


def content_parts(content: Any) -> list[Any]:
    """Return the content of a message as a list of parts; None is an empty text."""
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def has_parts(query: Any) -> bool:
    """Return whether a prompt has a message whose content is a list of parts."""
    if not isinstance(query, list | tuple):
        return False
    return any(isinstance(m, dict) and isinstance(m.get("content"), list | tuple) for m in query)


def place_images(query: Any, images: Sequence[Any] | None, add: Callable[[Any], str], where: str) -> Any:
    """Return messages with their images as parts ``{"type": "image", "url": <path>}``.

    Parts without an image take those of the dataset's column in order. Without such parts the column's images come
    before the content of the first user message. What is malformed otherwise is left to the check of the prompt.

    ``add`` stores an image and returns its path. ``where`` names the row in a ValueError; ImageError passes through.
    """
    if not isinstance(images, list | tuple | None):
        raise ValueError(f"{where}: column 'images' must be lists of images, got {describe(images)}; name it 'image'")
    if not query or not isinstance(query, str | list | tuple):
        return query
    messages = [{"role": "user", "content": query}] if isinstance(query, str) else list(query)
    parts = [part for m in messages if has_parts([m]) for part in m["content"] if _is_image(part)]
    empty, images = sum(_data(part) is None for part in parts), list(images or ())
    if images and not parts:
        user = next((m for m in messages if isinstance(m, dict) and m.get("role") == "user"), {})
        content = user.get("content")
        if not isinstance(content, str | list | tuple):
            raise ValueError(f"{where} has images but no user message to show them in; add one")
        text = [{"type": "text", "text": content}] if content and isinstance(content, str) else list(content)
        shown = {**user, "content": [{"type": "image"} for _ in images] + text}
        messages = [shown if m is user else m for m in messages]
    elif empty != len(images):
        raise ValueError(f"{where} has {empty} image parts to fill, but {len(images)} images in its column")
    rest = iter(images)

    def convert(part: Any) -> Any:
        if not _is_image(part):
            return {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else part
        if unknown := sorted(k for k, v in part.items() if v is not None and k not in _KNOWN):
            raise ValueError(
                f"{where} has an image part with fields {unknown}, which would have no effect; remove them"
            )
        data = _data(part)
        return {"type": "image", "url": add(next(rest) if data is None else data)}

    return [{**m, "content": list(map(convert, m["content"]))} if has_parts([m]) else m for m in messages]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _data(part: Mapping[str, Any]) -> Any:
    """Return the image of a part, in a form that the store accepts, or None."""
    name = next((name for name in _FIELDS if part.get(name) is not None), None)
    data = None if name is None else part[name]
    if name == "image_url" and isinstance(data, Mapping):
        return data.get("url")
    return f"data:;base64,{data}" if name == "base64" else data
