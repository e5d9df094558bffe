// One answer on the page: its heading, its text, its counts.

import { Tally } from "./tally.js";
import { TokenText } from "./tokens.js";
import { count, rate, seconds } from "./words.js";

export class Pane {
  /**
   * @param title null where the answer stands alone.
   * @param numDraftTokens draft tokens per step that the request asks for.
   * @param given text that the answer continues, shown quietly before it.
   */
  constructor(title, numDraftTokens, given) {
    this.title = title;
    this.numDraftTokens = numDraftTokens;
    this.recording = null;
    this.tally = new Tally();
    this.numGuesses = null; // known when the server has counted them
    this.speedup = null; // over plain decoding, as the server estimates it where it chooses K
    this.element = document.createElement("section");
    this.element.className = "pane";
    this.element.setAttribute("aria-label", title ?? "Answer");
    const heading = document.createElement("h3");
    heading.textContent = title ?? "";
    this._state = document.createElement("p");
    this._state.className = "pane-state";
    const head = document.createElement("header");
    head.append(heading, this._state);
    this._text = document.createElement("div");
    this._text.className = "text";
    this._text.tabIndex = 0;
    this._text.setAttribute("role", "group");
    this._text.setAttribute("aria-label", `${title ?? "Answer"}: arrow keys go from token to token`);
    if (given) {
      const before = document.createElement("span");
      before.className = "given";
      before.textContent = given;
      this._text.append(before);
    }
    this.element.append(head, this._text);
    this.tokens = new TokenText(this._text);
    this._text.addEventListener("grow", () => this.say(count(this.tally.numTokens, "token")));
    this.say("waiting");
  }

  /** The text begins, or begins again. */
  begin() {
    this.tally = new Tally();
    this.numGuesses = null;
    this.speedup = null;
    this.tokens.begin();
    this.say("…");
  }

  push(tokens) {
    this.tokens.push(tokens);
    this.tally.push(tokens);
  }

  /** Nothing more will come of this recording. */
  end(recording) {
    this.recording = recording;
    this.numGuesses = recording.usage?.speculation?.draft_tokens ?? null;
    this.speedup = recording.usage?.speculation?.estimated_speedup ?? null;
    this.tokens.end(recording.textIsCut ? recording.text : null);
    const { tally } = this;
    const refused = recording.usage?.speculation?.refused_drafting_seconds ?? 0;
    const pace = tally.secondsPerToken;
    this.say([
      count(tally.numTokens, "token"),
      pace ? `${rate(1 / pace)}/s` : "",
      recording.stopped ? "stopped" : ENDS[recording.finishReason] ?? "",
      tally.numTokens ? `first after ${seconds(tally.times[0])}` : "",
      refused ? `${seconds(refused)} of drafting was for refused tokens` : "",
    ].filter(Boolean).join(" · "));
  }

  say(text) {
    this._state.textContent = text;
  }
}

const ENDS = { stop: "ended by itself", length: "at its limit" };
