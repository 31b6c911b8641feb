"""ImageEncoder: the images of a vision-language model as tokens, and as arguments of a pass.

It is the ``images`` attribute of the model's tokenizer (:func:`encoder_of`), so that every part that has the tokenizer
expands images in the same way.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from torchrl_rloo.images.families import FAMILIES
from torchrl_rloo.images.store import ImageError, ImageStore, digest_of, upright_size
from torchrl_rloo.runtime.files import write_text

CACHE_BYTES = 2**30  # of the tensors of images that are kept for further passes


class ImageSpan(NamedTuple):
    """Image of a prompt: its file, and its tokens ``[start, stop)``, for which an engine may put ``placeholder``."""

    path: str
    start: int
    stop: int
    placeholder: tuple[int, ...]


class ImageEncoder:
    """Encoder of images for one vision-language model.

    Args:
        config: configuration of the model, of one of the ``FAMILIES``.
        processor: image processor for PIL images, such as ``Qwen2VLImageProcessorPil``.
        tokenizer: tokenizer of the model.
        store: folder of the images; None is the default one.
        cache_bytes: memory for the tensors of images that are kept for further passes.

    Attributes:
        excluded: ids of images and videos, which are never sampled.
        texts: texts of tokens that stand for an image.

    Raises:
        ValueError: if the family of the model is unknown.
    """

    def __init__(
        self,
        config: Any,
        processor: Any,
        tokenizer: Any,
        store: ImageStore | None = None,
        cache_bytes: int = CACHE_BYTES,
    ):
        if config.model_type not in FAMILIES:
            raise ValueError(
                f"model type {config.model_type!r} cannot see images here; use one of {sorted(FAMILIES)}, or text only"
            )
        self.family = FAMILIES[config.model_type](config, processor, tokenizer)
        self.store, self.cache_bytes = ImageStore() if store is None else store, cache_bytes
        self.excluded = self.family.excluded
        self.texts = tuple({self.family.image_text, self.family.placeholder})
        self._sizes: dict[str, tuple[int, int]] = {}
        self._tensors: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()
        self._cached_bytes = 0
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_tensors", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _tensors=OrderedDict(), _cached_bytes=0, _lock=Lock())

    def settings(self) -> dict[str, Any]:
        """Return class and settings of the image processor, and the attention, which both ends of a run must share."""
        return processor_settings(self.family.processor, self.family.sees_whole_images)

    def save(self, folder: str | os.PathLike) -> None:
        """Save the image processor in a model's folder, as :class:`~transformers.AutoProcessor` and vLLM read it."""
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

        self.family.processor.save_pretrained(folder)
        name = PROCESSOR_MAPPING_NAMES[self.family.config.model_type]
        text = json.dumps({"processor_class": name, **self.family.processor_arguments()}, indent=2)
        write_text(Path(folder) / "processor_config.json", text + "\n")

    def expand(self, text: str, paths: Sequence[str]) -> str:
        """Replace the placeholders of a rendered text by the tokens of its images."""
        parts = text.split(self.family.placeholder)
        if len(parts) - 1 != len(paths):
            raise ValueError(
                f"the chat template shows {len(parts) - 1} of {len(paths)} images; use messages that it accepts, with "
                "images in the turns of the user"
            )
        return "".join([parts[0], *(self.family.text(self.size(p)) + t for p, t in zip(paths, parts[1:], strict=True))])

    def expand_spans(
        self, text: str, paths: Sequence[str], spans: Sequence[tuple[int, int]]
    ) -> tuple[str, list[tuple[int, int]]]:
        """Expand as :meth:`expand` does, and return ``spans`` of the text as spans of the result."""
        expanded = self.expand(text, paths)
        places, place = [], text.find(self.family.placeholder)
        while place >= 0:
            places.append(place)
            place = text.find(self.family.placeholder, place + 1)
        added = [len(self.family.text(self.size(path))) - len(self.family.placeholder) for path in paths]
        moved = [[at + sum(n for p, n in zip(places, added, strict=True) if p < at) for at in span] for span in spans]
        return expanded, [(begin, end) for begin, end in moved]

    def size(self, path: str) -> tuple[int, int]:
        """Return width and height of an image."""
        digest = digest_of(path)
        if digest not in self._sizes:
            self._sizes[digest] = upright_size(path)
        return self._sizes[digest]

    def paths(self, images: torch.Tensor | None) -> list[str]:
        """Return the files of a row's images ``[n, 32]``; a row without any has None."""
        return [] if images is None else [str(self.store.path(bytes(digest))) for digest in images.tolist()]

    def number(self, path: str) -> int:
        """Return the number of image tokens of an image."""
        return self.family.number(self.size(path))

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for one image, from the cache if it has them."""
        digest = digest_of(path)
        with self._lock:
            if digest in self._tensors:
                self._tensors.move_to_end(digest)
                return self._tensors[digest]
        image = self.store.load(path)
        try:
            tensors = self.family.process(image)
        except Exception as error:
            raise ImageError(f"image {os.fspath(path)!r} cannot be processed: {error}") from error
        with self._lock:
            self._cached_bytes += _bytes(tensors) - _bytes(self._tensors.get(digest, {}))
            self._tensors[digest] = tensors
            while len(self._tensors) > 1 and self._cached_bytes > self.cache_bytes:
                self._cached_bytes -= _bytes(self._tensors.popitem(last=False)[1])
        return tensors

    def blank(self) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for an image without content."""
        from PIL import Image

        return self.family.process(Image.new("RGB", (64, 64), "red"))

    def spans(self, ids: Sequence[int], paths: Sequence[str]) -> tuple[ImageSpan, ...]:
        """Return the places of the images of a prompt."""
        places = [place for place, i in enumerate(ids) if i == self.family.image_id]
        self.check(len(places), paths)
        spans = []
        for path in paths:
            number = self.number(path)
            start, stop, placeholder = self.family.span(ids, places[0], places[number - 1] + 1)
            spans.append(ImageSpan(path, start, stop, placeholder))
            places = places[number:]
        return tuple(spans)

    def check(self, places: int, paths: Sequence[str]) -> None:
        """Raise an error unless a row has as many image tokens as its images."""
        if places != (expected := sum(map(self.number, paths))):
            raise ValueError(
                f"a row has {places} image tokens, but its {len(paths)} images have {expected}; keep the ids and the "
                "'images' that ChatEnv wrote"
            )


