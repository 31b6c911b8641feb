from __future__ import annotations

import pytest

from torchrl_rloo.functional import AGGREGATIONS, SURROGATES, Clip
from torchrl_rloo.functional.policy_loss import ConstantLength, token_mean
from torchrl_rloo.runtime.lookup import resolve


def mine(log_ratio, advantages, log_probs, old_log_probs):
    return log_ratio


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("clip", Clip()),
        ({"name": "clip", "low": 0.1, "high": 0.3}, Clip(0.1, 0.3)),
        (Clip(0.4), Clip(0.4)),
        (mine, mine),
    ],
    ids=["name", "mapping", "object", "function"],
)
def test_a_choice_is_a_name_a_mapping_or_an_object(spec, expected):
    assert resolve("surrogate", spec, SURROGATES) == expected


def test_a_table_may_hold_functions():
    assert resolve("aggregation", "token_mean", AGGREGATIONS) is token_mean
    assert resolve("aggregation", {"name": "constant", "length": 8}, AGGREGATIONS) == ConstantLength(8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("clp", r"aggregation='clp' is unknown; valid: \['constant'"),
        ("token_men", r"unknown \(did you mean 'token_mean'\?\)"),
        ({"length": 3}, "aggregation=None is unknown"),
        ({"name": "token_mean", "length": 3}, "unknown field 'length'; it has no fields"),
        ({"name": "constant", "lenght": 3}, r"unknown field 'lenght' \(did you mean 'length'\?\); valid: \['length'\]"),
        ("constant", r"aggregation='constant' requires \['length'\]: set aggregation={name: constant, length: ...}"),
        (ConstantLength, "must be one of"),
        (3, "aggregation=3 must be one of"),
        ({"name": "constant", "length": 0}, "length=0 must be a number above 0"),
    ],
)
def test_errors_name_the_argument_the_value_and_the_choices(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve("aggregation", spec, AGGREGATIONS)
