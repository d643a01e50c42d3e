// A room in which points that all panels share are fitted, with a method in each panel.
import { Address, say, warn } from "/pages/address.js";
import { round } from "/pages/axes.js";
import { Link } from "/pages/link.js";
import { $, dark, fill, finite, showRooms } from "/pages/page.js";
import { StateError } from "/pages/state.js";
import { text } from "/pages/strings.js";
import { Tour } from "/pages/tour.js";

const MOST_PANELS = 4;
const NETWORK = { depth: 1, width: 50, activation: "tanh", prior: 2, prior_kind: "fan-in" };

export class Room {
  // `Panel` is the class of the panels, `home` the view without points, `next` the methods that new
  // panels start with.
  constructor(name, Panel, home, next) {
    Object.assign(this, { name, Panel, home, next });
    this.facts = null;
    this.network = NETWORK; // of a new panel
    this.link = null;
    this.panels = [];
    this.points = [];
    this.selected = -1;
    this.view = { ...home };
    this.seed = 0;
    this.preset = null;
    this.address = new Address(this, name);
  }

  start() {
    fill();
    $("state").textContent = text.connecting;
    const facts = (found, all) => {
      this.facts = found;
      $("state").textContent = text.connected;
      showRooms(this.name, all);
      this.address.tour = new Tour(this.address, all.lessons.lessons);
      this.build();
      this.address.listen();
      dark.addEventListener("change", () => this.draw());
      this.address.load();
    };
    const state = (kind, message) => {
      if (kind === "lost") { $("state").textContent = text.lost; $("state").classList.add("lost"); }
      else if (kind === "refused") warn(message);
    };
    this.link = new Link(facts, state, this.name);
  }

  draw() { for (const panel of this.panels) panel.plane.draw(); }

  // ---- points

  add(x, y) {
    if (this.points.length >= this.facts.most_points) { say(text.most(this.facts.most_points)); return -1; }
    this.points.push(this.point(x, y));
    this.selected = this.points.length - 1;
    say(text.added(x, y));
    this.changed();
    return this.selected;
  }

  point(x, y) { return [x, y]; }

  moveTo(i, x, y) {
    if (!this.points[i] || (this.points[i][0] === x && this.points[i][1] === y)) return;
    this.points[i] = [x, y, ...this.points[i].slice(2)];
    this.changed();
  }

  remove(i) {
    this.points.splice(i, 1);
    this.selected = -1;
    say(text.removed(this.points.length));
    this.changed();
    this.settle();
  }

  select(i) { this.selected = i; this.draw(); }

  saySelected() {
    const [x, y] = this.points[this.selected];
    say(text.selected(this.selected + 1, this.points.length, x, y));
  }

  sayCross(x, y) { say(text.cross(x, y)); }

  changed() {
    this.preset = null;
    this.showPreset();
    this.draw();
    this.refit();
    this.address.remember(false);
  }

  settle() { this.showPoints(); this.address.remember(true); }

  refit() { for (const panel of this.panels) panel.fit(); }

  // A panel has its last answer.
  settled() {}

  // ---- state

  state() {
    return { points: this.points, view: this.view, seed: this.seed, panels: this.panels.map((panel) => panel.state()) };
  }

  checkedCommon(found, isPoint) {
    const bad = () => { throw new StateError("malformed"); };
    if (!found || typeof found !== "object" || !Array.isArray(found.points)) bad();
    const points = found.points;
    if (points.length > this.facts.most_points || !points.every((p) => Array.isArray(p) && isPoint(p))) bad();
    const view = found.view || this.home;
    if (![view.x0, view.x1, view.y0, view.y1].every((v) => finite(v)) || view.x0 >= view.x1 || view.y0 >= view.y1) bad();
    const panels = found.panels;
    if (!Array.isArray(panels) || !panels.length || panels.length > MOST_PANELS) bad();
    const known = new Set(this.facts.methods.map((m) => m.name));
    for (const panel of panels) {
      if (!panel || typeof panel !== "object" || !known.has(panel.method)) bad();
      if (panel.settings !== undefined && (typeof panel.settings !== "object" || panel.settings === null)) bad();
    }
    if (found.seed !== undefined && !(Number.isInteger(found.seed) && found.seed >= 0 && found.seed < 2 ** 31)) bad();
    return { points: points.map((p) => [...p]), view: { ...view }, panels, seed: found.seed || 0 };
  }

