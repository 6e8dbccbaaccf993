// Workers over time, the loss, and where the time went.
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
