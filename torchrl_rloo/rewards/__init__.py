"""Reward functions: plain functions from completions to floats."""

from torchrl_rloo.rewards.accuracy import CosineScaled, MathAccuracy, ReasoningAccuracy
from torchrl_rloo.rewards.choices import MultipleChoice
from torchrl_rloo.rewards.classifier import SequenceClassifier
from torchrl_rloo.rewards.code import CodeTests
from torchrl_rloo.rewards.countdown import Countdown
from torchrl_rloo.rewards.ensembles import Ensemble
from torchrl_rloo.rewards.executors import Executor, InlineExecutor, ProcessExecutor, ThreadExecutor, make_executor
from torchrl_rloo.rewards.formats import JSONSchema, RegexFormat, think_format
from torchrl_rloo.rewards.instructions import InstructionFollowing
from torchrl_rloo.rewards.judge import LLMJudge
from torchrl_rloo.rewards.lengths import Length, LengthBudget, RepetitionPenalty, SoftOverlong, StopProperly
from torchrl_rloo.rewards.matching import ExactMatch, NumericMatch, boxed_accuracy, last_boxed
from torchrl_rloo.rewards.protocol import RewardBatch, call_reward, final_text
from torchrl_rloo.rewards.registry import REWARDS, load_reward
from torchrl_rloo.rewards.remote import RemoteScorer
from torchrl_rloo.rewards.remote_sandbox import RemoteSandbox
from torchrl_rloo.rewards.runner import RewardRunner
from torchrl_rloo.rewards.trl import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)
from torchrl_rloo.rewards.wrapping import ForTask, RewardWrapper, Shuffled

__all__ = [
    "REWARDS",
    "CodeTests",
    "CosineScaled",
    "Countdown",
    "Ensemble",
    "ExactMatch",
    "Executor",
    "ForTask",
    "InlineExecutor",
    "InstructionFollowing",
    "JSONSchema",
    "LLMJudge",
    "Length",
    "LengthBudget",
    "MathAccuracy",
    "MultipleChoice",
    "NumericMatch",
    "ProcessExecutor",
    "ReasoningAccuracy",
    "RegexFormat",
    "RemoteSandbox",
    "RemoteScorer",
    "RepetitionPenalty",
    "RewardBatch",
    "RewardRunner",
    "RewardWrapper",
    "SequenceClassifier",
    "Shuffled",
    "SoftOverlong",
    "StopProperly",
    "ThreadExecutor",
    "accuracy_reward",
    "boxed_accuracy",
    "call_reward",
    "final_text",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "last_boxed",
    "load_reward",
    "make_executor",
    "reasoning_accuracy_reward",
    "think_format",
    "think_format_reward",
]
