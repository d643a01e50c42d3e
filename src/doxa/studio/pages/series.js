// Small charts below a plane: both coordinates, energy and acceptance of the steps so far.
import { text } from "/pages/strings.js";

const WINDOW = 250; // steps that are drawn

export class Series {
  constructor(canvas, room, chain) {
    this.canvas = canvas;
    this.room = room;
    this.chain = chain;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // The values of a row, for each chain, at a frame.
  rows(frames) {
    const first = frames[0], particles = Array.isArray(first.at[0][0]);
    const found = particles ? [] : [["x", (f) => f.at.map((p) => p[0])], ["y", (f) => f.at.map((p) => p[1])]];
    const energy = ["energy", "log_density", "loss"].find((name) => first.info[name]);
    if (energy) found.push([energy, (f) => f.info[energy] || []]);
    if (first.info.accept) found.push(["accept", (f) => f.info.accept || []]);
    return found;
  }

  draw() {
    const box = this.canvas.getBoundingClientRect();
    if (!box.width) return;
    const scale = devicePixelRatio || 1, w = Math.round(box.width * scale), h = Math.round(box.height * scale);
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    const c = this.canvas.getContext("2d"), colours = this.room.colours();
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, box.width, box.height);
    const done = Math.min(Math.floor(this.room.time), this.chain.frames.length);
    if (!done) return;
    const from = Math.max(0, done - WINDOW), frames = this.chain.frames.slice(from, done), rows = this.rows(frames);
    const left = 72, width = box.width - left - 8, gap = box.height / rows.length;
    const across = (i) => left + (width * (i + 0.5)) / Math.max(60, Math.min(WINDOW, frames.length));
    c.font = `11px ${colours.font}`;
    c.textBaseline = "middle";
    rows.forEach(([name, read], r) => {
      const top = r * gap + 3, height = gap - 6, values = frames.map(read);
      const finite = values.flat().filter((v) => v !== null);
      let low = Math.min(...finite), high = Math.max(...finite);
      if (name === "accept") { low = 0; high = 1; }
      if (!(high > low)) { low -= 0.5; high += 0.5; }
      const up = (v) => top + height - (height * (v - low)) / (high - low);
      c.fillStyle = colours.muted;
      c.textAlign = "left";
      c.fillText(text.series[name], 2, top + height / 2);
      c.strokeStyle = colours.line;
      c.lineWidth = 1;
      c.strokeRect(left + 0.5, Math.round(top) + 0.5, width, Math.round(height));
      values[0].forEach((_, k) => {
        c.strokeStyle = colours.chains[k % 8];
        c.globalAlpha = 0.85;
        c.beginPath();
        values.forEach((v, i) => {
          if (v[k] === null || v[k] === undefined) return;
          if (i) c.lineTo(across(i), up(v[k])); else c.moveTo(across(i), up(v[k]));
        });
        c.stroke();
      });
      c.fillStyle = colours.reject;
      c.globalAlpha = 1;
      frames.forEach((f, i) => { if (name !== "accept" && f.info.divergent?.some((v) => v > 0)) c.fillRect(across(i) - 1, top + height - 5, 2, 5); });
    });
  }
}
