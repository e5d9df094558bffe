// The turns of a conversation, in a box that follows the text while nobody reads further up.

import { contentOf } from "./images.js";

const NEAR = 32; // pixels from the end that still count as the end

export class Transcript {
  /** @param element the box; @param welcome what it shows while it is empty */
  constructor(element, welcome) {
    this._element = element;
    this._welcome = welcome;
    this._follows = true;
    this.turns = [];
    element.addEventListener("scroll", () => {
      this._follows = element.scrollHeight - element.scrollTop - element.clientHeight < NEAR;
    }, { passive: true });
    element.addEventListener("grow", () => this.follow());
  }

  add(turn) {
    this._welcome.hidden = true;
    this.turns.push(turn);
    this._element.append(turn.element);
    this._follows = true;
    this.follow();
  }

  remove(turn) {
    this.turns = this.turns.filter((other) => other !== turn);
    turn.element.remove();
    this._welcome.hidden = this.turns.length > 0;
  }

  clear() {
    for (const turn of [...this.turns]) this.remove(turn);
  }

  /** What a model is to go on from. */
  messages(system) {
    const said = this.turns.flatMap(({ prompt, images, answer }) => [
      { role: "user", content: contentOf(prompt, images) },
      { role: "assistant", content: answer },
    ]);
    return system ? [{ role: "system", content: system }, ...said] : said;
  }

  follow() {
    if (this._follows) this._element.scrollTop = this._element.scrollHeight;
  }
}
