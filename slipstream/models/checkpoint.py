"""Finds model directories and reads their configs and tensor headers."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import CheckpointError, UsageError
from slipstream.core.paths import user_path
from slipstream.models.bundled import bundled_names, bundled_path
from slipstream.models.config_reader import overridden
from slipstream.models.gguf.config import read_config, sampling_defaults
from slipstream.models.gguf.container import Container, read_container
from slipstream.models.gguf.families import renamed_entries
from slipstream.models.gguf.files import fetch_model, is_gguf, model_in, require_first, split_tag
from slipstream.models.hub import download
from slipstream.models.safetensors_file import (
    WEIGHT_DTYPES,
    TensorEntry,
    hold_same_numbers,
    read_entries,
    require_content,
)
from slipstream.models.wrappers import is_wrapper, text_config, text_names

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
_PICKLED = ("pytorch_model*.bin", "*.pth")
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_EOS = "eos_token_id"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
_HUB_PICKLED = ["pytorch_model*.bin", "warp_model.bin", "*.pt"]
# Second copies of the weights in other layouts, which would double the download.
_HUB_IGNORED = ["consolidated*", "*/*.safetensors", "*/*.json", "original/*"]


def resolve_checkpoint(
    name_or_path: str | Path, revision: str | None = None, pickled: bool = False
) -> Path:
    """The path of a checkpoint, given as a bundled demo, a directory, a GGUF file, or a hub name,
    which is downloaded if needed.

    The path is a directory, or a GGUF file, also for a directory that holds nothing else.

    Args:
        revision: branch, tag or commit of a hub name.
        pickled: download pickled weights as well; some drafters have no others.
    """
    name = str(name_or_path)
    bundled, path = bundled_path(name), user_path(name)
    if (local := local_path(name)) is not None:
        if revision is not None:
            raise UsageError(f"{name} is a local path and has no revision; leave revision out")
        return _local(local)
    if bundled is not None:
        raise CheckpointError(
            f"{name} is not bundled with this installation (bundled are: "
            f"{', '.join(bundled_names()) or 'none'}); give a model directory or a hub "
            f"name"
        )
    tagged = split_tag(name)
    if is_gguf(path) or not _HUB_NAME.fullmatch(name if tagged is None else tagged[0]):
        kind = "GGUF file" if is_gguf(path) else "model directory"
        raise CheckpointError(f"there is no {kind} {name!r}; check the path")
    if tagged is not None:
        if tagged[1] is not None and "/" not in tagged[0]:
            raise CheckpointError(
                f"{name} is no name of the hub, and names of Ollama are not known here; give a "
                "GGUF file, or a repository with its owner (owner/name-GGUF:Q4_K_M)"
            )
        return fetch_model(*tagged, revision)
    wanted = [*_HUB_PATTERNS, *(_HUB_PICKLED if pickled else ())]
    return download(name, revision, wanted, _HUB_IGNORED)


def local_path(name: str) -> Path | None:
    """The directory or file of this machine that is meant by a checkpoint's name: a bundled demo's
    before the user's own."""
    bundled = bundled_path(name)
    path = bundled if bundled is not None and bundled.is_dir() else user_path(name)
    # An empty name would be the working directory.
    return path if name and (path.is_dir() or path.is_file()) else None


def _local(path: Path) -> Path:
    """An existing path; the GGUF file of a directory that has one."""
    if path.is_dir():
        return model_in(path) or path
    if not is_gguf(path):
        raise CheckpointError(
            f"{path} is not a GGUF file, by its first bytes; give one, or the model directory that "
            "holds this file"
        )
    return require_first(path)


def read_json_object(file: Path) -> dict[str, Any]:
    """The content of a JSON file that must hold an object."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        require_content(file)
        raise CheckpointError(
            f"{file} is not valid JSON ({error}); fix it or download it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


@dataclass(frozen=True)
class Replaced:
    """Values and files that replace those of a model directory.

    Attributes:
        config: values that replace those in config.json (`config_reader.py`).
        config_folder, generation_folder: directories of config.json and generation_config.json;
            None: the model directory.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    config_folder: Path | None = None
    generation_folder: Path | None = None


_NOTHING = Replaced()


