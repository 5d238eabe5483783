"use strict";
// All runs: the list, and the curves of those that are selected.

const FIRST_SELECTED = 6; // runs that are drawn when nobody has chosen yet
const LIST_EVERY_MS = 2000;
const colours = new Map(); // run -> number of its colour

/** A colour that no other selected run has. */
function runColour(id) {
  if (!colours.has(id)) {
    const used = new Set(colours.values());
    let number = 0;
    while (used.has(number)) number += 1;
    colours.set(id, number);
  }
  return curveColour(colours.get(id));
}

const ORDERS = {
  newest: ["newest first", (a, b) => (b.updated ?? 0) - (a.updated ?? 0)],
  name: ["by name", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })],
  success: ["best success rate", (a, b) => (b.success?.rate ?? -1) - (a.success?.rate ?? -1)],
  loss: ["lowest loss", (a, b) => (a.loss ?? Infinity) - (b.loss ?? Infinity)],
};

TABS.runs = {
  title: "Runs",
  show(place, [id]) {
    if (id) showRun(place, id);
    else showRuns(place);
  },
};

function showRuns(place) {
  const state = { rows: [], selected: remembered("selected", null), order: remembered("order", "newest"), text: "" };
  const list = make("div", { class: "run-list", role: "list" });
  const count = make("span", { class: "soft" });
  const search = make("input", { type: "search", placeholder: "Filter runs", "aria-label": "filter runs" });
  const order = picker(Object.entries(ORDERS).map(([name, [text]]) => [name, text]), state.order, (value) => {
    state.order = value;
    remember("order", value);
    drawList();
  });
  order.setAttribute("aria-label", "order of the runs");
  search.addEventListener("input", () => {
    state.text = search.value.trim().toLowerCase();
    drawList();
  });
  const none = make("button", { type: "button", class: "quiet" }, "Hide all");
  none.addEventListener("click", () => select([]));
  const side = make("aside", {}, make("div", { class: "side-tools" }, search, order), make("div", { class: "side-head" }, count, none), list);
  const curves = compareView(() => state.selected ?? []);
  place.append(side, curves.element);

  function select(ids) {
    state.selected = ids;
    for (const id of [...colours.keys()]) if (!ids.includes(id)) colours.delete(id);
    remember("selected", ids);
    drawList();
    curves.update(state.rows);
  }

  const elements = new Map();
  function drawList() {
    const shown = state.rows.filter((row) => matchesText(row, state.text)).sort(ORDERS[state.order][1]);
    count.textContent = `${plural(shown.length, "run")}, ${(state.selected ?? []).length} drawn`;
    const parts = shown.map((row) => {
      const selected = (state.selected ?? []).includes(row.id);
      const key = JSON.stringify([row, selected, selected ? runColour(row.id) : null, row.live ? 0 : ago(row.updated ?? 0)]);
      if (elements.get(row.id)?.key !== key) elements.set(row.id, { key, element: runRow(row, selected, toggle) });
      return elements.get(row.id).element;
    });
    const focus = document.activeElement?.dataset?.run; // a row that is drawn anew keeps it
    if (parts.some((part, number) => list.children[number] !== part) || list.children.length !== parts.length) {
      list.replaceChildren(...parts);
      if (focus) list.querySelector(`input[data-run="${focus}"]`)?.focus();
    }
  }

  function toggle(id, on) {
    const ids = (state.selected ?? []).filter((other) => other !== id);
    select(on ? [...ids, id] : ids);
  }

  repeat(LIST_EVERY_MS, async () => {
    const rows = await get("runs");
    const loading = rows.some((row) => !row.loaded);
    if (!rows.length && !state.rows.length) {
      place.classList.add("without-runs");
      place.replaceChildren(
        emptyState(
          "No run yet",
          `Runs that begin in ${about.folders.join(", ")} appear here by themselves. This one takes a few minutes on any machine:`,
          "flexor demo",
        ),
      );
      return null;
    }
    if (place.classList.contains("without-runs")) {
      place.classList.remove("without-runs");
      place.replaceChildren(side, curves.element);
    }
    state.rows = rows;
    if (state.selected === null || !state.selected.some((id) => rows.some((row) => row.id === id))) {
      if (!loading || rows.filter((row) => row.loaded).length >= FIRST_SELECTED) {
        state.selected = rows.filter((row) => row.loaded).sort(ORDERS.newest[1]).slice(0, FIRST_SELECTED).map((row) => row.id);
      }
    }
    drawList();
    await curves.update(rows);
    return loading ? 30 : null;
  });
}

