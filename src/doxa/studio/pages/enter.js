// Exchanges the token of the address for a session, and leaves no token in the history.
import { text } from "/pages/strings.js";

const shown = document.getElementById("message");
const token = new URLSearchParams(location.search).get("token");
const answer = await fetch("/enter", {
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify({ token }),
}).catch(() => null);
if (answer && answer.ok) location.replace((location.pathname === "/enter" ? "/" : location.pathname) + location.hash);
else {
  const said = answer && (await answer.json().catch(() => ({}))).error?.message;
  shown.textContent = said || text.noServer;
}
