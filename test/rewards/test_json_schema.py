from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import textwrap
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema")

from torchrl_rloo.rewards.formats import JSONSchema  # noqa: E402

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def score(reward, text, **columns):
    return reward(["?"], [text], [[1]], **columns)[0]


UNIQUE = {"uniqueItems": True}
VERDICTS = [  # schema, texts that it allows, texts that it does not
    (PERSON, ['{"name": "Ann", "age": 3}', ' \n{"name": "Ann", "age": 3}\n'], ['{"name": "Ann"}', ""]),
    (PERSON, [], ['{"name": "Ann", "age": -3}', '{"name": "Ann", "age": 3, "more": 1}']),
    (PERSON, [], ['{"name": "Ann", "age": 3', 'Here: {"name": "Ann", "age": 3}']),
    # The last closed fence of JSON counts
    ({"const": 1}, ["x\n```json\n1\n```\ny", "```json\n2\n```\n```json\n1\n```"], ["```python\n1\n```", "```json\n1"]),
    ({"const": 1}, ["```json\n1\n```\n```python\n2\n```", "``` JSON\n1\n```", "```json\n2\n```json\n1\n```"], []),
    # Items are equal as JSON values
    (
        UNIQUE,
        ["[1, true]", "[0, false, null, [], {}, 0.5]", "[[1, 2], [2, 1]]", '["1", 1]', "[true, [1]]"],
        ["[1, 1.0]"],
    ),
    (UNIQUE, ['[[{"a": true}], [{"a": 1}]]', '[{"a": 1}, [["a", 1]]]'], ['[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]']),
    # What is no JSON, or has two readings
    ({}, [], ['{"a":-5,"a":1}', '{"a": 1, "a": 1}', '[{"b": {"a": 1, "\\u0061": 2}}]', "01", "+1", "1.", "'a'"]),
    ({}, [], ["\\u0031", "1 2", "// c\n1", "NaN", "Infinity", "-Infinity", "1e999", "1" * 5000, "[1, NaN]"]),
    ({"multipleOf": 0.1}, [], ["1" * 400]),  # a number too large to be checked
    # The end of a pattern is the end of the text
    ({"pattern": "^a+$"}, ['"aa"'], ['"aa\\n"']),
    ({"pattern": "^(?:a|b$)"}, [], ['"b\\n"']),
    ({"pattern": r"^\$[$]$"}, ['"$$"'], []),
    ({"pattern": r"^[]$]$"}, ['"$"'], []),
    ({"pattern": r"^[^\]$]$"}, ['"a"'], []),
    ({"pattern": "a"}, ['"xay\\n"'], []),
]


def test_verdicts():
    rows = [
        (s, text, score) for s, right, wrong in VERDICTS for score, texts in ((1, right), (0, wrong)) for text in texts
    ]
    schemas, texts, _ = zip(*rows, strict=True)
    reward = JSONSchema(column="schema")
    found = reward(["?"] * len(rows), texts, [[1]] * len(rows), schema=[json.dumps(schema) for schema in schemas])
    assert [row for row, got in zip(rows, found, strict=True) if got != row[2]] == []
    assert score(JSONSchema(PERSON), '{"name": "Ann", "age": 3}') == 1


@settings(deadline=None, max_examples=30)
@given(JSON)
def test_every_json_is_allowed_by_the_empty_schema_and_by_its_own_constant(value):
    for text in (json.dumps(value), f"So:\n```json\n{json.dumps(value, indent=1)}\n```"):
        assert score(JSONSchema({}), text) == score(JSONSchema({"const": value}), text) == 1
        assert score(JSONSchema(False), text) == 0


@settings(deadline=None)
@given(st.text() | st.lists(st.sampled_from(["```", "json", "\n", "{", "}", "[", "]", '"', "1", ","])).map("".join))
def test_no_text_raises(text):
    assert score(JSONSchema(PERSON), text) in (0, 1)