  takeCommon(state) {
    this.points = state.points;
    this.view = state.view;
    this.seed = state.seed;
    this.selected = -1;
    this.preset = null;
    for (const panel of this.panels) panel.close();
    this.panels = [];
    $("panels").replaceChildren();
    for (const one of state.panels) this.open(one);
    this.showPoints();
    this.showPreset();
    $("seed").value = this.seed;
    this.refit();
  }

  // ---- panels and controls

  open(state) {
    const panel = new this.Panel(this, state, () => this.address.remember(true), () => {
      this.panels = this.panels.filter((one) => one !== panel);
      panel.close();
      panel.element.remove();
      this.counted();
      $("add").focus();
      this.address.remember(true);
    });
    this.panels.push(panel);
    $("panels").append(panel.element);
    this.counted();
    return panel;
  }

  counted() {
    for (const one of this.panels) one.alone(this.panels.length === 1);
    $("panels").dataset.count = this.panels.length;
    $("add").hidden = this.full;
  }

  get full() { return this.panels.length >= MOST_PANELS; }

  showPreset() {
    for (const button of $("presets").children) button.setAttribute("aria-pressed", String(button.value === this.preset));
  }

  showPoints() {
    if (document.activeElement !== $("points")) $("points").value = this.points.map((p) => this.line(p)).join("\n");
  }

  line(point) { return point.join(", "); }

  fitView() {
    const home = this.home;
    this.view = { ...home };
    for (const [x, y] of this.points) {
      this.view.x0 = Math.min(this.view.x0, x); this.view.x1 = Math.max(this.view.x1, x);
      this.view.y0 = Math.min(this.view.y0, y); this.view.y1 = Math.max(this.view.y1, y);
    }
    const out = this.points.some(([x, y]) => x < home.x0 || x > home.x1 || y < home.y0 || y > home.y1);
    const inside = this.points.length > 1 && this.points.every(([x, y]) => Math.abs(x) < home.x1 / 5 && Math.abs(y) < home.y1 / 5);
    if (!out && !inside) return;
    const span = (k) => this.points.reduce(([a, b], p) => [Math.min(a, p[k]), Math.max(b, p[k])], [Infinity, -Infinity]);
    const [xa, xb] = span(0), [ya, yb] = span(1);
    const mx = 0.35 * (xb - xa) || 1, my = 0.35 * (yb - ya) || 1;
    const r = (v, m) => round(v, 100 * m);
    this.view = { x0: r(xa - mx, mx), x1: r(xb + mx, mx), y0: r(ya - my, my), y1: r(yb + my, my) };
  }

  // A button for each preset; `use` takes its points.
  buildPresets(use) {
    for (const [name, content] of Object.entries(this.facts.presets)) {
      const button = Object.assign(document.createElement("button"), { type: "button", value: name, textContent: text.presets[name] || name });
      button.addEventListener("click", () => {
        use(content);
        this.selected = -1;
        this.view = { ...this.home };
        this.changed();
        this.preset = name;
        this.showPreset();
        this.settle();
      });
      $("presets").append(button);
    }
  }

  build() {
    $("clear").addEventListener("click", () => { this.points = []; this.selected = -1; this.changed(); this.settle(); });
    $("fit").addEventListener("click", () => { this.fitView(); this.changed(); this.settle(); });
    $("seed").addEventListener("change", () => {
      if (!$("seed").checkValidity() || $("seed").value === "") return;
      this.seed = Number($("seed").value);
      this.refit();
      this.address.remember(true);
    });
    $("add").addEventListener("click", () => {
      const used = new Set(this.panels.map((panel) => panel.method));
      const panel = this.open({ method: this.next.find((name) => !used.has(name)) || this.next[0] });
      panel.fit();
      panel.focus();
      this.address.remember(true);
    });
    $("points").addEventListener("change", () => this.readPoints());
  }

  // The points of a pasted list; `read` gives a point of the numbers of a line, or null.
  readPoints() {
    const found = [];
    const lines = $("points").value.split("\n");
    for (let i = 0; i < lines.length; i++) {
      if (!lines[i].trim()) continue;
      const point = this.read(lines[i].trim().split(/[\s,;]+/).map(Number));
      if (!point) { $("points-said").textContent = this.wrongLine(i + 1); return; }
      found.push(point);
    }
    if (found.length > this.facts.most_points) { $("points-said").textContent = text.most(this.facts.most_points); return; }
    $("points-said").textContent = "";
    this.points = found;
    this.selected = -1;
    this.fitView();
    this.changed();
    this.address.remember(true);
  }

  read(cells) { return cells.length === 2 && cells.every((v) => finite(v)) ? cells : null; }

  wrongLine(line) { return text.pointsWrong(line); }

  // The room started without a state in its address.
  started() {}
}
