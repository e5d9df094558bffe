"""Small copies between host and device that neither side waits for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.kernels.devices import send


def upload(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """`values` as int64 on the device; on a GPU the copy takes its turn in the stream."""
    return send(torch.tensor(values, dtype=torch.int64), device)


class Download:
    """A tensor [R, W] on its way to the host.

    The tensor may be overwritten by later work of the same stream at once.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[list[int]]:
        """The numbers, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._host.tolist()
        return rows
