// The room "Functions": points that all panels share, and a method in each panel.
import { Link } from "/pages/link.js";
import { Plane, round } from "/pages/plane.js";
import { Panel } from "/pages/panel.js";
import { LONGEST, StateError, pack, unpack } from "/pages/state.js";
import { showRooms } from "/pages/rooms.js";
import { text } from "/pages/strings.js";

const $ = (id) => document.getElementById(id);
const MOST_PANELS = 4;
const LAYERS = ["prior", "draws", "mean", "epistemic", "aleatoric"];
const VIEW = { x0: -5, x1: 5, y0: -3, y1: 3 };
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

for (const element of document.querySelectorAll("[data-text]")) element.textContent = text[element.dataset.text];
document.querySelector(".skip").textContent = text.skip;

const room = {
  facts: null, link: null, panels: [],
  points: [], selected: -1, view: { ...VIEW }, seed: 0, preset: null, playing: false, comparing: false,
  layers: Object.fromEntries(LAYERS.map((name) => [name, true])),

  colours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    return {
      font: read("font"), dark: dark.matches, muted: read("muted"), grid: read("grid"),
      card: read("card"), curve: read("curve"), draw: read("draw"), prior: read("prior"),
      point: read("point"), epistemic: read("epistemic"), aleatoric: read("aleatoric"),
    };
  },

  draw() { for (const panel of this.panels) panel.plane.draw(); },

  add(x, y) {
    if (this.points.length >= this.facts.most_points) { say(text.most(this.facts.most_points)); return -1; }
    this.points.push([x, y]);
    this.selected = this.points.length - 1;
    say(text.added(x, y));
    this.changed();
    return this.selected;
  },
  moveTo(i, x, y) {
    if (!this.points[i] || (this.points[i][0] === x && this.points[i][1] === y)) return;
    this.points[i] = [x, y];
    this.changed();
  },
  remove(i) {
    this.points.splice(i, 1);
    this.selected = -1;
    say(text.removed(this.points.length));
    this.changed();
    this.settle();
  },
  select(i) { this.selected = i; this.draw(); },
  saySelected() {
    const [x, y] = this.points[this.selected];
    say(text.selected(this.selected + 1, this.points.length, x, y));
  },
  sayCross(x, y) { say(text.cross(x, y)); },

  changed() {
    this.preset = null;
    showPreset();
    this.draw();
    this.refit();
    remember(false);
  },
  settle() { showPoints(); remember(true); },
  refit() {
    for (const panel of this.panels) panel.fit();
    if (!$("orders-body").hidden) askOrders();
  },

  // With points, each panel is compared with the first one that samples by HMC or NUTS.
  askDistances() {
    const reference = this.panels.find((panel) => ["hmc", "nuts"].includes(panel.method));
    if (!this.comparing || !reference || !this.points.length || !reference.settledOn) return;
    for (const panel of this.panels) {
      if (panel !== reference && panel.settledOn && !panel.far.textContent) panel.askDistance(reference);
    }
  },

  state() {
    return {
      points: this.points, view: this.view, seed: this.seed,
      hidden: LAYERS.filter((name) => !this.layers[name]),
      panels: this.panels.map((panel) => panel.state()),
    };
  },
};

function say(message) { $("said").textContent = message; }

function warn(message) {
  $("message").textContent = message;
  $("message").hidden = !message;
}

// ---- state in the address

let packing = Promise.resolve();
let pending = 0;
let current = "";

function remember(push) {
  clearTimeout(pending);
  pending = setTimeout(() => { packing = packing.then(() => write(push)); }, push ? 0 : 250);
}

