"""Generated dataset rows, files, tool outputs and calls: none crashes, and none becomes wrong data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support import attacks_data
from support.attacks_data import attack
from torchrl_rloo.data import sources


@settings(derandomize=True, max_examples=12, deadline=None)
@given(st.integers(0, 2**32))
def test_generated_attacks_are_contained(seed):
    found = attack(150, seed)
    assert found == {"tried": 150, "contained": 150, "failures": []}


def test_an_attack_that_succeeds_is_reported(monkeypatch):
    monkeypatch.setattr(sources, "_text", lambda value, where: value)  # lets invalid Unicode through
    found = attack(400, 0)
    assert found["tried"] == 400 and found["contained"] == 400 - len(found["failures"]) < 400
    assert all("attack_" in failure and "seed 0" in failure for failure in found["failures"])


@pytest.mark.parametrize("run", attacks_data.ATTACKS)
def test_every_kind_of_attack_is_tried(run, monkeypatch):
    tried = []
    kinds = [lambda *args, kind=kind: tried.append(kind) for kind in attacks_data.ATTACKS]
    monkeypatch.setattr(attacks_data, "ATTACKS", kinds)
    attack(len(kinds), 0)
    assert run in tried