function matchesText(row, text) {
  return !text || [row.name, row.policy, row.dataset, row.status].some((part) => part?.toLowerCase().includes(text));
}

function runRow(row, selected, toggle) {
  const box = make("input", { type: "checkbox", "aria-label": `draw ${row.name}`, "data-run": row.id });
  box.checked = selected;
  if (selected) box.style.accentColor = runColour(row.id);
  box.addEventListener("input", () => toggle(row.id, box.checked));
  const title = link(row.name, "runs", row.id);
  title.className = "run-name";
  if (!row.loaded) return make("div", { class: "run-row", role: "listitem" }, box, make("div", {}, title));
  const result = row.success ? `${percent(row.success.rate)} success` : row.loss === null || row.loss === undefined ? "" : `loss ${brief(row.loss)}`;
  const where = row.live && row.left_s !== null ? (row.left_s < 1 ? "nearly done" : `${duration(row.left_s)} left`) : ago(row.updated);
  const about_run = [row.policy, row.dataset?.split("/").pop()].filter(Boolean).join(" · ");
  return make(
    "div",
    { class: "run-row", role: "listitem" },
    box,
    make(
      "div",
      {},
      make("div", { class: "run-top" }, title, statusMark(row)),
      progressBar(row),
      make("div", { class: "run-facts soft" }, make("span", {}, about_run), make("span", { class: "figures" }, result)),
      make("div", { class: "run-facts soft" }, make("span", {}, stepText(row)), make("span", { class: "figures" }, where)),
    ),
  );
}

function stepText({ step, steps }) {
  return steps ? `step ${step.toLocaleString("en")} of ${steps.toLocaleString("en")}` : `step ${step.toLocaleString("en")}`;
}

function statusMark({ status, alarm, health }) {
  const warn = alarm || health?.length;
  const title = [alarm ? "something holds it back" : null, ...(health ?? [])].filter(Boolean).join(", ");
  return make("span", { class: "status" }, warn ? make("span", { class: "warn", title, role: "img", "aria-label": title }, "▲") : null, make("span", { class: `chip ${status.replace(/ /g, "-")}` }, status));
}

function progressBar({ step, steps }) {
  const share = steps ? Math.min(step / steps, 1) : 0;
  const bar = make("div", { class: "progress", "aria-hidden": "true" }, make("div"));
  bar.firstChild.style.width = `${100 * share}%`;
  return bar;
}

// Curves of several runs.

