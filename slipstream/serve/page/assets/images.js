// The images that the next message comes with.

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_BYTES = 32 * 2 ** 20; // that a server reads of one

export class Images {
  /**
   * @param list shows them; @param button chooses files, by the hidden @param field.
   * @param say takes what is wrong, or "".
   */
  constructor({ list, button, field, say }) {
    this._list = list;
    this._button = button;
    this._say = say;
    this._most = 0;
    this._refusal = "The server has not said yet whether its model sees images.";
    this._kept = []; // [{name, url}]
    button.addEventListener("click", () => field.click());
    field.addEventListener("change", () => {
      this.add([...field.files]);
      field.value = ""; // the same file may be chosen again
    });
  }

  /** Data URLs, in order. */
  get urls() {
    return this._kept.map(({ url }) => url);
  }

  /** @param most images of a message; 0: none, for the reason `refusal`. */
  allow(most, refusal) {
    this._most = most;
    this._refusal = refusal;
    this._button.hidden = most === 0;
    if (most === 0) this.take();
  }

  /** Read files; those that cannot be sent are told, with the reason. */
  async add(files) {
    this._say("");
    for (const file of files) {
      const wrong = this._wrong(file);
      if (wrong) {
        this._say(wrong);
        return;
      }
      try {
        const url = await dataUrl(file);
        const late = this._wrong(file); // others may have been read meanwhile
        if (late) this._say(late);
        else this._kept.push({ name: file.name, url });
      } catch {
        this._say(`${file.name} cannot be read.`);
      }
      this._show();
    }
  }

  /** What is there, which is gone from here. */
  take() {
    const taken = this._kept;
    this._kept = [];
    this._show();
    return taken;
  }

  /** Put back what was taken. */
  restore(taken) {
    this._kept = taken;
    this._show();
  }

  _wrong({ name, type, size }) {
    if (this._most === 0) return this._refusal;
    if (!TYPES.includes(type)) return `${name} is no PNG, JPEG, WebP, GIF or BMP.`;
    if (size > MOST_BYTES) return `${name} is larger than 32 MiB.`;
    return this._kept.length < this._most ? "" : `This server reads at most ${this._most} images of a prompt.`;
  }

  _show() {
    this._list.hidden = this._kept.length === 0;
    this._list.replaceChildren(...this._kept.map((image) => this._entry(image)));
  }

  _entry(image) {
    const entry = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "×";
    button.setAttribute("aria-label", `Remove ${image.name}`);
    button.addEventListener("click", () => {
      this._kept = this._kept.filter((other) => other !== image);
      this._show();
      this._button.focus();
    });
    entry.append(preview(image), button);
    return entry;
  }
}

/** An image as the page shows it. */
export function preview({ name, url }) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = name;
  image.title = name;
  return image;
}

/** A message of the user, with images before the text. */
export function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return text.trim() ? [...parts, { type: "text", text }] : parts;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}
