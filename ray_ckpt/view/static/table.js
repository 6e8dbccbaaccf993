// The table of checkpoints, a page of rows at a time.
const HEAD = [["Step", "num"], ["Age", ""], ["State", ""], ["Tiers", "mid"], ["Verified", "mid"], ["Drilled", "wide"], ["Guard", "wide"],
  ["Size", "num wide"], ["Stall", "num wide"], ["Upload", "num wide"], ["Kept because", "wide text"]];
function drawTable() {
  if (!$("part-table")) {
    const select = el("select", { id: "show", "aria-label": "Which checkpoints", on: { change: (event) => { table.show = event.target.value; table.offset = 0; moved(); } } },
      [["all", "all"], ["usable", "usable"], ["pinned", "pinned"], ["trouble", "in trouble"]].map(([value, text]) => el("option", { value }, text)));
    const go = (id, text, move) => el("button", { id, class: "plain", on: { click: () => { table.offset = Math.max(0, move(table.offset)); moved(); } } }, text);
    const head = el("tr", {}, HEAD.map(([text, name]) => el("th", { scope: "col", class: name }, text)));
    $("main").append(el("div", { id: "part-table" }, el("section", { class: "card", "aria-labelledby": "table-title" },
      el("div", { class: "controls" }, el("h3", { id: "table-title" }), select, go("newest", "newest", () => 0), go("newer", "newer", (o) => o - PAGE_ROWS),
        go("older", "older", (o) => o + PAGE_ROWS), el("span", { id: "table-range", class: "soft", role: "status" })),
      el("table", {}, el("thead", {}, head), el("tbody", { id: "rows" })))));
  }
  const c = detail.checkpoints, page = tableRows();
  $("table-title").textContent = plural(c.total, "checkpoint") + (c.behind ? ", still looking at " + count(c.behind) + " folders" : "");
  const until = c.offset + page.length;
  $("table-range").textContent = c.matching ? count(c.offset + 1) + " to " + count(until) + " of " + count(c.matching) : "none";
  $("newest").disabled = $("newer").disabled = c.offset === 0;
  $("older").disabled = until >= c.matching;
  const text = JSON.stringify([page, [...table.open]]);
  if (drawn.rows === text) return;
  drawn.rows = text;
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.name : null;
  $("rows").replaceChildren(...page.flatMap(tableRow));
  if (focused) [...$("rows").querySelectorAll("button")].find((button) => button.dataset.name === focused)?.focus();
}
function tableRows() {
  const c = detail.checkpoints;
  if (!frozen) return c.rows;
  const wanted = { all: () => true, usable: (r) => r.state === "committed" || r.state === "on nodes", pinned: (r) => r.pins.length > 0,
    trouble: (r) => BAD_STATES.has(r.state) || (r.drilled && !r.drilled.ok) }[table.show];
  const rows = c.rows.filter(wanted);
  c.matching = rows.length;
  c.offset = table.offset;
  return rows.slice(table.offset, table.offset + PAGE_ROWS);
}
function tableRow(r) {
  const bad = BAD_STATES.has(r.state), open = table.open.has(r.name);
  const toggle = el("button", { "data-name": r.name, "aria-expanded": String(open), title: r.name, on: { click: () => {
    if (!table.open.delete(r.name)) table.open.add(r.name);
    drawTable();
  } } }, (open ? "\u25be " : "\u25b8 ") + count(r.step));
  const drilled = !r.drilled ? "-" : r.drilled.ok ? ["\u25cf ok ", aged(r.drilled.time)] : el("span", { class: "failing" }, "\u25a0 FAILED ", aged(r.drilled.time));
  const state = el("span", { class: bad ? "failing" : "" }, STATES[r.state] + " " + r.state, r.pins.length > 0 && " \u2691 pinned");
  const size = (s, form) => (known(s) ? form(s) : "-");
  const cells = [toggle, aged(r.committed_at), state, Object.keys(r.tiers).join(", ") || "-", known(r.verified_at) ? aged(r.verified_at) : "no", drilled,
    r.guard === "refused" ? el("span", { class: "failing" }, "\u2715 refused") : r.guard || "-",
    size(r.bytes, bytes), size(r.stall_s, duration), size(r.upload_s, duration), r.fault || keptWords(r)];
  const row = el("tr", {}, cells.map((cell, i) => el("td", { class: HEAD[i][1] }, cell)));
  return open ? [row, el("tr", {}, el("td", { colspan: HEAD.length }, el("dl", { class: "more" }, rowFields(r))))] : [row];
}
const keptWords = (r) => (r.kept === null ? "-" : r.kept.length ? r.kept.join("; ") : "will be deleted");
function rowFields(r) {
  const tiers = Object.entries(r.tiers).map(([tier, s]) => tier + (s > 0 ? " since " + moment(s) : "")).join(", ");
  return pairs([["checkpoint", r.name], ["fault", r.fault], ["committed", known(r.committed_at) ? moment(r.committed_at) : null], ["tiers", tiers],
    ["copies", r.copies ? r.copies[0] + " of " + r.copies[1] + " in the fastest tier" : null],
    ["verified", known(r.verified_at) ? "every byte read back " + moment(r.verified_at) : "not since its commit"],
    ["kept", keptWords(r)], ["pins", r.pins.join("; ")], ["guard", r.guard], ["size", known(r.bytes) ? bytes(r.bytes) + " in " + plural(r.files, "file") : null],
    ["stall", known(r.stall_s) ? duration(r.stall_s) : null], ["upload", known(r.upload_s) ? duration(r.upload_s) : null], ["loss", known(r.loss) ? number(r.loss) : null],
    ["workers", r.world_size], ["samples", known(r.sample_offset) ? count(r.sample_offset) : null], ["segment", r.segment],
    ["drilled", r.drilled ? (r.drilled.ok ? "ok in " + duration(r.drilled.seconds) : "FAILED: " + r.drilled.problem) + ", " + moment(r.drilled.time) : null]]);
}
function moved() {
  if (frozen) drawTable(); else look();
}
