"""Transports that corrupt what they send."""

from __future__ import annotations

import os

from torchrl_rloo.weight_update import Files, SharedMemory


class Flipped(SharedMemory):
    """Transport that flips a bit of bucket 1, once."""

    flips = 1

    def send(self, version, bucket, infos, tensors):
        payload = super().send(version, bucket, infos, tensors)
        if bucket == 1 and self.flips:
            self.flips -= 1
            self._buffers[payload["buffer"]][1000] ^= 4
        return payload


class FlippedFile(Files):
    """Transport that flips a bit of the file of bucket 1, once."""

    flips = 1

    def send(self, version, bucket, infos, tensors):
        payload = super().send(version, bucket, infos, tensors)
        if bucket == 1 and self.flips:
            self.flips -= 1
            with open(payload["path"], "r+b") as file:
                file.seek(-100, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte ^ 4]))
        return payload
