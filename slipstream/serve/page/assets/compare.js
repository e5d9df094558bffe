// Two texts: the same, or where they part.

import { isContent } from "./recording.js";

const AROUND = 24; // characters shown on either side of the first difference

/** Where two texts first differ, in characters as people count them; null when they are the same. */
export function firstDifference(one, other) {
  if (one === other) return null;
  let index = 0;
  while (index < one.length && one[index] === other[index]) index += 1;
  // Never between the halves of one character.
  if (index > 0 && /[\udc00-\udfff]/.test(one[index] ?? other[index] ?? "")) index -= 1;
  return {
    index,
    character: [...one.slice(0, index)].length + 1,
    before: one.slice(Math.max(0, index - AROUND), index),
    one: one.slice(index, index + AROUND),
    other: other.slice(index, index + AROUND),
  };
}

/** The token that an answer's content has at an index; undefined behind its end. */
export function tokenAt(tokens, index) {
  let end = 0;
  return tokens.filter(isContent).find(({ text }) => (end += text.length) > index);
}

/** How many times as fast; null where one of them could not be measured. */
export function speedUp(plain, speculative) {
  const [slow, fast] = [plain.secondsPerToken, speculative.secondsPerToken];
  return slow !== null && fast !== null ? slow / fast : null;
}
