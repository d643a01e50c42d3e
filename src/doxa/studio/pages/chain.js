// One panel: a sampler with its settings, the frames that the server has sent, and what the library
// says about the draws. It keeps and draws numbers, and computes none of them.
import { Scene } from "/pages/scene.js";
import { Series } from "/pages/series.js";
import { text } from "/pages/strings.js";

const AHEAD = 30; // frames that wait, at least
const TRACES = 400; // frames behind the shown one that keep their traces
let made = 0, named = 0;

const element = (name, properties = {}, ...children) => {
  const found = Object.assign(document.createElement(name), properties);
  if ("autocomplete" in found && !found.name) found.name = `field-${++named}`;
  found.append(...children);
  return found;
};

const shown = (v, digits = 3) => v === null || v === undefined ? "–" : String(Number(v.toPrecision(digits))).replace("-", "−");

export class Chain {
  constructor(room, state, remove) {
    this.room = room;
    this.name = `chain-${++made}`;
    this.version = 0;
    this.element = element("article", { className: "card panel chain" });
    this.empty();
    this.build(remove);
    this.take(state);
  }

  get about() { return this.room.facts.samplers.find((s) => s.name === this.sampler); }
  get controls() { return this.room.target === this.room.facts.network ? this.about.on_network : this.about.controls; }

  take(state) {
    this.sampler = state.sampler;
    this.settings = { ...(state.settings || this.about.start) };
    this.initial = { ...(state.initial || {}) };
    this.changes = (state.changes || []).map((change) => [...change]);
    this.noise = state.noise === undefined ? this.room.facts.noise : state.noise;
    this.select.value = this.sampler;
    this.equation.textContent = text.equations[this.sampler];
    this.sentences.textContent = text.sentences[this.sampler];
    this.form();
  }

  state() {
    const found = { sampler: this.sampler, settings: this.settings };
    if (Object.keys(this.initial).length) found.initial = this.initial;
    if (this.changes.length) found.changes = this.changes;
    if (this.about.noisy && this.noise !== this.room.facts.noise) found.noise = this.noise;
    return found;
  }

  recipe() {
    const found = { ...this.room.shared(), sampler: this.sampler, settings: this.settings, initial: this.initial, changes: this.changes };
    if (this.about.noisy) found.noise = this.noise;
    return found;
  }

  // Controls that the new target does not have are forgotten.
  forTarget() {
    this.initial = {};
    this.changes = [];
    this.form();
  }

  // ---- frames

  empty() {
    this.frames = [];
    this.summaries = [];
    this.starts = null;
    this.ended = false;
  }

  // Run from the first step on.
  begin() {
    this.empty();
    this.version += 1;
    this.problem("");
    this.asking = false;
    this.ask();
    this.draw();
  }

  ask() {
    const { room } = this, { length } = this.frames;
    const wanted = Math.max(Math.floor(room.time) + Math.max(AHEAD, Math.ceil(2 * Math.min(room.speed, 100))), AHEAD);
    if (this.asking || this.ended || this.failed || length >= wanted) return;
    this.asking = true;
    this.element.setAttribute("aria-busy", "true");
    const { version } = this;
    const content = { recipe: this.recipe(), done: length, count: Math.min(wanted - length, room.facts.most_frames) };
    room.link.ask(this.name, "frames", content, (kind, found, last) => {
      if (!last || version !== this.version) return; // an answer to what was asked before a change
      this.asking = false;
      if (kind === "problem") { this.problem(found.message); return; }
      if (found.done !== this.frames.length) { this.ask(); return; }
      if (found.starts) this.starts = found.starts;
      this.frames.push(...found.frames);
      this.summaries.push(...found.summaries);
      this.ended = found.ended;
      const old = Math.floor(room.time) - TRACES;
      for (let i = old - 1; i >= 0 && this.frames[i].trace; i--) this.frames[i].trace = null;
      if (this.ended || this.frames.length >= Math.floor(room.time)) this.element.setAttribute("aria-busy", "false");
      if (this.ended || Math.floor(room.time) <= this.frames.length) room.shown();
      this.ask();
    });
  }

  problem(message) {
    this.failed = Boolean(message);
    this.element.setAttribute("aria-busy", "false");
    this.trouble.hidden = !message;
    this.trouble.textContent = message;
  }

