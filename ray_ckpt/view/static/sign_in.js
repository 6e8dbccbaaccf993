// Asks for the token of Ray's dashboard and hands it to Ray, as the dashboard's own page does; nothing here keeps it.
function askToken(box, address, done) {
  if (box.querySelector("form")) return;
  const input = el("input", { id: "token", type: "password", autocomplete: "current-password", required: true });
  const said = el("p", { class: "failing", role: "alert" });
  const send = async (event) => {
    event.preventDefault();
    const token = input.value.trim();
    if (!token) return;
    said.textContent = "";
    try {
      const answer = await fetch(address, { method: "POST", headers: { Authorization: "Bearer " + token }, credentials: "same-origin", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) { said.textContent = "Ray does not take this token (" + answer.status + ")."; return; }
    } catch (error) { said.textContent = "No answer from the dashboard, try again."; return; }
    box.replaceChildren();
    done();
  };
  box.replaceChildren(el("section", { class: "card" }, el("form", { on: { submit: send } },
    el("h2", {}, "This Ray asks for its token"),
    el("p", { class: "soft" }, "It is the one of the Ray dashboard: whoever may submit jobs has it, on the head node in ~/.ray/auth_token."),
    el("p", { class: "controls" }, el("label", { for: "token" }, "Token"), input, el("button", { class: "plain" }, "Sign in")), said)));
  input.focus();
}
