"""Command line of a recipe: settings to a typed configuration, and one-line errors.

It imports neither torch nor TorchRL, so ``--help`` and a wrong setting respond at once.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_rloo.cli.arguments import in_settings
from torchrl_rloo.cli.dry_run import COVERED, NOT_COVERED, check_supported, dry_run, has_dry_run
from torchrl_rloo.cli.dry_run import HELP as DRY_RUN_HELP
from torchrl_rloo.cli.fields import (
    SettingError,
    check_names,
    check_values,
    explain_error,
    free_sections,
    help_text,
    iter_settings,
    near_match_hint,
    text_settings,
    to_object,
)
from torchrl_rloo.cli.quoting import decode, quote, refuse_bare_escapes
from torchrl_rloo.cli.settings_file import settings_file
from torchrl_rloo.runtime.files import make_folder, write_text
from torchrl_rloo.runtime.masking import mask_urls

C = TypeVar("C")
PROGRAM: ContextVar[str | None] = ContextVar("PROGRAM", default=None)  # command that runs the recipe; None: its file
RECIPES = Path(__file__).resolve().parents[2] / "sota_implementations"
if not RECIPES.is_dir():  # installed without a checkout
    RECIPES = Path(__file__).resolve().parents[1] / "recipes"
GROUPS = RECIPES / "rloo" / "config"  # tasks and engines of all recipes
_PLAIN_ERRORS = (ValueError, TypeError, KeyError, ImportError, OSError, HydraException)  # whose message is enough
DEFAULT_GROUPS = {"task": "addition", "inference": "transformers"}


def parse_args(config: type[C], recipe: str | Path, description: str | None, argv: Sequence[str] | None = None) -> C:
    """Parse a recipe's command line; print the help or the first error and exit if there is one.

    Overrides replace the values of a YAML file, which replace the defaults of ``config``. The file is the one named by
    ``--config``, else the one next to the recipe with its name.
    """
    # Parse the options; everything else is setting=value
    recipe = Path(recipe).resolve()
    parser = argparse.ArgumentParser(prog=PROGRAM.get() or recipe.name, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="setting=value")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--help-all", action="store_true")
    parser.add_argument("--config", "--config-name", metavar="NAME", help="file of settings")
    parser.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    parser.add_argument("--yaml", action="store_true", help="print a file of all settings")
    parser.add_argument("--dry-run", action="store_true", help="run one step with a tiny model and scripted turns")
    parser.error = lambda message: _fail(
        SettingError(f"{message}; settings have no dashes: setting=value"), False, once=True
    )
    arguments = parser.parse_intermixed_args(argv)  # options may stand between settings
    # Compose the settings, then print what was requested or check them
    text = None
    try:
        cfg = load_config(config, recipe, arguments.overrides, arguments.config)
        if arguments.help or arguments.help_all:
            description = (description or "").replace(recipe.name, parser.prog)
            text = _help(config, cfg, parser.prog, description, everything=arguments.help_all)
        elif arguments.yaml:
            text = _settings_file(config, recipe, arguments.overrides, arguments.config)
        else:
            typed = to_object(cfg)
            cfg = config(**{f.name: getattr(typed, f.name) for f in fields(config)})
            check_values(cfg)
            _check_effects(cfg, arguments.overrides)
            _check_ranks(cfg)
            if arguments.dry_run:
                check_supported(config)
    except (ValueError, OSError) as error:  # a SettingError, or an error of a section's checks
        _fail(error, arguments.traceback, once=True)
    if text is not None:
        try:
            if _is_first_rank():
                print(text.rstrip("\n"), flush=True)
        except BrokenPipeError:  # `--help | head`: leave nothing that the interpreter would flush at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    cfg.__dict__ |= {"traceback": arguments.traceback, "dry_run": arguments.dry_run}
    return cfg


def command_line() -> str:
    """Return the command that runs this recipe, as a shell takes it."""
    return " ".join([PROGRAM.get() or f"python {shlex.quote(sys.argv[0])}", *map(shlex.quote, sys.argv[1:])])


def import_recipe(file: Path, name: str) -> ModuleType:
    """Import a recipe without running it, and return its module; it may import recipes of its folder."""
    spec = importlib.util.spec_from_file_location(name, file)
    recipe = importlib.util.module_from_spec(spec)
    sys.modules[name] = recipe  # dataclasses look their annotations up here
    if (folder := str(file.parent)) not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(recipe)
    return recipe


def load_config(
    config: type, recipe: Path, overrides: Sequence[str] = (), file: str | None = None, *, with_hydra: bool = False
) -> DictConfig:
    """Build the settings of a recipe, including Hydra's own with ``with_hydra``."""
    # Register a schema: the dataclass, its groups, and sections that group files set for other recipes
    names = {f.name for f in fields(config)}
    groups = [{name: choice} for name, choice in DEFAULT_GROUPS.items() if name in names]
    defaults = field(default_factory=lambda: ["_self_", *groups])
    others = {name.partition(".")[0] for name in group_settings()} - names  # sections of other recipes only
    extra = [("defaults", list[Any], defaults), *((name, Any, None) for name in sorted(others))]
    node = make_dataclass(config.__name__, extra, bases=(config,))
    ConfigStore.instance().store(name="schema", node=node)
    # Find the file of settings, and check names before Hydra composes them
    primary = _primary(recipe, file)
    if primary is not None:
        _check_file(primary, config, sorted(others))
    folder = primary.parent if primary else GROUPS
    overrides = [_normalize(override, config) for override in overrides]
    places = [f"file://{place}" for place in (GROUPS, recipe.parent / "config") if place.is_dir()]
    overrides.append(f"hydra.searchpath={places}")
    # Turn Hydra's errors into one line
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            name = primary.stem if primary else "schema"
            return compose(name, overrides=overrides, return_hydra_config=with_hydra)
    except OmegaConfBaseException as error:
        raise SettingError(explain_error(error)) from error
    except OverrideParseException as error:
        raise SettingError(
            f"{str(error.override).lstrip('+')} is malformed: {error_line(error)}; quote text as in 'name=\"a, b\"'"
        ) from error
    except HydraException as error:
        cause = error.__cause__
        raise SettingError(
            explain_error(cause) if isinstance(cause, OmegaConfBaseException) else error_line(error)
        ) from error


