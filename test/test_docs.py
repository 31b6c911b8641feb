"""README and docs are true: code runs, commands have settings that exist, names and pictures are those of the code."""

from __future__ import annotations

import ast
import fnmatch
import importlib.util
import pkgutil
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from torchrl.data import ReplayBuffer

import torchrl_rloo
from support.recipes import settings
from support.setting_names import SETTINGS, exists
from torchrl_rloo.cli.fields import non_null_fields
from torchrl_rloo.cli.main import RECIPES, STORED
from torchrl_rloo.cli.main import _parser as command_parser
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.diagnostics import DEFINITIONS
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import KLRewardTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss, make_method
from torchrl_rloo.replay import MCAdvantage, RowStorage

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LIBRARIES = yaml.safe_load((DOCS / "coming_from.yaml").read_text())
GENERATED = ("_build", "api", "configuration", "tutorials", "metrics.md", *(f"{name}.md" for name in LIBRARIES))
sys.path.insert(0, str(DOCS))
from generate import TUTORIALS  # noqa: E402

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "benchmarks" / "README.md",
    *(p for p in sorted(DOCS.rglob("*.md")) if not set(p.relative_to(DOCS).parts) & set(GENERATED)),
    *(DOCS / "coming-from" / f"{name}.md" for name in LIBRARIES),
    *(ROOT / "tutorials" / f"{name}.py" for name in TUTORIALS),
]
FENCE = re.compile(r"^(`{3,})(\S*)[^\n]*\n(.*?)^\1$", re.DOTALL | re.MULTILINE)
OUTPUT = {"text", "json", "yaml"}  # not run: what a command prints, or the content of a file


@cache
def load(path: Path):
    """Import a file that is in no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_page(page: Path) -> str:
    """Return the Markdown of a page; that of a tutorial is in its cells of text, that of a library its introduction."""
    if page.parent.name == "coming-from" and page.stem in LIBRARIES:
        return LIBRARIES[page.stem]["introduction"]
    text = page.read_text()
    if page.suffix == ".md":
        return text
    cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n|\n)*?)(?=# %%|\Z|\n*# %%)", text, re.MULTILINE)
    return "\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells)


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return [text for _, name, text in FENCE.findall(read_page(page)) if name == language]


def identify(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_each_block_runs_in_a_test_or_is_marked_as_output(page: Path):
    names = {name for _, name, _ in FENCE.findall(read_page(page))}
    assert {n for n in names if not n.startswith("{")} <= {"python", "bash"} | OUTPUT


# Run by test_tutorials.py
WITHOUT_CONTEXT = {"README.md", *(f"docs/how-to/{name}.md" for name in ("images", "search", "vllm"))}
_PARTS = """
from torchrl_rloo.data import load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.rewards import boxed_accuracy
tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("train", size=64))
env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=16, num_generations=2, rewards=boxed_accuracy)
"""
NAMES = {  # parts that the blocks of a page take as given
    "docs/methods.md": """
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper, frozen_reference
tokenizer = build_tokenizer()
actor = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate=False)
reference = frozen_reference(actor)
""",
    "docs/how-to/cluster.md": _PARTS
    + """
from torchrl_rloo.engines import TransformersEngine
model, make_engine = build_model(tokenizer, seed=0), lambda: TransformersEngine(build_model(tokenizer, seed=0))
""",
    "docs/how-to/reading-a-run.md": _PARTS
    + """
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.modules import TransformersWrapper
model = build_model(tokenizer, seed=0)
collector = LLMCollector(
    env, TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0})
)
""",
    "docs/concepts/staleness.md": _PARTS
    + """
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.modules import TransformersWrapper
model = build_model(tokenizer, seed=0)
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0})
trainer, rows = policy.get_new_version(generate=False), LLMCollector(env, policy).collect()
""",
    "docs/how-to/stored-rollouts.md": _PARTS
    + """
