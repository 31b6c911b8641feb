"""Commands of ``torchrl-rloo``: a line of help and examples of each."""

from __future__ import annotations

from torchrl_rloo.cli import export
from torchrl_rloo.cli import rescore as stored

COMMANDS = {
    "ls": "list the recipes",
    "run": "run a built-in recipe or your own copy of one",
    "cp": "copy a recipe and all its settings, to edit them",
    "plan": "estimate the memory of a run before anything is loaded",
    "check": "check prompts, template, rewards and settings of a run before it starts",
    "evaluate": "evaluate a checkpoint on held-out prompts",
    "watch": "print a line for each step of a run",
    "export": "merge the adapter of a finished run, and upload the model with its card to the hub",
    "serve": "start a vLLM server that accepts weight updates",
    "rescore": "apply other rewards to stored rows, and print what would have changed",
    "replay": "score stored rows again with a model, token by token",
}
EXAMPLES = {
    "": """
  torchrl-rloo run rloo                                  train the built-in model on the built-in task, on the CPU
  torchrl-rloo run rloo task=gsm8k model.name=my/model model.device=cuda
  torchrl-rloo cp mine.py                                copy the loop of 100 lines and its settings, to edit them
  torchrl-rloo evaluate model.name=outputs/rloo/addition/seed0/model""",
    "ls": """
  torchrl-rloo ls""",
    "run": """
  torchrl-rloo run rloo --help-all                       list all settings of the recipe
  torchrl-rloo run rloo plan.steps=10 seed=1
  torchrl-rloo run rloo_tools                            train the built-in model to call a tool
  torchrl-rloo run ppo                                   train with a critic; distill: learn from a teacher
  torchrl-rloo run rloo_agent                            train an agent that calls an OpenAI-compatible endpoint
  torchrl-rloo run mine.py optimizer.lr=1e-5             run your copy
  torchrl-rloo run --ranks 4 rloo train.parallel=fsdp    train on four GPUs of this machine
  torchrl-rloo run rloo inference=ray_vllm inference.replicas=8 ray.address=auto    sample on a Ray cluster
  torchrl-rloo run --ranks 4 --on-ray --resources GPU=1 rloo train.parallel=fsdp inference=ray_vllm""",
    "cp": """
  torchrl-rloo cp mine.py                                write mine.py (simple, 100 lines) and mine.yaml (settings)
  torchrl-rloo cp rloo mine.py                           copy another recipe; this one has every feature
  torchrl-rloo cp rloo mine.py task=gsm8k model.name=my/model
  python mine.py                                         run the copy, like torchrl-rloo run mine.py""",
    "plan": """
  torchrl-rloo plan rloo model.name=my/model --gpu-memory 80
  torchrl-rloo plan --ranks 8 --gpu-memory 80 --prompt-tokens 1024 rloo model.name=my/model train.parallel=fsdp""",
    "check": """
  torchrl-rloo check rloo                                check a run of the built-in task
  torchrl-rloo check rloo task=custom data.source=mine.jsonl reward.functions=[my_rewards.graded]""",
    "rescore": stored.RESCORE_EXAMPLES,
    "replay": stored.REPLAY_EXAMPLES,
    "export": export.EXAMPLES,
    "watch": """
  torchrl-rloo watch outputs/rloo/addition/seed0    print the path of the report and a line a step""",
    "serve": """
  torchrl-rloo serve my/model --dtype bfloat16
  torchrl-rloo serve my/model --port 8001 --tensor-parallel-size 2 -- --max-model-len 4096
  torchrl-rloo run rloo model.name=my/model inference=vllm_server
  torchrl-rloo serve mine.py                             serve the model of mine.yaml, with its dtype and length
  torchrl-rloo serve rloo task=gsm8k model.name=my/model data.max_prompt_length=512 inference=vllm_server""",
}
