"""Temporary switch of a transformers model's attention implementation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()  # without it, threads that switch one model would restore each other's setting


@contextmanager
def attention_implementation(config, name: str) -> Iterator[None]:
    """Use another attention implementation within the context, then restore the model's original one.

    Args:
        config: text config of the model.
        name: name of the implementation, as registered with transformers.
    """
    with _LOCK:
        original, config._attn_implementation = config._attn_implementation, name
        try:
            yield
        finally:
            config._attn_implementation = original
