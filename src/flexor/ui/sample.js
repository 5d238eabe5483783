"use strict";
// A frame as a policy sees it in training: its images augmented, resized and cropped, its values normalised.

const SAMPLE_WAIT_MS = 250; // after the last change of the frame

/** A part of the data page that asks for nothing until it is opened. `at(episode, frame)`: what to show. */
function sampleView(data) {
  const body = make("div", { class: "sample" });
  const tools = make("div", { class: "tools" });
  const element = make("details", { class: "card" }, make("summary", {}, make("h2", {}, "As a policy sees it")), tools, body);
  const state = { place: null, shown: null, draw: 0, timer: null, asked: 0, ...remembered("sample", { run: "", policy: "act", settings: "" }) };

  async function ask() {
    if (!element.open || !state.place || !tools.children.length) return;
    const { run, policy, settings, draw } = state;
    const [episode, frame] = state.place;
    const key = JSON.stringify([episode, frame, run, policy, settings, draw]);
    if (key === state.shown) return;
    state.shown = key;
    const mine = ++state.asked;
    body.classList.add("old");
    try {
      const query = { frame, draw, settings, ...(run ? { run } : { policy }) };
      const sample = await get(`sample/${data.id}/${episode}`, query);
      if (mine === state.asked) body.replaceChildren(...sampleParts(sample, episode, frame));
    } catch (error) {
      if (mine === state.asked) body.replaceChildren(make("div", { class: "note", role: "alert" }, error.message));
    }
    if (mine === state.asked) body.classList.remove("old");
  }

  function soon(wait = SAMPLE_WAIT_MS) {
    clearTimeout(state.timer);
    state.timer = setTimeout(ask, wait);
  }

  function change(choice) {
    Object.assign(state, choice, { draw: 0 });
    remember("sample", { run: state.run, policy: state.policy, settings: state.settings });
    soon();
  }

  async function open() {
    if (!element.open) return;
    if (!tools.children.length) {
      const choices = await get(`sample-choices/${data.id}`);
      if (!choices.runs.some(({ id }) => id === state.run)) state.run = "";
      const options = [...choices.runs.map(({ id, name }) => [`run:${id}`, `run ${name}`]), ...choices.policies.map((name) => [`policy:${name}`, `a new ${name}`])];
      const choose = picker(options, state.run ? `run:${state.run}` : `policy:${state.policy}`, (value) => {
        const [kind, name] = value.split(/:(.*)/s);
        change(kind === "run" ? { run: name } : { run: "", policy: name });
      });
      choose.setAttribute("aria-label", "policy");
      const settings = make("input", { value: state.settings, placeholder: "--dataset.image_transforms.enable=true", spellcheck: "false", class: "settings", "aria-label": "further settings" });
      settings.addEventListener("change", () => change({ settings: settings.value.trim() }));
      const again = make("button", { type: "button" }, "Other steps");
      again.addEventListener("click", () => {
        state.draw += 1;
        ask();
      });
      tools.replaceChildren(choose, settings, again);
    }
    await ask();
  }

  element.addEventListener("toggle", () => open().catch((error) => body.replaceChildren(make("div", { class: "note", role: "alert" }, error.message))));
  return {
    element,
    at(episode, frame) {
      state.place = [episode, frame];
      if (element.open) soon();
    },
  };
}

function sampleParts(sample, episode, frame) {
  const steps = sample.steps.map((step) => `training, step ${step.toLocaleString("en")}`);
  const cameras = sample.cameras.map(({ name, size, input, low, high, recorded, views }) => {
    const pictures = [[recorded, "recorded"], ...views.map((view, number) => [view, steps[number] ?? "when it acts"])];
    const sizes = size.join() === input.join() ? size.join(" × ") : `${size.join(" × ")} to ${input.join(" × ")}`;
    return make(
      "section",
      {},
      make("h3", {}, name),
      make("p", { class: "soft" }, `${sizes} pixels, values from ${figure(Number(low.toPrecision(3)))} to ${figure(Number(high.toPrecision(3)))}`),
      make("div", { class: "sample-images" }, pictures.map(([source, text]) => make("figure", {}, make("img", { src: source, alt: `${name}, ${text}` }), make("figcaption", { class: "soft" }, text)))),
    );
  });
  const rows = sample.values.flatMap(({ feature, names, recorded, processed }) => names.map((name, number) => [feature, name, figure(Number(recorded[number].toPrecision(4))), figure(Number(processed[number].toPrecision(4)))]));
  const resized = sample.resizes && sample.cameras.every(({ size, input }) => size.join() === input.join());
  return [
    make("p", { class: "soft" }, `Episode ${episode}, frame ${frame.toLocaleString("en")}. Images are ${sample.images}.${resized ? " The network resizes them, which is not drawn here." : ""}`),
    ...cameras,
    rows.length ? dataTable(["Feature", "Value", "Recorded", "For the network"], rows, { numeric: [2, 3] }) : "",
  ];
}
