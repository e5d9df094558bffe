// The form: what it holds, what the models allow, what a refused field looks like.

/** How a field's value is written beside its label. */
const SHOWN = {
  temperature: (value) => (value === 0 ? "greedy" : value.toFixed(2)),
  top_p: (value) => (value === 1 ? "off" : value.toFixed(2)),
  min_p: (value) => (value === 0 ? "off" : value.toFixed(2)),
  presence_penalty: (value) => (value === 0 ? "off" : value.toFixed(1)),
  frequency_penalty: (value) => (value === 0 ? "off" : value.toFixed(1)),
  repetition_penalty: (value) => (value === 1 ? "off" : value.toFixed(2)),
};

/** The protocol's names for fields that the form calls otherwise. */
const ALIASES = { max_completion_tokens: "max_tokens", messages: "system", speculative: "num_speculative_tokens" };

export class Settings {
  /**
   * @param form the settings; `model`, mode and view stand elsewhere and belong to it.
   * @param onChange called with the element that the user changed.
   */
  constructor(form, onChange) {
    this._form = form;
    this._models = new Map();
    this._onChange = onChange;
    form.addEventListener("submit", (event) => event.preventDefault());
    for (const element of form.elements) {
      element.addEventListener("input", () => this._changed(element));
    }
    if (window.matchMedia("(max-width: 899px)").matches) form.querySelector("#settings-box").open = false;
    this._show();
  }

  /** Take in what the server lists. */
  offer(models) {
    this._models = new Map(models.map((model) => [model.id, model]));
    const select = this._at("model");
    const chosen = select.value;
    select.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    if (this._models.has(chosen)) select.value = chosen;
    select.disabled = models.length < 2;
    this._follow();
    this._show();
  }

  get mode() {
    return this._form.elements.mode.value;
  }

  set mode(mode) {
    this._form.elements.mode.value = mode;
    this._show();
  }

  /** Whether the chosen model has a chat template; undefined where nobody said. */
  get chats() {
    return this._models.get(this._at("model").value)?.has_chat_template;
  }

  /** How many images of a prompt the chosen model sees; undefined where nobody said. */
  get mostImages() {
    return this._models.get(this._at("model").value)?.max_images;
  }

  /** What the chosen model drafts with; null without a drafter, undefined where nobody said. */
  get drafter() {
    return this._models.get(this._at("model").value)?.speculative;
  }

  /** Draft tokens per step to ask for; null where the server has no such field. */
  get numDraftTokens() {
    if (this.drafter === undefined) return null;
    return this._at("drafter").value === "on" ? Number(this._at("num_speculative_tokens").value) : 0;
  }

  /** Every value; null, with the field focused and a message, when one is not allowed. */
  read() {
    const wrong = [...this._form.elements].find((element) => !element.checkValidity());
    if (wrong) {
      reveal(wrong);
      wrong.reportValidity();
      return null;
    }
    const values = { model: this._at("model").value, mode: this.mode, view: this._form.elements.view.value };
    for (const element of this._form.elements) {
      if (element.name && !(element.name in values)) values[element.name] = valueOf(element);
    }
    values.stop = values.stop.split("\n").filter(Boolean);
    return values;
  }

  /** One line that says how the next text will be written. */
  get brief() {
    const temperature = Number(this._at("temperature").value);
    const drafts = this.numDraftTokens;
    return [
      temperature === 0 ? "greedy" : `temperature ${temperature}`,
      `at most ${this._at("max_tokens").value || "?"} tokens`,
      drafts === null ? "" : drafts ? `K ${this.drafter?.adaptive ? "≤" : "="} ${drafts}` : "no drafts",
    ].filter(Boolean).join(" · ");
  }

  /** Mark the field that the server refused, if the form has it. */
  refuse(param) {
    const name = String(param ?? "").split(/[.[]/)[0];
    const field = this._at(ALIASES[name] ?? name);
    if (!field || !this._form.contains(field)) return;
    reveal(field);
    field.setAttribute("aria-invalid", "true");
  }

  /** While a text is written, its mode and view stay. */
  lock(locked) {
    for (const name of ["mode", "view"]) {
      for (const radio of this._form.elements[name]) radio.disabled = locked;
    }
    if (!locked) this._follow();
  }

  _at(id) {
    return this._form.elements.namedItem(id);
  }

  _changed(element) {
    element.removeAttribute("aria-invalid");
    if (element.name === "drafter" || element.id === "model") this._follow();
    this._show();
    this._onChange(element);
  }

  /** Write what follows from the values: numbers beside labels, and the parts of this mode. */
  _show() {
    for (const output of this._form.querySelectorAll("output")) {
      const value = Number(this._at(output.htmlFor.value).value);
      output.value = SHOWN[output.htmlFor.value]?.(value) ?? value;
    }
    for (const part of this._form.querySelectorAll("[data-mode]")) {
      part.hidden = part.dataset.mode !== this.mode;
    }
  }

  /** Drafter, K, length and view as the chosen model allows them. */
  _follow() {
    const { drafter } = this;
    const select = this._at("drafter");
    const on = select.value !== "off";
    const none = new Option("None: plain decoding", "off");
    select.replaceChildren(...(drafter ? [new Option(nameOf(drafter), "on"), none] : [none]));
    select.value = drafter && on ? "on" : "off";
    select.disabled = !drafter;
    const slider = this._at("num_speculative_tokens");
    if (drafter && String(drafter.num_speculative_tokens) !== slider.max) {
      slider.max = drafter.num_speculative_tokens;
      slider.value = slider.max;
    }
    slider.disabled = select.value !== "on";
    this._at("max_tokens").max = this._models.get(this._at("model").value)?.max_model_len ?? "";
    const both = [...this._form.elements.view].find((radio) => radio.value === "both");
    both.disabled = !drafter;
    if (!drafter && both.checked) this._form.elements.view.value = "one";
    this._form.querySelector("#speculation-hint").textContent = this._models.size && !drafter
      ? "This server runs without a drafter, so there is nothing to compare." : "";
  }
}

function nameOf({ method, model }) {
  return [method, model].filter(Boolean).join(" · ").replaceAll("_", " ");
}

function valueOf(element) {
  if (element.type === "checkbox") return element.checked;
  if (element.type === "number" || element.type === "range") {
    return element.value === "" ? null : Number(element.value);
  }
  return element.value;
}

function reveal(element) {
  for (let box = element.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
}
