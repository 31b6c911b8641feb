"""Rows sent to another process: packed rows against a pickled lazy stack.

    python benchmarks/bench_rows.py

Times are the best of several repetitions on one thread; both sides carry the same rows.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from common import print_result, print_table
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import pack_rows, unpack_rows
from torchrl_rloo.data.rows import make_tensorclass, stack_rows


def make_rows(number: int, length: int) -> TensorDictBase:
    """Make finished rows of about ``length`` tokens, half of them sampled."""
    rows = []
    for i in range(number):
        size = length + i % 100 - 50
        tokens, mask = torch.randint(0, 150_000, (size,)), torch.arange(size) >= size // 2
        entries = {
            keys.QUERY: NonTensorData([{"role": "user", "content": f"What is {i}+{i}?"}]),
            keys.COMPLETION: NonTensorData([{"role": "assistant", "content": f"It is {2 * i}. " * 20}]),
            **{name: torch.tensor(i) for name in (keys.GROUP_ID, keys.TRAJECTORY_ID, keys.NUM_TURNS)},
            "tokens": make_tensorclass(Tokens, full=tokens, prompt=tokens[: size // 2]),
            "masks": make_tensorclass(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask),
            "log_probs": make_tensorclass(LogProbs, full=-torch.rand(size) * mask),
            "next": TensorDict({"reward": torch.rand(1, 1), "done": torch.ones(1, dtype=torch.bool)}, []),
        }
        rows.append(TensorDict(entries, []))
    return stack_rows(rows)


def best_ms(function: Callable[[], Any], repetitions: int) -> tuple[float, Any]:
    """Return the shortest time of a call in milliseconds, and its result."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times), result


def measure(send: Callable[[], bytes], receive: Callable[[bytes], Any], repetitions: int) -> dict[str, float]:
    """Return the times of both directions and the size of the message."""
    send_ms, message = best_ms(send, repetitions)
    receive_ms, _ = best_ms(lambda: receive(message), repetitions)
    return {"send ms": send_ms, "receive ms": receive_ms, "MB": len(message) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(args.rows, args.tokens)
    sides = {
        "lazy stack": measure(lambda: pickle.dumps(rows, 5), pickle.loads, args.repetitions),
        "packed rows": measure(
            lambda: pickle.dumps(pack_rows(rows), 5), lambda m: unpack_rows(pickle.loads(m)), args.repetitions
        ),
    }
    sides["ratio"] = {name: sides["lazy stack"][name] / value for name, value in sides["packed rows"].items()}
    title = f"{args.rows} rows of {args.tokens} tokens"
    print_table(title, [{"side": side, **figures} for side, figures in sides.items()])
    print_result(sides)


if __name__ == "__main__":
    main()
