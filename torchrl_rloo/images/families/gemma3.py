"""Gemma 3: all images have equally many tokens, which attend to each other in both directions (arXiv 2503.19786)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchrl_rloo.images.families.base import Family


class Gemma3(Family):
    """Family of Gemma 3 with images."""

    towers = ("vision_tower",)
    sees_whole_images = True

    def __init__(self, config: Any, processor: Any, tokenizer: Any):
        super().__init__(config, processor, tokenizer)
        if getattr(processor, "do_pan_and_scan", None):
            raise ValueError("do_pan_and_scan=True of the image processor is not supported; set it to False")
        self.begin, self.end = (
            tokenizer.convert_ids_to_tokens(int(i)) for i in (config.boi_token_index, config.eoi_token_index)
        )
        self.placeholder, self.placeholder_id = self.begin, int(config.boi_token_index)
        runs = {k: tokenizer("\n" * k, add_special_tokens=False)["input_ids"] for k in range(1, 32)}
        self.newlines = {k: ids[0] for k, ids in runs.items() if len(ids) == 1}

    def number(self, size: tuple[int, int]) -> int:
        return int(self.config.mm_tokens_per_image)

    def text(self, size: tuple[int, int]) -> str:
        return f"\n\n{self.begin}{self.image_text * self.number(size)}{self.end}\n\n"

    def process(self, image: Any) -> dict[str, torch.Tensor]:
        return {"pixel_values": super().process(image)["pixel_values"]}

    def processor_arguments(self) -> dict[str, Any]:
        return {"image_seq_length": int(self.config.mm_tokens_per_image)}

    def span(self, ids: Sequence[int], first: int, stop: int) -> tuple[int, int, tuple[int, ...]]:
        # The two line breaks around an image are one token with those of the text next to it
        counts = {i: k for k, i in self.newlines.items()}
        around = [self.newlines.get(counts[ids[place]] - 2) for place in (first - 2, stop + 1)]
        placeholder = (around[0], self.placeholder_id, around[1])
        return first - 2, stop + 2, tuple(i for i in placeholder if i is not None)
