"""Replay-buffer transforms and storage for finished groups: advantages, filters, selection and reuse."""

from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.baseline import RunningBaseline
from torchrl_rloo.replay.cache import FIRST_CACHED_GROUP, GroupCache
from torchrl_rloo.replay.credit import NormalizeThenSum
from torchrl_rloo.replay.filters import ZeroSignalFilter, drop_rows, drop_zero_advantage
from torchrl_rloo.replay.gae import TokenGAE
from torchrl_rloo.replay.on_metadata import check_works_on_metadata
from torchrl_rloo.replay.row_export import export_parquet
from torchrl_rloo.replay.row_files import RolloutFile, RolloutFileError, RolloutFiles, StoredGroup, vocabulary_hash
from torchrl_rloo.replay.row_writer import RolloutWriter, run_id
from torchrl_rloo.replay.storage import RowStorage
from torchrl_rloo.replay.top_k import TopKSelector, select_top_k

__all__ = [
    "FIRST_CACHED_GROUP",
    "NormalizeThenSum",
    "TokenGAE",
    "GroupCache",
    "MCAdvantage",
    "RolloutFile",
    "RolloutFileError",
    "RolloutFiles",
    "RolloutWriter",
    "RowStorage",
    "RunningBaseline",
    "StoredGroup",
    "TopKSelector",
    "ZeroSignalFilter",
    "check_works_on_metadata",
    "drop_rows",
    "drop_zero_advantage",
    "export_parquet",
    "run_id",
    "select_top_k",
    "vocabulary_hash",
]
