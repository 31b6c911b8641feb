"""Files of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from torchrl_rloo.diagnostics import DEFINITIONS


def read_jsonl(file: Path) -> list[dict]:
    """Return the objects of a file, one per line; their texts may contain other line breaks."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def check_metric_names(output: Path) -> None:
    """Assert that every metric of a run has one definition."""
    patterns = [re.sub(r"<(.*?)>", lambda m: f"({m[1]})" if "|" in m[1] else "[^/]+", name) for name in DEFINITIONS]
    for file in ("metrics.jsonl", "timings.jsonl"):
        for name in {name for record in read_jsonl(output / file) for name in record} - {"step"}:
            assert sum(re.fullmatch(pattern, name) is not None for pattern in patterns) == 1, name
