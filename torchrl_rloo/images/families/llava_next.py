"""LLaVA-NeXT: tiles of the best of some resolutions, without the tokens of their padding (arXiv 2310.03744)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from torchrl_rloo.images.families.base import Family


class LlavaNext(Family):
    """Family of LLaVA-NeXT; each line of tiles ends with a token for the new line."""

    towers = ("vision_tower",)

    def number(self, size: tuple[int, int]) -> int:
        from transformers.image_processing_utils import select_best_resolution  # takes 2 s

        (width, height), vision = size, self.config.vision_config
        best = select_best_resolution([height, width], self.processor.image_grid_pinpoints)
        side = vision.image_size // vision.patch_size
        rows, columns = (side * (length // vision.image_size) for length in best)
        # Drop the lines or columns that only pad the image to the shape of its tiles
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        with_class = self.config.vision_feature_select_strategy != "default"
        return rows * (columns + 1) + side * side + with_class

    def arguments(self, images: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        most = max(image["pixel_values"].shape[1] for image in images)
        tiles = [image["pixel_values"] for image in images]
        tiles = [pad(t, (0, 0, 0, 0, 0, 0, 0, most - t.shape[1])) for t in tiles]
        return {"pixel_values": torch.cat(tiles), "image_sizes": torch.cat([image["image_sizes"] for image in images])}

    def processor_arguments(self) -> dict[str, Any]:
        strategy = self.config.vision_feature_select_strategy
        patch = {"patch_size": self.config.vision_config.patch_size, "num_additional_image_tokens": 1}
        return {"vision_feature_select_strategy": strategy, **patch}
