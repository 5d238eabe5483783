"use strict";
// The page of `flexor report`: draws what runs/report/page.py collected.

const data = pageData();
const several = data.runs.length > 1;
const groups = []; // of plots, one per kind of x-axis
const timeUnit = findTimeUnit();
const PRINTED_GROUPS = 2; // learning and speed: on paper, the rest would be twenty pages
let byTime = false; // curves over the time of training instead of steps

function header() {
  const links = [...document.querySelectorAll("section")].map((part) =>
    make("a", { href: `#${part.id}` }, part.querySelector("h2").textContent),
  );
  return make(
    "header",
    {},
    make("h1", {}, data.title),
    make("div", { class: "facts" }, `Flexor ${data.version} · ${data.made}`),
    make("nav", {}, links),
  );
}

function section(id, title, ...children) {
  return make("section", { id }, make("h2", {}, title), ...children);
}

function table(heads, rows, attributes = {}) {
  const top = heads.length ? make("tr", {}, heads.map((head) => make("th", {}, head))) : null;
  const body = rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell ?? "–"))));
  return make("div", { class: "scroll" }, make("table", attributes, top, body));
}

function swatch(number) {
  const mark = make("i");
  mark.style.background = curveColour(number);
  return mark;
}

function runSection() {
  const cards = data.runs.map((run, number) =>
    make(
      "article",
      { class: "run" },
      make("h3", {}, swatch(number), run.name),
      make("p", { class: "soft" }, run.folder),
      run.verdict ? make("p", { class: run.alarm ? "warning verdict" : "verdict" }, run.verdict) : null,
      healthList(run.health),
      run.damaged ? make("p", { class: "warning" }, `${plural(run.damaged, "line")} of its metrics can't be read.`) : null,
      table([], run.facts),
    ),
  );
  return section("runs", several ? "Runs" : "Run", make("div", { class: "runs" }, cards));
}

function healthList(findings) {
  if (!findings.length) return null;
  const items = findings.map(({ what, evidence, change, step }) =>
    make(
      "li",
      {},
      make("b", { class: "warning" }, what),
      step ? make("span", { class: "soft" }, ` step ${step.toLocaleString("en")}`) : null,
      make("div", {}, evidence),
      make("div", { class: "soft" }, change),
    ),
  );
  return make("div", { class: "health" }, make("h4", {}, "Learning health"), make("ul", {}, items));
}

// Curves.

function tools() {
  const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, id: "smoothing" });
  const shown = make("span", { class: "soft" }, "0");
  slider.addEventListener("input", () => {
    shown.textContent = slider.value;
    groups.forEach((group) => group.change({ smoothing: Number(slider.value) }));
  });
  const log = make("input", { type: "checkbox", id: "log" });
  log.addEventListener("input", () => groups.forEach((group) => group.change({ log: log.checked })));
  const axis = make("select", { id: "axis" }, ["step", "hours of training"].map((name) => make("option", {}, name)));
  axis.addEventListener("input", () => {
    byTime = axis.selectedIndex === 1;
    document.getElementById("plots").replaceWith(curvePlots());
  });
  const all = make("button", { type: "button", id: "see-all" }, "see all");
  all.addEventListener("click", () => groups.forEach((group) => group.change({ range: null })));
  return make(
    "div",
    { class: "tools" },
    make("label", {}, "smoothing", slider, shown),
    make("label", {}, log, "log axis"),
    make("label", {}, "over", axis),
    all,
    make("span", { class: "soft" }, ZOOM_HINT),
  );
}

function curveSection() {
  return section("curves", "Curves", tools(), curvePlots());
}

function curvePlots() {
  const before = groups[0] ?? { smoothing: 0, log: false };
  groups.length = 0;
  const shared = { [true]: plotGroup(), [false]: plotGroup() }; // with steps, and with time
  for (const group of Object.values(shared)) {
    Object.assign(group, { smoothing: before.smoothing, log: before.log });
    groups.push(group);
  }
  const parts = data.groups.map(({ title, axis, plots }, number) => {
    const drawn = plots.map((plot) => curvesOf(plot, axis, shared[axis === "step"]));
    const group = number < PRINTED_GROUPS ? null : "not-printed";
    return make("div", { class: group }, make("h3", {}, title), make("div", { class: "grid-of-plots" }, drawn));
  });
  const few = data.runs.some((run) => Object.values(run.series).some(({ x, count }) => x.length < count));
  const note = few
    ? make("p", { class: "soft" }, "Long curves are drawn with fewer points: the lowest and the highest of each stretch.")
    : null;
  const none = make("p", { class: "soft" }, "Nothing was reported.");
  return make("div", { id: "plots" }, note, parts.length ? parts : none);
}

/** One plot: a line for each run and each of its series. */
function curvesOf({ title, names, labels }, axis, group) {
  const lines = data.runs.flatMap((run, number) =>
    names.flatMap((name, which) => {
      const found = run.series[name];
      if (!found) return [];
      let { x } = found;
      if (axis === "time") x = x.map((at) => (at - x[0]) / timeUnit.seconds);
      else if (byTime) x = x.map((step) => hoursAt(run, step));
      const text = [several ? run.name : "", labels[which]].filter(Boolean).join(" ");
      return [{ name: text, colour: curveColour(number * names.length + which), x, y: found.y }];
    }),
  );
  const xName = axis === "time" ? timeUnit.name : byTime ? "h" : "step";
  return linePlot(title, lines, group, { xName });
}

