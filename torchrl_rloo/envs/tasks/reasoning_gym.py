"""Procedural problems of reasoning-gym (github.com/open-thought/reasoning-gym) with its own verifiers."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torchrl_rloo.data.prompts import PromptDataset, load_prompts
from torchrl_rloo.envs.tasks.base import EMBEDDED, Scorer, TaskBase
from torchrl_rloo.rewards.protocol import RewardFunction
from torchrl_rloo.runtime.lookup import did_you_mean

TRAIN_SIZE = 1024  # problems to train on, unless data.limit says otherwise
_HELD_OUT_SEED = 2**30  # offset of the seed of held-out problems


def reasoning_gym_score(
    prompts: Sequence[Any], completions: Sequence[Any], entry: Sequence[str], **columns: Any
) -> list[float]:
    """Score answers with the verifiers of reasoning-gym, from 0 to 1.

    The answer is the text of the completion, without white space around it.

    Args:
        prompts: unused.
        completions: texts, or lists of messages, of which the last counts.
        entry: problems of reasoning-gym as Python literals, or as JSON.
        **columns: unused.
    """
    scores = []
    for completion, text in zip(completions, entry, strict=True):
        answer = completion if isinstance(completion, str) else completion[-1]["content"]
        problem = json.loads(text) if text.startswith('{"') else ast.literal_eval(text)
        scores.append(float(_family(problem["metadata"]["source_dataset"]).score_answer(answer.strip(), problem)))
    return scores


@cache
def _family(name: str) -> Any:
    """Return a dataset of a family of problems, for its verifier, which does not depend on the arguments."""
    return _dataset(name)


def _dataset(name: str, **arguments: Any) -> Any:
    """Return a dataset of a family of problems."""
    try:
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "task=reasoning_gym requires reasoning-gym: pip install 'torchrl_rloo[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        raise ValueError(
            f"data.name={name!r} is no family of reasoning-gym{did_you_mean(name, DATASETS)}; valid: "
            f"{', '.join(sorted(DATASETS))}"
        )
    if "datasets" in arguments:  # of composite
        spec = {"weight": 1.0, "config": {}}
        arguments["datasets"] = [DatasetSpec(**spec | dict(part)) for part in arguments["datasets"]]
    try:
        return reasoning_gym.create_dataset(name, **arguments)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"data.arguments={arguments} cannot be those of {name!r}: {error}; correct them") from error


class ReasoningGym(TaskBase):
    """Problems of one or several families of reasoning-gym, such as ``data.name=chain_sum`` or ``gcd+count_bits``.

    Rows have the columns ``answer``, one right answer, and ``entry``, which the verifier reads.
    """

    name = "reasoning_gym"
    takes_arguments = True
    reward_weights = None
    rewards = ("torchrl_rloo.envs.tasks.reasoning_gym.reasoning_gym_score",)

    def load(
        self,
        source: Any = None,
        *,
        name: str = "chain_sum",
        arguments: Mapping[str, Any] | None = None,
        eval_size: int = 256,
        seed: int = 0,
        limit: int | None = None,
        **kwargs: Any,
    ) -> tuple[PromptDataset, PromptDataset]:
        """Generate training and held-out problems, of which none is in both.

        Args:
            source: None or ``"embedded"``: there is no other source.
            name: families, joined by ``+``, of which the problems take turns; or ``"composite"``.
            arguments: arguments of the families, such as ``{"min_terms": 2}``. Those of ``"composite"`` are its parts
                with weights: ``{"datasets": [{"name": "gcd", "weight": 2, "config": {"max_num": 50}}, ...]}``.
            eval_size: number of held-out problems, at most.
            seed: seed of the problems.
            limit: number of training problems, at most; None is ``TRAIN_SIZE``.
            **kwargs: see :func:`~torchrl_rloo.data.load_prompts`.

        Returns:
            ``(train, held_out)``.
        """
        if source not in (None, EMBEDDED) or kwargs.get("eval_source") is not None:
            raise ValueError(f"data.source={source!r} has no effect with task=reasoning_gym; set data.name to a family")
        families = name.split("+")
        held_out = _generate(families, arguments or {}, eval_size, seed + _HELD_OUT_SEED, set())
        train = _generate(families, arguments or {}, limit or TRAIN_SIZE, seed, {row["prompt"] for row in held_out})
        return load_prompts(train, **kwargs), load_prompts(held_out, **kwargs)

    def make_rewards(self) -> list[RewardFunction]:
        """Return the score of the verifiers."""
        return [reasoning_gym_score]

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the score of the verifiers."""
        return reasoning_gym_score


def _generate(
    families: Sequence[str], arguments: Mapping[str, Any], size: int, seed: int, excluded: set[str]
) -> list[dict[str, Any]]:
    """Return ``size`` problems in turn of the families, each prompt once and none that is excluded."""
    rows: dict[str, dict[str, Any]] = {}
    each = -(-size // len(families))
    datasets = [_dataset(family, **arguments, size=each, seed=seed) for family in families]
    for i in range(each):
        for dataset in datasets:
            entry = dataset[i]
            if entry["question"] not in excluded:
                text = repr(entry)  # keeps tuples, which verifiers compare
                try:
                    ast.literal_eval(text)
                except (ValueError, SyntaxError):
                    text = json.dumps(entry, default=str)
                rows[entry["question"]] = {"prompt": entry["question"], "answer": entry["answer"], "entry": text}
    return list(rows.values())[:size]
