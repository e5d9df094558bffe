// One column for each pass of the target, one cell for each token it gave.

import { draw, shape } from "./chart.js";
import { count } from "./words.js";

const COLUMN = 5;
const GAP = 1.5;
const GUTTER = 30;
const FOOT = 14;

/**
 * @param most tokens that one pass can give: K + 1
 * @param marked a pass to point out
 */
export function drawSteps(svg, tally, most, marked = null) {
  const [width, height] = [svg.clientWidth - GUTTER, svg.clientHeight - FOOT];
  const shapes = [shape("line", { class: "axis", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 })];
  const { steps } = tally;
  if (!steps.length) {
    draw(svg, shapes, "Tokens of each pass: nothing yet");
    return;
  }
  const cell = (height - 3) / most;
  const fit = Math.floor((width + GAP) / (COLUMN + GAP));
  const first = Math.max(0, Math.min(steps.length - fit, marked ?? Infinity));
  const end = Math.min(first + fit, steps.length);
  shapes.push(shape("line", { class: "grid", x1: 0, x2: width, y1: 2, y2: 2 }));
  shapes.push(shape("text", { x: width + 5, y: 9 }, String(most)));
  shapes.push(shape("text", { x: width + 5, y: height }, "0"));
  for (let index = first; index < end; index += 1) {
    const { accepted, end: last } = steps[index];
    if (index === marked) {
      const x = (index - first) * (COLUMN + GAP) - GAP;
      shapes.push(shape("rect", { class: "marked", x, y: 0, width: COLUMN + 2 * GAP, height }));
    }
    const kinds = [...Array(accepted).fill("accepted"), ...(last ? [last] : [])];
    kinds.forEach((kind, place) => {
      const inset = kind === "recovered" ? 0.5 : 0; // drawn as a frame, not filled
      shapes.push(shape("rect", {
        class: `cell ${kind}`,
        x: (index - first) * (COLUMN + GAP) + inset,
        y: height - 1 - (place + 1) * cell + inset,
        width: COLUMN - 2 * inset,
        height: Math.max(1, cell - 1 - 2 * inset),
      }));
    });
  }
  const length = tally.acceptanceLength;
  if (length !== null) {
    const y = height - 1 - length * cell;
    shapes.push(shape("line", { class: "mean", x1: 0, x2: width, y1: y, y2: y }));
    shapes.push(shape("text", { class: "strong", x: width + 5, y: Math.min(height - 11, Math.max(20, y + 3)) }, length.toFixed(1)));
  }
  const passes = count(steps.length, "pass", "passes");
  const shown = end - first < steps.length ? `${first + 1}–${end} of ${passes}` : passes;
  shapes.push(shape("text", { x: width, y: height + 12, "text-anchor": "end" }, shown));
  const recent = steps.slice(-8).map((step) => step.accepted + (step.end ? 1 : 0));
  draw(svg, shapes, `Tokens of each pass of the target; the last ones gave ${recent.join(", ")}`);
}
