"""Time that new weights take to reach an engine, compared to a plain copy of the same bytes.

    python benchmarks/bench_weight_sync.py [--transports direct shared_memory collective files] [--layers 12]

A ``WeightPublisher`` sends the weights of a random float32 model.
``VLLMEngine``. The others send them to an ``AsyncVLLMEngine`` in a child process. Each transport and its copy are
measured in a separate process. After the last push, the engine's log-probs are compared with the model's. Ends with one
line of JSON.
"""

from __future__ import annotations

import argparse
import tempfile
from statistics import median
from time import perf_counter
from typing import Any

from common import print_result, print_table, qwen2, run_python, word_tokenizer

TRANSPORTS = ("direct", "shared_memory", "collective", "files")
PROMPT = tuple(range(10, 74))


def measure(transport: str, directory: str, pushes: int, bucket_mib: int, staged: bool) -> dict[str, Any]:
    """Push the model in ``directory`` to an engine started from it, and return the figures."""
    from transformers import AutoModelForCausalLM

    from torchrl_rloo.weight_update.weight_publisher import WeightPublisher

    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    with tempfile.TemporaryDirectory() as folder, make_engine(transport, directory) as engine:
        sender = make_transport(transport, folder)
        updater = WeightPublisher(model, engine, transport=sender, bucket_bytes=bucket_mib << 20, staged=staged)
        seconds = []
        for version in range(1, pushes + 2):
            scale_weights(model, 1 + 0.01 * version)
            updater.push_weights(version)
            seconds.append(updater.last_push.seconds)
        error = log_prob_error(engine, model)
        updater.close()
    if error > 1e-3:
        raise RuntimeError(f"log-probs after transport={transport!r} are {error} nats off: the weights did not arrive")
    return {
        "transport": transport,
        "engine": type(engine).__name__,
        "MB": updater.last_push.bytes / 1e6,
        "first s": seconds[0],
        "s": median(seconds[1:]),
        "copy s": copy_seconds(model),
        "error (nats)": error,
    }


def make_engine(transport: str, directory: str) -> Any:
    arguments = {"dtype": "float32", "max_model_len": 256}
    if transport == "direct":
        from torchrl_rloo.engines.vllm_inprocess import VLLMEngine

        return VLLMEngine(directory, **arguments)
    from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine

    return AsyncVLLMEngine(directory, **arguments)


def make_transport(transport: str, folder: str) -> Any:
    from torchrl_rloo.weight_update.collective import Collective
    from torchrl_rloo.weight_update.files import Files
    from torchrl_rloo.weight_update.shared_memory import SharedMemory
    from torchrl_rloo.weight_update.transport import Direct

    makers = {"direct": Direct, "shared_memory": SharedMemory, "collective": Collective, "files": lambda: Files(folder)}
    return makers[transport]()


def scale_weights(model: Any, factor: float) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def log_prob_error(engine: Any, model: Any) -> float:
    """Return the largest difference in nats over the sampled tokens of one turn."""
    import torch

    from torchrl_rloo.engines.base import Request

    (sample,) = engine.generate([Request(prompt=PROMPT, limit=8, seed=0)])
    ids = torch.tensor([[*PROMPT, *sample.tokens]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = scores.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
    return (expected - torch.tensor(sample.log_probs)).abs().max().item()


def copy_seconds(model: Any, repeats: int = 5) -> float:
    """Return the seconds of the fastest copy of all parameters, one by one, to memory that was written before."""
    import torch

    sources = [parameter.detach() for parameter in model.parameters()]
    targets = [torch.zeros_like(source) for source in sources]
    times = []
    for _ in range(repeats):
        start = perf_counter()
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        times.append(perf_counter() - start)
    return min(times)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--pushes", type=int, default=5, help="measured pushes after the first, which connects")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--streamed", action="store_true", help="load each bucket as it arrives, not all at the end")
    parser.add_argument("--measure", metavar="DIRECTORY", help=argparse.SUPPRESS)  # used in the separate process
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.measure:
        print_result(measure(args.transports[0], args.measure, args.pushes, args.bucket_mib, not args.streamed))
        return
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = word_tokenizer(args.vocabulary)
        heads = {"num_attention_heads": args.width // 64, "num_key_value_heads": args.width // 64}
        sizes = {"hidden_size": args.width, "intermediate_size": args.width * 8 // 3, "vocab_size": args.vocabulary}
        qwen2(tokenizer, num_hidden_layers=args.layers, **sizes, **heads).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        options = ["--pushes", str(args.pushes), "--bucket-mib", str(args.bucket_mib), "--measure", directory]
        options += ["--streamed"] if args.streamed else []
        rows = [run_python(__file__, "--transports", transport, *options) for transport in args.transports]
    for row in rows:
        row["GB/s"] = row["MB"] / 1e3 / row["s"]
        row["of a copy's speed"] = f"{row['copy s'] / row['s']:.0%}"
    print_table(f"{rows[0]['MB']:.0f} MB of weights, {'streamed' if args.streamed else 'staged'}:", rows)
    print_result({"benchmark": "weight_sync", "rows": rows})


if __name__ == "__main__":
    main()
