"""Transports that corrupt what they send."""

from __future__ import annotations

import os

from torchrl_rloo.weight_update import Files, SharedMemory


class Flipped(SharedMemory):
    """Transport that flips a bit of bucket 1, once."""

    flips = 1

    def store(self, version, sizes, keep):
        storage = super().store(version, sizes, keep)
        if self.flips:
            self.flips -= 1
            put = storage.put

            def flip(bucket, infos, tensors):
                put(bucket, infos, tensors)
                if bucket == 1:
                    storage.view(bucket)[1000] ^= 4

            storage.put = flip
        return storage


class FlippedFile(Files):
    """Transport that flips a bit of the file of bucket 1, once."""

    flips = 1

    def store(self, version, sizes, keep):
        storage = super().store(version, sizes, keep)
        if self.flips:
            self.flips -= 1
            put = storage.put

            def flip(bucket, infos, tensors):
                put(bucket, infos, tensors)
                if bucket == 1:
                    with open(storage.get(bucket)["path"], "r+b") as file:
                        file.seek(-100, os.SEEK_END)
                        byte = file.read(1)[0]
                        file.seek(-1, os.SEEK_CUR)
                        file.write(bytes([byte ^ 4]))

            storage.put = flip
        return storage


class Interfering(SharedMemory):
    """Transport that calls ``function`` before it sends bucket 1 to an engine."""

    function = staticmethod(lambda: None)

    def store(self, version, sizes, keep):
        storage = super().store(version, sizes, keep)
        get = storage.get

        def call_and_get(bucket):
            if bucket == 1:
                self.function()
            return get(bucket)

        storage.get = call_and_get
        return storage