async function write(push) {
  const packed = await pack(room.state());
  if (packed === current) return;
  if (packed.length > LONGEST) { warn(text.tooLong); return; }
  if ($("message").textContent === text.tooLong) warn("");
  current = packed;
  const address = `${location.pathname}#${packed}`;
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

const finite = (v, low = -1e6, high = 1e6) => typeof v === "number" && v >= low && v <= high;

function checked(found) {
  const bad = () => { throw new StateError("malformed"); };
  if (!found || typeof found !== "object" || !Array.isArray(found.points)) bad();
  const points = found.points;
  if (points.length > room.facts.most_points) bad();
  for (const p of points) if (!Array.isArray(p) || p.length !== 2 || !finite(p[0]) || !finite(p[1])) bad();
  const view = found.view || VIEW;
  if (![view.x0, view.x1, view.y0, view.y1].every((v) => finite(v)) || view.x0 >= view.x1 || view.y0 >= view.y1) bad();
  const panels = found.panels;
  if (!Array.isArray(panels) || !panels.length || panels.length > MOST_PANELS) bad();
  const known = new Set(room.facts.methods.map((m) => m.name));
  for (const panel of panels) {
    if (!panel || typeof panel !== "object" || !known.has(panel.method)) bad();
    if (panel.settings !== undefined && (typeof panel.settings !== "object" || panel.settings === null)) bad();
  }
  if (found.seed !== undefined && !(Number.isInteger(found.seed) && found.seed >= 0 && found.seed < 2 ** 31)) bad();
  const hidden = Array.isArray(found.hidden) ? found.hidden.filter((name) => LAYERS.includes(name)) : [];
  return { points: points.map(([x, y]) => [x, y]), view: { ...view }, panels, seed: found.seed || 0, hidden };
}

function take(state) {
  room.points = state.points;
  room.view = state.view;
  room.seed = state.seed;
  room.selected = -1;
  room.preset = null;
  for (const name of LAYERS) room.layers[name] = !state.hidden.includes(name);
  for (const panel of room.panels) panel.close();
  room.panels = [];
  $("panels").replaceChildren();
  for (const one of state.panels) open(one);
  showAll();
  room.refit();
}

function defaults() {
  const points = (room.facts.presets.gap || []).map(([x, y]) => [x, y]);
  return { points, view: { ...VIEW }, seed: 0, hidden: ["prior"], panels: [{ method: "gp" }, { method: "laplace" }] };
}

async function load() {
  const packed = location.hash.slice(1);
  if (!packed) { take(defaults()); room.preset = "gap"; showPreset(); current = ""; return; }
  try {
    take(checked(await unpack(packed)));
    current = packed;
    warn("");
  } catch (error) {
    if (!(error instanceof StateError)) throw error;
    take(defaults());
    warn(error.kind === "newer" ? text.newer : text.malformed);
  }
}

// ---- controls

function showAll() {
  showPoints();
  showPreset();
  $("seed").value = room.seed;
  for (const box of document.querySelectorAll("#layers input")) box.checked = room.layers[box.name];
}

function showPreset() {
  for (const button of $("presets").children) button.setAttribute("aria-pressed", String(button.value === room.preset));
}

function showPoints() {
  if (document.activeElement !== $("points")) $("points").value = room.points.map(([x, y]) => `${x}, ${y}`).join("\n");
}

function open(state) {
  const panel = new Panel(room, state, () => remember(true), () => {
    room.panels = room.panels.filter((one) => one !== panel);
    panel.close();
    panel.element.remove();
    counted();
    $("add").focus();
    remember(true);
  });
  room.panels.push(panel);
  $("panels").append(panel.element);
  counted();
  return panel;
}

function counted() {
  for (const one of room.panels) one.alone(room.panels.length === 1);
  $("panels").dataset.count = room.panels.length;
  $("add").hidden = room.panels.length >= MOST_PANELS;
}

function fitView() {
  room.view = { ...VIEW };
  for (const [x, y] of room.points) {
    room.view.x0 = Math.min(room.view.x0, x); room.view.x1 = Math.max(room.view.x1, x);
    room.view.y0 = Math.min(room.view.y0, y); room.view.y1 = Math.max(room.view.y1, y);
  }
  const out = room.points.some(([x, y]) => x < VIEW.x0 || x > VIEW.x1 || y < VIEW.y0 || y > VIEW.y1);
  const inside = room.points.length > 1 && room.points.every(([x, y]) => Math.abs(x) < 1 && Math.abs(y) < 0.6);
  if (out || inside) {
    const span = (k) => room.points.reduce(([a, b], p) => [Math.min(a, p[k]), Math.max(b, p[k])], [Infinity, -Infinity]);
    const [xa, xb] = span(0), [ya, yb] = span(1);
    const mx = 0.35 * (xb - xa) || 1, my = 0.35 * (yb - ya) || 1;
    const r = (v, m) => round(v, 100 * m);
    room.view = { x0: r(xa - mx, mx), x1: r(xb + mx, mx), y0: r(ya - my, my), y1: r(yb + my, my) };
  }
}

function build() {
  for (const name of Object.keys(room.facts.presets)) {
    const button = document.createElement("button");
    button.type = "button";
    button.value = name;
    button.textContent = text.presets[name] || name;
    button.addEventListener("click", () => {
      room.points = room.facts.presets[name].map(([x, y]) => [x, y]);
      room.selected = -1;
      room.view = { ...VIEW };
      room.changed();
      room.preset = name;
      showPreset();
      room.settle();
    });
    $("presets").append(button);
  }
  for (const name of LAYERS) {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", name });
    const swatch = document.createElement("span");
    swatch.className = `swatch ${name}`;
    label.append(box, swatch, text.layers[name]);
    box.addEventListener("change", () => { room.layers[name] = box.checked; room.draw(); remember(true); });
    $("layers").append(label);
  }
  $("clear").addEventListener("click", () => { room.points = []; room.selected = -1; room.changed(); room.settle(); });
  $("fit").addEventListener("click", () => { fitView(); room.changed(); room.settle(); });
  $("seed").addEventListener("change", () => {
    if (!$("seed").checkValidity() || $("seed").value === "") return;
    room.seed = Number($("seed").value);
    room.refit();
    remember(true);
  });
  $("add").addEventListener("click", () => {
    const used = new Set(room.panels.map((panel) => panel.method));
    const wanted = ["hmc", "mc-dropout", "linear", "nngp", "deep-ensemble"].find((name) => !used.has(name));
    const panel = open({ method: wanted || "gp" });
    panel.fit();
    panel.focus();
    remember(true);
  });
  $("distances").addEventListener("click", () => {
    room.comparing = !room.comparing;
    $("distances").setAttribute("aria-pressed", String(room.comparing));
    for (const panel of room.panels) panel.far.textContent = "";
    if (room.comparing && !room.panels.some((panel) => ["hmc", "nuts"].includes(panel.method)) && room.panels.length < MOST_PANELS) {
      open({ method: "hmc" }).fit();
      remember(true);
    }
    room.askDistances();
  });
  $("play").addEventListener("click", () => {
    room.playing = !room.playing;
    $("play").setAttribute("aria-pressed", String(room.playing));
    $("play").textContent = room.playing ? text.pause : text.play;
    for (const panel of room.panels) panel.askPath();
    if (room.playing) requestAnimationFrame(animate);
    else { for (const panel of room.panels) panel.plane.curves = null; room.draw(); }
  });
  $("points").addEventListener("change", readPoints);
  $("link").addEventListener("click", async () => {
    await write(false);
    const address = `${location.origin}/#${await pack(room.state())}`;
    try { await navigator.clipboard.writeText(address); say(text.linkCopied); note(text.linkCopied); }
    catch { note(text.linkFailed); }
  });
  $("save").addEventListener("click", () => {
    const content = JSON.stringify({ doxa_studio: 1, state: room.state() }, null, 1);
    const anchor = document.createElement("a");
    anchor.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
    anchor.download = "doxa-studio.json";
    anchor.click();
    setTimeout(() => URL.revokeObjectURL(anchor.href), 1000);
  });
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", async () => {
    const file = $("file").files[0];
    $("file").value = "";
    if (!file) return;
    try {
      if (file.size > 1e6) throw new StateError("malformed");
      const found = JSON.parse(await file.text());
      if (found.doxa_studio > 1) throw new StateError("newer");
      take(checked(found.state));
      warn("");
      remember(true);
    } catch (error) { warn(error.kind === "newer" ? text.newer : text.malformed); }
  });
  $("python-close").addEventListener("click", () => $("python").close());
  $("python-copy").addEventListener("click", async () => {
    await navigator.clipboard.writeText($("python-text").textContent).catch(() => {});
    $("python-copy").textContent = text.copied;
    setTimeout(() => { $("python-copy").textContent = text.copy; }, 1500);
  });
  $("orders-show").addEventListener("click", () => {
    const shown = $("orders-body").hidden;
    $("orders-body").hidden = !shown;
    $("orders-show").setAttribute("aria-expanded", String(shown));
    $("orders-show").textContent = shown ? text.ordersHide : text.ordersShow;
    if (shown) askOrders();
  });
  dark.addEventListener("change", () => room.draw());
  addEventListener("popstate", load);
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== current) load(); });
}

