// The list of lessons. A lesson begins in the room of its first step.
import { warn } from "/pages/address.js";
import { Link } from "/pages/link.js";
import { $, PATHS, fill, showRooms } from "/pages/page.js";
import { element } from "/pages/panel.js";
import { pack } from "/pages/state.js";
import { text } from "/pages/strings.js";

async function card({ name, steps }) {
  const words = text.lessons[name], [{ room, state }] = steps;
  const link = element("a", { className: "primary", href: `${PATHS[room]}#${await pack(state)}/${name}.0`, textContent: text.lessonStart });
  link.setAttribute("aria-label", text.lessonStartNamed(words.title));
  return element("article", { className: "card" },
    element("h2", { textContent: words.title }), element("p", { textContent: words.lead }),
    element("p", { className: "muted", textContent: text.lessonSteps(steps.length) }), link);
}

fill();
$("state").textContent = text.connecting;
const link = new Link(
  async ({ lessons }, all) => {
    showRooms("lessons", all);
    const shown = await Promise.all(lessons.filter(({ name }) => Object.hasOwn(text.lessons, name)).map(card));
    $("lessons").replaceChildren(...shown);
    $("state").textContent = text.connected;
    window.doxaStudio = { lessons, link };
  },
  (state, message) => {
    if (state === "lost") { $("state").textContent = text.lost; $("state").classList.add("lost"); }
    else if (state === "refused") warn(message);
  },
  "lessons",
);