/** Controls of all plots: smoothing, a logarithmic axis, and all steps again. */
function plotTools(group) {
  const slider = make("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: remembered("smoothing", 0), "aria-label": "smoothing" });
  group.smoothing = Number(slider.value);
  slider.addEventListener("input", () => {
    remember("smoothing", Number(slider.value));
    group.change({ smoothing: Number(slider.value) });
  });
  const all = make("button", { type: "button", class: "quiet" }, "See all steps");
  all.addEventListener("click", () => group.change({ range: null }));
  return make(
    "div",
    { class: "tools" },
    make("label", { class: "check" }, "Smooth", slider),
    checkbox("Log axis", false, (log) => group.change({ log })),
    all,
    make("span", { class: "soft hint" }, "drag to zoom, double-click to see all"),
  );
}

function compareView(selectedIds) {
  const group = plotGroup();
  const plots = plotGrid(group);
  const table = make("div");
  const tools = plotTools(group);
  const nothing = emptyState("No run is drawn", "Tick runs in the list to draw and compare them.");
  const element = make("div", { class: "compare" });
  const videos = make("div");
  let [compared, drawnTable, drawnVideos, differences] = ["", "", "", []];
  return {
    element,
    async update(rows) {
      const runs = selectedIds().map((id) => rows.find((row) => row.id === id)).filter(Boolean);
      if (!runs.length) {
        if (rows.length && rows.every((row) => row.loaded)) element.replaceChildren(nothing);
        return;
      }
      if (!table.isConnected) element.replaceChildren(tools, plots.element, table, videos);
      await plots.update(runs.map((run) => ({ ...run, colour: runColour(run.id) })));
      const ids = runs.map((run) => run.id).join(" ");
      if (ids !== compared) {
        differences = runs.length > 1 ? await get("differences", { runs: ids }) : [];
        compared = ids;
      }
      const key = JSON.stringify([runs, differences]);
      if (key !== drawnTable) table.replaceChildren(comparison(runs, differences));
      drawnTable = key;
      const filmed = JSON.stringify(runs.map(({ id, video_count: count }) => [id, count]));
      if (filmed !== drawnVideos) videos.replaceChildren(await videosSideBySide(runs));
      drawnVideos = filmed;
    },
  };
}

/** The results of runs beside each other, and the settings in which they differ. */
function comparison(runs, differences) {
  const heads = ["Run", "Steps", "Loss", "Held-out loss", "Success", "Samples/s", "Time", ...differences.map(([name]) => name)];
  const rows = runs.map((run, number) => [
    make("span", { class: "nowrap" }, dot(runColour(run.id)), link(run.name, "runs", run.id)),
    run.step.toLocaleString("en"),
    brief(run.loss),
    brief(run.held_out_loss),
    run.success ? percent(run.success.rate) + interval(run.success) : "–",
    brief(run.samples_per_s),
    duration(run.elapsed_s),
    ...differences.map(([, values]) => values[number] ?? "–"),
  ]);
  return card("Compared", dataTable(heads, rows, { numeric: [1, 2, 3, 4, 5, 6] }));
}

/** Of a success rate, where there is one: " (80 % to 98 %)". */
function interval({ low, high }) {
  return low == null || high == null ? "" : ` (${percent(low)} to ${percent(high)})`;
}

/** The newest videos of each run, the same episode in a row. */
async function videosSideBySide(runs) {
  const filmed = runs.filter((run) => run.video_count).slice(0, 6);
  if (!filmed.length) return "";
  const videos = await get("videos", { runs: filmed.map((run) => run.id).join(" ") });
  const withVideos = filmed.map((run) => ({ ...run, videos: videos[run.id] })).filter((run) => run.videos.length);
  const columns = withVideos.map((detail) => {
    const newest = detail.videos[0].step;
    const videos = detail.videos.filter((file) => file.step === newest).slice(0, 3);
    return make(
      "div",
      { class: "video-column" },
      make("h3", {}, dot(runColour(detail.id)), detail.name),
      newest === null ? null : make("p", { class: "soft" }, `step ${newest.toLocaleString("en")}`),
      videos.map((file) => videoFigure(detail.id, file)),
    );
  });
  const play = make("button", { type: "button" }, "Play all");
  const box = make("div", { class: "videos" }, columns);
  play.addEventListener("click", () => playTogether([...box.querySelectorAll("video")]));
  return card("Evaluations", play, box);
}

function videoFigure(run, { name }) {
  const parts = name.split("/").map(encodeURIComponent).join("/");
  const video = make("video", { controls: "", loop: "", preload: "metadata", playsinline: "", src: address(`video/${run}/${parts}`) });
  video.muted = true; // there is no sound, and browsers let silent videos play
  const file = name.split("/").pop().replace(/\.mp4$/, "").replace(/_/g, " ");
  const outcome = /success$/.test(file) ? "good" : /failure$/.test(file) ? "bad" : "";
  return make("figure", {}, video, make("figcaption", { class: outcome }, file));
}

function playTogether(videos) {
  const playing = videos.some((video) => !video.paused);
  videos.forEach((video) => {
    if (playing) video.pause();
    else {
      video.currentTime = 0;
      video.play().catch(() => {});
    }
  });
}

/** The plots of runs: those that matter, and the rest behind a line that opens them. */
function plotGrid(group, options = {}) {
  const element = make("div");
  const drawn = new Map(); // title of a plot -> its element
  const received = new Map(); // run -> {stamp, curves}: of runs that report nothing new, nothing is asked again
  const stampOf = ({ step, updated, status }) => `${step} ${updated} ${status}`;
  let layout = "";
  let folds = [];
  let last = "";

  async function update(runs) {
    const ids = runs.map((run) => run.id).join(" ");
    const state = JSON.stringify(runs.map((run) => [run.id, run.name, run.colour, stampOf(run)]));
    if (state === last) return;
    const { signals, folded } = await get("plots", { runs: ids });
    const key = JSON.stringify([signals, folded]);
    if (key !== layout) {
      layout = key;
      build(signals, folded);
    }
    await fillPlots(runs, signals);
    for (const fold of folds) {
      fold.runs = runs;
      if (fold.element.open) await fillPlots(runs, fold.signals);
    }
    last = state;
  }

  /** The curves of runs by name, asked for where they are new. */
  async function curvesOf(runs, names) {
    for (const run of runs) {
      if (received.get(run.id)?.stamp !== stampOf(run)) received.set(run.id, { stamp: stampOf(run), names: new Set(), curves: {} });
    }
    const missing = runs.filter((run) => names.some((name) => !received.get(run.id).names.has(name)));
    if (missing.length) {
      const curves = await get("curves", { runs: missing.map((run) => run.id).join(" "), names: names.join(" ") });
      for (const run of missing) {
        const entry = received.get(run.id);
        names.forEach((name) => entry.names.add(name));
        Object.assign(entry.curves, curves[run.id]);
      }
    }
    return Object.fromEntries(runs.map((run) => [run.id, received.get(run.id).curves]));
  }

  function build(signals, folded) {
    const open = new Set(folds.filter((fold) => fold.element.open).map((fold) => fold.title));
    drawn.clear();
    last = "";
    const parts = [...new Set(signals.map((signal) => signal.group))].map((title) =>
      make("section", { class: "plot-group" }, make("h2", {}, title), plotsOf(signals.filter((signal) => signal.group === title))),
    );
    folds = folded.map(({ title, signals: inside }) => {
      const fold = make("details", {}, make("summary", {}, `${title} `, make("span", { class: "soft" }, plural(inside.length, "curve"))));
      const entry = { title, element: fold, signals: inside, runs: [] };
      fold.addEventListener("toggle", () => {
        if (!fold.open) return;
        if (fold.children.length === 1) fold.append(plotsOf(inside));
        fillPlots(entry.runs, inside).catch(lost);
      });
      fold.open = open.has(title);
      return entry;
    });
    const more = folds.length ? make("section", { class: "plot-group folds" }, make("h2", {}, "More"), folds.map((fold) => fold.element)) : null;
    element.replaceChildren(...parts, ...(more ? [more] : []));
  }

  function plotsOf(signals) {
    const plots = signals.map((signal) => {
      const share = signal.kind === "share";
      const format = share ? percent : signal.kind === "seconds" ? duration : figure;
      const plot = linePlot(signal.title, [], group, { legend: false, format, domain: share ? [0, 1] : null, ...options });
      drawn.set(signal.names.join(" "), plot);
      return plot;
    });
    return make("div", { class: "plots" }, plots);
  }

  async function fillPlots(runs, signals) {
    const names = signals.flatMap((signal) => [...signal.names, ...(signal.band ?? [])]);
    if (!runs.length || !names.length) return;
    const curves = await curvesOf(runs, names);
    for (const signal of signals) {
      const plot = drawn.get(signal.names.join(" "));
      const lines = runs.flatMap((run) => lineOf(run, signal, curves[run.id] ?? {}));
      const key = JSON.stringify(lines);
      if (plot && plot.key !== key) {
        plot.key = key;
        plot.setLines(lines);
        plot.hidden = !lines.length;
        showNewest(plot, lines, signal);
      }
    }
  }

  return { element, update };
}

function lineOf(run, signal, curves) {
  const name = signal.names.find((other) => curves[other]);
  if (!name) return [];
  const { x, y } = curves[name];
  const line = { name: run.name, colour: run.colour, x, y };
  if (signal.band && curves[signal.band[0]]) {
    const [low, high] = signal.band.map((edge) => {
      const at = new Map(curves[edge].x.map((step, point) => [step, curves[edge].y[point]]));
      return x.map((step) => at.get(step) ?? null);
    });
    return [{ ...line, low, high, dots: true }];
  }
  return [x.length < 12 ? { ...line, dots: true } : line];
}

/** Beside the title: the newest value, if there is one run. */
function showNewest(plot, lines, signal) {
  const caption = plot.querySelector("figcaption");
  const value = lines.length === 1 ? lines[0].y[lines[0].y.length - 1] : undefined;
  const format = signal.kind === "share" ? percent : signal.kind === "seconds" ? duration : brief;
  caption.replaceChildren(signal.title, ...(value === undefined ? [] : [make("b", { class: "newest" }, value === null ? "not finite" : format(value))]));
}
