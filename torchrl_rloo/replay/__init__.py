"""What happens to finished groups."""

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.filters import drop_zero_advantage

__all__ = ["MCAdvantage", "drop_zero_advantage"]
