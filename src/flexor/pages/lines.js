"use strict";
// Lines over steps or time: axes, a cursor with the values, zoom, smoothing, a logarithmic axis; and stacked areas.

const LINES_HEIGHT = 220;
const LINES_MARGIN = { left: 62, right: 10, top: 8, bottom: 24 };

/**
 * What plots have in common that are looked at together: {smoothing, log, range}, where range is the part of the
 * x-axis that is shown, null for all of it. `change({log: true})` draws them again.
 */
function plotGroup() {
  const plots = [];
  const group = {
    smoothing: 0,
    log: false,
    range: null,
    add: (redraw, moveCursor) => plots.push({ redraw, moveCursor }),
    change(settings) {
      Object.assign(group, settings);
      plots.forEach(({ redraw }) => redraw());
    },
    /** Shows the same place on all plots; null: on none. */
    point: (value) => plots.forEach(({ moveCursor }) => moveCursor?.(value)),
  };
  return group;
}

/** The moving average over earlier values, as in runs/series.py; null stays null. */
function smoothed(values, weight) {
  if (!weight) return values;
  let [average, norm] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    average = weight * average + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return average / norm;
  });
}

/** Round numbers between two others, about `count` of them. */
function ticks(from, to, count) {
  const rough = (to - from) / count;
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough * 0.999);
  const first = Math.ceil(from / step - 1e-9);
  const last = Math.min(Math.floor(to / step + 1e-9), first + 100);
  const found = [];
  for (let more = 0; more <= last - first; more += 1) found.push(Number(((first + more) * step).toPrecision(12)));
  return found;
}