DEEP = {"$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}}, "$ref": "#/$defs/list"}


@pytest.mark.parametrize("depth", [900, 10**6])
@pytest.mark.parametrize("schema", [DEEP, {"uniqueItems": True}, {}], ids=["recursive", "unique", "empty"])
def test_deep_nesting_ends_in_a_score(schema, depth):
    assert score(JSONSchema(schema), "[" * depth + "]" * depth) in (0, 1)
    assert score(JSONSchema(schema), "[" * depth) == 0
    assert score(JSONSchema(schema), '{"a":' * depth) == 0


def doubling(levels, make):
    parts = {f"d{i}": make({"$ref": f"#/$defs/d{i + 1}"}) for i in range(levels)}
    return {"$defs": parts | {f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


ENDLESS = [
    doubling(60, lambda inner: {"allOf": [inner, inner]}),
    doubling(60, lambda inner: {"not": {"anyOf": [inner, inner]}}),
    {"$ref": "#"},
    {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]


def test_a_schema_without_end_abstains_and_rows_beside_it_are_judged():
    reward = JSONSchema(column="schema", timeout=0.3)
    schemas = [{"type": "integer"}, *ENDLESS, None, {"type": "string"}]
    assert reward(["?"] * 7, ["1"] * 7, [[1]] * 7, schema=schemas) == [1, None, None, None, None, None, 0]


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"pattern": "^(a+)+$"}, json.dumps("a" * 50 + "!")),
        ({"patternProperties": {"^(a|a)*$": False}}, json.dumps({"a" * 50 + "!": 1})),
        ({"items": {"pattern": "(x+x+)+y"}}, json.dumps(["x" * 50])),
    ],
    ids=["nested", "names", "items"],
)
def test_a_completion_that_takes_without_end_scores_zero(schema, text):
    reward = JSONSchema(schema, timeout=0.3)
    assert score(reward, text) == 0 and score(reward, "1") == 1


@pytest.mark.parametrize("item", ['{"a": %d}', "%d", "[[%d]]", '{"a": {"b": [%d, true, null]}, "c": "x"}', '"%d"'])
def test_many_distinct_items_are_judged(item):
    items = [item % i for i in range(10_000)]
    reward = JSONSchema({"uniqueItems": True})  # the limit of CPU time stays far away, unlike with pairs
    assert score(reward, f"[{','.join(items)}]") == 1 and score(reward, f"[{','.join([*items, items[77]])}]") == 0


def test_a_schema_for_each_row():
    reward = JSONSchema(column="schema")
    schemas = ['{"type": "integer"}', {"type": "string"}, None, "true"]
    assert reward(["?"] * 4, ["1"] * 4, [[1]] * 4, schema=schemas) == [1, 0, None, 1]
    with pytest.raises(ValueError, match="must be a JSON Schema"):
        score(reward, "1", schema=['{"type": "strin"}'])
    with pytest.raises(KeyError, match="requires column 'schema'"):
        score(reward, "1")


def test_references_are_followed_within_the_schema_and_nothing_is_fetched(monkeypatch):
    fetched = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: fetched.append(args))
    monkeypatch.setattr(socket.socket, "connect", lambda *args: fetched.append(args))
    inner = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert [score(JSONSchema(inner), text) for text in ("1", '"a"')] == [1, 0]
    for reference in ("http://127.0.0.1:9/n.json", "file:///etc/passwd", "#/$defs/none"):
        with pytest.raises(ValueError, match="must contain its reference .*: nothing is fetched"):
            score(JSONSchema({"$ref": reference}), "1")
    assert fetched == []


def test_older_drafts_count_where_a_schema_names_them():
    old = {"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}
    assert [score(JSONSchema(old), text) for text in ("3", "4")] == [0, 1]


def test_messages_and_pickles():
    reward = JSONSchema(PERSON)
    score(reward, "{}")
    text = '{"name": "Ann", "age": 3}'
    copy = pickle.loads(pickle.dumps(reward))
    assert copy(["?"] * 2, [[{"role": "assistant", "content": text}], []], [[1]] * 2) == [1, 0]


@pytest.mark.parametrize("schema", [{"type": "strin"}, "{", {"pattern": "("}, [], 3])
def test_schemas_that_are_none(schema):
    with pytest.raises(ValueError, match="must be a JSON Schema"):
        JSONSchema(schema)


@pytest.mark.parametrize("settings", [{}, {"schema": {}, "column": "a"}, {"column": ""}], ids=str)
def test_a_schema_or_a_column(settings):
    with pytest.raises(ValueError, match="set exactly one"):
        JSONSchema(**settings)


def test_without_jsonschema_the_extra_is_named():
    code = """
        import sys
        sys.modules["jsonschema"] = None
        from torchrl_rloo.rewards.formats import JSONSchema
        JSONSchema({})
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert 'pip install "torchrl_rloo[rewards]"' in result.stderr.splitlines()[-1]
