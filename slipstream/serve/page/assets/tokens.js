// A text made of tokens, each told apart by where it came from.

import { harmless } from "./words.js";

const TOKEN = new WeakMap(); // element -> Token, for whoever wants to know more

/** The token that an element shows, if it shows one. */
export function tokenOf(element) {
  return TOKEN.get(element);
}

/** Writes tokens into an element, once a frame however many come. */
export class TokenText {
  constructor(element) {
    this.element = element;
    this._tokens = document.createElement("span");
    this._caret = document.createElement("span");
    this._caret.className = "caret";
    this._caret.setAttribute("aria-hidden", "true");
    this._caret.hidden = true;
    element.append(this._tokens, this._caret);
    this._waiting = [];
    this._frame = 0;
    element.addEventListener("keydown", (event) => this._move(event));
  }

  begin() {
    cancelAnimationFrame(this._frame);
    this._frame = 0;
    this._waiting = [];
    this._tokens.replaceChildren();
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
    this._tokens.append(...this._waiting.map(elementOf));
    this._waiting = [];
    this.element.dispatchEvent(new CustomEvent("grow", { bubbles: true }));
  }

  _cut(length) {
    let left = length;
    for (const child of [...this._tokens.children]) {
      const text = child.textContent;
      if (left <= 0 && text) child.remove();
      else if (text.length > left) write(child, text.slice(0, left));
      left -= text.length;
    }
  }

  /** Arrow keys go from token to token. */
  _move(event) {
    const all = [...this._tokens.children].filter((child) => child.textContent);
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
