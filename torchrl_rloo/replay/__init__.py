"""Replay-buffer transforms and storage for finished groups: advantages, filters, selection and reuse."""

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.baseline import RunningBaseline
from torchrl_rloo.replay.cache import FIRST_CACHED_GROUP, GroupCache
from torchrl_rloo.replay.credit import NormalizeThenSum
from torchrl_rloo.replay.filters import ZeroSignalFilter, drop_zero_advantage
from torchrl_rloo.replay.gae import TokenGAE
from torchrl_rloo.replay.storage import RowStorage
from torchrl_rloo.replay.top_k import TopKSelector, select_top_k

__all__ = [
    "FIRST_CACHED_GROUP",
    "NormalizeThenSum",
    "TokenGAE",
    "GroupCache",
    "MCAdvantage",
    "RowStorage",
    "RunningBaseline",
    "TopKSelector",
    "ZeroSignalFilter",
    "drop_zero_advantage",
    "select_top_k",
]
