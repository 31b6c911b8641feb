"""Size of the house: lines and files by room, what one training step and one weight version pass through, unused names.

    python benchmarks/house.py

Lines are those of tracked Python files, comments and blank lines included. A step is one step of the README's loop with
four rows of one turn, on the built-in model with random weights. A weight version is one push of a ``WeightPublisher``
to a ``TransformersEngine``. Both are run twice, and the second run is traced in all threads. A file counts if one of
its functions is called or resumed. A change of file is a call in another file than the thread's previous call.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

from common import OFFLINE, ONE_THREAD, print_result, print_table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torchrl_rloo"
# Lines that each room may have
BUDGETS = {"functional": 2_300, "data": 3_700, "objectives": 1_800, "replay": 1_900, "modules": 2_800}
BUDGETS |= {"engines": 3_900, "weight_update": 2_000, "envs": 7_000, "rewards": 3_800, "collectors": 3_000}
BUDGETS |= {"training": 2_200, "evaluation": 2_100, "diagnostics": 4_000, "run": 2_200, "cli": 2_300}
BUDGETS |= {"embedded": 900, "runtime": 1_300, "agents": 2_500, "sandbox": 3_000, "ray": 2_800}
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "tutorials", "sota_implementations", "benchmarks")


def tracked(root: Path, *places: str, ending: tuple[str, ...] = (".py",)) -> list[Path]:
    """Return the tracked files below some places of a checkout."""
    listing = subprocess.run(["git", "ls-files", "-z", *places], cwd=root, capture_output=True, text=True, check=True)
    paths = (root / name for name in listing.stdout.split("\0") if name.endswith(ending))
    return [path for path in paths if path.is_file()]  # a deleted file is tracked until the commit


def lines(files: Iterable[Path]) -> int:
    """Return the sum of the lines of some files."""
    return sum(len(path.read_bytes().splitlines()) for path in files)


def rooms(root: Path) -> list[dict[str, Any]]:
    """Return lines, files and budget of each room of the package, the largest first."""
    found: dict[str, list[Path]] = {name: [] for name in BUDGETS}
    for path in tracked(root, PACKAGE):
        parts = path.relative_to(root / PACKAGE).parts
        found.setdefault(parts[0] if len(parts) > 1 else "(no room)", []).append(path)
    table = [
        {"room": name, "lines": lines(files), "files": len(files), "budget": BUDGETS.get(name)}
        for name, files in found.items()
    ]
    return sorted(table, key=lambda row: -row["lines"])


def public_names(root: Path) -> list[str]:
    """Return the names in ``__all__`` of all packages, once for each package that has them."""
    names = []
    for path in tracked(root, PACKAGE):
        for node in ast.parse(path.read_text()).body if path.name == "__init__.py" else ():
            if isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["__all__"]:
                names += ast.literal_eval(node.value)
    return names


def unused(names: Iterable[str], root: Path) -> list[str]:
    """Return the names that occur in no recipe, tutorial, page or benchmark."""
    texts = (path.read_text() for path in tracked(root, *PAGES, ending=(".py", ".md", ".yaml")))
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return sorted(name for name in names if name not in words)


def arguments_of(node: ast.ClassDef) -> list[str]:
    """Return the arguments of a class, without ``self``."""
    (init,) = (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return [argument.arg for argument in [*init.args.args[1:], *init.args.kwonlyargs]]


def places(root: Path, owner: str, folders: tuple[str, ...] = ("collectors", "cli")) -> dict[str, int]:
    """Return how often each argument of a class is written down in some rooms.

    Counted are parameters, fields of classes, entries of docstrings, and arguments that are passed on under their name.
    """
    trees = [ast.parse(path.read_text()) for path in tracked(root, *(f"{PACKAGE}/{name}" for name in folders))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    (cls,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner)
    written: Counter[str] = Counter()
    for node in nodes:
        if isinstance(node, ast.arg):
            written[node.arg] += 1
        elif isinstance(node, ast.keyword) and getattr(node.value, "id", None) == node.arg:
            written[node.arg] += 1
        elif isinstance(node, ast.ClassDef):
            written.update(f.target.id for f in node.body if isinstance(f, ast.AnnAssign))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            written.update(re.findall(r"^ {4}(\w+): ", ast.get_docstring(node) or "", re.MULTILINE))
    return {name: written[name] for name in arguments_of(cls)}


class Trace(NamedTuple):
    """Files of the package that were entered, and the number of changes from one to another."""

    files: set[Path]
    changes: int


class Tracer:
    """Profiler of the calls in all threads that start after it."""

    def __init__(self, folder: Path):
        self._folder, self._recording = f"{folder}{os.sep}", False
        self._calls: list[tuple[int, str]] = []  # thread and file; append is atomic

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Install the profiler within the context."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._recording and frame.f_code.co_filename.startswith(self._folder):
            self._calls.append((threading.get_ident(), frame.f_code.co_filename))

    def trace(self, call: Callable[[], object]) -> Trace:
        """Make a call twice, the second time recorded."""
        call()
        self._calls.clear()
        self._recording = True
        call()
        self._recording = False
        last: dict[int, str] = {}
        changes = 0
        for thread, file in self._calls:
            changes += last.get(thread, file) != file
            last[thread] = file
        return Trace({Path(file) for _, file in self._calls}, changes)


def trace_step(tracer: Tracer) -> Trace:
    """Trace a step of the README's loop."""
    import torch
    from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

    from torchrl_rloo.collectors import LLMCollector
    from torchrl_rloo.data import load_prompts, tensor_rows
    from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
    from torchrl_rloo.envs import DatasetChatEnv
    from torchrl_rloo.modules import TransformersWrapper
    from torchrl_rloo.objectives import RLOOLoss
    from torchrl_rloo.replay import MCAdvantage, RowStorage
    from torchrl_rloo.training import accumulate, optimizer_step
    from torchrl_rloo.weight_update import InProcessWeightUpdater

    def reward(completions, **columns):  # differs in a group, so that every row trains
        return [float(place) for place in range(len(completions))]

    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
    prompts = load_prompts(addition_prompts("train"))
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, rewards=reward)
    collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
    buffer = ReplayBuffer(
        storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=4
    )
    loss_fn = RLOOLoss(policy.get_new_version(generate=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step():
        buffer.extend(tensor_rows(collector.collect()))
        for batch in buffer:
            accumulate(loss_fn, batch, micro_batch_size=64)
            optimizer_step(model, optimizer, max_grad_norm=1.0)
        buffer.empty()
        collector.update_policy_weights_()

    try:
        return tracer.trace(step)
    finally:
        collector.shutdown()


def trace_weights(tracer: Tracer) -> Trace:
    """Trace a weight version from the trainer to an engine in this process."""
    from torchrl_rloo.embedded import build_model, build_tokenizer
    from torchrl_rloo.engines import TransformersEngine
    from torchrl_rloo.weight_update import WeightPublisher

    tokenizer = build_tokenizer()
    updater = WeightPublisher(build_model(tokenizer, seed=0), TransformersEngine(build_model(tokenizer, seed=1)))
    try:
        return tracer.trace(updater.push_weights)
    finally:
        updater.close()


def measure(root: Path, traced: bool) -> list[dict[str, Any]]:
    """Return each measure with its value now and its aim."""
    package, recipe = tracked(root, PACKAGE), tracked(root, "sota_implementations/rloo")
    names = public_names(root)
    found = [
        ("package: lines", lines(package), 55_000),
        ("package: files", len(package), 230),
        ("tests: lines", lines(tracked(root, "test")), 45_000),
        ("recipe rloo: lines", lines(recipe), 350),
        ("recipe rloo: files", len(recipe), 1),
        ("public names", len(names), 350),
        ("public names in no recipe, tutorial, page or benchmark", len(unused(names, root)), 0),
        ("places of an argument of LLMCollector", median(places(root, "LLMCollector").values()), 2),
    ]
    ways = (("step", trace_step, (28, 6_000, 300)), ("weight version", trace_weights, (8, 1_500, None)))
    for name, trace, aims in ways if traced else ():
        tracer = Tracer(root / PACKAGE)
        with tracer():
            files, changes = trace(tracer)
        values = (len(files), lines(files), changes)
        measures = (f"{name}: files", f"{name}: lines of these", f"{name}: changes of file")
        found += zip(measures, values, aims, strict=True)
    return [dict(zip(("measure", "now", "aim"), entry, strict=True)) for entry in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-trace", action="store_true", help="leave out the step and the weight version")
    parser.add_argument("--names", action="store_true", help="also list the names that nothing mentions")
    args = parser.parse_args()
    os.environ.update(ONE_THREAD | OFFLINE)
    print_table("Rooms", rooms(ROOT))
    print_table("House", measures := measure(ROOT, traced=not args.no_trace))
    if args.names:
        print("\nNames that nothing mentions:", *unused(public_names(ROOT), ROOT), sep="\n  ")
    print_result({entry["measure"]: entry["now"] for entry in measures})


if __name__ == "__main__":
    main()