def _check_effects(cfg: Any, overrides: Sequence[str]) -> None:
    """Raise if an override sets what this recipe ignores, listed by its class in ``unused``."""
    for name in (override.partition("=")[0].lstrip("+~") for override in overrides):
        if name in getattr(cfg, "unused", ()):
            raise SettingError(f"{name} has no effect in this recipe; remove it")


def _check_ranks(cfg: Any) -> None:
    """Raise if the recipe cannot use all ranks that were started."""
    size, train = os.environ.get("WORLD_SIZE", "1"), getattr(cfg, "train", None)
    parallel, split = (getattr(train, name, None) for name in ("parallel", "tensor_parallel"))
    if size != "1" and parallel is None:
        raise SettingError(f"this recipe runs in one process and cannot use {size} ranks; start it without --ranks")
    if size not in ("1", str(split)) and parallel == "none":
        raise SettingError(
            f"train.parallel=none cannot be combined with {size} ranks; set train.parallel=ddp (a copy of the model on "
            "each rank) or train.parallel=fsdp (a shard on each)"
        )


def _is_first_rank() -> bool:
    """Return whether this process is the first one of the run on this machine, which reports for all."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run_recipe(main: Callable[[C], None], cfg: C) -> None:
    """Run a recipe, with its output directory locked; turn an error into one line and exit code 1.

    With several ranks, only rank 0 locks the directory and prints. Settings may name modules in the working directory
    by their dotted path. The traceback of an error is written to ``traceback.txt`` in the output directory, and to the
    terminal with ``--traceback``.
    """
    sys.path.insert(0, str(Path.cwd()))
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # its error tells all that its lines of each retry tell
    from torchrl_rloo.run.lock import DirectoryInUseError, DirectoryLock  # imports torch

    tries = cfg.__dict__.get("dry_run", False)
    try:
        if tries:
            return dry_run(main, cfg)
        first = os.environ.get("RANK", "0") == "0"
        with DirectoryLock(cfg.output_dir) if first else _without_output():
            main(cfg)
            if first:  # an earlier start may have failed
                Path(cfg.output_dir, "traceback.txt").unlink(missing_ok=True)
    except Exception as error:
        foreign = isinstance(error, DirectoryInUseError)  # the other process may have a traceback there
        output = None if foreign or tries else Path(cfg.output_dir)
        _fail(error, cfg.__dict__.get("traceback", False), output, cfg=cfg)


@contextmanager
def _without_output() -> Iterator[None]:
    """Drop what is printed."""
    with open(os.devnull, "w", encoding="utf-8") as nothing, redirect_stdout(nothing):
        yield


def _fail(
    error: Exception,
    with_traceback: bool,
    output: Path | None = None,
    *,
    once: bool = False,
    cfg: Any = None,
) -> None:
    """Print an error in one line and exit with code 1; ``once`` prints one that all ranks have on the first only.

    With settings, arguments that the error names become those.
    """
    if once and not _is_first_rank():
        raise SystemExit(1)
    if with_traceback:
        raise error
    hint = "--traceback shows where"
    if output is not None:
        with suppress(OSError):  # the error may be about this folder
            make_folder(output)
            file = write_text(output / "traceback.txt", mask_urls("".join(traceback.format_exception(error))))
            hint = f"traceback in {file}"
    rank = f"rank {number}: " if (number := os.environ.get("RANK", "0")) != "0" else ""
    line = f"error: {rank}{mask_urls(error_line(error, cfg))}"
    print(f"{line} ({hint})" if output else line, file=sys.stderr, flush=True)
    raise SystemExit(1)


def error_line(error: BaseException, cfg: Any = None) -> str:
    """Return an error's message in one line, with its type unless the message alone is clear."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:  # its message only names the target
        target = re.search(r"'([\w.]+)'", str(error))
        return f"{target[1]}: {error_line(error.__cause__)}" if target else error_line(error.__cause__)
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    plain = isinstance(error, _PLAIN_ERRORS) or type(error).__module__.startswith("torchrl_rloo")
    text = text if cfg is None else in_settings(text, error, cfg)
    return " ".join(text.split() if plain else [f"{type(error).__name__}:", *text.split()]) or type(error).__name__


