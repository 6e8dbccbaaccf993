// Where Ray lets everybody in: who is signed in goes on to the page at once, who is not is asked for the token.
const PAGE = "../../checkpoints";
const goOn = () => location.replace(PAGE + location.hash);
fetch("../../" + API, { cache: "no-store", credentials: "same-origin" }).then(
  (answer) => { if (answer.status === 401 || answer.status === 403) askToken($("main"), "../../api/authenticate", goOn); else goOn(); },
  () => $("main").replaceChildren(el("p", { class: "card" }, "No answer from the dashboard: load this page again.")),
);
