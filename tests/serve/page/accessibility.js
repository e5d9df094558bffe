// What is wrong with the page as it stands, for people who see little, hear it, or have large fingers.
() => {
  const faults = [];
  const nameOf = (element) => element.id || element.className || element.tagName.toLowerCase();
  const visible = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;

  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = ([r, g, b]) => {
    const linear = [r, g, b].map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const backgroundOf = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  };

  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !visible(element) || seen.has(element)) continue;
    seen.add(element);
    if (element.closest("noscript, option, :disabled, .hidden, .skip")) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const colour = element.closest("svg") ? style.fill : style.color;
    const ratio = contrast(rgba(colour), backgroundOf(element));
    if (ratio < (large ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)} of ${nameOf(element)}`);
    if (size < 11) faults.push(`${nameOf(element)} is written too small`);
  }

  for (const field of document.querySelectorAll("input, select, textarea")) {
    const label = [...field.labels].map((one) => one.textContent).join(" ") || field.getAttribute("aria-label");
    if (!label?.trim()) faults.push(`${nameOf(field)} has no label`);
    if (field.matches(".segmented input") || !visible(field) || field.disabled) continue;
    const { borderTopColor, borderTopWidth } = getComputedStyle(field);
    const bordered = parseFloat(borderTopWidth) > 0 && field.matches("select, textarea, [type=number], [type=password]");
    if (bordered && contrast(rgba(borderTopColor), backgroundOf(field.parentElement)) < 3) {
      faults.push(`the border of ${nameOf(field)} is hard to see`);
    }
  }
  for (const button of document.querySelectorAll("button, summary")) {
    if (!button.textContent.trim()) faults.push(`${nameOf(button)} has no name`);
  }
  for (const target of document.querySelectorAll("button, select, input:not([type=checkbox]), textarea, .segmented span")) {
    if (!visible(target) || target.matches(".segmented input")) continue;
    const { width, height } = target.getBoundingClientRect();
    if (Math.min(width, height) < 22) faults.push(`${nameOf(target)} is too small to hit`);
  }
  for (const image of document.querySelectorAll("img, svg[role=img]")) {
    if (!image.hasAttribute("alt") && !image.getAttribute("aria-label")) faults.push(`${nameOf(image)} is not described`);
  }
  for (const group of document.querySelectorAll("fieldset")) {
    if (!group.querySelector("legend")?.textContent.trim()) faults.push("a group has no legend");
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  faults.push(...ids.filter((id, index) => ids.indexOf(id) !== index).map((id) => `two elements are called ${id}`));
  for (const element of document.querySelectorAll("[aria-describedby], [aria-labelledby], label[for], output[for]")) {
    for (const attribute of ["aria-describedby", "aria-labelledby", "for"]) {
      for (const id of (element.getAttribute(attribute) ?? "").split(" ").filter(Boolean)) {
        if (!ids.includes(id)) faults.push(`${nameOf(element)} refers to ${id}, which is not there`);
      }
    }
  }
  const levels = [...document.querySelectorAll("h1, h2, h3")].filter(visible).map((heading) => heading.tagName);
  if (levels.filter((level) => level === "H1").length !== 1) faults.push("not one main heading");
  if (document.querySelector("[tabindex]:not([tabindex='0'], [tabindex='-1'])")) faults.push("an order of its own for Tab");
  if (!document.documentElement.lang) faults.push("no language");
  if (!document.querySelector("main")) faults.push("no main part");
  return faults;
}
