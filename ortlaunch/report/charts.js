/*<![CDATA[*/
"use strict";
// Draws the figures of a page from their JSON: lines over steps, bars, or parallel coordinates.
// Texts enter as text nodes, so that no text of a run becomes markup.
const COLORS = 8, MAX_STRIPS = 100, MAX_DOTS = 40, LOGARITHMIC_SPREAD = 50;
const finite = (points) => points.filter((point) => point[1] !== null);
const log10 = (value) => Math.log10(Math.max(value, 1e-300));
const color = (index) => `var(--run${index % COLORS})`;

function add(parent, name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  element.textContent = text;
  return parent.appendChild(element);
}
function canvas(figure, chart, width, height, top = 0) {
  const box = `0 ${top} ${width} ${height}`;
  return add(figure, "svg", {class: `chart ${chart.kind}`, viewBox: box, role: "img", "aria-label": chart.title});
}
function path(parent, points, attributes, tooltip = "") {
  const element = add(parent, "path", {d: "M" + points.map((point) => point.join(" ")).join("L"), ...attributes});
  if (tooltip) add(element, "title", {}, tooltip);
}
// A map from values to pixels; a range of one value is mapped to the middle.
function scale(low, high, first, last, logarithmic = false) {
  const f = logarithmic ? log10 : Number, span = f(high) - f(low);
  return (value) => Math.round(10 * (first + (span ? (f(value) - f(low)) / span : 0.5) * (last - first))) / 10;
}
function label(value) {
  if (value && Math.abs(value) < 1e-3) {
    const [mantissa, exponent] = value.toExponential(3).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  return Math.abs(value) < 1000 ? String(Number(value.toPrecision(4))) : Math.round(value).toLocaleString("en-US");
}
// Round numbers from low to high, about as many as `count`.
function ticks(low, high, count = 5) {
  const raw = (high - low) / count || Math.abs(high) || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => power * factor >= raw * 0.999), marks = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) marks.push(Number((n * step).toPrecision(12)));
  return marks;
}
function decades(low, high) {
  const marks = [];
  for (let power = Math.ceil(log10(low)); power <= Math.floor(log10(high)); power++) marks.push(10 ** power);
  return marks.length > 1 ? marks : [low, high];
}
function range(chart, values) {
  let low = Math.min(...values, ...(chart.from_zero ? [0] : [])), high = Math.max(...values);
  const median = [...values].sort((a, b) => a - b)[values.length >> 1];
  const logarithmic = !chart.from_zero && low > 0 && high > LOGARITHMIC_SPREAD * median;
  // A constant line is drawn in the middle.
  const margin = low === high ? Math.abs(low) * 0.1 || 1 : logarithmic ? 0 : (high - low) * 0.05;
  low -= low === 0 && chart.from_zero && high > 0 ? 0 : margin;
  high += margin;
  return chart.share ? [Math.max(low, 0), Math.min(high, 1), logarithmic] : [low, high, logarithmic];
}
function lines(figure, chart) {
  const [left, right, top, bottom] = [62, 510, 10, 224], svg = canvas(figure, chart, 520, 250);
  const steps = chart.curves.flatMap((curve) => curve.points.map((point) => point[0]));
  const [low, high, logarithmic] = range(chart, chart.curves.flatMap((curve) => finite(curve.points).map((point) => point[1])));
  const first = Math.min(0, ...steps), last = Math.max(...steps);
  const x = scale(first, last, left, right), y = scale(low, high, bottom, top, logarithmic);
  if (logarithmic) figure.previousElementSibling.append(" (logarithmic)");
  for (const value of logarithmic ? decades(low, high) : ticks(low, high)) {
    path(svg, [[left, y(value)], [right, y(value)]], {class: "axis"});
    add(svg, "text", {x: left - 7, y: y(value) + 4, "text-anchor": "end"}, label(value));
  }
  for (const step of ticks(first, last, 4).filter(Number.isInteger))
    add(svg, "text", {x: x(step), y: 242, "text-anchor": x(step) > right - 12 ? "end" : "middle"}, label(step));
  add(svg, "text", {x: left - 7, y: 242, "text-anchor": "end"}, "step");
  for (const {run, index, part, starts, points} of chart.curves) {
    const stroke = {class: "curve", stroke: color(index), "stroke-dasharray": part ? "2 3" : index >= COLORS ? "7 4" : "none"};
    for (const step of starts)
      path(svg, [[x(step), top], [x(step), bottom]], {...stroke, "stroke-dasharray": "2 4"}, `${run}: a later start went on after step ${step}`);
    // A step without a value interrupts the line.
    let piece = [];
    for (const [step, value] of [...points, [0, null]]) {
      if (value !== null) piece.push([x(step), y(value)]);
      else if (piece.length) { path(svg, piece, stroke); piece = []; }
    }
    if (finite(points).length <= MAX_DOTS)
      for (const [step, value] of finite(points)) add(svg, "circle", {cx: x(step), cy: y(value), r: 2.6, fill: color(index)});
  }
  // Transparent strips, which meet halfway between their steps; the browser shows their titles.
  const values = chart.curves.map((curve) => new Map(finite(curve.points)));
  let shown = [...new Set(values.flatMap((map) => [...map.keys()]))].sort((a, b) => a - b);
  shown = shown.filter((_, n) => n % Math.ceil(shown.length / MAX_STRIPS) === 0);
  shown.forEach((step, n) => {
    const from = n ? (x(shown[n - 1]) + x(step)) / 2 : left;
    const to = n + 1 < shown.length ? (x(step) + x(shown[n + 1])) / 2 : right;
    const strip = add(svg, "g", {class: "at"}), title = add(strip, "title", {}), texts = [`step ${label(step)}`];
    add(strip, "rect", {x: from, y: top, width: Math.max(to - from, 0.1), height: bottom - top, class: "hit"});
    path(strip, [[x(step), top], [x(step), bottom]], {class: "cursor"});
    chart.curves.forEach(({run, index, part}, n) => {
      if (!values[n].has(step)) return;
      const value = values[n].get(step);
      texts.push(`${run}${part ? ", " + part : ""}: ${Number(value.toPrecision(6)).toLocaleString("en-US", {maximumSignificantDigits: 6})}`);
      add(strip, "circle", {cx: x(step), cy: y(value), r: 3.5, fill: color(index)});
    });
    title.textContent = texts.join("\n");
  });
}
// A bar for each row, and a thin line from its low to its high value.
function bars(figure, chart) {
  const left = Math.min(500, 16 + 7.5 * Math.max(...chart.rows.map((row) => row.name.length)));
  const right = 760, height = 34, svg = canvas(figure, chart, 900, height * chart.rows.length + 4);
  const x = scale(0, Math.max(...chart.rows.map((row) => row.high)), left, right);
  chart.rows.forEach((row, n) => {
    const y = height * n + 17;
    add(svg, "rect", {x: left, y: y - 9, width: x(row.value) - left, height: 18, fill: color(row.color)});
    path(svg, [[x(row.low), y], [x(row.high), y]], {class: "curve", stroke: "var(--text)"});
    add(svg, "text", {x: left - 8, y: y + 4, "text-anchor": "end"}, row.name);
    add(svg, "text", {x: x(row.high) + 8, y: y + 4}, row.text);
  });
}
// An axis for each field, a line for each trial.
function parallel(figure, chart) {
  const [left, right, top, bottom, width] = [100, 790, 26, 250, 900];
  const svg = canvas(figure, chart, width, bottom + 104, -12), scales = {}, count = chart.axes.length;
  chart.axes.forEach(({name, log, marks}, n) => {
    const ends = marks.map((mark) => mark[0]);
    const x = count > 1 ? left + (right - left) * n / (count - 1) : (left + right) / 2;
    scales[name] = [x, scale(Math.min(...ends), Math.max(...ends), bottom, top, log)];
  });
  // A trial has no value of a field that it does not search.
  for (const {values, best, text} of chart.lines) {
    const names = chart.axes.map((axis) => axis.name).filter((name) => name in values);
    path(svg, names.map((name) => [scales[name][0], scales[name][1](values[name])]), {class: best ? "curve best" : "curve"}, text);
  }
  chart.axes.forEach(({name, marks}, n) => {
    const [x, y] = scales[name], atEnd = n === count - 1 && name.length > 13, dot = name.lastIndexOf(".");
    path(svg, [[x, top], [x, bottom]], {class: "axis"});
    // A long name is two lines, so that those of neighbouring axes do not overlap.
    (dot > 0 ? [name.slice(0, dot), name.slice(dot + 1)] : [name]).forEach((part, row) =>
      add(svg, "text", {x: atEnd ? width - 4 : x, y: bottom + 60 + 27 * row, "text-anchor": atEnd ? "end" : "middle"}, part));
    for (const [value, text] of marks) {
      const inner = y(value) > top && y(value) < bottom;
      add(svg, "text", {x: inner ? x - 6 : x, y: y(value), dy: inner ? 4 : y(value) === top ? -8 : "1.3em", "text-anchor": inner ? "end" : "middle"}, text);
    }
  });
}
for (const figure of document.querySelectorAll("figure")) {
  const chart = JSON.parse(figure.textContent);
  ({lines, bars, parallel})[chart.kind](figure, chart);
}
/*]]>*/
