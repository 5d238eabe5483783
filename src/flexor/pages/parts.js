"use strict";
// Texts and elements of the application, and of pages that look like it.

// Texts.

function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  return `${value > 0 && value < 9.95 ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)} %`;
}

function duration(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
  if (value < 90) return `${Number(value.toPrecision(2))} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  const minutes = Math.round(value / 60);
  const rest = minutes % 60 ? ` ${String(minutes % 60).padStart(2, "0")} min` : "";
  if (value < 48 * 3600) return `${Math.floor(minutes / 60)} h${rest}`;
  return `${(value / 86400).toFixed(1)} days`;
}

function ago(time) {
  const since = Date.now() / 1000 - time;
  return since < 5 ? "now" : `${duration(since)} ago`;
}

function gigabytes(bytes) {
  const value = bytes / 1e9;
  return `${value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(value >= 10 ? 1 : 2)} GB`;
}

function dollars(amount) {
  if (amount === null || amount === undefined) return "–";
  return amount >= 100 ? Math.round(amount).toLocaleString("en") : amount.toFixed(2);
}

/** A number with three or four digits, for a table. */
function brief(value) {
  return value === null || value === undefined ? "–" : figure(Number(value.toPrecision(4)));
}

/** A text that begins with a capital letter. */
function sentence(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

// Elements.

function card(title, ...children) {
  return make("section", { class: "card" }, title ? make("h2", {}, title) : null, ...children);
}

/** What is shown where there is nothing yet: what would be here, and the command that makes it. */
function emptyState(title, text, command = null) {
  return make("div", { class: "empty" }, make("h2", {}, title), make("p", {}, text), command ? commandBox(command) : null);
}

/** A command with a button that copies it. */
function commandBox(text) {
  const copy = make("button", { type: "button", class: "copy" }, "Copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(copy.previousSibling);
      copy.textContent = "Press Ctrl-C";
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  return make("div", { class: "command" }, make("code", {}, text), copy);
}

/** A labelled control. */
function field(text, control, hint = null) {
  return make("label", { class: "field" }, make("span", {}, text), control, hint ? make("small", { class: "soft" }, hint) : null);
}

function picker(options, value, onChange) {
  const element = make(
    "select",
    {},
    options.map(([name, text]) => make("option", { value: name }, text ?? name)),
  );
  element.value = value;
  element.addEventListener("input", () => onChange(element.value));
  return element;
}

function checkbox(text, checked, onChange) {
  const box = make("input", { type: "checkbox" });
  box.checked = checked;
  box.addEventListener("input", () => onChange(box.checked));
  return make("label", { class: "check" }, box, text);
}

function dot(colour) {
  const mark = make("i", { class: "dot" });
  mark.style.background = colour;
  return mark;
}

/** A table; cells are texts, numbers (aligned to the right) or elements. `sort`: columns that a click sorts by. */
function dataTable(heads, rows, { className = "", numeric = [] } = {}) {
  const cell = (content, column) => make("td", { class: numeric.includes(column) ? "number" : null }, content ?? "–");
  const top = make("tr", {}, heads.map((head, column) => make("th", { class: numeric.includes(column) ? "number" : null, scope: "col" }, head)));
  return make(
    "div",
    { class: "scroll" },
    make("table", { class: className }, make("thead", {}, top), make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell))))),
  );
}

function facts(pairs) {
  return make("dl", { class: "facts-list" }, pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
