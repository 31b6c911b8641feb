"""Tools made of functions: schemas, hidden parameters, and functions that cannot become tools."""

from __future__ import annotations

import asyncio
import datetime
import pickle
from functools import partial
from typing import Any, Literal, Optional

import cloudpickle
import pytest

from torchrl_rloo.envs.tools.tool import Columns, State, Tool, ToolRegistry, tool


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", near: Optional[list[str]] = None) -> str:  # noqa: UP045
    """Forecast the weather,
    roughly.

    Args:
        city: where,
            in full.
        days: how many.
        unit: of temperature.
        near: other places.

    Returns:
        A sentence.
    """
    return f"{city}: {days} {unit} {near}"


async def later(text: str) -> str:
    """Say it later.

    Args:
        text: what.
    """
    await asyncio.sleep(0)
    return text


def remember(note: str, notes: State, row: Columns) -> int:
    """Remember a note.

    Args:
        note: what to remember.
    """
    notes.setdefault(row["name"], []).append(note)
    return len(notes[row["name"]])


def test_the_schema_of_a_function() -> None:
    made = tool(weather)
    parameters = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where, in full."},
            "days": {"type": "integer", "description": "how many."},
            "unit": {"type": "string", "enum": ["C", "F"], "description": "of temperature."},
            "near": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "other places."},
        },
        "required": ["city"],
    }
    description = "Forecast the weather,\nroughly."
    assert made.schema == {
        "type": "function",
        "function": {"name": "weather", "description": description, "parameters": parameters},
    }
    assert made("Oslo", days=2) == "Oslo: 2 C None" == made.call(None, city="Oslo", days=2)
    assert not made.sequential


def test_async_functions_and_methods() -> None:
    class Counter:
        def __init__(self) -> None:
            self.n = 0

        def add(self, n: int) -> int:
            """Add.

            Args:
                n: how many.
            """
            self.n += n
            return self.n

    assert asyncio.run(tool(later).call(None, text="x")) == "x"
    made = tool(Counter().add, name="count", timeout=3)
    assert made.name == "count" and made.timeout == 3
    assert made.call(None, n=2) == 2 and made.call(None, n=2) == 4


def test_hidden_parameters() -> None:
    made = tool(remember)
    assert list(made.parameters["properties"]) == ["note"] == made.parameters["required"]
    assert made.sequential
    one, other = made.open({"name": "a"}), made.open({"name": "b"})
    assert [made.call(one, note="x"), made.call(one, note="y"), made.call(other, note="z")] == [1, 2, 1]
    assert remember("x", State(), Columns(name="c")) == 1


def test_tools_travel_to_other_processes() -> None:
    @tool
    def twice(n: int) -> int:
        """Doubles.

        Args:
            n: what.
        """
        return 2 * n

    for made in (twice, tool(remember), tool(later)):
        again = pickle.loads(cloudpickle.dumps(made))
        assert again.schema == made.schema and again.sequential == made.sequential
    assert pickle.loads(cloudpickle.dumps(twice)).call(None, n=4) == 8


def undocumented(n: int) -> int:
    return n


def undescribed(first: int, second: int) -> int:
    """Add.

    Args:
        first: one.
    """
    return first + second


def unhinted(first, second: int) -> int:
    """Add.

    Args:
        first: one.
        second: the other.
    """
    return first + second


def dated(when: datetime.date | None) -> str:
    """Write a date.

    Args:
        when: the date.
    """
    return str(when)


def by_number(names: dict[int, str]) -> str:
    """Write names.

    Args:
        names: by number.
    """
    return str(names)


def many(*numbers: int) -> int:
    """Add.

    Args:
        numbers: all.
    """
    return sum(numbers)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (undocumented, "undocumented.*docstring"),
        (undescribed, "undescribed.*'second'"),
        (unhinted, "unhinted.*first.*type hint|first.*type hint.*unhinted"),
        (dated, "'when'.*date"),
        (by_number, "'names'.*int"),
        (many, "'numbers'"),
        (partial(by_number, names={}), "partial.*wrap it in a function"),
        (datetime.date, "datetime.date.*wrap it in a function"),
        (3, "3 cannot become a tool"),
    ],
)
def test_what_cannot_become_a_tool(function: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tool(function)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": "two words"}, "name='two words'"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ""}, "name=''"),
        ({"parameters": {"type": "array"}}, "parameters of x"),
        ({"timeout": 0}, "timeout=0"),
    ],
)
def test_bad_tools_are_refused(change: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Tool(**{"name": "x", "description": "", "parameters": {"type": "object"}} | change)


def test_a_registry() -> None:
    tools = ToolRegistry([weather, tool(later)])
    assert list(tools) == ["weather", "later"] and len(tools) == 2 and "later" in tools
    assert tools.schemas() == [tools["weather"].schema, tools["later"].schema]
    assert 'did you mean "weather"?' in tools.unknown_message("weahter")
    assert "only weather, later" in tools.unknown_message("xyz")
    assert list(tools.select(["later"])) == ["later"]
    with pytest.raises(ValueError, match=r"\['nothing'\].*weather"):
        tools.select(["later", "nothing"])
    with pytest.raises(ValueError, match="two tools named 'weather'"):
        ToolRegistry([weather, tool(weather)])
    assert "none at all" in ToolRegistry([]).unknown_message("x")
