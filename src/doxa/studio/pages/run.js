// The room "Your run": what a saved posterior knows about the rows of a table.
import { chart, download, short } from "/pages/chart.js";
import { Link } from "/pages/link.js";
import { showRooms } from "/pages/page.js";
import { LONGEST, StateError, pack, unpack } from "/pages/state.js";
import { text } from "/pages/strings.js";

const $ = (id) => document.getElementById(id);
const element = (name, properties = {}, ...children) => {
  const found = Object.assign(document.createElement(name), properties);
  found.append(...children);
  return found;
};
const chip = (said, kind = "") => element("span", { className: `chip ${kind}`, textContent: said });
const GRADES = { bad: "bad", warning: "warn", slight: "", good: "good" };
const LARGEST = 50 << 20;

for (const one of document.querySelectorAll("[data-text]")) one.textContent = text[one.dataset.text];
for (const one of document.querySelectorAll("[data-label]")) one.setAttribute("aria-label", text[one.dataset.label]);

const room = {
  facts: null, link: null, about: null,
  run: 0, table: null, by: null, start: 0, column: null, other: null, cells: {},
  uploads: JSON.parse(sessionStorage.getItem("uploads") || "{}"), // by hash: {upload, name}
  busy: new Set(), found: {},
};

function warn(message) {
  $("message").textContent = message;
  $("message").hidden = !message;
}

// Ask for a task of a panel; the room is busy until its last answer.
function ask(panel, task, content, receive) {
  room.busy.add(panel);
  room.link.ask(panel, task, { run: room.run, table: tableOf(room.table), ...content }, (kind, found, last) => {
    if (kind === "shown") return;
    if (last) room.busy.delete(panel);
    if (kind === "problem") { if (panel !== "what-if") warn(found.message); receive(null, found.message); } else { room.found[task] = found; receive(found); }
  });
}

function tableOf(chosen) {
  if (chosen === null) return null;
  return typeof chosen === "number" ? { named: chosen } : { upload: room.uploads[chosen].upload };
}

// ---- state in the address

let current = "";

