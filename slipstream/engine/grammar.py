"""Grammars, by llguidance: the only file that knows that package.

A grammar is compiled once and kept; every sample gets a copy of its own, a *guide*, which knows
where in the grammar the sample's output stands. Guides look ahead along drafts, and go back.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.core.errors import UsageError
from slipstream.core.structured import Advance, StructuredOutput
from slipstream.engine.draft_guide import DraftGuide
from slipstream.engine.finite_schema import has_finite_document
from slipstream.engine.thought_guide import WORD_BITS, ThoughtGuide, ThoughtRows, allow, forbid
from slipstream.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MOST_COMPILED = 128
# Enough for any JSON document, but a model cannot write spaces without end.
WHITESPACE = r"\x20|\n[\x20\t]{0,16}"
_ESCAPED = re.compile(r"\\.|/|\n", re.DOTALL)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')
# If only one text can follow, llguidance allows only the tokens that encode it. Where those include
# an added token, nothing would be allowed, because added tokens are not text to llguidance.
_UNFORCED = '%llguidance {"no_forcing": true}\n'
_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
NOTHING_LEFT = (
    "the grammar leaves no token that logit_bias, allowed_token_ids, bad_words and min_tokens do "
    "not rule out"
)

TOO_COSTLY = (
    "the grammar takes too much work for one token; give its repetitions smaller bounds, or use "
    "fewer of them inside each other"
)
# Expressions that the lexer may build before the first token, and for each token after it: other
# requests wait meanwhile. 5,000 strings of an enum need 40,000 for a token, usual schemas 5,000.
_FIRST_WORK, _TOKEN_WORK = 300_000, 60_000


class GrammarGuide(DraftGuide):
    """The state of a sample in its grammar.

    Args:
        withheld: end tokens that do not end this request, and so are not allowed.
    """

    def __init__(self, matcher: "LLMatcher", withheld: frozenset[int]) -> None:
        super().__init__()
        self.matcher, self.withheld = matcher, withheld

    def advance(self, token: int) -> Advance:
        if not self.try_token(token):
            # A token that is merely not allowed is no error of the matcher.
            broken = self.matcher.get_error().splitlines()
            self.problem = f"{TOO_COSTLY} ({broken[0]})" if broken else NOTHING_LEFT
            return Advance.REFUSED
        return Advance.COMPLETE if self.complete else Advance.OPEN

    def forced(self) -> list[int]:
        return self.matcher.compute_ff_tokens()

    def try_token(self, token: int) -> bool:
        return token not in self.withheld and self.matcher.try_consume_tokens([token]) == 1

    def leave(self) -> None:
        self.matcher.rollback(1)

    @property
    def complete(self) -> bool:
        return self.matcher.is_stopped()


class Grammars:
    """Compiles grammars for one tokenizer, keeps the latest, and makes guides.

    `compile` may be called from any thread; the rest belongs to the engine's.

    Args:
        tokenizer: None if the engine runs without one.
        vocab_size: of the model.
        eos_token_ids: of the model.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids
        self._most_tokens = max(vocab_size, 0 if tokenizer is None else tokenizer.vocab_size)
        self._backend: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[tuple[str, str, str | None], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, structured: StructuredOutput) -> None:
        """Compile a grammar for `guide`, or find it compiled; UsageError if it cannot be used."""
        if not structured.is_free:
            self._matcher(structured)

    def guide(self, structured: StructuredOutput, stop_token_ids: frozenset[int]) -> DraftGuide:
        """The guide of a new sample; `stop_token_ids` end its output."""
        rest: GrammarGuide | None = None
        ends = frozenset(self._eos_token_ids)
        if not structured.is_free:
            matcher = self._matcher(structured)
            assert self._backend is not None
            ends = frozenset(self._backend.eos_tokens)
            rest = GrammarGuide(matcher.deep_copy(), ends - stop_token_ids)
        if structured.thought is not None:
            return ThoughtGuide(structured.thought, rest, ends)
        assert rest is not None
        return rest

    def masks(self, rows: int) -> Tensor:
        """[rows, words] int32 for `fill`; every token is allowed."""
        words = -(-self._most_tokens // WORD_BITS)
        return torch.full((rows, words), -1, dtype=torch.int32)

    def fill(self, masks: Tensor, wanted: Sequence[tuple[DraftGuide, int, list[int]]]) -> None:
        """Write what guides allow.

        Args:
            masks: from `masks`.
            wanted: a guide, a row of `masks`, and tokens: what may come next goes to the row, and
                what may come after each of the tokens to the rows that follow. Rows after a
                token that is not allowed are not changed.
        """
        grammars: list[tuple[GrammarGuide, int, list[int]]] = []
        thoughts: list[ThoughtRows] = []
        for guide, row, tokens in wanted:
            if isinstance(guide, ThoughtGuide):
                left = guide.rows(masks, row, tokens)
                if left.rest is None:
                    continue
                thoughts.append(left)
                guide, row, tokens = guide.rest, *left.rest  # type: ignore[assignment]
            assert isinstance(guide, GrammarGuide)
            grammars.append((guide, row, tokens))
        self._fill(masks, grammars)
        for left in thoughts:
            assert left.rest is not None
            masks[left.at_start] = masks[left.rest[0]].clone()
            for row, tokens in left.also.items():
                allow(masks[row], tokens)

    def _fill(self, masks: Tensor, wanted: Sequence[tuple[GrammarGuide, int, list[int]]]) -> None:
        if not wanted:
            return
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor()
        rows, words = masks.shape
        where = (masks.data_ptr(), words * 4, rows)
        single = [(guide.matcher, row) for guide, row, tokens in wanted if not tokens]
        if single:
            self._executor.unsafe_compute_mask_ptr(single, *where)
        chains = [(guide.matcher, row, tokens) for guide, row, tokens in wanted if tokens]
        if chains:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(chains, *where)
        for guide, row, tokens in wanted:
            forbid(masks[row : row + len(tokens) + 1], guide.withheld)

    def _matcher(self, structured: StructuredOutput) -> "LLMatcher":
        """The compiled grammar in its initial state; samples get copies."""
        key = (structured.kind, structured.text, structured.frame)
        with self._lock:
            backend = self._load()
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        assert self._tokenizer is not None
        added = map(self._tokenizer.id_to_token, self._tokenizer.added_token_ids)
        words = [word for word in added if word is not None]
        matcher = _compile(backend, structured, words)  # may take long
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return matcher

    def _load(self) -> "LLTokenizer":
        """llguidance's form of the tokenizer, made once."""
        if self._backend is not None:
            return self._backend
        if self._tokenizer is None:
            raise UsageError("structured output needs a tokenizer; leave skip_tokenizer_init out")
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise UsageError(
                "structured output needs the package llguidance; "
                "install it with pip install 'slipstream[structured]'"
            ) from error
        eos = list(self._eos_token_ids) or None
        try:
            self._backend = LLTokenizer(
                self._tokenizer.to_json(), n_vocab=self._most_tokens, eos_token=eos
            )
        except Exception as error:  # the package raises built-in exceptions
            raise UsageError(
                f"structured output does not work with this model's tokenizer ({error}); use a "
                "model with a byte-level or a byte-fallback tokenizer"
            ) from error
        return self._backend


def _one_of(texts: Sequence[str]) -> str:
    """A grammar of these texts. They form one terminal, since alternatives of a rule would be
    items of a parser's row, which holds 2,000 at most."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, texts))


def _body(structured: StructuredOutput) -> str:
    """The rule `body` of a frame."""
    kind, text = structured.kind, structured.text
    if kind in ("json_schema", "json_object"):
        schema = json.loads(text) if kind == "json_schema" else {"type": "object"}
        own = {} if schema is True else schema
        spaced = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **own}
        return f"body: %json {json.dumps(spaced)}"
    if kind == "regex":
        # Between slashes, a slash and a line break are escaped, unless they already are.
        inner = _ESCAPED.sub(lambda found: _IN_SLASHES.get(found[0], found[0]), text)
        return f"body: /{inner}/"
    if kind == "choice":
        return _one_of(structured.choice or ()).replace("start:", "body:", 1)
    return f"body: %lark {{\n{text}\n}}"


def _spells(rules: str, structured: StructuredOutput, words: Sequence[str]) -> bool:
    """Whether a grammar has one of these words as text rather than as a token."""
    texts = [*_LITERAL.findall(rules), structured.text if structured.kind == "regex" else ""]
    text = "\n".join(texts)
    return any(word in text or json.dumps(word)[1:-1] in text for word in words)


def _compile(
    backend: "LLTokenizer", structured: StructuredOutput, added_words: Sequence[str]
) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    kind, text = structured.kind, structured.text
    if kind == "json_schema":
        _refuse_endless(text)
    try:
        rules = f"{structured.frame or 'start: body'}\n{_body(structured)}"
        if _spells(rules, structured, added_words):
            source = LLMatcher.grammar_from_lark(_UNFORCED + rules)
        elif structured.frame is not None:
            source = LLMatcher.grammar_from_lark(rules)
        elif kind in ("json_schema", "json_object"):
            schema = text if kind == "json_schema" else '{"type": "object"}'
            source = LLMatcher.grammar_from_json_schema(
                schema, defaults={"whitespace_pattern": WHITESPACE}
            )
        elif kind == "choice":
            source = LLMatcher.grammar_from_lark(_one_of(structured.choice or ()))
        else:
            source = grammar_from("lark" if kind == "grammar" else kind, text)  # type: ignore[arg-type]
        limits = LLParserLimits(initial_lexer_fuel=_FIRST_WORK, step_lexer_fuel=_TOKEN_WORK)
        matcher = LLMatcher(backend, source, log_level=0, limits=limits)
    except (ValueError, TypeError) as error:
        raise UsageError(f"this {kind} cannot be used: {_reason(kind, str(error))}") from error
    if matcher.is_error():
        reason = _reason(kind, matcher.get_error())
        raise UsageError(f"this {kind} cannot be used: {reason}")
    _refuse_impossible(matcher, kind)
    return matcher


def _reason(kind: str, message: str) -> str:
    """The line of llguidance's message that states the problem; the others show where it is."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    first = lines[0] if lines else "it is not valid"
    if not reasons:
        return first
    return reasons[0] if kind == "regex" else f"{first} {reasons[0]}"


def _refuse_endless(schema: str) -> None:
    try:
        finite = has_finite_document(schema)
    except RecursionError:
        raise UsageError("this json_schema is nested too deep; send a flatter one") from None
    if not finite:
        raise UsageError(
            "this json_schema cannot be used: it refers to itself without end, so that no document "
            "satisfies it; let the part that recurs be optional, or one of several (anyOf)"
        )


def _refuse_impossible(matcher: "LLMatcher", kind: str) -> None:
    """Refuse a grammar without a first token: its output would end at once, empty and invalid."""
    if matcher.is_accepting():
        return
    # Copies share a lexer; if it exceeds its limits, the next mask reports that.
    for trial in (matcher.deep_copy(), matcher.deep_copy()):
        trial.compute_bitmask()
        if "too many expressions" in trial.get_error():
            raise UsageError(f"this {kind} cannot be used: {TOO_COSTLY}")
        if trial.is_stopped():
            raise UsageError(
                f"this {kind} cannot be used: no sequence of the model's tokens satisfies it"
            )
