// Texts, and elements made of them. Every text is put in by textContent or as an attribute: names and causes come from
// users. The parts are put together into one script in the order base, sign_in,
// charts, incidents, table, run, page.
const frozen = JSON.parse(document.getElementById("data").textContent);
const POLL_MS = 2000, BEHIND_MS = 300, HIDDEN_MS = 15000, PAGE_ROWS = 50;
const API = "api/ray_ckpt/runs";  // a proxy may put the dashboard below a prefix
const SHAPES = { ok: "\u25cf", attention: "\u25b2", failing: "\u25a0", unknown: "\u25cc" };
const WORDS = { ok: "OK", attention: "ATTENTION", failing: "FAILING", unknown: "READING" };
const STATES = {
  "committed": "\u25cf", "on nodes": "\u25d0", "being written": "\u25cc", "not committed": "\u25cb",
  "quarantined": "\u2715", "damaged": "\u25a0", "missing": "\u25a0", "unreadable": "\u25b2",
};
const BAD_STATES = new Set(["quarantined", "damaged", "missing", "unreadable"]);
const $ = (id) => document.getElementById(id);
let skewMs = 0, list = null, detail = null, lastGood = 0, failure = "";
const table = { offset: 0, show: "all", open: new Set() };
const drawn = {}, tags = {};

const nowS = () => (frozen ? frozen.frozen_at : (Date.now() + skewMs) / 1000);
const known = (value) => value !== null && value !== undefined;

function duration(s) {
  if (!Number.isFinite(s)) return "unknown";
  if (s < 0) return "-" + duration(-s);
  if (s < 0.995) return s.toFixed(2) + "s";
  if (s < 9.95) return s.toFixed(1) + "s";
  const n = Math.round(s), two = (v) => String(v).padStart(2, "0");
  if (n < 60) return n + "s";
  if (n < 3600) return Math.floor(n / 60) + "m " + two(n % 60) + "s";
  if (n < 86400) return Math.floor(n / 3600) + "h " + two(Math.floor((n % 3600) / 60)) + "m";
  return Math.floor(n / 86400) + "d " + two(Math.floor((n % 86400) / 3600)) + "h";
}
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let i = 0;
  while (n >= 1023.95 && i < units.length - 1) { n /= 1024; i++; }
  return (i ? n.toFixed(1) : String(n)) + " " + units[i];
}
const count = (n) => Number(n).toLocaleString("en");
const plural = (n, word) => count(n) + " " + word + (n === 1 ? "" : "s");
const number = (v) => (known(v) ? Number(v).toPrecision(5) : "-");
const percent = (v) => (known(v) ? (100 * v).toFixed(1) + " %" : "-");
const two = (v) => String(v).padStart(2, "0");
function clock(s, seconds = true) {
  const d = new Date(s * 1000);
  return two(d.getHours()) + ":" + two(d.getMinutes()) + (seconds ? ":" + two(d.getSeconds()) : "");
}
function day(s) {
  const d = new Date(s * 1000);
  return d.getFullYear() + "-" + two(d.getMonth() + 1) + "-" + two(d.getDate());
}
const moment = (s) => day(s) + " " + clock(s);
function age(s) {
  const old = nowS() - s;
  if (Math.abs(old) < 1) return "just now";
  return old > 0 ? duration(old) + " ago" : duration(-old) + " ahead";
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, f] of Object.entries(value)) node.addEventListener(event, f);
    else if (known(value) && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (known(child) && child !== false) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
// An age grows by itself; the exact time is its title.
const aged = (s, form = "ago") =>
  known(s) && s > 0
    ? el("time", { "data-at": s, "data-form": form, title: moment(s) }, form === "old" ? duration(nowS() - s) : age(s))
    : "-";
function tick() {
  for (const node of document.querySelectorAll("time[data-at]")) {
    const s = Number(node.dataset.at);
    const text = node.dataset.form === "old" ? duration(Math.max(0, nowS() - s)) : age(s);
    if (node.textContent !== text) node.textContent = text;
  }
  tellLink();
}
// A part of the page is made anew only when its data changed: focus and selection stay where they are.
function part(name, data, draw) {
  let box = $("part-" + name);
  if (!box) { box = el("div", { id: "part-" + name }); $("main").append(box); }
  const text = JSON.stringify(data);
  if (drawn[name] === text) return;
  drawn[name] = text;
  box.replaceChildren(...[draw(data)].flat().filter(Boolean));
}
const mark = (level) =>
  el("span", { class: level }, el("span", { "aria-hidden": "true" }, SHAPES[level] + " "), WORDS[level]);
const pairs = (items) =>
  items.filter(([, value]) => known(value) && value !== "").map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);

function linesCard(title, items, none, say) {
  const rows = items.map((item) => el("li", {}, el("time", { title: known(item.time) ? moment(item.time) : null }, known(item.time) ? when(item.time) : "-"), el("span", {}, say(item))));
  return el("section", { class: "card" }, el("h3", {}, title), rows.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, el("ol", { class: "lines" }, rows)) : el("p", { class: "soft" }, none));
}
const when = (s) => (nowS() - s < 72000 ? clock(s) : day(s).slice(5) + " " + clock(s, false));
