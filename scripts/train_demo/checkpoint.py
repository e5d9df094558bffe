"""Write and read the shipped form of a model: bf16 safetensors in the Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from .network import Network
from .packing import write_json
from .settings import END_OF_TEXT_ID, TURN_END_ID, Shape
from .vocabulary import write_tokenizer

_SHARD_BYTES = 13 * 2**20
_INDEX = "model.safetensors.index.json"


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Fill shards in order, none over the limit."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if used + _size(tensor) > _SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += _size(tensor)
    return shards


def _write_weights(network: Network, folder: Path) -> None:
    """One file, or numbered shards with an index."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in network.state_dict().items()
    }
    shards = _shards(tensors)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    total = sum(map(_size, tensors.values()))
    write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_model(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Everything transformers needs to load the model."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    _write_weights(network, folder)
    write_json(folder / "config.json", network.shape.hugging_face_config())
    generation = {
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": [END_OF_TEXT_ID, TURN_END_ID],
        "pad_token_id": END_OF_TEXT_ID,
        "do_sample": False,
    }
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(tokenizer, folder, network.shape.context)


def read_network(folder: Path, shape: Shape, device: torch.device) -> Network:
    """The network as shipped: bf16 values, here in float32 arithmetic."""
    index = folder / _INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors.update(load_file(folder / name))
    network = Network(shape)
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network.to(device).eval()
