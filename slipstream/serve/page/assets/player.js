// Runs prompts and plays their recordings again; one thing at a time, which Escape ends.

import { answer } from "./answer.js";
import { contentOf } from "./images.js";
import { replay, slowPace } from "./replay.js";
import { Turn } from "./turn.js";
import { count } from "./words.js";

export class Player {
  /** @param page {transcript, meters, announce, onBusy} */
  constructor(page) {
    this._page = page;
    this._controller = null;
  }

  get busy() {
    return this._controller !== null;
  }

  stop() {
    this._controller?.abort();
  }

  /**
   * Run one prompt.
   *
   * @param numDraftTokens as `Settings.numDraftTokens`.
   * @param images [{name, url}] of a message.
   * @throws ServerError; a turn without a single token is taken away again.
   */
  async run(values, prompt, numDraftTokens, images) {
    const { transcript, meters, announce } = this._page;
    const chat = values.mode === "chat";
    if (!chat) transcript.clear();
    const asked = { role: "user", content: contentOf(prompt, images) };
    const input = chat ? [...transcript.messages(values.system), asked] : prompt;
    const parts = partsOf(values, numDraftTokens);
    const turn = new Turn(prompt, values.mode, parts, images);
    transcript.add(turn);
    meters.watch(turn.panes);
    announce("Writing.");
    await this._alone(async (signal) => {
      try {
        for (const [index, pane] of turn.panes.entries()) {
          const done = await answer(pane, values, input, parts[index].asked, signal, () => meters.touch());
          if (!done) break;
        }
      } finally {
        if (turn.panes.some((pane) => pane.tally.numTokens)) {
          announce(this._close(turn, values));
        } else {
          transcript.remove(turn);
          announce("Stopped.");
        }
      }
    });
  }

  /** What there is to say about a turn that ended, and what can be done with it. */
  _close(turn, values) {
    const { transcript } = this._page;
    const done = turn.panes.every((pane) => pane.recording && !pane.recording.stopped);
    const told = [...turn.panes].map((pane) =>
      `${pane.title ?? "Answer"}: ${count(pane.tally.numTokens, "token")}.`);
    if (done && turn.panes.length === 2) told.push(turn.judge(values.temperature === 0));
    const recordings = turn.panes.map((pane) => pane.recording).filter(Boolean);
    turn.offer([
      [turn.panes.length > 1 ? "Race again" : "Play again", () => this._replay(turn, 1)],
      ["Slow motion", () => this._replay(turn, slowPace(recordings))],
    ]);
    transcript.follow();
    return `${done ? "Finished" : "Stopped"}. ${told.join(" ")}`;
  }

  async _replay(turn, pace) {
    if (this.busy) return;
    const { meters, announce } = this._page;
    const panes = turn.panes.filter((pane) => pane.recording);
    for (const pane of panes) pane.begin();
    meters.watch(turn.panes);
    announce("Playing again.");
    await this._alone(async (signal) => {
      const parts = panes.map((pane) => ({
        recording: pane.recording,
        push: (tokens) => {
          pane.push(tokens);
          meters.touch();
        },
      }));
      await replay(parts, pace, signal);
      for (const pane of panes) pane.end(pane.recording);
      meters.touch();
    });
    announce("Played.");
  }

  async _alone(action) {
    this._controller = new AbortController();
    this._page.onBusy(true);
    try {
      await action(this._controller.signal);
    } finally {
      this._controller = null;
      this._page.onBusy(false);
    }
  }
}

/** The answers of a turn. Plain decoding first: one after the other, so that neither slows the other. */
function partsOf(values, numDraftTokens) {
  if (values.view !== "both") {
    return [{ title: null, numDraftTokens: numDraftTokens ?? 0, asked: numDraftTokens }];
  }
  const most = numDraftTokens || values.num_speculative_tokens;
  return [
    { title: "Without speculation", numDraftTokens: 0, asked: 0 },
    { title: "With speculation", numDraftTokens: most, asked: most },
  ];
}
