"""Agents on one endpoint: are trained ids the sampled ids, what does a call cost, and what do failing agents leave?

    python benchmarks/bench_agents.py
    python benchmarks/bench_agents.py --parts exact --sessions 1000
    python benchmarks/bench_agents.py --parts crowd --agents 500

``exact`` runs agents that compact their context, call in parallel, start sub-agents, call tools and lose connections.
They use three API formats and two chat templates. An engine around a real model records what it samples. The program
fails if an id is trained on that was not sampled, or is trained on twice. It also fails if a reply that was read is
missing.
``crowd`` runs agents at the same time over a scripted engine. A tenth of them crash, hang or disconnect.
"""

from __future__ import annotations

import argparse
import logging
import sys
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("exact", "crowd"), default=["exact", "crowd"], help="parts to run"
    )
    parser.add_argument("--sessions", type=int, default=1000, help="sessions of the first part")
    parser.add_argument("--agents", type=int, default=500, help="concurrent agents of the second part")
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
    print_result(results | {"cpu_s": cpu_seconds()})
    wide = max((row["largest |ratio - 1|"] for row in results.get("exact", ())), default=0.0)
    sys.exit(wide > 1e-5)


if __name__ == "__main__":
    main()