  // A change from the shown step on: what followed it is made again.
  change(name, value) {
    const at = Math.min(Math.floor(this.room.time), this.frames.length);
    if (at === 0) {
      if (name === "restart") return;
      this.initial[name] = value;
      this.changes = [];
      this.begin();
    } else {
      this.changes = this.changes.filter(([step, other]) => step < at || (step === at && other !== name));
      if (this.changes.length >= this.room.facts.most_changes) return;
      this.changes.push([at, name, value]);
      this.frames.length = at;
      this.summaries = this.summaries.filter((one) => one.number <= at);
      this.version += 1;
      this.asking = this.ended = false;
      this.problem("");
      this.ask();
    }
    this.listChanges();
    this.room.shown();
    this.room.remember(true);
  }

  // The value of a control at a step.
  valueAt(name, step) {
    let value = this.initial[name] ?? this.controls[name];
    for (const [at, other, v] of this.changes) if (at <= step && other === name) value = v;
    return value;
  }

  stage(step) { return step ? this.frames[step - 1]?.stage : ""; }

  pointsAt(step) {
    const at = step ? this.frames[Math.min(step, this.frames.length) - 1]?.at : this.starts;
    return (at || []).flatMap((one) => typeof one[0] === "number" || one[0] === null ? [one] : one);
  }

  said(step) {
    const points = this.pointsAt(step).slice(0, 4).map(([x, y]) => text.sayPoint(shown(x), shown(y)));
    return `${text.samplerNames[this.sampler]} ${points.join("; ")}`;
  }

  // ---- drawing

  draw() {
    this.scene.draw();
    if (!this.series.canvas.closest("[hidden]")) this.series.draw();
    this.showFacts();
    this.legend();
    for (const [name, { range, box }] of this.sliders) {
      if (document.activeElement === range || document.activeElement === box) continue;
      const value = this.valueAt(name, Math.floor(this.room.time));
      box.value = value;
      range.value = Math.log10(value);
    }
  }

  showFacts() {
    const step = Math.min(Math.floor(this.room.time), this.frames.length);
    const known = this.summaries.filter((one) => one.number <= step);
    const last = known[known.length - 1];
    const info = step ? this.frames[step - 1].info : {};
    const mean = (v) => v.reduce((a, b) => a + b, 0) / v.length;
    const key = JSON.stringify([step, last?.number, this.changes.length, this.failed]);
    if (key === this.factsKey && this.room.picture === this.factsPicture) return;
    this.factsKey = key;
    this.factsPicture = this.room.picture;
    const facts = [];
    if (last) {
      const kind = last.status === "ok" ? "good" : last.status === "diverged" ? "bad" : "warn";
      facts.push(element("span", { className: `chip ${kind}`, textContent: last.status }));
      if (last.accept) facts.push(element("span", { textContent: text.accepted(shown(mean(last.accept), 2)) }));
      if (last.divergences !== undefined) facts.push(element("span", { textContent: text.divergences(last.divergences) }));
      if (last.reason) facts.push(element("span", { className: "reason", textContent: last.reason }));
    } else {
      facts.push(element("span", { textContent: this.about.method === "map" ? text.noDraws : text.noSummary }));
    }
    if (info.step_size && !info.accept) facts.push(element("span", { textContent: `${text.controls.step_size} ${shown(mean(info.step_size))}` }));
    if (this.changes.some(([at]) => at < step)) facts.push(element("span", { className: "reason", textContent: text.notOneDistribution }));
    this.facts.replaceChildren(...facts);
    this.table.replaceChildren(...(last ? this.rows(last) : []));
  }

  // What the colours of the step mean, from the records that it has.
  legend() {
    const names = [];
    for (const each of this.frames[0]?.trace || []) {
      if (each.kind === "proposal") names.push("accepted", "rejected", ...(each.mean ? ["mean"] : []));
      else if (each.kind === "trajectory") names.push("momentum");
      else if (each.kind === "tree") names.push("momentum", "taken");
      else if (each.kind === "gradient") names.push("used", ...(each.full ? ["full"] : []), ...(each.velocity ? ["velocity"] : []));
      else if (each.kind === "forces") names.push("drift", "repulsion");
    }
    if (names.join() === this.legendNames) return;
    this.legendNames = names.join();
    this.legendBox.replaceChildren(...names.map((name) => element("span", { className: name }, element("i"), text.legends[name])));
  }

