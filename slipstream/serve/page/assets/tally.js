// Counts over tokens, as they arrive or as they are played again.

/** Counts of one text; `push` takes tokens in order. */
export class Tally {
  constructor() {
    this.times = []; // of every token, seconds
    this.steps = []; // {accepted, end, numDraftTokens?}
    this.acceptedAt = []; // accepted tokens by position
    this.numDrafts = 0;
    this.numAccepted = 0;
  }

  push(tokens) {
    for (const token of tokens) this._push(token);
  }

  get numTokens() {
    return this.times.length;
  }

  /** Acceptance length: tokens per drafted step; null before the first draft. */
  get acceptanceLength() {
    return this.numDrafts ? 1 + this.numAccepted / this.numDrafts : null;
  }

  /** Seconds per token after the first; null where there is nothing to measure. */
  get secondsPerToken() {
    const span = this.numTokens > 1 ? this.times.at(-1) - this.times[0] : 0;
    return span > 0 ? span / (this.numTokens - 1) : null;
  }

  /** The share of drafts whose token at each of `count` positions was accepted. */
  acceptance(count) {
    return Array.from({ length: count }, (_, position) =>
      this.numDrafts ? (this.acceptedAt[position] ?? 0) / this.numDrafts : 0);
  }

  _push(token) {
    this.times.push(token.time);
    let step = this.steps[token.step];
    if (!step) {
      step = { accepted: 0, end: null };
      this.steps[token.step] = step;
      if (token.kind !== "plain") this.numDrafts += 1;
    }
    if (token.kind === "accepted") {
      const position = token.position ?? step.accepted;
      step.accepted += 1;
      this.numAccepted += 1;
      this.acceptedAt[position] = (this.acceptedAt[position] ?? 0) + 1;
    } else {
      step.end = token.kind;
    }
  }
}
