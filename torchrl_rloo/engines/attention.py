"""Switching a transformers model's attention for one forward pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()  # two threads that switch the same model in turn would restore each other's setting


@contextmanager
def attention_of(config, name: str) -> Iterator[None]:
    """Use another attention implementation, then restore the model's own.

    Args:
        config: the model's text config.
        name: the implementation, as registered with transformers.
    """
    with _LOCK:
        original, config._attn_implementation = config._attn_implementation, name
        try:
            yield
        finally:
            config._attn_implementation = original
