"""Family: base of the families of vision-language models.

A subclass says which text stands for an image, and how its tokens are placed. ``config`` is the model's, ``processor``
the image processor for PIL images, and sizes of images are ``(width, height)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Family:
    """Base of families, for models whose image tokens have ordinary positions and causal attention.

    Attributes:
        image_id: id of the tokens whose embeddings an image replaces.
        placeholder: text by which a chat template shows an image.
        placeholder_id: id of this text.
        excluded: ids of images and videos, which are never sampled.
        towers: names of the modules of the model that see pixels.
        sees_whole_images: whether the tokens of an image attend to each other in both directions.
        margins: numbers of tokens before the first and after the last image token that belong to the image.
    """

    towers: tuple[str, ...] = ()
    sees_whole_images = False
    margins = (0, 0)

    def __init__(self, config: Any, processor: Any, tokenizer: Any):
        self.config, self.processor = config, processor
        self.image_id = int(config.image_token_id)
        self.image_text = tokenizer.convert_ids_to_tokens(self.image_id)
        self.placeholder, self.placeholder_id = self.image_text, self.image_id
        ids = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
        self.excluded = tuple(sorted({int(i) for i in ids if i is not None}))

    def number(self, size: tuple[int, int]) -> int:
        """Return the number of image tokens of an image."""
        raise NotImplementedError

    def text(self, size: tuple[int, int]) -> str:
        """Return the text that replaces the placeholder of an image."""
        return self.image_text * self.number(size)

    def process(self, image: Any) -> dict[str, torch.Tensor]:
        """Return the arguments of the model for one PIL image."""
        return dict(self.processor(images=[image], return_tensors="pt"))

    def arguments(self, images: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Join the arguments of several images, in the order of their tokens."""
        return {name: torch.cat([image[name] for image in images]) for name in images[0]}

    def processor_arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's processor class, which ``processor_config.json`` keeps."""
        return {}

    def positions(self, places: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        """Return position ids ``[3, T]`` of a row whose image tokens are at ``places`` ``[T]``; None for ordinary ones.

        Image tokens after those of all ``sizes`` count as text, since the pass does not need them.
        """
        return None

    def span(self, ids: Sequence[int], first: int, stop: int) -> tuple[int, int, tuple[int, ...]]:
        """Return start and stop of an image's tokens, and the ids that an engine expands to them.

        Its image tokens are in ``[first, stop)``.
        """
        before, after = self.margins
        return first - before, stop + after, (self.placeholder_id,)