class Checkpoint:
    """One model directory, or GGUF file. Every part is read when it is first used."""

    def __init__(self, path: Path, replaced: Replaced = _NOTHING) -> None:
        self.path, self.replaced = Path(path), replaced
        self._is_gguf = is_gguf(self.path) and self.path.is_file()

    @property
    def config_file(self) -> Path:
        """The file with the config; for GGUF the checkpoint itself."""
        if self._is_gguf:
            return self.path
        return (self.replaced.config_folder or self.path) / "config.json"

    @property
    def generation_file(self) -> Path:
        if self._is_gguf and self.replaced.generation_folder is None:
            return self.path
        return (self.replaced.generation_folder or self.path) / "generation_config.json"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; for a multimodal model only the language model's part."""
        return dict(text_config(self.whole_config))

    @cached_property
    def whole_config(self) -> dict[str, Any]:
        """The content of config.json."""
        if self._is_gguf:
            if self.replaced.config_folder is not None:
                raise UsageError(
                    f"{self.path} has its config in itself; leave out hf_config_path, or change "
                    "single keys of it (hf_overrides)"
                )
            return overridden(read_config(self.container), self.replaced.config)
        if not self.config_file.is_file():
            raise CheckpointError(_why_no_config(self.config_file.parent))
        return overridden(read_json_object(self.config_file), self.replaced.config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json; empty if there is none."""
        file = self.generation_file
        if file == self.path:
            return sampling_defaults(self.container.metadata)
        return read_json_object(file) if file.is_file() else {}

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """The language model's tensors of all files, by name."""
        if self._is_gguf:
            return renamed_entries(self.container)
        entries = self.all_entries
        wrapped = self.config_file.is_file() and is_wrapper(self.whole_config)
        names = text_names(entries, wrapped)
        return {short: entries[name] for name, short in names.items()}

    @cached_property
    def all_entries(self) -> dict[str, TensorEntry]:
        """All tensors of safetensors files, by their names in the files."""
        if (self.path / _SINGLE).is_file():
            return read_entries(self.path / _SINGLE)
        if (self.path / _INDEX).is_file():
            return _sharded_entries(self.path, self.path / _INDEX)
        why = (
            self.unread_weights or f"{self._lacks}; download the weights, or ask for dummy weights"
        )
        raise CheckpointError(why)

    @property
    def module_names(self) -> frozenset[str]:
        """Names of all modules with tensors, those of towers too, as stored and without prefixes of
        a multimodal model."""
        names = self.entries.keys() | (() if self._is_gguf else self.all_entries.keys())
        return frozenset(name.rpartition(".")[0] for name in names)

    @property
    def has_weights(self) -> bool:
        """Whether there are weights; a config alone can be inspected."""
        return self._is_gguf or any((self.path / name).is_file() for name in (_SINGLE, _INDEX))

    @property
    def container(self) -> Container:
        """The header of a GGUF file; only for such checkpoints."""
        return read_container(self.path)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors as stored."""
        return sum(entry.nbytes for entry in self.entries.values())

    @cached_property
    def has_own_head(self) -> bool:
        """Whether a head is stored that differs from the embeddings. It is then used, as in
        transformers, even if config.json says that they are tied."""
        entries = self.entries if self.has_weights else {}
        head, table = entries.get(_HEAD), entries.get(_EMBEDDINGS)
        return head is not None and table is not None and not hold_same_numbers(head, table)

    @cached_property
    def weights_dtype(self) -> torch.dtype | None:
        """The dtype of most of the stored floating-point numbers; None if there are none."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries.values() if self.has_weights else ():
            if entry.dtype in WEIGHT_DTYPES:  # without dtypes that only quantised matrices have
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an output: generation_config.json's, or else config.json's."""
        given = _token_ids(self.generation_file, self.generation_config)
        return given or _token_ids(self.config_file, self.config)

    @property
    def eos_file(self) -> Path:
        return self.generation_file if self.generation_config.get(_EOS) else self.config_file

    @property
    def _lacks(self) -> str:
        return f"{self.path} has neither {_SINGLE} nor {_INDEX}"

    @property
    def unread_weights(self) -> str | None:
        """Why the weights that are there are not read; None: there are none, or they are."""
        if self.has_weights:
            return None
        if any(next(self.path.glob(kind), None) for kind in _PICKLED):
            return (
                f"{self._lacks}, only pickled weights, which could run code when loaded; convert "
                "them to safetensors (transformers: save_pretrained) or use a revision that has "
                "them"
            )
        if (self.path / _ADAPTER).is_file():
            return f"{self._lacks}, only a LoRA adapter; give its base model, and it as an adapter"
        others = sorted(file.name for file in self.path.glob("*.safetensors"))
        if others:
            return (
                f"{self._lacks}, only {others[0]}{', ...' if others[1:] else ''}; download "
                f"{_SINGLE}, or all its parts and {_INDEX}"
            )
        return None


def _why_no_config(folder: Path) -> str:
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json_object(adapter).get("base_model_name_or_path") or "its base model"
        return (
            f"{folder} is a LoRA adapter: give {base} as the model, and the adapter with "
            "--enable-lora and --lora-modules NAME=FOLDER (lora_request in LLM)"
        )
    return (
        f"{folder} has no config.json; give the directory of a Hugging Face checkpoint, or for a "
        "GGUF file of the hub its tag after the name (owner/name:Q4_K_M)"
    )


def _sharded_entries(directory: Path, index_file: Path) -> dict[str, TensorEntry]:
    weight_map = _weight_map(index_file)
    shards = {
        shard: _shard_entries(directory / shard, index_file)
        for shard in sorted(set(weight_map.values()))
    }
    entries: dict[str, TensorEntry] = {}
    for name, shard in weight_map.items():
        entry = shards[shard].get(name)
        if entry is None:
            raise CheckpointError(
                f"{index_file} places tensor {name} in {shard}, which does not hold it; "
                f"download both again"
            )
        entries[name] = entry
    # Tensors that the index omits are kept: the loader decides whether they are an error.
    for held in shards.values():
        for name, entry in held.items():
            entries.setdefault(name, entry)
    return entries


def _weight_map(index_file: Path) -> dict[str, str]:
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_file} has no weight_map; download it again")
    for name, shard in weight_map.items():
        # A shard is in its index's directory: a path could point anywhere on the machine.
        if not isinstance(shard, str) or not shard or Path(shard).name != shard:
            raise CheckpointError(
                f"{index_file} places tensor {name} in {shard!r}, which is not a plain file name"
            )
    return weight_map


def _shard_entries(file: Path, index_file: Path) -> dict[str, TensorEntry]:
    if not file.is_file():
        raise CheckpointError(
            f"{index_file} names {file.name}, which does not exist; finish the download"
        )
    return read_entries(file)


def _token_ids(file: Path, content: Mapping[str, Any]) -> tuple[int, ...]:
    value = content.get(_EOS)
    ids = value if isinstance(value, list) else [value]
    if ids == [None]:
        return ()
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(f"{file}: {_EOS} must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(ids))
