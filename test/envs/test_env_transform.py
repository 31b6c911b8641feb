"""Transforms in the wrong place, environment or replay buffer, are refused by name."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, Transform, TransformedEnv

from torchrl_rloo import replay
from torchrl_rloo.envs import ChatEnv, DatasetChatEnv, transforms
from torchrl_rloo.envs.transforms import FeedbackTransform, RewardTransform
from torchrl_rloo.envs.turn_transform import EnvTransform
from torchrl_rloo.replay import MCAdvantage, ZeroSignalFilter
from torchrl_rloo.replay.pending import BufferTransform


@pytest.mark.parametrize(("package", "base"), [(transforms, EnvTransform), (replay, BufferTransform)])
def test_each_transform_has_the_base_that_knows_its_place(package, base: type) -> None:
    found = [value for name in package.__all__ if isinstance(value := getattr(package, name), type)]
    assert [t for t in found if issubclass(t, Transform) and not issubclass(t, base)] == []


@pytest.mark.parametrize("invert", [False, True])
@pytest.mark.parametrize(
    "transform", [RewardTransform(lambda completions, **columns: [1.0]), FeedbackTransform(lambda c, row: None)]
)
def test_a_buffer_refuses_what_acts_in_steps(transform: Transform, invert: bool) -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=2)
    buffer.append_transform(transform.clone(), invert=invert)
    with pytest.raises(TypeError, match=f"{type(transform).__name__} acts in the steps of an environment"):
        buffer.extend(TensorDict({"a": torch.zeros(2)}, [2]))
        buffer.sample()


@pytest.mark.parametrize("make", [lambda: MCAdvantage(2), ZeroSignalFilter])
def test_an_environment_refuses_what_acts_on_finished_rows(make, bpe, prompts) -> None:
    refused = pytest.raises(TypeError, match=rf"{type(make()).__name__} acts on rows .* use ReplayBuffer\(transform=")
    with refused:
        DatasetChatEnv(prompts, bpe, prompts_per_batch=1, transforms=[make()])
    with refused:
        TransformedEnv(ChatEnv(bpe), Compose(make()))
    with refused:
        DatasetChatEnv(prompts, bpe, prompts_per_batch=1).append_transform(make())
