"""Ranks train a vision-language model together although one of them has no image in its pass.

As a script, this file runs one rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from support import vision_models
from support.rank_scripts import become_rank, run_ranks
from torchrl_rloo.data.rows import placeholder_rows, stack_rows
from torchrl_rloo.envs import ChatEnv
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.training import shard_model

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "idefics3", "llava_next", "gemma3")
CASES = [(family, "fsdp", "shared_prefix") for family in FAMILIES]
CASES += [("qwen2_5_vl", "fsdp", "none"), ("idefics3", "ddp", "packed")]


def sampled_rows(policy: TransformersWrapper, store) -> TensorDictBase:
    """Return a row with a picture, one with text only, and one without actions."""
    image = {"type": "image", "url": store.add(vision_models.picture(40, 24))}
    questions = [[image, {"type": "text", "text": "What color is it?"}], "How many?"]
    queries = [[{"role": "user", "content": question}] for question in questions]
    env = ChatEnv(policy.tokenizer, batch_size=2)
    rows = policy(env.reset(stack_rows([TensorDict({"query": NonTensorData(q)}, []) for q in queries])))
    return stack_rows([*rows.unbind(0), placeholder_rows()[0]])


def gradients(family: str, packing: str, folder: Path, ranks: Ranks | None, parallel: str) -> list[torch.Tensor]:
    model, tokenizer, store = vision_models.build(family, folder / "images")
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "seed": 0})
    rows = sampled_rows(policy, store)
    if ranks is not None:
        rows = rows[ranks.rank :: ranks.size]
        shard_model(model, ranks, parallel)
    scorer = TransformersWrapper(model, tokenizer=tokenizer, generate=False, packing=packing)
    scorer.score(rows).log_probs.sum().backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [None if grad is None else grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found]


def run_rank(ranks: Ranks, folder: Path) -> list[list[torch.Tensor]]:
    own = folder / f"of{ranks.rank}"
    return [gradients(family, packing, own, ranks, parallel) for family, parallel, packing in CASES]


@pytest.mark.slow
def test_ranks_without_images_do_not_wait_and_give_the_gradient_of_one_process(tmp_path, fork_server) -> None:
    results = run_ranks(fork_server, __file__, tmp_path, 3).results()
    for number, (family, parallel, packing) in enumerate(CASES):
        expected = gradients(family, packing, tmp_path, None, parallel)
        for found in results:
            for ours, alone in zip(found[number], expected, strict=True):
                if alone is None:  # a part that no pass uses
                    assert ours is None or not ours.any()
                    continue
                torch.testing.assert_close(3 * ours, alone, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    become_rank(run_rank)
