"""Mark of tests that need a GPU; ``pytest -m gpu`` selects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

T = TypeVar("T", bound=Callable)


def needs_gpu(test: T) -> T:
    """Mark a test that needs a CUDA device, and skip it where there is none."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))
