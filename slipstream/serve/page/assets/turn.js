// One prompt with its answer, or with two of them side by side.

import { firstDifference, speedUp, tokenAt } from "./compare.js";
import { preview } from "./images.js";
import { Pane } from "./pane.js";
import { count, percent, seconds, visible } from "./words.js";

export class Turn {
  /**
   * @param prompt what the user wrote.
   * @param mode "chat" or "completion".
   * @param parts [{title, numDraftTokens}] one for each answer.
   * @param images [{name, url}] that came with it.
   */
  constructor(prompt, mode, parts, images = []) {
    this.prompt = prompt;
    this.images = images;
    this.element = make("article", "turn");
    const inline = mode === "completion" && parts.length === 1;
    if (!inline) {
      const question = make("div", "question");
      question.append(make("h3", "", mode === "chat" ? "You" : "Prompt"), make("p", "given", prompt));
      if (images.length) {
        const row = make("p", "images");
        row.append(...images.map(preview));
        question.append(row);
      }
      this.element.append(question);
    }
    this.panes = parts.map(({ title, numDraftTokens }) => new Pane(title, numDraftTokens, inline ? prompt : ""));
    const panes = make("div", parts.length > 1 ? "panes both" : "panes");
    panes.append(...this.panes.map((pane) => pane.element));
    this._foot = make("footer", "turn-foot");
    this.element.append(panes, this._foot);
  }

  /** The answer that a conversation goes on from. */
  get answer() {
    return this.panes.at(-1).recording?.text ?? "";
  }

  /** Both answers are there: say whether they are the same, and what speculation gained. */
  judge(greedy) {
    const [plain, speculative] = this.panes;
    const difference = firstDifference(plain.recording.text, speculative.recording.text);
    const verdict = make("div", "verdict");
    const factor = speedUp(plain.tally, speculative.tally);
    if (factor !== null) verdict.append(gain(factor, plain.tally, speculative.tally));
    verdict.append(difference
      ? differs(difference, greedy, this.panes.map((pane) => tokenAt(pane.recording.tokens, difference.index)))
      : same(speculative.recording.text));
    this._foot.append(verdict);
    return verdict.textContent;
  }

  /** Offer to play the answers again. */
  offer(actions) {
    const row = make("div", "replays");
    for (const [label, action] of actions) {
      const button = make("button", "small", label);
      button.type = "button";
      button.addEventListener("click", action);
      row.append(button);
    }
    this._foot.append(row);
  }
}

function gain(factor, plain, speculative) {
  const line = make("p", "gain");
  const slower = factor < 1;
  line.append(
    make("strong", "", `${(slower ? 1 / factor : factor).toFixed(2)}×`),
    ` ${slower ? "slower" : "faster"}: ${seconds(plain.secondsPerToken)} → ` +
      `${seconds(speculative.secondsPerToken)} a token after the first. `,
  );
  return line;
}

function same(text) {
  const line = make("p", "same");
  line.append(make("strong", "", "Identical."), ` All ${count([...text].length, "character")} are the same. `);
  return line;
}

function differs({ character, before, one, other }, greedy, tokens) {
  const block = make("div", "differs");
  const why = greedy
    ? " Greedy texts part only where two tokens tie within the rounding of low precision."
    : " Both are sampled: two draws from one distribution need not be equal. At temperature 0 they are.";
  const line = make("p", "");
  line.append(make("strong", "", `Different from character ${character} on.`), why);
  block.append(line);
  [["without", one], ["with", other]].forEach(([name, text], index) => {
    const row = make("p", "snippet");
    row.append(make("span", "snippet-name", name), `…${visible(before)}`, make("mark", "", visible(text) || "(end)"));
    const { text: token, logprob = null } = tokens[index] ?? {};
    if (logprob !== null) {
      row.append(make("span", "snippet-token", ` ${visible(token)} had ${percent(Math.exp(logprob), 1)}`));
    }
    block.append(row);
  });
  return block;
}

function make(name, className, text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}
