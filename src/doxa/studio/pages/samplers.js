// The room "Samplers": a target, a start and a clock that all panels share, a sampler in each.
import { Address, note, say, warn } from "/pages/address.js";
import { Chain } from "/pages/chain.js";
import { Link } from "/pages/link.js";
import { fill, showRooms } from "/pages/page.js";
import { StateError } from "/pages/state.js";
import { text } from "/pages/strings.js";
import { Tour } from "/pages/tour.js";

const $ = (id) => document.getElementById(id);
const MOST_PANELS = 4;
const LAYERS = ["density", "draws", "trace", "marginals"];
const SPEEDS = [0.5, 1, 2, 5, 10, 25, 50, 100, 1000];
const DEFAULT_SPEED = 5;
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

fill();

const room = {
  facts: null, link: null, panels: [], playing: false, time: 0, picture: null, calm,
  target: "banana", text: "", view: null, start: null, chains: 1, spread: 0, seed: 0,
  speed: DEFAULT_SPEED, click: "start",
  layers: Object.fromEntries(LAYERS.map((name) => [name, true])),

  colours() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    const names = ["font", "muted", "grid", "card", "curve", "point", "accept", "reject", "gradient", "full", "heat", "line", "ink"];
    return { dark: dark.matches, chains: Array.from({ length: 8 }, (_, k) => read(`c${k}`)), ...Object.fromEntries(names.map((n) => [n, read(n)])) };
  },

  draw() { for (const panel of this.panels) panel.draw(); },

  // A point that was clicked, or chosen by keys.
  chosen(x, y, moves) {
    if (moves && this.time > 0) {
      for (const panel of this.panels) panel.change("restart", [x, y]);
      say(text.movedTo(x, y));
    } else {
      this.start = [x, y];
      this.time = 0;
      for (const panel of this.panels) panel.begin();
      say(text.startedAt(x, y));
    }
    this.shown();
    address.remember(true);
  },

  sayCross(x, y) { say(text.cross(x, y)); },

  remember(push) { address.remember(push); },

  // The step that is shown, once it has changed.
  shown() {
    const n = Math.floor(this.time), stages = new Set(this.panels.map((p) => p.stage(n)).filter(Boolean));
    $("step").textContent = text.stepOf(n, this.panels.length === 1 ? [...stages][0] : "");
    $("back").disabled = $("rewind").disabled = n === 0;
    this.draw();
  },

  shared() {
    return { target: this.target, text: this.text, chains: this.chains, start: this.start, spread: this.spread, seed: this.seed };
  },

  state() {
    const found = {
      target: this.target, start: this.start, chains: this.chains, spread: this.spread, seed: this.seed,
      at: Math.floor(this.time), panels: this.panels.map((panel) => panel.state()),
    };
    if (this.target === this.facts.typed) found.text = this.text;
    if (this.speed !== DEFAULT_SPEED) found.speed = this.speed;
    if (String(this.view) !== String(this.facts.targets[this.target].view)) found.view = this.view;
    const hidden = LAYERS.filter((name) => !this.layers[name]);
    if (hidden.length) found.hidden = hidden;
    return found;
  },

  checked(found) {
    const bad = () => { throw new StateError("malformed"); };
    const whole = (v, low, high) => Number.isInteger(v) && v >= low && v <= high;
    if (!found || typeof found !== "object" || Array.isArray(found)) bad();
    const { facts } = this, known = facts.targets[found.target];
    if (typeof found.target !== "string" || !Object.hasOwn(facts.targets, found.target)) bad();
    if (found.target === facts.typed && (typeof found.text !== "string" || found.text.length > 300)) bad();
    const point = (p) => Array.isArray(p) && p.length === 2 && p.every((v) => finite(v));
    const start = found.start === undefined ? known.start : found.start;
    if (!point(start)) bad();
    const view = found.view === undefined ? known.view : found.view;
    if (!Array.isArray(view) || view.length !== 4 || !view.every((v) => finite(v)) || view[0] >= view[1] || view[2] >= view[3]) bad();
    const { chains = 1, spread = 0, seed = 0, at = 0, speed = DEFAULT_SPEED, panels } = found;
    if (!whole(chains, 1, facts.most_chains) || !finite(spread, 0, 100) || !whole(seed, 0, 2 ** 31 - 1)) bad();
    if (!whole(at, 0, 2 * facts.length) || !SPEEDS.includes(speed)) bad();
    if (!Array.isArray(panels) || !panels.length || panels.length > MOST_PANELS) bad();
    for (const panel of panels) {
      const about = panel && typeof panel === "object" && facts.samplers.find((s) => s.name === panel.sampler);
      if (!about) bad();
      for (const part of ["settings", "initial"]) {
        const values = panel[part];
        if (values !== undefined && (typeof values !== "object" || values === null || Array.isArray(values))) bad();
      }
      if (panel.initial && !Object.values(panel.initial).every((v) => finite(v, 1e-9))) bad();
      if (panel.noise !== undefined && !finite(panel.noise, 0, 1000)) bad();
      const changes = panel.changes === undefined ? [] : panel.changes;
      if (!Array.isArray(changes) || changes.length > facts.most_changes) bad();
      let last = 1;
      for (const change of changes) {
        if (!Array.isArray(change) || change.length !== 3 || !whole(change[0], last, 2 * facts.length) || typeof change[1] !== "string") bad();
        if (change[1] === "restart" ? !point(change[2]) : !finite(change[2], 1e-9)) bad();
        last = change[0];
      }
    }
    const hidden = Array.isArray(found.hidden) ? found.hidden.filter((name) => LAYERS.includes(name)) : [];
    return { target: found.target, text: found.text || "", view: [...view], start: [...start], chains, spread, seed, at, speed, panels, hidden };
  },

  defaults() {
    const { view, start } = this.facts.targets.banana;
    return {
      target: "banana", text: "", view: [...view], start: [...start], chains: 1, spread: 0, seed: 0, at: 0,
      speed: DEFAULT_SPEED, hidden: [], panels: [{ sampler: "metropolis" }, { sampler: "hmc" }],
    };
  },

  take(state) {
    this.play(false);
    Object.assign(this, {
      target: state.target, text: state.text, view: [...state.view], start: [...state.start], chains: state.chains,
      spread: state.spread, seed: state.seed, speed: state.speed, time: state.at,
    });
    for (const name of LAYERS) this.layers[name] = !state.hidden.includes(name);
    for (const panel of this.panels) panel.close();
    this.panels = [];
    $("panels").replaceChildren();
    for (const one of state.panels) this.open(one);
    this.show();
    this.askTarget();
    this.shown();
  },

  open(state) {
    const panel = new Chain(this, state, () => {
      this.panels = this.panels.filter((one) => one !== panel);
      panel.close();
      panel.element.remove();
      this.counted();
      $("add").focus();
      address.remember(true);
    });
    this.panels.push(panel);
    $("panels").append(panel.element);
    this.counted();
    panel.begin();
    return panel;
  },

  counted() {
    for (const one of this.panels) one.alone(this.panels.length === 1);
    $("panels").dataset.count = this.panels.length;
    $("add").hidden = this.panels.length >= MOST_PANELS;
  },

  show() {
    for (const button of $("targets").children) button.setAttribute("aria-pressed", String(button.value === this.target));
    $("formula-form").hidden = this.target !== this.facts.typed;
    $("formula").value = this.text;
    for (const name of ["chains", "spread", "seed", "speed", "click"]) $(name).value = this[name];
    for (const box of document.querySelectorAll("#layers input")) box.checked = this.layers[box.name];
  },

  askTarget() {
    this.picture = null;
    const content = { target: this.target, text: this.text, view: this.view };
    this.link.ask("target", "target", content, (kind, found, last) => {
      if (!last) return;
      if (kind === "problem") { warn(found.message); return; }
      this.picture = found;
      this.draw();
    });
  },

  // Another target, start, number of chains or seed: all panels begin anew.
  anew() {
    this.time = 0;
    for (const panel of this.panels) panel.begin();
    this.shown();
    address.remember(true);
  },

  choose(target) {
    const { view, start } = this.facts.targets[target];
    Object.assign(this, { target, view: [...view], start: [...start] });
    if (target === this.facts.typed && !this.text) this.text = "-x**2/2 - (y - sin(2*x))**2";
    for (const panel of this.panels) panel.forTarget();
    warn("");
    this.show();
    this.askTarget();
    this.anew();
  },

  zoom(factor) {
    const [x0, x1, y0, y1] = this.view, wide = (factor * (x1 - x0)) / 2, high = (factor * (y1 - y0)) / 2;
    if (wide < 1e-3 || wide > 1e5) return;
    const x = (x0 + x1) / 2, y = (y0 + y1) / 2;
    this.view = [x - wide, x + wide, y - high, y + high].map((v) => Number(v.toPrecision(8)));
    this.askTarget();
    this.draw();
    address.remember(true);
  },

  // ---- the clock

  get last() { return Math.min(...this.panels.map((panel) => panel.frames.length)); },
  get over() { return this.panels.every((panel) => panel.ended && this.time >= panel.frames.length); },

  play(yes) {
    this.playing = yes;
    $("play").setAttribute("aria-pressed", String(yes));
    $("play").textContent = yes ? text.pauseChains : text.playChains;
    if (yes) { before = 0; requestAnimationFrame(tick); }
    else if (this.panels.length) {
      this.time = Math.floor(this.time);
      this.shown();
      address.remember(true);
    }
  },

  step(by) {
    if (this.playing) this.play(false);
    const to = Math.max(0, Math.floor(this.time) + by);
    this.goTo(to);
  },

  goTo(step) {
    this.time = step;
    for (const panel of this.panels) panel.ask();
    this.shown();
    say(text.sayStep(step, this.panels.map((panel) => panel.said(step)).join("; ")));
    address.remember(false);
  },
};

