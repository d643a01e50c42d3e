// The plane of a sampler: contours of the target, the draws so far, and every part of the step that
// is shown, with marginals beside the plane. Positions and counts only: all numbers are the server's.
import { label, line, round, ticks } from "/pages/axes.js";

const STRIP = 46; // CSS pixels of a marginal
const BINS = 44;
const DOTS = 1500; // draws that are drawn
const TRAIL = 12; // steps that are joined by a line
const SLOW = 10; // steps per second up to which a step is drawn part by part

export class Scene {
  constructor(canvas, room, chain) {
    this.canvas = canvas;
    this.room = room; // target, view, layers and clock
    this.chain = chain; // frames
    this.cross = null;
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      canvas.focus({ preventScroll: true });
      const at = this.toPlane(event);
      if (at) this.room.chosen(...at, event.shiftKey || this.room.click === "restart");
    });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => { this.cross = null; this.draw(); });
  }

  get frame() {
    const box = this.canvas.getBoundingClientRect(), strip = this.room.layers.marginals ? STRIP : 0;
    return { left: 34, top: 8 + strip, width: Math.max(20, box.width - 42 - strip), height: Math.max(20, box.height - 32 - strip), strip };
  }

  pixel([x, y], f) {
    const [x0, x1, y0, y1] = this.room.view;
    return [f.left + ((x - x0) / (x1 - x0)) * f.width, f.top + ((y1 - y) / (y1 - y0)) * f.height];
  }

  toPlane(event) {
    const box = this.canvas.getBoundingClientRect(), f = this.frame, [x0, x1, y0, y1] = this.room.view;
    const u = (event.clientX - box.left - f.left) / f.width, v = (event.clientY - box.top - f.top) / f.height;
    if (u < 0 || u > 1 || v < 0 || v > 1) return null;
    return [round(x0 + u * (x1 - x0), x1 - x0), round(y1 - v * (y1 - y0), y1 - y0)];
  }

  key(event) {
    const [x0, x1, y0, y1] = this.room.view, far = event.shiftKey ? 5 : 1;
    const sx = ((x1 - x0) / 60) * far, sy = ((y1 - y0) / 60) * far;
    const by = { ArrowLeft: [-sx, 0], ArrowRight: [sx, 0], ArrowUp: [0, sy], ArrowDown: [0, -sy] }[event.key];
    const limit = (x, y) => [round(Math.min(x1, Math.max(x0, x)), x1 - x0), round(Math.min(y1, Math.max(y0, y)), y1 - y0)];
    if (by) {
      const [x, y] = this.cross || this.room.start;
      this.cross = limit(x + by[0], y + by[1]);
      this.room.sayCross(...this.cross);
    } else if (event.key === "Enter") {
      this.room.chosen(...(this.cross || this.room.start), event.shiftKey || this.room.click === "restart");
    } else if (event.key === "Escape") this.cross = null;
    else return;
    event.preventDefault();
    this.draw();
  }

  // The step that is drawn, and how much of it.
  get shown() {
    const { time, speed, calm } = this.room, n = Math.floor(time), { length } = this.chain.frames;
    const part = time - n;
    if (part > 0 && !calm.matches && speed <= SLOW && n < length) return { step: n + 1, part };
    return { step: Math.min(n, length), part: 1 };
  }

  draw() {
    const box = this.canvas.getBoundingClientRect();
    if (!box.width) return;
    const scale = devicePixelRatio || 1, w = Math.round(box.width * scale), h = Math.round(box.height * scale);
    if (this.canvas.width !== w || this.canvas.height !== h) { this.canvas.width = w; this.canvas.height = h; }
    const c = this.canvas.getContext("2d"), f = this.frame, colours = this.room.colours(), { layers, picture } = this.room;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, box.width, box.height);
    const { step, part } = this.shown, done = part < 1 ? step - 1 : step;
    if (picture && layers.density) this.density(c, f, colours, picture);
    this.axes(c, f, colours);
    c.save();
    c.beginPath();
    c.rect(f.left, f.top, f.width, f.height);
    c.clip();
    if (layers.draws) this.draws(c, f, colours, done);
    if (layers.trace && step > 0) for (const each of this.chain.frames[step - 1].trace || []) this[each.kind]?.(c, f, colours, each, part);
    this.positions(c, f, colours, done);
    if (this.cross) {
      const [px, py] = this.pixel(this.cross, f);
      c.strokeStyle = colours.point;
      c.lineWidth = 1.5;
      line(c, px - 9, py, px + 9, py);
      line(c, px, py - 9, px, py + 9);
    }
    c.restore();
    if (layers.marginals) this.marginals(c, f, colours, done, picture);
  }

  axes(c, f, colours) {
    const [x0, x1, y0, y1] = this.room.view;
    c.font = `11px ${colours.font}`;
    c.lineWidth = 1;
    c.strokeStyle = colours.line;
    c.fillStyle = colours.muted;
    c.strokeRect(f.left + 0.5, f.top + 0.5, f.width - 1, f.height - 1);
    c.textAlign = "center";
    c.textBaseline = "top";
    for (const x of ticks(x0, x1)) c.fillText(label(x), this.pixel([x, y0], f)[0], f.top + f.height + 7);
    c.textAlign = "right";
    c.textBaseline = "middle";
    for (const y of ticks(y0, y1)) c.fillText(label(y), f.left - 7, this.pixel([x0, y], f)[1]);
  }

  // ---- the target

  density(c, f, colours, picture) {
    if (this.shaded !== picture || this.shadedDark !== colours.dark) {
      this.shaded = picture;
      this.shadedDark = colours.dark;
      this.image = shade(picture, colours);
      this.contours = picture.levels.map((level) => contour(picture, level));
    }
    const [left, top] = this.pixel([picture.x[0], picture.y[picture.y.length - 1]], f);
    const [right, bottom] = this.pixel([picture.x[picture.x.length - 1], picture.y[0]], f);
    c.save();
    c.beginPath();
    c.rect(f.left, f.top, f.width, f.height);
    c.clip();
    c.imageSmoothingEnabled = true;
    c.drawImage(this.image, left, top, right - left, bottom - top);
    c.strokeStyle = `rgba(${colours.heat}, ${colours.dark ? 0.5 : 0.38})`;
    c.lineWidth = 1;
    for (const segments of this.contours) {
      c.beginPath();
      for (const [a, b] of segments) { c.moveTo(...this.pixel(a, f)); c.lineTo(...this.pixel(b, f)); }
      c.stroke();
    }
    c.restore();
  }

  // ---- the draws

  draws(c, f, colours, done) {
    const { frames } = this.chain, from = Math.max(0, done - Math.ceil(DOTS / this.chain.pointsAt(done).length || 1));
    const particles = frames.length && Array.isArray(frames[0].at[0][0]);
    const size = done > 400 ? 2.4 : 3.2;
    for (let i = particles ? Math.max(0, done - TRAIL) : from; i < done; i++) {
      const { at, kept, stage } = frames[i], path = stage === "optimise";
      at.forEach((one, k) => {
        c.fillStyle = colours.chains[k % 8];
        c.globalAlpha = particles ? 0.06 + (0.2 * (i - done + TRAIL)) / TRAIL : kept || path ? 0.42 : 0.16;
        for (const p of particles ? one : [one]) if (p[0] !== null && p[1] !== null) {
          const [px, py] = this.pixel(p, f);
          c.fillRect(px - size / 2, py - size / 2, size, size);
        }
      });
    }
    c.globalAlpha = 1;
    if (particles || !done) return;
    const chains = frames[0].at.length;
    for (let k = 0; k < chains; k++) {
      c.strokeStyle = colours.chains[k % 8];
      c.lineWidth = 1;
      c.globalAlpha = 0.5;
      c.beginPath();
      let open = false;
      for (let i = Math.max(-1, done - TRAIL); i < done; i++) {
        const p = i < 0 ? this.chain.starts?.[k] : frames[i].at[k];
        if (!p || p[0] === null || p[1] === null) { open = false; continue; }
        if (open) c.lineTo(...this.pixel(p, f)); else c.moveTo(...this.pixel(p, f));
        open = true;
      }
      c.stroke();
    }
    c.globalAlpha = 1;
  }

  positions(c, f, colours, done) {
    const at = done ? this.chain.frames[done - 1].at : this.chain.starts;
    (at || []).forEach((one, k) => {
      const particles = Array.isArray(one[0]) ? one : [one];
      for (const p of particles) this.dot(c, f, p, particles.length > 1 ? 4 : 5.5, colours.chains[k % 8], colours.card);
    });
  }

  dot(c, f, p, radius, fill, edge) {
    if (p[0] === null || p[1] === null) return;
    c.beginPath();
    c.arc(...this.pixel(p, f), radius, 0, 7);
    c.fillStyle = fill;
    c.fill();
    c.lineWidth = 1.5;
    c.strokeStyle = edge;
    c.stroke();
  }

  // ---- the parts of a step, by the kind of the library's record

  proposal(c, f, colours, { start, end, accepted, mean }, part) {
    const path = this.hasPath;
    end.forEach((p, k) => {
      const a = this.pixel(start[k], f), b = this.pixel(p, f);
      if (!b.every(Number.isFinite) || p[0] === null) return;
      const along = Math.min(1, part / 0.6), tip = [a[0] + along * (b[0] - a[0]), a[1] + along * (b[1] - a[1])];
      const colour = part < 0.75 ? colours.muted : accepted[k] ? colours.accept : colours.reject;
      c.strokeStyle = colour;
      c.lineWidth = 1.6;
      if (!path) {
        c.setLineDash([4, 3]);
        if (mean) {
          const m = this.pixel(mean[k], f);
          arrow(c, a, m, colours.full);
          c.strokeStyle = colour;
          line(c, ...m, ...tip);
        } else line(c, ...a, ...tip);
        c.setLineDash([]);
      }
      if (part < 0.6) return;
      if (part >= 0.75 && !accepted[k]) {
        c.lineWidth = 2.4;
        line(c, b[0] - 5, b[1] - 5, b[0] + 5, b[1] + 5);
        line(c, b[0] - 5, b[1] + 5, b[0] + 5, b[1] - 5);
      } else this.dot(c, f, p, 5, colour, colours.card);
    });
  }

  get hasPath() {
    const { step } = this.shown;
    return (this.chain.frames[step - 1].trace || []).some((each) => each.kind === "trajectory");
  }

  trajectory(c, f, colours, { positions, momenta }, part) {
    const count = Math.max(1, Math.ceil(Math.min(1, part / 0.6) * (positions.length - 1)));
    positions[0].forEach((_, k) => {
      c.strokeStyle = colours.chains[k % 8];
      c.lineWidth = 1.5;
      c.beginPath();
      for (let i = 0; i <= count; i++) {
        const p = positions[i][k];
        if (p[0] === null || p[1] === null) break;
        if (i) c.lineTo(...this.pixel(p, f)); else c.moveTo(...this.pixel(p, f));
      }
      c.stroke();
      for (let i = 1; i <= count; i++) this.dot(c, f, positions[i][k], 2.2, colours.chains[k % 8], "transparent");
      const from = positions[0][k], p = momenta[0][k];
      arrow(c, this.pixel(from, f), this.pixel([from[0] + 0.5 * p[0], from[1] + 0.5 * p[1]], f), colours.gradient, 44);
    });
  }

  tree(c, f, colours, { positions, momenta, doubling, reached, chosen }, part) {
    const count = Math.max(1, Math.ceil(Math.min(1, part / 0.8) * positions.length));
    positions[0].forEach((_, k) => {
      for (let d = 0; d <= doubling[doubling.length - 1]; d++) {
        c.strokeStyle = colours.chains[k % 8];
        c.lineWidth = 1.3;
        c.globalAlpha = 0.85;
        c.beginPath();
        let open = false;
        for (let i = 0; i < count; i++) {
          if (doubling[i] !== d || !reached[i][k]) continue;
          const p = positions[i][k];
          if (open) c.lineTo(...this.pixel(p, f)); else c.moveTo(...this.pixel(p, f));
          open = true;
        }
        c.stroke();
      }
      c.globalAlpha = 1;
      for (let i = 1; i < count; i++) if (reached[i][k]) {
        const shade = colours.chains[(k + doubling[i] - 1) % 8];
        this.dot(c, f, positions[i][k], 3, positions[0].length > 1 ? colours.chains[k % 8] : shade, colours.card);
      }
      const from = positions[0][k], p = momenta[0][k];
      arrow(c, this.pixel(from, f), this.pixel([from[0] + 0.5 * p[0], from[1] + 0.5 * p[1]], f), colours.gradient, 44);
      if (part >= 0.8) this.dot(c, f, positions[chosen[k]][k], 6, colours.accept, colours.card);
    });
  }

  gradient(c, f, colours, { start, noisy, full, moved, velocity }, part) {
    start.forEach((p, k) => {
      const from = this.pixel(p, f);
      const along = (g, colour, share = 1) => {
        const to = this.pixel([p[0] + g[0], p[1] + g[1]], f), size = Math.hypot(to[0] - from[0], to[1] - from[1]);
        if (!(size > 0)) return;
        const length = share * Math.min(64, 14 * Math.log1p(size / 14));
        arrow(c, from, [from[0] + (length * (to[0] - from[0])) / size, from[1] + (length * (to[1] - from[1])) / size], colour);
      };
      if (full) along(full[k], colours.full, Math.min(1, part / 0.3));
      if (part > 0.2) along(noisy[k], colours.gradient, Math.min(1, (part - 0.2) / 0.3));
      if (velocity && part > 0.4) {
        const v = this.pixel([p[0] + 8 * velocity[k][0], p[1] + 8 * velocity[k][1]], f);
        arrow(c, from, v, colours.accept, 60);
      }
      if (part > 0.5) {
        const share = Math.min(1, (part - 0.5) / 0.5);
        c.strokeStyle = colours.chains[k % 8];
        c.lineWidth = 2;
        line(c, ...from, ...this.pixel([p[0] + share * moved[k][0], p[1] + share * moved[k][1]], f));
      }
    });
  }

  forces(c, f, colours, { positions, drift, repulsion }, part) {
    let most = 1e-12;
    for (const part of [drift, repulsion]) for (const member of part) for (const v of member) most = Math.max(most, Math.hypot(...v));
    const share = Math.min(1, part / 0.6), size = 42 / most;
    positions.forEach((member, m) => member.forEach((p, k) => {
      if (p[0] === null) return;
      const from = this.pixel(p, f);
      for (const [force, colour] of [[drift, colours.curve], [repulsion, colours.gradient]]) {
        const v = force[m][k];
        arrow(c, from, [from[0] + share * size * v[0], from[1] - share * size * v[1]], colour);
      }
    }));
  }

  // ---- marginals

  marginals(c, f, colours, done, picture) {
    const [x0, x1, y0, y1] = this.room.view, { frames } = this.chain;
    const particles = frames.length && Array.isArray(frames[0].at[0][0]);
    const counts = [new Array(BINS).fill(0), new Array(BINS).fill(0)];
    let total = 0;
    const count = (p) => {
      total += 1;
      const i = Math.floor((BINS * (p[0] - x0)) / (x1 - x0)), j = Math.floor((BINS * (p[1] - y0)) / (y1 - y0));
      if (i >= 0 && i < BINS) counts[0][i] += 1;
      if (j >= 0 && j < BINS) counts[1][j] += 1;
    };
    if (particles && done) for (const one of frames[done - 1].at) one.forEach(count);
    else for (let i = 0; i < done; i++) if (frames[i].kept || frames[i].stage === "optimise") frames[i].at.forEach(count);
    const spans = [(x1 - x0) / BINS, (y1 - y0) / BINS];
    for (const axis of [0, 1]) {
      const truth = picture?.marginals[axis], bins = counts[axis].map((n) => (total ? n / (total * spans[axis]) : 0));
      const top = truth ? 1.25 * Math.max(...truth.density) : Math.max(...bins, 1e-9);
      const place = (u, v) => axis === 0
        ? [f.left + u * f.width, f.top - 3 - Math.min(1, v / top) * (f.strip - 8)]
        : [f.left + f.width + 3 + Math.min(1, v / top) * (f.strip - 8), f.top + f.height - u * f.height];
      c.fillStyle = colours.chains[0];
      c.globalAlpha = 0.35;
      bins.forEach((v, i) => {
        if (!v) return;
        const [ax, ay] = place(i / BINS, 0), [bx, by] = place((i + 1) / BINS, v);
        c.fillRect(Math.min(ax, bx), Math.min(ay, by), Math.abs(bx - ax), Math.abs(by - ay));
      });
      c.globalAlpha = 1;
      if (!truth) continue;
      const [low, high] = axis === 0 ? [x0, x1] : [y0, y1];
      c.strokeStyle = colours.ink;
      c.lineWidth = 1.4;
      c.beginPath();
      let open = false;
      truth.at.forEach((at, i) => {
        if (at < low || at > high) return;
        const p = place((at - low) / (high - low), truth.density[i]);
        if (open) c.lineTo(...p); else c.moveTo(...p);
        open = true;
      });
      c.stroke();
    }
  }
}