from torchrl.data import ReplayBuffer
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.ray import ray_session
from torchrl_rloo.replay import MCAdvantage, RowStorage
policy = TransformersWrapper(
    build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0}
)
buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage(2))
rows = LLMCollector(env, policy).collect()
groups = [rows[i : i + 2] for i in range(0, 32, 2)]
session = ray_session(num_cpus=4, include_dashboard=False)
session.__enter__()
""",
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python") and identify(p) not in WITHOUT_CONTEXT], ids=identify
)
def test_python_blocks_run_in_the_order_of_the_page(page: Path, fork_server, tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text("\n".join([NAMES.get(identify(page), ""), *blocks(page, "python")]))
    done = fork_server.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


# Commands of the pages write down their arguments instead of running.
STUBS = "".join(
    f"{name}() {{ printf '%s\\0' {name} \"$@\" >> commands; printf '\\036' >> commands; }}\n"
    for name in ("torchrl-rloo", "torchrun", "python", "pip", "make", "ray")
)


def commands(page: Path, folder: Path) -> list[list[str]]:
    """Return the commands of a page's shell blocks, as a shell reads them."""
    script = "\n".join([STUBS, "set -eu", "touch commands", *blocks(page, "bash")])
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, timeout=60, stdout=subprocess.DEVNULL)
    return [line.split("\0")[:-1] for line in (folder / "commands").read_text().split("\x1e")[:-1]]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "bash")], ids=identify)
def test_commands_have_settings_that_exist(page: Path, tmp_path: Path, monkeypatch):
    for module in ("config", "rloo_sections"):  # files are the user's, or of earlier runs
        monkeypatch.setattr(f"torchrl_rloo.cli.{module}.check_path", lambda *_: None)
    for program, *arguments in commands(page, tmp_path):
        if program == "torchrun":  # with the launcher's options before the command
            program, arguments = "torchrl-rloo", arguments[arguments.index("torchrl_rloo.cli.main") + 1 :]
        if program == "ray" and "--" in arguments:  # a job
            program, *arguments = arguments[arguments.index("--") + 1 :]
        if "--ranks" in arguments:
            assert arguments[1] == "--ranks" and int(arguments[2]) > 1
            del arguments[1:3]
        if arguments[1:2] == ["--on-ray"]:
            del arguments[1 : 4 if arguments[2] == "--resources" else 2]
        if program == "torchrl-rloo" and arguments[0] in ("run", "cp", "check", "evaluate"):
            if arguments[0] == "cp" and len(arguments) == 2:  # no recipe is named
                arguments.insert(1, "simple")
            recipe, given = ("evaluate", arguments[1:]) if arguments[0] == "evaluate" else (arguments[1], arguments[2:])
            given = [*RECIPES[recipe][1:], *(given[1:] if arguments[0] == "cp" else given)]
            settings(recipe, *given)  # raises what is wrong
        elif program == "torchrl-rloo" and arguments[0] == "plan":
            settings("rloo", *(argument for argument in arguments if "=" in argument))
        elif program == "torchrl-rloo" and arguments[0] in STORED:
            parse_command(arguments)
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            if len(arguments) > 1:
                settings("rloo", *shlex.split(arguments[1].removeprefix("ARGS=")))


def parse_command(arguments: list[str]) -> None:
    """Fail for options that a command does not have."""
    try:
        command_parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(f"torchrl-rloo {shlex.join(arguments)} cannot be parsed")


def code_spans(page: Path) -> list[str]:
    """Return the inline code of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", read_page(page)))


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_settings_metrics_and_files_that_a_page_names_exist(page: Path, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.cli.config.check_path", lambda *_: None)
    patterns = [re.sub(r"<[^>]*>", "*", name) for name in DEFINITIONS]
    for span in code_spans(page):
        name = span.split("=")[0]
        if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S.*", span) and "..." not in span:
            assert exists(name), name
        elif re.fullmatch(r"(count|eval|completions|rewards|parity|pool|stop|clip_ratio)/[\w/<>@*]*", span):
            wanted = re.sub(r"<[^>]*>", "x", span).rstrip("*/") or span
            assert any(fnmatch.fnmatch(wanted, p) or p.startswith(f"{wanted}/") for p in patterns), span
        elif re.fullmatch(r"(torchrl_rloo|sota_implementations|benchmarks|tutorials|test|docs)/[\w./-]*", span):
            assert (ROOT / span).exists(), span


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_to_files(page: Path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", FENCE.sub("", read_page(page))):
        if not re.match(r"[a-z]+:", target):
            folder = page.parent if page.suffix == ".md" else DOCS / "tutorials"  # the build copies tutorials there
            path = (folder / target).resolve()
            generated = path.is_relative_to(DOCS) and set(path.relative_to(DOCS).parts) & set(GENERATED)
            assert path.exists() or generated, target


def test_pictures_are_drawn_from_the_code():
    pictures = load(DOCS / "pictures.py")
    for name, draw in pictures.DRAWINGS.items():
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == draw(), f"run python docs/pictures.py: {name}"


CONTEXTS = {  # what a setting requires, by the start of its name; the first that fits
    "curriculum": ["curriculum.refill={}"],
    "inference.engine.url": ["inference=vllm_server"],
    "inference.engine.request_timeout": ["inference=vllm_server"],
    "inference.sleep": ["inference=vllm_colocated"],
    "inference.": ["inference=vllm"],
    "kl.": ["kl.coeff=0.1"],
    "plan.epochs": [],  # in place of plan.steps
    "task.mixture": ["task=mixture"],
    "train.": [],  # without an engine, which cannot be combined with all of them
    "": [],
}


def translations() -> list[str]:
    """Return our side of the table: one or more settings a row."""
    rows = [row for library in LIBRARIES.values() for group in library["settings"].values() for row in group.values()]
    assert all(ours or note for ours, note, *_ in rows)
    return sorted({ours for ours, *_ in rows if ours})


def words_of(name: str) -> str:
    """Return the words of a setting or a public name, such as ``_moving_reference_`` of ``MovingReference``."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])|[.]', '_', name).lower()}_"


