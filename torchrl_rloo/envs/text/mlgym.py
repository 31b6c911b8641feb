"""MLGymWrapper: MLGym's machine-learning tasks as conversations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torchrl_rloo.data.templates import Messages
from torchrl_rloo.envs.text.adapters import EnvSession
from torchrl_rloo.envs.text.session import Outcome, as_messages
from torchrl_rloo.runtime.event_loop import call

FORMAT = "Write exactly one command for the shell in a block between ``` and ```, such as\n```\nls\n```"
_BLOCK = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_SCORE = r"{} Score: \{{[^}}]*?: *(-?[\d.]+(?:[eE][-+]?\d+)?)"

Scores = tuple[float, float]


def read_scores(observation: str) -> Scores | None:
    """Return the evaluation's score and the baseline's in an answer of MLGym, or None if it has no evaluation.

    Example:
        >>> read_scores("Baseline Score: {'Score': 0.5}\\nEvaluation Score: {'Score': 0.75}")
        (0.75, 0.5)
    """
    found = [re.search(_SCORE.format(name), observation) for name in ("Evaluation", "Baseline")]
    return None if None in found else (float(found[0].group(1)), float(found[1].group(1)))


class MLGymWrapper(EnvSession):
    """Session of an MLGym environment (https://github.com/facebookresearch/MLGym), for ``text_env``.

    It needs MLGym's interface only, not its package: Gymnasium's ``reset`` and ``step`` of a command, where the first
    observation may be missing, ``step`` may lack ``truncated``, and the reward is 0.

    - The policy's command is the last block between triple backticks in its turn. A turn without one gets
      ``format_message`` and ``format_reward``, and does not step the environment.
    - The reward of an evaluation is the change of its score since the last one, or since the baseline's. So the return
      is the last score minus the baseline's, and repeated evaluations earn nothing.

    Differences from TorchRL's class of the same name: it is a session, not an ``EnvBase``, so conversations run in
    parallel. TorchRL adds evaluation minus baseline at every evaluation, which rewards repeating it.

    Args:
        env: environment of this conversation, or a function that makes it.
        task: first message if ``reset`` has no observation. None uses the row's ``"query"``.
        state: function of the environment that describes its state, such as ``lambda env: env.communicate("state")``,
            appended to each observation. None appends nothing.
        scores: function from an observation to ``(evaluation, baseline)`` or None; see :func:`read_scores`.
        lower_is_better: whether a smaller score is better.
        format_message: feedback to a turn without a command.
        format_reward: reward of a turn without a command.

    Example::

        def make():
            return MLGymWrapper(lambda: gymnasium.make("mlgym/titanic", devices=["cpu_0"]).unwrapped, task=TASK)


        env = text_env(make, tokenizer, prompts_per_batch=1, num_generations=8, timeout=600.0)
    """

    def __init__(
        self,
        env: Any,
        *,
        task: str | Messages | None = None,
        state: Callable[[Any], str] | None = None,
        scores: Callable[[str], Scores | None] = read_scores,
        lower_is_better: bool = False,
        format_message: str = FORMAT,
        format_reward: float = 0.0,
    ):
        super().__init__(env)
        self.task, self.state, self.scores = task, state, scores
        self.sign = -1.0 if lower_is_better else 1.0
        self.format_message, self.format_reward = format_message, format_reward
        self._last: float | None = None

    async def reset(self, row: dict[str, Any]) -> Messages | None:
        """Make and reset the environment, and return the first observation, the task or None."""
        if not hasattr(self.env, "reset"):
            self.env = await call(self.env)
        first = await super().reset(row)
        return first if first is not None or self.task is None else as_messages(self.task, "task")

    async def step(self, text: str) -> Outcome:
        """Run the turn's command; see :meth:`TextSession.step`."""
        blocks = _BLOCK.findall(text)
        if not blocks:
            return Outcome(feedback=self.format_message, reward=self.format_reward)
        observation, reward, *ended, info = await self._take(blocks[-1].strip())
        outcome = await self._outcome(observation, reward, *ended, info)
        if (found := self.scores(observation or "")) is None:
            return outcome
        evaluation, baseline = found
        gained = self.sign * (evaluation - (baseline if self._last is None else self._last))
        self._last = evaluation
        return replace(outcome, reward=outcome.reward + gained, metrics=outcome.metrics | {"score": evaluation})

    async def close(self) -> None:
        """Close the environment if it was made."""
        if hasattr(self.env, "reset"):
            await super().close()

    async def _text(self, observation: Any) -> Messages | None:
        if isinstance(observation, dict):  # of reset
            observation = observation.get("observation")
        if observation is None:
            return None
        said = observation or "(no output)"
        return await super()._text(said if self.state is None else f"{said}\n{await call(self.state, self.env)}")
