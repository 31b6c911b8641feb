"""The tables of docs/methods.md agree with the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from torchrl_rloo.functional import AGGREGATIONS, CORRECTIONS, ESTIMATORS, RATIOS, SURROGATES
from torchrl_rloo.functional.advantages import NORMALIZATIONS
from torchrl_rloo.objectives import PRESETS
from torchrl_rloo.replay.credit import CREDITS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "methods.md").read_text()


@pytest.mark.parametrize(
    "table", [AGGREGATIONS, CORRECTIONS, CREDITS, ESTIMATORS, NORMALIZATIONS, RATIOS, SURROGATES], ids=range(7)
)
def test_the_page_names_every_choice(page, table):
    choices = page.split("## Presets")[0]
    assert [name for name in table if f"`{name}`" not in choices] == []


def test_each_preset_has_its_row(page):
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)\|$", page.split("## Presets")[1].split("##")[0], re.MULTILINE))
    assert set(rows) == set(PRESETS)
    for name, preset in PRESETS.items():
        row = rows[name]
        if not preset.critic:
            assert f"`{preset.advantage['estimator']}`" in row, name
        assert f"`{preset.loss['aggregation']}`" in row and (str(preset.kl.coeff) if preset.kl else "none") in row, name
        assert (f"`{preset.loss['ratio']}`" if preset.loss["ratio"] != "none" else "none") in row, name
        number = re.search(r"arXiv (\d{4}\.\d{5})", preset.paper)
        assert number is None or number[1] in row, name


def test_the_gradients_are_those_of_the_script(page):
    spec = importlib.util.spec_from_file_location("preset_gradients", ROOT / "tutorials" / "preset_gradients.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table() in page
