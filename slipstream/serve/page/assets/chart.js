// What the three charts share: an SVG of the size it has on the page, and shapes in it.

const NAMESPACE = "http://www.w3.org/2000/svg";

/** A shape with attributes; `text` is its text content. */
export function shape(name, attributes, text = null) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, typeof value === "number" ? Math.round(value * 100) / 100 : value);
  }
  if (text !== null) element.textContent = text;
  return element;
}

/** Show `shapes` in `svg`, whose units are pixels; `label` says in words what they show. */
export function draw(svg, shapes, label) {
  svg.setAttribute("viewBox", `0 0 ${svg.clientWidth} ${svg.clientHeight}`);
  svg.setAttribute("aria-label", label);
  svg.replaceChildren(...shapes);
}

/** The next larger round number. */
export function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return power * ([1, 1.5, 2, 3, 4, 5, 6, 8].find((factor) => factor * power >= value) ?? 10);
}