  rows(last) {
    const columns = Object.keys(text.columns), truth = this.room.picture;
    const head = element("tr", {}, element("td"), ...columns.map((c) => element("th", { scope: "col", textContent: text.columns[c] })));
    const body = ["x", "y"].map((name, i) => element("tr", {}, element("th", { scope: "row", textContent: name }), ...columns.map((c) => {
      const whole = c.startsWith("ess");
      const cell = element("td", { textContent: last[c][i] === null ? "–" : whole ? String(Math.round(last[c][i])) : shown(last[c][i]) });
      if (truth && (c === "mean" || c === "sd")) cell.append(element("small", { textContent: text.trueValue(shown(Math.abs(truth[c][i]) < 1e-9 ? 0 : truth[c][i])) }));
      return cell;
    })));
    return [element("caption", { textContent: text.tableTitle(last.number) }), element("thead", {}, head), element("tbody", {}, ...body)];
  }

  listChanges() {
    const items = this.changes.map(([at, name, v]) => element("li", {
      textContent: name === "restart" ? text.restartAt(at, shown(v[0]), shown(v[1])) : text.change(at, text.controls[name] || name, shown(v)),
    }));
    this.changesBox.hidden = !items.length;
    this.changesList.replaceChildren(...items);
    this.changesTitle.textContent = text.changesMade(items.length);
  }

  close() {
    this.version += 1;
    this.room.link.cancel(this.name);
    this.room.link.cancel(`${this.name}-python`);
  }

  focus() { this.select.focus(); }

  alone(yes) { this.removeButton.disabled = yes; }

  // ---- parts

  build(remove) {
    const groups = { none: [], noisy: [], exact: [] };
    for (const s of this.room.facts.samplers) {
      const kind = s.method === "map" || s.method === "svgd" ? "none" : s.noisy ? "noisy" : "exact";
      groups[kind].push(element("option", { value: s.name, textContent: text.samplerNames[s.name] || s.name }));
    }
    this.select = element("select", { ariaLabel: text.sampler });
    for (const kind of ["exact", "noisy", "none"]) this.select.append(element("optgroup", { label: text.groups[kind] }, ...groups[kind]));
    this.select.addEventListener("change", () => { this.take({ sampler: this.select.value }); this.begin(); this.room.remember(true); });
    this.removeButton = element("button", { type: "button", className: "quiet", textContent: text.remove });
    this.removeButton.addEventListener("click", remove);
    this.equation = element("p", { className: "equation", ariaLabel: text.ofEquation });
    this.sentences = element("p", { className: "sentences" });
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.scene = new Scene(this.canvas, this.room, this);
    this.legendBox = element("p", { className: "legend" });
    this.trouble = element("p", { className: "message", hidden: true });
    this.trouble.setAttribute("role", "alert");
    this.facts = element("div", { className: "facts" });
    this.table = element("table");
    this.sliderBox = element("div", { className: "sliders" });
    this.changesTitle = element("span");
    this.changesList = element("ol");
    const forget = element("button", { type: "button", className: "quiet", textContent: text.forget });
    forget.addEventListener("click", () => { this.changes = []; this.listChanges(); this.begin(); this.room.remember(true); });
    this.changesBox = element("div", { className: "changes", hidden: true }, this.changesTitle, this.changesList, forget);
    const seriesCanvas = element("canvas", { ariaLabel: "" });
    seriesCanvas.setAttribute("role", "img");
    const seriesBox = element("div", { className: "series", id: `${this.name}-series` }, seriesCanvas);
    this.series = new Series(seriesCanvas, this.room, this);
    this.formElement = element("form", { className: "form", id: `${this.name}-form`, hidden: true });
    this.formElement.addEventListener("submit", (event) => event.preventDefault());
    this.settingsButton = folding(text.settings, this.formElement);
    this.seriesButton = folding(text.seriesTitle, seriesBox, () => this.series.draw());
    this.pythonButton = element("button", { type: "button", className: "quiet", textContent: text.python });
    this.pythonButton.addEventListener("click", () => this.askPython());
    this.element.append(
      element("div", { className: "head" }, this.select, this.removeButton), this.equation, this.sentences,
      element("div", { className: "plane" }, this.canvas), this.legendBox, this.trouble, this.facts, this.sliderBox, this.changesBox,
      this.table, element("div", { className: "tools" }, this.seriesButton, this.settingsButton, this.pythonButton),
      seriesBox, this.formElement,
    );
  }

