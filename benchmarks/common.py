"""Helpers of the benchmarks: resource usage, tables, and a tokenizer and a model of any size.

Only the standard library is imported at the top, to keep a parent process small. On Linux a child's peak memory starts
at that of the process it was forked from.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

PAD, UNKNOWN, START, SYSTEM, USER, ASSISTANT = SPECIAL = ("<pad>", "<unk>", "<turn>", "system", "user", "assistant")
END = "</turn>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant{% endif %}"
)


def cpu_seconds() -> float:
    """Return the user and system time of this process, including all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_memory_mb() -> float:
    """Return the largest resident set of this process so far, in MB (10^6 bytes)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def run_python(script: str, *args: str, checkout: Path | None = None) -> dict[str, Any]:
    """Run a script offline in a separate process with one thread, and return the JSON object of its last output line.

    Args:
        script: path of the script.
        *args: its arguments.
        checkout: root of the checkout whose package it imports; None imports the installed one.

    Raises:
        RuntimeError: if the process fails, with the end of its output.
    """
    env = os.environ | ONE_THREAD | OFFLINE | ({} if checkout is None else {"PYTHONPATH": str(checkout)})
    done = subprocess.run([sys.executable, script, *args], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(args)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@contextmanager
def local_ray(num_cpus: int, object_store_mb: int = 200) -> Iterator[None]:
    """Run a local Ray cluster within the context, whose actors import from this folder.

    Args:
        num_cpus: places for actors, whatever the machine has.
        object_store_mb: size of the object store.
    """
    import ray

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        ray.init(
            "local",
            num_cpus=num_cpus,
            object_store_memory=object_store_mb << 20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with equal keys as a Markdown table."""
    cells = [list(rows[0]), *([_cell(v) for v in row.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    print(f"\n{title}\n", lines[0], rule, *lines[1:], sep="\n", flush=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


def print_result(figures: Mapping[str, Any]) -> None:
    """Print the figures as one line of JSON, the last line of a benchmark."""
    print("\n" + json.dumps(figures), flush=True)


def word_tokenizer(vocab_size: int):
    """Build a tokenizer of ``vocab_size`` words and an end-of-turn token that no model of that vocabulary can sample.

    Its end-of-turn id is ``vocab_size``, one more than the model's last id. So every completion runs to its token
    limit, without an option or a logits processor on either side.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{i}" for i in range(vocab_size - len(SPECIAL))), END]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, padding_side="left"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen2(tokenizer, **sizes: int):
    """Build a randomly initialized float32 Qwen2 with tied embeddings for :func:`word_tokenizer`.

    Args:
        tokenizer: tokenizer with the padding and end-of-turn ids.
        **sizes: arguments of ``Qwen2Config``, including ``vocab_size``.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            **sizes,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
