// The room "Label": the open rows of a session, answered by keys.
import { chart, short } from "/pages/chart.js";
import { Link } from "/pages/link.js";
import { showRooms } from "/pages/page.js";
import { text } from "/pages/strings.js";

const $ = (id) => document.getElementById(id);
const element = (name, properties = {}, ...children) => {
  const found = Object.assign(document.createElement(name), properties);
  found.append(...children);
  return found;
};
const KEYS = "123456789abcdefghijklmopqrstvwxyz"; // of the classes, in their order; n and u have a meaning
const LONG = 80; // characters from which a cell is a text to read
const LOOK = 5000; // milliseconds until the page looks what others have answered

for (const one of document.querySelectorAll("[data-text]")) one.textContent = text[one.dataset.text];
for (const one of document.querySelectorAll("[data-label]")) one.setAttribute("aria-label", text[one.dataset.label]);

const room = { facts: null, link: null, session: 0, found: null, at: null, busy: false, waiting: [], sent: 0 };

function warn(message) {
  $("message").textContent = message;
  $("message").hidden = !message;
}
function say(message) { $("said").textContent = message; }

// One request after the other: no label is replaced by a newer request.
function ask(task, content, receive) {
  room.waiting.push([task, content, receive]);
  if (!room.busy) next();
}

function next() {
  const first = room.waiting.shift();
  if (!first) return;
  const [task, content, receive] = first;
  room.busy = true;
  if (task === "next") $("query").setAttribute("aria-busy", "true");
  room.link.ask(`label-${++room.sent % 4}`, task, { session: room.session, ...content }, (kind, found) => {
    if (kind === "shown") return;
    room.busy = false;
    $("query").setAttribute("aria-busy", "false");
    if (kind === "problem") { warn(found.message); show(); } else { room.found = found; if (receive) receive(found); show(); }
    next();
  });
}

function current() {
  const queries = room.found ? room.found.queries : [];
  return queries.find((one) => one.name === room.at) || queries[0] || null;
}

function answer(label) {
  const one = current();
  if (!one || room.waiting.length) return;
  step(1, true);
  ask("answer", { row: one.name, label: String(label) }, (found) => {
    warn(found.problem);
    if (found.entered) say(text.labelled(one.name, label));
  });
}

// To another open row; `leaves` if this one will be answered.
function step(by, leaves = false) {
  const queries = room.found ? room.found.queries : [];
  const i = queries.indexOf(current());
  if (i < 0) return;
  const to = queries[(i + by + queries.length) % queries.length];
  room.at = leaves && to === queries[i] ? null : to.name;
  if (!leaves) show();
}

function undo() {
  const last = room.found && room.found.undo;
  if (!last || room.busy) return;
  room.at = last.name;
  ask("undo", { row: last.name }, () => { warn(""); say(text.undone(last.name)); });
}

// ---- what is shown

function show() {
  const found = room.found;
  if (!found) return;
  const one = current();
  room.at = one && one.name;
  $("progress").textContent = text.labelProgress(found);
  $("query-title").textContent = one ? one.place : text.noQuery;
  $("place").textContent = one ? text.queryOf(found.queries.indexOf(one) + 1, found.open) : "";
  if (room.drawn !== (one ? one.name : "") || !one) {
    $("shown").replaceChildren(one ? shown(one) : element("p", { className: "empty", textContent: found.free ? text.chooseMore(found.count) : text.poolEmpty }));
    room.drawn = one ? one.name : "";
  }
  showAnswers(one);
  $("undo").textContent = found.undo ? text.undoOf(found.undo.name, found.undo.label) : text.undoNone;
  $("undo").disabled = !found.undo;
  $("back").hidden = $("skip").hidden = found.queries.length < 2;
  showWhy(one && one.why);
  showCurve(found);
}

function shown(one) {
  if (one.image) return element("img", { src: one.image, alt: text.imageOf(one.name) });
  const list = element("dl");
  for (const [name, cell] of one.cells) list.append(element("dt", { textContent: name }), element("dd", { textContent: cell || "–", className: cell.length > LONG ? "long" : "" }));
  return list;
}

function showAnswers(one) {
  const found = room.found;
  const key = JSON.stringify([found.classes, Boolean(one), found.free > 0, found.name]);
  if (key === room.offered) return;
  room.offered = key;
  if (!one) {
    const more = element("button", { type: "button", textContent: text.chooseRows, disabled: !found.free });
    more.addEventListener("click", () => { warn(""); $("shown").replaceChildren(element("p", { className: "empty", textContent: text.choosing })); room.drawn = null; ask("next", {}, (got) => say(text.chosenBy(got.how))); });
    $("answers").replaceChildren(more);
    return;
  }
  if (found.classes) {
    $("answers").replaceChildren(...found.classes.map((label, i) => {
      const button = element("button", { type: "button" }, ...(KEYS[i] ? [element("kbd", { textContent: KEYS[i] })] : []), label);
      button.setAttribute("aria-label", text.labelAs(label, KEYS[i]));
      button.addEventListener("click", () => answer(label));
      return button;
    }));
    return;
  }
  const box = element("input", { type: "number", step: "any", required: true, name: "value" });
  box.setAttribute("aria-label", found.target);
  const form = element("form", {}, box, element("button", { type: "submit", textContent: text.enterValue }));
  form.addEventListener("submit", (event) => { event.preventDefault(); if (box.value !== "") { answer(box.value); box.value = ""; box.focus(); } });
  $("answers").replaceChildren(form);
}

