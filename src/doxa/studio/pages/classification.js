// The room "Classes": points of two to four classes in a plane, and a classifier in each panel.
import { say } from "/pages/address.js";
import { CLASS_COLOURS, ClassPlane, MAPS, paint, shape } from "/pages/classplane.js";
import { Panel, element } from "/pages/panel.js";
import { Room } from "/pages/room.js";
import { $, colours, finite } from "/pages/page.js";
import { StateError } from "/pages/state.js";
import { text } from "/pages/strings.js";

const LAYERS = ["draws", "boundary", "marks"];
const VIEW = { x0: -4.8, x1: 4.8, y0: -3, y1: 3 };
const NEXT = ["hmc", "deep-ensemble", "mc-dropout", "svgd", "map", "laplace"];

class ClassPanel extends Panel {
  makePlane() { return new ClassPlane(this.canvas, this.room); }

  planeLabel() { return text.classPlane(this.method, this.room.points.length); }

  // The value under the pointer, and the four maps as buttons.
  below() {
    this.readout = element("p", { className: "readout muted" });
    this.maps = MAPS.map((name) => {
      const canvas = element("canvas");
      canvas.setAttribute("aria-hidden", "true");
      const button = element("button", { type: "button", className: "map", value: name }, canvas, element("span", { textContent: text.maps[name] }));
      button.addEventListener("click", () => this.room.useMap(name));
      return button;
    });
    const maps = element("div", { className: "maps" }, ...this.maps);
    maps.setAttribute("role", "group");
    maps.setAttribute("aria-label", text.mapsLabel(this.name.replace("panel-", "")));
    return [this.readout, maps];
  }

  receive(kind, found, last, wait) {
    super.receive(kind, found, last, wait);
    this.showMaps();
    this.room.showAmbiguity();
  }

  showMaps() {
    const data = this.plane.data, with_ = this.room.colours();
    for (const button of this.maps) {
      button.setAttribute("aria-pressed", String(button.value === this.room.map));
      button.disabled = !(data && data.entropy);
      const canvas = button.firstChild;
      if (button.disabled) { canvas.width = 49; canvas.height = 31; continue; }
      const image = paint(data, button.value, with_);
      canvas.width = image.width;
      canvas.height = image.height;
      canvas.getContext("2d").drawImage(image, 0, 0);
    }
    this.showValue();
  }

  // The numbers of the grid point nearest to the pointer.
  showValue() {
    const at = this.room.probed ? this.plane.cell(...this.room.probed) : -1;
    if (at < 0) { this.readout.textContent = text.readoutNone; return; }
    const { x, y, probability, entropy, aleatoric, epistemic } = this.plane.data;
    this.readout.textContent = text.readout(x[at % x.length], y[Math.floor(at / x.length)], probability.map((p) => p[at]), entropy[at], aleatoric[at], epistemic[at]);
  }
}

class Classes extends Room {
  constructor() {
    super("classification", ClassPanel, VIEW, NEXT);
    this.network = { ...this.network, prior: 4 };
    this.classes = 2;
    this.kind = 0; // the class of new points
    this.map = "probability";
    this.probed = null;
    this.layers = { draws: true, boundary: true, marks: false };
  }

  colours() {
    return colours(["muted", "grid", "card", "point", "entropy", "epistemic", "aleatoric", ...CLASS_COLOURS]);
  }

  asked() {
    const { points, classes, view, seed } = this;
    return { points, classes, seed, ...view };
  }

  point(x, y) { return [x, y, this.kind]; }

  line([x, y, kind]) { return `${x}, ${y}, ${kind + 1}`; }

  read(cells) {
    const [x, y, kind] = cells;
    return cells.length === 3 && finite(x) && finite(y) && Number.isInteger(kind) && kind >= 1 && kind <= this.classes ? [x, y, kind - 1] : null;
  }

  wrongLine(line) { return text.classPointsWrong(line, this.classes); }

  saySelected() {
    const [x, y, kind] = this.points[this.selected];
    say(`${text.selected(this.selected + 1, this.points.length, x, y)}, ${text.className(kind + 1)}`);
  }

