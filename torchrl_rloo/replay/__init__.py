"""What happens to finished groups."""

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.baseline import RunningBaseline
from torchrl_rloo.replay.filters import drop_zero_advantage
from torchrl_rloo.replay.gae import GAE

__all__ = ["GAE", "MCAdvantage", "RunningBaseline", "drop_zero_advantage"]