/** The same on a logarithmic axis, whose ends are exponents: powers of ten, or more if there are few. */
function logTicks(from, to) {
  for (const factors of [[1], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
    const found = [];
    for (let power = Math.floor(from); power <= Math.ceil(to); power += 1) {
      for (const factor of factors) {
        const place = power + Math.log10(factor);
        if (place >= from && place <= to) found.push(place);
      }
    }
    if (found.length >= 2) return found.filter((_, number) => number % Math.ceil(found.length / 6) === 0);
  }
  return ticks(from, to, 4);
}

/**
 * A plot of `lines`: [{name, colour, x: [...], y: [...]}], x increasing, y null where it is not finite. A line may have
 * an interval (`low` and `high`, like y), and `dots` at its points.
 * Options: `stacked` (areas above each other; all lines have the same x), `unit` (a text after values), `xName`,
 * `format` of values, `domain` of the y-axis, `legend` (false: the values are beside the pointer).
 * Drag to zoom, double-click to see all again. The element's `setLines(lines)` draws others.
 */
function linePlot(
  title,
  lines,
  group,
  { stacked = false, unit = "", xName = "step", format = figure, domain = null, legend = true } = {},
) {
  const svg = draw("svg", { role: "img", "aria-label": title });
  const plot = { lines, svg, stacked, unit, format, domain, group, xName, view: null, values: [] };
  const entries = make("div", { class: "legend" });
  const element = make("figure", { class: "lines", "data-name": title }, make("figcaption", {}, title), svg, entries);
  let near = false; // plots far away are drawn when somebody comes near
  const redraw = () => {
    if (near && svg.clientWidth) drawLines(plot, group, svg.clientWidth, xName);
  };
  element.setLines = (changed) => {
    plot.lines = changed;
    if (legend) plot.values = linesLegend(changed, svg, entries);
    showValues(plot, null);
    redraw();
  };
  whenNear(element, () => {
    near = true;
    redraw(); // at once, for a page that is printed
    new ResizeObserver(redraw).observe(svg);
  });
  group.add(redraw, (value) => moveCursor(plot, value));
  dragZoom(svg, {
    place: (event) => plot.view?.x.back(event.clientX - svg.getBoundingClientRect().left),
    across: (value) => plot.view.x(value),
    choose: (from, to) => group.change({ range: [from, to] }),
    reset: () => group.change({ range: null }),
  });
  svg.addEventListener("pointermove", (event) => (legend ? showValues(plot, event) : showTooltip(plot, event)));
  svg.addEventListener("pointerleave", () => {
    if (legend) showValues(plot, null);
    else hideTooltip(group);
  });
  element.setLines(lines);
  return element;
}

/** Fills the legend, and returns the elements with the values. */
function linesLegend(lines, svg, legend) {
  const values = lines.map(() => make("b"));
  const entries = lines.map(({ name, colour }, number) => {
    const swatch = make("i");
    swatch.style.background = colour;
    const entry = make("span", {}, swatch, `${name} `, values[number]);
    const strong = (on) => () =>
      svg.querySelectorAll(`[data-line="${number}"]`).forEach((path) => path.classList.toggle("strong", on));
    entry.addEventListener("pointerenter", strong(true));
    entry.addEventListener("pointerleave", strong(false));
    return entry;
  });
  legend.replaceChildren(...entries);
  return values;
}

/** The values under the pointer, as the run reported them; without a pointer, the last ones. */
function showValues(plot, event) {
  const at = event && plot.view ? plot.view.x.back(event.clientX - plot.svg.getBoundingClientRect().left) : Infinity;
  let place = null;
  plot.lines.forEach(({ x, y }, number) => {
    const point = nearestPoint(x, at);
    if (point >= 0 && place === null) place = x[point];
    if (!plot.values[number]) return;
    const text = point < 0 ? "–" : y[point] === null ? "not finite" : `${plot.format(y[point])}${plot.unit}`;
    plot.values[number].textContent = event && point >= 0 ? `${text} at ${figure(x[point])}` : text;
  });
  moveCursor(plot, event ? place : null);
}

function moveCursor(plot, value) {
  const cursor = plot.svg.querySelector(".cursor");
  if (!cursor) return;
  const inView = value !== null && value >= plot.view.x.range[0] && value <= plot.view.x.range[1];
  const across = inView ? plot.view.x(value) : -9;
  cursor.setAttribute("x1", across);
  cursor.setAttribute("x2", across);
}

const tooltip = make("div", { class: "tooltip", role: "status", hidden: "" });

/** A box beside the pointer with the values of all lines there, the largest first. */
function showTooltip(plot, event) {
  if (!plot.view || !plot.lines.length) return;
  const box = plot.svg.getBoundingClientRect();
  const at = plot.view.x.back(event.clientX - box.left);
  const near = plot.lines.map((line) => ({ line, point: nearestPoint(line.x, at) })).filter(({ point }) => point >= 0);
  if (!near.length) return;
  const height = event.clientY - box.top;
  const distance = ({ line, point }) => Math.abs((plot.place?.(line.y[point]) ?? Infinity) - height);
  const nearest = near.reduce((best, other) => (distance(other) < distance(best) ? other : best));
  const rows = near
    .sort((a, b) => (b.line.y[b.point] ?? Infinity) - (a.line.y[a.point] ?? Infinity))
    .map(({ line, point }) => {
      const swatch = make("i");
      swatch.style.background = line.colour;
      const value = line.y[point] === null ? "not finite" : `${plot.format(line.y[point])}${plot.unit}`;
      const [low, high] = [line.low?.[point], line.high?.[point]];
      const interval = low == null || high == null ? "" : ` (${plot.format(low)} to ${plot.format(high)})`;
      const here = line === nearest.line && near.length > 1 ? "near" : null;
      return make("tr", { class: here }, make("td", {}, swatch, line.name), make("td", { class: "number" }, value + interval));
    });
  const place = nearest.line.x[nearest.point];
  const where = plot.xName === "step" ? `step ${figure(place)}` : `${figure(place)} ${plot.xName}`;
  tooltip.replaceChildren(make("div", { class: "soft" }, where), make("table", {}, rows));
  tooltip.hidden = false;
  if (!tooltip.isConnected) document.body.append(tooltip);
  const left = event.clientX + 16 + tooltip.offsetWidth > innerWidth ? event.clientX - 16 - tooltip.offsetWidth : event.clientX + 16;
  tooltip.style.left = `${Math.max(left, 4)}px`;
  tooltip.style.top = `${Math.max(Math.min(event.clientY + 12, innerHeight - tooltip.offsetHeight - 4), 4)}px`;
  plot.group.point(place);
}

function hideTooltip(group) {
  tooltip.hidden = true;
  group.point(null);
}

function nearestPoint(x, value) {
  let [low, high] = [0, x.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= value) low = middle;
    else high = middle;
  }
  return high < 0 || Math.abs(x[low] - value) < Math.abs(x[high] - value) ? Math.min(low, high) : high;
}

