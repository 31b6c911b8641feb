#!/usr/bin/env bash
# Build wheel and sdist, install each into an empty environment, and run the quick start there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf build dist
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet "build>=1.2,<2"
"$work/build/bin/python" -m build --outdir dist .

# One environment for both: torch is large. The second install replaces the package alone.
"$python" -m venv "$work/empty"
options=
for file in dist/*.whl dist/*.tar.gz; do
    "$work/empty/bin/python" -m pip install --quiet $options "$file"
    options="--force-reinstall --no-deps"
    mkdir "$work/$(basename "$file")"
    (
        cd "$work/$(basename "$file")"
        "$work/empty/bin/torchrl-rloo" ls
        "$work/empty/bin/torchrl-rloo" run rloo plan.steps=2 data.eval_size=16 output_dir=outputs
        "$work/empty/bin/torchrl-rloo" cp rloo mine.py
        "$work/empty/bin/python" mine.py plan.steps=1 data.eval_size=16 output_dir=outputs/mine
        test -f outputs/report.html
    )
    echo "$file: installed and ran"
done
