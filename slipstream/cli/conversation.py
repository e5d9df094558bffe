"""A conversation with the engine, whoever types it."""

from functools import partial
from typing import TYPE_CHECKING

from slipstream.cli.interrupt import interrupt_noted
from slipstream.cli.status import Meter, Status
from slipstream.cli.views import View
from slipstream.core.errors import UsageError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM


class Conversation:
    """What was said so far, and how the next answer comes about."""

    def __init__(self, llm: "LLM", params: SamplingParams, system: str | None) -> None:
        self._llm, self._params, self._system = llm, params, system
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def ask(self, text: str, view: View) -> Status:
        """Show the answer; Ctrl-C ends it, and what was said of it stays in the conversation.

        Raises:
            UsageError: the conversation no longer fits the model; this message is dropped.
        """
        self.messages.append({"role": "user", "content": text})
        meter = Meter(self._llm)
        try:
            answer = self._answer(view, meter)
        except UsageError:
            del self.messages[-1]
            raise
        self.messages.append({"role": "assistant", "content": answer.text if answer else ""})
        return meter.read(len(answer.token_ids) if answer else 0)

    def _answer(self, view: View, meter: Meter) -> CompletionOutput | None:
        outputs = self._llm.stream_chat(self.messages, self._params)
        answer: CompletionOutput | None = None
        view.begin(None, "")
        with interrupt_noted() as interrupted:
            for output in outputs:
                answer = output.outputs[0]
                view.show(answer, partial(meter.read, len(answer.token_ids)))
                if interrupted():
                    self._llm.abort(output.request_id)
                    break
        view.end()
        return answer
