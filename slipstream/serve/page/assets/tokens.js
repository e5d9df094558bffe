// A text made of tokens, each told apart by where it came from.
//
// A browser lays out a paragraph anew for every token that joins it, so a long text is many
// paragraphs: where a line ends, a new one may begin without a difference to be seen.

import { isContent } from "./recording.js";
import { harmless } from "./words.js";

const TOKEN = new WeakMap(); // element -> Token, for whoever wants to know more

/** The token that an element shows, if it shows one. */
export function tokenOf(element) {
  return TOKEN.get(element);
}

const LONG = 40; // tokens of a paragraph that is ended at the next line end
const FEW = 8; // tokens of a frame that are lit up as they come; more would only cost

/** Writes tokens into an element, once a frame however many come; reasoning is folded away. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this._caret = document.createElement("span");
    this._caret.className = "caret";
    this._caret.setAttribute("aria-hidden", "true");
    this._caret.hidden = true;
    this._parts = []; // the paragraphs, and the folds that hold some of them
    this._waiting = [];
    this._frame = 0;
    element.addEventListener("keydown", (event) => this._move(event));
  }

  begin() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    this._waiting = [];
    for (const part of this._parts) part.remove();
    this._parts = [];
    this._fold = null; // where reasoning goes; null in the content
    this._begin("span"); // goes on in the line of what is before it
    this._caret.hidden = false;
    this.element.setAttribute("aria-busy", "true");
  }

  push(tokens) {
    this._waiting.push(...tokens);
    this._frame ||= requestAnimationFrame(() => this._flush());
  }

  /** No more will come; `cutTo` is the text where a stop string took the last tokens away. */
  end(cutTo = null) {
    this._flush();
    if (cutTo !== null) this._cut(cutTo.length);
    this._caret.hidden = true;
    this.element.removeAttribute("aria-busy");
  }

  _flush() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    const fresh = this._waiting.length <= FEW;
    for (const token of this._waiting) this._add(token, fresh);
    this._waiting = [];
    this.element.dispatchEvent(new CustomEvent("grow", { bubbles: true }));
  }

  _add(token, fresh) {
    if (!token.text && token.part === "markup") return; // nothing to see, or to go to
    if ((token.part === "reasoning") !== (this._fold !== null)) this._turn();
    const element = elementOf(token);
    element.classList.toggle("fresh", fresh);
    this._caret.before(element);
    if (this._parts.at(-1).children.length > LONG && token.text.endsWith("\n")) this._begin("div");
  }

  _begin(name) {
    const part = document.createElement(name);
    part.append(this._caret);
    this._parts.push(part);
    (this._fold ?? this.element).append(part);
  }

  /** From content to reasoning, or back. */
  _turn() {
    if (this._fold === null) {
      this._fold = document.createElement("details");
      this._fold.className = "reasoning";
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this._fold.append(summary);
      this._parts.push(this._fold);
      this.element.append(this._fold);
    } else {
      this._fold = null;
    }
    this._begin("span");
  }

  _all() {
    return [...this.element.querySelectorAll(".tok")];
  }

  _cut(length) {
    let left = length;
    for (const child of this._all().filter((token) => isContent(tokenOf(token)))) {
      const text = child.textContent;
      if (left <= 0 && text) child.remove();
      else if (text.length > left) write(child, text.slice(0, left));
      left -= text.length;
    }
  }

  /** Arrow keys go from token to token. */
  _move(event) {
    const all = this._all().filter((child) => child.textContent && !child.closest("details:not([open])"));
    if (!all.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = all.indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at < 0 ? all.length - 1 : at - 1, Home: 0, End: all.length - 1 };
    const place = next[event.key];
    if (place === undefined) return;
    event.preventDefault();
    all[Math.min(Math.max(place, 0), all.length - 1)].focus();
  }
}

/** A token's blanks are not underlined, so that words stand apart. */
function write(element, text) {
  const [, before, ink, after] = /^(\s*)(.*?)(\s*)$/s.exec(text);
  const marked = document.createElement("span");
  marked.className = "ink";
  marked.textContent = ink;
  element.replaceChildren(before, marked, after);
}

function elementOf(token) {
  const element = document.createElement("span");
  element.className = `tok ${token.kind}`;
  if (token.text.startsWith("\n")) element.classList.add("line");
  element.dataset.step = token.step;
  element.tabIndex = -1;
  write(element, harmless(token.text));
  TOKEN.set(element, token);
  return element;
}