let before = 0;
function tick(now) {
  if (!room.playing) return;
  requestAnimationFrame(tick);
  const passed = before ? Math.min(0.25, (now - before) / 1000) : 0;
  before = now;
  const ready = Math.min(...room.panels.map((panel) => panel.ended ? Infinity : panel.frames.length));
  const most = Number.isFinite(ready) ? ready : Math.max(...room.panels.map((panel) => panel.frames.length));
  const to = Math.min(most, room.time + passed * room.speed);
  for (const panel of room.panels) panel.ask();
  if (to === room.time) {
    if (room.over) { room.play(false); say(text.ended); }
    return;
  }
  const jumps = Math.floor(to) !== Math.floor(room.time);
  room.time = to;
  if (jumps) room.shown();
  else if (!calm.matches) room.draw();
}

const address = new Address(room, "samplers");
const finite = (v, low = -1e6, high = 1e6) => typeof v === "number" && v >= low && v <= high;

// ---- controls

function build() {
  const option = (value, label) => Object.assign(document.createElement("option"), { value, textContent: label });
  for (const name of Object.keys(room.facts.targets)) {
    const button = Object.assign(document.createElement("button"), { type: "button", value: name, textContent: text.targets[name] || name });
    button.addEventListener("click", () => room.choose(name));
    $("targets").append(button);
  }
  for (const name of LAYERS) {
    const label = document.createElement("label");
    const box = Object.assign(document.createElement("input"), { type: "checkbox", name });
    label.append(box, text.planeLayers[name]);
    box.addEventListener("change", () => { room.layers[name] = box.checked; room.draw(); address.remember(true); });
    $("layers").append(label);
  }
  $("speed").append(...SPEEDS.map((v) => option(v, text.speeds(v))));
  $("click").append(...["start", "restart"].map((v) => option(v, text.clicks[v])));
  $("formula-help").textContent = text.formulaHelp(room.facts.functions);
  $("formula-form").addEventListener("submit", (event) => { event.preventDefault(); typed(); });
  $("formula").addEventListener("change", typed);
  for (const name of ["chains", "spread", "seed"]) {
    $(name).addEventListener("change", () => {
      if (!$(name).checkValidity() || $(name).value === "") return;
      room[name] = Number($(name).value);
      if (name === "chains" && room.chains > 1 && room.spread === 0) { room.spread = 1; room.show(); }
      room.anew();
    });
  }
  $("speed").addEventListener("change", () => { room.speed = Number($("speed").value); address.remember(true); });
  $("click").addEventListener("change", () => { room.click = $("click").value; });
  $("zoom-in").addEventListener("click", () => room.zoom(0.7));
  $("zoom-out").addEventListener("click", () => room.zoom(1 / 0.7));
  $("zoom-reset").addEventListener("click", () => {
    room.view = [...room.facts.targets[room.target].view];
    room.askTarget();
    address.remember(true);
  });
  $("play").addEventListener("click", () => room.play(!room.playing));
  $("back").addEventListener("click", () => room.step(-1));
  $("on").addEventListener("click", () => room.step(1));
  $("rewind").addEventListener("click", () => { room.play(false); room.goTo(0); });
  $("add").addEventListener("click", () => {
    const used = new Set(room.panels.map((panel) => panel.sampler));
    const wanted = ["nuts", "sgld", "svgd", "mala"].find((name) => !used.has(name));
    room.open({ sampler: wanted || "hmc" }).focus();
    address.remember(true);
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("python").open) return;
    if (event.target.matches("input:not([type=checkbox]), select, textarea")) return;
    if (event.key === " " && !event.target.matches("button, summary, input, a")) room.play(!room.playing);
    else if (event.key === ",") room.step(-1);
    else if (event.key === ".") room.step(1);
    else return;
    event.preventDefault();
  });
  dark.addEventListener("change", () => room.draw());
  address.listen();
}

function typed() {
  const given = $("formula").value.trim();
  if (!given || (given === room.text && room.picture)) return;
  room.text = given;
  warn("");
  room.askTarget();
  room.anew();
}

// ---- start

$("state").textContent = text.connecting;
room.link = new Link(
  (facts, all) => {
    room.facts = facts;
    $("state").textContent = text.connected;
    showRooms("samplers", all);
    address.tour = new Tour(address, all.lessons.lessons);
    build();
    address.load();
  },
  (state, message) => {
    if (state === "lost") { $("state").textContent = text.lost; $("state").classList.add("lost"); }
    else if (state === "refused") warn(message);
  },
  "samplers",
);
window.doxaStudio = Object.assign(room, { address, note }); // for tests, and for the curious
