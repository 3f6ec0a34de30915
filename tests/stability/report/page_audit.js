// What a reader's eye would complain about: every text on the page with its size, contrast and
// place, and the tick labels of each axis. Run in the page by page_audit.py.

const rgb = (colour) => {
  const [r, g, b, a = 1] = colour.match(/[\d.]+/g).map(Number);
  return [r, g, b, a];
};
const over = ([r, g, b, a], below) => [r, g, b].map((c, i) => a * c + (1 - a) * below[i]);

// the colour behind an element: its ancestors' backgrounds, down to one that hides all below it
const behind = (element) => {
  if (!element) return [255, 255, 255];
  const colour = rgb(getComputedStyle(element).backgroundColor);
  return colour[3] === 1 ? colour.slice(0, 3) : over(colour, behind(element.parentElement));
};
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const luminance = (colour) => {
  const [r, g, b] = colour.map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const opacity = (element) =>
  element ? getComputedStyle(element).opacity * opacity(element.parentElement) : 1;
const box = (r) => [r.left + scrollX, r.top + scrollY, r.right + scrollX, r.bottom + scrollY];
const ancestor = (element, test) => {
  for (let e = element; e && e !== document.body; e = e.parentElement) {
    if (test(getComputedStyle(e))) return e;
  }
  return null;
};
const isShown = (element) => element.checkVisibility({ visibilityProperty: true });

const describe = (text, holder) => {
  const svg = holder.closest("svg");
  const element = svg ? (holder.closest("text") ?? holder) : holder; // a superscript is its number's
  const style = getComputedStyle(element);
  const [r, g, b, a] = rgb(svg ? style.fill : style.color);
  const strength = a * opacity(element) * (svg ? style.fillOpacity : 1);
  if (strength < 0.02 || !isShown(element)) return null;
  const range = document.createRange();
  range.selectNodeContents(element);
  const back = behind(element);
  const frame = svg ?? ancestor(element, (s) => ["hidden", "clip"].includes(s.overflowX));
  return {
    text: text.trim().slice(0, 60),
    where: `${element.tagName.toLowerCase()}.${element.getAttribute("class") ?? ""}`,
    plot: element.closest(".plot")?.id ?? "",
    size: parseFloat(style.fontSize),
    off: element.matches(".legendtext") && opacity(element) < 1,
    contrast: contrast(over([r, g, b, strength], back), back),
    box: box((svg || element.matches("select") ? element : range).getBoundingClientRect()),
    frame: frame && box(frame.getBoundingClientRect()),
    scrolls: !svg && !!ancestor(element, (s) => ["auto", "scroll"].includes(s.overflowX)),
  };
};

const texts = () => {
  const found = [...document.querySelectorAll("select")].map((s) => describe(s.value, s));
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const { data, parentElement } = walker.currentNode;
    if (data.trim() && !parentElement.closest("script, style, select, progress")) {
      found.push(describe(data, parentElement));
    }
  }
  return found.filter(Boolean);
};

const labels = (axis) =>
  [...axis.querySelectorAll("text")]
    .filter((text) => text.textContent.trim() && isShown(text))
    .map((text) => [text.textContent, ...box(text.getBoundingClientRect())]);

const ticks = () =>
  [...document.querySelectorAll(".plot .xaxislayer-above, .plot .yaxislayer-above")].map((axis) => [
    axis.closest(".plot").id,
    labels(axis),
  ]);
