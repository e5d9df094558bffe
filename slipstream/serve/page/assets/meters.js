// The live measurements under the text: three figures with a chart each.

import { drawAcceptance } from "./acceptance_chart.js";
import { drawRates } from "./rate_chart.js";
import { drawSteps } from "./steps_chart.js";
import { Tally } from "./tally.js";
import { count, percent, rate } from "./words.js";

const DRAW_EVERY = 50; // milliseconds: alive, and cheap

const NOTHING = { tally: new Tally(), numDraftTokens: 4, numGuesses: null, speedup: null, element: null };

export class Meters {
  /** @param root the element that holds the figures */
  constructor(root) {
    this._at = (id) => root.querySelector(`#${id}`);
    this._series = [];
    this._marked = null; // {element, step}
    this._drawn = 0;
    this._frame = 0;
    new ResizeObserver(() => this.touch()).observe(root);
  }

  /** Show these panes from now on; the last one that drafts is what the second and third chart show. */
  watch(panes) {
    this._series = panes;
    this._marked = null;
    this.touch();
  }

  /** Point out one step of a pane's text; null for none. */
  mark(element, step) {
    this._marked = { element, step };
    this.touch();
  }

  /** Something changed. */
  touch() {
    this._frame ||= requestAnimationFrame(() => this._soon());
  }

  _soon() {
    this._frame = 0;
    const now = performance.now();
    if (now - this._drawn < DRAW_EVERY) {
      this.touch();
      return;
    }
    this._drawn = now;
    this._draw();
  }

  _draw() {
    const panes = this._series;
    const shown = panes.findLast((pane) => pane.numDraftTokens > 0 && pane.tally.numTokens) ?? panes.at(-1) ?? NOTHING;
    drawRates(this._at("rate-chart"), panes.map((pane) => ({
      tally: pane.tally,
      style: pane.numDraftTokens ? "drafted" : "undrafted",
      label: pane.title ?? "now",
    })));
    this._rates(panes, shown);
    this._passes(shown);
    this._positions(shown);
  }

  _rates(panes, shown) {
    const pace = shown.tally.secondsPerToken ?? null;
    this._at("rate").textContent = pace ? rate(1 / pace) : "–";
    const other = panes.find((pane) => pane !== shown)?.tally.secondsPerToken;
    const estimated = shown.speedup === null ? "" : `estimated ${rate(shown.speedup)}× plain`;
    this._at("rate-note").textContent = other ? `${rate(1 / other)} without` : estimated;
  }

  _passes({ tally, numDraftTokens, element }) {
    const marked = this._marked?.element === element ? this._marked?.step : null;
    drawSteps(this._at("steps-chart"), tally, numDraftTokens + 1, marked);
    const length = tally.acceptanceLength ?? (tally.numTokens ? 1 : null);
    this._at("al").textContent = length === null ? "–" : length.toFixed(2);
    const passes = tally.steps.length;
    // The first pass, of the prompt, never has a draft; others may have none where K is chosen.
    const drafted = tally.numDrafts && tally.numDrafts < passes - 1 ? `, ${tally.numDrafts} with a draft` : "";
    this._at("al-note").textContent = tally.numTokens
      ? `${count(tally.numTokens, "token")}, ${count(passes, "pass", "passes")}${drafted}` : "";
  }

  _positions({ tally, numDraftTokens, numGuesses, speedup }) {
    drawAcceptance(this._at("acceptance-chart"), tally.acceptance(numDraftTokens), tally.numDrafts > 0);
    const guesses = numGuesses ?? tally.numDrafts * numDraftTokens;
    this._at("accepted").textContent = guesses ? percent(tally.numAccepted / guesses) : "–";
    const chosen = speedup === null ? "" : `, K ${(guesses / Math.max(tally.steps.length, 1)).toFixed(1)}`;
    this._at("accepted-note").textContent = guesses ? `${tally.numAccepted} of ${guesses}${chosen}` : "";
  }
}