def test_each_denial_of_the_translation_table_is_true():
    """A note says that something is not available only with words that no setting and no public name has."""
    packages = [m.name for m in pkgutil.walk_packages(torchrl_rloo.__path__, "torchrl_rloo.") if m.ispkg]
    public = {name for package in packages for name in getattr(importlib.import_module(package), "__all__", ())}
    present, sections = [words_of(name) for name in public | SETTINGS], {name.partition(".")[0] for name in SETTINGS}
    for library in LIBRARIES.values():
        for theirs, (_, note, *absent) in (
            (t, row) for group in library["settings"].values() for t, row in group.items()
        ):
            assert "one training process" not in note and "no Ray" not in note
            assert bool(absent) == bool(re.search(r"\bnot available|text only", note)), theirs
            for word in absent[0] if absent else ():
                assert not any(f"_{word}_" in name for name in present), (theirs, word)
            for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_]+)(?:=[^`]*)?`", note):
                assert name.partition(".")[0] not in sections or exists(name), (theirs, name)


def test_each_setting_of_the_translation_table_is_accepted(monkeypatch):
    """``...`` stands for a value of the reader's."""
    monkeypatch.setattr("torchrl_rloo.cli.config.check_path", lambda *_: None)
    batches: dict[str, list[dict[str, str]]] = {}  # settings that are checked at once: by context, a name once
    for ours in translations():
        if " " in ours:
            settings(*of_recipe(ours))
            continue
        (setting,) = shlex.split(ours) if "..." not in ours else (ours,)
        name, _, value = setting.partition("=")
        assert value, setting
        if "..." in value:
            assert exists(name), name
        elif not name.startswith(("loss", "advantage")):
            context = next(c for c in CONTEXTS if name.startswith(c))
            batch = next((b for b in batches.setdefault(context, []) if name not in b), None)
            if batch is None:
                batches[context].append(batch := {})
            batch[name] = setting
    for context, parts in batches.items():
        for batch in parts:
            settings("rloo", *(s for s in CONTEXTS[context] if s.split("=")[0] not in batch), *batch.values())


def of_recipe(ours: str) -> list[str]:
    """Return recipe and settings of a row; those of another recipe than ``rloo`` begin with its name."""
    first, *rest = shlex.split(ours)
    return [first, *(s for s in rest if "..." not in s)] if first in RECIPES else ["rloo", first, *rest]


@pytest.fixture(scope="module")
def actor() -> TransformersWrapper:
    """A scoring wrapper of a random model."""
    tokenizer = build_tokenizer()
    return TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate=False)


@pytest.mark.parametrize(
    "ours",
    [s for s in translations() if re.match(r".*\b(loss\.|advantage\.|algorithm=)", s) and of_recipe(s)[0] == "rloo"],
)
def test_methods_take_the_settings_of_the_translation_table(ours: str, actor: TransformersWrapper):
    """The default algorithm takes them, unless the row names another one."""
    cfg = settings("rloo", *shlex.split(ours))
    sizes = {"reward_weights": [1.0], "max_new_tokens": 8, "prompts_per_step": 2, "num_generations": 2}
    method = make_method(cfg.algorithm, loss=cfg.loss, advantage=cfg.advantage, kl=non_null_fields(cfg.kl), **sizes)
    MCAdvantage(**method.advantage_arguments)
    RLOOLoss(actor, **method.loss_arguments)


def fields_of(path: Path, *classes: str) -> set[str]:
    """Return the annotated fields of classes, from their source."""
    return {
        node.target.id
        for cls in ast.parse(path.read_text()).body
        if isinstance(cls, ast.ClassDef) and cls.name in classes
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
    }


def test_every_setting_of_trl_is_translated():
    """Names come from the source of the installed version, which is the version that the page names."""
    library = LIBRARIES["trl"]
    trl, transformers = (
        Path(importlib.util.find_spec(n).submodule_search_locations[0]) for n in ("trl", "transformers")
    )
    (init,) = (
        node
        for cls in ast.parse((trl / "trainer/rloo_trainer.py").read_text()).body
        if isinstance(cls, ast.ClassDef) and cls.name == "RLOOTrainer"
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    wanted = {a.arg for a in init.args.args} - {"self"}
    wanted |= fields_of(trl / "trainer/rloo_config.py", "RLOOConfig")
    wanted |= fields_of(trl / "trainer/grpo_config.py", "GRPOConfig")
    wanted |= fields_of(trl / "trainer/base_config.py", "_BaseConfig")
    general = fields_of(transformers / "training_args.py", "TrainingArguments")
    tables = [rows for title, rows in library["settings"].items() if title != "TRL up to 0.21"]
    told = {name.strip() for rows in tables for key in rows for name in key.split(",")}
    known = wanted | general | fields_of(trl / "trainer/distillation_config.py", "DistillationConfig")
    for name, config in (("gkd", "GKD"), ("sdft", "SDFT"), ("server_distillation", "ServerDistillation")):
        known |= fields_of(trl / f"experimental/{name}/{name}_config.py", f"{config}Config")
    assert wanted - told == set() and told - known == set()
    assert f"TRL {'.'.join(version('trl').split('.')[:2])}" in library["introduction"]


def test_a_row_gains_the_keys_of_its_picture_in_that_order():
    """Each stage of ``docs/pictures/row.svg`` writes the keys that the picture names, and no earlier stage does."""
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(lambda request, index: ScriptedTurn([5 + index, tokenizer.eos_token_id]))
    policy = vLLMWrapper(engine, tokenizer=tokenizer)
    scorer = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate=False)
    env = DatasetChatEnv(
        load_prompts([{"prompt": "1+1?"}]),
        tokenizer,
        prompts_per_batch=1,
        num_generations=2,
        rewards=lambda completion_ids, **columns: [float(ids[0]) for ids in completion_ids],
        after_rewards=[KLRewardTransform(scorer, kl_to_ref_coeff=0.0)],
    )
    rows = env.reset()
    seen = {"DataLoadingPrimer": rows, "ChatEnv.reset": rows}
    seen["policy"] = policy(rows.clone())
    stepped = env.step(seen["policy"].clone())
    seen |= {"ChatEnv.step": stepped, "reward transforms": stepped}
    collected = seen["LLMCollector"] = LLMCollector(env, policy).collect()
    buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage(), batch_size=2)
    buffer.extend(tensor_rows(collected))
    seen["MCAdvantage"] = buffer.sample()

    before: set = set()
    for who, _, names, _ in load(DOCS / "pictures.py").STAGES:
        written = {getattr(keys, name) for name in names}
        present = set(seen[who].keys(True)) if who in seen else written
        assert written <= present, who
        new = written - {keys.ACTION_MASK, keys.LOG_PROBS}  # empty after a reset, longer after each turn
        assert not new & before, who
        before |= present if who not in ("DataLoadingPrimer", "ChatEnv.step") else set()


def test_install_pages_name_every_extra():
    """Those for users; the others are for the project's own targets."""
    setup = ast.parse((ROOT / "setup.py").read_text()).body
    (table,) = (n.value for n in setup if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "EXTRAS")
    extras = {key.value for key in table.keys}
    for page in (ROOT / "README.md", DOCS / "get-started.md"):
        assert extras <= set(re.findall(r"`([a-z-]+)`", page.read_text())), page.name


def test_the_citation_has_the_version_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == torchrl_rloo.__version__
