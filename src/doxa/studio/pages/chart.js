// Charts as SVG: axes, lines, bands, bars and points; and saving them as files.
import { text } from "/pages/strings.js";

const WIDTH = 460, HEIGHT = 300, LEFT = 60, RIGHT = 12, TOP = 12, BOTTOM = 42;
const KEPT = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "font-family", "font-size"];

export const make = (name, attributes = {}, inner = "") => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (inner !== "") element.textContent = inner;
  return element;
};

export const short = (v) => {
  if (v === null || v === undefined || !Number.isFinite(v)) return "–";
  const size = Math.abs(v);
  const said = size !== 0 && (size >= 1e6 || size < 1e-3) ? v.toExponential(2) : String(Number(v.toPrecision(4)));
  return said.replace("-", "−");
};

function ticks(low, high, most = 6) {
  const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= raw);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

// marks: {kind: "line" | "rule" | "band" | "epistemic" | …, x, y} or {x, low, high}; bars: {from, to, y}.
export function chart({ name, label, x, y, marks, key = [], names }) {
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
  const span = (axis) => axis.high > axis.low ? axis : { ...axis, low: axis.low - 0.5, high: axis.high + 0.5 };
  x = span(x); y = span(y);
  const px = (v) => LEFT + ((WIDTH - LEFT - RIGHT) * (v - x.low)) / (x.high - x.low);
  const py = (v) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (Math.min(y.high, Math.max(y.low, v)) - y.low)) / (y.high - y.low);
  const at = (a, b) => `${px(a).toFixed(2)},${py(b).toFixed(2)}`;
  for (const v of ticks(y.low, y.high)) {
    svg.append(make("line", { class: "tick", x1: LEFT, x2: WIDTH - RIGHT, y1: py(v), y2: py(v) }));
    svg.append(make("text", { x: LEFT - 7, y: py(v) + 4, "text-anchor": "end" }, short(v)));
  }
  if (names) names.forEach((one, i) => svg.append(make("text", { x: px(i), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, one.length > 11 ? `${one.slice(0, 10)}…` : one)));
  else for (const v of ticks(x.low, x.high)) svg.append(make("text", { x: px(v), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, short(v)));
  for (const mark of marks) {
    if (mark.low) {
      const up = mark.x.map((v, i) => at(v, mark.high[i])), down = mark.x.map((v, i) => at(v, mark.low[i])).reverse();
      svg.append(make("polygon", { class: mark.kind, points: [...up, ...down].join(" ") }));
    } else if (mark.kind === "bar") {
      mark.y.forEach((v, i) => svg.append(make("rect", { class: "bar", x: px(mark.from[i]) + 1, y: py(v), width: Math.max(1, px(mark.to[i]) - px(mark.from[i]) - 2), height: py(y.low) - py(v) })));
    } else if (mark.kind === "dot") {
      mark.x.forEach((v, i) => {
        const dot = make("circle", { class: mark.colour ? `dot ${mark.colour}` : "dot", cx: px(v).toFixed(2), cy: py(mark.y[i]).toFixed(2), r: mark.r || 3.6 });
        if (mark.says) dot.append(make("title", {}, mark.says(i)));
        svg.append(dot);
      });
    } else svg.append(make("polyline", { class: mark.kind, points: mark.x.map((v, i) => at(v, mark.y[i])).join(" ") }));
  }
  svg.append(make("rect", { class: "frame", x: LEFT, y: TOP, width: WIDTH - LEFT - RIGHT, height: HEIGHT - TOP - BOTTOM, rx: 6 }));
  svg.append(make("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, x.label));
  const side = make("text", { transform: `translate(12 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label);
  svg.append(side);
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const shown = document.createElement("span");
  shown.className = "key";
  for (const [kind, said] of key) {
    const one = document.createElement("span");
    one.className = `k-${kind}`;
    one.textContent = said;
    shown.append(one);
  }
  const buttons = document.createElement("span");
  for (const [kind, save] of [["SVG", saveSvg], ["PNG", savePng]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = kind;
    button.setAttribute("aria-label", text.saveFigure(label, kind));
    button.addEventListener("click", () => save(svg, name));
    buttons.append(button);
  }
  caption.append(shown, buttons);
  figure.append(svg, caption);
  return figure;
}

// The chart as a file of its own, with the colours that it has on the page.
export function standing(svg) {
  const copy = svg.cloneNode(true), from = svg.querySelectorAll("*"), to = copy.querySelectorAll("*");
  from.forEach((element, i) => {
    const style = getComputedStyle(element);
    for (const property of KEPT) to[i].setAttribute(property, style.getPropertyValue(property));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", WIDTH);
  copy.setAttribute("height", HEIGHT);
  const page = make("rect", { width: WIDTH, height: HEIGHT, fill: getComputedStyle(document.documentElement).getPropertyValue("--card").trim() });
  copy.prepend(page);
  return new XMLSerializer().serializeToString(copy);
}

export function download(blob, name) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
}

function saveSvg(svg, name) { download(new Blob([standing(svg)], { type: "image/svg+xml" }), `${name}.svg`); }

export async function png(svg) {
  const image = new Image(), address = URL.createObjectURL(new Blob([standing(svg)], { type: "image/svg+xml" }));
  image.src = address;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = 2 * WIDTH;
  canvas.height = 2 * HEIGHT;
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(address);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

async function savePng(svg, name) { download(await png(svg), `${name}.png`); }
