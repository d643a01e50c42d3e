// Lines, and the numbers of an axis.
export function line(c, x0, y0, x1, y1) {
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1, y1);
  c.stroke();
}

export function ticks(low, high) {
  const span = high - low, power = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => span / s <= 8) || 10 * power;
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

export function label(value) {
  return String(Number(value.toPrecision(6))).replace("-", "−");
}

export function round(value, span) {
  const unit = 10 ** Math.ceil(Math.log10(span / 10000));
  return Number((Math.round(value / unit) * unit).toPrecision(8));
}
