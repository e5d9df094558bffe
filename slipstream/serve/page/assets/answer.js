// Streams one answer into a pane.

import { stream } from "./api.js";
import { Recording } from "./recording.js";
import { bodyOf, pathOf } from "./request.js";

const MOST_BUSY = 30; // milliseconds

/**
 * @param prompt text or messages.
 * @param onTokens called whenever the pane has more.
 * @returns whether the answer is complete; false when `signal` ended it.
 * @throws ServerError; what came before it stays in the pane.
 */
export async function answer(pane, values, prompt, numDraftTokens, signal, onTokens) {
  const recording = new Recording(pane.numDraftTokens);
  pane.begin();
  try {
    const body = bodyOf(values, prompt, numDraftTokens);
    let rested = performance.now();
    for await (const chunk of stream(pathOf(values.mode), body, signal)) {
      pane.push(recording.take(chunk));
      onTokens();
      if (performance.now() - rested < MOST_BUSY) continue;
      await new Promise((resolve) => setTimeout(resolve)); // chunks in hand must not keep keys waiting
      rested = performance.now();
    }
    return true;
  } catch (error) {
    recording.stopped = true;
    if (error.name !== "AbortError") throw error;
    return false;
  } finally {
    pane.end(recording);
    onTokens();
  }
}
