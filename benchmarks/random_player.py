"""Teach the built-in model to play legal moves of an environment at random, and save it as the start of a run.

    python benchmarks/random_player.py outputs/player gymnasium FrozenLake-v1 '{"is_slippery": false}' 0 1 2 3

An environment of `task=openenv` is named by the address of its server. The lesson shows no rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from typing import Any

import torch

from torchrl_rloo.data import encode_demonstrations
from torchrl_rloo.embedded import warm_start
from torchrl_rloo.envs.tasks import load_task
from torchrl_rloo.envs.text.adapters import EnvSession
from torchrl_rloo.modules import TransformersWrapper, load_model, save_model
from torchrl_rloo.objectives import SFTLoss
from torchrl_rloo.training import accumulate, optimizer_step

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("output")
parser.add_argument("task")
parser.add_argument("environment")
parser.add_argument("arguments", type=json.loads)
parser.add_argument("moves", nargs="+")
parser.add_argument("--games", type=int, default=512)
parser.add_argument("--turns", type=int, default=8)
parser.add_argument("--steps", type=int, default=200)


async def play(task: Any, row: dict[str, Any], moves: list[str], turns: int, rng: random.Random) -> list[dict]:
    """Play a game with random moves; return its conversation."""
    session, conversation = EnvSession(task.kind()), []
    try:
        conversation += await session.reset(row)
        for _ in range(turns):
            conversation.append({"role": "assistant", "content": rng.choice(moves)})
            feedback = (await session.step(conversation[-1]["content"])).feedback
            if feedback is None:
                break
            conversation += feedback
    finally:
        await session.close()
    return conversation[: 1 + max(i for i, message in enumerate(conversation) if message["role"] == "assistant")]


def main() -> None:
    args, rng = parser.parse_args(), random.Random(0)
    torch.manual_seed(0)
    task = load_task(args.task)
    named = {"source" if args.task == "openenv" else "name": args.environment}
    rows, _ = task.load(**named, arguments=args.arguments, limit=args.games, eval_size=1)

    async def play_all() -> list[list[dict]]:
        return [await play(task, row, args.moves, args.turns, rng) for row in rows.rows]

    games = asyncio.run(play_all())
    model, tokenizer = load_model(warm_start(seed=0))
    lesson = SFTLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(args.steps):
        out = accumulate(lesson, encode_demonstrations(rng.choices(games, k=16), tokenizer))
        optimizer_step(model, optimizer, max_grad_norm=1.0)
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {float(out[0].loss):.3f}")
    save_model(model, tokenizer, args.output)


if __name__ == "__main__":
    main()
