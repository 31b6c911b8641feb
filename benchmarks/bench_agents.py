"""Agents on one endpoint: are trained ids the sampled ids, what does a call cost, and what do failing agents leave?

    python benchmarks/bench_agents.py
    python benchmarks/bench_agents.py --parts exact --sessions 1000
    python benchmarks/bench_agents.py --parts crowd --agents 500
    python benchmarks/bench_agents.py --parts threads --agents 128

``exact`` runs agents that compact their context, call in parallel, start sub-agents, call tools and lose connections.
They use three API formats and two chat templates. An engine around a real model records what it samples. The program
fails if an id is trained on that was not sampled, or is trained on twice. It also fails if a reply that was read is
missing.
``crowd`` runs agents at the same time over a scripted engine. A tenth of them crash, hang or disconnect.
``threads`` runs synchronous agents, which block a thread each, over the embedded model with default settings.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

from common import cpu_seconds, print_result, print_table


def exact(sessions: int, seed: int) -> list[dict]:
    """Return a row of figures for each chat template, half of the sessions each."""
    from support.agent_sessions import TEMPLATES, run_sessions

    rows = []
    for template in TEMPLATES:
        found = run_sessions(template, sessions // len(TEMPLATES), seed=seed)
        cuts, counts = found["cuts"], found["counts"]
        rows.append(
            {
                "template": template,
                "sessions": found["rows"],
                "requests": counts["endpoint/requests"],
                "lost connections": sum(cuts.values()) - cuts["none"],
                "replies sampled": found["sampled"],
                "read": found["read"],
                "trained": found["trained"],
                "unread, trained": found["unread_but_trained"],
                "masked": counts.get("agent/orphans", 0),
                "samples": found["samples"],
                "tokens trained": found["trained_tokens"],
                "largest |ratio - 1|": found["ratio_error"],
                "CPU s": found["cpu_s"],
            }
        )
        print(template, found["formats"], cuts, counts, flush=True)
    return rows


def crowd(agents: int) -> list[dict]:
    """Return a row of figures for a crowd without faults, and one with them."""
    from support.agent_crowd import client_cost, run_crowd

    logging.disable(logging.WARNING)  # of agents that crash
    client = client_cost(agents)
    rows = []
    for share in (0.0, 0.1):
        found = run_crowd(agents, fault_share=share)
        rows.append(
            {
                "agents": agents,
                "failing": f"{share:.0%}",
                "replies": found["calls"],
                "trained": found["trained"],
                "disconnected": found["disconnected"],
                "failed": found["failed"],
                "timed out": found["timed_out"],
                "CPU ms a call": found["cpu_ms_per_call"],
                "of these, the client": client,
                "s": found["seconds"],
                "MB more": found["mb"],
                "left behind": sum(found["left"].values()),
            }
        )
    return rows


def ask_and_wait(context, row) -> float:
    """Ask once with a synchronous client."""
    from openai import OpenAI

    with OpenAI(base_url=context.base_url, api_key=context.api_key) as client:
        client.chat.completions.create(model=context.model, messages=row["query"])
    return 1.0


def threads(agents: int, steps: int = 5) -> list[dict]:
    """Return a row of figures for each step of synchronous agents."""
    from torchrl_rloo.agents import agent_env
    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.data import load_prompts
    from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
    from torchrl_rloo.modules import TransformersWrapper

    tokenizer = build_tokenizer()
    settings = {"max_new_tokens": 16, "seed": 0}
    policy = TransformersWrapper(build_model(tokenizer, seed=0).eval(), tokenizer=tokenizer, generate_kwargs=settings)
    prompts = load_prompts(addition_prompts("train", size=64))
    env = agent_env(ask_and_wait, tokenizer, dataset=prompts, prompts_per_batch=agents // 8, num_generations=8)
    collector, rows = LLMCollector(env, policy), []
    for step in range(1, steps + 1):
        began, used = time.perf_counter(), cpu_seconds()
        replies = len(collector.collect())
        figures = {"s": time.perf_counter() - began, "CPU s": cpu_seconds() - used}
        rows.append({"step": step, "agents": replies} | {name: round(value, 1) for name, value in figures.items()})
    collector.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("exact", "crowd", "threads"),
        default=["exact", "crowd", "threads"],
        help="parts to run",
    )
    parser.add_argument("--sessions", type=int, default=1000, help="sessions of the first part")
    parser.add_argument("--agents", type=int, default=500, help="concurrent agents of the other parts")
    parser.add_argument("--seed", type=int, default=0, help="seed of the agents")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))  # the tests use the same agents
    results = {}
    if "exact" in args.parts:
        results["exact"] = exact(args.sessions, args.seed)
        print_table("Trained ids and sampled ids", results["exact"])
    if "crowd" in args.parts:
        results["crowd"] = crowd(args.agents)
        print_table("A crowd of agents", results["crowd"])
    if "threads" in args.parts:
        results["threads"] = threads(args.agents)
        print_table("Steps of synchronous agents", results["threads"])
    print_result(results | {"cpu_s": cpu_seconds()})
    wide = max((row["largest |ratio - 1|"] for row in results.get("exact", ())), default=0.0)
    sys.exit(wide > 1e-5)


if __name__ == "__main__":
    main()
