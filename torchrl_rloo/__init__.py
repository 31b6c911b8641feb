"""TensorDict and TorchRL modules for post-training language models with RLOO (REINFORCE leave-one-out)."""

from torchrl_rloo import _lazy_vllm as _lazy_vllm  # before any import of TorchRL

__version__ = "0.1.0"
