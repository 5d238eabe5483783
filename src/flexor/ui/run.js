"use strict";
// One run: where it stands, what holds it back, its curves, plan and reality, videos, log, notes, settings.

function showRun(place, id) {
  const group = plotGroup();
  const plots = plotGrid(group);
  const head = make("div", { class: "run-head" });
  const trouble = make("div");
  const boxes = { time: make("div"), plan: make("div"), videos: make("div"), checkpoints: make("div"), settings: make("div") };
  const log = logView(id);
  const notes = notesView(id);
  place.classList.add("single");
  place.append(
    head,
    trouble,
    notes.element,
    make("div", { class: "compare" }, plotTools(group), plots.element),
    boxes.time,
    boxes.plan,
    boxes.videos,
    log.element,
    boxes.checkpoints,
    boxes.settings,
  );
  const keys = {};
  /** Draws a part again only if its content changed: a video that plays goes on. */
  const redraw = (name, content, drawPart) => {
    const key = JSON.stringify(content);
    if (keys[name] === key) return;
    keys[name] = key;
    boxes[name].replaceChildren(drawPart(content) ?? "");
  };
  repeat(LIST_EVERY_MS, async () => {
    const run = await get(`run/${id}`);
    document.title = `${run.name} · Flexor`;
    head.replaceChildren(...runHead(run));
    trouble.replaceChildren(...troubles(run));
    notes.update(run.notes);
    redraw("time", run.breakdown, timeOfStep);
    redraw("plan", run.plan, planAndReality);
    redraw("videos", run.videos, (videos) => runVideos(id, videos));
    redraw("checkpoints", run.checkpoints, checkpointTable);
    redraw("settings", run.settings, settingsTable);
    await plots.update([{ ...run, colour: "var(--line)" }]);
    await log.update();
    return run.live ? null : 5 * LIST_EVERY_MS;
  });
}

function runHead(run) {
  const figures = [
    ["Success rate", run.success ? `${percent(run.success.rate)}` : null, run.success ? successNote(run.success) : null],
    ["Loss", run.loss === null || run.loss === undefined ? null : brief(run.loss), null],
    ["Held-out loss, lowest", run.held_out_loss === null ? null : brief(run.held_out_loss), null],
    ["Samples per second", run.samples_per_s ? brief(run.samples_per_s) : null, null],
    run.live ? ["Time left", run.left_s === null ? null : run.left_s < 1 ? "nearly done" : duration(run.left_s), run.left_s === null ? null : `until ${clock(run.left_s)}`] : ["Took", run.elapsed_s === null ? null : duration(run.elapsed_s), null],
  ].filter(([, value]) => value !== null);
  const shown = new Set(["status", "step", "time", "time left"]);
  return [
    make("p", { class: "back" }, link("← all runs", "runs")),
    make("div", { class: "run-top" }, make("h1", {}, run.name), statusMark(run)),
    make("p", { class: "soft path" }, run.folder),
    progressBar(run),
    make("p", { class: "soft" }, stepText(run)),
    make("div", { class: "figures-row" }, figures.map(([name, value, more]) => make("div", { class: "figure" }, make("span", { class: "soft" }, name), make("b", {}, value), more ? make("small", { class: "soft" }, more) : null))),
    facts(run.facts.filter(([name]) => !shown.has(name) && !/loss|success rate/.test(name))),
  ];
}

function successNote({ low, high, step }) {
  const at = `step ${step.toLocaleString("en")}`;
  return low == null || high == null ? `of the last 20 episodes, ${at}` : `95 %: ${percent(low)} to ${percent(high)}, ${at}`;
}

function clock(left) {
  const end = new Date(Date.now() + 1000 * left);
  const time = end.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hour12: false });
  return left < 12 * 3600 ? time : `${end.toLocaleDateString([], { day: "numeric", month: "short" })}, ${time}`;
}

/** What holds the run back, and what is wrong with its learning; the change that helps stands beside it. */
function troubles(run) {
  const parts = run.diagnosis.map((finding) =>
    make(
      "div",
      { class: finding.alarm ? "finding alarm" : "finding" },
      make("h3", {}, finding.verdict),
      make("p", {}, `${sentence(finding.evidence)}.`),
      finding.changes.length ? make("p", { class: "change" }, finding.changes[0]) : null,
      finding.changes.length > 1 || finding.figures.length
        ? make(
            "details",
            {},
            make("summary", {}, "figures and more changes"),
            finding.figures.length ? facts(finding.figures) : null,
            finding.changes.length > 1 ? make("ul", {}, finding.changes.slice(1).map((text) => make("li", {}, text))) : null,
          )
        : null,
    ),
  );
  const health = run.health.map(({ what, evidence, change, step }) =>
    make(
      "div",
      { class: "finding alarm" },
      make("h3", {}, what, step ? make("small", { class: "soft" }, ` step ${step.toLocaleString("en")}`) : null),
      make("p", {}, sentence(evidence)),
      make("p", { class: "change" }, change),
    ),
  );
  const damaged = run.damaged ? [make("p", { class: "warning" }, `${plural(run.damaged, "line")} of its metrics can't be read.`)] : [];
  const all = [...health, ...parts];
  return [...(all.length ? [card("What holds it back", make("div", { class: "findings" }, all))] : []), ...damaged];
}

