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
