"use strict";
// The page of a server: asks it every second what it does, and shows that.

const PARTS = [
  ["decode", "reading the observation"],
  ["queue", "waiting for the model"],
  ["model", "the model"],
  ["encode", "packing the actions"],
  ["total", "all of it, in the server"],
];

function latencyTable(latency) {
  const rows = PARTS.filter(([part]) => latency[part]).map(([part, words]) =>
    make(
      "tr",
      {},
      make("td", {}, words),
      ...["p50", "p95", "p99"].map((name) => make("td", { class: "number" }, latency[part][name].toFixed(2))),
    ),
  );
  const head = make("tr", {}, ...["ms", "median", "95 %", "99 %"].map((name) => make("th", {}, name)));
  return make("table", { id: "latency" }, head, ...rows);
}

function clientView(client) {
  const words = [
    `client ${client.number}`,
    client.address,
    `connected for ${seconds(client.seconds)}`,
    plural(client.requests, "request"),
    client.expired ? `${figure(client.expired)} too late` : null,
    client.robots > 1 ? plural(client.robots, "robot") : null,
    client.last_ms === null ? null : `last ${client.last_ms.toFixed(1)} ms`,
  ];
  const images = Object.entries(client.images).map(([name, source]) =>
    make("figure", {}, make("img", { src: source, alt: name }), make("figcaption", {}, name)),
  );
  return make(
    "div",
    { class: "client" },
    make("div", {}, words.filter((word) => word !== null).join(" · ")),
    client.task ? make("div", { class: "soft" }, client.task) : null,
    ...images,
  );
}

function view(found) {
  const results = Object.entries(found.results).map(([name, count]) => `${figure(count)} ${name}`);
  return [
    make("p", { class: "soft" }, `${found.policy} on ${found.device} · Flexor ${found.version} · up ${seconds(found.up_s)}`),
    make("p", {}, `requests: ${results.join(", ") || "none yet"}`),
    make("h2", {}, "Latency"),
    Object.keys(found.latency_ms).length ? latencyTable(found.latency_ms) : make("p", {}, "No request yet."),
    make("h2", {}, plural(found.clients.length, "client")),
    ...found.clients.map(clientView),
  ];
}

async function update(place) {
  try {
    const answer = await fetch(`${location.origin}/status`);
    if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
    place.replaceChildren(...view(await answer.json()));
  } catch (error) {
    place.replaceChildren(make("p", { class: "lost" }, `The server does not answer: ${error.message}`));
  }
  setTimeout(() => update(place), 1000);
}

const place = document.getElementById("status");
place.before(themeButton(), make("h1", {}, pageData().title));
update(place);
