"""Messages that a user should see once: through logging, at the level that Python shows without any set-up."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("torchrl_rloo")
_SHOWN: set[str] = set()


def notify_once(message: str) -> None:
    """Log a warning the first time that this process has this message."""
    if message not in _SHOWN:
        _SHOWN.add(message)
        _LOGGER.warning(message)
