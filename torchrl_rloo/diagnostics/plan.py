"""What a run is going to do, in numbers, before it does it; impossible settings are refused with the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingPlan:
    """The sizes of a run.

    Args:
        steps: rollout batches.
        prompts_per_step: prompts drawn for each.
        num_generations: completions of each prompt, ``G``.
        minibatches: optimizer steps that a rollout batch is split into, by rows.
        epochs_per_batch: epochs over each rollout batch.
        micro_batch_size: rows in one forward and backward pass; None for a whole minibatch.
        train_prompts: size of the training set.
        eval_prompts: size of the held-out set.
        max_prompt_tokens: longest prompt of the training set.
        max_new_tokens: limit of one turn.
        context_length: the longest sequence that the model takes; None if it has no limit.
        max_turns: the policy's turns in a trajectory at most; None for any number.
        max_tokens: limit of a trajectory, prompt included; None for no limit but that of its turns.

    Raises:
        ValueError: if the sizes do not fit together.
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
        if self.rows_per_step % self.minibatches:
            raise ValueError(
                f"{self.prompts_per_step} prompts x {self.num_generations} completions = {self.rows_per_step} rows a "
                f"step, which minibatches={self.minibatches} does not divide "
                f"({self.rows_per_step} / {self.minibatches} = {self.rows_per_step / self.minibatches:.2f})"
            )
        if self.train_prompts < self.prompts_per_step:
            raise ValueError(
                f"the training set has {self.train_prompts} prompts, fewer than the {self.prompts_per_step} of a step; "
                f"add prompts, or set prompts_per_step to at most {self.train_prompts}"
            )
        longest = self.max_prompt_tokens + self.tokens_per_row
        if self.context_length is not None and longest > self.context_length:
            raise ValueError(
                f"the longest prompt has {self.max_prompt_tokens} tokens and the policy may add "
                f"{self.tokens_per_row}: {longest} in all, more than the model's context of {self.context_length}. "
                "Lower max_new_tokens, or set max_prompt_length to drop the longest prompts"
            )

    @property
    def rows_per_step(self) -> int:
        """Trajectories in a rollout batch."""
        return self.prompts_per_step * self.num_generations

    @property
    def tokens_per_row(self) -> int:
        """The most tokens that the policy may add to a prompt."""
        turns = self.max_new_tokens * (self.max_turns or 1)
        room = turns if self.max_tokens is None else self.max_tokens - self.max_prompt_tokens
        return max(self.max_new_tokens, room if self.max_turns is None else min(turns, room))

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.minibatches * self.epochs_per_batch

    def epochs(self, step: int) -> float:
        """Return the epochs over the training prompts that are done after a step."""
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
                f"= {rows} rows, {self.steps * rows:,} in all",
                f"{count(self.minibatches, 'minibatch', 'minibatches')} x {count(self.epochs_per_batch, 'epoch')} "
                f"a step = {self.optimizer_steps:,} optimizer steps, {on_policy}",
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
