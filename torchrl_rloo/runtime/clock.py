"""Clock that never goes back, in seconds since the epoch, so that times of several processes can be compared."""

from __future__ import annotations

import time

_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Return the seconds since the epoch; later changes of the system's clock have no effect on this process."""
    return _EPOCH + time.monotonic()
