"use strict";
// The page of `flexor data show`: draws what data/show/page.py collected.

const CHANNELS = ["#dc2626", "#16a34a", "#2563eb"];
const data = pageData();

function header() {
  const { version, robot, fps, episodes, frames, shortest, longest, root } = data.facts;
  const lengths = shortest === longest ? `${shortest}` : `${shortest} to ${longest}`;
  return make(
    "header",
    {},
    make("h1", {}, data.title),
    make("div", { class: "facts" }, root),
    make(
      "div",
      { class: "facts", id: "facts" },
      [
        `LeRobot ${version}`,
        robot ? `robot ${robot}` : "robot not given",
        `${plural(episodes, "episode")} of ${lengths} frames`,
        `${plural(frames, "frame")} at ${fps} fps, ${seconds(frames / fps)}`,
      ].join(" · "),
    ),
    ...data.notes.map((note) => make("div", { class: "warning" }, note)),
    make(
      "nav",
      {},
      ["check", "tasks", "episodes", "statistics"].map((name) => make("a", { href: `#${name}` }, name)),
    ),
  );
}

// What the check found.

function checkSection() {
  const { ok, deep, errors, warnings, groups } = data.check;
  const verdict = ok
    ? make("p", { class: "good" }, warnings ? `No errors, ${plural(warnings, "warning")}.` : "No problems found.")
    : make("p", { class: "error" }, `${plural(errors, "error")}, ${plural(warnings, "warning")}.`);
  const how = deep ? "Every frame was decoded." : "Videos were not decoded for the check; --deep does that.";
  return section("check", "What flexor data check found", verdict, make("p", { class: "soft" }, how), groups.map(problem));
}

function problem(group) {
  const place = [group.feature, group.file].filter(Boolean).join(", ");
  return make(
    "div",
    { class: "problem" },
    make("span", { class: group.severity }, group.severity),
    " ",
    make("code", {}, group.kind),
    place ? ` ${place}` : "",
    group.messages.map((message) => make("p", {}, message)),
    group.more ? make("p", { class: "soft" }, `and ${group.more} similar ones`) : null,
    group.episodes.length ? make("p", {}, "episodes ", placeLinks(group.episodes)) : null,
    make("p", { class: "soft" }, `→ ${group.fix}`),
  );
}

/** Links to episodes, and to their frames where they are known: [[episode, frame or null], ...]. */
function placeLinks(places) {
  const few = places.slice(0, 40).flatMap(([index, frame]) => {
    const text = frame === null ? `${index}` : `${index} (frame ${frame})`;
    if (!data.episodes.some((episode) => episode.index === index)) return [text, " "];
    const link = make("a", { href: `#episode-${index}` }, text);
    if (frame !== null) link.addEventListener("click", () => showFrame(index, frame));
    return [link, " "];
  });
  return places.length > 40 ? [...few, `and ${places.length - 40} more`] : few;
}

/** Shows a frame of an episode, even if the episode was filtered out or is not drawn yet. */
function showFrame(index, frame) {
  const card = document.getElementById(`episode-${index}`);
  card.hidden = false;
  if (card.classList.contains("empty")) fillCard(card, data.episodes.find((episode) => episode.index === index));
  card.show(frame);
}

// Tasks, and how long episodes are.

function taskSection() {
  const rows = data.tasks.map((task) => make("tr", {}, make("td", {}, task.text), number(task.episodes)));
  const heads = make("tr", {}, make("th", {}, "task"), make("th", {}, "episodes"));
  const table = rows.length
    ? make("table", { class: "tasks" }, heads, rows)
    : make("p", { class: "soft" }, "The dataset has no tasks.");
  const { shortest, longest } = data.facts;
  const ends = make("div", { class: "ends" }, make("span", {}, `${shortest}`), make("span", {}, `${longest}`));
  const lengths = data.lengths
    ? make("figure", {}, make("figcaption", {}, "Frames per episode"), histogram(data.lengths, 320, 80), ends)
    : null;
  return section("tasks", "Tasks and lengths", make("div", { class: "plots-row" }, make("div", {}, table), lengths));
}

// Statistics.

function statisticsSection() {
  const parts = data.statistics.flatMap((feature) => [
    make("h3", {}, feature.name),
    make("div", { class: "scroll" }, statisticsTable(feature)),
  ]);
  return section("statistics", "Statistics", parts, data.cameras.length ? levelsTable() : null);
}

function statisticsTable(feature) {
  const columns = ["min", "q01", "q50", "q99", "max", "mean", "std"];
  const heads = ["", "histogram", ...columns, "not finite"].map((name) => make("th", {}, name));
  const rows = feature.values.map((value) =>
    make(
      "tr",
      {},
      make("td", {}, value.name),
      make("td", {}, value.histogram ? histogram(value.histogram) : ""),
      columns.map((name) => number(value[name])),
      make("td", { class: value.not_finite ? "number error" : "number" }, figure(value.not_finite)),
    ),
  );
  return make("table", { "data-feature": feature.name }, make("tr", {}, heads), rows);
}

