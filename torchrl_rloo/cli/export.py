"""Command ``torchrl-rloo export``: the model of a finished run, merged or not, in a folder and on the hub."""

from __future__ import annotations

import json
from pathlib import Path

from torchrl_rloo.runtime.masking import MASK, mask_text

EXAMPLES = """
  torchrl-rloo export outputs/rloo/gsm8k/seed0 --merge     merge the adapter: outputs/rloo/gsm8k/seed0/merged
  torchrl-rloo export outputs/rloo/gsm8k/seed0 --push me/my-model --private"""


def add_export_options(parser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument("run", type=Path, help="output directory of a finished run")
    parser.add_argument("--merge", action="store_true", help="merge the adapter into its base model, in RUN/merged")
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload to the hub, with the token of hf auth login")
    parser.add_argument("--private", action="store_true", help="create a private repository")


def export(run: Path, merge: bool, push: str | None, private: bool) -> None:
    """Print the folder of a run's model, and the address on the hub if it is pushed."""
    folder = run / "model"
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise FileNotFoundError(f"{run} has no trained model in {folder}; finish the run with its command first")
    if private and push is None:
        raise ValueError("--private has no effect without --push OWNER/NAME")
    if merge:
        folder = merge_adapter(run, run / "merged")
    elif push is not None and Path(base := _base(folder)).exists():
        raise ValueError(f"the adapter in {folder} needs {base}, which only this machine has; add --merge")
    print(folder.resolve(), flush=True)
    if push is not None:
        print(push_folder(folder, push, private=private))


def merge_adapter(run: Path, merged: Path) -> Path:
    """Save the model of a run with its adapter merged, and its card."""
    adapter = run / "model"
    if not (adapter / "adapter_config.json").is_file():
        raise ValueError(f"{adapter} has whole weights and no adapter to merge; remove --merge")
    from torchrl_rloo.modules import load_model, save_merged

    settings = json.loads((run / "settings.json").read_text(encoding="utf-8"))["model"]
    names = ("dtype", "quantization", "quantization_kwargs")
    options = {name: settings[name] for name in names if settings.get(name)} | settings.get("kwargs", {})
    options = {name: value for name, value in options.items() if value != MASK}  # a token comes from the environment
    save_merged(*load_model(adapter, **options), merged)
    if (card := adapter / "README.md").is_file():
        text = card.read_text(encoding="utf-8").replace("library_name: peft", "library_name: transformers")
        text = text.replace(", which the adapter needs", ", with the trained adapter merged into its weights")
        (merged / "README.md").write_text(text, encoding="utf-8")
    return merged


def _base(folder: Path) -> str:
    """Return the name of the base model of an adapter; of whole weights, a path that does not exist."""
    if not (file := folder / "adapter_config.json").is_file():
        return str(file)
    return json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]


def push_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Upload a folder to a model repository of the hub, created if missing, and return the address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    upload = {"repo_id": repository, "folder_path": folder, "commit_message": "Add the trained model"}
    try:
        HfApi().create_repo(repository, private=private, exist_ok=True)
        return str(HfApi().upload_folder(**upload).repo_url)
    except HfHubHTTPError as error:
        reason = mask_text(str(error))
        raise OSError(f"the hub refused {repository}: {reason}; check the name and hf auth whoami") from None