  draw() { super.draw(); for (const panel of this.panels) panel.showMaps(); }

  changed() { this.limitClasses(); super.changed(); }

  // Values at a place, in all panels.
  probe(x, y) {
    this.probed = x === null ? null : [x, y];
    for (const panel of this.panels) { panel.plane.draw(); panel.showValue(); }
  }

  sayCross(x, y) {
    this.probe(x, y);
    say([text.cross(x, y), ...this.panels.map((panel) => `${panel.method}: ${panel.readout.textContent}`)].join(". "));
  }

  useMap(name) {
    this.map = name;
    for (const button of $("maps").children) button.setAttribute("aria-pressed", String(button.value === name));
    this.showLegend();
    this.draw();
    this.address.remember(true);
  }

  // The class of new points, and of the selected one.
  useClass(kind) {
    this.kind = kind;
    for (const button of $("kinds").children) button.setAttribute("aria-pressed", String(Number(button.value) === kind));
    say(text.classChosen(kind + 1));
    if (this.selected < 0 || this.points[this.selected][2] === kind) return;
    this.points[this.selected][2] = kind;
    this.changed();
    this.settle();
  }

  // There are at least as many classes as points have.
  limitClasses() {
    const used = 1 + Math.max(1, ...this.points.map((p) => p[2]));
    for (const option of $("classes").options) option.disabled = Number(option.value) < used;
  }

  showKinds() {
    $("classes").value = this.classes;
    this.limitClasses();
    this.kind = Math.min(this.kind, this.classes - 1);
    const found = this.colours();
    $("kinds").replaceChildren(...Array.from({ length: this.classes }, (_, kind) => {
      const icon = element("canvas", { width: 28, height: 28 });
      icon.setAttribute("aria-hidden", "true");
      const c = icon.getContext("2d");
      shape(c, kind, 14, 14, 8.5);
      c.fillStyle = found[CLASS_COLOURS[kind]];
      c.fill();
      const button = element("button", { type: "button", value: kind }, icon, text.className(kind + 1));
      button.setAttribute("aria-pressed", String(kind === this.kind));
      button.addEventListener("click", () => { this.selected = -1; this.useClass(kind); });
      return button;
    }));
  }

  showLegend() {
    const legend = $("legend");
    if (this.map === "probability") { legend.replaceChildren(text.legendProbability); return; }
    const ramp = element("span", { className: `ramp ${this.map}` });
    legend.replaceChildren("0", ramp, text.legendNats(Math.log(this.classes), this.classes), element("span", { textContent: text.mapSays[this.map] }));
  }

  showAmbiguity() {
    if ($("ambiguity-body").hidden) return;
    $("ambiguity-charts").replaceChildren(...this.panels.filter((p) => p.plane.data && p.plane.data.ambiguity).map(chart));
  }

  state() {
    return { ...super.state(), classes: this.classes, map: this.map, hidden: LAYERS.filter((name) => !this.layers[name]), ambiguity: !$("ambiguity-body").hidden };
  }

  checked(found) {
    const classes = found && found.classes;
    const whole = Number.isInteger(classes) && classes >= 2 && classes <= this.facts.most_classes;
    const state = this.checkedCommon(found, (p) => whole && p.length === 3 && finite(p[0]) && finite(p[1]) && Number.isInteger(p[2]) && p[2] >= 0 && p[2] < classes);
    if (!whole) throw new StateError("malformed");
    const hidden = Array.isArray(found.hidden) ? found.hidden.filter((name) => LAYERS.includes(name)) : [];
    return { ...state, classes, hidden, map: MAPS.includes(found.map) ? found.map : "probability", ambiguity: found.ambiguity === true };
  }

  take(state) {
    this.classes = state.classes;
    this.map = state.map;
    this.kind = 0;
    this.probed = null;
    for (const name of LAYERS) this.layers[name] = !state.hidden.includes(name);
    for (const box of document.querySelectorAll("#layers input")) box.checked = this.layers[box.name];
    for (const button of $("maps").children) button.setAttribute("aria-pressed", String(button.value === this.map));
    this.points = state.points;
    this.openAmbiguity(state.ambiguity);
    this.showKinds();
    this.showLegend();
    this.takeCommon(state);
  }

