"use strict";
// A plan as JSON (plan/show/as_json.py) on a page: the answer first, then bars, changes, and other hardware.

const PART_NAMES = { allocator: "reserved, unused", context: "CUDA context", frames: "cached frames", casts: "casts to bf16" };
const MEMORY_TOTALS = ["allocated_bytes", "reserved_bytes", "peak_bytes", "gpu_bytes"];
const HARM = { time: "the same result, later", hardware: "the same result, on more GPUs", rounding: "rounds differently", learning: "trains differently: evaluate again" };
const BOUND = { gpu: "GPU", host: "host launches", network: "network", data: "data loading" };

function machineName({ gpu, gpus, nodes }) {
  const each = gpus > 1 ? `${gpus} × ${gpu}` : gpu;
  return nodes > 1 ? `${nodes} nodes with ${each}` : each;
}

/** Whether it fits, and the figures that decide. */
function planAnswer(plan, largest) {
  const { memory, time, money, host, fits } = plan;
  const line = make(
    "p",
    { class: `verdict-line ${fits ? "fits" : "no"}` },
    `${plan.policy} `,
    make("b", {}, fits ? "fits" : "does not fit"),
    ` on ${machineName(plan)}`,
  );
  const figures = [
    ["Peak memory", gigabytes(memory.peak_bytes), `${fits ? "of" : "it has"} ${gigabytes(memory.gpu_bytes)}`],
    ["A step", duration(time.step_s), `± ${percent(time.spread)}`],
    ["The run", duration(time.run_s), `${plan.steps.toLocaleString("en")} steps, ${brief(plan.epochs)} epochs`],
    ["To rent", money.rent_usd === null ? "–" : `${dollars(money.rent_usd)} USD`, money.rent_usd === null ? "no price known" : `${dollars(money.rent_usd_per_hour)} USD per hour`],
    ["Largest batch", largest === undefined ? "…" : largest === 0 ? "none" : largest.toLocaleString("en"), plan.gpus * plan.nodes > 1 ? "per GPU" : "per step"],
    ["Host memory", gigabytes(host.memory_bytes), host.memory_bytes > host.has_memory_bytes ? `the host has ${gigabytes(host.has_memory_bytes)}` : `of ${gigabytes(host.has_memory_bytes)}`],
    ["Disk", gigabytes(host.disk_bytes), "at most, with checkpoints"],
  ];
  const batch = `${plan.global_batch_size} samples a step${plan.accumulation > 1 ? ` in ${plan.accumulation} passes` : ""}${plan.gpus * plan.nodes > 1 ? ` on ${plan.gpus * plan.nodes} GPUs` : ""}`;
  const trained = plan.trained_parameters === plan.parameters ? "all" : `${brief(plan.trained_parameters / 1e6)} M`;
  return make(
    "div",
    { class: "answer" },
    line,
    make("p", { class: "soft" }, `${batch}. ${brief(plan.parameters / 1e6)} M parameters, ${trained} of them trained.`),
    make("div", { class: "figures-row" }, figures.map(([name, value, more]) => make("div", { class: "figure" }, make("span", { class: "soft" }, name), make("b", {}, value), make("small", { class: "soft" }, more)))),
    planWarnings(plan),
  );
}

function planWarnings({ host, data, time }) {
  const notes = [];
  if (host.memory_bytes > host.has_memory_bytes) notes.push(`The host is short of ${gigabytes(host.memory_bytes - host.has_memory_bytes)} of memory (${host.source}).`);
  if (data.bound) notes.push(`Data loading is the bottleneck: it delivers ${Math.round(data.later_samples_per_s)} samples/s, and the training could use ${Math.round(data.wanted_samples_per_s)}.`);
  if (time.bound === "host") notes.push("The host launches operations more slowly than the GPU executes them: a larger batch takes little extra time.");
  if (time.bound === "network") notes.push("Communication between GPUs is the bottleneck.");
  return notes.length ? make("div", { class: "note" }, notes.map((text) => make("div", {}, text))) : null;
}

