"""TextTask: a text environment as a task, with its dataset of seeds and its transform."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset, load_prompts, split_prompts
from torchrl_rloo.envs.dataset import DatasetChatEnv
from torchrl_rloo.envs.tasks.base import EMBEDDED, TaskBase
from torchrl_rloo.envs.text.adapters import ENV_SEED
from torchrl_rloo.envs.text.transform import PLACEHOLDER_PROMPT, TextEnvTransform
from torchrl_rloo.envs.text.wrapping import wrap
from torchrl_rloo.rewards.protocol import RewardFunction

_FIRST_HELD_OUT = 1_000_000_000  # no run trains on seeds from here on


class TextTask(TaskBase):
    """Task of a text environment, in any style of :func:`wrap`, for runs and evaluations.

    Args:
        environment: see :func:`wrap`.
        name: name of the task.
        num_seeds: number of distinct games to train on if there is no dataset.
        rewards: reward functions in addition to the environment's rewards.
        system_prompt: see :class:`TextEnvTransform`.
        timeout: see :class:`TextEnvTransform`.
        style: see :func:`wrap`.
        action: see :func:`wrap`.
        observe: see :func:`wrap`.
        limits: limits of a conversation, as arguments of :class:`~torchrl_rloo.envs.ChatEnv`.

    Raises:
        ValueError: if ``num_seeds`` is out of range, or :func:`wrap` rejects the environment.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> from torchrl_rloo.envs.text.games import GuessNumber
        >>> task = TextTask(lambda: GuessNumber(1, 8, max_turns=4))
        >>> train, held_out = task.load(eval_size=8)
        >>> env = task.env(train, build_tokenizer(), prompts_per_batch=2, num_generations=2)
        >>> env.reset()["query"][0]
        [{'role': 'user', 'content': 'Guess a number from 1 to 8.'}]
    """

    reward_weights = None

    def __init__(
        self,
        environment: Any,
        *,
        name: str = "text",
        num_seeds: int = 10_000,
        rewards: Sequence[RewardFunction] = (),
        system_prompt: str | None = None,
        timeout: float | None = 60.0,
        style: str | None = None,
        action: Callable[[str], Any] | None = None,
        observe: Callable[[Any], Any] | None = None,
        limits: Mapping[str, Any] = MappingProxyType({}),
    ):
        if not 1 <= num_seeds <= _FIRST_HELD_OUT:
            raise ValueError(f"num_seeds={num_seeds} must be between 1 and {_FIRST_HELD_OUT}")
        self.make_session = wrap(environment, style=style, action=action, observe=observe)
        self.name, self.num_seeds, self.limits = name, num_seeds, limits
        self.rewards, self.settings = list(rewards), {"system_prompt": system_prompt, "timeout": timeout}

    def load(
        self, source: Any = None, *, eval_size: int = 256, seed: int = 0, **kwargs: Any
    ) -> tuple[PromptDataset, PromptDataset]:
        """Load training and held-out games.

        Args:
            source: source of rows for :func:`~torchrl_rloo.data.load_prompts`, whose columns are passed to ``reset``.
                None or ``"embedded"`` uses rows of seeds.
            eval_size: number of held-out games.
            seed: seed of the split of the source's rows.
            **kwargs: see :func:`~torchrl_rloo.data.load_prompts`.

        Returns:
            ``(train, held_out)``.

        Raises:
            ValueError: if ``kwargs`` other than ``tokenizer`` are given for rows of seeds.
        """
        if source in (None, EMBEDDED):
            if unused := sorted(name for name, value in kwargs.items() if value and name != "tokenizer"):
                raise ValueError(f"{unused} require a source of rows; set source, or omit them")
            return seed_dataset(self.num_seeds), seed_dataset(eval_size, _FIRST_HELD_OUT)
        return split_prompts(load_prompts(source, **({"chat": True} | kwargs)), eval_size, seed)

    def make_rewards(self) -> list[RewardFunction]:
        """Return the reward functions in addition to the environment's rewards."""
        return list(self.rewards)

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> None:
        """Return None: the metric is the return that the environment gives."""

    def make_transforms(self) -> list[Transform]:
        """Return one new :class:`TextEnvTransform`."""
        return [TextEnvTransform(self.make_session, **self.settings)]


def seed_dataset(size: int, first: int = 0) -> PromptDataset:
    """Return rows that have only an ``"env_seed"``, for an environment that makes its prompts itself.

    Args:
        size: number of rows.
        first: first seed; the rows have consecutive seeds.
    """
    return PromptDataset({keys.QUERY: PLACEHOLDER_PROMPT, ENV_SEED: seed} for seed in range(first, first + size))


def text_env(
    environment: Any,
    tokenizer: Any,
    *,
    prompts_per_batch: int,
    num_generations: int = 1,
    dataset: PromptDataset | None = None,
    num_seeds: int | None = None,
    system_prompt: str | None = None,
    timeout: float | None = 60.0,
    style: str | None = None,
    action: Callable[[str], Any] | None = None,
    observe: Callable[[Any], Any] | None = None,
    transforms: Sequence[Transform] = (),
    **kwargs: Any,
) -> DatasetChatEnv:
    """Build an environment for a collector from a text environment; use :class:`TextTask` for evaluation as well.

    Args:
        environment: see :func:`wrap`.
        tokenizer: the policy's tokenizer.
        prompts_per_batch: games per reset.
        num_generations: conversations per game.
        dataset: rows whose columns are passed to the environment's ``reset``; None uses rows of seeds.
        num_seeds: number of distinct games. None is 10,000; cannot be combined with ``dataset``.
        system_prompt: see :class:`TextEnvTransform`.
        timeout: see :class:`TextEnvTransform`.
        style: see :func:`wrap`.
        action: see :func:`wrap`.
        observe: see :func:`wrap`.
        transforms: transforms that answer turns before the environment sees them, such as tools.
        **kwargs: further arguments of :class:`~torchrl_rloo.envs.DatasetChatEnv`, such as ``rewards``, ``max_turns``.

    Example:
        >>> from torchrl_rloo.embedded import build_tokenizer
        >>> from torchrl_rloo.envs.text.games import GuessNumber
        >>> env = text_env(GuessNumber, build_tokenizer(), prompts_per_batch=2, num_generations=4)
        >>> env.reset()["query"][0]
        [{'role': 'user', 'content': 'Guess a number from 1 to 32.'}]
    """
    wrapped = {"style": style, "action": action, "observe": observe}
    if dataset is not None and num_seeds is not None:
        raise ValueError(f"num_seeds={num_seeds} cannot be combined with dataset; omit it")
    sizes = {} if num_seeds is None else {"num_seeds": num_seeds}
    task = TextTask(environment, **sizes, system_prompt=system_prompt, timeout=timeout, **wrapped)
    return task.env(
        seed_dataset(task.num_seeds) if dataset is None else dataset,
        tokenizer,
        prompts_per_batch=prompts_per_batch,
        num_generations=num_generations,
        transforms=[*transforms, *task.make_transforms()],
        **kwargs,
    )
