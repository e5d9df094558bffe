// Asks for an API key; the answer stays in memory.

import { useKey } from "./api.js";

export class KeyDialog {
  /** @param dialog the element; @param onKey called when a key was given */
  constructor(dialog, onKey) {
    this._dialog = dialog;
    this._field = dialog.querySelector("#key");
    this._error = dialog.querySelector("#key-error");
    dialog.querySelector("form").addEventListener("submit", (event) => {
      if (event.submitter?.value === "cancel") return;
      const key = this._field.value.trim();
      if (!key || /[^\x21-\x7e]/.test(key)) {
        event.preventDefault();
        this._error.textContent = key ? "A key has no blanks or special characters." : "Enter a key, or cancel.";
        this._field.focus();
        return;
      }
      useKey(key);
      this._field.value = "";
      onKey();
    });
  }

  /** @param refused whether a key was given and not accepted */
  ask(refused) {
    this._error.textContent = refused ? "The server did not accept that key." : "";
    if (!this._dialog.open) this._dialog.showModal();
    this._field.focus();
  }
}
