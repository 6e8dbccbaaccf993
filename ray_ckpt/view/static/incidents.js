// What a run met besides failures: nodes that leave, hangs, slow and excluded nodes, crash loops, sizes.
const KINDS = [
  ["leaving", "Nodes and workers that leave"], ["hangs", "Hangs"], ["slow", "Slower than the others, now"],
  ["excluded", "Left out, now"], ["loops", "Failures that came again"], ["resizes", "Decisions on the number of workers"], ["read_back", "Copies on the nodes, read again"],
];
const LEVEL_WORDS = { ok: "", attention: "look: ", failing: "bad: " };
function incidentsCard(found) {
  const there = KINDS.filter(([name]) => found[name].length), none = KINDS.filter(([name]) => !found[name].length);
  const budget = limitWords(found.limits);
  const quiet = el("p", { class: "soft" }, "None so far: " + none.map(([, title]) => title[0].toLowerCase() + title.slice(1)).join("; ") + ".");
  const box = el("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "Nodes, hangs, sizes" },
    there.map(([name, title]) => [el("h4", {}, title), el("ol", { class: "lines" }, found[name].map(incidentLine))]));
  return el("section", { class: "card" }, el("h3", {}, "Nodes, hangs and sizes, newest first"), there.length > 0 && box,
    none.length > 0 && quiet, el("p", { class: "soft" }, budget));
}
function incidentLine(item) {
  const shape = item.level === "ok" ? SHAPES.ok : SHAPES[item.level];
  const words = [el("span", { class: item.level, title: LEVEL_WORDS[item.level] || null }, el("span", { "aria-hidden": "true" }, shape + " "),
    el("span", { class: "unseen" }, LEVEL_WORDS[item.level])), item.line];
  if (known(item.deadline)) words.push(". Deadline: ", el("time", { title: moment(item.deadline) }, clock(item.deadline)), ".");
  const where = item.where ? Object.entries(item.where).map(([at, ranks]) => rankWords(ranks) + ": " + at) : [];
  if (where.length) words.push(el("span", { class: "soft" }, " Where they were: " + where.join("; ") + "."));
  if (item.dumps) words.push(" ", el("code", {}, item.dumps));
  return el("li", {}, el("time", { title: known(item.time) ? moment(item.time) : null }, known(item.time) ? when(item.time) : "-"), el("span", {}, words));
}
function rankWords(ranks) {
  const shown = ranks.slice(0, 8).join(", ");
  return (ranks.length === 1 ? "rank " : "ranks ") + shown + (ranks.length > 8 ? " and " + (ranks.length - 8) + " more" : "");
}
function limitWords(limits) {
  const same = limits.same, words = [];
  if (same.count > 0)
    words.push("the newest failure came " + plural(same.count, "time") + " in a row; at the same step, " + same.tries + " times are one too many (then: " + same.then + ")");
  else words.push("the same failure may come " + plural(same.tries, "time") + " in a row at the same step (then: " + same.then + ")");
  for (const b of limits.budgets) words.push(b.kind + ": " + b.count + " of " + b.most + " within " + duration(limits.window_s) + " of training");
  return "Limits: " + words.join("; ") + ".";
}
