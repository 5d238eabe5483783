"use strict";
// Plots as SVG: curves with a cursor and zoom, and histograms.

const NAMED_COLOURS = 8; // --curve-0 to --curve-7 in shared.css

const ZOOM_HINT = "drag over a plot to zoom, double-click to see all";

function curveColour(number) {
  return number < NAMED_COLOURS ? `var(--curve-${number})` : `hsl(${(number * 137.5) % 360} 60% 52%)`;
}

/**
 * Curves over the frames of an episode. `curves`: [{name, low: [...], high: [...], from, to}], where low and high are
 * the smallest and the largest value of every `every` frames (the same array if every is 1), NaN where one is missing;
 * from and to are the limits of its axis, which are named if all curves have the same. `marks` [{frame, severity, text}]
 * are drawn as lines at their frames.
 * Returns {element, svg, show(frame), at(place), zoom(from, to)}: `at` is the frame at a place from 0 (left) to 1, and
 * `zoom` shows only some of the frames.
 */
function curvePlot(title, curves, every, length, marks = []) {
  const width = 600;
  const height = 110;
  const view = { from: 0, to: length - 1 };
  const x = (frame) => (length > 1 ? (frame / (length - 1)) * width : width / 2);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
  const legend = make("div", { class: "legend" });
  const values = curves.map((curve, number) => {
    const path = draw("path", { class: "curve", d: curvePath(curve, every, length, x, height) });
    path.style.stroke = curveColour(number);
    svg.append(path, ...missingMarks(curve, every, length, x, height));
    const value = make("b");
    const swatch = make("i");
    swatch.style.background = curveColour(number);
    const entry = make("span", {}, swatch, `${curve.name} `, value);
    legend.append(entry);
    entry.addEventListener("pointerenter", () => path.classList.add("strong"));
    entry.addEventListener("pointerleave", () => path.classList.remove("strong"));
    return value;
  });
  for (const { frame, severity, text } of marks) {
    const at = x(Math.min(frame, length - 1));
    svg.append(draw("line", { class: `mark ${severity}`, y1: 0, y2: height, x1: at, x2: at }, draw("title", {}, text)));
  }
  const cursor = draw("line", { class: "cursor", y1: 0, y2: height, x1: -9, x2: -9 });
  svg.append(cursor);
  const [{ from, to }] = curves;
  const same = curves.every((curve) => curve.from === from && curve.to === to) && Number.isFinite(from);
  const axis = same ? make("div", { class: "axis" }, make("span", {}, figure(to)), make("span", {}, figure(from))) : null;
  const area = make("div", { class: "area" }, svg, axis);
  return {
    element: make("div", { class: "curves" }, make("h4", {}, title), area, legend),
    svg,
    at: (place) => view.from + place * (view.to - view.from),
    zoom(from, to) {
      Object.assign(view, { from: Math.max(from, 0), to: Math.min(to, length - 1) });
      svg.setAttribute("viewBox", `${x(view.from)} 0 ${Math.max(x(view.to) - x(view.from), 1e-3)} ${height}`);
    },
    across: x,
    show(frame) {
      const bucket = Math.floor(frame / every);
      cursor.setAttribute("x1", x(frame));
      cursor.setAttribute("x2", x(frame));
      curves.forEach((curve, number) => {
        const [low, high] = [curve.low[bucket], curve.high[bucket]];
        if (Number.isNaN(low)) values[number].textContent = "not finite";
        else values[number].textContent = low === high ? figure(low) : `${figure(low)} … ${figure(high)}`;
      });
    },
  };
}

function curvePath(curve, every, length, x, height) {
  const span = curve.to - curve.from || 1;
  const y = (value) => (height - 4 - ((value - curve.from) / span) * (height - 8)).toFixed(1);
  let path = "";
  let pen = "M";
  curve.low.forEach((low, bucket) => {
    if (Number.isNaN(low)) {
      pen = "M";
      return;
    }
    const at = x(Math.min((bucket + 0.5) * every - 0.5, length - 1)).toFixed(1);
    path += `${pen}${at} ${y(low)}L${at} ${y(curve.high[bucket])}`;
    pen = "L";
  });
  return path;
}

