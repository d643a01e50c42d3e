// Links to the rooms that are open.
import { text } from "/pages/strings.js";

export function showRooms(nav, open, here) {
  nav.setAttribute("aria-label", text.roomsLabel);
  nav.replaceChildren(...open.filter((name) => text.rooms[name]).map((name) => {
    const link = document.createElement("a");
    link.href = name === "functions" ? "/" : `/${name}`;
    link.textContent = text.rooms[name];
    if (name === here) link.setAttribute("aria-current", "page");
    return link;
  }));
}
