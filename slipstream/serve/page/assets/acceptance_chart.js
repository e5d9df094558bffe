// The share of drafts accepted at each position, as bars.

import { draw, shape } from "./chart.js";
import { percent } from "./words.js";

const FOOT = 14;
const HEAD = 12;

/**
 * @param shares by position, from 0 to 1
 * @param known whether there was a draft at all
 */
export function drawAcceptance(svg, shares, known) {
  const [width, height] = [svg.clientWidth, svg.clientHeight - FOOT];
  const shapes = [shape("line", { class: "axis", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 })];
  const pitch = width / Math.max(shares.length, 4);
  const bar = Math.min(34, pitch - 6);
  const labelled = pitch >= 28; // else every label would touch the next
  shares.forEach((share, index) => {
    const x = index * pitch + (Math.min(pitch, 52) - bar) / 2;
    const tall = share * (height - HEAD - 1);
    shapes.push(shape("rect", { class: "track", x, y: HEAD, width: bar, height: height - HEAD - 1 }));
    shapes.push(shape("rect", { class: "cell accepted", x, y: height - 1 - tall, width: bar, height: tall }));
    const middle = { x: x + bar / 2, "text-anchor": "middle" };
    if (labelled && known) shapes.push(shape("text", { ...middle, class: "strong", y: HEAD - 3 }, percent(share)));
    shapes.push(shape("text", { ...middle, y: height + 12 }, String(index + 1)));
  });
  const said = shares.map((share, index) => `position ${index + 1}: ${percent(share)}`);
  draw(svg, shapes, `Acceptance by position: ${known ? said.join(", ") : "nothing yet"}`);
}
