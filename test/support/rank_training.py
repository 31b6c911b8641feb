"""Training of a small model on fixed rollouts, alone or on several ranks: the weights must agree.

As a script it is one rank of several (:mod:`support.rank_scripts`). The folder has ``cases.json``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from transformers import AutoConfig, AutoModelForCausalLM

from support.rank_scripts import become_rank
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.engines.root import gathered
from torchrl_rloo.modules import TransformersWrapper, ValueHead
from torchrl_rloo.objectives import PRESETS, RLOOLoss, ValueLoss, make_method, merge_outputs
from torchrl_rloo.replay import MCAdvantage, RowStorage, TokenGAE
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import accumulate, check_copies, minibatches, optimizer_step, shard_model
from torchrl_rloo.weight_update.shards import gather, reshard

GROUPS, MEMBERS, VOCABULARY = 5, 3, 48


def build_model(
    tied: bool = True, family: str = "qwen2", heads: tuple[int, int] = (2, 1), layers: int = 3
) -> torch.nn.Module:
    """Build a small model, equal in each process."""
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=32 // heads[0],
        initializer_range=0.15,
        tie_word_embeddings=tied,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def build_rows(step: int, scorer: TransformersWrapper) -> TensorDictBase:
    """Build the rollouts of a step: groups with shared prompts and ragged tails, one without signal, one row abstains.

    The log-probs of sampler, reference and proximal policy are those of ``scorer`` with noise.
    """
    generator = torch.Generator().manual_seed(step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    rows = []
    for group in range(GROUPS):
        prompt = torch.randint(VOCABULARY, (number(2, 9),), generator=generator)
        for member in range(MEMBERS):
            answer = torch.randint(VOCABULARY, (number(1, 14),), generator=generator)
            tokens = torch.cat([prompt, answer])
            reward = 1.0 if group == 2 else float(torch.rand((), generator=generator))
            if (group, member) == (4, 1):
                reward = float("nan")
            entries = {
                keys.GROUP_ID: torch.tensor(step * GROUPS + group),
                keys.TOKENS: tokens,
                keys.ACTION_MASK: torch.arange(len(tokens)) >= len(prompt),
                keys.ATTENTION_MASK: torch.ones(len(tokens), dtype=torch.bool),
                keys.TRUNCATED: torch.tensor([number(0, 4) == 0]),
                keys.REWARD: torch.tensor([[reward]]),
                keys.REWARDS: torch.tensor([reward]),
                keys.ORIGIN: torch.tensor(keys.SAMPLED if member else keys.GREEDY),  # which remax reads
            }
            rows.append(TensorDict(entries, []))
    rows = stack_rows(rows)
    with torch.no_grad():
        scored = scorer.score(rows)
    for row, values, taken in zip(rows.unbind(0), scored.log_probs, scored.actions.mask, strict=True):
        mask = row[keys.ACTION_MASK]
        for key, scale in ((keys.LOG_PROBS, 0.2), (keys.REF_LOG_PROBS, 0.3), (keys.PROXIMAL_LOG_PROBS, 0.1)):
            noise = scale * torch.randn(int(mask.sum()), generator=generator)
            row.set(key, torch.zeros(len(mask)).masked_scatter(mask, values[taken] + noise))
    return rows


class Delivered(NamedTuple):
    """Rollouts of a step as a rank gets them: rows, or metadata and a function to its own rows; and their metrics."""

    rows: TensorDictBase
    rows_of: Callable[[TensorDictBase], TensorDictBase] | None = None
    metrics: dict[str, float] = {}


def train(
    case: dict[str, Any],
    ranks: Ranks | None,
    deliver: Callable[[int, TensorDictBase, TransformersWrapper, TransformersWrapper], Delivered] | None = None,
) -> dict[str, Any]:
    """Train a model for some steps.

    Args:
        case: ``preset``, and optionally ``parallel``, ``packing``, ``steps``, ``loss``, ``shard``, ``accumulate``,
            ``minibatches``, ``tied``, ``checkpointing``, ``samples``, ``rewards``,
            ``model`` (arguments of :func:`build_model`), ``epochs``, ``kl``, ``advantage``, ``members``.
        ranks: ranks that train together. None trains in this process alone.
        deliver: function of the step, its rollouts, the policy, and the policy of the initial weights. None delivers
            the rollouts.

    Returns:
        Weights by name, and the metrics of the last step.
    """
    wrapper = {"tokenizer": TOKENIZER, "generate": False}
    shape = {"tied": case.get("tied", True), **case.get("model", {})}
    model, start = build_model(**shape), TransformersWrapper(build_model(**shape), **wrapper)
    preset, critic = PRESETS[case["preset"]], None
    if preset.critic:
        critic = ValueHead(model)
        advantage = {**preset.advantage_arguments}
        loss_arguments = dict(preset.loss_arguments)
    else:
        method = make_method(
            case["preset"],
            kl=case.get("kl", "default"),
            loss=case.get("loss", {}),
            advantage=case.get("advantage", {}),
            max_new_tokens=14,
            prompts_per_step=GROUPS,
            num_generations=case.get("members", MEMBERS),
            reward_weights=[1.0],
        )
        advantage, loss_arguments = method.advantage_arguments, method.loss_arguments
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable()
    # Distribute
    if ranks is not None:
        for part in (model, *([] if critic is None else [critic])):
            shard_model(part, ranks, case["parallel"], **case.get("shard", {}))
    policy = TransformersWrapper(model, packing=case.get("packing", "none"), **wrapper)
    losses = [RLOOLoss(policy, **loss_arguments), *([] if critic is None else [ValueLoss(critic)])]
    parts = torch.nn.ModuleList([model, *([] if critic is None else [critic])])
    # AdamW divides by the gradient's size, so rounding would decide the step of a gradient near 0; eps outweighs it
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)
    transform = MCAdvantage(**advantage) if critic is None else TokenGAE(critic, **advantage)
    # Train
    sampler = policy.get_new_version(generate=True, generate_kwargs={"max_new_tokens": 3, "seed": 0})
    prompts = TensorDict({keys.PROMPT_TOKENS: torch.arange(6).view(2, 3)}, [2])
    metrics: dict[str, float] = {}
    for step in range(case.get("steps", 20)):
        buffer = ReplayBuffer(
            storage=RowStorage(),
            sampler=SamplerWithoutReplacement(),
            transform=transform,
            generator=torch.Generator().manual_seed(step),
        )
        rows = build_rows(step, start)
        if "rewards" in case:  # equal ones: all rows drop
            for row in rows.unbind(0):
                row.set(keys.REWARD, torch.full((1, 1), case["rewards"]))
        delivered = Delivered(rows) if deliver is None else deliver(step, rows, policy, start)
        buffer.extend(delivered.rows)
        if case.get("samples") and ranks is not None:
            with gathered(model):
                ranks.on_main(lambda: sampler(prompts.clone()))
        number = case.get("minibatches", 1)
        settings = {"ranks": ranks, "rows_of": delivered.rows_of, **case.get("accumulate", {})}
        for batch in minibatches(buffer, number, case.get("epochs", 1)):
            outputs = [accumulate(loss, batch, **settings) for loss in losses]
            norm = optimizer_step(parts, optimizer, max_grad_norm=0.5)
        metrics = {k: v for out in outputs for k, v in merge_outputs(out).items()} | {"grad_norm": float(norm)}
        metrics |= delivered.metrics
    if ranks is not None:
        check_copies(parts, ranks)
    for part in parts:
        reshard(part)
    return {
        "weights": {name: gather([p.detach()], None)[0].clone() for name, p in parts.named_parameters()},
        "metrics": metrics,
    }


def run_cases(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """Train all cases of a folder on one rank."""
    results = []
    for case in json.loads((folder / "cases.json").read_text()):
        split = Ranks(ranks.rank, ranks.size, group=ranks.group, control=ranks.control, **case.get("ranks", {}))
        try:
            results.append(train(case, split))
        except Exception:
            results.append({"error": traceback.format_exc()})
            if ranks.size > 1:  # the other ranks wait in another call
                break
    return results


def make_tokenizer() -> Any:
    """Return a tokenizer; only its pad token is used."""
    from torchrl_rloo.embedded import build_tokenizer

    return build_tokenizer()


TOKENIZER = make_tokenizer()

if __name__ == "__main__":
    become_rank(run_cases)
