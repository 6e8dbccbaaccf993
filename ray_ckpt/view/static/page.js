"use strict";
// Every text is put in by textContent or as an attribute: names and causes come from users.
(() => {
  const frozen = JSON.parse(document.getElementById("data").textContent);
  const POLL_MS = 2000, BEHIND_MS = 300, HIDDEN_MS = 15000, PAGE_ROWS = 50;
  const API = "/api/ray_ckpt/runs";
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

  // ---- text -------------------------------------------------------------------------------------
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

  // ---- elements ---------------------------------------------------------------------------------
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

  // ---- list of runs -----------------------------------------------------------------------------
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

  // ---- one run ----------------------------------------------------------------------------------
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

  // ---- charts -----------------------------------------------------------------------------------
  // A chart is drawn in pixels of its box, so that its text is as large as the page's.
  function chart(label, height, draw, items, say) {
    const image = svg("svg", { height, role: "img", "aria-label": label, tabindex: "0" });
    const readout = el("p", { class: "readout", "aria-live": "polite" }, "point at the chart, or use the arrow keys");
    let xOf = null, at = -1, width = 0;
    const render = () => {
      width = image.clientWidth;
      if (!width) return;
      image.setAttribute("viewBox", "0 0 " + width + " " + height);
      const drawing = draw(width, height);
      xOf = drawing.xOf;
      image.replaceChildren(...drawing.nodes);
      if (at >= 0) show(at);
    };
    function show(i) {
      at = Math.max(0, Math.min(items.length - 1, i));
      image.querySelector(".cursor")?.remove();
      if (!items.length || !xOf) return;
      const x = xOf(items[at]);
      image.append(svg("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: height - 18 }));
      readout.textContent = say(items[at]);
    }
    image.addEventListener("pointermove", (event) => {
      if (!items.length || !xOf) return;
      const x = event.clientX - image.getBoundingClientRect().left;
      let low = 0, high = items.length - 1;
      while (low < high) { const mid = (low + high) >> 1; if (xOf(items[mid]) < x) low = mid + 1; else high = mid; }
      if (low > 0 && x - xOf(items[low - 1]) < xOf(items[low]) - x) low--;
      show(low);
    });
    image.addEventListener("keydown", (event) => {
      const last = items.length - 1;
      const to = { ArrowLeft: (at < 0 ? last + 1 : at) - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (to !== undefined) { event.preventDefault(); show(to); }
    });
    new ResizeObserver(() => { if (image.clientWidth !== width) render(); }).observe(image);
    return [image, readout];
  }
  function timeTicks(from, to, width, x, y) {
    const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2419200];
    const most = Math.max(2, Math.floor(width / 110));
    const step = steps.find((s) => (to - from) / s <= most) || (to - from) / most;
    const shift = new Date(from * 1000).getTimezoneOffset() * 60;
    const nodes = [];
    for (let t = Math.ceil((from - shift) / step) * step + shift; t <= to; t += step) {
      const text = step >= 86400 ? day(t).slice(5) : to - from > 86400 ? day(t).slice(5) + " " + clock(t, false) : clock(t, step < 60);
      nodes.push(svg("line", { class: "axis", x1: x(t), x2: x(t), y1: y, y2: y + 4 }),
        svg("text", { x: Math.min(x(t), width - 30), y: y + 15, "text-anchor": x(t) < 20 ? "start" : "middle" }, text));
    }
    return nodes;
  }
  function timelineCard() {
    const attempts = detail.attempts, stops = detail.interruptions, now = detail.run.present;
    const head = el("h3", {}, "Workers over time");
    if (!attempts.length) return el("section", { class: "card" }, head, el("p", { class: "soft" }, "no attempt has begun yet"));
    const from = Math.min(...attempts.map((a) => a.started_at));
    const to = Math.max(from + 1, now.last_time, ...attempts.map((a) => a.ended_at || 0));
    const most = Math.max(1, ...attempts.map((a) => a.world_size));
    const failed = stops.filter((s) => !s.planned).length;
    const byGeneration = new Map();
    for (const stop of stops) if (!byGeneration.has(stop.generation)) byGeneration.set(stop.generation, stop);
    const draw = (width, height) => {
      const left = 26, base = height - 34, x = (t) => left + ((t - from) / (to - from)) * (width - left - 8);
      const y = (w) => base - (w / most) * (base - 8);
      const nodes = [svg("line", { class: "axis", x1: left, x2: width, y1: base, y2: base }),
        svg("text", { x: 0, y: y(most) + 8 }, most), svg("text", { x: 0, y: base }, "0")];
      const seen = new Set();  // thousands of attempts are no more than the pixels of the chart
      const thin = attempts.length > width / 8 ? " thin" : "", apart = stops.length > width / 8 ? 8 : 1;
      for (const a of attempts) {
        const end = a.ended_at || to, began = a.restored_at || end;
        const box = (t0, t1, name) => {
          const key = name + Math.round(x(t0)) + "-" + Math.round(x(t1)) + "-" + a.world_size;
          if (t1 < t0 || seen.has(key)) return;
          seen.add(key);
          nodes.push(svg("rect", { class: name + thin, x: x(t0), y: y(a.world_size), width: Math.max(1, x(t1) - x(t0)), height: base - y(a.world_size) }));
        };
        box(a.started_at, Math.min(began, end), "starting");
        if (known(a.restored_at)) box(began, end, "bar");
      }
      for (const s of stops) {
        const px = apart * Math.round(x(Math.min(s.time, to)) / apart), key = px + (s.planned ? "p" : "f");
        if (seen.has(key)) continue;
        seen.add(key);
        nodes.push(s.planned
          ? svg("path", { class: "planned", d: `M${px} ${base + 3}l5 5l-5 5l-5 -5z` })
          : svg("path", { class: "fail", d: `M${px} ${base + 2}l5.5 10h-11z` }));
      }
      return { nodes: [...nodes, ...timeTicks(from, to, width, x, base + 15).filter((n) => n.tagName === "text")], xOf: (a) => x(a.started_at) };
    };
    const say = (a) => attemptWords(a, byGeneration.get(a.generation), to);
    const label = plural(attempts.length, "attempt") + " and " + plural(stops.length, "interruption") + ", up to " + plural(most, "worker");
    const body = chart(label, 150, draw, attempts, say);
    const legend = el("ul", { class: "legend soft" }, el("li", {}, "\u25b2 failure (" + failed + ")"), el("li", {}, "\u25c7 planned (" + (stops.length - failed) + ")"), el("li", {}, "dashed: starting"));
    return el("section", { class: "card" }, head, body, legend, attemptList(attempts, byGeneration, to));
  }
  function attemptWords(a, stop, to) {
    const end = a.ended_at || to, began = known(a.from_step) ? ", from step " + count(a.from_step) : ", never began";
    let words = "attempt " + a.generation + ": " + plural(a.world_size, "worker") + ", " + moment(a.started_at) + ", " + duration(end - a.started_at) + began;
    if (stop) words += "; ended by " + stop.kind + " at step " + count(stop.step) + ", " + stop.lost_steps + " lost: " + stop.cause;
    else if (a.end) words += "; " + a.end;
    return words;
  }
  function attemptList(attempts, byGeneration, to) {
    const box = el("details", { on: { toggle: () => { if (box.open && box.children.length === 1) {
      const newest = attempts.slice(-100).reverse();
      box.append(el("ol", { class: "lines" }, newest.map((a) => el("li", {}, el("time", {}, clock(a.started_at)), el("span", {}, attemptWords(a, byGeneration.get(a.generation), to))))));
      if (attempts.length > 100) box.append(el("p", { class: "soft" }, "the newest 100 of " + count(attempts.length)));
    } } } }, el("summary", {}, "Attempts in words"));
    return box;
  }
  function lossCard() {
    const points = detail.curve.points, head = el("h3", {}, "Loss");
    const finite = points.filter((p) => known(p[1]));
    if (!finite.length) return el("section", { class: "card" }, head, el("p", { class: "soft" }, "no step has been made yet"));
    const first = points[0][0], last = Math.max(first + 1, points[points.length - 1][0]);
    const highs = finite.map((p) => p[3]).sort((a, b) => a - b), lows = finite.map((p) => p[2]);
    const low = Math.min(...lows), top = highs[Math.min(highs.length - 1, Math.floor(highs.length * 0.99))];
    const high = top > low ? top : low + 1e-9 + Math.abs(low) * 0.01;
    const bad = points.reduce((sum, p) => sum + p[4], 0);
    const draw = (width, height) => {
      const left = 42, base = height - 20, x = (s) => left + ((s - first) / (last - first)) * (width - left - 8);
      const y = (v) => base - ((Math.min(v, high) - low) / (high - low)) * (base - 10);
      const nodes = [svg("line", { class: "axis", x1: left, x2: width, y1: base, y2: base })];
      for (const v of [low, (low + high) / 2, high]) nodes.push(svg("text", { x: 0, y: y(v) + 4 }, Number(v).toPrecision(3)));
      const seen = new Set();
      for (const r of detail.restarts) {
        const px = Math.round(x(r.step));
        if (px < left || seen.has(px)) continue;
        seen.add(px);
        const top = detail.restarts.length > width / 10 ? base - 8 : 6;  // a wall of lines would hide the curve
        nodes.push(svg("line", { class: "restart", x1: px, x2: px, y1: top, y2: base }));
      }
      const line = (from, pick) => from.map((p, i) => (i ? "L" : "M") + x(p[0]).toFixed(1) + " " + y(pick(p)).toFixed(1)).join("");
      nodes.push(svg("path", { class: "band", d: line(finite, (p) => p[3]) + line([...finite].reverse(), (p) => p[2]).replace("M", "L") + "Z" }));
      nodes.push(svg("path", { class: "mean", d: line(finite, (p) => p[1]) }));
      for (const p of points.filter((q) => q[4])) nodes.push(svg("path", { class: "fail", d: `M${x(p[0])} ${base - 1}l5 -9h-10z` }));
      nodes.push(svg("text", { x: left, y: height - 4 }, count(first)), svg("text", { x: width - 2, y: height - 4, "text-anchor": "end" }, "step " + count(last)));
      return { nodes, xOf: (p) => x(p[0]) };
    };
    const say = (p) => "step " + count(p[0]) + ": loss " + number(p[1]) + (detail.curve.stride > 1 ? ", " + number(p[2]) + " to " + number(p[3]) + " over " + detail.curve.stride + " steps" : "") + (p[4] ? ", " + p[4] + " not finite" : "");
    const label = "loss from " + number(finite[0][1]) + " at step " + count(finite[0][0]) + " to " + number(finite[finite.length - 1][1]) + " at step " + count(finite[finite.length - 1][0]);
    const legend = el("ul", { class: "legend soft" }, el("li", {}, "dashed: a restart (" + detail.restarts.length + ")"),
      detail.curve.stride > 1 && el("li", {}, "mean, lowest and highest of " + detail.curve.stride + " steps"), bad > 0 && el("li", { class: "failing" }, "\u25b2 not finite: " + bad));
    return el("section", { class: "card" }, head, chart(label, 150, draw, points, say), legend);
  }
  function goodputCard(g) {
    const buckets = Object.entries(g.buckets);
    if (!buckets.length || !g.wall_s) return null;
    const bar = el("div", { class: "goodput", role: "img", "aria-label": "goodput " + percent(g.goodput) + " of " + duration(g.wall_s) });
    const items = buckets.map(([name, s], i) => {
      const block = el("div", { class: "part" + (i % 6), title: name });
      block.style.flex = String(s / g.wall_s) + " 0 0";
      if (s > 0) bar.append(block);
      return el("li", {}, el("span", { class: "swatch part" + (i % 6), "aria-hidden": "true" }), name + ": " + duration(s) + ", " + percent(s / g.wall_s));
    });
    return el("section", { class: "card" }, el("h3", {}, "Goodput " + percent(g.goodput) + " of " + duration(g.wall_s)), bar, el("ul", { class: "legend" }, items));
  }

  // ---- table of checkpoints ---------------------------------------------------------------------
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
      ["verified", known(r.verified_at) ? "every byte read back " + moment(r.verified_at) : "not since its commit"],
      ["kept", keptWords(r)], ["pins", r.pins.join("; ")], ["guard", r.guard], ["size", known(r.bytes) ? bytes(r.bytes) + " in " + plural(r.files, "file") : null],
      ["stall", known(r.stall_s) ? duration(r.stall_s) : null], ["upload", known(r.upload_s) ? duration(r.upload_s) : null], ["loss", known(r.loss) ? number(r.loss) : null],
      ["workers", r.world_size], ["samples", known(r.sample_offset) ? count(r.sample_offset) : null], ["segment", r.segment],
      ["drilled", r.drilled ? (r.drilled.ok ? "ok in " + duration(r.drilled.seconds) : "FAILED: " + r.drilled.problem) + ", " + moment(r.drilled.time) : null]]);
  }
  function moved() {
    if (frozen) drawTable(); else look();
  }
  function linesCard(title, items, none, say) {
    const rows = items.map((item) => el("li", {}, el("time", { title: known(item.time) ? moment(item.time) : null }, known(item.time) ? when(item.time) : "-"), el("span", {}, say(item))));
    return el("section", { class: "card" }, el("h3", {}, title), rows.length ? el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, el("ol", { class: "lines" }, rows)) : el("p", { class: "soft" }, none));
  }
  const when = (s) => (nowS() - s < 72000 ? clock(s) : day(s).slice(5) + " " + clock(s, false));

  // ---- looking ----------------------------------------------------------------------------------
  const chosen = () => decodeURIComponent((location.hash.match(/^#run=(.*)$/) || ["", ""])[1]);
  function choose(id) {
    location.hash = "run=" + encodeURIComponent(id);
  }
  function forget() {
    detail = null;
    for (const name of Object.keys(drawn)) delete drawn[name];
    for (const name of Object.keys(tags)) delete tags[name];
    Object.assign(table, { offset: 0, show: "all" });
    table.open.clear();
    $("main").replaceChildren();
  }
  function tellLink() {
    const box = $("link");
    let text = "";
    if (frozen) text = "frozen " + moment(frozen.frozen_at) + ": a report, not live";
    else if (failure) text = failure + (lastGood ? "; what is below is " + duration((Date.now() - lastGood) / 1000) + " old" : "");
    else if (lastGood) text = "live";
    if (text && box.textContent !== text) box.textContent = text;
    box.classList.toggle("bad", Boolean(failure));
    $("main").classList.toggle("old", Boolean(failure));
  }
  // Only what was asked last in these words is what is shown: of anything else a 304 would not tell what it is.
  async function ask(path, name) {
    const known = tags[name] && tags[name].path === path ? tags[name].tag : null;
    const headers = known ? { "If-None-Match": known } : {};
    const answer = await fetch(path, { headers, cache: "no-store", credentials: "same-origin", signal: AbortSignal.timeout(20000) });
    const date = Date.parse(answer.headers.get("Date") || "");
    if (Number.isFinite(date) && Math.abs(date - Date.now()) > 3000) skewMs = date - Date.now();
    if (answer.status === 304) return null;
    if (answer.status === 401 || answer.status === 403) throw new Error("not signed in: open the Ray dashboard, enter its token, and come back");
    if (answer.status === 404) return undefined;
    if (!answer.ok) throw new Error("the dashboard answered " + answer.status);
    const body = await answer.json();
    tags[name] = { path, tag: answer.headers.get("ETag") };
    return body;
  }
  let timer = 0, asking = false, again = false;
  async function look() {
    if (asking) { again = true; return; }
    asking = true;
    clearTimeout(timer);
    let wait = POLL_MS;
    try {
      const runs = await ask(API, "list");
      if (runs) list = runs;
      if (list && !chosen() && list.runs.length === 1) history.replaceState(null, "", "#run=" + encodeURIComponent(list.runs[0].id));
      if (list) drawRuns();
      const id = chosen();
      if (id) {
        const query = new URLSearchParams({ offset: table.offset, limit: PAGE_ROWS, show: table.show });
        const found = await ask(API + "/" + encodeURIComponent(id) + "?" + query, "run");
        if (id === chosen()) {
          if (found === undefined) $("main").replaceChildren(el("p", { class: "card" }, "This run is not known to this Ray any more."));
          else if (found) { if (!detail) $("main").replaceChildren(); detail = found; drawDetail(); }
          if (detail && detail.run.behind_bytes + detail.checkpoints.behind > 0) wait = BEHIND_MS;
        }
      } else if (list && list.runs.length) {
        $("main").replaceChildren(el("p", { class: "card soft" }, "Choose a run above."));
      }
      failure = "";
      lastGood = Date.now();
    } catch (error) {
      failure = error instanceof TypeError || error.name === "TimeoutError" ? "no answer from the dashboard, trying again" : error.message;
    } finally {
      asking = false;
      tick();
      timer = setTimeout(look, again ? 0 : document.hidden ? HIDDEN_MS : wait);
      again = false;
    }
  }
  if (frozen) {
    detail = frozen;
    $("home").remove();
    $("runs").remove();
    drawDetail();
    tick();
  } else {
    addEventListener("hashchange", () => { forget(); look(); });
    document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
    setInterval(tick, 1000);
    look();
  }
})();
