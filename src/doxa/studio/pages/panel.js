// One panel: a method with its settings, its plane, and what the library says about the fit.
import { Plane } from "/pages/plane.js";
import { text } from "/pages/strings.js";

const TURN = 9000; // milliseconds of one turn of a path
const REST = 1400; // milliseconds from one draw to the next
let made = 0, named = 0;

export const element = (name, properties = {}, ...children) => {
  const found = Object.assign(document.createElement(name), properties);
  if ("autocomplete" in found && !found.name) found.name = `field-${++named}`;
  found.append(...children);
  return found;
};

export class Panel {
  constructor(room, state, remember, remove) {
    this.room = room;
    this.name = `panel-${++made}`;
    this.remember = remember;
    this.paths = null;
    this.element = element("article", { className: "card panel" });
    this.build(remove);
    this.take(state);
  }

  makePlane() { return new Plane(this.canvas, this.room); }

  planeLabel() { return text.plane(this.method, this.room.points.length); }

  // Further elements below the plane.
  below() { return []; }

  get about() { return this.room.facts.methods.find((m) => m.name === this.method); }

  take(state) {
    this.method = state.method;
    const about = this.about;
    this.settings = { ...about.start, ...(state.settings || {}) };
    this.network = { ...this.room.network, ...(state.network || {}) };
    this.noise = state.noise === undefined ? null : state.noise;
    this.steps = state.steps === undefined ? this.defaultSteps : state.steps;
    this.members = state.members === undefined ? null : state.members;
    this.evaluate = state.evaluate === true;
    this.select.value = this.method;
    this.summary.textContent = about.summary;
    this.form();
  }

  get defaultSteps() { return this.about.exact || this.about.draws ? null : this.about.steps; }

  state() {
    const found = { method: this.method, settings: this.settings };
    if (this.about.network) found.network = this.network;
    if (this.noise !== null) found.noise = this.noise;
    if (this.steps !== this.defaultSteps) found.steps = this.steps;
    if (this.members !== null) found.members = this.members;
    if (this.evaluate) found.evaluate = true;
    return found;
  }

  recipe() {
    const found = { ...this.room.asked(), method: this.method, settings: this.settings, evaluate: this.evaluate };
    if (this.room.noises) found.noise = this.noise;
    if (this.about.network) Object.assign(found, this.network);
    if (!this.about.exact) found.steps = this.steps;
    if (this.members !== null) found.members = this.members;
    return found;
  }

  fit() {
    this.element.setAttribute("aria-busy", "true");
    this.settledOn = false;
    this.far.textContent = "";
    this.canvas.setAttribute("aria-label", this.planeLabel());
    this.slow = this.slow || setTimeout(() => this.chip(text.computing, ""), 250);
    this.room.link.ask(this.name, "panel", this.recipe(), (kind, found, last, wait) => this.receive(kind, found, last, wait));
  }

  askPath() {
    this.paths = null;
    if (!this.room.playing || !this.about.exact) return;
    this.room.link.ask(`${this.name}-path`, "path", this.recipe(), (kind, found) => {
      if (kind === "done") this.paths = found.frames;
    });
  }

  receive(kind, found, last, wait) {
    clearTimeout(this.slow);
    this.slow = 0;
    if (kind === "problem") {
      if (last) this.element.setAttribute("aria-busy", "false");
      this.plane.data = null;
      this.plane.draw();
      this.chip("", "");
      this.facts.replaceChildren(element("span", { className: "chip bad", textContent: "error" }), element("span", { className: "reason", textContent: found.message }));
      return;
    }
    this.wait = wait;
    this.plane.data = found;
    this.plane.draw();
    requestAnimationFrame(() => { this.painted = performance.now(); });
    this.shown = (this.shown || 0) + 1;
    this.element.dataset.shown = this.shown;
    this.element.dataset.kind = kind;
    const facts = [];
    if (found.preview) facts.push(chip(text.preview(found.steps, found.of), ""));
    else if (!found.points) facts.push(chip(text.priorOnly, ""));
    else facts.push(chip(found.status, found.status === "ok" ? "good" : found.status === "diverged" ? "bad" : "warn"));
    if (!found.preview && found.points) {
      if (found.log_evidence !== null) facts.push(element("span", { textContent: text.evidence(found.log_evidence) }));
      else if (found.elbo !== null) facts.push(element("span", { textContent: text.elbo(found.elbo) }));
      if (!this.about.exact && found.steps) facts.push(element("span", { textContent: text.stepsDone(found.steps) }));
      if (found.seconds) facts.push(element("span", { textContent: text.seconds(found.seconds) }));
    }
    if (!found.preview && found.reason) facts.push(element("span", { className: "reason", textContent: found.reason }));
    if (found.no_prior && !found.points) facts.push(element("span", { className: "reason", textContent: found.no_prior }));
    this.facts.replaceChildren(...facts);
    if (kind === "done") {
      if (last) this.element.setAttribute("aria-busy", "false");
      this.python = found.python;
      this.pythonButton.disabled = false;
      if (this.room.playing) this.askPath();
      if (last) { this.settledOn = true; this.room.settled(); }
    }
  }

