"""Generated dataset rows, files, tool outputs and calls: none crashes, and none becomes wrong data."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

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