/** A bar of parts; `limit` is marked, and may be smaller or larger than their sum. */
function partsBar(title, parts, format, limit = null) {
  const sum = parts.reduce((total, [, size]) => total + size, 0);
  const end = Math.max(sum, limit?.size ?? 0) || 1;
  const track = make(
    "div",
    { class: "track" },
    parts.map(([name, size], number) => {
      const part = make("div", { class: "part", title: `${name}: ${format(size)}` });
      part.style.width = `${(100 * size) / end}%`;
      part.style.background = curveColour(number);
      return part;
    }),
  );
  const around = make("div", { class: "around" }, track);
  let below = null;
  if (limit) {
    const share = (100 * limit.size) / end;
    const mark = make("div", { class: "limit-mark" });
    mark.style.left = `calc(${share}% - 1px)`;
    const label = make("span", {}, limit.text);
    if (share > 50) label.style.right = `${100 - share}%`;
    else label.style.left = `${share}%`;
    around.append(mark);
    below = make("div", { class: "limit-line" }, label);
  }
  const legend = parts.map(([name, size], number) => make("div", {}, dot(curveColour(number)), make("span", {}, name), make("b", {}, format(size))));
  return make("div", { class: "bar-of-parts", role: "img", "aria-label": `${title}: ${parts.map(([name, size]) => `${name} ${format(size)}`).join(", ")}` }, around, below, make("div", { class: "parts-legend" }, legend));
}

/** The largest parts, and the rest as one. */
function largestParts(parts, least) {
  const sorted = parts.filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]);
  const large = sorted.filter(([, size]) => size >= least);
  const rest = sorted.slice(large.length).reduce((total, [, size]) => total + size, 0);
  return rest > 0 ? [...large, ["other parts", rest]] : large;
}

const PHASES = { forward: "the forward pass", backward: "the backward pass", optimizer: "the optimizer's step", batch: "loading a batch" };

function planMemory(plan) {
  const parts = Object.entries(plan.memory)
    .filter(([name, size]) => name.endsWith("_bytes") && !MEMORY_TOTALS.includes(name) && size > 0)
    .map(([name, size]) => [PART_NAMES[name.replace("_bytes", "")] ?? name.replace("_bytes", "").replace(/_/g, " "), size]);
  const limit = { size: plan.memory.gpu_bytes, text: `${plan.gpu}: ${gigabytes(plan.memory.gpu_bytes)}` };
  const where = (PHASES[plan.memory.peak_phase] ?? plan.memory.peak_phase) + (plan.memory.peak_module ? `, ${plan.memory.peak_module}` : "");
  return card("Memory of each GPU", partsBar("memory", largestParts(parts, 0.01 * plan.memory.peak_bytes), gigabytes, limit), make("p", { class: "soft" }, `Memory is highest in ${where}.`));
}

function planStep(plan) {
  const { time } = plan;
  const parts = Object.entries(time.gpu_s).map(([name, size]) => [name, size]);
  if (time.exposed_s > 0) parts.push(["communication that is not overlapped", time.exposed_s]);
  const waits = time.step_s - parts.reduce((total, [, size]) => total + size, 0);
  if (waits > 0.01 * time.step_s) parts.push(["the GPU waits for launches", waits]);
  const basis = time.calibrated ? "Based on the calibration of this machine." : "Based on data sheets and on measurements of an H200.";
  return card("Time of a step", partsBar("time of a step", largestParts(parts, 0.02 * time.step_s), duration), make("p", { class: "soft" }, `Bottleneck: ${BOUND[time.bound] ?? time.bound}. ${basis}${time.graph ? " Steps are replayed as a CUDA graph." : ""}`));
}

/** What makes it fit: first what keeps the samples of a step, and of those the cheapest. */
function planFixes({ changes, remedy }) {
  if (!changes.length) return make("p", { class: "note" }, "None of the known changes saves enough memory: choose a larger GPU below.");
  const enough = changes.filter((change) => change.fits);
  const combined = remedy.length > 1 && !enough.length;
  const first = combined ? make("p", {}, "No change alone is enough. Together these are: ", make("code", {}, remedy.join(" "))) : null;
  const listed = [...enough, ...changes.filter((change) => !change.fits)].slice(0, 8);
  const items = listed.map((change) =>
    make(
      "li",
      { class: change.fits ? "enough" : null },
      make("code", {}, change.setting),
      make("div", {}, change.why),
      make("small", { class: "soft" }, `${change.fits ? "Fits. " : "Not enough alone. "}Saves ${gigabytes(change.saves_bytes)}, step time × ${change.step_times.toFixed(2)}, ${HARM[change.harm]}.`),
    ),
  );
  return card("What makes it fit", first, make("ul", { class: "fixes" }, items));
}

// Other hardware.