  // The distance to a reference, by the library, once both fits are there.
  askDistance(reference) {
    const content = { of: this.recipe(), reference: reference.recipe() };
    this.room.link.ask(`${this.name}-distance`, "distance", content, (kind, found) => {
      this.far.textContent = kind === "done" ? text.distance(reference.method, found) : "";
    });
  }

  chip(said, kind) {
    if (said) this.facts.replaceChildren(chip(said, kind));
  }

  // Curves at a time: frames of a path of draws, or one draw and then the next.
  advance(now, still) {
    const data = this.plane.data;
    if (!data) return;
    if (this.paths) {
      this.plane.curves = this.paths.map((frames, k) => {
        const at = ((now / TURN + k / 7) % 1) * frames.length, i = Math.floor(at);
        return still ? frames[i] : between(frames[i], frames[(i + 1) % frames.length], at - i);
      });
      return;
    }
    const draws = data.mean ? data.draws : data.prior;
    if (!draws || !draws.length) return;
    this.plane.curves = Array.from({ length: Math.min(3, draws.length) }, (_, k) => {
      const at = now / REST + (k * draws.length) / 3, i = Math.floor(at) % draws.length;
      const part = at - Math.floor(at), ease = still ? 0 : Math.min(1, Math.max(0, (part - 0.35) / 0.65));
      return between(draws[i], draws[(i + 1) % draws.length], ease * ease * (3 - 2 * ease));
    });
  }

  close() {
    clearTimeout(this.slow);
    this.room.link.cancel(this.name);
    this.room.link.cancel(`${this.name}-path`);
    this.room.link.cancel(`${this.name}-distance`);
  }

  focus() { this.select.focus(); }

  alone(yes) { this.removeButton.disabled = yes; }

