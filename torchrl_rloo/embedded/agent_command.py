"""Command-line agent for the ``calculator`` task. It needs only the standard library.

It reads a row as JSON, and calls the endpoint of ``OPENAI_BASE_URL`` at most twice.
"""

import json
import operator
import os
import re
import sys
import urllib.request

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def complete(messages: list) -> dict:
    """Return the first choice of a chat completion."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(direct.open(request))["choices"][0]


def calculate(expression: str) -> str:
    """Return the sum, difference or product of two whole numbers as text."""
    found = re.fullmatch(r"([1-9][0-9]{0,9})([-+*])([1-9][0-9]{0,9})", expression)
    return (
        str(OPERATORS[found[2]](int(found[1]), int(found[3]))) if found else "Error: write two numbers, such as 47*38"
    )


def main() -> None:
    """Answer one question, and print how many calls it took."""
    messages, calls = json.load(sys.stdin)["query"], 0
    while calls < 2:
        choice, calls = complete(messages), calls + 1
        said = choice["message"]["content"] or ""
        expressions = re.findall("<tool>([^<]*)</tool>", said)
        if choice["finish_reason"] == "length" or not expressions:
            break
        messages.append({"role": "assistant", "content": said})
        messages += [{"role": "tool", "content": calculate(expression)} for expression in expressions]
    print(json.dumps({"metrics": {"calls": calls}}))


if __name__ == "__main__":
    main()
