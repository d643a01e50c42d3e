// A plane of classes: a map of colours, decision boundaries, and points with the shape of their class.
import { Plane } from "/pages/plane.js";

export const MAPS = ["probability", "entropy", "aleatoric", "epistemic"];
export const CLASS_COLOURS = ["class-0", "class-1", "class-2", "class-3"];

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// A map as an image with a pixel for each point of the grid, the first row at the bottom.
export function paint(data, name, colours) {
  const width = data.x.length, height = data.y.length;
  const image = new ImageData(width, height), card = rgb(colours.card);
  const classes = CLASS_COLOURS.map((c) => rgb(colours[c]));
  const most = Math.log(data.classes), values = data[name];
  const full = name === "probability" ? null : rgb(colours[name]);
  for (let j = 0; j < height; j++) {
    for (let i = 0; i < width; i++) {
      const at = j * width + i, to = 4 * ((height - 1 - j) * width + i);
      let strength, colour;
      if (full) { strength = Math.min(1, values[at] / most); colour = full; }
      else {
        const p = values.map((of) => of[at]);
        strength = 0.75 * Math.max(0, (Math.max(...p) * p.length - 1) / (p.length - 1));
        colour = [0, 1, 2].map((k) => p.reduce((sum, v, c) => sum + v * classes[c][k], 0));
      }
      for (let k = 0; k < 3; k++) image.data[to + k] = card[k] + strength * (colour[k] - card[k]);
      image.data[to + 3] = 255;
    }
  }
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// The outline of a point: circle, square, triangle, diamond.
export function shape(c, kind, x, y, r) {
  c.beginPath();
  if (kind === 0) c.arc(x, y, r, 0, 7);
  else if (kind === 1) c.rect(x - 0.9 * r, y - 0.9 * r, 1.8 * r, 1.8 * r);
  else if (kind === 2) { c.moveTo(x, y - 1.2 * r); c.lineTo(x + 1.15 * r, y + 0.85 * r); c.lineTo(x - 1.15 * r, y + 0.85 * r); c.closePath(); }
  else { c.moveTo(x, y - 1.35 * r); c.lineTo(x + 1.2 * r, y); c.lineTo(x, y + 1.35 * r); c.lineTo(x - 1.2 * r, y); c.closePath(); }
}

export class ClassPlane extends Plane {
  constructor(canvas, room) {
    super(canvas, room);
    this.painted = null;
    canvas.addEventListener("pointermove", (event) => room.probe(...this.toPlane(event)));
    canvas.addEventListener("pointerleave", () => room.probe(null));
  }

  // The index of the grid point at a place; -1 without numbers.
  cell(x, y) {
    if (!this.data || !this.data.entropy) return -1;
    const at = (v, axis) => Math.max(0, Math.min(axis.length - 1, Math.round(((v - axis[0]) / (axis[axis.length - 1] - axis[0])) * (axis.length - 1))));
    return at(y, this.data.y) * this.data.x.length + at(x, this.data.x);
  }

  key(event) {
    const kind = Number(event.key) - 1;
    if (kind >= 0 && kind < this.room.classes && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.room.useClass(kind);
      return;
    }
    super.key(event);
    if (this.cross) this.room.probe(...this.cross);
  }

  curvesAndBands(c, frame, colours) {
    const data = this.data, { map, layers } = this.room;
    const line = (pieces) => {
      c.beginPath();
      for (const [x0, y0, x1, y1] of pieces) { c.moveTo(...this.toPixel(x0, y0, frame)); c.lineTo(...this.toPixel(x1, y1, frame)); }
      c.stroke();
    };
    if (data.entropy) {
      const key = `${map} ${colours.dark}`;
      if (!this.painted || this.painted.data !== data || this.painted.key !== key) this.painted = { data, key, image: paint(data, map, colours) };
      const [left, bottom] = this.toPixel(data.x[0], data.y[0], frame), [right, top] = this.toPixel(data.x.at(-1), data.y.at(-1), frame);
      const dx = (right - left) / (data.x.length - 1) / 2, dy = (bottom - top) / (data.y.length - 1) / 2;
      c.imageSmoothingEnabled = true;
      c.drawImage(this.painted.image, left - dx, top - dy, right - left + 2 * dx, bottom - top + 2 * dy);
    }
    c.lineCap = "round";
    c.strokeStyle = colours.point;
    if (layers.draws || !data.entropy) {
      c.globalAlpha = data.entropy ? 0.45 : 0.7;
      c.lineWidth = 1;
      for (const pieces of data.draws) line(pieces);
    }
    c.globalAlpha = 1;
    if (layers.boundary && data.boundary) { c.lineWidth = 2.6; line(data.boundary); }
  }

  pointsAndCross(c, frame, colours) {
    this.room.points.forEach(([x, y, kind], i) => {
      const [px, py] = this.toPixel(x, y, frame), chosen = i === this.room.selected;
      shape(c, kind, px, py, (chosen ? 6.5 : 4.4) * (frame.width < 340 ? 0.8 : 1));
      c.fillStyle = colours[CLASS_COLOURS[kind]];
      c.fill();
      c.lineWidth = chosen ? 2.5 : 1.4;
      c.strokeStyle = chosen ? colours.point : colours.card;
      c.stroke();
    });
    const most = this.room.layers.marks && this.data && this.data.ambiguity && this.data.ambiguity.most;
    if (most) {
      for (const [letter, { at }] of [["A", most.ambiguous], ["D", most.unknown]]) {
        const n = this.data.x.length;
        const [px, py] = this.toPixel(this.data.x[at % n], this.data.y[Math.floor(at / n)], frame);
        const x = Math.min(frame.left + frame.width - 11, Math.max(frame.left + 11, px));
        const y = Math.min(frame.top + frame.height - 11, Math.max(frame.top + 11, py));
        c.beginPath();
        c.arc(x, y, 9, 0, 7);
        c.fillStyle = colours.card;
        c.fill();
        c.lineWidth = 1.6;
        c.strokeStyle = colours.point;
        c.stroke();
        c.fillStyle = colours.point;
        c.font = `600 11px ${colours.font}`;
        c.textAlign = "center";
        c.textBaseline = "middle";
        c.fillText(letter, x, y + 0.5);
      }
    }
    const probe = this.cross && this.room.selected < 0 ? this.cross : this.room.probed;
    if (probe) {
      const [px, py] = this.toPixel(...probe, frame);
      c.strokeStyle = colours.point;
      c.lineWidth = 1.2;
      c.beginPath();
      c.moveTo(px - 8, py); c.lineTo(px + 8, py);
      c.moveTo(px, py - 8); c.lineTo(px, py + 8);
      c.stroke();
    }
  }
}