async function remember(push) {
  const { run, table, by, column, other, cells } = room;
  const state = { run: room.facts.runs[run], by, column, other: other === null ? null : room.facts.runs[other], cells };
  state.table = typeof table === "number" ? { name: room.facts.tables[table] } : table && { sha256: table };
  const packed = await pack(state);
  if (packed === current || packed.length > LONGEST) return;
  current = packed;
  const address = `${location.pathname}#${packed}`;
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

async function load() {
  const packed = location.hash.slice(1);
  let state = {};
  if (packed) {
    try { state = checked(await unpack(packed)); current = packed; warn(""); }
    catch (error) {
      if (!(error instanceof StateError)) throw error;
      warn(error.kind === "newer" ? text.newer : text.malformed);
    }
  }
  const place = room.facts.runs.indexOf(state.run);
  room.run = Math.max(0, place);
  if (state.run !== undefined && place < 0) warn(text.runNotHere(state.run));
  room.table = room.facts.tables.length ? 0 : null;
  if (state.table) {
    const there = state.table.name !== undefined ? room.facts.tables.indexOf(state.table.name) : state.table.sha256 in room.uploads ? state.table.sha256 : -1;
    if (there === -1) warn(text.tableNotHere);
    else room.table = there;
  } else if (state.table === null) room.table = null;
  room.by = state.by || null;
  room.column = state.column || null;
  room.cells = state.cells || {};
  const other = room.facts.runs.indexOf(state.other);
  room.other = other < 0 || other === room.run ? null : other;
  open();
}

function checked(found) {
  const bad = () => { throw new StateError("malformed"); };
  if (!found || typeof found !== "object" || Array.isArray(found) || typeof found.run !== "string") bad();
  const name = (v) => v === null || v === undefined || (typeof v === "string" && v.length < 300);
  if (!name(found.by) || !name(found.column) || !name(found.other)) bad();
  if (found.table !== null && (typeof found.table !== "object" || !name(found.table.name) || !name(found.table.sha256))) bad();
  if (found.cells !== undefined && (typeof found.cells !== "object" || found.cells === null || Array.isArray(found.cells))) bad();
  for (const v of Object.values(found.cells || {})) if (v !== null && !["string", "number"].includes(typeof v)) bad();
  return found;
}

// ---- the run

function choices() {
  $("run").replaceChildren(...room.facts.runs.map((name, i) => element("option", { value: i, textContent: name, selected: i === room.run })));
  const tables = [element("option", { value: "", textContent: text.noTable, selected: room.table === null })];
  room.facts.tables.forEach((name, i) => tables.push(element("option", { value: i, textContent: name, selected: room.table === i })));
  for (const [hash, { name }] of Object.entries(room.uploads)) tables.push(element("option", { value: hash, textContent: name, selected: room.table === hash }));
  $("table").replaceChildren(...tables);
}

function open() {
  choices();
  room.about = null;
  $("status").setAttribute("aria-busy", "true");
  $("chips").replaceChildren(chip(text.computing));
  ask("open", "open", {}, (found, problem) => {
    $("status").setAttribute("aria-busy", "false");
    if (!found) {
      $("chips").replaceChildren(chip("error", "bad"));
      $("headline").textContent = problem;
      for (const id of ["about", "findings", "cells", "prediction", "where"]) $(id).replaceChildren();
      for (const id of ["fine", "notes", "try", "calibration", "rows", "dependence", "compare"]) $(id).hidden = true;
      return;
    }
    room.about = found;
    showStatus(found);
    showCalibration(found.calibration[0]);
    const known = found.columns.map((c) => c.name);
    room.cells = Object.fromEntries(known.map((name) => [name, name in room.cells ? room.cells[name] : startOf(found.columns.find((c) => c.name === name))]));
    showCells();
    $("rows").hidden = $("dependence").hidden = found.rows === null;
    $("needs-table").hidden = found.rows !== null;
    $("compare").hidden = !(found.rows && found.rows.scored && room.facts.runs.length > 1);
    whatIf();
    if (found.rows) { showBy(); askRows(); showColumns(); askDependence(); }
    if (!$("compare").hidden) { showOther(); askCompare(); }
    remember(false);
  });
}

function finding({ check, status, words, advice }) {
  const body = element("div", {}, element("div", { textContent: words }));
  if (advice) body.append(element("div", { className: "advice", textContent: `→ ${advice}` }));
  return element("li", {}, element("span", { className: "name" }, chip(status, GRADES[status] ?? ""), check.replaceAll("_", " ")), body);
}

function showStatus(found) {
  $("chips").replaceChildren(chip(text.fitStatus(found.status), found.status === "ok" ? "good" : found.status === "diverged" ? "bad" : "warn"));
  $("headline").textContent = found.headline;
  const facts = [text.runAbout(found.method, found.target)];
  if (found.reason && !found.findings.some((f) => f.words.includes(found.reason))) facts.push(found.reason);
  if (found.rows) facts.push(text.rowsAbout(found.rows));
  if (found.not_run) facts.push(text.notRun(found.not_run));
  $("about").textContent = facts.join(" ");
  const loud = found.findings.filter((f) => f.status !== "good" && f.status !== "not checked");
  const fine = found.findings.filter((f) => !loud.includes(f));
  $("findings").replaceChildren(...loud.map(finding));
  $("fine").hidden = !fine.length;
  $("fine-list").replaceChildren(...fine.map(finding));
  $("notes").hidden = !found.notes.length;
  $("notes-list").replaceChildren(...found.notes.map((note) => element("li", { textContent: note })));
  $("try").hidden = !found.code.length;
  $("try-text").textContent = found.code.join("\n\n");
}

function showCalibration(found) {
  $("calibration").hidden = !found;
  if (!found) return;
  $("calibration-words").textContent = found.words || Object.values(found.missing)[0] || "";
  const charts = [], unit = [0, 1];
  if (found.levels) {
    const x = Array.from({ length: 51 }, (_, i) => i / 50), clip = (v) => Math.min(1, Math.max(0, v));
    charts.push(chart({
      name: `${room.about.name}-coverage`, label: text.coverageLabel, x: { low: 0, high: 1, label: text.nominal }, y: { low: 0, high: 1, label: text.observed },
      key: [["line", text.observed], ["rule", text.calibrated], ["band", text.chanceBand]],
      marks: [
        { kind: "band", x, low: x.map((v) => clip(v - found.chance)), high: x.map((v) => clip(v + found.chance)) },
        { kind: "rule", x: unit, y: unit }, { kind: "line", x: found.levels, y: found.covered }, { kind: "dot", x: found.levels, y: found.covered, r: 2.6 },
      ],
    }));
  }
  if (found.pit) {
    const n = found.pit.length, total = found.pit.reduce((a, b) => a + b, 0), even = total / n;
    const edges = found.pit.map((_, i) => i / n);
    charts.push(chart({
      name: `${room.about.name}-pit`, label: text.pitLabel, x: { low: 0, high: 1, label: text.pitAxis }, y: { low: 0, high: 1.08 * Math.max(...found.pit, even), label: text.rowsAxis },
      key: [["bar", text.rowsAxis], ["rule", text.calibrated]],
      marks: [{ kind: "bar", from: edges, to: edges.map((v) => v + 1 / n), y: found.pit }, { kind: "rule", x: unit, y: [even, even] }],
    }));
  }
  if (found.confidence) {
    const { confidence, accuracy, band, count } = found, clip = (v) => Math.min(1, Math.max(0, v));
    charts.push(chart({
      name: `${room.about.name}-reliability`, label: text.reliabilityLabel, x: { low: 0, high: 1, label: text.confidence }, y: { low: 0, high: 1, label: text.accuracy },
      key: [["line", text.observed], ["rule", text.calibrated], ["band", text.chanceBand]],
      marks: [
        { kind: "band", x: confidence, low: confidence.map((v, i) => clip(v - band[i])), high: confidence.map((v, i) => clip(v + band[i])) },
        { kind: "rule", x: unit, y: unit }, { kind: "line", x: confidence, y: accuracy },
        { kind: "dot", x: confidence, y: accuracy, says: (i) => text.bin(confidence[i], accuracy[i], count[i]) },
      ],
    }));
  }
  $("calibration-charts").replaceChildren(...charts);
  $("scores").replaceChildren(...Object.entries(found.scores).filter(([, v]) => typeof v === "number").map(([name, v]) => element("div", {}, element("span", { textContent: `${name.replaceAll("_", " ")} ` }), element("b", { textContent: short(v) }))));
}

// ---- rows

function showBy() {
  const ways = room.about.sortable;
  if (!ways.includes(room.by)) room.by = ways[0];
  $("by").replaceChildren(...ways.map((way) => {
    const button = element("button", { type: "button", value: way, textContent: text.ways[way] });
    button.setAttribute("aria-pressed", String(way === room.by));
    button.addEventListener("click", () => { room.by = way; room.start = 0; showBy(); askRows(); remember(true); });
    return button;
  }));
}

function askRows() {
  ask("rows", "rows", { by: room.by, start: room.start }, (found) => {
    if (!found) { $("rows-table").replaceChildren(); return; }
    $("rows-said").textContent = text.rowsShown(found.start + 1, found.start + found.rows.length, found.count, text.ways[found.by]);
    $("rows-back").disabled = found.start === 0;
    $("rows-on").disabled = found.start + found.rows.length >= found.count;
    const first = found.rows[0], scored = "surprise" in first;
    const predicted = Object.keys(first.predicted).filter((n) => n !== "level");
    const head = [["", ""], [text.row, ""], ...(scored ? [[room.about.target, room.about.classes ? "" : "number"], [text.surprise, "number"]] : []), ...predicted.map((n) => [n, "number"]), ...room.about.columns.map((c) => [c.name, c.kind === "number" ? "number" : ""])];
    const cell = (v) => typeof v === "number" ? element("td", { className: "number", textContent: short(v) }) : element("td", { textContent: v, title: v });
    const lines = found.rows.map((row) => {
      const pick = element("button", { type: "button", className: "quiet", textContent: text.take });
      pick.setAttribute("aria-label", text.takeRow(row.label));
      const line = element("tr", {}, element("td", {}, pick), element("td", { textContent: row.label }));
      pick.addEventListener("click", () => {
        room.about.columns.forEach((c, i) => { room.cells[c.name] = c.kind === "number" ? (row.cells[i] === "" ? null : Number(row.cells[i])) : row.cells[i]; });
        for (const other of $("rows-table").querySelectorAll(".chosen")) other.classList.remove("chosen");
        line.classList.add("chosen");
        showCells();
        whatIf();
        remember(true);
        $("what-if").scrollIntoView({ block: "nearest" });
      });
      if (scored) line.append(cell(row.target), cell(row.surprise));
      line.append(...predicted.map((n) => cell(row.predicted[n])), ...row.cells.map((v, i) => element("td", { className: room.about.columns[i].kind === "number" ? "number" : "", textContent: v, title: v })));
      return line;
    });
    $("rows-table").replaceChildren(
      element("thead", {}, element("tr", {}, ...head.map(([name, kind]) => element(name ? "th" : "td", { className: kind, textContent: name, title: name })))),
      element("tbody", {}, ...lines),
    );
  });
}

// ---- what if

function startOf(column) {
  if (column.kind === "category") return column.categories[0];
  if (column.kind === "date") return "2024-01-01";
  return Number(((column.low + column.high) / 2).toPrecision(4));
}

function showCells() {
  const lines = room.about.columns.map((column, i) => {
    const put = (value) => { room.cells[column.name] = value; whatIf(); remember(false); };
    const line = element("div", { className: "slider" }, element("span", { textContent: column.name, title: column.name, id: `cell-${i}` }));
    line.dataset.column = column.name;
    const value = room.cells[column.name];
    const named = (box, kind) => { box.setAttribute("aria-label", `${column.name}${kind ? `, ${kind}` : ""}`); box.name = `cell-${i}${kind || ""}`; return box; };
    if (column.kind === "category") {
      const box = named(element("select"));
      const all = column.categories.includes(value) ? column.categories : [value, ...column.categories];
      box.append(...all.map((c) => element("option", { value: c, textContent: c, selected: c === value })));
      box.addEventListener("change", () => put(box.value));
      line.append(box);
    } else if (column.kind === "date") {
      const box = named(element("input", { type: "text", className: "date", value: value ?? "", maxLength: 40 }));
      box.addEventListener("change", () => put(box.value));
      line.append(box);
    } else {
      const margin = 0.25 * (column.high - column.low) || 1;
      const low = Math.min(column.low - margin, value ?? Infinity), high = Math.max(column.high + margin, value ?? -Infinity);
      const step = Number(((high - low) / 400).toPrecision(1));
      const bar = named(element("input", { type: "range" }), text.sliderWord);
      Object.assign(bar, { min: low, max: high, step });
      const box = named(element("input", { type: "number", step: "any" }));
      bar.value = value ?? (low + high) / 2;
      box.value = value ?? "";
      bar.addEventListener("input", () => { box.value = Number(Number(bar.value).toPrecision(6)); put(Number(box.value)); });
      box.addEventListener("change", () => { if (box.value === "" && !column.missing) return; if (box.value !== "") bar.value = box.value; put(box.value === "" ? null : Number(box.value)); });
      line.append(bar, box);
    }
    return line;
  });
  $("cells").replaceChildren(...lines);
}

function whatIf() {
  ask("what-if", "what_if", { cells: room.cells }, (found, problem) => {
    if (!found) {
      $("prediction").replaceChildren(element("span", { className: "reason", textContent: problem }));
      $("where").replaceChildren();
      return;
    }
    const p = found.predicted, parts = [];
    if (room.about.classes) {
      const best = p.predicted;
      for (const label of room.about.classes) {
        const v = p[`p(${label})`], meter = element("meter", { min: 0, max: 1, value: v });
        meter.setAttribute("aria-label", text.chanceOf(label));
        parts.push(element("div", { className: `chance${label === best ? " best" : ""}` }, element("span", { textContent: label, title: label }), meter, element("span", { textContent: `${(100 * v).toFixed(1)} %` })));
      }
      const more = [text.entropyIs(short(p.entropy))];
      if ("mutual_information" in p) more.push(text.ofWhichEpistemic(short(p.mutual_information)));
      parts.push(element("div", { className: "parts" }, ...more.map((t) => element("span", { textContent: t }))));
    } else {
      parts.push(element("div", { className: "big", textContent: `${short(p.mean)} ± ${short(p.std)}` }));
      parts.push(element("div", { className: "parts" }, ...[text.intervalIs(short(p.low), short(p.high)), text.aleatoricIs(short(p.aleatoric_std)), text.epistemicIs(short(p.epistemic_std))].map((t) => element("span", { textContent: t }))));
    }
    $("prediction").replaceChildren(...parts);
    for (const line of $("cells").children) line.classList.toggle("out", found.outside.includes(line.dataset.column));
    const chips = [];
    if (found.distance === null) chips.push(chip(text.fitUnknown));
    else if (found.outside.length) chips.push(chip(text.outside(found.outside.join(", ")), "bad"));
    else if (found.distance > found.far) chips.push(chip(text.unlike(short(found.distance)), "warn"));
    else chips.push(chip(text.inside, "good"));
    $("where").replaceChildren(...chips);
  });
}

// ---- dependence

function showColumns() {
  const able = room.about.columns.filter((c) => c.kind !== "date").map((c) => c.name);
  if (!able.includes(room.column)) room.column = able[0];
  $("column").replaceChildren(...able.map((name) => element("option", { value: name, textContent: name, selected: name === room.column })));
}

function askDependence() {
  ask("dependence", "dependence", { column: room.column }, (found) => {
    if (!found) { $("dependence-chart").replaceChildren(); return; }
    $("dependence-words").textContent = (found.classes ? text.dependenceClasses : text.dependenceNumbers)(found.rows);
    const names = typeof found.values[0] === "string" ? found.values : null;
    const x = names ? names.map((_, i) => i) : found.values;
    const wide = names && names.length === 1 ? [-0.5, 0.5] : names ? [-0.4, x.length - 0.6] : [x[0], x[x.length - 1]];
    const axis = { low: wide[0], high: wide[1], label: found.column };
    const label = text.dependenceLabel(found.column), outside = [];
    const draw = (name, said, ylabel, low, high, marks, key) => {
      if (found.inside && !names) {
        for (const [a, b] of [[axis.low, found.inside[0]], [found.inside[1], axis.high]]) if (b > a) outside.push({ kind: "outside", x: [a, b], low: [low, low], high: [high, high] });
        if (outside.length) key.push(["outside", text.outsideKey]);
      }
      return chart({ name: `${room.about.name}-${name}`, label: said, x: axis, y: { low, high, label: ylabel }, names, marks: [...outside.splice(0), ...marks], key });
    };
    const kind = names ? "dot" : "line", charts = [];
    if (found.classes) {
      const lines = found.classes.map((c, k) => ({ kind: names ? "dot" : `line c${k % 4}`, colour: `c${k % 4}`, says: (i) => `${c}: ${found.mean[i][k].toFixed(3)}`, x, y: found.mean.map((m) => m[k]) }));
      charts.push(draw("dependence", label, text.meanProbability, 0, 1, lines, found.classes.map((c, k) => [`c${k % 4}`, c])));
      const top = 1.1 * Math.max(...found.aleatoric.map((v, i) => v + found.epistemic[i]), 1e-6);
      const zero = x.map(() => 0), total = found.aleatoric.map((v, i) => v + found.epistemic[i]);
      const marks = names ? [{ kind: "bar", from: x.map((v) => v - 0.3), to: x.map((v) => v + 0.3), y: total }] : [{ kind: "aleatoric", x, low: zero, high: found.aleatoric }, { kind: "epistemic", x, low: found.aleatoric, high: total }];
      charts.push(draw("entropy", text.entropyLabel(found.column), text.nats, 0, top, marks, names ? [["bar", text.entropyKey]] : [["aleatoric", text.aleatoric], ["epistemic", text.epistemic]]));
    } else {
      const { mean, aleatoric, epistemic } = found;
      const total = mean.map((_, i) => Math.hypot(aleatoric[i], epistemic[i]));
      const edge = (width, s) => mean.map((m, i) => m + s * 2 * width[i]);
      const low = Math.min(...edge(total, -1)), high = Math.max(...edge(total, 1)), margin = 0.05 * (high - low);
      const bands = names ? names.flatMap((_, i) => [["aleatoric", total], ["epistemic", epistemic]].map(([k, w]) => ({ kind: k, x: [i - 0.25, i + 0.25], low: [edge(w, -1)[i], edge(w, -1)[i]], high: [edge(w, 1)[i], edge(w, 1)[i]] })))
        : [{ kind: "aleatoric", x, low: edge(total, -1), high: edge(total, 1) }, { kind: "epistemic", x, low: edge(epistemic, -1), high: edge(epistemic, 1) }];
      charts.push(draw("dependence", label, found.classes ? "" : room.about.target, low - margin, high + margin, [...bands, { kind, x, y: mean }], [["line", text.meanKey], ["epistemic", text.epistemicBand], ["aleatoric", text.totalBand]]));
    }
    $("dependence-chart").replaceChildren(...charts);
  });
}

// ---- two runs

function showOther() {
  const others = room.facts.runs.map((name, i) => [name, i]).filter(([, i]) => i !== room.run);
  $("other").replaceChildren(element("option", { value: "", textContent: text.none, selected: room.other === null }), ...others.map(([name, i]) => element("option", { value: i, textContent: name, selected: i === room.other })));
}

function askCompare() {
  $("compare-table").replaceChildren();
  $("compare-table").parentElement.hidden = room.other === null;
  $("compare-chart").replaceChildren();
  $("compare-words").textContent = room.other === null ? text.compareLead : "";
  if (room.other === null) return;
  ask("compare", "compare", { other: room.other }, (found, problem) => {
    if (!found) { $("compare-words").textContent = problem; return; }
    const [a, b] = found.names;
    $("compare-words").textContent = text.compareSays(a, b, found.rows, found.difference, found.error, short);
    const names = Object.keys(found.scores[0]).filter((n) => n in found.scores[1]);
    $("compare-table").replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { textContent: text.score }), ...[a, b].map((n) => element("th", { className: "number", textContent: n })))),
      element("tbody", {}, ...names.map((n) => element("tr", {}, element("td", { textContent: n.replaceAll("_", " ") }), ...found.scores.map((s) => element("td", { className: "number", textContent: short(s[n]) }))))),
    );
    const all = [...found.surprise[0], ...found.surprise[1]].filter((v) => v !== null).sort((u, v) => u - v);
    const low = all[0], high = all[Math.floor(0.995 * (all.length - 1))];
    $("compare-chart").replaceChildren(chart({
      name: `${a}-${b}`, label: text.compareLabel(a, b), x: { low, high, label: text.surpriseOf(b) }, y: { low, high, label: text.surpriseOf(a) },
      key: [["line", text.row], ["rule", text.equal]],
      marks: [{ kind: "rule", x: [low, high], y: [low, high] }, { kind: "dot", x: found.surprise[1].map((v) => Math.min(v, high)), y: found.surprise[0], r: 2.6, says: (i) => found.labels[i] }],
    }));
  });
}

