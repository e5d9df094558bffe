// What went wrong, over the text, until the next run or until it is dismissed.

export class Notice {
  constructor(element) {
    this._element = element;
  }

  get open() {
    return !this._element.hidden;
  }

  /** @param actions [[label, function]] what can be done about it */
  show(title, message, actions) {
    const heading = document.createElement("strong");
    heading.textContent = title;
    const text = document.createElement("p");
    text.textContent = message;
    const row = document.createElement("div");
    row.className = "actions";
    for (const [label, action] of [...actions, ["Dismiss", () => {}]]) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "small";
      button.textContent = label;
      button.addEventListener("click", () => {
        this.hide();
        action();
      });
      row.append(button);
    }
    this._element.hidden = false; // before it has content, or it is not announced
    this._element.replaceChildren(heading, text, row);
  }

  hide() {
    this._element.hidden = true;
    this._element.replaceChildren();
  }
}