/** Of the samples that have a time: minutes, or hours if a run is long. */
function findTimeUnit() {
  const timed = data.groups.filter(({ axis }) => axis === "time").flatMap(({ plots }) => plots.flatMap((p) => p.names));
  const spans = data.runs.flatMap((run) =>
    timed.map((name) => run.series[name]?.x ?? []).map((x) => (x.length ? x[x.length - 1] - x[0] : 0)),
  );
  return spans.some((span) => span > 7200) ? { name: "h", seconds: 3600 } : { name: "min", seconds: 60 };
}

/** Hours of training until a step: between two reports, in proportion. */
function hoursAt(run, step) {
  const { x, y } = run.elapsed;
  if (!x.length) return 0;
  let next = x.findIndex((at) => at >= step);
  if (next < 0) next = x.length - 1;
  const [x0, y0] = next ? [x[next - 1], y[next - 1]] : [0, 0];
  return (y0 + ((y[next] - y0) * (step - x0)) / (x[next] - x0 || 1)) / 3600;
}

// Where the time goes.

function timeSection() {
  const known = data.runs.filter((run) => run.breakdown);
  if (!known.length) return null;
  const group = plotGroup();
  const plots = known.map((run) => {
    const lines = run.breakdown.parts.map((part, number) => ({
      ...part,
      colour: curveColour(number),
      x: run.breakdown.x,
    }));
    const title = several ? `${run.name}: milliseconds per step` : "milliseconds per step";
    return linePlot(title, lines, group, { stacked: true, unit: " ms" });
  });
  return section("time", "Where the time of a step goes", make("div", { class: "grid-of-plots" }, plots));
}

function diagnosisSection() {
  const parts = data.runs.flatMap((run) =>
    run.diagnosis.map((found) =>
      make(
        "article",
        { class: "diagnosis" },
        make("h3", {}, several ? `${run.name}: ${found.verdict}` : found.verdict),
        make("p", {}, `${found.evidence}.`),
        table([], found.figures),
        found.changes.length ? make("ul", {}, found.changes.map((text) => make("li", {}, text))) : null,
      ),
    ),
  );
  return parts.length ? section("diagnosis", "What holds it back", parts) : null;
}

function planSection() {
  const rows = data.runs.flatMap((run) => run.plan.map((row) => (several ? [run.name, ...row] : row)));
  if (!rows.length) return null;
  const heads = [...(several ? ["run"] : []), "", "planned", "measured", "difference"];
  return section("plan", "Plan and reality", table(heads, rows));
}

function settingsSection() {
  const rows = data.differences.map(([name, values]) => [name, ...values]);
  if (several) {
    const same = make("p", { class: "soft" }, "All settings are the same.");
    const heads = ["setting", ...data.runs.map((run) => run.name)];
    return section("settings", "Differences of settings", rows.length ? table(heads, rows) : same);
  }
  const all = Object.entries(data.settings);
  if (!all.length) return null;
  const open = make("details", {}, make("summary", {}, plural(all.length, "setting")), table([], all));
  return section("settings", "Settings", open);
}

function checkpointSection() {
  const rows = data.runs.flatMap((run) =>
    run.checkpoints.map(({ step, folder, bytes, saved }) => [
      ...(several ? [run.name] : []),
      step.toLocaleString("en"),
      new Date(saved * 1000).toLocaleString(),
      `${figure(Number((bytes / 1e6).toPrecision(4)))} MB`,
      make("code", {}, folder),
    ]),
  );
  if (!rows.length) return null;
  const heads = [...(several ? ["run"] : []), "step", "saved", "size", "folder"];
  return section("checkpoints", "Checkpoints", table(heads, rows));
}

// Images and videos.

function mediaSection(kind, title) {
  const parts = data.runs.flatMap((run) => {
    const there = run[kind].filter((file) => file.data !== null);
    const missing = run[kind].filter((file) => file.data === null);
    if (!run[kind].length) return [];
    return [
      several ? make("h3", {}, run.name) : null,
      make("div", { class: "media" }, there.map(mediaFigure)),
      missing.length
        ? make("p", { class: "soft" }, `Not on this page, for its size: ${missing.map((file) => file.name).join(", ")}`)
        : null,
    ];
  });
  return parts.length ? section(kind, title, parts) : null;
}

function mediaFigure(file) {
  const src = `data:${file.kind};base64,${file.data}`;
  const shown = file.kind.startsWith("video/")
    ? make("video", { controls: "", loop: "", preload: "metadata", playsinline: "" })
    : make("img", { alt: file.name });
  shown.muted = true; // there is no sound, and browsers let silent videos play
  const figureElement = make("figure", {}, shown, make("figcaption", {}, mediaCaption(file)));
  whenNear(figureElement, () => shown.setAttribute("src", src));
  return figureElement;
}

function mediaCaption({ name, step }) {
  const file = name.split("/").pop();
  return step === null ? name : `step ${step.toLocaleString("en")}: ${file}`;
}

// The whole page.

document.body.className = "wide";
document.body.append(
  ...[
    runSection(),
    curveSection(),
    timeSection(),
    diagnosisSection(),
    planSection(),
    settingsSection(),
    checkpointSection(),
    mediaSection("images", "Images"),
    mediaSection("videos", "Videos of evaluations"),
  ].filter((part) => part),
);
document.body.prepend(themeButton(), header());
