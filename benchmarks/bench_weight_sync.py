"""Time that new weights take to reach engines, and that engines stand still for them.

    python benchmarks/bench_weight_sync.py [--transports direct shared_memory files] [--layers 12]
    python benchmarks/bench_weight_sync.py --transports shared_memory --engines 2
    python benchmarks/bench_weight_sync.py --model FOLDER       # of a model and its tokenizer, in place of a random one

A ``WeightPublisher`` sends the weights of a random float32 model. The transport ``direct`` passes them by reference to
a ``VLLMEngine``. The others send them to one or more ``AsyncVLLMEngine`` in child processes.

Each transport and its copy are measured in a separate process. After the last push, the engines' log-probs are compared
with the model's. Ends with one line of JSON.

``--ranks 2 4`` measures the private memory that the ranks of a sharded model take for a push, without an engine that
loads. Memory in shared files is not private.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from statistics import median
from time import perf_counter
from typing import Any

from common import print_result, print_table, qwen2, run_python, word_tokenizer
from weight_transfers import sharded_rows

TRANSPORTS = ("direct", "shared_memory", "files")
PROMPT = tuple(range(10, 74))


def measure(directory: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Push the model in ``directory`` to engines started from it, and return the figures."""
    from transformers import AutoModelForCausalLM

    (transport,) = args.transports
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    copied = copy_seconds(model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        count = 1 if transport == "direct" else args.engines
        engines = [stack.enter_context(make_engine(transport, directory)) for _ in range(count)]
        publisher, pushes = make_publisher(model, engines, make_transport(transport, folder), args), []
        for _ in range(args.pushes + 1):
            scale_weights(model, 1.01)
            publisher.push_weights()
            pushes.append(publisher.last_push)
        error = max(log_prob_error(engine, model) for engine in engines)
        publisher.close()
        if error > 1e-3:
            raise RuntimeError(f"log-probs after {transport} are {error} nats off: weights did not arrive")
        row = {
            "transport": transport,
            "engines": f"{count} {type(engines[0]).__name__}",
            "MB": pushes[-1].bytes / 1e6,
            "first s": pushes[0].seconds,
            "s": median(push.seconds for push in pushes[1:]),
            "still s": median(max(push.still_seconds) for push in pushes[1:]),
            "copy s": copied,
            "error (nats)": error,
        }
    return [row]


def make_publisher(model: Any, engines: list[Any], transport: Any, args: argparse.Namespace) -> Any:
    from torchrl_rloo.weight_update import WeightPublisher

    return WeightPublisher(
        model,
        engines,
        transport=transport,
        bucket_bytes=args.bucket_mib << 20,
        staged=not args.streamed,
        checksum=args.checksum,
        verify_every=args.verify_every,
    )


def make_engine(transport: str, directory: str) -> Any:
    arguments = {"dtype": "float32", "max_model_len": 256}
    if transport == "direct":
        from torchrl_rloo.engines.vllm_inprocess import VLLMEngine

        return VLLMEngine(directory, **arguments)
    from torchrl_rloo.engines.vllm_async import AsyncVLLMEngine

    return AsyncVLLMEngine(directory, **arguments)


def make_transport(transport: str, folder: str) -> Any:
    from torchrl_rloo.weight_update import Direct, Files, SharedMemory

    return {"direct": Direct, "shared_memory": SharedMemory, "files": lambda: Files(folder)}[transport]()


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


def build(layers: int, width: int, vocabulary: int) -> tuple[Any, Any]:
    """Build a random model and its tokenizer."""
    tokenizer = word_tokenizer(vocabulary)
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "vocab_size": vocabulary}
    return qwen2(tokenizer, num_hidden_layers=layers, **sizes, **heads), tokenizer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--model", metavar="FOLDER", help="a saved model, in place of a random one")
    parser.add_argument("--pushes", type=int, default=5, help="measured pushes after the first, which connects")
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--engines", type=int, default=1, help="number of engines in child processes")
    parser.add_argument("--checksum", choices=("xxh3", "device"), default="xxh3")
    parser.add_argument("--verify-every", type=int, default=1, help="number of pushes of which one carries checksums")
    parser.add_argument("--streamed", action="store_true", help="load each bucket as it arrives, not all at the end")
    parser.add_argument("--ranks", nargs="+", type=int, help="numbers of ranks to shard the model over, without vLLM")
    parser.add_argument("--measure", metavar="DIRECTORY", help=argparse.SUPPRESS)  # used in the separate process
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.measure:
        print_result({"rows": measure(args.measure, args)})
        return
    if args.ranks:
        rows = sharded_rows(args)
        print_table("pushes of a sharded model:", rows)
        print_result({"benchmark": "weight_transfers", "rows": rows})
        return
    with tempfile.TemporaryDirectory() as directory:
        for part in () if args.model else build(args.layers, args.width, args.vocabulary):
            part.save_pretrained(directory)
        options = ["--pushes", str(args.pushes), "--bucket-mib", str(args.bucket_mib)]
        options += ["--measure", args.model or directory]
        options += ["--engines", str(args.engines), "--checksum", args.checksum]
        options += ["--verify-every", str(args.verify_every), *(["--streamed"] if args.streamed else [])]
        found = [run_python(__file__, "--transports", transport, *options) for transport in args.transports]
        rows = [row for each in found for row in each["rows"]]
    for row in rows:
        row["GB/s"] = row["MB"] / 1e3 / row["s"]
        row["of a copy's speed"] = f"{row['copy s'] / row['s']:.0%}"
    print_table(f"{rows[0]['MB']:.0f} MB of weights, {'streamed' if args.streamed else 'staged'}:", rows)
    print_result({"benchmark": "weight_sync", "rows": rows})


if __name__ == "__main__":
    main()