function note(message) {
  $("state").textContent = message;
  setTimeout(() => { if ($("state").textContent === message) $("state").textContent = text.connected; }, 4000);
}

function readPoints() {
  const found = [];
  const lines = $("points").value.split("\n");
  for (let i = 0; i < lines.length; i++) {
    if (!lines[i].trim()) continue;
    const cells = lines[i].trim().split(/[\s,;]+/).map(Number);
    if (cells.length !== 2 || !cells.every((v) => finite(v))) { $("points-said").textContent = text.pointsWrong(i + 1); return; }
    found.push(cells);
  }
  if (found.length > room.facts.most_points) { $("points-said").textContent = text.most(room.facts.most_points); return; }
  $("points-said").textContent = "";
  room.points = found;
  room.selected = -1;
  fitView();
  room.changed();
  remember(true);
}

// ---- draws that move

let last = 0;
function animate(now) {
  if (!room.playing) return;
  requestAnimationFrame(animate);
  if (calm.matches && now - last < 900) return;
  if (now - last < 15) return;
  last = now;
  for (const panel of room.panels) { panel.advance(now, calm.matches); panel.plane.draw(); }
}

// ---- which polynomial?

function askOrders() {
  const content = { points: room.points, method: "linear", settings: {}, seed: room.seed, low: room.view.x0, high: room.view.x1 };
  room.link.ask("orders", "orders", content, (kind, found) => {
    if (kind === "done") drawOrders(found);
    else if (kind === "problem") { $("orders-chart").replaceChildren(); $("orders-said").textContent = found.message; }
  });
}

