"""`LLM`: an engine for offline use."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from slipstream.core.adapters import LoRARequest, NamedAdapter
from slipstream.core.config import EngineConfig, SpeculativeConfig
from slipstream.core.errors import UsageError, about_prompt
from slipstream.core.outputs import RequestOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.build import build_engine
from slipstream.engine.media import take_images
from slipstream.engine.metrics import EngineMetrics
from slipstream.engine.prompts import EncodedPrompt, Message, Prompt, PromptEncoder
from slipstream.engine.samples import Submission
from slipstream.models.chat_template import ChatTemplate
from slipstream.models.loading import ProgressBar, no_progress_bar
from slipstream.models.tokenizer import Tokenizer

Prompts = Prompt | Sequence[Prompt]
Params = SamplingParams | Sequence[SamplingParams]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Generates text from prompts, many at once.

        llm = LLM("demo", speculative_config={"model": "demo/draft", "num_speculative_tokens": 4})
        for output in llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=64)):
            print(output.outputs[0].text)

    Args:
        model: a local directory, a hub name, or a bundled demo; or a drafter whose config.json
            names its target, which is then loaded with it; or a whole `EngineConfig`.
        speculative_config: the drafter, or a list of them; None is plain decoding.
        progress_bar: shows the progress of loading.
        options: any other field of `EngineConfig`.

    Raises:
        UsageError: unknown or contradictory options.
        CheckpointError: a checkpoint that is broken, unsupported or does not fit.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig = "demo",
        *,
        speculative_config: SpeculativeConfig = None,
        progress_bar: ProgressBar = no_progress_bar,
        **options: Any,
    ) -> None:
        if speculative_config is not None:
            options["speculative_config"] = speculative_config
        self.engine = build_engine(_config(model, options), progress_bar)
        vocab_size = self.engine.resolved.vocab_size
        self._encoder = PromptEncoder(self.engine.tokenizer, vocab_size, self.engine.images)
        self._numbers = count()
        self._calls: dict[str, _Call] = {}  # of live requests, by their ids
        self._num_cut_steps = 0
        # For each number of an adapter: the request for it, and the loaded adapter.
        self._adapters: dict[int, tuple[LoRARequest, NamedAdapter]] = {}

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; UsageError if the engine runs without one."""
        if self.engine.tokenizer is None:
            raise UsageError("this engine has no tokenizer; leave skip_tokenizer_init out")
        return self.engine.tokenizer

    @property
    def metrics(self) -> EngineMetrics:
        """Totals since the engine started."""
        return self.engine.metrics

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that give none: the checkpoint's defaults, if
        `generation_config` enables them, else those of `SamplingParams`."""
        return self.engine.resolved.sampling_defaults.params({})

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        lora_request: LoRARequests = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts until they have ended; outputs come in the order of the prompts.

        Args:
            prompts: one prompt or several, each a string, {"prompt": text} or
                {"prompt_token_ids": [ids]}; the latter two with PIL images as
                {"multi_modal_data": {"image": [images]}}, each for a placeholder in the text.
            sampling_params: one for all, or one per prompt; None:
                `get_default_sampling_params()`.
            lora_request: the adapter of all prompts, or one per prompt; None: the model as it is.
            use_tqdm: show a bar of the prompts that have ended, on stderr. The name is vLLM's; the
                bar is drawn by rich.

        Raises:
            UsageError: a prompt or parameter is wrong; no prompt is run.
            CheckpointError: an adapter cannot be used.
        """
        encoded, params = self._encoded(prompts, sampling_params, lora_request)
        return _finished(self._run(encoded, params, whole=True), len(encoded), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        chat_template: str | None = None,
        *,
        lora_request: LoRARequests = None,
        use_tqdm: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; messages are {"role": ..., "content": ...}.

        A content is a text or a list of parts: {"type": "text", "text": ...}, {"type": "image_pil",
        "image_pil": a PIL image} or {"type": "image_url", "image_url": {"url": ...}}.

        Args:
            chat_template: in place of the checkpoint's.
            lora_request, use_tqdm: as in `generate`.
            mm_processor_kwargs: precede the engine's.
            template_options: passed to the chat template.
        """
        placed = lora_request, mm_processor_kwargs
        encoded, params = self._encoded_chats(
            messages, sampling_params, chat_template, template_options, *placed
        )
        return _finished(self._run(encoded, params, whole=True), len(encoded), use_tqdm)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Params | None = None,
        lora_request: LoRARequests = None,
        whole: bool = False,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields a snapshot of each request whenever it gains tokens.

        Args:
            whole: yield only what has ended, each output as soon as it has: many snapshots of
                many requests take time.

        Request ids count up in the order of the prompts, over the life of this LLM. Text is only
        shown once it will stay: what may begin a stop string waits.
        Requests are queued at the first `next`; leaving the iteration early aborts what is
        unfinished. Several streams of one LLM may be open at once: their requests share steps.
        """
        return self._run(*self._encoded(prompts, sampling_params, lora_request), whole=whole)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None = None,
        chat_template: str | None = None,
        *,
        lora_request: LoRARequests = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[RequestOutput]:
        """Like `chat`, but yields snapshots as `stream` does."""
        placed = lora_request, mm_processor_kwargs
        return self._run(
            *self._encoded_chats(messages, sampling_params, chat_template, options, *placed)
        )

    def _encoded(
        self, prompts: Prompts, sampling_params: Params | None, lora_request: LoRARequests
    ) -> tuple[list[EncodedPrompt], list[SamplingParams]]:
        given: list[Any] = [prompts] if isinstance(prompts, str | Mapping) else _listed(prompts)
        params = self._per_prompt(sampling_params, len(given))
        encoded = []
        for index, (prompt, own) in enumerate(zip(given, params, strict=True)):
            with about_prompt(index, len(given)):
                encoded.append(self._encoder.encode(prompt, own))
        return self._adapted(encoded, lora_request), params

    def _encoded_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | None,
        chat_template: str | None,
        template_options: Mapping[str, Any],
        lora_request: LoRARequests,
        mm_processor_kwargs: Mapping[str, Any] | None,
    ) -> tuple[list[EncodedPrompt], list[SamplingParams]]:
        given: list[Any] = _listed(messages)
        if given and isinstance(given[0], Mapping):
            given = [given]
        params = self._per_prompt(sampling_params, len(given))
        template = ChatTemplate(self.tokenizer, chat_template)
        # The template writes the special tokens itself.
        encoded = []
        for conversation, own in zip(given, params, strict=True):
            plain, images = take_images(conversation, self.engine.media)
            self.engine.images.require(len(images))
            prompt: Prompt = {
                "prompt": template.render(plain, **template_options),
                "multi_modal_data": {"image": images},
                "mm_processor_kwargs": mm_processor_kwargs or {},
            }
            encoded.append(self._encoder.encode(prompt, own, add_special_tokens=False))
        return self._adapted(encoded, lora_request), params

    def _adapted(
        self, prompts: Sequence[EncodedPrompt], lora_request: LoRARequests
    ) -> list[EncodedPrompt]:
        """The prompts with their adapters; an adapter is read when it is first used."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            listed: Sequence[LoRARequest | None] = [lora_request] * len(prompts)
        else:
            listed = _listed(lora_request)
        for one in listed:
            if not isinstance(one, LoRARequest | None):
                raise UsageError(f"lora_request must be a LoRARequest, or a list, not {one!r}")
        if len(listed) != len(prompts):
            raise UsageError(f"{len(listed)} lora_requests were given for {len(prompts)} prompts")
        pairs = zip(prompts, listed, strict=True)
        return [
            prompt if own is None else replace(prompt, adapter=self._adapter(own))
            for prompt, own in pairs
        ]

    def _adapter(self, asked: LoRARequest) -> NamedAdapter:
        known, adapter = self._adapters.get(asked.lora_int_id, (asked, None))
        if known != asked:
            raise UsageError(
                f"lora_int_id {asked.lora_int_id} belongs to {known.lora_name!r} in "
                f"{known.lora_path}; give each adapter its own number, or unload that one"
            )
        if adapter is None:
            adapters = self.engine.adapters
            drafts = None if asked.draft_lora_path is None else str(asked.draft_lora_path)
            factors = adapters.read(str(asked.lora_path), drafts)
            adapter = adapters.add(asked.lora_name, factors, drafts is not None)
            self._adapters[asked.lora_int_id] = asked, adapter
        return adapter

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, so that its name and number may be used for another.

        Prompts that run with it end with it. A `LoRARequest` for it would read its directory again.

        Raises:
            UsageError: no adapter of this name is loaded.
        """
        self.engine.adapters.remove(name)
        self._adapters = {
            number: pair for number, pair in self._adapters.items() if pair[1].name != name
        }

    def _per_prompt(self, params: Params | None, number: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return _per_prompt(params, number)

    def abort(self, request_id: str) -> None:
        """Abort a request that is being streamed; its stream yields the output so far.

        Unknown and finished requests are ignored.
        """
        submission = self.engine.abort(request_id)
        if submission is not None and request_id in self._calls:
            self._calls[request_id].outputs.append(submission.output())

    def _run(
        self,
        prompts: Sequence[EncodedPrompt],
        params: Sequence[SamplingParams],
        whole: bool = False,
    ) -> Iterator[RequestOutput]:
        """Queue all prompts (or none, on an error) at the first `next`; step until they finish.

        Args:
            whole: only finished outputs are wanted.
        """
        call = _Call(whole, self._num_cut_steps)
        try:
            for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(self._numbers))
                with about_prompt(index, len(prompts)):
                    call.live[request_id] = self.engine.add(request_id, prompt, own)
                self._calls[request_id] = call
            while call.live:
                for output in self._collect(call):
                    if isinstance(output, Exception):
                        raise output
                    if output.finished:
                        del call.live[output.request_id], self._calls[output.request_id]
                    yield output
        finally:
            for request_id in call.live:
                self.engine.abort(request_id)
                self._calls.pop(request_id, None)

    def _collect(self, call: "_Call") -> list[RequestOutput | Exception]:
        """New outputs of a call's requests, of any call's steps; runs a step if there are none."""
        if not call.outputs and call.num_cut_steps == self._num_cut_steps:
            self._step()
        if call.num_cut_steps != self._num_cut_steps:  # last outputs may have been lost
            call.num_cut_steps = self._num_cut_steps
            known = {it.request_id for it in call.outputs if isinstance(it, RequestOutput)}
            for request_id, it in call.live.items():
                if it.finished and request_id not in known:
                    call.outputs.append(it.error or it.output())
        outputs, call.outputs = call.outputs, []
        return outputs

    def _step(self) -> None:
        """Run a step and hand its outputs to their calls."""
        self._num_cut_steps += 1  # until it has come to its end
        for submission in self.engine.step():
            call = self._calls.get(submission.request_id)
            is_last = submission.finished or submission.error is not None
            if call is not None and (is_last or not call.whole):
                call.outputs.append(submission.error or submission.output())
        self._num_cut_steps -= 1


