// The card that says where a token came from; under the mouse, at the focus, or where a finger taps.

import { tokenOf } from "./tokens.js";
import { percent, visible } from "./words.js";

const KINDS = {
  accepted: "Accepted draft token",
  bonus: "Bonus token",
  recovered: "Recovered token",
  plain: "Plain token",
};

export class Inspector {
  /**
   * @param root where texts are.
   * @param card the element that is shown beside a token.
   */
  constructor(root, card) {
    this._root = root;
    this._card = card;
    this._shown = null;
    root.addEventListener("pointerover", (event) => this._show(event.target));
    root.addEventListener("pointerleave", () => this._show(document.activeElement));
    root.addEventListener("focusin", (event) => this._show(event.target));
    root.addEventListener("focusout", () => this.hide());
    for (const scroller of [root, window]) {
      scroller.addEventListener("scroll", () => this._place(), { passive: true });
    }
  }

  get open() {
    return this._shown !== null;
  }

  hide() {
    if (!this._shown) return;
    this._mark(false);
    this._shown.removeAttribute("aria-describedby");
    this._shown = null;
    this._card.hidden = true;
  }

  _show(target) {
    const element = target.closest(".tok");
    const token = tokenOf(element);
    if (element === this._shown) return;
    this.hide();
    if (!token) return;
    this._shown = element;
    this._card.replaceChildren(...contentOf(token, this._mates().length));
    this._card.hidden = false;
    this._mark(true);
    this._place();
    element.setAttribute("aria-describedby", this._card.id);
  }

  /** The tokens of the same pass. */
  _mates() {
    return [...this._shown.closest(".text").querySelectorAll(`[data-step="${this._shown.dataset.step}"]`)];
  }

  _mark(on) {
    for (const mate of this._mates()) mate.classList.toggle("mate", on);
    this._shown.classList.toggle("chosen", on);
    const step = on ? Number(this._shown.dataset.step) : null;
    this._shown.dispatchEvent(new CustomEvent("inspect", { bubbles: true, detail: step }));
  }

  /** Beside the token; nowhere when that was scrolled away. */
  _place() {
    if (!this._shown) return;
    const rects = [...this._shown.getClientRects()];
    const token = rects.find((rect) => rect.width > 0) ?? rects[0];
    const room = this._root.getBoundingClientRect();
    if (!token || token.bottom < room.top || token.top > room.bottom) {
      this.hide();
      return;
    }
    const { width, height } = this._card.getBoundingClientRect();
    const left = Math.min(Math.max(8, token.left - 12), document.documentElement.clientWidth - width - 8);
    const below = token.bottom + 8;
    const fits = below + height < window.innerHeight - 8;
    this._card.style.left = `${left}px`;
    this._card.style.top = `${fits ? below : Math.max(8, token.top - height - 8)}px`;
  }
}

function contentOf(token, numMates) {
  const parts = [
    node("p", "card-token", visible(token.text) || "(no text of its own)"),
    node("p", `card-kind ${token.kind}`, KINDS[token.kind] ?? token.kind),
    node("p", "card-place", placeOf(token)),
  ];
  if (token.logprob !== null) parts.push(likelihood("Probability", token, "card-probability"));
  const others = token.alternatives.filter((other) => other.text !== token.text);
  parts.push(...others.slice(0, 2).map((other) => likelihood(visible(other.text), other, "card-other")));
  const share = numMates === 1 ? "the only token" : `one of ${numMates} tokens`;
  parts.push(node("p", "card-step", `Pass ${token.step + 1} of the target; ${share} it gave.`));
  return parts;
}

function placeOf({ kind, position }) {
  const place = position === null ? "" : ` ${position + 1}`;
  if (kind === "accepted") return `Draft position${place}: guessed ahead, and the target agreed.`;
  if (kind === "recovered") return `In place of the guess at draft position${place}, which the target refused.`;
  if (kind === "bonus") return "Behind a draft that was accepted whole.";
  return "No draft in this pass: the target alone.";
}

function likelihood(name, { logprob }, className) {
  const share = Math.exp(logprob);
  const line = node("p", className);
  const bar = node("span", "card-bar");
  bar.style.setProperty("--share", share);
  line.append(node("span", "card-name", name), bar, node("span", "card-share", percent(share)));
  return line;
}

function node(name, className, text = "") {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
}
