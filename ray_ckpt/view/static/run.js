// The list of runs, and one run from top to bottom.
function durableAge(run) { return run.newest_durable ? aged(run.newest_durable.at, "old") : "none"; }
function lastCost(run) {
  const last = run.last_interruption;
  if (!last) return "none";
  if (known(last.cost_s)) return last.kind + ", cost " + duration(last.cost_s);
  return last.kind + (last.over ? "" : ", not over");
}
function drawRuns() {
  const key = JSON.stringify([list, chosen()]);
  if (drawn.runs === key) return;
  drawn.runs = key;
  const notes = [...list.problems];
  if (list.left_out) notes.push(plural(list.left_out, "older run") + " in these folders are not shown");
  const problems = notes.map((text) => el("p", { class: "soft" }, text));
  if (!list.runs.length) {
    $("runs").replaceChildren(emptyState(), ...problems);
    return;
  }
  const head = ["Run", "Health", "State", "Step", "Workers", "Durable copy", "Last interruption"];
  const hide = ["", "", "mid", "mid", "wide", "", "wide"];
  const rows = list.runs.map((run) => {
    const cells = [
      el("button", { "aria-current": run.id === chosen() ? "true" : null, on: { click: () => choose(run.id) } }, run.name),
      mark(run.health), run.state, count(run.present.step), String(run.present.world_size || "-"),
      durableAge(run), lastCost(run),
    ];
    const row = cells.map((cell, i) => el("td", { class: (i === 3 || i === 4 ? "num " : "") + hide[i] }, cell));
    return el("tr", { class: run.id === chosen() ? "chosen" : "" }, row);
  });
  const focused = document.activeElement && $("runs").contains(document.activeElement)
    ? [...$("runs").querySelectorAll("button")].indexOf(document.activeElement) : -1;
  const heads = head.map((text, i) => el("th", { scope: "col", class: (i === 3 || i === 4 ? "num " : "") + hide[i] }, text));
  $("runs").replaceChildren(
    el("div", { class: "card scroll" }, el("table", {}, el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows))),
    ...problems,
  );
  if (focused >= 0) [...$("runs").querySelectorAll("button")][focused]?.focus();
}
function emptyState() {
  const where = list.storage.length ? " Looked through: " + list.storage.join(", ") + "." : "";
  return el("div", { class: "card" },
    el("p", { class: "big" }, "No runs yet"),
    el("p", {}, "A run of ray_ckpt that starts in this Ray appears here by itself, for as long as this Ray lives."),
    el("p", { class: "soft" }, "To see runs of earlier Rays too, start Ray with RAY_CKPT_STORAGE=FOLDER in its environment." + where));
}

