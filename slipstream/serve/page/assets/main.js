// Joins the parts of the page.

import { hasKey, listModels } from "./api.js";
import { EXAMPLES } from "./examples.js";
import { Images } from "./images.js";
import { Inspector } from "./inspector.js";
import { KeyDialog } from "./key_dialog.js";
import { Meters } from "./meters.js";
import { Notice } from "./notice.js";
import { Player } from "./player.js";
import { Settings } from "./settings.js";
import { Transcript } from "./transcript.js";

const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const stage = document.querySelector(".stage");

const notice = new Notice(at("notice"));
const transcript = new Transcript(at("transcript"), at("welcome"));
const meters = new Meters(document.querySelector(".meters"));
const inspector = new Inspector(at("transcript"), at("card"));
const keyDialog = new KeyDialog(at("key-dialog"), connect);
const announce = (text) => {
  at("announcer").textContent = text;
};
const player = new Player({ transcript, meters, announce, onBusy });
const images = new Images({
  list: at("images"),
  button: at("image-add"),
  field: at("image-files"),
  say: (text) => {
    at("prompt-error").textContent = text;
  },
});
let mode = "completion";
const example = { completion: 0, chat: 0 };
let startedAt = 0;
const settings = new Settings(at("settings"), (element) => {
  at("brief").textContent = settings.brief;
  if (element.name === "mode") changeMode();
  if (element.id === "model") allowImages();
});

/** Ask the server what it runs. */
async function connect() {
  state("waiting", "connecting");
  try {
    settings.offer(await listModels());
    allowImages();
    state("ready", "ready");
    if (settings.chats && untouched()) {
      settings.mode = "chat";
      changeMode();
    }
    at("brief").textContent = settings.brief;
  } catch (error) {
    fail(error, connect);
  }
}

/** Whether the page is as it was loaded. */
function untouched() {
  return mode === "completion" && !transcript.turns.length && prompt.value === EXAMPLES[mode][0];
}

async function run() {
  const text = prompt.value;
  const empty = text.trim() === "" && !images.urls.length;
  at("prompt-error").textContent = empty ? "Write a prompt first." : "";
  prompt.setAttribute("aria-invalid", String(empty));
  if (empty) {
    prompt.focus();
    return;
  }
  const values = settings.read();
  if (!values) return;
  notice.hide();
  startedAt = performance.now();
  const shown = images.take();
  if (mode === "chat") prompt.value = "";
  try {
    await player.run(values, text, settings.numDraftTokens, shown);
    state("ready", "ready");
  } catch (error) {
    fail(error, run);
  } finally {
    // Nothing came of it: the words and the images are not lost.
    const last = transcript.turns.at(-1);
    if (!prompt.value && last?.prompt !== text) prompt.value = text;
    if (!images.urls.length && last?.images !== shown) images.restore(shown);
  }
}

/** Offer images where the model sees them, and else know why not. */
function allowImages() {
  const most = settings.mostImages ?? 0;
  const blind = most ? "Images go with a message: choose Chat first." : "This model reads text only, no images.";
  images.allow(mode === "chat" ? most : 0, blind);
}

function fail(error, again) {
  if (error.status === 401) {
    state("failed", "needs an API key");
    at("key-open").hidden = false;
    keyDialog.ask(hasKey());
    return;
  }
  if (!error.title) throw error; // the page's own mistake: leave it to the console
  if (error.status === 0) state("failed", "no answer");
  const wait = error.retryAfter ? ` It asks to wait ${error.retryAfter} s.` : "";
  const retry = error.status === 400 || error.status === 413 ? [] : [["Try again", again]];
  settings.refuse(error.param);
  notice.show(error.title, error.message.replace(/[^.!?…]$/, "$&.") + wait, retry);
}

function state(name, text) {
  at("server").dataset.state = name;
  at("server-text").textContent = text;
}

function onBusy(busy) {
  document.body.classList.toggle("busy", busy);
  at("run-label").textContent = busy ? "Stop" : "Run";
  at("run-key").textContent = busy ? "Esc" : runKey();
  at("run").classList.toggle("stop", busy);
  for (const id of ["clear", "example", "image-add"]) at(id).disabled = busy;
  for (const button of document.querySelectorAll(".replays button")) button.disabled = busy;
  settings.lock(busy);
}

/** A message goes off with Enter; in a text to continue that is a new line. */
function runKey() {
  const modifier = /Mac|iP(hone|ad)/.test(navigator.platform) ? "⌘ " : "Ctrl ";
  return mode === "chat" ? "↵" : `${modifier}↵`;
}

function changeMode() {
  mode = settings.mode;
  at("run-key").textContent = runKey();
  clear();
  at("prompt-label").textContent = mode === "chat" ? "Message" : "Text to continue";
  at("clear").textContent = mode === "chat" ? "New chat" : "Clear";
  prompt.value = EXAMPLES[mode][example[mode]];
  allowImages();
}

function clear() {
  images.take();
  forgive();
  transcript.clear();
  meters.watch([]);
  notice.hide();
  inspector.hide();
}

/** Forget that the prompt was empty. */
function forgive() {
  prompt.removeAttribute("aria-invalid");
  at("prompt-error").textContent = "";
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!player.busy) run();
  else if (performance.now() - startedAt > 300) player.stop(); // not by the second half of a double click
});

prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing || player.busy) return;
  const sends = event.ctrlKey || event.metaKey || (mode === "chat" && !event.shiftKey);
  if (!sends) return;
  event.preventDefault();
  run();
});

prompt.addEventListener("input", forgive);

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("key-dialog").open) return;
  if (player.busy) player.stop();
  else if (inspector.open) inspector.hide();
  else if (notice.open) notice.hide();
});

at("example").addEventListener("click", () => {
  example[mode] = (example[mode] + 1) % EXAMPLES[mode].length;
  prompt.value = EXAMPLES[mode][example[mode]];
  prompt.dispatchEvent(new Event("input"));
});

at("clear").addEventListener("click", () => {
  clear();
  prompt.focus();
});

/** Files that a drop or the clipboard holds. */
function filesOf(transfer) {
  return [...(transfer?.files ?? [])];
}

for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault(); // or the browser would leave the page for the file
    document.body.classList.toggle("dropping", kind === "dragenter" || kind === "dragover");
    if (kind === "drop" && !player.busy) images.add(filesOf(event.dataTransfer));
  });
}

prompt.addEventListener("paste", (event) => {
  const files = filesOf(event.clipboardData);
  if (!files.length || event.clipboardData.types.includes("text/plain")) return;
  event.preventDefault();
  if (!player.busy) images.add(files);
});

at("key-open").addEventListener("click", () => keyDialog.ask(false));

stage.addEventListener("click", (event) => {
  if (!event.target.closest(".tok")) inspector.hide();
});

at("transcript").addEventListener("inspect", (event) => meters.mark(event.target.closest(".pane"), event.detail));

at("run-key").textContent = runKey();
prompt.value = EXAMPLES[mode][0];
connect();
