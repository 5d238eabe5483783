"use strict";
// A policy server: its robots, where the time of a request goes, and what it refused.

const SERVE_EVERY_MS = 1000;
const SERVE_PARTS = [["decode", "reading the observation"], ["queue", "waiting for the model"], ["model", "the model"], ["encode", "packing the actions"]];
const RESULTS = { ok: "answered", expired: "too late", refused: "refused", failed: "failed", not_finite: "not finite" };

TABS.serve = {
  title: "Serve",
  show(place) {
    let connected = null;
    repeat(SERVE_EVERY_MS, async () => {
      const { url, server, problem } = await get("serving");
      if (connected !== Boolean(server)) place.replaceChildren();
      connected = Boolean(server);
      if (server) place.replaceChildren(...serverView(url, server));
      else if (!place.children.length) {
        const text = `At ${url}, ${problem}. A server that runs there appears here by itself; --server=ws://HOST:PORT shows another one.`;
        place.append(emptyState("No policy is served", text, "flexor serve runs/NAME"));
      }
      return null;
    });
  },
};

function serverView(url, server) {
  const results = Object.entries(server.results);
  const total = results.reduce((sum, [, count]) => sum + count, 0);
  const figures = [
    ["Robots", server.clients.reduce((sum, client) => sum + client.robots, 0).toLocaleString("en"), plural(server.clients.length, "connection")],
    ["Requests", total.toLocaleString("en"), total ? `${percent((server.results.ok ?? 0) / total)} answered` : "none yet"],
    ["Answer, median", latency(server, "p50"), "in the server"],
    ["Answer, 99 %", latency(server, "p99"), "in the server"],
  ];
  return [
    make("h1", {}, `${server.policy}`),
    make("p", { class: "soft" }, `on ${server.device} · ${url} · up ${duration(server.up_s)}`),
    make("div", { class: "figures-row" }, figures.map(([name, value, more]) => make("div", { class: "figure" }, make("span", { class: "soft" }, name), make("b", {}, value), make("small", { class: "soft" }, more)))),
    latencyCard(server.latency_ms),
    resultCard(results, total),
    card("Robots", server.clients.length ? make("div", { class: "robots" }, server.clients.map(robotView)) : make("p", { class: "soft" }, "No robot is connected.")),
  ];
}

function latency({ latency_ms: times }, part) {
  return times.total ? `${times.total[part].toFixed(1)} ms` : "–";
}

function latencyCard(times) {
  if (!times.total) return "";
  const parts = SERVE_PARTS.filter(([name]) => times[name]).map(([name, text]) => [text, times[name].p50]);
  const rows = [...SERVE_PARTS, ["total", "all of it"]].filter(([name]) => times[name]).map(([name, text]) => [text, ...["p50", "p95", "p99"].map((which) => times[name][which].toFixed(2))]);
  return card("Where the time of a request goes", partsBar("latency", parts, (value) => `${value.toFixed(2)} ms`), dataTable(["Milliseconds", "Median", "95 %", "99 %"], rows, { numeric: [1, 2, 3] }));
}

function resultCard(results, total) {
  const bad = results.filter(([name, count]) => name !== "ok" && count);
  if (!bad.length) return card("Refused and failed", make("p", { class: "soft" }, total ? "Nothing: every request was answered in time." : "No request yet."));
  return card("Refused and failed", dataTable(["What", "Requests", "Share"], bad.map(([name, count]) => [RESULTS[name] ?? name, count.toLocaleString("en"), percent(count / total)]), { numeric: [1, 2] }));
}

function robotView(client) {
  const words = [client.address, `connected for ${duration(client.seconds)}`, plural(client.requests, "request"), client.expired ? `${client.expired.toLocaleString("en")} too late` : null, client.last_ms === null ? null : `last ${client.last_ms.toFixed(1)} ms`];
  const images = Object.entries(client.images).map(([name, source]) => make("figure", {}, make("img", { src: source, alt: name }), make("figcaption", { class: "soft" }, name)));
  return make(
    "article",
    { class: "robot" },
    make("h3", {}, client.robots > 1 ? `Client ${client.number}, ${plural(client.robots, "robot")}` : `Robot ${client.number}`),
    make("p", { class: client.expired ? "warning" : "soft" }, words.filter(Boolean).join(" · ")),
    client.task ? make("p", {}, client.task) : null,
    make("div", { class: "robot-images" }, images),
  );
}
