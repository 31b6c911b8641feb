"""Checks of arguments against schemas, and their messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.envs.tools.tool import fit_arguments

VALUES = {
    "string": ["", "7", "é"],
    "integer": [0, -7, 10**30],
    "number": [0.5, -1e300],
    "boolean": [True, False],
    "array": [[], [1]],
    "object": [{}, {"a": 1}],
    "null": [None],
}


def fits(value: Any, schema: dict, **kwargs) -> bool:
    try:
        fit_arguments({"x": value}, {"properties": {"x": schema}}, **kwargs)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", VALUES)
def test_each_type_takes_its_own_values_only(kind: str) -> None:
    for other, values in VALUES.items():
        expected = other == kind or (kind, other) == ("number", "integer")
        assert [fits(v, {"type": kind}) for v in values] == [expected] * len(values), other


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "nullable": True}, [None, 1], ["1", 1.5]),
        ({"type": ["integer", "string"]}, [1, "a"], [None, 1.5, True]),
        ({"type": "string", "enum": ["a", "b"]}, ["a"], ["c", 1]),
        ({"enum": [1, None]}, [1, None], [True, 0]),
        ({"const": 3}, [3], [4]),
        ({"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "string"}}]}, [1, ["a"]], ["a", [1]]),
        ({"type": "array", "items": {"type": "integer"}}, [[], [1]], [[1, "a"], [True]]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "b"}]),
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, [{"a": 1, "b": 2}], [{}]),
        ({"type": "no such type"}, [1, "a", None], []),
        ({}, [1, "a", None, [], {}], []),
        (True, [1], []),
    ],
)
def test_schemas(schema: Any, good: list, bad: list) -> None:
    assert [v for v in good if not fits(v, schema)] == []
    assert [v for v in bad if fits(v, schema)] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, 'argument "city" is missing'),
        ({"city": 7}, 'argument "city" must be a string, got 7 (an integer)'),
        ({"city": "a", "unit": "K"}, 'argument "unit" must be one of ["C", "F"], got "K" (a string)'),
        ({"city": "a", "citi": 1}, 'there is no argument "citi"; did you mean "city"?'),
        ({"city": "a", "zzz": 1}, 'there is no argument "zzz", only "city", "unit", "near"'),
        ({"city": "a", "near": ["b", None]}, 'argument "near[1]" must be a string, got null (null)'),
        ({"city": None, "unit": True}, 'argument "city" must be a string, got null (null); argument "unit" must be a'),
    ],
)
def test_messages_name_the_argument_and_what_is_expected(arguments: dict, words: str) -> None:
    properties = {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "near": {"type": "array", "items": {"type": "string"}},
    }
    with pytest.raises(ValueError) as caught:
        fit_arguments(arguments, {"properties": properties, "required": ["city"]})
    assert words in str(caught.value)


def test_messages_about_large_values_are_short() -> None:
    with pytest.raises(ValueError) as caught:
        fit_arguments({"x" * 10**6: 1, "n": "y" * 10**6}, {"properties": {"n": {"type": "integer"}}})
    assert len(str(caught.value)) < 500
    with pytest.raises(ValueError) as caught:
        fit_arguments({"n": ["y"] * 10**5}, {"properties": {"n": {"type": "array", "items": {"type": "integer"}}}})
    assert len(str(caught.value)) < 1000


def test_further_arguments_are_taken_where_the_schema_says_so() -> None:
    assert fit_arguments({"a": 1}, {"additionalProperties": True}) == {"a": 1}
    with pytest.raises(ValueError, match='no argument "a"'):
        fit_arguments({"a": 1}, {"properties": {}})


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        (" 7\n", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", {}, "7"),
        ("True", {"type": "boolean"}, True),
        ('["a"]', {"type": "array", "items": {"type": "string"}}, ["a"]),
        ("null", {"type": "integer", "nullable": True}, None),
        ("null", {"type": "string", "nullable": True}, "null"),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("null", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("7", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "7"),
        ("None", {"type": "integer", "nullable": True}, None),
        ('[True, "ABC"]', {"type": "array"}, [True, "ABC"]),
        ("\n{'a': ['B', None]}", {"type": "object"}, {"a": ["B", None]}),
        ("FALSE", {"type": "boolean"}, False),
    ],
)
def test_texts_are_read_as_the_schema_says(text: str, schema: dict, value: Any) -> None:
    assert fit_arguments({"x": text}, {"properties": {"x": schema}}, untyped=True) == {"x": value}


def test_texts_that_fit_no_type_are_refused() -> None:
    with pytest.raises(ValueError, match='"x" must be an integer, got "seven"'):
        fit_arguments({"x": "seven"}, {"properties": {"x": {"type": "integer"}}}, untyped=True)
    assert not fits("[" * 100_000, {"type": "array"}, untyped=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), json_values), json_values, st.booleans())
def test_any_arguments_raise_at_most_a_value_error(arguments: dict, schema: Any, untyped: bool) -> None:
    properties = {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "array", "items": {"enum": [schema]}}]}}
    try:
        fit_arguments(arguments, {"properties": properties, "required": ["a"]}, untyped=untyped)
    except ValueError as error:
        assert "argument" in str(error)
