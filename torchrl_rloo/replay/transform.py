"""BufferTransform: base of transforms that act when rows enter a replay buffer."""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, Transform


class BufferTransform(Transform):
    """Base of replay-buffer transforms: ``_inv_call`` receives rows on their way into the buffer.

    Raises:
        TypeError: if the transform is added to an environment, where it would hold back the policy's rows.
    """

    def set_container(self, container: Transform | EnvBase) -> None:
        """Note the ``Compose`` that has this transform; refuse an environment."""
        super().set_container(container)
        if self.parent is not None:
            name = type(self).__name__
            raise TypeError(f"{name} acts on rows that enter a replay buffer; use ReplayBuffer(transform={name}(...))")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled rows as they are: the transform acts when rows enter the buffer."""
        return tensordict