function showWhy(why) {
  if (!why) { $("why").replaceChildren(element("p", { className: "muted", textContent: room.found.by === "random" ? text.whyRandom : text.whyNone })); return; }
  const p = why.predicted, parts = [];
  if (why.score !== null) parts.push(element("p", { textContent: text.whyScore(room.found.by === "bald" ? "BALD" : room.found.by.replaceAll("_", " "), short(why.score), why.place, why.of) }));
  else parts.push(element("p", { textContent: text.whyJoint }));
  if (room.found.classes) {
    for (const label of room.found.classes) {
      const v = p[`p(${label})`], meter = element("meter", { min: 0, max: 1, value: v });
      meter.setAttribute("aria-label", text.chanceOf(label));
      parts.push(element("div", { className: `chance${label === p.predicted ? " best" : ""}` }, element("span", { textContent: label, title: label }), meter, element("span", { textContent: `${(100 * v).toFixed(1)} %` })));
    }
    const more = [text.entropyIs(short(p.entropy))];
    if ("mutual_information" in p) more.push(text.ofWhichEpistemic(short(p.mutual_information)));
    parts.push(element("p", { className: "muted", textContent: more.join(", ") }));
  } else parts.push(element("p", { className: "muted", textContent: `${short(p.mean)} ± ${short(p.std)}; ${text.aleatoricIs(short(p.aleatoric_std))}, ${text.epistemicIs(short(p.epistemic_std))}` }));
  $("why").replaceChildren(...parts);
}

function showCurve(found) {
  const key = JSON.stringify([found.curve, found.counts, found.name]);
  if (key === room.curved) return;
  room.curved = key;
  const name = found.curve.length ? Object.keys(found.curve.at(-1)).find((n) => n !== "labels") : null;
  const kept = name ? found.curve.filter((r) => Number.isFinite(r[name])) : [];
  $("curve").replaceChildren();
  if (kept.length) {
    const x = kept.map((r) => r.labels), y = kept.map((r) => r[name]), low = Math.min(...y), high = Math.max(...y), margin = 0.1 * (high - low) || 0.5;
    $("curve").replaceChildren(chart({
      name: `${found.name}-curve`, label: text.curveLabel(name), x: { low: Math.min(...x), high: Math.max(...x), label: text.labelsAxis }, y: { low: low - margin, high: high + margin, label: name },
      marks: [{ kind: "line", x, y }, { kind: "dot", x, y, says: (i) => `${x[i]}: ${short(y[i])}` }], key: [["line", name]],
    }));
  }
  $("curve-words").textContent = found.curve.length ? text.curveWords(found.curve.at(-1).labels, found.method) : text.curveNone;
  const counts = found.classes ? found.classes.map((label, i) => element("div", {}, element("span", { textContent: `${label} ` }), element("b", { textContent: found.counts[i] }))) : [];
  $("counts").replaceChildren(...counts);
}

function open() {
  room.found = room.at = room.drawn = room.offered = room.curved = null;
  $("query").setAttribute("aria-busy", "true");
  history.replaceState(null, "", `${location.pathname}#${encodeURIComponent(room.facts.sessions[room.session])}`);
  ask("state", {});
}

function build() {
  const wanted = room.facts.sessions.indexOf(decodeURIComponent(location.hash.slice(1)));
  if (wanted >= 0) room.session = wanted;
  else if (location.hash.length > 1) warn(text.malformed);
  $("session").replaceChildren(...room.facts.sessions.map((name, i) => element("option", { value: i, textContent: name, selected: i === room.session })));
  $("session").addEventListener("change", () => { room.session = Number($("session").value); warn(""); open(); });
  $("undo").addEventListener("click", undo);
  $("back").addEventListener("click", () => step(-1));
  $("skip").addEventListener("click", () => step(1));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.matches("input, select, textarea")) return;
    const one = current(), key = event.key.toLowerCase();
    if (key === "u") undo();
    else if (key === "n" || event.key === "ArrowRight") step(1);
    else if (event.key === "ArrowLeft") step(-1);
    else if (one && room.found.classes && KEYS.includes(key) && key.length === 1 && room.found.classes[KEYS.indexOf(key)] !== undefined) answer(room.found.classes[KEYS.indexOf(key)]);
    else return;
    event.preventDefault();
  });
  setInterval(() => { if (!room.busy && !room.waiting.length && !document.hidden) ask("state", {}); }, LOOK);
}

$("state").textContent = text.connecting;
room.link = new Link(
  (facts, all) => { room.facts = facts; $("state").textContent = text.connected; showRooms("label", all); build(); open(); },
  (state, message) => {
    if (state === "lost") { $("state").textContent = text.lost; $("state").classList.add("lost"); }
    else if (state === "refused") warn(message);
  },
  "label",
);
window.doxaStudio = Object.assign(room, { current }); // for tests, and for the curious
