"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: image tokens have a row and a column as positions (arXiv 2409.12191)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrl_rloo.images.families.base import Family


class QwenVL(Family):
    """Family of the Qwen-VL models; an image of ``h x w`` merged patches has ``h * w`` tokens."""

    towers = ("visual",)

    def number(self, size: tuple[int, int]) -> int:
        rows, columns = self._grid(size)
        return rows * columns

    def positions(self, places: torch.Tensor, sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return time, row and column of each token; text continues after the largest of an image."""
        parts, start, done = [], 0, 0
        firsts = places.nonzero()[:, 0].tolist()
        for rows, columns in map(self._grid, sizes):
            first, firsts = firsts[0], firsts[rows * columns :]
            text = torch.arange(first - done) + start
            start, done = start + first - done, first + rows * columns
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            parts += [text.expand(3, -1), torch.stack([torch.zeros_like(row), row, column]).flatten(1) + start]
            start += max(rows, columns)
        parts.append((torch.arange(len(places) - done) + start).expand(3, -1))
        return torch.cat(parts, 1)

    def _grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of merged patches."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # takes 2 s

        p, (width, height) = self.processor, size
        limits = {"min_pixels": p.size["shortest_edge"], "max_pixels": p.size["longest_edge"]}
        unit = p.patch_size * p.merge_size
        resized = smart_resize(height, width, unit, **limits) if p.do_resize else (height, width)
        return resized[0] // unit, resized[1] // unit
