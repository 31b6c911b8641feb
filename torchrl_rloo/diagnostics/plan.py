"""Sizes of a run, computed and validated before it starts."""

from __future__ import annotations

from dataclasses import dataclass


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
        max_tokens: largest number of tokens per trajectory, including the prompt; None leaves only the limits per turn.

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
        >>> plan.rows_per_step, plan.optimizer_steps, plan.tokens_per_row
        (24, 60, 16)
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
        for name in (
            "steps",
            "prompts_per_step",
            "num_generations",
            "minibatches",
            "epochs_per_batch",
            "max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("micro_batch_size", "max_turns", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be null or at least 1")
        # Checks that need more than one field
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
        longest = self.max_prompt_tokens + self.tokens_per_row
        if self.context_length is not None and longest > self.context_length:
            raise ValueError(
                f"the longest prompt has {self.max_prompt_tokens} tokens and the policy may add "
                f"{self.tokens_per_row}; the sum of {longest} exceeds the model's context of {self.context_length}. "
                "Lower max_new_tokens, or set max_prompt_length to drop the longest prompts"
            )

    @property
    def rows_per_step(self) -> int:
        """Number of trajectories per rollout batch."""
        return self.prompts_per_step * self.num_generations

    @property
    def tokens_per_row(self) -> int:
        """Largest number of tokens that the policy may add to a prompt."""
        turns = self.max_new_tokens * (self.max_turns or 1)
        room = turns if self.max_tokens is None else self.max_tokens - self.max_prompt_tokens
        return max(self.max_new_tokens, room if self.max_turns is None else min(turns, room))

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
        tokens = self.steps * rows * self.tokens_per_row
        turns = "any number of turns" if self.max_turns is None else count(self.max_turns, "turn")
        on_policy = "all on-policy" if updates == 1 else f"the first of each {updates} on-policy"
        return "\n".join(
            [
                f"{self.steps} steps of {self.prompts_per_step} prompts x {self.num_generations} completions "
                f"= {rows} rows, {self.steps * rows:,} in total",
                f"{count(self.minibatches, 'minibatch', 'minibatches')} x {count(self.epochs_per_batch, 'epoch')} "
                f"per step = {self.optimizer_steps:,} optimizer steps, {on_policy}",
                f"{self.train_prompts:,} training prompts, {epochs:.2f} epochs; {self.eval_prompts:,} held out",
                f"prompts up to {self.max_prompt_tokens} tokens, {turns} of up to "
                f"{self.max_new_tokens}; at most {tokens:,} action tokens",
            ]
        )


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, singular or plural.

    Example:
        >>> count(1, "turn"), count(3, "minibatch", "minibatches")
        ('1 turn', '3 minibatches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
