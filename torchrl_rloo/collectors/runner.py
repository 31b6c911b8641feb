"""Runner of groups in this process: conversations, the source of their turns, and their places."""

from __future__ import annotations

from collections.abc import Callable

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.concurrency import Slots
from torchrl_rloo.collectors.conversation import GroupRunner, RunnerSettings
from torchrl_rloo.collectors.turn_source import make_turn_source


def make_runner(
    env: EnvBase,
    policy: Callable[[TensorDictBase], TensorDictBase],
    version: Callable[[], int],
    settings: RunnerSettings,
) -> GroupRunner:
    """Return a runner of groups, with a source of turns for the policy.

    Args:
        env: environment, adapted to the policy.
        policy: callable that takes and returns rows.
        version: function that returns the current policy version.
        settings: settings of the conversations.

    Raises:
        ValueError: if the policy and the settings cannot be combined.
    """
    runner = GroupRunner(env, version, settings)
    runner.source = make_turn_source(
        policy, version, runner.expected, eager=settings.eager, max_batch_size=settings.max_batch_size
    )
    runner.slots = Slots(settings.max_in_flight, runner.source.load)
    return runner
