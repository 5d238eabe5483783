"use strict";
// What every page uses. Text from outside reaches the page only as text nodes and attributes, never as HTML.

/** The data that the program wrote into the page. */
function pageData() {
  return JSON.parse(document.getElementById("page-data").textContent);
}

/** A new element: make("p", {class: "soft"}, "text", otherElement). */
function make(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for a part of a drawing. */
function draw(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number with about five significant digits; a dash if there is none. */
function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(3);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return String(Number(value.toPrecision(5)));
}

function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

function seconds(value) {
  if (value < 90) return `${value.toFixed(1)} s`;
  return value < 5400 ? `${(value / 60).toFixed(1)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** A button that switches between the light and the dark mode; before it is used, the system decides. */
function themeButton() {
  const root = document.documentElement;
  const button = make("button", { class: "theme", type: "button" }, "light / dark");
  button.addEventListener("click", () => {
    const dark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  return button;
}

/** Calls `build(element)` once, when the element comes near the visible part of the page, or the page is printed. */
function whenNear(element, build) {
  const once = () => {
    watcher.disconnect();
    removeEventListener("beforeprint", once);
    build(element);
  };
  const watcher = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && once(), {
    rootMargin: "800px",
  });
  watcher.observe(element);
  addEventListener("beforeprint", once);
}
