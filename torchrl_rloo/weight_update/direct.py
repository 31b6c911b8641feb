"""Weights by reference, for engines in the trainer's own process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchrl_rloo.modules.engines.weight_protocol import TensorInfo
from torchrl_rloo.weight_update.transports import Transport


class Direct(Transport):
    """Hands the tensors themselves over; engines copy them as they load them."""

    name = "direct"

    def send(
        self, version: int, bucket: int, infos: Sequence[TensorInfo], tensors: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        return {"tensors": list(tensors)}