function drawOrders({ degrees, probability, log_evidence: evidence, grid, mean }) {
  const make = (name, attributes, inner = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = inner;
    return element;
  };
  const width = 760, height = 190, gap = width / degrees.length;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const best = probability.indexOf(Math.max(...probability));
  const curves = () => {
    const { x0, x1, y0, y1 } = room.view;
    const at = (x, y) => [(width * (x - x0)) / (x1 - x0), (height * (y1 - y)) / (y1 - y0)].map((v) => v.toFixed(1));
    const plot = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    mean.forEach((f, i) => {
      if (probability[i] < 0.01) return;
      const points = f.map((y, j) => at(grid[j], Math.max(y0 - (y1 - y0), Math.min(y1 + (y1 - y0), y))).join(","));
      plot.append(make("polyline", { class: "curve", points: points.join(" "), "stroke-opacity": 0.15 + 0.85 * probability[i] }));
    });
    for (const [x, y] of room.points) {
      const [cx, cy] = at(x, y);
      plot.append(make("circle", { class: "dot", cx, cy, r: 4 }));
    }
    plot.append(make("rect", { class: "frame", x: 0.5, y: 0.5, width: width - 1, height: height - 1, rx: 8 }));
    return plot;
  };
  svg.setAttribute("aria-label", text.degree(degrees[best], probability[best], evidence[best]));
  degrees.forEach((k, i) => {
    const x = i * gap + 0.18 * gap, w = 0.64 * gap, h = 118 * probability[i];
    svg.append(make("rect", { class: "track", x, y: 24, width: w, height: 118, rx: 5 }));
    const bar = make("rect", { class: "bar", x, y: 142 - h, width: w, height: h, rx: Math.min(5, h / 2) });
    bar.append(make("title", {}, text.degree(k, probability[i], evidence[i])));
    svg.append(bar);
    svg.append(make("text", { x: x + w / 2, y: 16, "text-anchor": "middle" }, `${(100 * probability[i]).toFixed(0)} %`));
    svg.append(make("text", { x: x + w / 2, y: 160, "text-anchor": "middle" }, `${text.axis} ${k}`));
    svg.append(make("text", { x: x + w / 2, y: 178, "text-anchor": "middle" }, evidence[i].toFixed(1).replace("-", "−")));
  });
  $("orders-chart").replaceChildren(svg, curves());
  $("orders-said").textContent = text.degree(degrees[best], probability[best], evidence[best]);
}

// ---- start

$("state").textContent = text.connecting;
room.link = new Link(
  (facts) => {
    room.facts = facts;
    $("state").textContent = text.connected;
    showRooms($("rooms"), room.link.rooms, "functions");
    build();
    load();
  },
  (state, message) => {
    if (state === "lost") { $("state").textContent = text.lost; $("state").classList.add("lost"); }
    else if (state === "refused") warn(message);
  },
);
window.doxaStudio = Object.assign(room, { take, checked }); // for tests, and for the curious
