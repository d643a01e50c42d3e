// What the pages of rooms share: their paths, texts, colours.
import { text } from "/pages/strings.js";

export const $ = (id) => document.getElementById(id);
export const PATHS = { functions: "/", classification: "/classification", samplers: "/samplers", lessons: "/lessons", run: "/run", label: "/label" };
export const dark = matchMedia("(prefers-color-scheme: dark)");
export const calm = matchMedia("(prefers-reduced-motion: reduce)");

export function finite(v, low = -1e6, high = 1e6) { return typeof v === "number" && v >= low && v <= high; }

export function colours(names) {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return { dark: dark.matches, ...Object.fromEntries(["font", ...names].map((name) => [name, read(name)])) };
}

export function fill() {
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = text[element.dataset.text];
  for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", text[element.dataset.label]);
}

// The links to the other rooms: those that the server has.
export function showRooms(current, known) {
  const links = Object.entries(PATHS).filter(([name]) => name in known).map(([name, path]) => {
    const link = Object.assign(document.createElement("a"), { href: path, textContent: text.rooms[name] });
    if (name === current) link.setAttribute("aria-current", "page");
    return link;
  });
  $("rooms").replaceChildren(...links);
}

