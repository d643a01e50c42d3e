// The room "Functions": functions of one input, and a method in each panel.
import { Panel } from "/pages/panel.js";
import { Room } from "/pages/room.js";
import { $, calm, colours, finite } from "/pages/page.js";
import { text } from "/pages/strings.js";

const LAYERS = ["prior", "draws", "mean", "epistemic", "aleatoric"];
const VIEW = { x0: -5, x1: 5, y0: -3, y1: 3 };
const NEXT = ["hmc", "mc-dropout", "linear", "nngp", "deep-ensemble", "gp"];
const REFERENCES = ["hmc", "nuts"];

class Functions extends Room {
  constructor() {
    super("functions", Panel, VIEW, NEXT);
    this.playing = false;
    this.comparing = false;
    this.layers = Object.fromEntries(LAYERS.map((name) => [name, true]));
    this.noises = true; // the forms have the noise
  }

  colours() {
    return colours(["muted", "grid", "card", "curve", "draw", "prior", "point", "epistemic", "aleatoric"]);
  }

  asked() {
    const { points, view, seed } = this;
    return { points, seed, low: view.x0, high: view.x1 };
  }

  refit() {
    super.refit();
    if (!$("orders-body").hidden) askOrders();
  }

  settled() { this.askDistances(); }

  // With points, each panel is compared with the first one that samples by HMC or NUTS.
  askDistances() {
    const reference = this.panels.find((panel) => REFERENCES.includes(panel.method));
    if (!this.comparing || !reference || !this.points.length || !reference.settledOn) return;
    for (const panel of this.panels) {
      if (panel !== reference && panel.settledOn && !panel.far.textContent) panel.askDistance(reference);
    }
  }

  state() { return { ...super.state(), hidden: LAYERS.filter((name) => !this.layers[name]) }; }

  checked(found) {
    const state = this.checkedCommon(found, (p) => p.length === 2 && finite(p[0]) && finite(p[1]));
    const hidden = Array.isArray(found.hidden) ? found.hidden.filter((name) => LAYERS.includes(name)) : [];
    return { ...state, hidden };
  }

  take(state) {
    for (const name of LAYERS) this.layers[name] = !state.hidden.includes(name);
    for (const box of document.querySelectorAll("#layers input")) box.checked = this.layers[box.name];
    this.takeCommon(state);
  }

  defaults() {
    const points = (this.facts.presets.gap || []).map(([x, y]) => [x, y]);
    return { points, view: { ...VIEW }, seed: 0, hidden: ["prior"], panels: [{ method: "gp" }, { method: "laplace" }] };
  }

  started() { this.preset = "gap"; this.showPreset(); }

  build() {
    super.build();
    this.buildPresets((points) => { this.points = points.map(([x, y]) => [x, y]); });
    for (const name of LAYERS) {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", name });
      const swatch = document.createElement("span");
      swatch.className = `swatch ${name}`;
      label.append(box, swatch, text.layers[name]);
      box.addEventListener("change", () => { this.layers[name] = box.checked; this.draw(); this.address.remember(true); });
      $("layers").append(label);
    }
    $("distances").addEventListener("click", () => {
      this.comparing = !this.comparing;
      $("distances").setAttribute("aria-pressed", String(this.comparing));
      for (const panel of this.panels) panel.far.textContent = "";
      if (this.comparing && !this.panels.some((panel) => REFERENCES.includes(panel.method)) && !this.full) {
        this.open({ method: "hmc" }).fit();
        this.address.remember(true);
      }
      this.askDistances();
    });
    $("play").addEventListener("click", () => {
      this.playing = !this.playing;
      $("play").setAttribute("aria-pressed", String(this.playing));
      $("play").textContent = this.playing ? text.pause : text.play;
      for (const panel of this.panels) panel.askPath();
      if (this.playing) requestAnimationFrame(animate);
      else { for (const panel of this.panels) panel.plane.curves = null; this.draw(); }
    });
    $("orders-show").addEventListener("click", () => {
      const shown = $("orders-body").hidden;
      $("orders-body").hidden = !shown;
      $("orders-show").setAttribute("aria-expanded", String(shown));
      $("orders-show").textContent = shown ? text.ordersHide : text.ordersShow;
      if (shown) askOrders();
    });
  }
}

const room = new Functions();

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

room.start();
window.doxaStudio = room; // for tests, and for the curious
