"""Paired tests of two saved evaluations of the same prompts.

python compare.py outputs/evaluate/base outputs/evaluate/trained [directory for comparison.json and comparison.png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from evaluate import show  # the file beside this one

from torchrl_rloo.diagnostics.comparison import compare
from torchrl_rloo.diagnostics.evaluation_result import EvaluationResult


def main() -> None:
    parser = argparse.ArgumentParser(description="Paired tests of two saved evaluations of the same prompts.")
    parser.add_argument("first", type=Path, help="directory of the one that is compared with")
    parser.add_argument("second", type=Path, help="directory of the other: differences are second minus first")
    parser.add_argument("output", type=Path, nargs="?", help="where to save table and figure (default: second)")
    parser.add_argument("--any-settings", action="store_true", help="compare even if sampling or scorers differ")
    arguments = parser.parse_args()
    first, second = EvaluationResult.load(arguments.first), EvaluationResult.load(arguments.second)
    show(compare(first, second, same_settings=not arguments.any_settings), arguments.output or arguments.second)


if __name__ == "__main__":
    main()
