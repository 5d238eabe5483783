"use strict";
// Plans: what a run would need, at once, while somebody changes what it is.

const PLAN_DEFAULTS = { policy: "act", gpu: "RTX 4090", gpus: "1", batch_size: "8", precision: "auto", trained: null, optimizer: "", checkpointing: false, cameras: "", frames: "", steps: "100000", more: "" };

TABS.plan = {
  title: "Plan",
  show(place) {
    const waiting = make("p", { class: "soft" }, "Loading the planner…");
    place.append(waiting);
    get("plan-options").then(
      (options) => waiting.isConnected && place.replaceChildren(...planForm(options)),
      (error) => (waiting.textContent = error.message),
    );
  },
};

function planForm(options) {
  const chosen = { ...PLAN_DEFAULTS, ...remembered("plan", {}) };
  const results = make("div", { class: "results", "aria-live": "polite" });
  const side = make("aside", { class: "plan-form" });
  let asked = null; // ends the request before
  let timer = null;

  const change = (name, value, wait = 0) => {
    chosen[name] = value;
    if (name === "policy") chosen.trained = null;
    remember("plan", chosen);
    if (name === "policy") drawForm();
    clearTimeout(timer);
    timer = setTimeout(ask, wait);
  };
  const text = (name, attributes) => {
    const input = make("input", { value: chosen[name], ...attributes });
    input.addEventListener("input", () => change(name, input.value, 250));
    return input;
  };

  function drawForm() {
    const policy = options.policies.find(({ type }) => type === chosen.policy) ?? options.policies[0];
    chosen.policy = policy.type;
    chosen.trained ??= policy.default;
    const gpus = options.gpus.map((gpu) => [gpu.name, `${gpu.name} · ${Math.round(gpu.memory_bytes / 2 ** 30)} GB${gpu.usd_per_hour ? ` · ${gpu.usd_per_hour.toFixed(2)} USD/h` : ""}`]);
    side.replaceChildren(
      field("Policy", picker(options.policies.map(({ type }) => [type]), chosen.policy, (value) => change("policy", value))),
      field("What is trained", picker(policy.trained, chosen.trained, (value) => change("trained", value))),
      field("GPU", picker(gpus, chosen.gpu, (value) => change("gpu", value))),
      field("Number of GPUs", picker(options.counts.map((count) => [String(count)]), chosen.gpus, (value) => change("gpus", value))),
      field("Batch size, per GPU", text("batch_size", { type: "number", min: 1, step: 1 })),
      field("Precision", picker([["auto", "auto"], ["bf16"], ["no", "float32"], ["fp16"]], chosen.precision, (value) => change("precision", value))),
      field("Optimizer", picker([["", "of the policy"], ["adamw_8bit", "AdamW, 8 bit"]], chosen.optimizer, (value) => change("optimizer", value))),
      checkbox("Recompute activations", chosen.checkpointing, (value) => change("checkpointing", value)),
      field("Cameras", text("cameras", { placeholder: "2x480x640", pattern: "\\d+x\\d+x\\d+" }), "number × height × width"),
      field("Frames of the dataset", text("frames", { type: "number", min: 1, placeholder: options.frames })),
      field("Steps", text("steps", { type: "number", min: 1 })),
      field("More settings", text("more", { placeholder: "--ema.enable=true", spellcheck: "false" })),
    );
  }

  async function ask() {
    asked?.abort();
    const mine = (asked = new AbortController());
    const view = planResults(results, chosen, (choice) => {
      Object.assign(chosen, { gpu: choice.gpu, gpus: String(choice.gpus) });
      remember("plan", chosen);
      drawForm();
      ask();
      scrollTo({ top: 0, behavior: "smooth" });
    });
    try {
      await getLines("plan", planQuery(chosen), (message) => mine.signal.aborted || view.take(message), mine.signal);
      lost(null);
    } catch (error) {
      if (mine.signal.aborted) return;
      if (error instanceof TypeError) lost(error);
      else view.take({ error: error.message });
    }
  }

  onLeave(() => {
    asked?.abort();
    clearTimeout(timer);
  });
  drawForm();
  ask();
  return [side, results];
}