  askPython() {
    const content = { recipe: this.recipe(), done: Math.min(Math.floor(this.room.time), this.frames.length) };
    this.room.link.ask(`${this.name}-python`, "python", content, (kind, found) => {
      if (kind !== "done") return;
      this.python = found.python;
      document.getElementById("python-text").textContent = found.python;
      if (!document.getElementById("python").open) document.getElementById("python").showModal();
    });
  }

  form() {
    this.canvas.setAttribute("aria-label", text.chainsPlane(text.samplerNames[this.sampler]));
    this.series.canvas.setAttribute("aria-label", text.seriesLabel(text.samplerNames[this.sampler]));
    this.sliders = new Map();
    this.sliderBox.replaceChildren(...Object.keys(this.controls).map((name) => this.slider(name)));
    this.listChanges();
    const again = () => { this.changes = []; this.listChanges(); this.begin(); this.room.remember(true); };
    const rows = this.about.settings.map((f) => {
      const value = f.name in this.settings ? this.settings[f.name] : f.default;
      const put = (v) => { if (v === f.default) delete this.settings[f.name]; else this.settings[f.name] = v; again(); };
      const help = [f.help, f.allowed].filter(Boolean).join(" – ");
      return element("label", { className: "field", title: help }, element("span", { textContent: f.name.replaceAll("_", " ") }), this.input(f, value, put));
    });
    if (this.about.noisy && this.room.target !== this.room.facts.network) {
      const f = { kind: "number", least: 0, most: 1000, none: false };
      rows.push(element("label", { className: "field" }, element("span", { textContent: text.noiseOfGradient }), this.input(f, this.noise, (v) => { this.noise = v; again(); })));
    }
    this.settingsButton.hidden = !rows.length;
    this.formElement.replaceChildren(...rows);
  }

  input(f, value, put) {
    if (f.kind === "choice" || f.kind === "flag") {
      const choices = f.kind === "choice" ? f.choices : [true, false];
      const names = f.kind === "choice" ? {} : { true: text.yes, false: text.no };
      const box = element("select", {}, ...choices.map((c, i) => element("option", { value: i, textContent: names[c] || String(c ?? text.byDefault), selected: c === value })));
      box.addEventListener("change", () => put(choices[box.value]));
      return box;
    }
    const box = element("input", { type: "number", min: f.least ?? "", max: f.most ?? "", step: f.kind === "whole" ? 1 : "any", value: value ?? "", placeholder: f.none ? text.byDefault : "" });
    box.addEventListener("change", () => {
      if (box.value === "" && f.none) put(null);
      else if (box.value !== "" && box.checkValidity()) put(Number(box.value));
    });
    return box;
  }

  // A control that may change between two steps: a slider on a logarithmic scale, and its number.
  slider(name) {
    const first = this.controls[name], whole = name === "batch_size";
    const label = text.controls[name] || name;
    const low = whole ? 0 : Math.log10(first) - 2, high = whole ? Math.log10(this.room.facts.rows) : Math.log10(first) + 2;
    const box = element("input", { type: "number", min: whole ? 1 : "", max: whole ? this.room.facts.rows : "", step: whole ? 1 : "any", ariaLabel: label });
    const range = element("input", { type: "range", min: low, max: high, step: 0.01, ariaLabel: text.slider(label) });
    const value = this.valueAt(name, Math.floor(this.room.time));
    box.value = value;
    range.value = Math.log10(value);
    let waiting = 0;
    range.addEventListener("input", () => {
      const v = 10 ** Number(range.value);
      box.value = whole ? Math.round(v) : Number(v.toPrecision(3));
      clearTimeout(waiting);
      waiting = setTimeout(() => this.change(name, Number(box.value)), 150);
    });
    box.addEventListener("change", () => { if (box.value !== "" && Number(box.value) > 0 && box.checkValidity()) this.change(name, Number(box.value)); });
    this.sliders.set(name, { range, box });
    return element("div", { className: "slider" }, element("span", { className: "name", textContent: label }), range, box);
  }
}

function folding(title, part, opened = () => {}) {
  const button = element("button", { type: "button", className: "quiet", textContent: title });
  button.setAttribute("aria-expanded", String(!part.hidden));
  button.setAttribute("aria-controls", part.id);
  button.addEventListener("click", () => {
    part.hidden = !part.hidden;
    button.setAttribute("aria-expanded", String(!part.hidden));
    if (!part.hidden) opened();
  });
  return button;
}