function arrow(c, from, to, colour, most = Infinity) {
  let [dx, dy] = [to[0] - from[0], to[1] - from[1]];
  const size = Math.hypot(dx, dy);
  if (!(size > 1.5) || !Number.isFinite(size)) return;
  if (size > most) { dx *= most / size; dy *= most / size; }
  const end = [from[0] + dx, from[1] + dy], unit = Math.hypot(dx, dy), head = Math.min(7, 0.5 * unit);
  const [ux, uy] = [dx / unit, dy / unit];
  c.strokeStyle = colour;
  c.fillStyle = colour;
  c.lineWidth = 1.8;
  c.setLineDash([]);
  line(c, ...from, end[0] - 0.7 * head * ux, end[1] - 0.7 * head * uy);
  c.beginPath();
  c.moveTo(...end);
  c.lineTo(end[0] - head * ux - 0.5 * head * uy, end[1] - head * uy + 0.5 * head * ux);
  c.lineTo(end[0] - head * ux + 0.5 * head * uy, end[1] - head * uy - 0.5 * head * ux);
  c.fill();
}

// The density as an image, one pixel per point of the grid.
function shade({ log_density: rows, levels }, { heat, dark }) {
  const height = rows.length, width = rows[0].length, canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const c = canvas.getContext("2d"), image = c.createImageData(width, height), rgb = heat.split(",").map(Number);
  let top = -Infinity;
  for (const row of rows) for (const v of row) if (v !== null && v > top) top = v;
  rows.forEach((row, j) => row.forEach((v, i) => {
    const at = 4 * ((height - 1 - j) * width + i), share = v === null ? 0 : Math.exp(0.5 * (v - top));
    image.data.set([...rgb, 255 * (dark ? 0.42 : 0.3) * share], at);
  }));
  c.putImageData(image, 0, 0);
  return canvas;
}

// The line of a level through the grid: segments between points on the edges of its cells.
function contour({ x, y, log_density: rows }, level) {
  const found = [], value = (j, i) => rows[j][i] ?? -1e300;
  const cut = (pa, a, pb, b) => { const t = (level - a) / (b - a); return [pa[0] + t * (pb[0] - pa[0]), pa[1] + t * (pb[1] - pa[1])]; };
  for (let j = 0; j + 1 < y.length; j++) for (let i = 0; i + 1 < x.length; i++) {
    const corners = [[x[i], y[j]], [x[i + 1], y[j]], [x[i + 1], y[j + 1]], [x[i], y[j + 1]]];
    const v = [value(j, i), value(j, i + 1), value(j + 1, i + 1), value(j + 1, i)];
    const crossed = [];
    for (let e = 0; e < 4; e++) {
      const n = (e + 1) % 4;
      if ((v[e] < level) !== (v[n] < level)) crossed.push(cut(corners[e], v[e], corners[n], v[n]));
    }
    for (let e = 0; e + 1 < crossed.length; e += 2) found.push([crossed[e], crossed[e + 1]]);
  }
  return found;
}
