"""Cost of recording who waits for whom: CPU us of a turn, and CPU ms of a step and of a table."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

from common import ONE_THREAD, print_result, print_table

from torchrl_rloo.diagnostics import waiting_table
from torchrl_rloo.engines.occupancy import Occupancy, OccupancyMeter
from torchrl_rloo.envs.activity import Activity, Presence

CONVERSATIONS = 64


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats * 1e6


def measure(turns: int) -> dict[str, float]:
    """Return the cost of a turn, of the end of a step with that many turns, and of a table over 50 steps."""
    activity, inside, meter = Activity(), Occupancy(), OccupancyMeter()
    presences = [Presence(activity) for _ in range(CONVERSATIONS)]
    for presence in presences:
        presence.enter("engine")

    def turn() -> None:
        presences.append(presence := presences.pop(0))
        asked = presence.enter("engine")
        inside.add(1)
        inside.add(-1)
        answered = presence.enter("environment")
        activity.record("engine", answered - asked)
        activity.record("environment", presence.enter("environment") - answered)

    of_turn = microseconds(turn, turns)
    taken: dict[str, float] = {}
    start = time.process_time()
    taken |= activity.take().timings() | meter.take({0: inside.read()})
    of_step = (time.process_time() - start) * 1e6
    entries = [{"step": step, "time/step": 2.0, "time/collect": 1.0, **taken} for step in range(1, 51)]
    return {
        "us of a turn": of_turn,
        "ms of a step": of_step / 1000,
        "ms of a table": microseconds(lambda: waiting_table(entries), 20) / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=50_000, help="number of turns (default: %(default)s)")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD)
    figures = measure(args.turns)
    print_table(f"Recording of waits, {CONVERSATIONS} conversations, {args.turns} turns in a step", [figures])
    print_result(figures)


if __name__ == "__main__":
    main()
