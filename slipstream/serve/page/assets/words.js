// Numbers and tokens in words.

/** 0.0123 -> "12 ms", 3.21 -> "3.2 s". */
export function seconds(value) {
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

/** Three digits are enough. */
export function rate(value) {
  return value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0);
}

/** 0.875 -> "88%", with a decimal where it matters or where `decimals` asks for it. */
export function percent(share, decimals = 0) {
  const value = share * 100;
  if (value > 0 && value < 0.1) return "< 0.1%";
  return `${value.toFixed(value < 10 && value > 0 ? 1 : decimals)}%`;
}

const WHOLE = new Intl.NumberFormat("en");

/** 1 -> "1 token", 2 -> "2 tokens". */
export function count(number, noun, plural = `${noun}s`) {
  return `${WHOLE.format(number)} ${number === 1 ? noun : plural}`;
}

/** A text whose blanks and control characters can be seen. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·").replace(CONTROL, picture);
}

/** A model's text, in which nothing but line ends and tabs controls the page. */
export function harmless(text) {
  return text.replace(CONTROL, picture);
}

// C0 without tab and line feed, DEL, C1, and what turns the direction of writing.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g;

function picture(character) {
  const code = character.charCodeAt(0);
  return code < 0x20 ? String.fromCharCode(0x2400 + code) : code === 0x7f ? "␡" : "\ufffd";
}
