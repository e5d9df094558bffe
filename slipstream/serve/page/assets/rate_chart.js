// Tokens per second against time, a line for each text.

import { ceiling, draw, shape } from "./chart.js";
import { rate, seconds } from "./words.js";

const POINTS = 96;
const GUTTER = 30; // for the scale at the right
const FOOT = 14;

/** @param series [{tally, style, label}] */
export function drawRates(svg, series) {
  const lines = series.map((one) => ({ ...one, points: ratesOf(one.tally.times) }))
    .filter(({ points }) => points.length > 1);
  const [width, height] = [svg.clientWidth - GUTTER, svg.clientHeight - FOOT];
  const shapes = [shape("line", { class: "axis", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 })];
  if (!lines.length) {
    draw(svg, shapes, "Tokens per second: nothing yet");
    return;
  }
  const span = Math.max(...lines.map(({ points }) => points.at(-1).time));
  const top = ceiling(Math.max(...lines.flatMap(({ points }) => points.map((point) => point.rate))));
  const place = ({ time, rate: value }) =>
    `${((time / span) * width).toFixed(1)},${(2 + (1 - value / top) * (height - 3)).toFixed(1)}`;
  shapes.push(shape("line", { class: "grid", x1: 0, x2: width, y1: 2, y2: 2 }));
  shapes.push(shape("text", { x: width + 5, y: 9 }, String(top)));
  shapes.push(shape("text", { x: width + 5, y: height }, "0"));
  shapes.push(shape("text", { x: width, y: height + 12, "text-anchor": "end" }, seconds(span)));
  for (const { points, style } of lines) {
    const path = points.map(place).join("L");
    const [from, to] = [points[0], points.at(-1)].map((point) => ((point.time / span) * width).toFixed(1));
    if (lines.length === 1) {
      shapes.push(shape("path", { class: `area ${style}`, d: `M${path}L${to},${height}L${from},${height}Z` }));
    }
    shapes.push(shape("path", { class: `curve ${style}`, d: `M${path}` }));
  }
  const said = lines.map(({ label, points }) => `${label} ${rate(points.at(-1).rate)} at the end`);
  draw(svg, shapes, `Tokens per second over ${seconds(span)}: ${said.join(", ")}`);
}

/** Rates in a window around each point; times count from the first token. */
function ratesOf(times) {
  if (times.length < 3) return [];
  const first = times[0];
  const span = times.at(-1) - first;
  if (span <= 0) return [];
  const window = Math.min(Math.max(span / 6, 0.16), 1, span);
  const points = [];
  let [low, high] = [0, 0];
  for (let index = 0; index <= POINTS; index += 1) {
    const time = (span * index) / POINTS;
    const from = Math.min(Math.max(time - window / 2, 0), span - window);
    const to = from + window;
    while (high < times.length && times[high] - first <= to) high += 1;
    while (low < high && times[low] - first <= from) low += 1;
    points.push({ time, rate: (high - low) / window });
  }
  return points;
}
