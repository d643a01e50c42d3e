"""The contrast of texts on a page."""

from __future__ import annotations

# The contrast ratio of every visible text with what is behind it (WCAG 2.2, 1.4.3): the relative
# luminance of sRGB, backgrounds composited from the outermost element inwards.
CONTRAST = """
(() => {
  document.querySelectorAll("details").forEach(d => d.open = true);
  const parse = c => { const v = c.match(/[\\d.]+/g).map(Number);
    return v.length < 4 ? [...v, 1] : v; };
  const over = (top, under) =>
    [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = c => { const f = c.slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * f[0] + 0.7152 * f[1] + 0.0722 * f[2]; };
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05); };
  const behind = element => { let chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(e);
    let colour = [255, 255, 255, 1];
    for (const e of chain) colour = over(parse(getComputedStyle(e).backgroundColor), colour);
    return colour; };
  const cells = text => { const b = text.getBoundingClientRect(), x = b.x + b.width / 2,
      y = b.y + b.height / 2; let found = [];
    for (const r of text.closest("svg").querySelectorAll("rect.cell")) {
      const c = r.getBoundingClientRect();
      if (c.left <= x && x <= c.right && c.top <= y && y <= c.bottom) found.push(r); }
    return found; };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || element.closest("title, desc, .unseen, .skip")) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const style = getComputedStyle(element), svg = element.closest("svg");
    let under = behind(svg ? svg.parentElement : element);
    if (svg) for (const r of cells(element)) {
      const s = getComputedStyle(r), fill = parse(s.fill);
      under = over([...fill.slice(0, 3), Number(s.fillOpacity)], under); }
    const ink = parse(svg ? style.fill : style.color);
    found.push([ratio(over(ink, under), under), walker.currentNode.data.trim().slice(0, 40)]); }
  return found; })()
"""
