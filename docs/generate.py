"""Write the pages that come from the code: API, configuration, settings of other libraries, tutorials."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import pkgutil
import re
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("rloo", "simple", "ppo", "distill", "sft", "preference", "reward_model", "evaluate")
TUTORIALS = (
    "first_loop",
    "own_data_and_reward",
    "pictures",
    "tool_environment",
    "multi_turn_game",
    "self_play",
    "async_staleness",
    "postprocess_buffer",
    "own_method",
)


def write_pages(docs: Path) -> None:
    """Write all generated pages below ``docs``; leave those that have not changed untouched.

    Each page is replaced as a whole, so that two builds at once read no half-written page.
    """
    pages = {**api_pages(), **configuration_pages(), **coming_from_pages(), **tutorial_pages(), **metrics_page()}
    for name, text in pages.items():
        path = docs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            written = path.with_name(f".{path.name}.{os.getpid()}")
            written.write_text(text)
            written.replace(path)


def api_pages() -> dict[str, str]:
    """Return a page for each package that has public names."""
    import torchrl_rloo

    names = [m.name for m in pkgutil.walk_packages(torchrl_rloo.__path__, "torchrl_rloo.") if m.ispkg]
    names = [n for n in names if getattr(importlib.import_module(n), "__all__", ())]
    pages = {f"api/{name}.md": _api_page(name) for name in sorted(names)}
    pages["api/torchrl_rloo.data.keys.md"] = _api_page("torchrl_rloo.data.keys")
    entries = "\n".join(sorted(name.removeprefix("api/").removesuffix(".md") for name in pages))
    pages["api/index.md"] = (
        "# API\n\nA page for each package. Import names from the package, not from its modules: "
        "`from torchrl_rloo.replay import MCAdvantage`.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    )
    return pages


def _api_page(name: str) -> str:
    module = importlib.import_module(name)
    public = {n: getattr(module, n) for n in getattr(module, "__all__", ())}
    public = {n: value for n, value in public.items() if inspect.isclass(value) or inspect.isroutine(value)}
    rows = [f"| [`{n}`](#{name}.{n}) | {_summary(public[n])} |" for n in sorted(public, key=str.lower)]
    table = "\n".join(["| Name | Content |", "| --- | --- |", *rows]) if rows else _key_table(module)
    return (
        f"# {name}\n\n{table}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n   :imported-members:\n"
        "   :show-inheritance:\n```\n"
    )


def _key_table(module) -> str:
    """Return a table of the constants of ``data/keys.py`` that name an entry of a row."""
    entries = {
        n: v
        for n, v in vars(module).items()
        if n.isupper() and (isinstance(v, str) or isinstance(v, tuple) and n != "INPUT_MODES")
    }
    return "\n".join(["| Constant | Key |", "| --- | --- |", *(f"| `{n}` | `{v!r}` |" for n, v in entries.items())])


def _summary(value) -> str:
    """Return the first line of a docstring as Markdown."""
    line = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
    line = re.sub(r":\w+:`~?([^`]*)`", lambda m: f"`{m[1].rsplit('.', 1)[-1]}`", line).replace("``", "`")
    return _cell(line)


def configuration_pages() -> dict[str, str]:
    """Return a page of settings for each recipe, from its typed configuration."""
    pages = {f"configuration/{name}.md": _configuration_page(name) for name in RECIPES}
    entries = "\n".join(RECIPES)
    pages["configuration/index.md"] = CONFIGURATION.format(
        tasks=_group_table("task"), engines=_group_table("inference"), entries=entries
    )
    return pages


CONFIGURATION = """# Configuration

A setting is written `name=value` after a recipe's name: `torchrl-rloo run rloo plan.steps=20`. Quote a value that has
braces, brackets or spaces: `lora='{{r: 16}}'`. An unknown name, a wrong type or a value out of range is refused in one
line before anything loads. `torchrl-rloo run rloo --help` prints the same tables.

Text in double quotes has the escapes of JSON, as in YAML: `'generate.stop_strings=["\\n"]'` stops at a line break,
and `'data.system_prompt="Think.\\nThen answer."'` has two lines. In single quotes a backslash is itself. The outer
quotes are for the shell, which would remove the inner ones.

Values come from the recipe's defaults, then from the YAML file that `--config` names, then from the command line.
`null` is no value; the column *Meaning* says what takes its place.

```{{toctree}}
:maxdepth: 1

{entries}
```

