"""Settings of sampling that depend on the tokens of a turn, for tests of all engines."""

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": False}
TURN_SETTINGS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -1.2, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 3.0, 70: -4.0}},
    "min_new_tokens": {"min_new_tokens": 10},
    "bad_words": {"bad_words": ["e", "an", " a"]},
    "regex": {"structured": {"regex": "[0-9]{3,6}(a|b)+"}},
    "choice": {"structured": {"choice": ["yes", 'no "q"', "maybe\n"]}},
    "json": {"structured": {"json": SCHEMA}},
    "grammar": {"structured": {"grammar": 'root ::= "x" root | "y"'}},
    "all": {
        "temperature": 0.7,
        "top_p": 0.9,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "bad_words": ["e"],
        "structured": {"regex": "[a-z ]+"},
        "logit_bias": {70: 2.0},
    },
}