const fittingChoices = (choices) => choices.filter((choice) => choice.fits);
const choiceName = (choice) => machineName({ gpu: choice.gpu, gpus: choice.gpus, nodes: 1 });

/** The choices than which no other is both faster and cheaper. */
function bestChoices(choices) {
  const priced = fittingChoices(choices).filter((choice) => choice.rent_usd).sort((a, b) => a.rent_usd - b.rent_usd || a.run_s - b.run_s);
  let fastest = Infinity;
  return priced.filter((choice) => {
    const better = choice.run_s < 0.98 * fastest;
    if (better) fastest = choice.run_s;
    return better;
  });
}

/** Names for the choices that a sensible person would make. */
function choiceMarks(choices) {
  const best = bestChoices(choices);
  const marks = new Map();
  if (!best.length) return marks;
  marks.set(best[0], "cheapest");
  marks.set(best[best.length - 1], best.length > 1 ? "fastest" : "cheapest and fastest");
  const middle = best.slice(1, -1).sort((a, b) => a.run_s * a.rent_usd - b.run_s * b.rent_usd)[0];
  if (middle) marks.set(middle, "best value");
  return marks;
}

function planScatter(choices, chosen) {
  const priced = fittingChoices(choices).filter((choice) => choice.rent_usd);
  if (priced.length < 2) return null;
  const narrow = innerWidth < 700; // then letters stay as large as on a wide screen, and only marks have labels
  const [width, height] = [narrow ? Math.max(innerWidth - 32, 320) : 760, 380];
  const margin = { left: 62, right: 120, top: 16, bottom: 40 };
  const span = (values) => {
    const logs = values.map(Math.log10);
    const [low, high] = [Math.min(...logs), Math.max(...logs)];
    const room = Math.max(0.06 * (high - low), 0.05);
    return [low - room, high + room];
  };
  const [x0, x1] = span(priced.map((choice) => choice.run_s));
  const [y0, y1] = span(priced.map((choice) => choice.rent_usd));
  const x = (value) => margin.left + ((Math.log10(value) - x0) / (x1 - x0)) * (width - margin.left - margin.right);
  const y = (value) => height - margin.bottom - ((Math.log10(value) - y0) / (y1 - y0)) * (height - margin.top - margin.bottom);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, class: "scatter", role: "img", "aria-label": "rent of the run against its time, for each GPU" });
  for (const value of timeTicks(10 ** x0, 10 ** x1)) {
    svg.append(draw("line", { class: "grid", x1: x(value), x2: x(value), y1: margin.top, y2: height - margin.bottom }));
    svg.append(draw("text", { x: x(value), y: height - margin.bottom + 16, "text-anchor": "middle" }, duration(value)));
  }
  for (const place of logTicks(y0, y1)) {
    const value = 10 ** place;
    svg.append(draw("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: margin.left - 8, y: y(value) + 4, "text-anchor": "end" }, brief(value)));
  }
  svg.append(draw("text", { x: width - margin.right, y: height - 6, "text-anchor": "end" }, "time of the run"), draw("text", { x: 4, y: 12 }, "USD"));
  const best = bestChoices(choices);
  const marks = choiceMarks(choices);
  const labels = new LabelPlaces(width, best.filter((choice) => choice.rent_usd).map((choice) => [x(choice.run_s), y(choice.rent_usd)]));
  for (const choice of [...priced].sort((a, b) => best.includes(a) - best.includes(b))) {
    const front = best.includes(choice);
    const title = draw("title", {}, `${choiceName(choice)}: ${duration(choice.run_s)}, ${dollars(choice.rent_usd)} USD`);
    svg.append(draw("circle", { class: front ? "front" : "point", cx: x(choice.run_s), cy: y(choice.rent_usd), r: front ? 5 : 3.5 }, title));
    if (chosen && choice.gpu === chosen.gpu && choice.gpus === chosen.gpus) svg.append(draw("circle", { class: "chosen", cx: x(choice.run_s), cy: y(choice.rent_usd), r: 9 }));
  }
  const named = [...marks.keys(), ...(narrow ? [] : best.filter((choice) => !marks.has(choice)))];
  for (const choice of named) {
    const text = [choiceName(choice), marks.get(choice)].filter(Boolean).join(", ");
    const place = labels.place(x(choice.run_s), y(choice.rent_usd), text.length * 6.1);
    if (place) svg.append(draw("text", { class: "label", x: place.x, y: place.y }, text));
  }
  return svg;
}

/** Places for labels beside points, that do not cover each other. */
class LabelPlaces {
  constructor(width, points) {
    this.width = width;
    this.boxes = points.map(([x, y]) => [x - 5, y + 4, 10]);
  }

  place(x, y, wide) {
    const tries = [
      [x + 9, y + 4],
      [x + 9, y - 8],
      [x + 9, y + 16],
      [x - wide - 9, y + 4],
      [x - wide - 9, y - 8],
      [x - wide / 2, y - 12],
      [x - wide / 2, y + 20],
    ];
    const found = tries.find(([left, base]) => left > 2 && left + wide < this.width - 2 && base > 12 && !this.boxes.some((box) => left < box[0] + box[2] && box[0] < left + wide && Math.abs(base - box[1]) < 13));
    if (!found) return null;
    this.boxes.push([...found, wide]);
    return { x: found[0], y: found[1] };
  }
}

/** Round times: minutes, hours, days. */
function timeTicks(from, to) {
  const round = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 432000, 864000, 1728000, 4320000];
  const inside = round.filter((value) => value >= from && value <= to);
  const every = Math.ceil(inside.length / 7);
  return inside.filter((_, number) => number % every === 0);
}

