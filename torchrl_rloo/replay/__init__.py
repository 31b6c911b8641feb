"""Replay-buffer transforms and storage for finished groups: advantages, filters, selection and reuse."""

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.cache import GroupCache, RowStorage
from torchrl_rloo.replay.credit import NormalizeThenSum, RunningBaseline
from torchrl_rloo.replay.filters import TopKSelector, ZeroSignalFilter, drop_rows, drop_zero_advantage, merge_groups
from torchrl_rloo.replay.gae import TokenGAE
from torchrl_rloo.replay.rollouts import RolloutFiles, RolloutWriter

__all__ = [
    "NormalizeThenSum",
    "TokenGAE",
    "GroupCache",
    "MCAdvantage",
    "RolloutFiles",
    "RolloutWriter",
    "RowStorage",
    "RunningBaseline",
    "TopKSelector",
    "ZeroSignalFilter",
    "drop_rows",
    "merge_groups",
    "drop_zero_advantage",
]
