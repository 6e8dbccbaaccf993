// Asking the dashboard again and again, or showing what was frozen into the page.
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
  if (answer.status === 401 || answer.status === 403) {
    askToken($("ask"), "api/authenticate", look);
    throw new Error("not signed in");
  }
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
    $("ask").replaceChildren();
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
  $("ask").remove();
  drawDetail();
  tick();
} else {
  addEventListener("hashchange", () => { forget(); look(); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  setInterval(tick, 1000);
  look();
}