const CHOICE_COLUMNS = [
  ["GPU", (choice) => choiceName(choice), false],
  ["Batch", (choice) => choice.batch_size ?? 0, true, (choice) => `${choice.batch_size}${choice.accumulation > 1 ? ` × ${choice.accumulation}` : ""}`],
  ["Peak", (choice) => choice.peak_bytes ?? 0, true, (choice) => gigabytes(choice.peak_bytes)],
  ["Step", (choice) => choice.step_s, true, (choice) => duration(choice.step_s)],
  ["Run", (choice) => choice.run_s, true, (choice) => duration(choice.run_s)],
  ["Rent, USD", (choice) => choice.rent_usd ?? Infinity, true, (choice) => dollars(choice.rent_usd)],
  ["Energy, USD", (choice) => choice.energy_usd, true, (choice) => dollars(choice.energy_usd)],
  ["Bottleneck", (choice) => BOUND[choice.bound] ?? choice.bound, false],
];

/** All hardware on which it fits, in any order; `onChoose` is called with a choice. */
function choiceTable(state, choices, onChoose = null) {
  const fitting = fittingChoices(choices);
  const [, value] = CHOICE_COLUMNS[state.column];
  const compare = (a, b) => (typeof value(a) === "string" ? value(a).localeCompare(value(b), "en", { numeric: true }) : value(a) - value(b));
  const sorted = [...fitting].sort((a, b) => (state.down ? -1 : 1) * compare(a, b));
  const marks = choiceMarks(choices);
  const box = make("div", { class: "scroll" });
  const heads = CHOICE_COLUMNS.map(([name, , numeric], column) => {
    const button = make("button", { type: "button" }, name, state.column === column ? (state.down ? " ↓" : " ↑") : "");
    button.addEventListener("click", () => {
      Object.assign(state, { column, down: state.column === column && !state.down });
      const again = choiceTable(state, choices, onChoose);
      box.replaceWith(again);
      again.querySelectorAll("th button")[column].focus();
    });
    const sort = state.column === column ? (state.down ? "descending" : "ascending") : null;
    return make("th", { class: numeric ? "number" : null, scope: "col", "aria-sort": sort }, button);
  });
  const rows = sorted.slice(0, state.all ? sorted.length : 15).map((choice) => {
    const cells = CHOICE_COLUMNS.map(([, read, numeric, text], column) => {
      let content = text ? text(choice) : read(choice);
      if (column === 0 && onChoose) {
        content = make("button", { type: "button", class: "quiet" }, content);
        content.addEventListener("click", () => onChoose(choice));
      }
      const mark = column === 0 && marks.has(choice) ? make("small", {}, ` ${marks.get(choice)}`) : null;
      return make("td", { class: numeric ? "number" : "nowrap" }, content, mark);
    });
    return make("tr", { class: marks.has(choice) ? "best" : null }, cells);
  });
  box.append(make("table", { class: "choices" }, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, rows)));
  if (sorted.length > rows.length) {
    const more = make("button", { type: "button", class: "quiet" }, `Show all ${sorted.length}`);
    more.addEventListener("click", () => {
      state.all = true;
      box.replaceWith(choiceTable(state, choices, onChoose));
    });
    box.append(more);
  }
  return box;
}
