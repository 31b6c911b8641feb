"""Replay-buffer transforms and storage for finished groups: advantages, filters, selection and reuse."""

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.cache import FIRST_CACHED_GROUP, GroupCache, RowStorage
from torchrl_rloo.replay.credit import NormalizeThenSum, RunningBaseline
from torchrl_rloo.replay.filters import TopKSelector, ZeroSignalFilter, drop_rows, drop_zero_advantage
from torchrl_rloo.replay.gae import TokenGAE, check_works_on_metadata
from torchrl_rloo.replay.rollouts import RolloutFiles, RolloutWriter, run_id

__all__ = [
    "FIRST_CACHED_GROUP",
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
    "check_works_on_metadata",
    "drop_rows",
    "drop_zero_advantage",
    "run_id",
]
