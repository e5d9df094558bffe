"""Several texts are written at once and shown one after another."""

from collections.abc import Iterator, Sequence

from slipstream.cli.status import Meter, Status
from slipstream.cli.views import View
from slipstream.core.outputs import CompletionOutput, RequestOutput


class Player:
    """Feeds a view from the snapshots of an engine that has served no one else.

    Args:
        prompts: texts of the requests, in order; request ids count from 0.
        num_samples: of each.
    """

    def __init__(self, prompts: Sequence[str], num_samples: int, view: View, meter: Meter) -> None:
        self._prompts, self._num_samples = prompts, num_samples
        self._view, self._meter = view, meter
        self._latest: dict[int, RequestOutput] = {}
        self._order = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
        self._place = 0

    def play(self, outputs: Iterator[RequestOutput]) -> list[RequestOutput]:
        """Show everything; the final outputs in the order of the prompts."""
        self._begin()
        for output in outputs:
            self._latest[int(output.request_id)] = output
            self._catch_up()
        return [self._latest[index] for index in sorted(self._latest)]

    def status(self) -> Status:
        """Over all texts so far."""
        return self._meter.read(
            sum(
                len(sample.token_ids)
                for output in self._latest.values()
                for sample in output.outputs
            )
        )

    def _catch_up(self) -> None:
        """Show the current sample, and those behind it that were finished in the meantime."""
        while self._place < len(self._order):
            sample = self._current()
            if sample is None:
                return
            self._view.show(sample, self.status)
            if sample.finish_reason is None:
                return
            self._view.end()
            self._place += 1
            self._begin()

    def _begin(self) -> None:
        if self._place < len(self._order):
            prompt, sample = self._order[self._place]
            self._view.begin(self._heading(prompt, sample), self._prompts[prompt])

    def _current(self) -> CompletionOutput | None:
        prompt, sample = self._order[self._place]
        output = self._latest.get(prompt)
        return None if output is None else output.outputs[sample]

    def _heading(self, prompt: int, sample: int) -> str | None:
        parts = []
        if len(self._prompts) > 1:
            parts.append(f"prompt {prompt + 1} of {len(self._prompts)}")
        if self._num_samples > 1:
            parts.append(f"sample {sample + 1} of {self._num_samples}")
        return ", ".join(parts) or None
