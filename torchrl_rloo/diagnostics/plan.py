"""Sizes of a run, computed and validated before it starts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

from torchrl_rloo.data.streamed import UNKNOWN_LENGTH


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes of a run; ``str(plan)`` summarizes them.

    Args:
        steps: number of rollout batches.
        prompts_per_step: prompts drawn per rollout batch.
        num_generations: completions per prompt, ``G``.
        minibatches: minibatches per rollout batch, each an optimizer step; they split the batch by rows.
        epochs_per_batch: epochs over each rollout batch.
        micro_batch_size: rows per forward and backward pass; None takes a whole minibatch.
        train_prompts: number of training prompts.
        eval_prompts: number of held-out prompts.
        max_prompt_tokens: length of the longest training prompt, in tokens.
        max_new_tokens: largest number of tokens per turn.
        context_length: longest sequence that the model accepts, in tokens; None if unlimited.
        max_turns: largest number of policy turns per trajectory; None if unlimited.
        max_tokens: largest number of tokens per trajectory, including the prompt and feedback; None leaves only the
            limits per turn and ``context_length``.

    Raises:
        ValueError: if a size is out of range, or the sizes do not fit together.

    Example:
        >>> plan = TrainingPlan(
        ...     steps=10,
        ...     prompts_per_step=6,
        ...     num_generations=4,
        ...     minibatches=2,
        ...     epochs_per_batch=3,
        ...     micro_batch_size=None,
        ...     train_prompts=30,
        ...     eval_prompts=8,
        ...     max_prompt_tokens=20,
        ...     max_new_tokens=16,
        ...     context_length=64,
        ... )
        >>> plan.rows_per_step, plan.optimizer_steps, plan.max_action_tokens, plan.longest_row
        (24, 60, 16, 36)
    """

    steps: int
    prompts_per_step: int
    num_generations: int
    minibatches: int
    epochs_per_batch: int
    micro_batch_size: int | None
    train_prompts: int
    eval_prompts: int
    max_prompt_tokens: int
    max_new_tokens: int
    context_length: int | None
    max_turns: int | None = 1
    max_tokens: int | None = None

    def __post_init__(self):
        self._check_sizes()
        # Check that batches divide and that the longest prompt leaves room for its turns
        if self.rows_per_step % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} must divide the rows per step, {self.prompts_per_step} prompts x "
                f"{self.num_generations} completions = {self.rows_per_step} "
                f"({self.rows_per_step} / {self.minibatches} = {self.rows_per_step / self.minibatches:.2f})"
            )
        if self.train_prompts < self.prompts_per_step:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} exceeds the {self.train_prompts} training prompts; add "
                f"prompts, or set it to at most {self.train_prompts}"
            )
        if self.max_tokens is not None and self.max_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} leaves no token for the policy after the longest prompt, of "
                f"{self.max_prompt_tokens} tokens; raise it, or set max_prompt_length to drop the longest prompts"
            )
        if self.context_length is not None and self.longest_row > self.context_length:
            raise ValueError(
                f"the longest prompt has {self.max_prompt_tokens} tokens and the policy may add "
                f"{self.longest_row - self.max_prompt_tokens}; the sum of {self.longest_row} exceeds the model's "
                f"context of {self.context_length}. Lower max_new_tokens, set max_tokens={self.context_length}, or set "
                "max_prompt_length to drop the longest prompts"
            )

    def _check_sizes(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "eval_prompts" else 1
            if value is None and "None" in field.type:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                kind = "null or an integer of" if "None" in field.type else "an integer of"
                raise ValueError(f"{field.name}={value!r} must be {kind} at least {least}")

    @property
    def rows_per_step(self) -> int:
        """Number of trajectories per rollout batch."""
        return self.prompts_per_step * self.num_generations

    @property
    def longest_row(self) -> int:
        """Largest number of tokens of a trajectory, without feedback; of one turn if their number is unlimited."""
        full = self.max_prompt_tokens + self.max_new_tokens * (self.max_turns or 1)
        return full if self.max_tokens is None else min(full, self.max_tokens)

    @property
    def max_action_tokens(self) -> int | None:
        """Upper bound of a trajectory's action tokens, after a prompt of any length; None if unlimited."""
        limits = [limit - 1 for limit in (self.max_tokens, self.context_length) if limit is not None]
        turns = [] if self.max_turns is None else [self.max_new_tokens * self.max_turns]
        return min(turns + limits, default=None)

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the whole run."""
        return self.steps * self.minibatches * self.epochs_per_batch

    def epochs(self, step: int) -> float:
        """Return the number of epochs over the training prompts after ``step`` steps."""
        return step * self.prompts_per_step / self.train_prompts

    def __str__(self) -> str:
        rows, updates = self.rows_per_step, self.minibatches * self.epochs_per_batch
        epochs = self.epochs(self.steps)
        trained = f"{self.train_prompts:,} training prompts, {epochs:.2f} epochs"
        if self.train_prompts >= UNKNOWN_LENGTH:
            trained = "training prompts from a stream"
        most = self.max_action_tokens
        tokens = "any number of" if most is None else f"at most {self.steps * rows * most:,}"
        turns = "any number of turns" if self.max_turns is None else count(self.max_turns, "turn")
        on_policy = "all on-policy" if updates == 1 else f"the first of each {updates} on-policy"
        return "\n".join(
            [
                f"{self.steps} steps of {self.prompts_per_step} prompts x {self.num_generations} completions "
                f"= {rows} rows, {self.steps * rows:,} in total",
                f"{count(self.minibatches, 'minibatch', 'minibatches')} x {count(self.epochs_per_batch, 'epoch')} "
                f"per step = {self.optimizer_steps:,} optimizer steps, {on_policy}",
                f"{trained}; {self.eval_prompts:,} held out",
                f"prompts up to {self.max_prompt_tokens} tokens, {turns} of up to "
                f"{self.max_new_tokens}; {tokens} action tokens",
            ]
        )


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, singular or plural.

    Example:
        >>> count(1, "turn"), count(3, "minibatch", "minibatches")
        ('1 turn', '3 minibatches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