@dataclass
class _Call:
    """Requests that were handed in together. Streams of several calls may be interleaved.

    Attributes:
        whole: only finished outputs are wanted.
        num_cut_steps: steps that an exception had ended when `outputs` was looked through.
        live: requests whose last output has not been yielded.
        outputs: those that have not been yielded.
    """

    whole: bool
    num_cut_steps: int
    live: dict[str, Submission] = field(default_factory=dict)
    outputs: list[RequestOutput | Exception] = field(default_factory=list)


def _config(model: str | Path | EngineConfig, options: dict[str, Any]) -> EngineConfig:
    if isinstance(model, EngineConfig):
        if options:
            raise UsageError(f"{', '.join(options)}: set this in the EngineConfig that is given")
        return model
    unknown = sorted(set(options) - set(EngineConfig.__dataclass_fields__))
    if unknown:
        fields = EngineConfig.__dataclass_fields__
        flags = {f"--{name.replace('_', '-')}": name for name in unknown}
        meant = [
            f"LLM calls {flags[alias]} {name}"
            for name, known in fields.items()
            for alias in getattr(known.metadata.get("flag"), "also", ())
            if alias in flags
        ]
        remedy = "; ".join(meant) or f"LLM takes {', '.join(fields)}"
        raise UsageError(f"unknown option {', '.join(unknown)}; {remedy}")
    if not isinstance(model, str | Path):
        raise UsageError(f"model must be a directory, a hub name or a demo, not {model!r}")
    return EngineConfig(model=str(model), **options)


def _listed(given: Any) -> list[Any]:
    if not isinstance(given, Iterable):
        raise UsageError(f"give a prompt, a conversation, or a list of them, not {given!r}")
    return list(given)


def _per_prompt(params: Params, number: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * number
    listed: list[Any] = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(own, SamplingParams) for own in listed):
        raise UsageError(
            f"sampling_params must be SamplingParams, or a list of them, not {params!r}"
        )
    if len(listed) != number:
        raise UsageError(f"{len(listed)} sampling_params were given for {number} prompts")
    return listed


def _finished(
    outputs: Iterator[RequestOutput], number: int, shows_progress: bool
) -> list[RequestOutput]:
    """Outputs of `number` prompts, in their order."""
    ended: Iterable[RequestOutput] = (output for output in outputs if output.finished)
    if shows_progress:
        from rich.console import Console
        from rich.progress import track

        ended = track(ended, "prompts", number, console=Console(stderr=True))
    return sorted(ended, key=lambda output: int(output.request_id))