## Groups of settings

Two names choose a file with several settings.

{tasks}

{engines}
"""


def _group_table(group: str) -> str:
    """Return a table of the files of a group, each described by its first comment."""
    lines = [f"| `{group}=` | Content |", "| --- | --- |"]
    for path in sorted((ROOT / "sota_implementations/rloo/config" / group).glob("[a-z]*.yaml")):
        text = [line for line in path.read_text().splitlines() if "@package" not in line]
        comment = itertools.takewhile(lambda line: line.startswith("#"), text)
        lines.append(f"| `{path.stem}` | {_plain(' '.join(line.lstrip('# ') for line in comment))} |")
    return "\n".join(lines)


def _configuration_page(name: str) -> str:
    from torchrl_rloo.cli.fields import iter_settings

    config = load_recipe(name).Config
    lines = [
        f"# Settings of {name}",
        "",
        f"`torchrl-rloo run {name}`" if name != "evaluate" else "`torchrl-rloo evaluate`",
    ]
    lines += ["", "## Top level", "", *_HEADER]
    for setting in iter_settings(config):
        name, comment = setting.name, setting.comment
        if not setting.default:
            lines += ["", f"## {name}", "", *([_plain(_sentence(comment)), ""] if comment else []), *_HEADER]
        else:
            lines.append(f"| `{name}` | `{_cell(setting.default)}` | {_cell(setting.limits)} | {_plain(comment)} |")
    return "\n".join(lines) + "\n"


_HEADER = ("| Setting | Default | Allowed | Meaning |", "| --- | --- | --- | --- |")


@cache
def load_recipe(name: str):
    """Import a recipe's file as a module."""
    from torchrl_rloo.cli.main import recipe_file
    from torchrl_rloo.cli.recipe import import_recipe

    return import_recipe(recipe_file(name), f"docs_recipe_{name}")


def coming_from_pages() -> dict[str, str]:
    """Return a page for each library whose settings ``coming_from.yaml`` translates."""
    libraries = yaml.safe_load((ROOT / "docs" / "coming_from.yaml").read_text())
    return {f"coming-from/{name}.md": _coming_from_page(library) for name, library in libraries.items()}


def metrics_page() -> dict[str, str]:
    """Return the page that defines the metrics."""
    from torchrl_rloo.diagnostics import DEFINITIONS

    rows = [f"| `{_cell(name)}` | {_plain(text)} |" for name, text in DEFINITIONS.items()]
    introduction = (
        "# Metrics\n\nEach metric has one definition, and it is the same in every collector. In names, `<a|b>` is one "
        "of the words and `<word>` is any word. Lengths count action tokens, the end-of-turn token included.\n\n"
    )
    return {"metrics.md": introduction + "| Metric | Definition |\n| --- | --- |\n" + "\n".join(rows) + "\n"}


def _coming_from_page(library: dict) -> str:
    lines = [f"# Coming from {library['title']}", "", library["introduction"].strip()]
    for group, rows in library["settings"].items():
        lines += ["", f"## {group}", "", f"| {library['title']} | Here | Note |", "| --- | --- | --- |"]
        for theirs, (ours, note, *_) in rows.items():
            names = ", ".join(f"`{part.strip()}`" for part in theirs.split(","))
            lines.append(f"| {names} | {f'`{_cell(ours)}`' if ours else '—'} | {_cell(note or '')} |")
    return "\n".join(lines) + "\n"


def tutorial_pages() -> dict[str, str]:
    """Return the tutorials' scripts, which the build executes as notebooks, and the page that lists them."""
    pages = {f"tutorials/{name}.py": (ROOT / "tutorials" / f"{name}.py").read_text() for name in TUTORIALS}
    entries = "\n".join(TUTORIALS)
    pages["tutorials/index.md"] = (
        "# Tutorials\n\nEach page is a script of the folder `tutorials/` and a notebook at once. The pictures and the "
        "output come from running it when these pages were built, on one CPU core.\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```\n"
    )
    return pages


def read_notebook(text: str):
    """Read a percent script as a notebook for this Python."""
    import jupytext

    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata["language_info"] = {"name": "python", "pygments_lexer": "ipython3"}
    return notebook


def _sentence(comment: str) -> str:
    return comment[:1].upper() + comment[1:] + ("" if comment.endswith(".") else ".")


def _plain(text: str) -> str:
    """Escape the characters that Markdown would take as markup."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