function levelsTable() {
  const rows = data.cameras.map((camera) =>
    make(
      "tr",
      {},
      make("td", {}, camera.name),
      make("td", {}, `${camera.height} x ${camera.width}`),
      make("td", { class: "levels" }, camera.depth ?? camera.histograms.map((h, c) => histogram(h, 260, 24, CHANNELS[c]))),
    ),
  );
  const heads = ["camera", "size", "levels of red, green and blue in the frames shown"];
  return make("table", {}, make("tr", {}, heads.map((head) => make("th", {}, head))), rows);
}

// Episodes.

let ownScales = false; // of the curves of a feature
const flagged = new Set(data.check.groups.flatMap((group) => group.episodes.map(([index]) => index)));

function episodeSection() {
  const cards = data.episodes.map(episodeCard);
  const search = make("input", { type: "search", placeholder: "episode number, or words of its task", id: "search", "aria-label": "filter episodes" });
  const onlyBad = make("input", { type: "checkbox", id: "only-problems" });
  const count = make("span", { class: "soft", id: "count" });
  const filter = () => {
    let shown = 0;
    data.episodes.forEach((episode, position) => {
      const show = matches(episode, search.value) && (!onlyBad.checked || hasProblem(episode));
      cards[position].hidden = !show;
      shown += show;
    });
    count.textContent = plural(shown, "episode");
  };
  search.addEventListener("input", filter);
  onlyBad.addEventListener("input", filter);
  filter();
  const ownScale = make("input", { type: "checkbox", id: "own-scale" });
  ownScale.addEventListener("input", () => {
    ownScales = ownScale.checked;
    data.episodes.forEach((episode, position) => {
      if (!cards[position].classList.contains("empty")) fillCard(cards[position], episode);
    });
  });
  const tools = make(
    "div",
    { class: "tools" },
    search,
    make("label", {}, onlyBad, " only with problems"),
    make("label", {}, ownScale, " each curve on its own scale"),
    count,
  );
  return section("episodes", "Episodes", tools, cards);
}

function hasProblem(episode) {
  return flagged.has(episode.index) || Object.keys(episode.problems).length > 0;
}

function matches(episode, text) {
  const words = text.trim().toLowerCase();
  if (/^\d+$/.test(words)) return episode.index === Number(words);
  return taskText(episode).toLowerCase().includes(words);
}

function taskText(episode) {
  return episode.tasks.map((task) => data.tasks[task].text).join("; ");
}

function episodeCard(episode) {
  const span = `${plural(episode.length, "frame")}, ${seconds(episode.length / data.facts.fps)}`;
  const title = make("h3", {}, `Episode ${episode.index} · ${span} · ${taskText(episode)}`);
  const card = make("article", { class: "episode empty", id: `episode-${episode.index}` }, title);
  if (flagged.has(episode.index)) title.append(make("span", { class: "error" }, " · the check found a problem"));
  for (const [camera, why] of Object.entries(episode.problems)) {
    card.append(make("div", { class: "error" }, `${camera}: ${why}`));
  }
  whenNear(card, () => card.classList.contains("empty") && fillCard(card, episode));
  return card;
}

/** Filmstrip, curves and the frame under the cursor, which all follow each other. */
function fillCard(card, episode) {
  card.classList.remove("empty");
  card.querySelectorAll(".marks, .film, .detail").forEach((old) => old.remove());
  const parts = [];
  const show = (frame) => parts.forEach((part) => part.show(frame));
  card.show = show;
  if (episode.marks.length) card.append(markButtons(episode, show));
  const preview = make("div", { class: "preview" });
  if (episode.image) {
    parts.push(filmstrip(episode, show));
    card.append(parts[0].element);
    parts.push(...data.cameras.map((camera, row) => largeFrame(episode, camera, row, preview)));
  }
  const plots = make("div", { class: "plots" });
  const drawn = episodePlots(episode);
  const zoom = (from, to) => drawn.forEach((plot) => plot.zoom(from, to));
  for (const plot of drawn) {
    plot.svg.addEventListener("pointermove", (event) => show(Math.round(frameUnder(plot, event))));
    dragZoom(plot.svg, {
      place: (event) => frameUnder(plot, event),
      across: plot.across,
      choose: zoom,
      reset: () => zoom(0, episode.length - 1),
    });
    plots.append(plot.element);
    parts.push(plot);
  }
  const where = make("div", { class: "soft" });
  parts.push({
    show: (frame) => (where.textContent = `frame ${frame}, ${(frame / data.facts.fps).toFixed(2)} s · ${ZOOM_HINT}`),
  });
  plots.append(where);
  card.append(make("div", { class: "detail" }, plots, preview));
  show(0);
}

/** What the check found in an episode; a click shows the frame. */
function markButtons(episode, show) {
  const buttons = episode.marks.map(({ frame, severity, kind, feature, text }) => {
    const label = [`frame ${frame}:`, kind, feature].filter(Boolean).join(" ");
    const button = make("button", { type: "button", class: severity, title: text }, label);
    button.addEventListener("click", () => show(Math.min(frame, episode.length - 1)));
    return button;
  });
  return make("div", { class: "marks" }, buttons);
}

