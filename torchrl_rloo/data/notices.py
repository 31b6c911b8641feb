"""Log messages that appear once per process, at the level that Python shows without any set-up."""

from __future__ import annotations

import logging

_LOGGER = logging.getLogger("torchrl_rloo")
_SHOWN: set[str] = set()


def notify_once(message: str) -> None:
    """Log ``message`` as a warning unless this process has logged it before."""
    if message not in _SHOWN:
        _SHOWN.add(message)
        _LOGGER.warning(message)
