"""What a device can do, and how tensors get there."""

import functools
import importlib
import logging

import torch
from torch import Tensor

logger = logging.getLogger("slipstream")


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Whether the Triton kernels serve `device`; says so when a GPU has to do without."""
    if device.type != "cuda":
        return False
    try:
        importlib.import_module("slipstream.kernels.triton")
    except ImportError as error:
        logger.warning("Triton cannot be imported (%s): plain torch kernels serve the GPU.", error)
        return False
    return True


def send(values: Tensor, device: torch.device) -> Tensor:
    """`values`, made on the host, on `device`, without waiting for the device.

    A copy to a GPU leaves from pinned memory, which torch keeps until the copy is done.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