function frameUnder(plot, event) {
  const box = plot.svg.getBoundingClientRect();
  return plot.at(Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1));
}

function filmstrip(episode, show) {
  const image = make("img", { src: source(episode), alt: `frames of episode ${episode.index}` });
  const marks = data.cameras.map((camera, row) => {
    const mark = make("div", { class: "here" });
    const [width, height] = [camera.thumbnail_width, data.sheet_height];
    Object.assign(mark.style, { top: `${row * height}px`, width: `${width}px`, height: `${height}px` });
    return mark;
  });
  const labels = data.cameras.map((camera) => {
    const line = make("div", {}, make("span", { class: "label" }, camera.name));
    line.style.height = `${data.sheet_height}px`;
    return line;
  });
  const names = make("div", { class: "labels" }, labels);
  const inside = make("div", { class: "inside" }, image, names, cameraFlags(episode), marks);
  inside.addEventListener("pointermove", (event) => {
    const box = inside.getBoundingClientRect();
    const row = Math.min(Math.floor((event.clientY - box.top) / data.sheet_height), data.cameras.length - 1);
    const column = Math.floor((event.clientX - box.left) / data.cameras[Math.max(row, 0)].thumbnail_width);
    show(episode.frames[Math.min(column, episode.frames.length - 1)]);
  });
  const film = make("div", { class: "film" }, inside);
  return {
    element: film,
    show(frame) {
      const column = nearest(episode.frames, frame);
      if (!film.matches(":hover")) {
        film.scrollLeft = (column + 0.5) * data.cameras[0].thumbnail_width - film.clientWidth / 2;
      }
      data.cameras.forEach((camera, row) => (marks[row].style.left = `${column * camera.thumbnail_width}px`));
    },
  };
}

/** Bars above the images of a camera in which the check found something. */
function cameraFlags(episode) {
  return data.cameras.flatMap((camera, row) =>
    episode.marks
      .filter((mark) => mark.feature === camera.name)
      .map(({ frame, severity }) => {
        const flag = make("div", { class: `flag ${severity}` });
        const [width, height] = [camera.thumbnail_width, data.sheet_height];
        const left = nearest(episode.frames, frame) * width;
        Object.assign(flag.style, { left: `${left}px`, top: `${row * height}px`, width: `${width}px`, height: `${height}px` });
        return flag;
      }),
  );
}

/** A camera's frame under the cursor, enlarged. */
function largeFrame(episode, camera, row, preview) {
  const scale = Math.min(160 / data.sheet_height, 320 / camera.thumbnail_width);
  const [width, height] = [camera.thumbnail_width * scale, data.sheet_height * scale];
  const widest = Math.max(...data.cameras.map((other) => other.thumbnail_width)) * episode.frames.length;
  const frame = make("div", { class: "frame" });
  Object.assign(frame.style, {
    width: `${width}px`,
    height: `${height}px`,
    backgroundImage: `url("${source(episode)}")`,
    backgroundSize: `${widest * scale}px ${data.cameras.length * height}px`,
  });
  const caption = make("figcaption");
  preview.append(make("figure", {}, frame, caption));
  return {
    show(number) {
      const column = nearest(episode.frames, number);
      frame.style.backgroundPosition = `${-column * width}px ${-row * height}px`;
      caption.textContent = `${camera.name}, frame ${episode.frames[column]}`;
    },
  };
}

function source(episode) {
  return `data:image/jpeg;base64,${episode.image}`;
}

function nearest(frames, frame) {
  let best = 0;
  frames.forEach((other, column) => {
    if (Math.abs(other - frame) < Math.abs(frames[best] - frame)) best = column;
  });
  return best;
}

/** A plot per feature. */
function episodePlots(episode) {
  const all = decodedCurves(data.curves, episode.curves, episode.every, episode.length);
  return data.curves.map((feature, number) =>
    curvePlot(
      feature.name,
      ownScales ? all[number] : sameAxis(all[number]),
      episode.every,
      episode.length,
      plotMarks(episode, feature.name),
    ),
  );
}

/** The marks on the plot of a feature: its own, and those of columns that are not drawn, such as timestamps. */
function plotMarks(episode, name) {
  const elsewhere = [...data.curves, ...data.cameras].map((feature) => feature.name).filter((other) => other !== name);
  return episode.marks
    .filter((mark) => !elsewhere.includes(mark.feature))
    .map((mark) => ({ ...mark, text: `${mark.kind}: ${mark.text}` }));
}

// The whole page.

function number(value) {
  return make("td", { class: "number" }, figure(value));
}

function section(id, title, ...children) {
  return make("section", { id }, make("h2", {}, title), ...children);
}

document.body.className = "wide";
document.body.append(
  themeButton(),
  header(),
  checkSection(),
  taskSection(),
  episodeSection(),
  statisticsSection(),
);
