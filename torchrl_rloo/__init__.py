"""TensorDict and TorchRL modules for post-training language models with RLOO (REINFORCE leave-one-out)."""

__version__ = "0.1.0"
