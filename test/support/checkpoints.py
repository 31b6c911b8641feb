"""Models on disk."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save a model with its tokenizer, and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
