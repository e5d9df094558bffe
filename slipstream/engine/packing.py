"""A planned batch in numbers, as the device's part of a step takes it."""

from collections.abc import Sequence

import torch

from slipstream.core.batch import NUM_BINS, Batch, Trim
from slipstream.kernels.devices import send
from slipstream.runner.device_batch import Guesses, PackedBatch
from slipstream.runner.rows import prompt_rows
from slipstream.sampling.state import SamplingState, Uses


def pack(
    batch: Batch, guesses: Guesses | None, sampling: SamplingState, rereads: bool
) -> PackedBatch:
    """The batch in numbers.

    Args:
        guesses: of a drafter that runs on the host; see `Drafter.prepare`.
        rereads: the drafter wants features of the last cached token of a prefix hit.
    """
    items = batch.requests
    drafts = [item.num_draft_tokens for item in items]
    if guesses is not None:
        guessed = zip(guesses, drafts, strict=True)
        drafts = [most if guess is None else len(guess) for guess, most in guessed]
    slots = [item.request.slot for item in items]
    uses = sampling.uses(slots)
    width = max(drafts)
    if Uses.GRAMMAR in uses:  # which may have something to say where a drafter has not
        width = max(item.num_draft_tokens for item in items)
    trims = [item.trim for item in items]
    if guesses is not None or Uses.GRAMMAR in uses:  # whose tokens have no confidences
        pairs = zip(drafts, trims, strict=True)
        drafts = [most if it is None else min(most, it.num_rows) for most, it in pairs]
        trims = []
    stops = [item.stops for item in items]
    again = [int(rereads and item.admitted and item.start > 0) for item in items]
    prompts = [
        prompt_rows(item.request.spans, item.start - less, item.start + item.num_new_tokens)
        for item, less in zip(items, again, strict=True)
    ]
    return PackedBatch(
        slots=slots,
        num_new_tokens=[item.num_new_tokens for item in items],
        num_draft_tokens=drafts,
        at_end=[item.reaches_end for item in items],
        width=width,
        uses=uses,
        guesses=guesses,
        rereads=again,
        stops=stops if any(stops) else (),
        trims=trims if any(trims) else (),
        saved=[item.saved for item in items],
        prompts=prompts if any(prompts) else (),
    )


class TrimRates:
    """The rates of a step's trims, which are the same for all, where the device reads them.

    Attributes:
        chances: [NUM_BINS] float32; see `Trim`.
    """

    def __init__(self, device: torch.device) -> None:
        self._rates: tuple[float, ...] = (1.0,) * NUM_BINS  # what `chances` holds
        self.chances = torch.ones(NUM_BINS, dtype=torch.float32, device=device)

    def set(self, trims: Sequence[Trim | None]) -> None:
        """Take those of a step, if it has any."""
        rates = next((it.rates for it in trims if it is not None), self._rates)
        if rates != self._rates:
            self.chances.copy_(send(torch.tensor(rates), self.chances.device))
            self._rates = rates