def processor_settings(processor: Any, sees_whole_images: bool) -> dict[str, Any]:
    """Return what decides the pixels and the attention of a model's images, as plain JSON."""
    own = {name: value for name, value in processor.to_dict().items() if name != "processor_class"}
    # The class is that of both backends, whose pixels differ
    settings = {"backend": getattr(processor, "backend", "pil"), "sees_whole_images": sees_whole_images, **own}
    return json.loads(json.dumps(settings, default=str))


def digests(paths: Sequence[str]) -> torch.Tensor:
    """Return the SHA-256 of stored images as uint8 ``[n, 32]``."""
    return torch.tensor([list(bytes.fromhex(digest_of(path))) for path in paths], dtype=torch.uint8)


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class PassImages:
    """Images of the rows of one pass, as ids that differ between images, so that equal ids mean equal rows.

    Image tokens of image ``k`` of :attr:`paths` have the id ``-1 - k`` in :attr:`tokens`.

    Args:
        encoder: encoder of the model.
        tokens: ids of ``B`` rows, ``[T_i]``.
        paths: images of each row, in the order of their tokens.
        stops: number of leading tokens of each row that the pass needs; None needs all. Later images are left out, and
            their tokens have the id 0.

    Raises:
        ValueError: if a row's image tokens are not those of its images; models would accept ids without pixels.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        tokens: Sequence[torch.Tensor],
        paths: Sequence[Sequence[str]],
        stops: Sequence[int] | None = None,
    ):
        self.encoder, self.tokens, self.positions = encoder, [], []
        self.paths: list[str] = []
        self.numbers: list[int] = []
        index: dict[str, int] = {}
        stops = [len(ids) for ids in tokens] if stops is None else stops
        for ids, row, stop in zip(tokens, paths, stops, strict=True):
            ids, shown = ids.cpu(), []
            places = ids == encoder.family.image_id
            left = int(places[:stop].sum())
            if stop:
                encoder.check(int(places.sum()), row)
            for path in row if left else ():
                if path not in index:
                    index[path] = len(self.paths)
                    self.paths.append(path)
                    self.numbers.append(encoder.number(path))
                shown.append(path)
                left -= self.numbers[index[path]]
                if left == 0:
                    break
            ids = ids.masked_fill(places, 0)
            self.positions.append(encoder.family.positions(places, [encoder.size(path) for path in shown]))
            if shown:
                own = torch.tensor([-1 - index[path] for path in shown])
                repeats = torch.tensor([self.numbers[index[path]] for path in shown])
                places[stop:] = False
                ids = ids.masked_scatter(places, own.repeat_interleave(repeats))
            self.tokens.append(ids)
        if self.positions[0] is None:
            self.positions = None

    def real(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the model's ids for ids of :attr:`tokens`."""
        return ids.masked_fill(ids < 0, self.encoder.family.image_id)

    def arguments(self, ids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the model's arguments for a pass over ids of :attr:`tokens`, of any shape, in their order."""
        found = (-1 - ids[ids < 0]).tolist()
        images = []
        while found:
            images.append(self.encoder.tensors(self.paths[found[0]]))
            found = found[self.numbers[found[0]] :]
        if not images:
            return {}
        return {name: value.to(device) for name, value in self.encoder.family.arguments(images).items()}

    def whole_images(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Return the number of the image, from 1, of each token whose image sees itself whole, and 0 for all others.

        It is None for models whose attention is causal also within an image.
        """
        if not self.encoder.family.sees_whole_images:
            return None
        seen = ids < 0
        first = seen & ~torch.nn.functional.pad(seen, (1, 0))[..., :-1]
        return first.flatten().cumsum(0).view_as(ids) * seen


def encoder_of(tokenizer: Any) -> ImageEncoder | None:
    """Return the image encoder of a tokenizer, or None if its model reads text only."""
    return getattr(tokenizer, "images", None)