function timeOfStep(breakdownOfStep) {
  if (!breakdownOfStep) return null;
  const lines = breakdownOfStep.parts.map((part, number) => ({ ...part, colour: curveColour(number), x: breakdownOfStep.x }));
  return card("Where the time of a step goes", linePlot("milliseconds of a step", lines, plotGroup(), { stacked: true, unit: " ms" }));
}

function planAndReality(rows) {
  if (!rows.length) return null;
  return card("Plan and reality", dataTable(["", "Planned", "Measured", "Difference"], rows, { numeric: [1, 2, 3] }));
}

function runVideos(id, videos) {
  if (!videos.length) return null;
  const steps = [...new Set(videos.map((file) => file.step))];
  const box = make("div", { class: "videos" });
  const show = (step) => box.replaceChildren(...videos.filter((file) => file.step === step).map((file) => make("div", { class: "video-column" }, videoFigure(id, file))));
  const choose = picker(steps.map((step) => [String(step), step === null ? "no step" : `step ${step.toLocaleString("en")}`]), String(steps[0]), (value) =>
    show(steps.find((step) => String(step) === value)),
  );
  choose.setAttribute("aria-label", "step of the evaluation");
  const play = make("button", { type: "button" }, "Play all");
  play.addEventListener("click", () => playTogether([...box.querySelectorAll("video")]));
  show(steps[0]);
  return card("Evaluations", make("div", { class: "tools" }, choose, play), box);
}

function checkpointTable(checkpoints) {
  if (!checkpoints.length) return null;
  const rows = [...checkpoints].reverse().map(({ step, folder, bytes, saved }) => [step.toLocaleString("en"), new Date(saved * 1000).toLocaleString("en-GB"), gigabytes(bytes), make("code", {}, folder)]);
  return card("Checkpoints", dataTable(["Step", "Saved", "Size", "Folder"], rows, { numeric: [0, 2] }));
}

function settingsTable(settings) {
  const all = Object.entries(settings);
  if (!all.length) return null;
  const search = make("input", { type: "search", placeholder: "Filter settings", "aria-label": "filter settings" });
  const table = make("div");
  const show = () => table.replaceChildren(facts(all.filter(([name, value]) => `${name}=${value}`.includes(search.value.trim()))));
  search.addEventListener("input", show);
  show();
  return make("details", { class: "card" }, make("summary", {}, make("h2", {}, "Settings"), make("span", { class: "soft" }, ` ${all.length}`)), search, table);
}

function logView(id) {
  const text = make("pre", { class: "log", tabindex: "0", "aria-label": "log" });
  const element = make("details", { class: "card" }, make("summary", {}, make("h2", {}, "Log")), text);
  const update = async () => {
    if (!element.open) return;
    const log = await get(`log/${id}`);
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 20;
    const changed = log.text || "This run has no log.";
    if (text.textContent === changed) return;
    text.textContent = changed;
    if (atEnd) text.scrollTop = text.scrollHeight;
  };
  element.addEventListener("toggle", () => update().catch(lost));
  return { element, update };
}

/** Notes are saved while somebody types. They are a file in the run's folder: notes.md. */
function notesView(id) {
  const area = make("textarea", { rows: 2, placeholder: "Notes about this run…", "aria-label": "notes" });
  const state = make("small", { class: "soft", role: "status" });
  let saved = null; // the text that the run's folder has
  let timer = null;
  const save = async () => {
    timer = null;
    const text = area.value;
    try {
      await send(`notes/${id}`, { text });
      saved = text;
      state.textContent = "Saved in notes.md";
    } catch (error) {
      state.textContent = `Not saved: ${error.message}`;
    }
  };
  area.addEventListener("input", () => {
    state.textContent = "…";
    fit();
    clearTimeout(timer);
    timer = setTimeout(save, 700);
  });
  onLeave(() => {
    if (timer) save();
  });
  const fit = () => {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight + 2}px`;
  };
  return {
    element: make("div", { class: "notes" }, area, state),
    update(text) {
      if (timer || text === saved || document.activeElement === area) return;
      saved = text;
      area.value = text;
      fit();
    },
  };
}
