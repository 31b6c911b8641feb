"""Fixtures that make warm starts cheap."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def encoded_once() -> Iterator[None]:
    """Encode each task's demonstrations once: they cost more than the few steps of a test."""
    module = importlib.import_module("torchrl_rloo.embedded.warm_start")  # the package has a function of that name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_encode_demonstrations", functools.cache(module._encode_demonstrations))
        yield
