"""Text on the command line: escapes in double quotes, as in a file of settings, and nothing silent elsewhere."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from support.recipes import settings
from torchrl_rloo.cli.main import main


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (
            r"""'generate.stop_strings=["\n", "a\\n\t", "\u00e9\ud83d\ude00", "say \"x\""]'""",
            ["\n", "a\\n\t", "é😀", 'say "x"'],
        ),
        (r"""generate.stop_strings="['\n', \\d, 'it\'s']" """, ["\\n", "\\d", "it's"]),
        (r"""'data.system_prompt="One.\nTwo \\d {x}, so"'""", "One.\nTwo \\d {x}, so"),
        (r"""data.system_prompt='C:\\dir, {a: "b"}'""", 'C:\\\\dir, {a: "b"}'),
        (r"""'data.template_kwargs={a: {b: ["x\ny"]}}'""", {"a": {"b": ["x\ny"]}}),
        (r"""'data.system_prompt="a \\\\\n"'""", "a \\\\\n"),
        (r"""'data.template_kwargs.a="\n"'""", {"a": "\n"}),
        (r"""'model.chat_template={{ "\n" }}'""", '{{ "\\n" }}'),  # Jinja decodes it
    ],
)
def test_text_means_what_it_means_in_json(typed: str, value: Any):
    """``typed`` is what a user types in a shell."""
    (setting,) = shlex.split(typed)
    name = setting.partition("=")[0].removesuffix(".a")
    assert OmegaConf.select(OmegaConf.structured(settings("rloo", setting)), name) == value


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (r"generate.stop_strings=[\n]", r"generate.stop_strings has \n outside quotes"),  # a shell removed the quotes
        (r"data.system_prompt=One.\nTwo.", r"data.system_prompt has \n outside quotes"),
        (r'generate.stop_strings=["\d"]', r"generate.stop_strings: escape \d in "),
        (r'data.template_kwargs={a: "\u12"}', r"data.template_kwargs: escape \u in "),
    ],
)
def test_an_escape_that_would_mean_something_else_is_refused(setting: str, words: str):
    with pytest.raises(ValueError) as raised:
        settings("rloo", setting)
    assert words in str(raised.value)


def test_a_copy_and_the_help_keep_line_breaks(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = [r'generate.stop_strings=["\n"]', r'data.system_prompt="a\n\tb"']
    main(["cp", "rloo", "mine.py", *given])
    copied = settings("rloo", "--config", "mine.yaml")
    assert copied.generate.stop_strings == ["\n"] and copied.data.system_prompt == "a\n\tb"
    capsys.readouterr()
    with pytest.raises(SystemExit):
        settings("rloo", "--help-all", *given)
    assert r'generate.stop_strings=["\n"]' in capsys.readouterr().out