  build(remove) {
    this.select = element("select", { ariaLabel: text.method });
    const families = new Map();
    for (const m of this.room.facts.methods) {
      if (!families.has(m.family)) families.set(m.family, element("optgroup", { label: m.family }));
      families.get(m.family).append(element("option", { value: m.name, textContent: m.name }));
    }
    this.select.append(...families.values());
    this.select.addEventListener("change", () => { this.take({ method: this.select.value, network: this.network, noise: this.about.gaussian ? undefined : this.noise }); this.changed(); });
    this.removeButton = element("button", { type: "button", className: "quiet", textContent: text.remove });
    this.removeButton.addEventListener("click", remove);
    this.summary = element("p", { className: "summary" });
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "application");
    this.plane = this.makePlane();
    this.facts = element("div", { className: "facts" });
    this.facts.setAttribute("role", "status");
    this.far = element("p", { className: "muted far" });
    const formId = `${this.name}-form`;
    this.settingsButton = element("button", { type: "button", className: "quiet", textContent: text.settings });
    this.settingsButton.setAttribute("aria-expanded", "false");
    this.settingsButton.setAttribute("aria-controls", formId);
    this.pythonButton = element("button", { type: "button", className: "quiet", textContent: text.python, disabled: true });
    this.pythonButton.addEventListener("click", () => {
      document.getElementById("python-text").textContent = this.python;
      document.getElementById("python").showModal();
    });
    this.formElement = element("form", { className: "form", id: formId, hidden: true });
    this.formElement.addEventListener("submit", (event) => event.preventDefault());
    this.settingsButton.addEventListener("click", () => {
      this.formElement.hidden = !this.formElement.hidden;
      this.settingsButton.setAttribute("aria-expanded", String(!this.formElement.hidden));
    });
    this.element.append(
      element("div", { className: "head" }, this.select, this.removeButton), this.summary,
      element("div", { className: "plane" }, this.canvas), ...this.below(), this.facts, this.far,
      element("div", { className: "tools" }, this.settingsButton, this.pythonButton), this.formElement,
    );
  }

  changed() { this.paths = null; this.plane.curves = null; this.fit(); this.remember(); }

  // The form: the network, the training, and the declared fields of the method.
  form() {
    const about = this.about, rows = [];
    const number = (value, least, most, step, put, empty) => {
      const box = element("input", { type: "number", min: least ?? "", max: most ?? "", step, value: value ?? "" });
      if (empty !== undefined) box.placeholder = empty;
      box.addEventListener("change", () => {
        if (box.value === "" && empty !== undefined) put(null);
        else if (box.value !== "" && box.checkValidity()) put(Number(box.value));
        else return;
        this.changed();
      });
      return box;
    };
    const choice = (value, choices, put, names = {}) => {
      const box = element("select");
      choices.forEach((c, i) => box.append(element("option", { value: i, textContent: names[c] || String(c ?? text.none), selected: c === value })));
      box.addEventListener("change", () => { put(choices[box.value]); this.changed(); });
      return box;
    };
    const field = (label, box, help) => {
      const made = element("label", { className: "field", title: help || "" }, element("span", { textContent: label }), box);
      return made;
    };
    const check = (label, value, put, help) => {
      const box = element("input", { type: "checkbox", checked: value });
      box.addEventListener("change", () => { put(box.checked); this.changed(); });
      return element("label", { className: "field check", title: help || "" }, box, element("span", { textContent: label }));
    };
    const group = (title, ...inner) => element("fieldset", {}, element("legend", { textContent: title }), ...inner);
    if (about.network) {
      const n = this.network;
      rows.push(group(text.network,
        field(text.depth, number(n.depth, 1, 4, 1, (v) => { n.depth = v; })),
        field(text.width, number(n.width, 1, 256, 1, (v) => { n.width = v; })),
        field(text.activation, choice(n.activation, this.room.facts.activations, (v) => { n.activation = v; })),
        field(text.prior, number(n.prior, 0.001, 100, "any", (v) => { n.prior = v; })),
        field(text.priorKind, choice(n.prior_kind, ["normal", "fan-in"], (v) => { n.prior_kind = v; }, text.priorKinds)),
      ));
    }
    if (this.room.noises) rows.push(this.noiseForm(about, { field, number, choice, group }));
    const training = [];
    if (!about.exact) {
      training.push(field(text.steps, number(this.steps, 1, 20000, 1, (v) => { this.steps = v; }, text.byDefault)));
      training.push(field(text.members, number(this.members, 1, 20, 1, (v) => { this.members = v; }, String(about.members))));
      training.push(check(text.evaluate, this.evaluate, (v) => { this.evaluate = v; }));
    }
    const own = about.settings.map((f) => {
      const value = f.name in this.settings ? this.settings[f.name] : f.default;
      const help = [f.help, f.allowed].filter(Boolean).join(" – ");
      const label = f.name.replaceAll("_", " ");
      const put = (v) => { if (v === f.default) delete this.settings[f.name]; else this.settings[f.name] = v; };
      if (f.kind === "flag" && !f.none) return check(label, value, put, help);
      if (f.kind === "flag") return field(label, choice(value, [null, true, false], put, { true: text.yes, false: text.no, null: text.byDefault }), help);
      if (f.kind === "choice") return field(label, choice(value, f.choices, put), help);
      if (f.kind === "text") {
        const box = element("input", { type: "text", value, maxLength: 60, spellcheck: false });
        box.addEventListener("change", () => { put(box.value); this.changed(); });
        return field(label, box, help);
      }
      const whole = f.kind === "whole";
      return field(label, number(value, f.least, f.most, whole ? 1 : "any", (v) => { if (v === null) delete this.settings[f.name]; else put(v); }, f.none ? text.byDefault : undefined), help);
    });
    if (training.length) rows.push(group(text.training, ...training));
    if (own.length) rows.push(group(text.ofMethod(this.method), ...own));
    this.formElement.replaceChildren(...rows);
  }

  noiseForm(about, { field, number, choice, group }) {
    const noises = about.network && !about.gaussian ? ["learned", "fixed", "heteroscedastic"] : ["learned", "fixed"];
    const kind = this.noise === null ? "learned" : typeof this.noise === "number" ? "fixed" : "heteroscedastic";
    const level = field(text.noiseStd, number(kind === "fixed" ? this.noise : 0.2, 0.0001, 100, "any", (v) => { this.noise = v; }));
    level.hidden = kind !== "fixed";
    return group(text.noise,
      field(text.noise, choice(kind, noises, (v) => {
        this.noise = v === "learned" ? null : v === "fixed" ? 0.2 : v;
        level.hidden = v !== "fixed";
      }, text.noises)), level,
    );
  }
}

function chip(said, kind) { return element("span", { className: `chip ${kind}`, textContent: said }); }

function between(a, b, part) { return part ? a.map((v, i) => v + part * (b[i] - v)) : a; }
