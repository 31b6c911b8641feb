"""Arguments of the Hugging Face hub that a model shares with its tokenizer."""

from __future__ import annotations

HUB_KWARGS = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
