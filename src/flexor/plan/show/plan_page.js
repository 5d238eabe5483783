"use strict";
// The page of `flexor plan --html`: the answer first, then bars, other hardware, and the curves behind them.

const study = pageData();
const more = document.getElementById("more");

function hardwareCard() {
  const fitting = fittingChoices(study.choices).length;
  if (!study.choices.length) return "";
  const text = `${study.global_batch_size} samples a step. It fits on ${fitting} of ${study.choices.length} that were compared.`;
  const order = { column: 5, down: false, all: false };
  return card(
    "The same training on other hardware",
    make("p", { class: "soft" }, text),
    planScatter(study.choices, study),
    fitting ? choiceTable(order, study.choices) : null,
  );
}

document.body.className = "app page";
more.before(
  themeButton(),
  planAnswer(study, study.largest_batch ?? undefined),
  study.assumed ? make("p", { class: "soft" }, `Assumed: ${study.assumed}.`) : "",
  study.fits ? "" : planFixes(study),
  make("div", { class: "plan-bars" }, planMemory(study), planStep(study)),
  hardwareCard(),
);
