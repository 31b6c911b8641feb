"""Configuration for a base model in a GGUF file: solved examples before each prompt, plain text, packed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.gguf_file import tiny_model, write_file
from support.recipes import run_recipe_here
from support.runs import read_jsonl

SMALL = ["plan.steps=2", "plan.prompts_per_step=2", "plan.num_generations=4", "data.eval_size=4", "eval.every=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Return a random model with a context that the examples fit, as a GGUF file."""
    random = tiny_model()
    random.config.max_position_embeddings = 512
    return write_file(tmp_path_factory.mktemp("gguf") / "tiny.gguf", random)


@pytest.mark.parametrize(
    "settings",
    [
        ["eval.sets={again: {task: sums, size: 5}, gym: {task: reasoning_gym, name: count_bits, size: 3}}"],
        ["task=reasoning_gym", "data.name=count_bits", "lora={r: 2, target_modules: all-linear}", "optimizer.lr=1e-3"],
        ["model.chat_template='{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}'"],
    ],
    ids=["full", "lora", "template"],
)
def test_it_runs_to_the_end(model, tmp_path, monkeypatch, settings):
    monkeypatch.setenv("TORCHRL_RLOO_CACHE", str(tmp_path / "cache"))
    run_recipe_here(
        "rloo", "--config", "rloo_gemma", f"model.name={model}", *SMALL, *settings, f"output_dir={tmp_path}"
    )
    logged = read_jsonl(tmp_path / "metrics.jsonl")
    assert [each["step"] for each in logged] == [0, 1, 2]
    prompts = [str(row["prompt"]) for row in read_jsonl(tmp_path / "completions.jsonl")]
    assert prompts and all(prompt.count("Q: ") == 4 and prompt.rstrip().endswith("A:") for prompt in prompts)
