// One answer as it came: tokens with the step that gave them and the time they arrived.

/**
 * @typedef {object} Token
 * @property {string} text
 * @property {"reasoning"|"content"|"call"|"markup"} part of the answer; markup has no text
 * @property {"accepted"|"bonus"|"recovered"|"plain"} kind
 * @property {?number} position place in the draft, from 0
 * @property {?number} logprob
 * @property {Array<{text: string, logprob: number}>} alternatives what else was likely
 * @property {number} step the pass of the target that gave it, from 0
 * @property {number} time seconds since the request was sent
 */

export class Recording {
  /** @param {number} numDraftTokens what the request asked for */
  constructor(numDraftTokens) {
    this.numDraftTokens = numDraftTokens;
    this.tokens = [];
    this.text = "";
    this.finishReason = null;
    this.usage = null;
    this.seconds = 0;
    this.stopped = false;
    this._start = performance.now();
    this._step = -1;
    this._open = false; // whether the last step may still give tokens
    this._last = -1; // position of its last accepted token
  }

  /** Take in one chunk of the stream; the tokens that it brought. */
  take(chunk) {
    this.seconds = (performance.now() - this._start) / 1000;
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    const text = choice.text ?? choice.delta?.content ?? "";
    this.text += text;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const told = choice.speculation?.tokens ?? chunk.speculation?.tokens;
    const own = (told ?? []).filter(isContent); // logprobs are those of the content
    const others = told ? alternativesOf(choice.logprobs, own.length) : null;
    const tokens = (told ?? plainTokens(choice.delta, text)).map((token) => ({
      text: token.part === "markup" ? "" : token.text,
      part: token.part ?? "content",
      kind: token.kind,
      position: token.position ?? null,
      logprob: token.logprob ?? null,
      alternatives: others?.[own.indexOf(token)] ?? [],
      step: this._stepOf(token),
      time: this.seconds,
    }));
    this.tokens.push(...tokens);
    return tokens;
  }

  /** Whether tokens say more than the text: a stop string cut the last ones. */
  get textIsCut() {
    const written = this.tokens.filter(isContent).map((token) => token.text).join("");
    return written.length > this.text.length && written.startsWith(this.text);
  }

  _stepOf(token) {
    const drafted = token.kind === "accepted";
    const goesOn = this._open && (!drafted || token.position === null || token.position > this._last);
    if (!goesOn || token.kind === "plain") this._step += 1;
    this._open = drafted;
    this._last = drafted ? (token.position ?? this._last) : -1;
    return this._step;
  }
}

/** Whether a token is part of the text that the model means the user to read. */
export function isContent(token) {
  return (token.part ?? "content") === "content";
}

/** The texts of a chunk whose server tells nothing of its tokens. */
function plainTokens(delta, text) {
  const thought = delta?.reasoning ?? delta?.reasoning_content;
  return [
    ...(thought ? [{ text: thought, part: "reasoning", kind: "plain" }] : []),
    ...(text ? [{ text, kind: "plain" }] : []),
  ];
}

/** Candidates per token in either protocol's form, or null where they do not belong to the tokens. */
function alternativesOf(logprobs, count) {
  if (logprobs?.content?.length === count) {
    return logprobs.content.map((entry) =>
      (entry.top_logprobs ?? []).map((other) => ({ text: other.token, logprob: other.logprob })));
  }
  if (logprobs?.top_logprobs?.length === count) {
    return logprobs.top_logprobs.map((entry) =>
      Object.entries(entry ?? {})
        .map(([text, logprob]) => ({ text, logprob }))
        .sort((one, other) => other.logprob - one.logprob));
  }
  return null;
}