/** A mark at the bottom where a curve has values that are not finite. */
function missingMarks(curve, every, length, x, height) {
  const marks = [];
  curve.low.forEach((low, bucket) => {
    if (!Number.isNaN(low)) return;
    const at = x(Math.min((bucket + 0.5) * every - 0.5, length - 1));
    marks.push(draw("line", { class: "gap", x1: at, x2: at, y1: height - 10, y2: height }));
  });
  return marks;
}

/**
 * Lets somebody drag over a part of a plot to see only that, and double-click to see all again.
 * `place(event)` is the value on the x-axis under the pointer, `across(value)` where that is in the drawing;
 * `choose(from, to)` and `reset()` do it.
 */
function dragZoom(svg, { place, across, choose, reset }) {
  let begin = null;
  const box = draw("rect", { class: "selection", y: 0, height: "100%" });
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    begin = { value: place(event), at: event.clientX };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!begin || Math.abs(event.clientX - begin.at) < 4) return;
    const [from, to] = [begin.value, place(event)].map(across).sort((a, b) => a - b);
    box.setAttribute("x", from);
    box.setAttribute("width", to - from);
    svg.append(box);
  });
  const end = (event) => {
    if (!begin) return;
    const [from, to] = [begin.value, place(event)].sort((a, b) => a - b);
    const far = Math.abs(event.clientX - begin.at) >= 4;
    begin = null;
    box.remove();
    if (far && event.type === "pointerup" && to > from) choose(from, to);
  };
  svg.addEventListener("pointerup", end);
  svg.addEventListener("pointercancel", end);
  svg.addEventListener("dblclick", reset);
}

/** A histogram: `counts` of equal bins from `low` to `high`. */
function histogram({ low, high, counts }, width = 160, height = 32, colour = null) {
  const most = Math.max(...counts, 1);
  const bar = width / counts.length;
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", class: "histogram" });
  counts.forEach((count, number) => {
    if (!count) return;
    const tall = Math.max((count / most) * height, 1);
    const [from, to] = [number, number + 1].map((edge) => low + ((high - low) * edge) / counts.length);
    const title = draw("title", {}, `${figure(from)} to ${figure(to)}: ${count.toLocaleString("en")}`);
    const place = { x: number * bar, y: height - tall, width: Math.max(bar - 0.5, 0.5), height: tall };
    const drawn = draw("rect", { class: "bar", ...place }, title);
    if (colour) drawn.style.fill = colour;
    svg.append(drawn);
  });
  return svg;
}

const MISSING_CODE = 65535; // of a value that is not finite, as in data/show/curves.py
const CODE_STEPS = 65534;

/**
 * The curves of an episode by feature, from codes in base64: curve after curve, a value for each frame, or the lowest and
 * the highest of `every` frames. Features: [{name, names, low, high}].
 */
function decodedCurves(features, text, every, length) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const codes = new DataView(bytes.buffer);
  const points = Math.ceil(length / every);
  const each = every === 1 ? 1 : 2;
  let at = 0;
  return features.map((feature) =>
    feature.names.map((name, value) => {
      const [from, to] = [feature.low[value], feature.high[value]];
      const read = (point, part) => {
        const code = codes.getUint16(2 * (at + point * each + part), true);
        return code === MISSING_CODE ? NaN : from + (code / CODE_STEPS) * (to - from);
      };
      const low = Array.from({ length: points }, (_, point) => read(point, 0));
      const high = each === 1 ? low : Array.from({ length: points }, (_, point) => read(point, 1));
      at += points * each;
      return { name, low, high, from, to };
    }),
  );
}

/** All values of a feature on one axis, so that they can be compared. */
function sameAxis(curves) {
  const from = Math.min(...curves.filter((curve) => curve.from !== null).map((curve) => curve.from));
  const to = Math.max(...curves.filter((curve) => curve.to !== null).map((curve) => curve.to));
  return curves.map((curve) => ({ ...curve, from, to }));
}