function planQuery(chosen) {
  const words = [chosen.trained, chosen.more].join(" ").split(/\s+/).filter(Boolean);
  const settings = Object.fromEntries(words.map((word) => word.replace(/^--/, "").split(/=(.*)/s).slice(0, 2)));
  if (chosen.precision !== "auto") settings.precision = chosen.precision;
  if (chosen.optimizer) settings["optimizer.type"] = chosen.optimizer;
  if (chosen.checkpointing) settings.activation_checkpointing = "true";
  const { gpu, gpus, cameras, frames, batch_size, steps } = chosen;
  return { "policy.type": chosen.policy, batch_size, steps, ...settings, gpu, gpus, cameras, frames };
}

/** The result, which stays while a new one is computed, and is then replaced part by part. */
function planResults(place, chosen, onChoose) {
  const answer = make("div");
  const fixes = make("div");
  const bars = make("div", { class: "plan-bars" });
  const hardware = make("section", { class: "card" });
  const command = make("div");
  const bar = place.querySelector(".working") ?? make("div", { class: "working", role: "progressbar", "aria-label": "planning" }, make("div"), make("span"));
  const state = { plan: null, choices: [], largest: undefined, sort: { column: 5, down: false, all: false }, begun: performance.now() };
  if (!bar.isConnected) place.prepend(bar);
  bar.hidden = true;
  place.classList.add("old");

  const working = (text, share) => {
    bar.hidden = performance.now() - state.begun < 150;
    bar.firstChild.style.width = `${100 * share}%`;
    bar.lastChild.textContent = text;
  };
  const drawHardware = () => {
    if (!state.choices.length) return;
    const fitting = fittingChoices(state.choices).length;
    hardware.replaceChildren(
      make("h2", {}, `The same training on other hardware`),
      make("p", { class: "soft" }, fitting ? `${state.plan.global_batch_size} samples a step. It fits on ${fitting} of ${state.choices.length} that were tried.` : "It fits on none that was tried yet."),
      planScatter(state.choices, state.plan) ?? "",
      fitting ? choiceTable(state.sort, state.choices, onChoose) : "",
    );
  };
  return {
    take(message) {
      if (message.error) {
        bar.hidden = true;
        place.classList.remove("old");
        place.replaceChildren(bar, make("div", { class: "note", role: "alert" }, message.error));
      } else if (message.plan) {
        state.plan = message.plan;
        place.classList.remove("old");
        place.replaceChildren(bar, answer, command, fixes, bars, hardware);
        place.dataset.seconds = ((performance.now() - state.begun) / 1000).toFixed(3);
        answer.replaceChildren(planAnswer(message.plan, undefined), make("p", { class: "soft" }, `Assumed: ${message.robot}, ${message.plan.data.frames.toLocaleString("en")} frames.`));
        command.replaceChildren(commandBox(message.command));
        bars.replaceChildren(planMemory(message.plan), planStep(message.plan));
        state.robot = message.robot;
      } else if ("largest" in message) {
        state.largest = message.largest;
        answer.firstChild.replaceWith(planAnswer(state.plan, state.largest));
      } else if (message.changes) {
        fixes.replaceChildren(planFixes(message));
      } else if (message.choices) {
        state.choices.push(...message.choices);
        working("comparing GPUs", Math.min(state.choices.length / 90, 0.97));
        drawHardware();
      } else if (message.looking) {
        fixes.replaceChildren(make("p", { class: "soft" }, `Looking for ${message.looking}…`));
      } else if ("tracing" in message) {
        const spent = (performance.now() - state.begun) / 1000;
        working(state.plan ? "planning" : "tracing a step of this policy", state.plan ? 0.5 : Math.min(0.1 + 0.3 * message.tracing + 0.05 * spent, 0.95));
      } else if (message.done) {
        bar.hidden = true;
        place.dataset.done = "true";
        drawHardware();
      }
    },
  };
}
