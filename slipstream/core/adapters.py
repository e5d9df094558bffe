"""LoRA adapters, as users give them and as requests refer to them."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import UsageError

NO_ADAPTER = -1
"""The slot of a request without an adapter."""


@dataclass(frozen=True)
class LoRARequest:
    """The adapter to use for a prompt of `LLM`.

    Attributes:
        lora_name: name in messages and metrics.
        lora_int_id: unique number of the adapter, from 1 on.
        lora_path: its directory, in the layout of PEFT.
        draft_lora_path: directory of an adapter for the drafter; None: the drafter has no
            adapter.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path = ""
    draft_lora_path: str | Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise UsageError(f"lora_name must be a name, not {self.lora_name!r}")
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise UsageError(f"lora_int_id must be an integer of at least 1, not {number!r}")
        given = {"lora_path": self.lora_path}
        if self.draft_lora_path is not None:
            given["draft_lora_path"] = self.draft_lora_path
        for name, path in given.items():
            if not isinstance(path, str | Path) or not str(path):
                raise UsageError(f"{name} must be the directory of an adapter, not {path!r}")


@dataclass(frozen=True, eq=False)
class NamedAdapter:
    """An adapter to which requests refer. It stays valid if its name is unloaded or loaded again.

    Attributes:
        serial: unique among all adapters of the engine, also those of equal names; a part of the
            keys of the prefix cache.
        factors: its factors, in host memory.
        adapts_drafts: the adapter has factors for the drafter as well.
    """

    name: str
    serial: int
    factors: object
    adapts_drafts: bool = False
