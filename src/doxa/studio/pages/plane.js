// A plane with axes, bands, curves and points. It draws numbers, and computes none but positions.
import { label, line, round, ticks } from "/pages/axes.js";

const HIT = 11; // CSS pixels around a point that belong to it

export class Plane {
  constructor(canvas, room) {
    this.canvas = canvas;
    this.room = room; // points, view, layers, and what happens to points
    this.data = null;
    this.curves = null; // draws that move, in place of those of the data
    this.cross = null;
    this.drag = null;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => { this.cross = null; this.draw(); });
  }

  get frame() {
    const box = this.canvas.getBoundingClientRect();
    return { left: 34, top: 8, width: Math.max(20, box.width - 42), height: Math.max(20, box.height - 32) };
  }

  toPixel(x, y, frame = this.frame) {
    const { x0, x1, y0, y1 } = this.room.view;
    return [
      frame.left + ((x - x0) / (x1 - x0)) * frame.width,
      frame.top + ((y1 - y) / (y1 - y0)) * frame.height,
    ];
  }

  toPlane(event) {
    const box = this.canvas.getBoundingClientRect(), frame = this.frame;
    const { x0, x1, y0, y1 } = this.room.view;
    const clamp = (v) => Math.min(1, Math.max(0, v));
    const u = clamp((event.clientX - box.left - frame.left) / frame.width);
    const v = clamp((event.clientY - box.top - frame.top) / frame.height);
    return [round(x0 + u * (x1 - x0), x1 - x0), round(y1 - v * (y1 - y0), y1 - y0)];
  }

  nearest(event) {
    const box = this.canvas.getBoundingClientRect(), frame = this.frame;
    let best = -1, least = event.pointerType === "touch" ? 2 * HIT : HIT;
    this.room.points.forEach(([x, y], i) => {
      const [px, py] = this.toPixel(x, y, frame);
      const away = Math.hypot(px - (event.clientX - box.left), py - (event.clientY - box.top));
      if (away <= least) { best = i; least = away; }
    });
    return best;
  }

  down(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.canvas.focus({ preventScroll: true });
    this.canvas.setPointerCapture(event.pointerId);
    this.cross = null;
    const hit = this.nearest(event);
    if (hit >= 0) { this.drag = hit; this.room.select(hit); }
    else { this.drag = this.room.add(...this.toPlane(event)); }
  }

  move(event) {
    if (this.drag === null) {
      this.canvas.style.cursor = this.nearest(event) >= 0 ? "grab" : "crosshair";
      return;
    }
    this.canvas.style.cursor = "grabbing";
    if (this.drag >= 0) this.room.moveTo(this.drag, ...this.toPlane(event));
  }

  up(event) {
    if (this.drag === null) return;
    this.drag = null;
    this.canvas.style.cursor = "grab";
    this.room.settle();
  }

  key(event) {
    const { view, points } = this.room;
    const far = event.shiftKey ? 5 : 1;
    const sx = ((view.x1 - view.x0) / 100) * far, sy = ((view.y1 - view.y0) / 60) * far;
    const by = { ArrowLeft: [-sx, 0], ArrowRight: [sx, 0], ArrowUp: [0, sy], ArrowDown: [0, -sy] }[event.key];
    const limit = (x, y) => [
      round(Math.min(view.x1, Math.max(view.x0, x)), view.x1 - view.x0),
      round(Math.min(view.y1, Math.max(view.y0, y)), view.y1 - view.y0),
    ];
    const at = this.room.selected;
    if (by && at >= 0) {
      this.room.moveTo(at, ...limit(points[at][0] + by[0], points[at][1] + by[1]));
      this.room.saySelected();
      this.room.settle();
    } else if (by) {
      const [x, y] = this.cross || [(view.x0 + view.x1) / 2, (view.y0 + view.y1) / 2];
      this.cross = limit(x + by[0], y + by[1]);
      this.room.sayCross(...this.cross);
    } else if (event.key === "Enter" && at < 0) {
      const at = this.cross || limit((view.x0 + view.x1) / 2, (view.y0 + view.y1) / 2);
      this.room.add(...at);
      this.room.select(-1);
      this.room.settle();
    } else if ((event.key === "Delete" || event.key === "Backspace") && at >= 0) {
      this.room.remove(at);
    } else if (event.key.toLowerCase() === "n" || event.key.toLowerCase() === "p") {
      if (event.ctrlKey || event.metaKey || event.altKey || !points.length) return;
      const step = event.key.toLowerCase() === "n" ? 1 : -1;
      const from = at < 0 ? (step > 0 ? -1 : 0) : at;
      this.room.select((from + step + points.length) % points.length);
      this.room.saySelected();
    } else if (event.key === "Escape") {
      this.room.select(-1);
      this.cross = null;
    } else return;
    event.preventDefault();
    this.draw();
  }

  draw() {
    const box = this.canvas.getBoundingClientRect();
    if (!box.width) return;
    const scale = devicePixelRatio || 1;
    const w = Math.round(box.width * scale), h = Math.round(box.height * scale);
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    const c = this.canvas.getContext("2d"), frame = this.frame, colours = this.room.colours();
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, box.width, box.height);
    this.axes(c, frame, colours);
    c.save();
    c.beginPath();
    c.rect(frame.left, frame.top, frame.width, frame.height);
    c.clip();
    if (this.data) this.curvesAndBands(c, frame, colours);
    this.pointsAndCross(c, frame, colours);
    c.restore();
  }

  axes(c, frame, colours) {
    const { x0, x1, y0, y1 } = this.room.view;
    c.font = `11px ${colours.font}`;
    c.lineWidth = 1;
    c.strokeStyle = colours.grid;
    c.fillStyle = colours.muted;
    c.textAlign = "center";
    c.textBaseline = "top";
    for (const x of ticks(x0, x1)) {
      const px = Math.round(this.toPixel(x, y0, frame)[0]) + 0.5;
      line(c, px, frame.top, px, frame.top + frame.height);
      c.fillText(label(x), px, frame.top + frame.height + 7);
    }
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (const y of ticks(y0, y1)) {
      const py = Math.round(this.toPixel(x0, y, frame)[1]) + 0.5;
      line(c, frame.left, py, frame.left + frame.width, py);
      c.fillText(label(y), frame.left - 7, py);
    }
  }

  curvesAndBands(c, frame, colours) {
    const { grid, mean, aleatoric, epistemic, draws, prior } = this.data, on = this.room.layers;
    const path = (values) => {
      c.beginPath();
      grid.forEach((x, i) => {
        const [px, py] = this.toPixel(x, values[i], frame);
        if (i) c.lineTo(px, py); else c.moveTo(px, py);
      });
    };
    const band = (upper, lower, colour) => {
      c.beginPath();
      grid.forEach((x, i) => { const p = this.toPixel(x, upper[i], frame); if (i) c.lineTo(...p); else c.moveTo(...p); });
      for (let i = grid.length - 1; i >= 0; i--) c.lineTo(...this.toPixel(grid[i], lower[i], frame));
      c.closePath();
      c.fillStyle = colour;
      c.fill();
    };
    if (mean) {
      const inner = on.epistemic ? epistemic.map((v) => 2 * Math.sqrt(Math.max(0, v))) : mean.map(() => 0);
      const outer = aleatoric.map((v, i) => 2 * Math.sqrt(Math.max(0, v + (on.epistemic ? epistemic[i] : 0))));
      c.globalAlpha = colours.dark ? 0.3 : 0.24;
      if (on.aleatoric) {
        band(mean.map((m, i) => m + outer[i]), mean.map((m, i) => m + inner[i]), colours.aleatoric);
        band(mean.map((m, i) => m - inner[i]), mean.map((m, i) => m - outer[i]), colours.aleatoric);
      }
      if (on.epistemic) band(mean.map((m, i) => m + inner[i]), mean.map((m, i) => m - inner[i]), colours.epistemic);
    }
    c.lineJoin = "round";
    if (prior && (on.prior || !mean)) {
      c.globalAlpha = mean ? 0.45 : 0.8;
      c.strokeStyle = colours.prior;
      c.lineWidth = 1.1;
      const shown = !mean && this.curves ? this.curves : prior;
      for (const f of shown) { path(f); c.stroke(); }
    }
    if (mean && on.draws) {
      c.globalAlpha = 0.6;
      c.strokeStyle = colours.draw;
      c.lineWidth = this.curves ? 1.7 : 1.1;
      for (const f of this.curves || draws) { path(f); c.stroke(); }
    }
    c.globalAlpha = 1;
    if (mean && on.mean) {
      c.strokeStyle = colours.curve;
      c.lineWidth = 2.4;
      path(mean);
      c.stroke();
    }
  }

  pointsAndCross(c, frame, colours) {
    this.room.points.forEach(([x, y], i) => {
      const [px, py] = this.toPixel(x, y, frame), chosen = i === this.room.selected;
      c.beginPath();
      c.arc(px, py, (chosen ? 6 : 4) * (frame.width < 340 ? 0.8 : 1), 0, 7);
      c.fillStyle = chosen ? colours.aleatoric : colours.point;
      c.fill();
      c.lineWidth = 1.5;
      c.strokeStyle = colours.card;
      c.stroke();
    });
    if (this.cross && this.room.selected < 0) {
      const [px, py] = this.toPixel(...this.cross, frame);
      c.strokeStyle = colours.point;
      c.lineWidth = 1.5;
      line(c, px - 9, py, px + 9, py);
      line(c, px, py - 9, px, py + 9);
    }
  }
}