// ---- uploads

async function upload(file) {
  if (file.size > LARGEST) { warn(text.tooLarge); return; }
  $("state").textContent = text.uploading;
  const body = await file.arrayBuffer();
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", body));
  const hash = Array.from(digest, (v) => v.toString(16).padStart(2, "0")).join("");
  const answer = await fetch("/upload", { method: "POST", headers: { "x-name": encodeURIComponent(file.name) }, body }).catch(() => null);
  $("state").textContent = text.connected;
  const found = answer && (await answer.json().catch(() => null));
  if (!answer || !answer.ok || !found) { warn(found?.error?.message || text.noServer); return; }
  room.uploads[hash] = found;
  sessionStorage.setItem("uploads", JSON.stringify(room.uploads));
  room.table = hash;
  warn("");
  open();
  remember(true);
}

function build() {
  $("run").addEventListener("change", () => { room.run = Number($("run").value); room.start = 0; room.cells = {}; if (room.other === room.run) room.other = null; warn(""); open(); remember(true); });
  $("table").addEventListener("change", () => { const v = $("table").value; room.table = v === "" ? null : v in room.uploads ? v : Number(v); room.start = 0; warn(""); open(); remember(true); });
  $("choose").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { const file = $("file").files[0]; $("file").value = ""; if (file) upload(file); });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => { event.preventDefault(); const file = event.dataTransfer.files[0]; if (file) upload(file); });
  $("cells").addEventListener("submit", (event) => event.preventDefault());
  $("rows-back").addEventListener("click", () => { room.start = Math.max(0, room.start - room.facts.shown); askRows(); });
  $("rows-on").addEventListener("click", () => { room.start += room.facts.shown; askRows(); });
  $("export").addEventListener("click", () => ask("export", "export", { by: room.by }, (found) => { if (found) { room.exported = found; download(new Blob([found.text], { type: "text/csv" }), found.name); } }));
  $("column").addEventListener("change", () => { room.column = $("column").value; askDependence(); remember(true); });
  $("other").addEventListener("change", () => { room.other = $("other").value === "" ? null : Number($("other").value); askCompare(); remember(true); });
  addEventListener("popstate", load);
  addEventListener("hashchange", () => { if (location.hash.slice(1) !== current) load(); });
}

$("state").textContent = text.connecting;
room.link = new Link(
  (facts, all) => { room.facts = facts; $("state").textContent = text.connected; showRooms("run", all); build(); load(); },
  (state, message) => {
    if (state === "lost") { $("state").textContent = text.lost; $("state").classList.add("lost"); }
    else if (state === "refused") warn(message);
  },
  "run",
);
window.doxaStudio = Object.assign(room, { open, upload }); // for tests, and for the curious