function drawDetail() {
  const run = detail.run, now = run.present;
  document.title = SHAPES[run.health] + " " + run.name + " - checkpoints";
  part("title", [run.name, run.state, run.folder, run.remote, run.behind_bytes], () =>
    el("div", { class: "title" }, el("h2", {}, run.name), el("span", {}, run.state),
      el("span", { class: "soft" }, run.remote ? run.remote + " (records in " + run.folder + ")" : run.folder),
      run.behind_bytes > 0 && el("span", { class: "attention" }, "still reading: " + bytes(run.behind_bytes) + " of records to go")));
  part("tiles", [run.health, run.reasons, run.newest_durable, run.last_interruption], () =>
    el("div", { class: "tiles" }, healthTile(run), durableTile(run), interruptionTile(run.last_interruption)));
  part("facts", [now, detail.interval, run.counts, run.goodput.goodput, detail.checkpoints.bytes, detail.checkpoints.states], () => facts(run));
  part("charts", [detail.attempts, detail.interruptions, detail.curve, detail.restarts, now.last_time], () =>
    el("div", { class: "two" }, timelineCard(), lossCard()));
  part("goodput", run.goodput, goodputCard);
  part("alerts", [detail.alerts, detail.drills], () =>
    el("div", { class: "two" },
      linesCard("Alerts, newest first", detail.alerts, "none", (a) => a.line),
      linesCard("Restore drills, newest first", detail.drills, "none yet: ray-ckpt drill RUN", (d) => (d.ok ? "\u25cf " : "\u25a0 ") + d.line)));
  part("incidents", detail.incidents, incidentsCard);
  drawTable();
  part("story", detail.story, () => linesCard("What happened, newest first", detail.story, "nothing yet", (s) => s.line));
}
function healthTile(run) {
  const [first, ...rest] = run.reasons;
  return el("section", { class: "card tile" }, el("h3", {}, "Is it healthy?"), el("p", { class: "big" }, mark(run.health)),
    el("p", {}, first), rest.length > 0 && el("ul", {}, rest.map((reason) => el("li", {}, reason))));
}
function durableTile(run) {
  const copy = run.newest_durable, body = [el("h3", {}, "Newest durable copy")];
  if (!copy) {
    body.push(el("p", { class: "big" }, run.counts.commits ? "none" : "none yet"),
      run.state !== "finished" && el("p", { class: "soft" }, "a failure now would cost every step"));
  } else {
    const lag = copy.steps_since ? plural(copy.steps_since, "step") + " since" : "no step since";
    body.push(el("p", { class: "big" }, known(copy.at) ? [aged(copy.at, "old"), " old"] : "age unknown"),
      el("p", {}, "step " + count(copy.step) + ", " + lag),
      el("p", { class: "soft" }, known(copy.verified_at) ? ["every byte read back ", aged(copy.verified_at)] : "not read back yet"));
  }
  return el("section", { class: "card tile" }, body);
}
function interruptionTile(last) {
  const body = [el("h3", {}, "What did the last interruption cost?")];
  if (!last) return el("section", { class: "card tile" }, body, el("p", { class: "big" }, "none so far"));
  if (known(last.cost_s)) body.push(el("p", { class: "big" }, duration(last.cost_s)));
  else if (!last.over && known(last.since) && detail.run.state !== "stopped")
    body.push(el("p", { class: "big attention" }, aged(last.since, "old"), ", not over"));
  else body.push(el("p", { class: "big" }, plural(last.lost_steps, "step")));
  const steps = last.lost_steps ? plural(last.lost_steps, "step") + " lost" : "no step lost";
  const again = last.redone_s > 0 ? ", " + duration(last.redone_s) + " of it steps done again" : "";
  body.push(
    el("p", {}, (last.planned ? "\u25c7 planned: " : "\u25b2 ") + last.kind + ", ", aged(last.time), ": " + steps + again),
    el("p", { class: "soft" }, last.cause));
  return el("section", { class: "card tile" }, body);
}
function facts(run) {
  const now = run.present, plan = detail.interval, c = run.counts;
  const stops = Object.entries(c.interruptions).map(([kind, n]) => n + " " + kind).join(", ");
  const states = Object.entries(detail.checkpoints.states).map(([state, n]) => count(n) + " " + state).join(", ");
  const items = [
    ["step", count(now.step)], ["loss", number(now.loss)], ["workers", now.world_size || "-"], ["attempt", now.generation || "-"],
    ["step time", known(now.step_time_s) ? duration(now.step_time_s) : "-"],
    ["last step", aged(now.last_step_at)],
    ["goodput", percent(run.goodput.goodput)],
    ["next save near step", run.state === "training" && plan ? count(plan.next_save_step) : "-"],
    ["stall / upload", plan && known(plan.stall_s) ? duration(plan.stall_s) + " / " + duration(plan.upload_s) : "-"],
    ["interruptions", stops || "none"], ["steps lost", count(c.lost_steps)],
    ["saves failed", count(c.failed_saves)], ["checkpoints", states || "none"], ["their size", bytes(detail.checkpoints.bytes)],
  ];
  const why = plan
    ? [el("p", { class: "why" }, el("strong", {}, "Saves every " + plural(plan.every_steps, "step") +
        (known(plan.interval_s) ? " (" + duration(plan.interval_s) + ")" : "")), " because ", plan.reason),
      plan.tiers.map((t) => el("p", { class: "why soft" }, t.reason))]
    : [];
  return el("section", { class: "card", "aria-label": "Now" }, el("dl", { class: "facts" }, items.map(([n, v]) => el("div", { class: typeof v === "string" && v.length > 16 ? "long" : null }, el("dt", {}, n), el("dd", {}, v)))), why.flat());
}
