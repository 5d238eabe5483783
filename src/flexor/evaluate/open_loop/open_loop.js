"use strict";
// The page of `flexor eval --open_loop`: draws what evaluate/open_loop/page.py collected.

const data = pageData();
const POLICY = "policy";

function section(id, title, ...children) {
  return make("section", { id }, make("h2", {}, title), ...children);
}

function number(value) {
  return make("td", { class: "number" }, figure(value));
}

function percent(share) {
  return `${share > 0 ? "+" : ""}${Math.round(100 * share)} %`;
}

function header() {
  const facts = `${plural(data.episodes.length, "episode")}, ${plural(data.samples, "sample")} of ${data.steps} steps`;
  const kind = data.action_kind ? ` · ${data.action_kind} actions` : "";
  return make(
    "header",
    {},
    make("h1", {}, data.title),
    make("div", { class: "facts" }, `${data.dataset} · ${facts}${kind}`),
    data.notes.map((note) => make("div", { class: "warning" }, note)),
    make("nav", {}, ["verdicts", "errors", "inputs", "episodes"].map((name) => make("a", { href: `#${name}` }, name))),
  );
}

function verdictSection() {
  const text = data.beats_all_baselines ? "The policy is better than all baselines." : "The policy is not better than all baselines.";
  const parts = data.verdicts.map((verdict) =>
    make(
      "div",
      { class: "verdict" },
      make("code", { class: "warning" }, verdict.kind),
      make("p", {}, verdict.message),
      make("p", { class: "soft" }, `→ ${verdict.fix}`),
    ),
  );
  const none = make("p", { class: "good" }, "No fault found.");
  return section("verdicts", "Verdicts", make("p", { id: "summary" }, text), parts.length ? parts : none);
}

function errorSection() {
  const heads = ["", "error", "change by the policy", ...data.joints].map((name) => make("th", {}, name));
  const rows = [[POLICY, { ...data.errors, score: data.score, change: null }], ...Object.entries(data.baselines)].map(([name, part]) => {
    const change = part.change
      ? make("td", { class: part.change.high < 0 ? "number better" : part.change.low > 0 ? "number worse" : "number" }, percent(part.change.mean))
      : make("td", {}, "");
    return make("tr", { "data-row": name }, make("td", {}, name), number(part.score), change, part.joint.map(number));
  });
  const note =
    "The error is the mean absolute error over all joints, in standard deviations of their actions. " +
    "Errors of joints are in the robot's units.";
  return section(
    "errors",
    "Errors",
    make("div", { class: "scroll" }, make("table", {}, make("tr", {}, heads), rows)),
    make("p", { class: "soft" }, note),
    make("h3", {}, "By step of the chunk"),
    stepPlots(),
  );
}

function stepPlots() {
  const group = plotGroup();
  const names = [POLICY, ...Object.keys(data.baselines)];
  const steps = Array.from({ length: data.steps }, (_, step) => step);
  const plots = data.joints.slice(0, 32).map((joint, place) => {
    const lines = names.map((name, at) => ({
      name,
      colour: curveColour(at),
      x: steps,
      y: (name === POLICY ? data.errors : data.baselines[name]).step.map((row) => row[place]),
    }));
    return linePlot(joint, lines, group, { xName: "step" });
  });
  return make("div", { class: "plots-of-joints" }, plots);
}

function inputSection() {
  const heads = ["input", "replaced by", "predictions move", "error", "change of the error"].map((name) => make("th", {}, name));
  const rows = data.inputs.map((part) =>
    make(
      "tr",
      {},
      make("td", {}, part.input, data.ignored.includes(part.input) ? make("span", { class: "warning" }, " ignored") : null),
      make("td", {}, part.way),
      number(part.moved),
      number(part.score),
      make("td", { class: "number" }, percent(part.change.mean)),
    ),
  );
  const note = "Predictions move by so many standard deviations of the actions, in the mean.";
  return section(
    "inputs",
    "What the policy looks at",
    data.inputs.length ? make("div", { class: "scroll" }, make("table", {}, make("tr", {}, heads), rows)) : make("p", { class: "soft" }, "Not measured."),
    make("p", { class: "soft" }, note),
  );
}

function episodeSection() {
  const note = "Black is what was recorded, blue is what the policy predicts from the marked frames on.";
  return section("episodes", "Episodes", make("p", { class: "soft" }, note), data.episode_curves.map(episodeCard));
}

function episodeCard(episode) {
  const title = `Episode ${episode.index} · ${plural(episode.length, "frame")} · error ${figure(episode.error)} · ${episode.task}`;
  const image = episode.image
    ? make("img", { src: `data:image/jpeg;base64,${episode.image}`, alt: `frames ${episode.frames.join(", ")}` })
    : null;
  const caption = image ? make("div", { class: "soft" }, `${episode.cameras.join(", ")}; frames ${episode.frames.join(", ")}`) : null;
  const plots = make("div", { class: "plots-of-joints" });
  const card = make(
    "article",
    { id: `episode-${episode.index}` },
    make("h3", {}, title),
    image ? make("div", { class: "film" }, image) : null,
    caption,
    plots,
  );
  whenNear(card, () => plots.replaceChildren(...episode.recorded.map((values, joint) => jointPlot(episode, joint))));
  return card;
}

function jointPlot(episode, joint) {
  const [width, height] = [600, 110];
  const recorded = episode.recorded[joint];
  const all = [recorded, ...episode.chunks.map((chunk) => chunk.actions[joint])].flat().filter(Number.isFinite);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const x = (frame) => (frame / Math.max(episode.length - 1, 1)) * width;
  const y = (value) => height - 6 - ((value - low) / (high - low || 1)) * (height - 12);
  const path = (values, first) =>
    values.map((value, step) => `${step ? "L" : "M"}${x(first + step).toFixed(1)} ${y(value ?? low).toFixed(1)}`).join("");
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": data.joints[joint] });
  svg.append(draw("path", { class: "recorded", d: path(recorded, 0) }));
  for (const chunk of episode.chunks) {
    const values = chunk.actions[joint];
    svg.append(draw("path", { class: "predicted", d: path(values, chunk.frame) }));
    svg.append(draw("circle", { class: "start", cx: x(chunk.frame), cy: y(values[0]), r: 2 }));
  }
  const range = `${figure(low)} to ${figure(high)}`;
  return make("figure", { class: "joint" }, make("figcaption", {}, `${data.joints[joint]}, ${range}`), svg);
}

document.body.className = "wide";
document.body.append(themeButton(), header(), verdictSection(), errorSection(), inputSection(), episodeSection());
