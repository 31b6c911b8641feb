"""Idefics3, SmolVLM and SmolVLM2: an image is cut into tiles of equally many tokens (arXiv 2408.12637)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from torchrl_rloo.images.families.base import Family

_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


class Idefics3(Family):
    """Family of Idefics3 and SmolVLM, whose tiles and whole image have fixed numbers of tokens."""

    towers = ("vision_model",)
    margins = (2, 1)

    def __init__(self, config: Any, processor: Any, tokenizer: Any):
        super().__init__(config, processor, tokenizer)
        vision = config.vision_config
        self.tile = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2

    def number(self, size: tuple[int, int]) -> int:
        rows, columns = self._grid(size)
        return (rows * columns + 1) * self.tile

    def text(self, size: tuple[int, int]) -> str:
        (rows, columns), tile = self._grid(size), self.image_text * self.tile
        whole = f"{_AROUND}{_GLOBAL}{tile}{_AROUND}"
        if not rows:
            return whole
        lines = ("".join(f"{_AROUND}<row_{i + 1}_col_{j + 1}>{tile}" for j in range(columns)) for i in range(rows))
        return "".join(f"{line}\n" for line in lines) + "\n" + whole

    def process(self, image: Any) -> dict[str, torch.Tensor]:
        arguments = dict(self.processor(images=[[image]], return_tensors="pt"))
        if not arguments["pixel_values"].flatten(2).any(-1).all():  # the model takes it for padding
            raise ValueError("a tile is exactly gray, which the model would drop; use another image")
        return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}

    def arguments(self, images: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        sides = [max(image["pixel_values"].shape[k] for image in images) for k in (-2, -1)]

        def padded(value: torch.Tensor) -> torch.Tensor:
            return pad(value, (0, sides[1] - value.shape[-1], 0, sides[0] - value.shape[-2]))

        return {name: torch.cat([padded(image[name]) for image in images], 1) for name in images[0]}

    def processor_arguments(self) -> dict[str, Any]:
        return {"image_seq_len": self.tile}

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tiles, 0 for an image that is not cut."""
        width, height = size
        return self.processor.get_number_of_image_patches(height, width)[1:]