def _primary(recipe: Path, file: str | None) -> Path | None:
    """Return the file of settings: the given one, else the one next to the recipe with its name."""
    if file is None:
        default = recipe.with_suffix(".yaml")
        return default if default.is_file() else None
    folders = [recipe.parent / "config", recipe.parent, GROUPS]
    places = [Path(file), *(folder / f"{file}.yaml" for folder in folders)]
    for place in places:
        if place.suffix in (".yaml", ".yml") and place.is_file():
            return place.resolve()
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise SettingError(f"--config {file}: no such file{near_match_hint(file, names) if names else ''}")


def _check_file(file: Path, config: type, others: Sequence[str]) -> None:
    """Raise if a file of settings is malformed, lacks the schema, or has an unknown name."""
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise SettingError(f"{file} is not valid YAML: {error_line(error)}") from error
    if not isinstance(content, dict) or "schema" not in (content.pop("defaults", None) or ()):
        raise SettingError(f"{file} must be a mapping of settings that begins with `defaults: [schema, _self_]`")
    names = [name for section, values in content.items() for name in _dotted(section, values)]
    own = [name for name in names if name.partition(".")[0] not in ("hydra", *others)]
    try:
        check_names(own, config)
    except SettingError as error:
        raise SettingError(f"{file}: {error}") from error


