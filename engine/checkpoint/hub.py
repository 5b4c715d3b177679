"""Finding a checkpoint: the bundled one, a folder or file, or a repository of the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from engine.checkpoint.lora.config import CONFIG, read_lora_config
from engine.checkpoint.lora.folder import folder_of_adapter, is_adapter
from engine.console import is_c_locale
from engine.errors import CheckpointError

DEMO = "demo"

_WEIGHTS = ["*.safetensors"]
_WANTED = ["*.json", "*.jinja", "tokenizer*", "*.txt"]
# Second copies of the weights in other layouts.
_UNWANTED = ("consolidated*", "original/*", "onnx/*")
_VISION = "*mmproj*"  # the part of a GGUF model that is not served
_DYNAMIC = "UD-"  # before the kind, in the name of a variant of a file
_PARTS = "-?????-of-?????"


def resolve_checkpoint(model: str, *, weights: bool = True, setting: str = "model") -> Path:
    """Return the folder of the checkpoint that `model` names, downloading it if need be.

    Of an adapter it is a folder that has its base too, which is found in the same way.

    Args:
        model: `demo`, an existing folder or GGUF file, a hub id such as `Qwen/Qwen3-0.6B`, or one
            with the end of the name of a GGUF file in it, `Qwen/Qwen3-0.6B-GGUF:Q8_0`. A download
            shows a progress bar and resumes where an earlier one stopped; with `HF_HUB_OFFLINE=1`
            only what is in the local cache counts.
        weights: whether a download must have them.
        setting: name of the setting in errors.

    Raises:
        UnsupportedError: an adapter of another kind than is supported.
        CheckpointError: there is no such checkpoint, or its download failed; the text names the
            next step.
    """
    folder = _find(model, weights, setting)
    if not is_adapter(folder):
        return folder
    if not weights:  # the adapter's may change the size of the vocabulary
        folder = _find(model, True, setting)
    base = _find(read_lora_config(folder).base, weights, f"{CONFIG}: base_model_name_or_path")
    return folder_of_adapter(folder, base)


def _find(model: str, weights: bool, setting: str) -> Path:
    if model == DEMO:
        from engine.demo import CHECKPOINT_DIR

        return CHECKPOINT_DIR
    folder = os.path.expanduser(model)
    if os.path.isdir(folder):
        return Path(folder)
    if os.path.isfile(folder) and folder.endswith(".gguf"):
        return _folder_of_gguf(Path(folder))
    if os.path.exists(folder):
        raise CheckpointError(f"{model} is a file; give the folder that holds it", param=setting)
    repository, _, kind = model.partition(":")
    if kind:
        return _folder_of_gguf(_download_gguf(repository, kind, setting))
    return _download(model, [*_WANTED, *_WEIGHTS] if weights else _WANTED, setting)


def resolve_tokenizer(tokenizer: str | None, checkpoint: Path) -> Path:
    """Return the folder of the tokenizer that the setting names, by default `checkpoint`.

    Raises:
        CheckpointError: as `resolve_checkpoint`.
    """
    if tokenizer is None:
        return checkpoint
    return resolve_checkpoint(tokenizer, weights=False, setting="tokenizer")


def _folder_of_gguf(file: Path) -> Path:
    from engine.checkpoint.gguf.folder import folder_of_gguf  # here: most checkpoints are folders

    return folder_of_gguf(file)


def _download_gguf(repository: str, kind: str, setting: str) -> Path:
    """Return the GGUF file, or the first part of it, whose name ends with `kind`."""
    if not re.fullmatch(r"[\w.-]+", kind):  # a pattern would fetch all that it matches
        raise CheckpointError(
            f"{kind!r} is not a GGUF quantisation suffix (for example Q4_K_M)", param=setting
        )
    spellings = dict.fromkeys((kind, kind.upper(), kind.lower()))
    wanted = [f"*{each}{parts}.gguf" for each in spellings for parts in ("", _PARTS)]
    others = [] if _DYNAMIC in kind.upper() else [f"*{_DYNAMIC}*"]
    folder = _download(repository, wanted, setting, unwanted=[_VISION, *others])
    end = re.compile(rf"(.*[-._/])?{re.escape(kind)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
    files = sorted(file for file in folder.rglob("*.gguf") if end.fullmatch(file.name))
    if not files:
        raise CheckpointError(
            f"{repository} has no GGUF file with the suffix {kind}; see "
            f"https://huggingface.co/{repository}/tree/main",
            param=setting,
        )
    return min(files, key=lambda file: len(file.name))  # of variants, what has no more to it


def _download(
    model: str, wanted: list[str], setting: str, *, unwanted: Sequence[str] = _UNWANTED
) -> Path:
    if is_c_locale():
        os.environ.setdefault("TQDM_ASCII", " 123456789#")  # of the bar; read by the import
    # Imported here: most checkpoints are local, and the import takes a while.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"there is no folder {model}", param=setting)
    try:
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=list(unwanted)))
    except HFValidationError:
        raise CheckpointError(
            f"{model!r} is neither an existing folder nor a valid hub id (owner/name)",
            param=setting,
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"{model} is gated: accept its terms at https://huggingface.co/{model}, "
            "then run `hf auth login` or set HF_TOKEN",
            param=setting,
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"there is no folder {model}, and no such repository on the Hugging Face "
            "hub; check the spelling, and for a private one run `hf auth login` or set HF_TOKEN",
            param=setting,
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"there is no folder {model}, the Hugging Face hub cannot be reached, and its local "
            "cache is incomplete; check the network, HF_HUB_OFFLINE and HTTPS_PROXY, or download "
            "the model elsewhere and give its folder",
            param=setting,
        ) from None
    except Exception as error:  # whatever the transport or the disk may raise
        raise CheckpointError(
            f"{model} could not be downloaded: {error}; try again: the download resumes",
            param=setting,
        ) from None
