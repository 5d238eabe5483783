"use strict";
// What all parts of the application share: addresses, requests, tabs, texts.

const about = pageData();
const TABS = {}; // name -> {title, show(place, words)}, in the order of the tabs
let current = { tab: null, leave: [] }; // the part that is open, and what ends with it

// Requests.

async function get(path, query = {}) {
  return answer(await fetch(address(path, query)));
}

async function send(path, content) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) };
  return answer(await fetch(address(path), request));
}

function address(path, query = {}) {
  const search = new URLSearchParams(query).toString();
  return `${location.origin}/${path}${search ? `?${search}` : ""}`;
}

async function answer(reply) {
  const kind = reply.headers.get("Content-Type") ?? "";
  const content = kind.startsWith("application/json") ? await reply.json() : { error: await reply.text() };
  if (!reply.ok) throw new Error(content.error);
  return content;
}

/** Calls `take` with each JSON value of a reply as it arrives. `signal` ends it. */
async function getLines(path, query, take, signal) {
  const reply = await fetch(address(path, query), { signal });
  if (!reply.ok || !reply.headers.get("Content-Type").includes("ndjson")) {
    await answer(reply);
    return;
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    lines.forEach((line) => take(JSON.parse(line)));
  }
}

/**
 * Calls an async function now and then every few milliseconds, but not while the page is hidden, until the part that
 * is open is left. What it throws is shown on top of the page until it works again.
 */
function repeat(milliseconds, work) {
  let timer = null;
  let ended = false;
  const once = async () => {
    clearTimeout(timer);
    try {
      const soon = document.hidden ? null : await work();
      if (!ended) lost(null);
      if (!ended) timer = setTimeout(once, soon ?? milliseconds);
    } catch (error) {
      if (!ended) lost(error);
      if (!ended) timer = setTimeout(once, 3 * milliseconds);
    }
  };
  const onReturn = () => document.hidden || once();
  document.addEventListener("visibilitychange", onReturn);
  onLeave(() => {
    ended = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onReturn);
  });
  once();
  return once;
}

function onLeave(work) {
  current.leave.push(work);
}

function lost(error) {
  const bar = document.getElementById("lost");
  bar.hidden = !error;
  if (error) bar.textContent = error instanceof TypeError ? "flexor ui does not answer. Is it still running?" : error.message;
}

// Tabs: #runs, #runs/ID, #plan, ...

function go(...words) {
  location.hash = words.map(encodeURIComponent).join("/");
}

function link(text, ...words) {
  return make("a", { href: `#${words.map(encodeURIComponent).join("/")}` }, text);
}

function openTab() {
  current.leave.forEach((work) => work());
  const words = location.hash.slice(1).split("/").filter(Boolean).map(decodeURIComponent);
  const name = words[0] in TABS ? words[0] : Object.keys(TABS)[0];
  current = { tab: name, leave: [] };
  document.querySelectorAll("#tabs a").forEach((tab) => {
    if (tab.dataset.tab === name) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  });
  document.title = `${TABS[name].title} · Flexor`;
  lost(null);
  const place = make("main", { id: "place", class: name, tabindex: "-1" });
  document.getElementById("place").replaceWith(place);
  hideTooltip({ point() {} });
  TABS[name].show(place, words.slice(1));
}

function startApplication() {
  const tabs = Object.entries(TABS).map(([name, { title }]) => make("a", { href: `#${name}`, "data-tab": name }, title));
  const bar = make(
    "header",
    { id: "bar" },
    make("a", { class: "wordmark", href: "#runs" }, "Flexor"),
    make("nav", { id: "tabs", "aria-label": "parts" }, tabs),
    themeButton(),
  );
  document.body.className = "app";
  document.body.append(
    make("a", { class: "skip", href: "#place" }, "to the content"),
    bar,
    make("div", { id: "lost", role: "alert", hidden: "" }),
    make("main", { id: "place" }),
  );
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("place").focus();
  });
  if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);
  addEventListener("hashchange", openTab);
  openTab();
}

// What a person chose, kept in this browser for these folders.

const MEMORY = `flexor:${about.folders.join(":")}`;

function remembered(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`${MEMORY}:${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function remember(name, value) {
  try {
    localStorage.setItem(`${MEMORY}:${name}`, JSON.stringify(value));
  } catch {
    // no room, or not allowed: then it is not kept
  }
}

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
  if (value < 48 * 3600) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
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