def _dotted(name: str, values: Any) -> list[str]:
    if not isinstance(values, dict) or not values:
        return [name]
    return [dotted for key, value in values.items() for dotted in _dotted(f"{name}.{key}", value)]


def _normalize(override: str, config: type) -> str:
    """Return an override as Hydra takes it, or raise if its name is unknown.

    A group is chosen by the name of a file or, for tasks, by the dotted path of a class. A key of a free mapping is
    added.
    """
    # Choose a file of a group, or a task by its class
    name, separator, value = override.partition("=")
    name = name.lstrip("+~")
    if not separator:
        raise SettingError(f"{override!r} must be setting=value")
    groups = _groups(config)
    if name in groups:
        names = sorted(path.stem for path in groups[name].glob("[!_]*.yaml"))
        if value in names:
            return f"{name}={value}"
        if name == "task" and "." in value:
            return f"task.name={value}"
        raise SettingError(f"{name}={value} is unknown{near_match_hint(value, names)}; valid: {', '.join(names)}")
    # Check the name, and quote text that Hydra would parse
    check_names([name], config)
    free = any(f"{name}.".startswith(f"{section}.") for section in free_sections(config))
    if name in text_settings(config) and value[:1] not in ("'", '"') and value not in ("", "null"):
        refuse_bare_escapes(name, value)
        value = quote(value)  # commas and braces are text
    else:
        value = decode(name, value)
    return f"++{name}={value}" if free else f"{name}={value}"


def _groups(config: type) -> dict[str, Path]:
    """Return the folder of each group, by the section that its files fill."""
    return {f.name: GROUPS / f.name for f in fields(config) if (GROUPS / f.name).is_dir()}


def group_settings() -> list[str]:
    """Return the dotted names of all settings that files of a group set outside their own section."""
    found = {}
    for file in GROUPS.glob("*/*.yaml"):
        if "@package _global_" in (text := file.read_text(encoding="utf-8")):
            content = yaml.safe_load(text)
            content.pop("defaults", None)
            found |= {f"{section}.{name}": None for section in content for name in content[section]}
    return [name for name in found if name.partition(".")[0] not in DEFAULT_GROUPS]


def _settings_file(config: type, recipe: Path, overrides: Sequence[str], file: str | None) -> str:
    cfg = load_config(config, recipe, overrides, file, with_hydra=True)
    choices = {group: cfg.hydra.runtime.choices[group] for group in _groups(config)}
    given = {override.partition("=")[0].lstrip("+~") for override in overrides}
    own = OmegaConf.load(primary) if (primary := _primary(recipe, file)) else OmegaConf.create()
    from_groups = [name for name in group_settings() if name not in given and OmegaConf.select(own, name) is None]
    return settings_file(config, cfg, recipe.name, choices, from_groups)


def _help(config: type, cfg: DictConfig, prog: str, description: str, *, everything: bool) -> str:
    groups = [
        f"  {name}=  {', '.join(sorted(file.stem for file in folder.glob('[!_]*.yaml')))}"
        for name, folder in _groups(config).items()
    ]
    dry, common, number = (
        has_dry_run(config),
        getattr(config, "common", ()),
        sum(bool(setting.default) for setting in iter_settings(config)),
    )
    some = bool(common) and not everything
    listed = f"Common settings; --help-all lists all {number}:" if some else "Settings and their values:"
    return "\n".join(
        [
            f"usage: {prog} [--config NAME] {'[--dry-run] ' * dry}[--traceback] [--yaml] [setting=value ...]\n",
            description.strip(),
            *([f"\n{DRY_RUN_HELP};\n{COVERED};\n{NOT_COVERED}"] if dry and not some else []),
            *(
                ["\n--dry-run tries all of it for one step, with a tiny model in a temporary folder"]
                if dry and some
                else []
            ),
            "--yaml prints a file of all settings; save it as recipe.yaml next to recipe.py",
            *(["\nGroups of settings:", *groups] if groups else []),
            f"\n{listed}",
            help_text(config, cfg, common if some else ()),
        ]
    )