  defaults() {
    const { points, classes } = this.facts.presets.moons;
    return { points: points.map((p) => [...p]), classes, view: { ...VIEW }, seed: 0, hidden: ["marks"], map: "probability", ambiguity: false, panels: [{ method: "nngp" }, { method: "laplace" }] };
  }

  started() { this.preset = "moons"; this.showPreset(); }

  openAmbiguity(yes) {
    $("ambiguity-body").hidden = !yes;
    $("ambiguity-show").setAttribute("aria-expanded", String(yes));
    $("ambiguity-show").textContent = yes ? text.ambiguityHide : text.ambiguityShow;
    this.showAmbiguity();
  }

  build() {
    super.build();
    this.buildPresets(({ points, classes }) => {
      this.points = points.map((p) => [...p]);
      this.classes = classes;
      this.showKinds();
      this.showLegend();
    });
    for (let n = 2; n <= this.facts.most_classes; n++) $("classes").append(element("option", { value: n, textContent: n }));
    $("classes").addEventListener("change", () => {
      this.classes = Number($("classes").value);
      this.showKinds();
      this.showLegend();
      this.changed();
      this.settle();
    });
    for (const name of MAPS) {
      const button = element("button", { type: "button", value: name, textContent: text.maps[name] });
      button.addEventListener("click", () => this.useMap(name));
      $("maps").append(button);
    }
    for (const name of LAYERS) {
      const box = element("input", { type: "checkbox", name });
      box.addEventListener("change", () => { this.layers[name] = box.checked; this.draw(); this.address.remember(true); });
      $("layers").append(element("label", {}, box, text.classLayers[name]));
    }
    $("ambiguity-show").addEventListener("click", () => { this.openAmbiguity($("ambiguity-body").hidden); this.address.remember(true); });
  }
}

// The parts of the entropy by the distance to the nearest point, one upon the other.
function chart(panel) {
  const { ambiguity, classes, aleatoric, epistemic } = panel.plane.data;
  const svg = (name, attributes, inner = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = inner;
    return made;
  };
  const width = 480, height = 190, left = 34, bottom = 30, top = 8, right = 10;
  const far = ambiguity.distance.at(-1), most = Math.log(classes);
  const x = (d) => left + ((width - left - right) * d) / far, y = (v) => top + (height - top - bottom) * (1 - v / most);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": text.ambiguityChart(panel.method) });
  const area = (name, low, high) => plot.append(svg("polygon", {
    class: name,
    points: [...high.map((v, i) => [x(ambiguity.distance[i]), y(v)]), ...low.map((v, i) => [x(ambiguity.distance[i]), y(v)]).reverse()].map((p) => p.map((v) => v.toFixed(1)).join(",")).join(" "),
  }));
  const sum = ambiguity.aleatoric.map((v, i) => v + ambiguity.epistemic[i]);
  for (const v of [0, most / 2, most]) {
    plot.append(svg("line", { class: "base", x1: left, x2: width - right, y1: y(v), y2: y(v) }));
    plot.append(svg("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, v.toFixed(2)));
  }
  area("aleatoric", ambiguity.aleatoric.map(() => 0), ambiguity.aleatoric);
  area("epistemic", ambiguity.aleatoric, sum);
  for (const d of [0, far / 2, far]) plot.append(svg("text", { x: x(d), y: height - 16, "text-anchor": d ? (d === far ? "end" : "middle") : "start" }, d.toFixed(1)));
  plot.append(svg("text", { x: (left + width) / 2, y: height - 2, "text-anchor": "middle" }, text.ambiguityAxis));
  const said = Object.entries(ambiguity.most).map(([name, { at, distance }]) =>
    element("li", { textContent: text.ambiguityMost[name](aleatoric[at], epistemic[at], distance) }));
  return element("figure", {}, element("figcaption", { textContent: panel.method }), plot, element("ul", { className: "muted" }, ...said));
}

const room = new Classes();
room.start();
window.doxaStudio = room; // for tests, and for the curious