function drawLines(plot, group, width, xName) {
  const { svg } = plot;
  const log = group.log && !plot.stacked;
  const shown = plot.stacked ? stackedAreas(plot.lines) : plot.lines.map((line) => ({ ...line, y: smoothed(line.y, group.smoothing) }));
  const scale = log ? (value) => (value !== null && value > 0 ? Math.log10(value) : null) : (value) => value;
  plot.view = linesView(plot, shown, group, scale, width);
  const { x, y } = plot.view;
  plot.place = (value) => (value === null || scale(value) === null ? null : y(scale(value)));
  const { left, right, top, bottom } = LINES_MARGIN;
  const marks = [];
  for (const value of log ? logTicks(...y.range) : ticks(...y.range, 5)) {
    const text = draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, tickText(log ? 10 ** value : value, plot.format));
    marks.push(draw("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }), text);
  }
  for (const value of ticks(...x.range, Math.max(width / 70, 3))) {
    const edge = x(value) > width - 40 ? "end" : "middle";
    marks.push(draw("text", { x: x(value), y: LINES_HEIGHT - 8, "text-anchor": edge }, figure(value)));
  }
  marks.push(draw("text", { class: "soft", x: 4, y: LINES_HEIGHT - 8 }, xName));
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  const inside = { x: left - 4, y: 0, width: Math.max(width - left - right, 1) + 8, height: LINES_HEIGHT - bottom + 4 };
  const paths = draw("g", { "clip-path": `url(#${clip})` });
  shown.forEach((line, number) => paths.append(...lineParts(plot, line, number, group, scale)));
  svg.setAttribute("viewBox", `0 0 ${width} ${LINES_HEIGHT}`);
  svg.setAttribute("height", LINES_HEIGHT);
  const cursor = draw("line", { class: "cursor", x1: -9, x2: -9, y1: top, y2: LINES_HEIGHT - bottom });
  svg.replaceChildren(draw("clipPath", { id: clip }, draw("rect", inside)), ...marks, paths, cursor);
}

/** Where values are on the plot: x and y are functions with `range` and, for x, `back`. */
function linesView(plot, shown, group, scale, width) {
  const { left, right, top, bottom } = LINES_MARGIN;
  let [from, to] = [Infinity, -Infinity];
  for (const { x } of shown) if (x.length) [from, to] = [Math.min(from, x[0]), Math.max(to, x[x.length - 1])];
  if (group.range && group.range[0] < to && group.range[1] > from) [from, to] = group.range;
  if (!(to > from)) [from, to] = [Number.isFinite(from) ? from - 1 : 0, Number.isFinite(from) ? from + 1 : 1];
  let [low, high] = plot.stacked ? [0, -Infinity] : [Infinity, -Infinity];
  for (const { x, y } of shown) {
    x.forEach((at, point) => {
      const value = scale(y[point]);
      if (at >= from && at <= to && value !== null) [low, high] = [Math.min(low, value), Math.max(high, value)];
    });
  }
  if (plot.domain) [low, high] = plot.domain;
  if (!(high - low > 1e-9 * Math.max(Math.abs(low), Math.abs(high)))) {
    // one value, but for rounding
    const middle = Number.isFinite(high) ? high : 0;
    const margin = Math.abs(middle) * 0.05 || 1;
    [low, high] = plot.stacked ? [0, middle || 1] : [middle - margin, middle + margin];
  }
  const xSpan = Math.max(width - left - right, 1);
  const ySpan = LINES_HEIGHT - top - bottom;
  const x = (value) => left + ((value - from) / (to - from)) * xSpan;
  x.back = (place) => from + (Math.min(Math.max(place - left, 0), xSpan) / xSpan) * (to - from);
  x.range = [from, to];
  const y = (value) => top + (1 - (value - low) / (high - low)) * ySpan;
  y.range = [low, high];
  return { x, y };
}

/** The path of a line; behind it, faintly, what it was before smoothing; and marks where it is not finite. */
function lineParts(plot, line, number, group, scale) {
  const { x, y } = plot.view;
  const parts = [];
  const add = (kind, values, close) => {
    let path = "";
    let pen = "M";
    values.forEach((value, point) => {
      const scaled = scale(value);
      if (scaled === null) pen = "M";
      else {
        path += `${pen}${x(line.x[point]).toFixed(1)} ${y(scaled).toFixed(1)}`;
        pen = "L";
      }
    });
    const drawn = draw("path", { class: kind, d: path + close, "data-line": number });
    drawn.style[plot.stacked ? "fill" : "stroke"] = line.colour;
    parts.push(drawn);
  };
  if (plot.stacked) {
    const below = line.below.map((value, point) => [line.x[point], value]).reverse();
    add("area", line.y, below.map(([at, value]) => `L${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("") + "Z");
    return parts;
  }
  if (line.low) parts.push(intervalArea(plot, line, scale));
  if (group.smoothing) add("curve faint", plot.lines[number].y, "");
  add("curve", line.y, "");
  const dotted = line.dots || line.x.length === 1 ? line.x : [];
  dotted.forEach((at, point) => {
    if (scale(line.y[point]) === null) return;
    const dot = draw("circle", { cx: x(at), cy: y(scale(line.y[point])), r: 3 });
    dot.style.fill = line.colour;
    parts.push(dot);
  });
  plot.lines[number].y.forEach((value, point) => {
    const at = x(line.x[point]);
    const foot = LINES_HEIGHT - LINES_MARGIN.bottom;
    if (value === null) parts.push(draw("line", { class: "gap", x1: at, x2: at, y1: foot - 10, y2: foot }));
  });
  return parts;
}

/** The area between the lower and the upper ends of a line's intervals. */
function intervalArea(plot, line, scale) {
  const { x, y } = plot.view;
  const edge = (values) =>
    line.x.flatMap((at, point) => {
      const value = values[point] == null ? null : scale(values[point]);
      return value === null ? [] : [`${x(at).toFixed(1)} ${y(value).toFixed(1)}`];
    });
  const area = draw("path", { class: "interval", d: `M${[...edge(line.high), ...edge(line.low).reverse()].join("L")}Z` });
  area.style.fill = line.colour;
  return area;
}

/** A value at an axis: short where it is a power of ten. */
function tickText(value, format) {
  return format(value).replace(/\.?0+e/, "e");
}

/** Lines on top of each other: y is the upper edge, below the lower one. */
function stackedAreas(lines) {
  let sums = lines.length ? lines[0].x.map(() => 0) : [];
  return lines.map((line) => {
    const below = sums;
    sums = sums.map((sum, point) => sum + (line.y[point] ?? 0));
    return { ...line, y: sums, below };
  });
}
